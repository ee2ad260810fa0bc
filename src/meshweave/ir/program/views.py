"""Views: the part of a buffer that an op reads or writes.

A view names a buffer, one of its slots (copies, for double buffering), per dim a selector, and for a
one-sided access the rank that owns the buffer. In a template its numbers are expressions; `View.resolve`
turns them into integers for one rank, and only resolved views have sizes and overlaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshweave.base.errors import ProgramError
from meshweave.describe.layout.intervals import blocked_intervals
from meshweave.ir.program.expressions import Index, evaluate


@dataclass(frozen=True, slots=True)
class Range:
    """Elements [start, stop) of a dim; `stop` None means to its end."""

    start: Index = 0
    stop: Index | None = None

    def __str__(self) -> str:
        if self.start == 0 and self.stop is None:
            return ":"
        return f"{'' if self.start == 0 else self.start}:{'' if self.stop is None else self.stop}"

    @property
    def size(self) -> int:
        """Return the number of selected elements; the selector must be resolved to plain integers."""
        start, stop = selector_bounds(self)
        return stop - start


@dataclass(frozen=True, slots=True)
class Blocked:
    """The elements of [start, stop) that lie in a block [first + t stride, first + t stride + block), any t.

    MeshSlice's blocked slices (its Algorithm 2) are of this form; `first` may be negative and the blocks
    at either end may be cut, so that a shard boundary in the middle of a block needs no special case.
    """

    first: Index
    block: Index
    stride: Index
    start: Index = 0
    stop: Index | None = None

    def __str__(self) -> str:
        tail = "" if self.start == 0 and self.stop is None else f", {self.start}"
        tail += "" if self.stop is None else f", {self.stop}"
        return f"blocked({self.first}, {self.block}, {self.stride}{tail})"

    def count_below(self, position: int) -> int:
        """Return a running count of the elements of blocks: [a, b) has count_below(b) - count_below(a) of them.

        `start` and `stop` are ignored. The count by itself has no meaning, and may be negative.
        """
        first, block, stride = _ints(self.first, self.block, self.stride)
        turns, remainder = divmod(position - first, stride)
        return turns * block + min(remainder, block)

    @property
    def size(self) -> int:
        """Return the number of selected elements; the selector must be resolved to plain integers."""
        start, stop = selector_bounds(self)
        return self.count_below(stop) - self.count_below(start)

    def intervals(self) -> list[tuple[int, int]]:
        """Return the selected elements as half-open ranges, ascending."""
        first, block, stride = _ints(self.first, self.block, self.stride)
        start, stop = selector_bounds(self)
        return blocked_intervals(first, block, stride, start, stop)


Selector = Range | Blocked
FULL = Range()


def selector_bounds(selector: Selector) -> tuple[int, int]:
    """Return (start, stop) of a resolved selector."""
    start, stop = selector.start, selector.stop
    assert isinstance(start, int) and isinstance(stop, int), "selector is not resolved"
    return start, stop


def _ints(*values: Index | None) -> tuple[int, ...]:
    assert all(isinstance(value, int) for value in values), "selector is not resolved"
    return tuple(int(value) for value in values)  # type: ignore[arg-type]


def selector_intervals(selector: Selector) -> list[tuple[int, int]]:
    """Return the elements of a resolved selector as half-open ranges, ascending."""
    if isinstance(selector, Blocked):
        return selector.intervals()
    start, stop = selector_bounds(selector)
    return [(start, stop)] if start < stop else []


def selector_indices(selector: Selector) -> NDArray[np.int64]:
    """Return the selected positions of a resolved selector, ascending."""
    pieces = [np.arange(lo, hi) for lo, hi in selector_intervals(selector)]
    return np.concatenate(pieces) if pieces else np.arange(0)


def selectors_overlap(a: Selector, b: Selector) -> bool:
    """Return whether two resolved selectors of one dim share an element; exact."""
    (a_start, a_stop), (b_start, b_stop) = selector_bounds(a), selector_bounds(b)
    lo, hi = max(a_start, b_start), min(a_stop, b_stop)
    if lo >= hi:
        return False
    if isinstance(a, Range):
        return isinstance(b, Range) or b.count_below(hi) > b.count_below(lo)
    if isinstance(b, Range):
        return a.count_below(hi) > a.count_below(lo)
    a_stride, b_stride = _ints(a.stride, b.stride)
    if a_stride == b_stride and hi - lo > 2 * a_stride:
        hi = lo + 2 * a_stride  # two whole periods hold every way in which the patterns can meet
    clipped = Blocked(a.first, a.block, a.stride, lo, hi)
    return any(b.count_below(stop) > b.count_below(start) for start, stop in clipped.intervals())


@dataclass(frozen=True, slots=True)
class View:
    """The part of a buffer that an op reads or writes, one selector per dim.

    `slot` is the copy of the buffer. `rank` is the owner for a one-sided access; None means the executing rank.
    """

    buffer: str
    selectors: tuple[Selector, ...]
    slot: Index = 0
    rank: Index | None = None

    def __str__(self) -> str:
        text = self.buffer if self.slot == 0 else f"{self.buffer}({self.slot})"
        if any(selector != FULL for selector in self.selectors):
            text += f"[{', '.join(map(str, self.selectors))}]"
        return text if self.rank is None else f"at({self.rank}, {text})"

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the number of selected elements per dim; the view must be resolved to plain integers."""
        return tuple(selector.size for selector in self.selectors)

    @property
    def num_elements(self) -> int:
        """Return the number of selected elements; the view must be resolved to plain integers."""
        count = 1
        for selector in self.selectors:
            count *= selector.size
        return count

    def is_strided(self, shape: Sequence[int], order: Sequence[int] | None = None) -> bool:
        """Return whether a resolved view is not one run of memory, in a dense buffer of local `shape`.

        The view must not be empty. `order` lists dims from outermost to innermost in memory; None is row-major.
        A view of blocks counts as strided if its [start, stop) reaches into a second period of the stride.
        """
        is_inside = False  # a dim of which the view has more than one element
        for dim in range(len(shape)) if order is None else order:
            selector = self.selectors[dim]
            if is_inside and selector.size != shape[dim]:
                return True
            if selector.size <= 1:
                continue
            is_inside = True
            if isinstance(selector, Blocked):
                first, stride, start, stop = _ints(
                    selector.first, selector.stride, selector.start, selector.stop
                )
                if (start - first) // stride != (stop - 1 - first) // stride:
                    return True
        return False

    def overlaps(self, other: View) -> bool:
        """Return whether two resolved views of buffers on one rank share an element. `rank` is not compared."""
        return (
            self.buffer == other.buffer
            and self.slot == other.slot
            and all(selectors_overlap(a, b) for a, b in zip(self.selectors, other.selectors, strict=True))
        )

    def covers(self, other: View) -> bool:
        """Return True if this view surely holds every element of `other`, a view of a buffer on the same rank.

        False may mean that it is not known: strided blocks cover only equal blocks here.
        """
        if self.buffer != other.buffer or self.slot != other.slot:
            return False
        for mine, theirs in zip(self.selectors, other.selectors, strict=True):
            if mine == theirs:
                continue
            if isinstance(mine, Blocked):
                return False
            (lo, hi), (start, stop) = selector_bounds(mine), selector_bounds(theirs)
            if lo > start or hi < stop:
                return False
        return True

    def resolve(self, env: Mapping[str, int], shape: Sequence[int], num_slots: int) -> View:
        """Return this view with plain integers, in a buffer of local `shape` with `num_slots` slots.

        Args:
            env: the integer of each variable.

        Raises ProgramError where a range or the slot is outside the buffer, the numbers of dims differ, a block
        is negative or its stride below 1, or a variable has no value.
        """
        if len(self.selectors) != len(shape):
            raise ProgramError(f"view {self} has {len(self.selectors)} dims, its buffer has {len(shape)}")
        slot = evaluate(self.slot, env)
        if not 0 <= slot < num_slots:
            raise ProgramError(f"view {self} asks for slot {slot} of {num_slots}")
        selectors = tuple(
            _resolve(selector, size, env, self) for selector, size in zip(self.selectors, shape, strict=True)
        )
        rank = None if self.rank is None else evaluate(self.rank, env)
        return View(self.buffer, selectors, slot, rank)


