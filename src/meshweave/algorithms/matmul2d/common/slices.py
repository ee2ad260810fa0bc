"""The slices of MeshSlice: of which elements of the sliced dim each consists, and how much of it a shard holds."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property, lru_cache

from meshweave.algorithms.matmul2d.common.problem import Matmul2dConfig, Matmul2dProblem
from meshweave.base.errors import LayoutError
from meshweave.ir.program.expressions import Index, maximum, minimum
from meshweave.ir.program.views import Blocked, Selector


@dataclass(frozen=True)
class Slices:
    """The slices of a dim: which blocks of neighbouring elements each consists of.

    Blocks go to the slices in turn, in periods of sum(widths) blocks.

    Attributes:
        size: elements of the dim.
        widths: for each slice its number of blocks in a period.
        block: elements of a block.
    """

    size: int
    widths: tuple[int, ...]
    block: int

    @cached_property
    def period(self) -> int:
        """Return the number of elements in a period."""
        return sum(self.widths) * self.block

    def bounds(self, number: int) -> tuple[int, int]:
        """Return [start, stop) of slice `number` within a period."""
        start = sum(self.widths[:number]) * self.block
        return start, start + self.widths[number] * self.block

    def num_below_index(self, position: Index, start: Index, width: Index) -> Index:
        """Return how many elements lie below `position` of the slice with [start, start + width) of each period.

        `position` is an index in the whole dim. All may be expressions, as is the result.
        """
        rest = minimum(maximum(position % self.period - start, 0), width)
        return (position // self.period) * width + rest

    def part(self, axis_size: int, coordinate: Index, start: Index, width: Index) -> tuple[Index, Selector]:
        """Return what one shard holds of the slice that has elements [start, start + width) of each period.

        It is (number of elements, selector of them among the shard's elements). The shard is the one at
        `coordinate` of a mesh axis of `axis_size` chips.
        """
        each = -(-self.size // axis_size)
        if self.size % (axis_size * self.period) == 0:
            return each // self.period * width, Blocked(start, width, self.period)
        begin, end = coordinate * each, (coordinate + 1) * each
        if self.size % axis_size:
            begin, end = minimum(begin, self.size), minimum(end, self.size)
        size = self.num_below_index(end, start, width) - self.num_below_index(begin, start, width)
        return size, Blocked(start - begin % self.period, width, self.period)

    def largest_part(self, axis_size: int, number: int) -> int:
        """Return the most elements of slice `number` that any shard of a mesh axis of `axis_size` chips holds."""
        start, stop = self.bounds(number)
        return self.largest_part_of(axis_size, start, stop - start)

    def largest_part_of(self, axis_size: int, start: int, width: int) -> int:
        """Return the most elements that a shard holds of the slice with [start, start + width) of each period.

        Shards are those of a mesh axis of `axis_size` chips.
        """
        return max(self.largest_parts_of(axis_size, start, width))

    def largest_parts_of(self, axis_size: int, start: int, width: int) -> tuple[int, int]:
        """Return (most elements of a slice on any whole shard, those on the shard that is cut short).

        The slice has [start, start + width) of each period; shards are those of a mesh axis of `axis_size`
        chips. The last may be cut short by the end of the dim; the second number is 0 if it is not. As the start
        of a shard moves along the period, the elements that it holds of a slice rise to a plateau and fall
        again. So only shards that start next to the plateau's start are looked at.
        """
        each = -(-self.size // axis_size)
        if self.size % (axis_size * self.period) == 0:
            return each // self.period * width, 0
        full, rest = self.size // each, each % self.period
        known = _residues(rest, self.period, full)
        at = bisect_left(known, (start + width - rest if rest >= width else start) % self.period)
        whole = max(
            self.num_below(begin + each, start, width) - self.num_below(begin, start, width)
            for begin in (known[at % len(known)], known[at - 1])
        )
        return whole, self.num_below(self.size, start, width) - self.num_below(full * each, start, width)

    def num_below(self, position: int, start: int, width: int) -> int:
        """Return how many elements lie below `position` of the slice with [start, start + width) of each period.

        It is `num_below_index` for plain integers; `position` is an index in the whole dim.
        """
        periods, rest = divmod(position, self.period)
        return periods * width + min(max(rest - start, 0), width)

    def total(self, number: int) -> int:
        """Return how many elements slice `number` has in the whole dim, over all shards."""
        start, stop = self.bounds(number)
        return self.num_below(self.size, start, stop - start)


@lru_cache(maxsize=256)
def _residues(step: int, period: int, count: int) -> tuple[int, ...]:
    """Return the different remainders of the first `count` multiples of `step` by `period`, ascending."""
    return tuple(sorted({i * step % period for i in range(min(count, period // math.gcd(step, period)))}))


def slices_of(problem: Matmul2dProblem, config: Matmul2dConfig) -> Slices:
    """Return the slices of a problem's sliced dim.

    The config's block is halved until a period fits into a shard of the longer of `row` and `col`, or is 1
    element.
    Slices that would be empty on all shards are left out.

    Raises:
        LayoutError: the sliced dim has fewer elements than slices, or a width or the block is not positive.
    """
    if not config.slices or min(config.slices) < 1 or config.block < 1:
        raise LayoutError(f"slices {config.slices} and block {config.block} must be positive")
    size = problem.sliced_size
    if len(config.slices) > size:
        raise LayoutError(
            f"{len(config.slices)} slices of a dim of {size} elements; at most {size} make sense"
        )
    block = config.block
    while block > 1 and sum(config.slices) * block > -(-size // max(problem.mesh_shape[:2])):
        block //= 2  # the period should fit into a shard, or some slices would be empty there
    widths, start = [], 0
    for width in config.slices:  # those that start beyond the end would be empty everywhere
        if start < size:
            widths.append(width)
        start += width * block
    return Slices(size, tuple(widths), block)
