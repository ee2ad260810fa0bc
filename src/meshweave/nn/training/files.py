"""The files of a checkpoint: raw boxes of tensors, written with their checksum and read where a rank needs them.

Nothing here follows a link, opens what is no regular file, or makes an object of what it reads: bytes go into the
tensors that are given. Memory is that of one scratch buffer, whatever a file has.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshweave.base.errors import CheckpointError
from meshweave.nn.training.manifest import ITEM_BYTES, Manifest, WrittenTensor
from meshweave.nn.training.pieces import ShardPieces

_SLICE_BYTES = 1 << 24
_SYNC_BYTES = 1 << 28
"""What is written between two looks at whether the disk has it: a slow disk is seen to work."""
Tick = Callable[[], None]
"""Is called whenever some work is done."""


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU as bytes, without a copy."""
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


@contextlib.contextmanager
def opened_folder(path: Path) -> Iterator[int]:
    """Open a folder, and yield its file descriptor; close it after the block.

    Raises OSError where `path` is no folder, or a link.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def opened_file(folder: int, name: str, num_bytes: int | None = None) -> Iterator[int]:
    """Open a regular file of a folder for reading, and yield its file descriptor; close it after the block.

    Args:
        folder: a descriptor of the folder.
        name: the file's name in it.
        num_bytes: the size that the file must have; None for any.

    Raises CheckpointError where there is no such regular file, it cannot be read, or has another size.
    """

    def check(status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"has a file {name} that is no regular file")
        if num_bytes is not None and status.st_size != num_bytes:
            raise CheckpointError(
                f"has a file {name} of {status.st_size} bytes, and {num_bytes} were written"
            )

    try:
        check(os.stat(name, dir_fd=folder, follow_symlinks=False))  # some devices act when they are opened
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=folder)
    except OSError as error:
        raise CheckpointError(f"has no file {name} that can be read ({error.strerror})") from None
    try:
        check(os.fstat(descriptor))
        yield descriptor
    finally:
        os.close(descriptor)


def write_synced(
    folder: int, name: str, parts: Iterable[memoryview], tick: Tick = lambda: None
) -> tuple[int, int]:
    """Write a new file, and wait until the disk has it; return (its size in bytes, its CRC-32).

    Args:
        folder: a descriptor of the folder.
        name: the file's name in it.
        parts: the bytes of the file, one part after another.
        tick: called now and then, between writes.

    Raises OSError where there is a file of that name, or it cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    num_bytes = crc32 = unsynced = 0
    with os.fdopen(os.open(name, flags, 0o666, dir_fd=folder), "wb", buffering=1 << 20) as file:
        for part in parts:
            for start in range(0, len(part), _SLICE_BYTES):
                piece = part[start : start + _SLICE_BYTES]
                crc32 = zlib.crc32(piece, crc32)
                file.write(piece)
                num_bytes, unsynced = num_bytes + len(piece), unsynced + len(piece)
                tick()
                if unsynced >= _SYNC_BYTES:
                    unsynced = 0
                    file.flush()
                    os.fdatasync(file.fileno())
                    tick()
        file.flush()
        os.fsync(file.fileno())
        tick()
    return num_bytes, crc32


def check_bytes(folder: int, manifest: Manifest, share: int, num_shares: int, tick: Tick) -> None:
    """Check the CRC-32 of this rank's share of the files of a checkpoint.

    Args:
        folder: a descriptor of the folder.
        manifest: of the checkpoint.
        share, num_shares: the files checked are those at indices share, share + num_shares, ... in order of names.
        tick: called now and then, between reads.

    Raises CheckpointError where a file is missing, cannot be read, or has other bytes than were written.
    """
    scratch = bytearray(_SLICE_BYTES)
    for name in sorted(manifest.files)[share::num_shares]:
        file = manifest.files[name]
        with opened_file(folder, name, file.num_bytes) as descriptor:
            crc32 = at = 0
            while at < file.num_bytes:
                part = memoryview(scratch)[: file.num_bytes - at]
                _read(descriptor, name, at, part)
                crc32, at = zlib.crc32(part, crc32), at + len(part)
                tick()
        if crc32 != file.crc32:
            raise CheckpointError(f"has a file {name} with other bytes than were written")


def _read(descriptor: int, name: str, at: int, into: memoryview) -> None:
    """Fill a buffer from a place of a file. Raises CheckpointError where it ends before, or cannot be read."""
    while into:
        try:
            count = os.preadv(descriptor, [into[: 1 << 30]], at)
        except OSError as error:
            raise CheckpointError(f"has a file {name} that cannot be read ({error.strerror})") from None
        if not count:
            raise CheckpointError(f"has a file {name} that became shorter while it was read")
        into, at = into[count:], at + count


@dataclass(frozen=True)
class _Overlap:
    """What a saved box and one here have in common."""

    at: int  # the byte of the file at which the saved box begins
    sizes: tuple[int, ...]
    starts: tuple[int, ...]  # in the saved box
    target: Tensor


