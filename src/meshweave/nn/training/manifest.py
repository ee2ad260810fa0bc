"""What stands in the manifest of a checkpoint, and what must hold of it before anything is made of it.

A manifest is one JSON text. It begins with the SHA-256 of all that follows that, so that no bit of it changes
unnoticed. Then come the version of the format, the step, the serial and parent (see `Manifest`), the name, dtype
and shape of each tensor, of each file its bytes, its CRC-32 and the boxes of tensors in it, one after another
without a gap, and the notes. A reader checks all of it: files have the names that writers give, boxes tile each
tensor, and the bytes of a file are those of its boxes.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import re
import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshweave.base.errors import CheckpointError
from meshweave.base.limits import MANIFEST_BRACKETS, MANIFEST_BYTES, MANIFEST_COMMAS

MANIFEST = "manifest.json"
FORMAT = 2
MAX_STEP = 10**15
_OLD_FORMAT = "is of an earlier format, which is pickled and not read; the guide (checkpoints.md) converts it"
_HEAD = re.compile(rb'\{"sha256": "([0-9a-f]{64})", ')
_FILE = re.compile(r"rank-[0-9]{5,9}\.bin")
_MAX_DIMS = 64
_PRIME = (1 << 61) - 1

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "complex128": 16,
    "complex64": 8,
    "bool": 1,
    **{f"{sign}int{8 * size}": size for sign in ("", "u") for size in (1, 2, 4, 8)},
    **{f"float8_{kind}": 1 for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")},
}
"""The bytes of an element of each dtype that checkpoints have, by the name that torch gives the dtype."""


@dataclass(frozen=True)
class WrittenTensor:
    """The dtype and the shape of a whole tensor in a checkpoint.

    Attributes:
        dtype: its name, such as "float32".
        shape: the global shape.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class SavedBox:
    """A box of a tensor in a file: a range of positions along each dim.

    Attributes:
        name: that of the tensor.
        offsets: for each dim its first position in the whole tensor.
        sizes: for each dim the number of positions.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class SavedFile:
    """A file of boxes, one after another, each in row-major order, little-endian.

    Attributes:
        num_bytes: the size of the file.
        crc32: the CRC-32 of all its bytes.
        boxes: the boxes, in their order in the file.
    """

    num_bytes: int
    crc32: int
    boxes: tuple[SavedBox, ...]


@dataclass(frozen=True)
class Manifest:
    """What is written beside the files of a checkpoint.

    Attributes:
        step: how many steps were trained.
        serial: one more than the highest in the folder when it was saved; the last saved has the highest.
        parent: the serial of the checkpoint that this training saved or loaded last before; None for its first.
        tensors: all tensors, by name.
        files: all files besides the manifest, by name.
        notes: what is the same on all ranks and no tensor, as JSON.
        digest: the SHA-256, in hexadecimal, that stands in the text it was read from; "" where it was not read.
    """

    step: int
    serial: int
    parent: int | None
    tensors: Mapping[str, WrittenTensor]
    files: Mapping[str, SavedFile]
    notes: Mapping[str, Any]
    digest: str = ""
    """The SHA-256 of the text, where it was read from one."""

    def text(self) -> bytes:
        """Return the bytes of the manifest's file.

        Raises CheckpointError where the bytes, brackets or commas are more than a reader takes.
        """
        numbers = {name: number for number, name in enumerate(self.tensors)}
        value = {
            "format": FORMAT,
            "step": self.step,
            "serial": self.serial,
            "parent": self.parent,
            "tensors": [[name, each.dtype, each.shape] for name, each in self.tensors.items()],
            "files": {
                name: {
                    "bytes": file.num_bytes,
                    "crc32": file.crc32,
                    "boxes": [[numbers[box.name], *box.offsets, *box.sizes] for box in file.boxes],
                }
                for name, file in self.files.items()
            },
            "notes": self.notes,
        }
        body = json.dumps(value, separators=(",", ":")).encode()[1:]
        text = b'{"sha256": "%s", ' % hashlib.sha256(body).hexdigest().encode() + body
        _check_extent(text)
        return text

    @classmethod
    def parse(cls, text: bytes) -> Manifest:
        """Return the manifest that `text`, the bytes of its file, says.

        Raises CheckpointError, which says what is wrong with the bytes.
        """
        value = _checked_json(text)
        if _int(value, "format", 0, 1 << 31) != FORMAT:
            raise CheckpointError(f"is of format {value['format']}, and this version reads format {FORMAT}")
        keys = {"sha256", "format", "step", "serial", "parent", "tensors", "files", "notes"}
        if value.keys() != keys:
            raise CheckpointError(f"has not the keys {', '.join(sorted(keys))}")
        tensors = dict(_tensors(value["tensors"]))
        names = list(tensors)
        files = {}
        for name, file in _of(value["files"], dict, "files").items():
            if not _FILE.fullmatch(name):
                raise CheckpointError(f"names a file '{name}', and files are called rank-00000.bin and so on")
            files[name] = _file(name, file, names, tensors)
        _check_tiled(tensors, files)
        return cls(
            step=_int(value, "step", 0, MAX_STEP),
            serial=_int(value, "serial", 0, 1 << 53),
            parent=None if value["parent"] is None else _int(value, "parent", 0, 1 << 53),
            tensors=tensors,
            files=files,
            notes=_of(value["notes"], dict, "notes"),
            digest=value["sha256"],
        )

    def boxes(self) -> dict[str, list[tuple[str, int, SavedBox]]]:
        """Return {tensor name: boxes}, each (name of its file, offset in bytes of the box in the file, box)."""
        by_tensor: dict[str, list[tuple[str, int, SavedBox]]] = {name: [] for name in self.tensors}
        for name, file in self.files.items():
            at = 0
            for box in file.boxes:
                by_tensor[box.name].append((name, at, box))
                at += math.prod(box.sizes) * ITEM_BYTES[self.tensors[box.name].dtype]
        return by_tensor


def checked_step(step: int) -> int:
    """Return `step` as an int. Raises CheckpointError where it is no integer of 0 to `MAX_STEP` - 1."""
    try:
        if isinstance(step, bool):
            raise TypeError
        number = operator.index(step)
    except TypeError:
        raise CheckpointError(f"a step is an integer, and not {step!r}") from None
    if not 0 <= number < MAX_STEP:
        raise CheckpointError(f"a step is an integer of 0 to {MAX_STEP - 1}, and not {step!r}")
    return number


def file_name(rank: int) -> str:
    """Return the name of the file that a global rank writes, such as rank-00003.bin."""
    return f"rank-{rank:05d}.bin"


def checked_notes(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return notes as they are after a round trip through JSON, such as lists for tuples.

    Raises CheckpointError where they are no JSON values.
    """
    try:
        _check_keys(notes)
        text = json.dumps(dict(notes))
        read = _loads(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the notes are no JSON: {error}") from None
    return dict(read)


def _check_keys(value: Any) -> None:
    """Raise TypeError where a table has a key that is no text, which JSON would make one, and not back."""
    if isinstance(value, dict):
        if (key := next((key for key in value if not isinstance(key, str)), None)) is not None:
            raise TypeError(f"{key!r} is a key of a table, and keys are text")
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            _check_keys(each)


def _check_extent(text: bytes) -> None:
    """Raise CheckpointError where a text is larger than manifests may be."""
    counts = (
        (MANIFEST_BYTES, len(text)),
        (MANIFEST_BRACKETS, text.count(b"[") + text.count(b"{")),
        (MANIFEST_COMMAS, text.count(b",")),
    )
    for limit, count in counts:
        if count > limit.most:
            raise CheckpointError(limit.refusal(count))


def _loads(text: bytes) -> Any:
    """Return the value of a JSON text in which no key stands twice. Raises ValueError and RecursionError."""

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            raise ValueError("a key stands twice in one table")
        return values

    return json.loads(text.decode(), object_pairs_hook=table)


def _checked_json(text: bytes) -> dict[str, Any]:
    """Return the table that a manifest is, once its checksum and extent are right. Raises CheckpointError."""
    _check_extent(text)
    head = _HEAD.match(text)
    if head is None:
        raise CheckpointError(_OLD_FORMAT if text.startswith(b'{"step": ') else "is no manifest")
    if hashlib.sha256(text[head.end() :]).hexdigest().encode() != head[1]:
        raise CheckpointError("has other bytes than were written")
    try:
        return dict(_of(_loads(text), dict, "it"))
    except CheckpointError:
        raise
    except RecursionError:
        raise CheckpointError("has lists or tables nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"is no JSON: {error}") from None


def _of(value: Any, kind: type[Any], what: str) -> Any:
    if type(value) is not kind:
        raise CheckpointError(f"has a {type(value).__name__} for {what}, and not a {kind.__name__}")
    return value


def _int(values: Any, key: Any, low: int, end: int) -> int:
    """Return `values[key]`, an integer from `low` on and below `end`."""
    value = values.get(key) if isinstance(values, dict) else values[key]
    if type(value) is not int or not low <= value < end:
        shown = (
            value if type(value) is not int or value.bit_length() < 64 else "a number of more than 64 bits"
        )
        raise CheckpointError(f"has {shown!r} for {key}, and not an integer of {low} to {end - 1}")
    return value


def _tensors(value: Any) -> Iterator[tuple[str, WrittenTensor]]:
    names = set()
    for row in _of(value, list, "tensors"):
        if type(row) is not list or len(row) != 3 or type(row[0]) is not str or type(row[2]) is not list:
            raise CheckpointError("has a tensor that is not a name, a dtype and a shape")
        name, dtype, shape = row
        if type(dtype) is not str or dtype not in ITEM_BYTES:
            raise CheckpointError(
                f"has '{name}' of a dtype {str(dtype)[:40]!r}, which checkpoints do not have"
            )
        if name in names:
            raise CheckpointError(f"has the tensor '{name}' twice")
        names.add(name)
        if len(shape) > _MAX_DIMS:
            raise CheckpointError(f"has '{name}' of {len(shape)} dims, and {_MAX_DIMS} is the limit")
        sizes = tuple(_int(shape, dim, 0, 1 << 62) for dim in range(len(shape)))
        if math.prod(sizes) * ITEM_BYTES[dtype] >= 1 << 62:
            raise CheckpointError(f"has '{name}' of more bytes than there can be")
        yield name, WrittenTensor(dtype, sizes)


def _file(name: str, value: Any, names: list[str], tensors: Mapping[str, WrittenTensor]) -> SavedFile:
    """Return what a manifest says of a file. Raises CheckpointError."""
    if _of(value, dict, name).keys() != {"bytes", "crc32", "boxes"}:
        raise CheckpointError(f"has not bytes, crc32 and boxes for {name}")
    num_bytes, boxes = 0, []
    for row in _of(value["boxes"], list, f"the boxes of {name}"):
        tensor = names[_int(_of(row, list, f"a box of {name}") or [None], 0, 0, len(names))]
        whole = tensors[tensor]
        dims = len(whole.shape)
        if len(row) != 1 + 2 * dims:
            raise CheckpointError(f"has a box of '{tensor}' that has not {dims} offsets and sizes")
        for dim, size in enumerate(whole.shape):
            _int(row, 1 + dim + dims, 1, size - _int(row, 1 + dim, 0, size) + 1)
        boxes.append(SavedBox(tensor, tuple(row[1 : 1 + dims]), tuple(row[1 + dims :])))
        num_bytes += math.prod(boxes[-1].sizes) * ITEM_BYTES[whole.dtype]
    if _int(value, "bytes", 0, 1 << 62) != num_bytes:
        raise CheckpointError(f"says that {name} has {value['bytes']} bytes, and its boxes have {num_bytes}")
    return SavedFile(num_bytes, _int(value, "crc32", 0, 1 << 32), tuple(boxes))


def _check_tiled(tensors: Mapping[str, WrittenTensor], files: Mapping[str, SavedFile]) -> None:
    """Raise CheckpointError where boxes do not cover each element of each tensor once.

    Each position of each dim gets a random number, and a box the product over dims of the differences at its ends,
    modulo a prime. Where boxes tile the whole, their sum is that of the whole; where they do not, it is so with a
    chance below 1e-16 (Schwartz-Zippel), in time linear in the boxes.
    """
    height: defaultdict[tuple[str, int, int], int] = defaultdict(lambda: secrets.randbelow(_PRIME))

    def measure(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> int:
        product = 1
        for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
            product = product * (height[name, dim, start + size] - height[name, dim, start]) % _PRIME
        return product

    left = {
        name: measure(name, (0,) * len(each.shape), each.shape) if math.prod(each.shape) else 0
        for name, each in tensors.items()
    }
    for file in files.values():
        for box in file.boxes:
            left[box.name] = (left[box.name] - measure(box.name, box.offsets, box.sizes)) % _PRIME
    for name, rest in left.items():
        if rest:
            raise CheckpointError(f"has boxes of '{name}' that overlap, or leave a part of it out")
