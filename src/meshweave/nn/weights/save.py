"""`save_weights`: whole tensors from the parts that ranks have."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshweave.base.errors import CheckpointError, LayoutError
from meshweave.execute.ranks.agreement import exchange
from meshweave.execute.torch import compat
from meshweave.execute.torch.call_order import call_order, share_refusal
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.weights.blocks import Block, block_of, boxes_of, other_copy, sizes_of, sums_of_parts
from meshweave.nn.weights.checkpoint import INDEX_FILE, SINGLE_FILE, safetensors_library
from meshweave.nn.weights.slots import Mapped, slots_of, stored_as

DEFAULT_FILE_BYTES = 5_000_000_000
"""The bytes of one file of a sharded checkpoint unless its writer says otherwise."""
_TITLE = "save_weights"
_LONGEST = timedelta(minutes=30)
"""For a wait for ranks that answer: the first one writes gigabytes to what may be a slow disk meanwhile."""


@dataclass(frozen=True)
class _Piece:
    """A part of a tensor that a rank says it has."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    block: Block


@torch.no_grad()  # type: ignore[untyped-decorator]
def save_weights(
    module: nn.Module,
    folder: Path | str,
    *,
    mapping: Mapped = None,
    file_bytes: int = DEFAULT_FILE_BYTES,
    context: TorchContext | None = None,
) -> tuple[Path, ...]:
    """Write the tensors of a module, whole, as safetensors; all ranks call it, each with what it has of the model.

    Ranks that see the folder of rank 0 write the files by turns; the others send them their parts, each part
    once, one file's tensors at a time: no rank has more than `file_bytes` of others. Stages of a pipeline give
    their own modules, with names that differ. A tied tensor is written once, under its first name. Files appear
    under their names only when all are complete, the index after them; files of an earlier checkpoint in the
    folder go last. Where it has files of the same names, its index goes before these are replaced, so that no
    reader takes some of each.

    Args:
        mapping: a dict or function from a tensor's name in the module to the name to store it under, or to a
            `StoredTensor`, to store it transposed; None, or no entry, for its own name.
        file_bytes: the most bytes of tensors in one file, but for a larger tensor, which has one of its own.
            Several files get an index.
        context: liveness of waits for other ranks, and the deadline of those that are silent; default: that of the
            default process group.

    Returns:
        The files, on rank 0; nothing on the others.

    Raises:
        CheckpointError: a rank cannot write; on all ranks.
        LayoutError: ranks differ in the shape or dtype of a tensor or in the values of a parameter, do not have
            all of it, or it is a partial sum or on the meta device.
        UnsupportedError: safetensors is not installed.
        BindError: another rank refuses what it was given.
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    context = context or TorchContext.default()
    ranks = tuple(range(context.num_ranks))
    with share_refusal(context, ranks, _TITLE):
        return _saved(module, Path(folder), mapping, file_bytes, context)


def _saved(
    module: nn.Module, folder: Path, mapping: Mapped, file_bytes: int, context: TorchContext
) -> tuple[Path, ...]:
    """Do what `save_weights` says."""
    safetensors_library()
    own, named, pieces = dict[str, Tensor](), list[tuple[str, Tensor]](), list[_Piece]()
    for slot in slots_of(module):
        stored = stored_as(mapping, slot.names[0])
        local = compat.local_tensor(slot.tensor) if isinstance(slot.tensor, DTensor) else slot.tensor.detach()
        if local.is_meta:
            raise LayoutError(
                f"{slot.names[0]} is on the meta device, where it has no values; load weights first"
            )
        block, shape = block_of(slot.names[0], slot.tensor), tuple(slot.tensor.shape)
        if isinstance(slot.tensor, DTensor) and slot.tensor.device_mesh.get_coordinate() is None:
            continue  # torch has a value here for a tensor without dims, which is not that of the mesh
        if stored.is_transposed:
            local, block, shape = local.t(), block[::-1], shape[::-1]
        if stored.name in own:
            raise LayoutError(f"two tensors are to be stored as {stored.name}; give each a name of its own")
        own[stored.name] = local.contiguous()
        named.append((stored.name, slot.tensor))
        pieces.append(_Piece(stored.name, shape, local.dtype, block))
    sums = sums_of_parts(named) if context.num_ranks > 1 else {}
    senders = _senders(_all_pieces(pieces, sums, context))
    files = _files_of(senders, file_bytes)
    rank, wrong, writers = context.rank or 0, "", _writers(folder, context)
    device = next((each.device for each in own.values()), torch.device("cpu"))
    for number, group in enumerate(files):
        writer = writers[number % len(writers)]
        with _waiting(context, f"the weights of file {number + 1} of {len(files)}"):
            whole = {name: _gathered(senders[name], own.get(name), rank, writer, device) for name in group}
        if rank == writer and not wrong:
            wrong = _tried(folder, partial(_write, folder, _name(number, len(files)), whole))
    if wrong := _first_of_all(wrong, context):  # the others have sent on, and are told now
        if not rank:
            _remove_unfinished(folder)
        raise CheckpointError(wrong)
    write_by_first(folder, lambda: _finish(folder, files, senders), context)
    return () if rank else tuple(folder / _name(number, len(files)) for number in range(len(files)))


def write_by_first(folder: Path, do: Callable[[], object], context: TorchContext) -> None:
    """Call `do` on rank 0, which writes into `folder`; return on all ranks once it is done. Collective.

    Raises:
        CheckpointError: `do` raised an error; on all ranks.
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    wrong = "" if context.rank else _tried(folder, do)
    if wrong := _first_of_all(wrong, context):
        raise CheckpointError(wrong)


