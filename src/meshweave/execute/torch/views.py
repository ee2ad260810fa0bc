"""Views as torch tensors: slices, and strided pieces where blocks repeat.

A resolved view of a buffer becomes one or more tensors that alias the buffer's memory. A blocked selector
has at most three pieces: a cut block at either end, and the whole blocks between them as two dims (turns,
block). No index lists: whatever is copied is copied by strides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from meshweave.ir.program.views import Blocked, Selector, View

Action = Callable[[], object]
"""A bound piece of work."""

Order = tuple[int, ...]
"""Dims from outermost to innermost in memory."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of one dim: `turns` runs of `block` elements, in the buffer from `start` every `stride`, in the
    view one after the other from `at`."""

    at: int
    start: int
    block: int
    turns: int = 1
    stride: int = 0

    @property
    def is_split(self) -> bool:
        """Whether it takes two dims of a tensor."""
        return self.turns > 1 and self.block > 1


def cuts(selector: Selector) -> list[Cut]:
    """The parts of a resolved selector, in order; empty ones left out."""
    start, stop = selector.start, selector.stop
    assert isinstance(start, int) and isinstance(stop, int)
    if not isinstance(selector, Blocked):
        return [Cut(0, start, stop - start)] if start < stop else []
    first, block, stride = selector.first, selector.block, selector.stride
    assert isinstance(first, int) and isinstance(block, int) and isinstance(stride, int)
    found: list[Cut] = []
    at = 0

    def take(begin: int, size: int, turns: int = 1) -> None:
        nonlocal at
        if size > 0 and turns > 0:
            found.append(Cut(at, begin, size, turns, stride))
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
    return found


@dataclass(frozen=True)
class Strided:
    """A view bound to memory: `pieces` pairs the cuts per dim with the tensor that aliases them.

    `direct` is the whole view as one tensor of its shape, where strides can express it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[tuple[Cut, ...], Tensor], ...]
    direct: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor) -> Strided:
        """A whole tensor."""
        shape = tuple(tensor.shape)
        whole = tuple(Cut(0, 0, size) for size in shape)
        return cls(shape, tensor.dtype, ((whole, tensor),), tensor)

    @property
    def splits(self) -> tuple[tuple[Cut, ...], ...]:
        return tuple(tuple(Cut(cut.at, 0, cut.block, cut.turns) for cut in piece) for piece, _ in self.pieces)


def strided(view: View, buffer: Tensor) -> Strided:
    """A resolved view of the tensor that holds its buffer slot."""
    per_dim = [cuts(selector) for selector in view.selectors]
    pieces = tuple((piece, _alias(buffer, piece)) for piece in itertools.product(*per_dim))
    direct = None
    if not pieces:
        direct = buffer.new_empty(view.shape)
    elif len(pieces) == 1 and not any(cut.is_split for cut in pieces[0][0]):
        direct = pieces[0][1]
    return Strided(view.shape, buffer.dtype, pieces, direct)


def _alias(buffer: Tensor, piece: Sequence[Cut]) -> Tensor:
    sizes: list[int] = []
    strides: list[int] = []
    offset = buffer.storage_offset()
    for cut, stride in zip(piece, buffer.stride(), strict=True):
        offset += cut.start * stride
        if cut.turns > 1:
            sizes.append(cut.turns)
            strides.append(cut.stride * stride)
        if cut.block > 1 or cut.turns == 1:
            sizes.append(cut.block)
            strides.append(stride)
    return buffer.as_strided(sizes, strides, offset)


def _part(whole: Tensor, piece: Sequence[Cut]) -> Tensor:
    """The part of a tensor of the view's shape that belongs to a piece, split into the piece's dims."""
    for dim, cut in enumerate(piece):
        whole = whole.narrow(dim, cut.at, cut.block * cut.turns)
    for dim in reversed(range(len(piece))):
        if piece[dim].is_split:
            whole = whole.unflatten(dim, (piece[dim].turns, piece[dim].block))
    return whole


def pair_up(out: Strided, src: Strided) -> list[tuple[Tensor, Tensor]] | None:
    """Tensors of equal shapes that together are all of `out` and `src`; None where their pieces differ."""
    if out.direct is not None:
        return [(_part(out.direct, piece), tensor) for piece, tensor in src.pieces]
    if src.direct is not None:
        return [(tensor, _part(src.direct, piece)) for piece, tensor in out.pieces]
    if out.splits == src.splits:
        return [(mine, theirs) for (_, mine), (_, theirs) in zip(out.pieces, src.pieces, strict=True)]
    return None


def natural(num_dims: int) -> Order:
    return tuple(range(num_dims))


def empty(shape: Sequence[int], dtype: torch.dtype, order: Order | None, device: torch.device) -> Tensor:
    """A dense tensor of `shape` whose dims lie in memory in `order`, outermost first."""
    if order is None:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    dense = torch.empty([shape[dim] for dim in order], dtype=dtype, device=device)
    return from_wire(dense, order)


def to_wire(tensor: Tensor, order: Order) -> Tensor:
    """The same memory with dims in `order`."""
    return tensor.permute(order)


def from_wire(tensor: Tensor, order: Order) -> Tensor:
    """The inverse of `to_wire`."""
    return tensor.permute(tuple(order.index(dim) for dim in range(len(order))))


class Staging:
    """Memory between a view and what cannot take its strides, allocated once.

    The ops of a lane run one after another, so a lane shares its staging; `use` tells apart what one op
    needs at the same time. What is as large to the next power of two shares memory, whatever its shape: all of a
    lane's staging for a use is less than four times its largest.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[tuple[str, str, int], Tensor] = {}

    def get(
        self, lane: str, use: str, shape: Sequence[int], dtype: torch.dtype, order: Order | None = None
    ) -> Tensor:
        """A dense tensor of logical `shape` with dims in memory in `order`."""
        size = math.prod(shape) * dtype.itemsize
        bits = max(size - 1, 0).bit_length()
        key = (lane, use, bits)
        if key not in self._memory:
            self._memory[key] = torch.empty(1 << bits, dtype=torch.uint8, device=self._device)
        flat = self._memory[key][:size].view(dtype)
        order = order or natural(len(shape))
        return from_wire(flat.view([shape[dim] for dim in order]), order)

    def transfer(
        self, lane: str, out: Strided, src: Strided, *, add: bool = False, apart: bool = False
    ) -> list[Action]:
        """What sets `out` to `src`, or adds `src` to it; `apart` where the two may share memory."""
        pairs = None if apart else pair_up(out, src)
        if pairs is None:
            between = Strided.of(self.get(lane, "between", src.shape, src.dtype))
            return [
                *self.transfer(lane, between, src),
                *self.transfer(lane, out, between, add=add),
            ]
        return [partial(into.add_ if add else into.copy_, value) for into, value in pairs if into.numel()]


class Chain:
    """Actions one after another, as one."""

    __slots__ = ("steps",)

    def __init__(self, steps: Sequence[Action]) -> None:
        self.steps = tuple(steps)

    def __call__(self) -> None:
        for step in self.steps:
            step()


def chain(actions: Sequence[Action]) -> Action:
    """The actions one after another, as one."""
    return actions[0] if len(actions) == 1 else Chain(actions)
