"""Safetensors files as one set of tensors, read part by part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshweave.base.errors import DescriptionError, UnsupportedError
from meshweave.nn.weights.blocks import Block, boxes_of, sizes_of

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class Checkpoint:
    """Tensors in safetensors files: one file, an index of several, or a folder with model.safetensors or an index.

    Raises:
        DescriptionError: there is no such file, one cannot be read or is not whole, or an index names tensors or
            files that are not there.
        UnsupportedError: safetensors is not installed.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._file_of = self._files()
        self._open: dict[Path, Any] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors."""
        return tuple(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor as it is stored. Raises KeyError where there is none of the name."""
        return tuple(self._part(name).get_shape())

    def read(self, name: str, block: Block) -> Tensor:
        """Return a part of the stored tensor `name` on the CPU, in the part's shape; only its bytes are read.

        Args:
            name: the tensor's name in the checkpoint.
            block: for each dim the (start, stop) ranges of positions of the part, in the order in which the part
                has them; () for the whole tensor.

        Raises KeyError where there is no tensor of the name.
        """
        if not block:
            whole: Tensor = self._opened(name).get_tensor(name)
            return whole
        part, sizes = self._part(name), sizes_of(block)
        boxes = list(boxes_of(block))
        if len(boxes) == 1:
            only: Tensor = part[boxes[0][1]]
            return only
        dtype = part[tuple(slice(0, 0) for _ in sizes)].dtype
        out = torch.empty(sizes, dtype=dtype)
        for local, whole_box in boxes:
            out[local] = part[whole_box]
        return out

    def _part(self, name: str) -> Any:
        return self._opened(name).get_slice(name)

    def _opened(self, name: str) -> Any:
        path = self._file_of[name]
        if path not in self._open:
            self._open[path] = _opened_file(path)
        return self._open[path]

    def _files(self) -> dict[str, Path]:
        path = self.path
        if path.is_dir():
            index, single = path / INDEX_FILE, path / SINGLE_FILE
            path = index if index.is_file() else single
        if not path.is_file():
            raise DescriptionError(
                f"{self.path}: no safetensors here; give a .safetensors file, or a folder with {SINGLE_FILE} or "
                f"{INDEX_FILE}"
            )
        if path.suffix != ".json":
            with _opened_file(path) as opened:
                return dict.fromkeys(opened.keys(), path)
        try:
            weight_map = json.loads(path.read_text())["weight_map"]
            files = {str(name): path.parent / str(file) for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise DescriptionError(f"{path}: no index of safetensors; it has no 'weight_map'") from None
        away = next((file for file in weight_map.values() if str(file) != Path(str(file)).name), None)
        if away is not None:
            raise DescriptionError(f"{path}: names the file '{away}', and its files lie beside it")
        gone = sorted({file.name for file in files.values() if not file.is_file()})
        if gone:
            raise DescriptionError(f"{path}: names {', '.join(gone)}, which {path.parent} does not have")
        for file in sorted(set(files.values())):
            with _opened_file(file) as opened:
                lacking = sorted({name for name, own in files.items() if own == file} - {*opened.keys()})
            if lacking:
                more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
                raise DescriptionError(
                    f"{path}: {file.name} has no {lacking[0]}{more}, which the index says it has"
                )
        return files


def _opened_file(path: Path) -> Any:
    """Return a safetensors file, opened. Raises DescriptionError where it is none, or not a whole one."""
    library = safetensors_library()
    try:
        return library.safe_open(str(path), framework="pt")
    except PermissionError:
        raise DescriptionError(f"{path}: no permission to read it") from None
    except (library.SafetensorError, OSError) as error:
        raise DescriptionError(f"{path}: no whole file of safetensors ({error}); copy it again") from None


def safetensors_library() -> Any:
    """Return the safetensors package. Raises UnsupportedError where it is not installed."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise UnsupportedError("safetensors is not installed: pip install 'meshweave[train]'") from None
    return safetensors