def _tried(folder: Path, do: Callable[[], object]) -> str:
    """Do something; return in words why it failed, "" where it did not."""
    try:
        do()
    except Exception as error:
        return f"{folder} cannot be written: {type(error).__name__}: {error}"
    return ""


def _first_of_all(wrong: str, context: TorchContext) -> str:
    """Return the first rank's words that are not empty, on all ranks."""
    return next(filter(None, _said_by_all(wrong, context, "all ranks to write the weights")), "")


def _writers(folder: Path, context: TorchContext) -> list[int]:
    """Return the ranks that see a file that rank 0 writes into a folder; rank 0 alone where it cannot."""
    if not context.is_distributed or context.num_ranks == 1:
        return [0]
    what = "the first rank to say where it writes"
    path = folder / _said_by_all(f".{os.getpid()}-{time.time_ns()}.probe", context, what)[0]
    if context.rank == 0:
        with contextlib.suppress(OSError):  # what cannot be written is told by whoever writes files
            folder.mkdir(parents=True, exist_ok=True)
            path.touch()
    with _waiting(context, "the first rank to make the folder of the weights"):
        dist.barrier()
    sees = _said_by_all(str(path.is_file()), context, "all ranks to look into the folder of the weights")
    if context.rank == 0:
        with contextlib.suppress(OSError):
            path.unlink()
    return [0, *(rank for rank, is_seen in enumerate(sees) if is_seen == str(True) and rank)]


def _said_by_all(words: str, context: TorchContext, what: str) -> list[str]:
    """Return what each rank says, once all have come: one that writes may take longer than the deadline."""
    if not context.is_distributed or context.num_ranks == 1:
        return [words]
    with _waiting(context, what):
        dist.barrier()
    return list(exchange(context, tuple(range(context.num_ranks)), words, what).values())


@contextlib.contextmanager
def _waiting(context: TorchContext, what: str) -> Iterator[None]:
    """Name who is lost while ranks wait for each other in the default process group, or has refused to go on.

    Ranks that are silent for the deadline of the context are lost; one that answers may take longer.
    """
    if not context.is_distributed or context.num_ranks == 1:
        yield
        return
    ranks, order = tuple(range(context.num_ranks)), call_order(context)
    others = [rank for rank in ranks if rank != context.rank]
    seconds, live = _LONGEST.total_seconds(), context.liveness
    guard = live.guard(what, seconds, peers=others) if live else context.guard(what, others)
    with order.sequence(ranks).bind(what), guard:
        try:
            yield
        except RuntimeError:
            order.explain_failure()
            raise


def _all_pieces(
    pieces: Sequence[_Piece], sums: Mapping[str, Mapping[str, str]], context: TorchContext
) -> list[list[_Piece]]:
    """Return what each rank has; all ranks call it. Raises LayoutError where `sums` of one part differ."""
    own = json.dumps([[[each.name, each.shape, str(each.dtype)[6:], each.block] for each in pieces], sums])
    words = exchange(context, tuple(range(context.num_ranks)), own, "all ranks to say what they have")
    said = [json.loads(each) for each in words.values()]
    if wrong := other_copy([of_rank for _, of_rank in said]):
        raise LayoutError(wrong)
    return [[_piece_of(*each) for each in parts] for parts, _ in said]


def _piece_of(name: str, shape: list[int], dtype: str, block: list[list[list[int]]]) -> _Piece:
    runs = tuple(tuple((start, stop) for start, stop in each) for each in block)
    return _Piece(name, tuple(shape), getattr(torch, dtype), runs)


