"""Cosines and sines of positions by the model's own module, which may have been made without memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.algorithms.block.roles import Side
from meshweave.base.errors import UnsupportedError
from meshweave.nn.parallel.strategy import LayerStrategy


class UnfilledBuffers:
    """Buffers of modules that were made on the meta device, and that no checkpoint gives values.

    `fill`, before the first forward pass, takes the values from a new module of the same class and `config`.

    Args:
        model: the model.
        paths: the names of the modules in the model.
        known: {(name of module, name of buffer): values} for classes that cannot be made of a `config` alone; None
            for no values.
    """

    def __init__(
        self, model: nn.Module, paths: Sequence[str], known: Mapping[tuple[str, str], Tensor] | None = None
    ) -> None:
        self._known = known or {}
        modules = {path: model.get_submodule(path) for path in paths}
        self._names = {
            (path, name): module
            for path, module in modules.items()
            for name, buffer in module.named_buffers()
            if buffer.is_meta
        }

    def fill(self, device: torch.device) -> None:
        """Give values, on `device`, to those of the buffers that still have none. Later calls do nothing.

        A buffer has none while it is on the meta device, or was allocated and never written. Raises
        UnsupportedError, which names a buffer, where its values cannot be computed.
        """
        for (path, name), module in self._names.items():
            buffer = dict(module.named_buffers())[name]
            if not buffer.is_meta and buffer._version:
                continue
            made = _anew(module, device)
            values = dict(made.named_buffers()).get(name) if made is not None else None
            values = self._known.get((path, name)) if values is None else values
            if values is None or values.shape != buffer.shape:
                raise UnsupportedError(
                    f"{path}.{name} was made on the meta device, is in no checkpoint, and cannot be computed "
                    "anew; copy its values into it before the first forward pass"
                )
            owner, _, last = name.rpartition(".")
            module.get_submodule(owner)._buffers[last] = values.to(device, buffer.dtype)
        self._names = {}


def _anew(module: nn.Module, device: torch.device) -> nn.Module | None:
    """Return a module of the same class and configuration, with memory; None where the class takes none."""
    config: Any = getattr(module, "config", None)
    if config is None:
        return None
    try:
        with torch.device(device):
            made: nn.Module = type(module)(config=config)
    except Exception:
        return None
    return made


class Rotary:
    """The rotary module of a model; called, it gives the cosines and sines of this rank's positions.

    The module itself is called with (x, positions) for all positions, since some kinds depend on the last.

    Args:
        model: the model, or a part of it with the module.
        path: the name of the module in the model.
        width: features of a head.

    Raises:
        UnsupportedError: it does not return a cosine and a sine for each feature of a head.
    """

    def __init__(self, model: nn.Module, path: str, strategy: LayerStrategy, width: int) -> None:
        self.path, self.strategy = path, strategy
        self.module = model.get_submodule(path)
        self.unfilled = UnfilledBuffers(model, [path])
        self._try(model, width)

    def _try(self, model: nn.Module, width: int) -> None:
        like = next(model.parameters())
        own = next((tensor.device for tensor in (*self.module.buffers(), *self.module.parameters())), None)
        device = own or torch.device("cpu" if like.is_meta else like.device)
        x = torch.empty(1, 1, width, dtype=like.dtype, device=device)
        try:
            cos, sin = self.module(x, torch.arange(2, device=device)[None])
            shapes = tuple(cos.shape[-2:]), tuple(sin.shape[-2:])
        except (TypeError, ValueError, AttributeError, RuntimeError, KeyError) as error:
            raise UnsupportedError(
                f"{self.path}: {type(self.module).__name__} fails on (x, positions): {error}"
            ) from None
        if shapes != ((2, width), (2, width)) or cos.ndim != 3:
            raise UnsupportedError(
                f"{self.path}: {type(self.module).__name__} makes cosines of {shapes[0][-1]} features for heads "
                f"of {width}; rotary embedding of a part of a head is not computed"
            )

    def __call__(self, x: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
        """Return (cosines, sines), each (1, positions, head width), of the positions of this rank's queries.

        `x` gives device and dtype; `sequence` is the global number of tokens of a sequence.
        """
        self.unfilled.fill(x.device)
        # All positions: some kinds of rotary embedding follow from the last one.
        cos, sin = self.module(x, torch.arange(sequence, device=x.device)[None])
        start, stop = self.strategy.span(Side("sequence", sequence), self.strategy.roles.core(True))
        return cos[:, start:stop], sin[:, start:stop]
