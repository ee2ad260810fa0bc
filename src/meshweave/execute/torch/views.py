"""Views as torch tensors: slices, and strided pieces where blocks repeat.

A resolved view of a buffer becomes one or more tensors that alias the buffer's memory. A blocked selector
has at most three pieces: a cut block at either end, and the whole blocks between them as two dims (blocks,
elements). No index lists: whatever is copied is copied by strides.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshweave.ir.program.views import Blocked, Selector, View

Action = Callable[[], object]
"""A function without arguments that does one piece of work on fixed memory."""

Order = tuple[int, ...]
"""Dims from outermost to innermost in memory."""

_MOST_WORK = 10_000
"""Steps that numpy may take to tell whether two strided tensors overlap."""


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks along one dim of a view that are equally spaced in the buffer.

    In the buffer, `num_blocks` blocks of `block` elements begin at index `buffer_start`, one every `stride`
    elements. In the view they are adjacent, from index `view_start` on.
    """

    view_start: int
    buffer_start: int
    block: int
    num_blocks: int = 1
    stride: int = 0

    @property
    def is_split(self) -> bool:
        """Return whether a strided tensor needs two dims for the run: several blocks of more than one element."""
        return self.num_blocks > 1 and self.block > 1


def block_runs(selector: Selector) -> list[BlockRun]:
    """Return the runs of equally spaced blocks that a selector takes from its dim, in order, without empty ones.

    A plain range is one run; a blocked selector has up to three: a cut block, whole blocks, a cut block. The
    selector must be resolved: integers, no expressions.
    """
    start, stop = selector.start, selector.stop
    assert isinstance(start, int) and isinstance(stop, int)
    if not isinstance(selector, Blocked):
        return [BlockRun(0, start, stop - start)] if start < stop else []
    first, block, stride = selector.first, selector.block, selector.stride
    assert isinstance(first, int) and isinstance(block, int) and isinstance(stride, int)
    runs: list[BlockRun] = []
    at = 0

    def take(begin: int, size: int, turns: int = 1) -> None:
        nonlocal at
        if size > 0 and turns > 0:
            runs.append(BlockRun(at, begin, size, turns, stride))
            at += size * turns

    turn = (start - first) // stride
    begin = first + turn * stride
    if begin < start:
        take(start, min(begin + block, stop) - start)
        turn += 1
    whole = max((stop - block - first) // stride + 1, turn)
    take(first + turn * stride, block, whole - turn)
    begin = first + whole * stride
    take(begin, min(begin + block, stop) - begin)
    return runs


@dataclass(frozen=True)
class StridedView:
    """A view of a buffer bound to memory, as tensors that alias it.

    `pieces` lists (a run of blocks for each dim of the view, the tensor of these blocks); in that tensor a run of
    several blocks of several elements is two dims. `direct` is the whole view as one tensor of its shape, None
    where strides cannot express that.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[tuple[BlockRun, ...], Tensor], ...]
    direct: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor) -> StridedView:
        """Return the view that is all of `tensor`."""
        shape = tuple(tensor.shape)
        whole = tuple(BlockRun(0, 0, size) for size in shape)
        return cls(shape, tensor.dtype, ((whole, tensor),), tensor)

    @property
    def splits(self) -> tuple[tuple[BlockRun, ...], ...]:
        """Return for each piece the runs of blocks of each dim, with `buffer_start` and `stride` set to 0.

        Views with equal splits have pieces of the same elements, which can be copied piece by piece.
        """
        return tuple(
            tuple(BlockRun(run.view_start, 0, run.block, run.num_blocks) for run in piece)
            for piece, _ in self.pieces
        )


def bind_view(view: View, buffer: Tensor) -> StridedView:
    """Return a resolved view (integers, no expressions) as tensors that alias `buffer`, the view's buffer slot."""
    per_dim = [block_runs(selector) for selector in view.selectors]
    pieces = tuple((piece, _alias(buffer, piece)) for piece in itertools.product(*per_dim))
    direct = None
    if not pieces:
        direct = buffer.new_empty(view.shape)
    elif len(pieces) == 1 and not any(run.is_split for run in pieces[0][0]):
        direct = pieces[0][1]
    return StridedView(view.shape, buffer.dtype, pieces, direct)


def _alias(buffer: Tensor, piece: Sequence[BlockRun]) -> Tensor:
    sizes: list[int] = []
    strides: list[int] = []
    offset = buffer.storage_offset()
    for run, stride in zip(piece, buffer.stride(), strict=True):
        offset += run.buffer_start * stride
        if run.num_blocks > 1:
            sizes.append(run.num_blocks)
            strides.append(run.stride * stride)
        if run.block > 1 or run.num_blocks == 1:
            sizes.append(run.block)
            strides.append(stride)
    return buffer.as_strided(sizes, strides, offset)


def _part(whole: Tensor, piece: Sequence[BlockRun]) -> Tensor:
    """The part of a tensor of the view's shape that belongs to a piece, split into the piece's dims."""
    for dim, run in enumerate(piece):
        whole = whole.narrow(dim, run.view_start, run.block * run.num_blocks)
    for dim in reversed(range(len(piece))):
        if piece[dim].is_split:
            whole = whole.unflatten(dim, (piece[dim].num_blocks, piece[dim].block))
    return whole


def pair_up(out: StridedView, src: StridedView) -> list[tuple[Tensor, Tensor]] | None:
    """Return pairs (part of `out`, part of `src`) of equal shapes that cover both views of one shape; None where
    neither view is one tensor (`direct`) and their pieces differ.
    """
    if out.direct is not None:
        return [(_part(out.direct, piece), tensor) for piece, tensor in src.pieces]
    if src.direct is not None:
        return [(tensor, _part(src.direct, piece)) for piece, tensor in out.pieces]
    if out.splits == src.splits:
        return [(mine, theirs) for (_, mine), (_, theirs) in zip(out.pieces, src.pieces, strict=True)]
    return None


def row_major(num_dims: int) -> Order:
    """Return (0, 1, ..., num_dims - 1): the dims of a row-major tensor, outermost first."""
    return tuple(range(num_dims))


def empty_in_order(
    shape: Sequence[int], dtype: torch.dtype, order: Order | None, device: torch.device
) -> Tensor:
    """Return a dense tensor of `shape` whose dims lie in memory in `order`, outermost first; None is row-major."""
    if order is None:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    dense = torch.empty([shape[dim] for dim in order], dtype=dtype, device=device)
    return from_wire(dense, order)


def to_wire(tensor: Tensor, order: Order) -> Tensor:
    """Return `tensor` with its dims permuted, as a view: dim `i` of the result is dim `order[i]` of `tensor`."""
    return tensor.permute(order)


def from_wire(tensor: Tensor, order: Order) -> Tensor:
    """Return `tensor` with its dims permuted back, as a view: the inverse of `to_wire` with the same `order`."""
    return tensor.permute(tuple(order.index(dim) for dim in range(len(order))))


class Staging:
    """Dense memory for copies of views whose strides or dtype an operation cannot take, allocated once.

    The ops of a lane run one after another, so they share the lane's staging; `use` tells apart what one op
    needs at the same time. Tensors whose bytes round up to the same power of two share memory, whatever their
    shape: all of a lane's staging for a use is less than four times its largest tensor.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[tuple[str, str, int], Tensor] = {}

    def get(
        self, lane: str, use: str, shape: Sequence[int], dtype: torch.dtype, order: Order | None = None
    ) -> Tensor:
        """Return a dense tensor of `shape`, uninitialised, whose dims lie in memory in `order`, outermost first.

        Calls with the same lane, use and bytes up to the next power of two return the same memory. `order` None
        is row-major.
        """
        size = math.prod(shape) * dtype.itemsize
        bits = max(size - 1, 0).bit_length()
        key = (lane, use, bits)
        if key not in self._memory:
            self._memory[key] = torch.empty(1 << bits, dtype=torch.uint8, device=self._device)
        flat = self._memory[key][:size].view(dtype)
        order = order or row_major(len(shape))
        return from_wire(flat.view([shape[dim] for dim in order]), order)

    def transfer(
        self, lane: str, out: StridedView, src: StridedView, *, add: bool = False, apart: bool = False
    ) -> list[Action]:
        """Return the actions that copy `src` to `out` of equal shape, or with `add` add it, for an op of `lane`.

        Args:
            apart: copy `src` to staging first, since `out` and `src` may share memory. That is also done where
                they overlap by the caller's choice of tensors (`share_memory`).
        """
        pairs = None if apart else pair_up(out, src)
        if pairs is None or any(
            share_memory(into, value) and not _is_same_memory(into, value)
            for into, _ in pairs
            for _, value in pairs
        ):
            between = StridedView.of(self.get(lane, "between", src.shape, src.dtype))
            return [
                *self.transfer(lane, between, src),
                *self.transfer(lane, out, between, add=add),
            ]
        return [
            partial(into.add_ if add else into.copy_, value)
            for into, value in pairs
            if into.numel() and (add or not _is_same_memory(into, value))
        ]


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one shape are the same elements; without memory they are not."""
    return bool(0 != a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype)


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements of memory a strided tensor spans: shape (2, 3), strides (4, 1) -> 7."""
    if 0 in shape:
        return 0
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether an element of one tensor has a byte in common with one of the other, also where both have
    gaps; True where that would take long to tell.
    """
    if not a.numel() or not b.numel() or not a.data_ptr():
        return False
    first, second = sorted((a, b), key=Tensor.data_ptr)
    if second.data_ptr() >= first.data_ptr() + extent(first.shape, first.stride()) * first.itemsize:
        return False
    return bool(np.may_share_memory(_addresses(a), _addresses(b), max_work=_MOST_WORK))  # type: ignore[arg-type]


def _addresses(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return an array where a tensor lies, not to be read: it may be in memory of another device."""
    step = tensor.itemsize
    memory = (ctypes.c_char * (extent(tensor.shape, tensor.stride()) * step)).from_address(tensor.data_ptr())
    strides = [stride * step for stride in tensor.stride()]
    return np.ndarray(tuple(tensor.shape), f"V{step}", memory, strides=strides)


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether elements of a tensor may lie in the same memory, as those of an expanded one do."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return bool(tensor.numel())
        reach += (size - 1) * stride
    return False


class ActionSequence:
    """One action that runs `steps` one after another."""

    __slots__ = ("steps",)

    def __init__(self, steps: Sequence[Action]) -> None:
        self.steps = tuple(steps)

    def __call__(self) -> None:
        for step in self.steps:
            step()


def steps_of(action: Action) -> tuple[Action, ...]:
    """Return the single actions that `action` runs in order, nested `ActionSequence`s flattened."""
    if not isinstance(action, ActionSequence):
        return (action,)
    return tuple(step for each in action.steps for step in steps_of(each))


def chain_actions(actions: Sequence[Action]) -> Action:
    """Return one action that runs `actions` one after another."""
    return actions[0] if len(actions) == 1 else ActionSequence(actions)
