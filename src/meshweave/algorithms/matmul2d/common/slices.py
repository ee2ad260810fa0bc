"""The slices of MeshSlice: which elements of the sliced dim each consists of, and how much of it a shard holds."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property, lru_cache

from meshweave.algorithms.matmul2d.common.problem import Config, MatmulProblem
from meshweave.base.errors import LayoutError
from meshweave.ir.program.expressions import Index, maximum, minimum
from meshweave.ir.program.views import Blocked, Selector


@dataclass(frozen=True)
class Slices:
    """Which elements of the sliced dim (of `size`) form slice s, and how they lie on a mesh axis.

    Blocks of `block` elements are dealt to slices in periods of sum(widths) blocks.
    """

    size: int
    widths: tuple[int, ...]
    block: int

    @cached_property
    def period(self) -> int:
        return sum(self.widths) * self.block

    def bounds(self, number: int) -> tuple[int, int]:
        """[start, stop) of slice `number` within a period."""
        start = sum(self.widths[:number]) * self.block
        return start, start + self.widths[number] * self.block

    def count_below(self, position: Index, start: Index, width: Index) -> Index:
        """How many elements of the slice [start, start + width) of the period lie below `position`."""
        rest = minimum(maximum(position % self.period - start, 0), width)
        return (position // self.period) * width + rest

    def part(self, axis_size: int, coordinate: Index, start: Index, width: Index) -> tuple[Index, Selector]:
        """Size and local selector of the slice on the shard at `coordinate` of a mesh axis."""
        each = -(-self.size // axis_size)
        if self.size % (axis_size * self.period) == 0:
            return each // self.period * width, Blocked(start, width, self.period)
        begin, end = coordinate * each, (coordinate + 1) * each
        if self.size % axis_size:
            begin, end = minimum(begin, self.size), minimum(end, self.size)
        size = self.count_below(end, start, width) - self.count_below(begin, start, width)
        return size, Blocked(start - begin % self.period, width, self.period)

    def largest_part(self, axis_size: int, number: int) -> int:
        """Size of slice `number` on the shard of a mesh axis that holds most of it."""
        start, stop = self.bounds(number)
        return self.largest(axis_size, start, stop - start)

    def largest(self, axis_size: int, start: int, width: int) -> int:
        """The same for the slice [start, start + width) of the period."""
        return max(self.largest_of_each(axis_size, start, width))

    def largest_of_each(self, axis_size: int, start: int, width: int) -> tuple[int, int]:
        """How much of a slice the whole shard that holds most of it holds, and the one cut short by the end
        of the dim (0 where there is none), without looking at every shard.

        As the begin of a shard moves along the period, what the shard holds of a slice rises to a plateau
        and falls again, so the largest part is that of a begin next to where the plateau starts.
        """
        each = -(-self.size // axis_size)
        if self.size % (axis_size * self.period) == 0:
            return each // self.period * width, 0
        full, rest = self.size // each, each % self.period
        known = _residues(rest, self.period, full)
        at = bisect_left(known, (start + width - rest if rest >= width else start) % self.period)
        whole = max(
            self.below(begin + each, start, width) - self.below(begin, start, width)
            for begin in (known[at % len(known)], known[at - 1])
        )
        return whole, self.below(self.size, start, width) - self.below(full * each, start, width)

    def below(self, position: int, start: int, width: int) -> int:
        """`count_below` of plain integers."""
        turns, rest = divmod(position, self.period)
        return turns * width + min(max(rest - start, 0), width)

    def total(self, number: int) -> int:
        start, stop = self.bounds(number)
        return self.below(self.size, start, stop - start)


@lru_cache(maxsize=256)
def _residues(step: int, period: int, count: int) -> tuple[int, ...]:
    """The different remainders of the first `count` multiples of `step`, in order."""
    return tuple(sorted({i * step % period for i in range(min(count, period // math.gcd(step, period)))}))


def slices_of(problem: MatmulProblem, config: Config) -> Slices:
    """The slices of a problem. Raises LayoutError where there are more than the sliced dim has elements."""
    if not config.slices or min(config.slices) < 1 or config.block < 1:
        raise LayoutError(f"slices {config.slices} and block {config.block} must be positive")
    size = problem.sliced_size
    if len(config.slices) > size:
        raise LayoutError(
            f"{len(config.slices)} slices of a dim of {size} elements; at most {size} make sense"
        )
    block = config.block
    while block > 1 and sum(config.slices) * block > -(-size // max(problem.mesh_shape)):
        block //= 2  # the period should fit into a shard, or some slices would be empty there
    widths, start = [], 0
    for width in config.slices:  # those that start beyond the end would be empty everywhere
        if start < size:
            widths.append(width)
        start += width * block
    return Slices(size, tuple(widths), block)
