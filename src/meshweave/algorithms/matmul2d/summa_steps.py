"""The steps of SUMMA: how its sliced dim is cut, so that each panel lies in one shard."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import pairwise

from meshweave.algorithms.matmul2d.common.problem import Matmul2dProblem, MovingMatrix
from meshweave.base.errors import LayoutError


@dataclass(frozen=True)
class SliceStep:
    """One step of the product: elements [start, start + width) of the sliced dim."""

    start: int
    width: int

    def panels(self, problem: Matmul2dProblem, moving: MovingMatrix) -> tuple[tuple[int, int], ...]:
        """Return the panels of this step: its parts that each lie in one shard of `moving`, as (offset, width).

        Offset and width are in elements of the sliced dim; offsets count from `start`. The panels cover the step,
        in order.
        """
        shard_size = problem.largest_part(problem.sliced_size, moving.axis)
        next_shard = (self.start // shard_size + 1) * shard_size
        inner = range(next_shard, self.start + self.width, shard_size)
        edges = [0, *(edge - self.start for edge in inner), self.width]
        return tuple((lo, hi - lo) for lo, hi in pairwise(edges))


def slice_steps(problem: Matmul2dProblem, count: int) -> tuple[SliceStep, ...]:
    """Return `count` steps that cover the sliced dim, of about equal widths.

    Each ends at the shard boundary, along `row` or `col`, that is nearest to an even division. If there are too
    few boundaries, steps end between them as well.

    Raises:
        LayoutError: `count` is less than 1, or more than the elements of the sliced dim.
    """
    size = problem.sliced_size
    if not 1 <= count <= size:
        raise LayoutError(f"{count} turns over a dim of {size} elements; between 1 and {size} make sense")
    edges = _edges(problem, count)
    ends = [0]  # as positions in `edges`, of which enough must be left for the steps to come
    for number in range(1, count):
        above = bisect_left(edges, -(-number * size // count))
        below_is_nearer = (edges[above] + edges[above - 1]) * count >= 2 * number * size
        nearest = above - 1 if below_is_nearer else above
        ends.append(min(max(nearest, ends[-1] + 1), len(edges) - 1 - (count - number)))
    ends.append(len(edges) - 1)
    return tuple(SliceStep(edges[lo], edges[hi] - edges[lo]) for lo, hi in pairwise(ends))


def _edges(problem: Matmul2dProblem, least: int) -> list[int]:
    """Return where steps may begin and end, so that at least `least` of them are possible.

    These are the shard boundaries, and where they are too few, points between them; the widest parts are cut
    first.
    """
    size = problem.sliced_size
    edges = {0, size}
    for axis in ("row", "col"):
        edges.update(range(0, size, problem.largest_part(size, axis)))
    shards = sorted(edges)
    if len(shards) > least:
        return shards
    # A part is cut into equal pieces. The part with the widest pieces is first in the heap.
    parts = [(-float(hi - lo), lo, hi, 1) for lo, hi in pairwise(shards)]
    heapify(parts)
    for _ in range(least - len(parts)):
        _, lo, hi, pieces = parts[0]
        heapreplace(parts, (-(hi - lo) / (pieces + 1), lo, hi, pieces + 1))
    for _, lo, hi, pieces in parts:
        edges.update(lo + (hi - lo) * i // pieces for i in range(1, pieces))
    return sorted(edges)


def are_alike(problem: Matmul2dProblem, steps: tuple[SliceStep, ...]) -> bool:
    """Return whether all steps have one width and equal `SliceStep.panels` for each of the two moving matrices.

    A program can then loop over the steps with one body. `steps` are those of `slice_steps`, at least one.
    """
    moving = (problem.horizontal, problem.vertical)
    width = steps[0].width
    if any(step.width != width for step in steps):
        return False
    shard_sizes = [problem.largest_part(problem.sliced_size, matrix.axis) for matrix in moving]
    if all(width % size == 0 or size % width == 0 for size in shard_sizes):
        return True  # each step has whole shards, or each shard has whole steps
    return len({(step.width, *(step.panels(problem, matrix) for matrix in moving)) for step in steps}) == 1
