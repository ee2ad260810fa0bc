"""Buckets: parameters that are gathered together, and whose gradients are summed together, in one message each.

A parameter is kept in parts where the strategy shards it, used whole or as tensor parallelism splits it, and its
gradient is computed in terms where ranks have other tokens. Parameters that move along the same mesh axes lie one
after the other in a bucket, a tensor of (ranks, elements): one program of a `MoveSite` gathers it, one reduces
the gradients (Li et al., PyTorch Distributed, VLDB '20, section 3.2). No barrier comes before these. Each
adds an element that says which program and which call its data are of: what is of another one is refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from meshweave.algorithms.block.roles import AxisDims, Side
from meshweave.algorithms.block.sites import MoveSite
from meshweave.base.errors import UnsupportedError
from meshweave.execute.torch import compat
from meshweave.execute.torch.bind import BoundProgram
from meshweave.nn.parallel.lent import LentMemory
from meshweave.nn.parallel.moves import GradientSum, Mover, PlacedMove
from meshweave.nn.parallel.numbered_sum import call_number, check_number, summed_number, terms_of
from meshweave.nn.parallel.parameters import ParameterLayout
from meshweave.nn.parallel.programs import SizedMove, sized_move
from meshweave.nn.parallel.strategy import LayerStrategy


@dataclass(frozen=True, eq=False)
class KeptParameter:
    """How a parameter is stored, used and summed on the ranks of a strategy.

    A rank keeps ("stores") one shard between steps, for example under ZeRO-3; before a product it is all-gathered
    to the part that this rank "uses", which tensor parallelism may still split.

    Attributes:
        strategy: the strategy on its ranks.
        layout: which part each rank keeps.
        used: for each mesh axis the dim that it splits where a product uses the parameter; "" for none.
        terms: for each mesh axis the dim that it splits of the gradient as a rank computes it; "partial" where the
            ranks along it have terms of a sum; "" for none.
    """

    strategy: LayerStrategy
    layout: ParameterLayout
    used: AxisDims
    terms: AxisDims

    @cached_property
    def gathered(self) -> tuple[int, ...]:
        """Return the indices of the mesh axes along which it is gathered: they split it as kept, not as used.

        Raises:
            UnsupportedError: a later mesh axis still splits the same dim where the parameter is used, so that a
                rank would gather several ranges of that dim instead of one.
        """
        kept, used = self.layout.dims, self.used
        axes = tuple(axis for axis, dim in enumerate(kept) if dim and not used[axis])
        inside = [axis for axis, dim in enumerate(used) if dim and dim in (kept[a] for a in axes if a < axis)]
        if inside:
            outer, inner = self.strategy.mesh.axes[axes[0]], self.strategy.mesh.axes[inside[0]]
            raise UnsupportedError(
                f"{self.strategy.name}: its products have weights in parts along {inner}, which cannot be in "
                f"parts along {outer} as well: give zero=0, or collective_block"
            )
        return axes

    @cached_property
    def summed(self) -> tuple[int, ...]:
        """Return the indices of the mesh axes along which its gradient is all-reduced, or reduce-scattered."""
        return tuple(axis for axis, dim in enumerate(self.terms) if dim == "partial")

    @cached_property
    def compiled_move(self) -> GradientSum | Mover | None:
        """Return what moves it in a compiled graph: a `Mover` if it is gathered, a `GradientSum` if summed.

        None where neither its values nor its gradient move.
        """
        parts, kept = self.layout.parts, self.layout.dims
        sides = tuple(
            Side(s.dim, s.count * parts, s.unit) if s.dim == "inner" else s for s in self.layout.sides
        )
        back = PlacedMove(self.strategy, sides, self.terms, kept, has_tokens=False)
        if self.gathered:
            return Mover(PlacedMove(self.strategy, sides, kept, self.used, has_tokens=False), back)
        return GradientSum(back) if self.summed else None

    @cached_property
    def max_kept_elements(self) -> int:
        """Return how many elements of it the rank that keeps most of them keeps."""
        counts = (
            math.prod(sum(b - a for a, b in spans) for spans in self._spans(self.layout.dims, at))
            for at in map(self.strategy.mesh.coords, self.strategy.mesh.ranks)
        )
        return max(counts)

    @cached_property
    def used_shape(self) -> tuple[int, ...]:
        """Return the shape of the part of the parameter that this rank uses in products."""
        return tuple(sum(b - a for a, b in spans) for spans in self._spans(self.used))

    def _spans(
        self, dims: AxisDims, coordinates: tuple[int, ...] | None = None
    ) -> list[list[tuple[int, int]]]:
        return self.layout.ranges(self.strategy, dims, coordinates)

    @cached_property
    def parts(self) -> tuple[int, list[list[tuple[int, int]]]]:
        """Return (dim, ranges): the index of the gathered dim, and which elements of that dim each rank keeps.

        `ranges` has one list of (start, stop) for each rank along the gathered axes, in row-major order.
        """
        (name,), here = {self.layout.dims[axis] for axis in self.gathered}, self.strategy.coordinates
        dim = [side.dim for side in self.layout.sides].index(name)
        ranges = [
            range(size) if axis in self.gathered else (here[axis],)
            for axis, size in enumerate(self.strategy.mesh.shape)
        ]
        return dim, [self._spans(self.layout.dims, at)[dim] for at in itertools.product(*ranges)]

    def pairs(self, used: Tensor, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of views of equal shape: (a part of `used`, the same elements in `rows`).

        Args:
            used: a tensor of `used_shape`.
            rows: (ranks, elements): what each rank along the gathered axes keeps, in the order of `parts`.
        """
        dim, parts = self.parts
        if all(len(spans) == 1 for spans in parts) and len({b - a for ((a, b),) in parts}) == 1:
            split = used.unflatten(dim, (len(parts), -1)).movedim(dim, 0)
            own = rows[:, : used.numel() // len(parts)]  # ranks elsewhere in the mesh may keep more
            return [(split, own.unflatten(1, split.shape[1:]))]
        views = []
        for row, spans in zip(rows, parts, strict=True):
            sizes = [b - a for a, b in spans]
            shape = (*used.shape[:dim], sum(sizes), *used.shape[dim + 1 :])
            kept = row[: math.prod(shape)].view(shape).split(sizes, dim)
            views += [(used.narrow(dim, a, b - a), part) for (a, b), part in zip(spans, kept, strict=True)]
        return views


@dataclass(frozen=True, eq=False)
class ParameterBucket:
    """Parameters of one dtype that are gathered along the same mesh axes, or none, and summed along the same axes.

    A row is the flat memory of what one rank keeps of all of them, one parameter after the other, and then one
    element for the number of the call, by which ranks see that they are in the same call.

    Attributes:
        kept: how each parameter is kept; one row has them in this order.
        dtype: that of the parameters.
    """

    kept: tuple[KeptParameter, ...]
    dtype: torch.dtype

    @property
    def strategy(self) -> LayerStrategy:
        """Return the strategy that its parameters share."""
        return self.kept[0].strategy

    def subset(self, places: tuple[int, ...]) -> ParameterBucket:
        """Return a bucket of the parameters at indices `places` of `kept`; equal `places` give the same object."""
        if len(places) == len(self.kept):
            return self
        return _some_of(self, places)

    @cached_property
    def sizes(self) -> list[int]:
        """Return the element counts of a row: the most of each parameter on a rank, then 1 for the call number."""
        return [*(each.max_kept_elements for each in self.kept), 1]

    @cached_property
    def _sides(self) -> tuple[Side, Side]:
        count = math.prod(self.strategy.mesh.shape[axis] for axis in self.kept[0].gathered)
        return Side("hidden", count), Side("", sum(self.sizes))

    @cached_property
    def _kept_dims(self) -> AxisDims:
        first = self.kept[0]
        return tuple("hidden" if axis in first.gathered else "" for axis in range(len(first.used)))

    @cached_property
    def gather(self) -> SizedMove:
        """Return the program that all-gathers the bucket: this rank's row in, the rows of all ranks out."""
        replicated = self.strategy.roles.replicated
        return sized_move(MoveSite(self._sides, self._kept_dims, replicated), self.strategy, self.dtype, True)

    @property
    def is_in_place(self) -> bool:
        """Return whether its parameters are used as kept, without a gather; gradients are then all-reduced.

        Else gradients are reduce-scattered.
        """
        return not self.kept[0].gathered

    @cached_property
    def reduction(self) -> SizedMove:
        """Return the program that sums gradients over ranks: this rank's terms of all rows -> its row's sum."""
        first = self.kept[0]
        terms: AxisDims = tuple("partial" if a in first.summed else "" for a in range(len(first.used)))
        return sized_move(MoveSite(self._sides, terms, self._kept_dims), self.strategy, self.dtype, True)

    def _reductions(self, device: torch.device) -> tuple[BoundReduction, ...]:
        """Return the reduction on memory that buckets of its sizes share, and before it one on its own memory.

        There is none of its own where gradients do not stay in it. All ranks call it.
        """
        shared, known = self.reduction.bound(device), self._bound.get(device, ())
        if not known or known[-1].bound is not shared:
            known = (BoundReduction(self, shared, lends=False),)
            if self.is_in_place and device.type == "cpu":
                own = self.reduction.bound_apart(device, twin=shared)
                known = (BoundReduction(self, own, lends=True), *known)
            self._bound[device] = known
        return known

    @cached_property
    def _bound(self) -> dict[torch.device, tuple[BoundReduction, ...]]:
        return {}

    def release(self) -> None:
        """Free the bound reduction programs; memory of living tensors stays. The next sum binds them anew."""
        self._bound.clear()

    @cached_property
    def num_used(self) -> int:
        """Return how many elements of all its parameters this rank uses: the sum of the sizes of `used_shape`."""
        return sum(math.prod(each.used_shape) for each in self.kept)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return, for each parameter, a view in its `used_shape` of `flat` (num_used,), which has all in order."""
        shapes = [each.used_shape for each in self.kept]
        parts = flat.split([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def fill(self, views: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        """All-gather the parameters into `views`, tensors in the `used_shape` of each. Collective.

        `kept` has this rank's shards of the parameters, in the same order.
        """
        bound = self.gather.bound(views[0].device)
        (row,) = bound.inputs["x"]
        *places, last = row.split(self.sizes)
        for place, own in zip(places, kept, strict=True):
            place[: own.numel()].view(own.shape).copy_(own)
        number = call_number(bound, self.dtype)
        last.fill_(number)
        bound.run(bound.inputs)
        *parts, last = bound.outputs["y"].split(self.sizes, 1)
        check_number(last, number)
        for each, used, part in zip(self.kept, views, parts, strict=True):
            for value, arrived in each.pairs(used, part):
                value.copy_(arrived)

    def begin_sum(
        self, grads: Sequence[Tensor | None], shapes: Sequence[torch.Size]
    ) -> tuple[list[Tensor], Callable[[], list[Tensor]]]:
        """Begin to sum gradients over ranks; return (this rank's part of each sum, a function that awaits them).

        Collective, as is the returned function, which raises BindError where ranks are in other calls, and returns
        those of the sums to which no rank gave a term. On a CPU the sum runs beside what the caller does until it
        waits.

        Args:
            grads: this rank's terms, one per parameter in its `used_shape`; None for none, but not all are None.
            shapes: the shapes of this rank's shards of the parameters.
        """
        first, *others = self._reductions(next(grad.device for grad in grads if grad is not None))
        # Which one it is is each rank's own affair: they are twins, one call with the same bytes.
        reduction = first if first.is_free or not others else others[0]
        return reduction.begin(grads, shapes)


class BoundReduction:
    """The program that reduces the gradients of a bucket, bound to memory of this rank.

    A rank without a term for a parameter adds negative zeros, and one with a term adds no negative zero as its
    first element: that of the sum is a negative zero just where no rank has a term (IEEE 754-2019, section 6.3).

    Args:
        bucket: the parameters.
        bound: its `reduction`, bound.
        lends: whether `begin` returns the sums in the program's own memory, which is not free while they live;
            else it returns copies.
    """

    def __init__(self, bucket: ParameterBucket, bound: BoundProgram, *, lends: bool) -> None:
        self.bucket, self.bound = bucket, bound
        first = bucket.kept[0]
        self._terms = terms_of(bucket.strategy, first.summed)
        *self._rows, self._last = bound.inputs["x"].split(bucket.sizes, 1)
        (self._result,) = bound.outputs["y"]
        self._memory = LentMemory(self._result) if lends else None
        self._shapes: list[torch.Size] = []
        self._alike: list[Tensor] = []

    @property
    def is_free(self) -> bool:
        """Return whether no tensor of an earlier `begin` is alive in its memory; True where it does not lend."""
        return self._memory is None or self._memory.is_free

    @cached_property
    def _places(self) -> list[Tensor]:
        """Return where the gradient of each parameter goes, in its shape, where nothing is gathered."""
        pairs = zip(self.bucket.kept, self._rows, strict=True)
        shapes = [(each.used_shape, row[0]) for each, row in pairs]
        return [row[: math.prod(shape)].view(shape) for shape, row in shapes]

    @cached_property
    def _firsts(self) -> Tensor:
        """Return the index in a row of the first element of each parameter: (parameters that have any,)."""
        starts = itertools.accumulate(self.bucket.sizes[:-1], initial=0)
        firsts = [start for start, size in zip(starts, self.bucket.sizes[:-1], strict=False) if size]
        return torch.tensor(firsts, device=self._result.device)

    def begin(
        self, grads: Sequence[Tensor | None], shapes: Sequence[torch.Size]
    ) -> tuple[list[Tensor], Callable[[], list[Tensor]]]:
        """Begin to sum gradients over ranks; return (this rank's part of each sum, a function that awaits them).

        `grads` and `shapes` are those of `ParameterBucket.begin_sum`.
        """
        bound = self.bound
        bound.end_begun()
        missing = [at for at, grad in enumerate(grads) if grad is None]
        self._put(grads)
        own, expected = summed_number(bound, self.bucket.dtype, *self._terms)
        self._last.fill_(own)
        flat = torch.empty_like(self._result) if self._memory is None else self._memory.lend()

        def take() -> None:
            if self._memory is None:
                flat.copy_(self._result)
            check_number(self._result[-1:], expected)

        sums, wait = self._views(flat, shapes), bound.begin(take)

        def end() -> list[Tensor]:
            wait()
            firsts = flat.split(self.bucket.sizes) if missing else ()
            return [sums[at] for at in missing if is_negative_zero(firsts[at][:1])]

        return sums, end

    def _views(self, flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Return the parts of memory for the results that belong to what this rank keeps, in its shapes."""
        if self._shapes != shapes:
            self._shapes = list(shapes)
            is_full = [math.prod(shape) for shape in shapes] == self.bucket.sizes[:-1] and all(
                self.bucket.sizes
            )
            self._alike = [torch.empty(shape, device="meta") for shape in shapes] if is_full else []
        if self._alike:
            return compat.views_of(flat, self._alike)
        *own, _ = flat.split(self.bucket.sizes)
        return [part[: math.prod(shape)].view(shape) for part, shape in zip(own, shapes, strict=True)]

    def _put(self, grads: Sequence[Tensor | None]) -> None:
        """Write gradients into the memory of the terms, and negative zeros where there are none."""
        given = [(at, grad) for at, grad in enumerate(grads) if grad is not None]
        if self.bucket.is_in_place:
            compat.copy_each([self._places[at] for at, _ in given], [grad for _, grad in given])
        else:
            for at, grad in given:
                for value, part in self.bucket.kept[at].pairs(grad, self._rows[at]):
                    part.copy_(value)
        terms = self.bound.inputs["x"]
        terms[:, self._firsts] += 0.0  # -0.0 becomes 0.0
        for rows, grad in zip(self._rows, grads, strict=True):
            if grad is None:
                rows.fill_(-0.0)


def is_negative_zero(value: Tensor) -> bool:
    """Return whether a tensor of one element is -0.0; False for one of none. The host waits for the value."""
    return bool(((value == 0) & torch.signbit(value)).any())


@lru_cache(256)
def _some_of(bucket: ParameterBucket, places: tuple[int, ...]) -> ParameterBucket:
    return ParameterBucket(tuple(bucket.kept[at] for at in places), bucket.dtype)
