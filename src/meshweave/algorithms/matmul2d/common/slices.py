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
    """The slices of a dim: sets of elements that are gathered, multiplied and scattered together.

    The dim is cut into periods of sum(widths) blocks of `block` elements. Of each period slice 0 gets the first
    widths[0] blocks, slice 1 the next widths[1], and so on: size 12, widths (1, 2) and block 2 give slice 0 the
    elements 0, 1, 6, 7, and slice 1 the others. Methods name a slice by its number, or by the elements
    [start, start + width) that it has of each period. `Index` values are integers or expressions.

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
        """Return (start, stop): which elements of a period, counted from its start, slice `number` has."""
        start = sum(self.widths[:number]) * self.block
        return start, start + self.widths[number] * self.block

    def num_below_index(self, position: Index, start: Index, width: Index) -> Index:
        """Return how many elements below `position`, an index in the whole dim, belong to a slice.

        The slice has elements [start, start + width) of each period. Arguments and result may be expressions.
        """
        rest = minimum(maximum(position % self.period - start, 0), width)
        return (position // self.period) * width + rest

    def part(self, axis_size: int, coordinate: Index, start: Index, width: Index) -> tuple[Index, Selector]:
        """Return what one shard holds of a slice: (number of elements, selector of them in the shard).

        The slice has elements [start, start + width) of each period. The shard is that of the chip at
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
        """Return the most elements of slice `number` that one shard holds, of a mesh axis of `axis_size` chips."""
        start, stop = self.bounds(number)
        return self.largest_part_of(axis_size, start, stop - start)

    def largest_part_of(self, axis_size: int, start: int, width: int) -> int:
        """Return the most elements of a slice that one shard holds, of a mesh axis of `axis_size` chips.

        The slice has elements [start, start + width) of each period.
        """
        return max(self.largest_parts_of(axis_size, start, width))

    def largest_parts_of(self, axis_size: int, start: int, width: int) -> tuple[int, int]:
        """Return (most elements of a slice on any full shard, its elements on the last shard if that is smaller).

        The slice has elements [start, start + width) of each period; shards are those of a mesh axis of
        `axis_size` chips. The second number is 0 if all shards are full. As the start of a shard moves along the
        period, its elements of a slice rise to a plateau and fall again, so only shards next to the plateau's
        start are compared.
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
        """Return how many elements below `position`, an index in the whole dim, belong to a slice.

        The slice has elements [start, start + width) of each period. It is `num_below_index` for plain integers.
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
    """Return the slices of a problem's sliced dim that a config asks for.

    The config's `block` is halved until a period fits into a shard along the longer of `row` and `col`, or until
    it is 1 element. Slices that would be empty on all shards are left out.

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