def _senders(everybody: Sequence[Sequence[_Piece]]) -> dict[str, list[tuple[int, _Piece]]]:
    """Return, for each tensor, which rank sends which part: the lowest of those that have the same."""
    senders: dict[str, dict[Block, tuple[int, _Piece]]] = {}
    for rank, pieces in enumerate(everybody):
        for piece in pieces:
            known = senders.setdefault(piece.name, {})
            first = next(iter(known.values()), (rank, piece))[1]
            if (first.shape, first.dtype) != (piece.shape, piece.dtype):
                raise LayoutError(
                    f"{piece.name} is {first.shape} {first.dtype} on one rank and {piece.shape} {piece.dtype} on "
                    f"rank {rank}"
                )
            has_some = math.prod(sizes_of(piece.block)) or not piece.shape
            if has_some or not (known or math.prod(piece.shape)):
                known.setdefault(piece.block, (rank, piece))
    for name, parts in senders.items():
        shape = next(iter(parts.values()))[1].shape if parts else ()
        count = sum(math.prod(sizes_of(block)) for block in parts)
        if count != math.prod(shape):
            raise LayoutError(f"{name} has {math.prod(shape)} elements; the ranks have parts with {count}")
    return {name: list(parts.values()) for name, parts in senders.items()}


def _files_of(senders: Mapping[str, list[tuple[int, _Piece]]], file_bytes: int) -> list[list[str]]:
    files: list[list[str]] = [[]]
    size = 0
    for name, parts in senders.items():
        num_bytes = _num_bytes(parts)
        if files[-1] and size + num_bytes > file_bytes:
            files.append([])
            size = 0
        files[-1].append(name)
        size += num_bytes
    return files


def _num_bytes(parts: Sequence[tuple[int, _Piece]]) -> int:
    piece = parts[0][1]
    return math.prod(piece.shape) * int(piece.dtype.itemsize)


def _gathered(
    parts: Sequence[tuple[int, _Piece]], own: Tensor | None, rank: int, writer: int, device: torch.device
) -> Tensor | None:
    """Return a whole tensor on the rank that writes it; the other ranks send what they have of it.

    Args:
        device: where messages are.
    """
    whole = None if rank != writer else torch.empty(parts[0][1].shape, dtype=parts[0][1].dtype)
    for sender, piece in parts:
        if not math.prod(piece.shape):
            continue
        if sender == rank != writer:
            assert own is not None
            dist.send(own, writer)
        if whole is None:
            continue
        if sender == writer:
            assert own is not None
            part = own
        else:
            part = torch.empty(sizes_of(piece.block), dtype=piece.dtype, device=device)
            dist.recv(part, sender)
        if not piece.shape:
            whole.copy_(part)
        for local, box in boxes_of(piece.block):
            whole[box] = part[local].to(whole.device)
    return whole


def _name(number: int, count: int) -> str:
    return SINGLE_FILE if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"


def _write(folder: Path, name: str, tensors: Mapping[str, Tensor | None]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = str(_unfinished(folder, name))
    safetensors_library().torch.save_file(dict(tensors), unfinished, metadata={"format": "pt"})
    _sync(Path(unfinished))


def _sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder: a crash must not leave a name without bytes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unfinished(folder: Path, name: str) -> Path:
    """Return where a file lies until all are written."""
    return folder / f".{name}.partial"


def _remove_unfinished(folder: Path) -> None:
    for path in folder.glob(".model*.partial"):
        with contextlib.suppress(OSError):
            path.unlink()


def _finish(
    folder: Path, files: Sequence[Sequence[str]], senders: Mapping[str, list[tuple[int, _Piece]]]
) -> None:
    """Give all files their names, write the index of several, and take away what was left beside these."""
    names = {_name(number, len(files)) for number in range(len(files))}
    if len(files) > 1 and any((folder / name).exists() for name in names):
        (folder / INDEX_FILE).unlink(missing_ok=True)
    for name in names:
        _unfinished(folder, name).replace(folder / name)
    if len(files) > 1:
        weight_map = {name: _name(number, len(files)) for number, group in enumerate(files) for name in group}
        index = {"metadata": {"total_size": sum(map(_num_bytes, senders.values()))}, "weight_map": weight_map}
        unfinished = _unfinished(folder, INDEX_FILE)
        unfinished.write_text(json.dumps(index, indent=2) + "\n")
        _sync(unfinished)
        unfinished.replace(folder / INDEX_FILE)
        names.add(INDEX_FILE)
    for path in (folder / INDEX_FILE, folder / SINGLE_FILE, *folder.glob("model-?????-of-?????.safetensors")):
        if path.name not in names:
            path.unlink(missing_ok=True)
    _sync(folder)
    _remove_unfinished(folder)