def load_pieces(folder: int, manifest: Manifest, pieces: Mapping[str, ShardPieces], tick: Tick) -> None:
    """Read from a checkpoint the elements of `pieces` into their tensors, whatever boxes it was saved in.

    Args:
        folder: a descriptor of the folder.
        pieces: for names of tensors in the manifest, the boxes that this rank has, which are written.
        tick: called now and then, between reads.

    Raises CheckpointError where a file is missing, has another size, cannot be read to its end, or has a byte
    other than 0 and 1 for a bool; some tensors may be overwritten then.
    """
    boxes = manifest.boxes()
    wanted: dict[str, list[tuple[WrittenTensor, _Overlap]]] = {}
    for name, own in pieces.items():
        for file, overlap in _overlaps(boxes[name], own):
            wanted.setdefault(file, []).append((manifest.tensors[name], overlap))
    scratch = bytearray(_SLICE_BYTES)
    for file, parts in sorted(wanted.items()):
        with opened_file(folder, file, manifest.files[file].num_bytes) as descriptor:
            for tensor, part in sorted(parts, key=lambda each: each[1].at):
                reader = _BoxReader(descriptor, file, tensor.dtype, scratch, tick)
                reader.fill(part.at, part.sizes, part.starts, part.target)


def _overlaps(boxes: Sequence[tuple[str, int, Any]], own: ShardPieces) -> Iterator[tuple[str, _Overlap]]:
    begins = np.array([box.offsets for _, _, box in boxes], np.int64).reshape(len(boxes), len(own.shape))
    ends = begins + np.array([box.sizes for _, _, box in boxes], np.int64).reshape(begins.shape)
    for offset, tensor in zip(own.offsets, own.tensors, strict=True):
        start = np.array(offset, np.int64)
        stop = start + np.array(tensor.shape, np.int64)
        firsts, lasts = np.maximum(begins, start), np.minimum(ends, stop)
        for number in np.flatnonzero((firsts < lasts).all(axis=1)).tolist():
            file, at, box = boxes[number]
            first, last = firsts[number].tolist(), lasts[number].tolist()
            common = tuple(slice(a - o, b - o) for a, b, o in zip(first, last, offset, strict=True))
            starts = tuple(a - o for a, o in zip(first, box.offsets, strict=True))
            yield file, _Overlap(at, box.sizes, starts, tensor[common])


@dataclass(frozen=True)
class _BoxReader:
    """Reads parts of the boxes of one dtype in a file."""

    descriptor: int
    file: str
    dtype: str
    scratch: bytearray
    tick: Tick

    def fill(self, at: int, sizes: Sequence[int], starts: Sequence[int], target: Tensor) -> None:
        """Copy the part of a box that begins at `starts` into a tensor of the part's shape.

        Args:
            at: the byte of the file at which the box begins.
            sizes: of the box.
        """
        item = ITEM_BYTES[self.dtype]
        dtype = getattr(torch, self.dtype)
        row = math.prod(sizes[1:]) * item
        as_it_is = (
            target.dtype == dtype != torch.bool and target.device.type == "cpu" and target.is_contiguous()
        ) and not (target.is_conj() or target.is_neg())
        if as_it_is and tuple(target.shape[1:]) == tuple(sizes[1:]):
            self._read_slices(at + (starts[0] * row if starts else 0), bytes_of(target))
        elif not sizes:
            target.copy_(self._scratch(at, item, dtype)[0])
        elif row > len(self.scratch):
            for index in range(target.shape[0]):
                self.fill(at + (starts[0] + index) * row, sizes[1:], starts[1:], target[index])
        else:
            step = len(self.scratch) // row
            for start in range(0, target.shape[0], step):
                rows = target[start : start + step]
                read = self._scratch(at + (starts[0] + start) * row, len(rows) * row, dtype)
                part = read.view(len(rows), *sizes[1:])
                for dim in range(1, len(sizes)):
                    part = part.narrow(dim, starts[dim], target.shape[dim])
                rows.copy_(part)

    def _read_slices(self, at: int, into: memoryview) -> None:
        for start in range(0, len(into), _SLICE_BYTES):
            _read(self.descriptor, self.file, at + start, into[start : start + _SLICE_BYTES])
            self.tick()

    def _scratch(self, at: int, num_bytes: int, dtype: torch.dtype) -> Tensor:
        """Return what is read into the scratch buffer, flat."""
        self._read_slices(at, memoryview(self.scratch)[:num_bytes])
        raw = torch.frombuffer(self.scratch, dtype=torch.uint8, count=num_bytes)
        if dtype == torch.bool and raw.max() > 1:
            raise CheckpointError(f"has a file {self.file} with a byte for a bool that is neither 0 nor 1")
        return raw.view(dtype)