def _resolve(selector: Selector, size: int, env: Mapping[str, int], view: View) -> Selector:
    start = evaluate(selector.start, env)
    stop = size if selector.stop is None else evaluate(selector.stop, env)
    if not 0 <= start <= stop <= size:
        raise ProgramError(f"view {view} selects [{start}, {stop}) of a dim of size {size}")
    if isinstance(selector, Range):
        return Range(start, stop)
    first, block, stride = (evaluate(part, env) for part in (selector.first, selector.block, selector.stride))
    if block < 0 or stride < 1:
        raise ProgramError(f"view {view}: block {block} and stride {stride} must be positive")
    if block >= stride:
        return Range(start, stop)
    return Blocked(first, block, stride, start, stop)


def dense_strides(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the stride of each dim, in elements, of a dense tensor of `shape`: (2, 3, 4) -> (12, 4, 1).

    `order` lists the dims from outermost to innermost in memory; None is row-major. A dim of size 0 counts as 1.
    """
    strides, step = [0] * len(shape), 1
    for dim in reversed(range(len(shape)) if order is None else order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def view(
    buffer: str, *selectors: Selector | slice, slot: Index = 0, rank: Index | None = None, dims: int = 2
) -> View:
    """Return a view of `buffer`, of `dims` dims, from slices or selectors per dim; dims without one are whole.

    `slot` is the copy of the buffer. `rank` is the owner for a one-sided access; None is the executing rank.
    """
    out: list[Selector] = []
    for selector in selectors:
        if isinstance(selector, slice):
            assert selector.step is None
            out.append(Range(0 if selector.start is None else selector.start, selector.stop))
        else:
            out.append(selector)
    out += [FULL] * (dims - len(out))
    return View(buffer, tuple(out), slot, rank)
