"""MeshSlice with tiles of C in place of terms of a sum (ours; tiles grow as in blocked linear algebra).

Slices of K, as MeshSlice takes them when C stays, make each product add to all of C: C is read and written once
a slice. Here the rows of A on each chip are cut into S panels, and so are the columns of B. Each panel is gathered
on its own, and the product of panel i of A and panel j of B is tile (i, j) of C, computed once. Gathers move what
they did, and memory is that of whole gathers.

The tiles grow from a corner: after panel s of A come the tiles (s, 0) to (s, s - 1), after panel s of B the tiles
(0, s) to (s, s). So only the first panel of each matrix is waited for, and later gathers have more and more
products beside them. Where A or B stays, slices of MeshSlice add nothing up, and the programs are MeshSlice's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise
from typing import cast

from meshweave.algorithms.matmul2d.common.extents import chunk_extent, largest_extent, local_extent
from meshweave.algorithms.matmul2d.common.ops import collective_of, local_product, moving_scratch, with_ops
from meshweave.algorithms.matmul2d.common.problem import (
    MESH,
    Matmul2dConfig,
    Matmul2dProblem,
    MovingMatrix,
    two_d_placements,
)
from meshweave.algorithms.matmul2d.common.slices import slices_of
from meshweave.algorithms.matmul2d.meshslice import MeshSlice, build, uniform_slices
from meshweave.algorithms.matrix_views import matrix_slice
from meshweave.base.errors import LayoutError
from meshweave.base.units import dtype_bytes
from meshweave.describe.machine.cluster import Cluster
from meshweave.ir.program import Buffer, Program
from meshweave.ir.program.expressions import Index, Var
from meshweave.ir.program.ops import Op
from meshweave.ir.program.views import Range, View
from meshweave.ir.skeleton import Skeleton, Task
from meshweave.ir.work import Transfer, matmul_work

BLOCK = 8
"""Elements of a block of slices. Rows of A, and columns of B, in an offered panel are multiples of it."""
MAX_PANELS = 16
"""The most panels of each matrix that are offered: 256 products."""

Panels = list[tuple[Index, Index]]
"""[start, stop) of each panel in the rows of A, or the columns of B, on a chip."""


def panels_of(extent: Index, widths: Sequence[int]) -> Panels:
    """Return the panels of `extent` rows or columns, as wide as `widths` says relative to each other."""
    ends = accumulate(widths, initial=0)
    return list(pairwise(extent * end // sum(widths) for end in ends))


def growing_square(panel: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the tiles (i, j) that panel number `panel` of A makes possible, and those that B's then does."""
    return tuple((panel, j) for j in range(panel)), tuple((i, panel) for i in range(panel + 1))


def _require_panels(problem: Matmul2dProblem, config: Matmul2dConfig) -> None:
    placed = two_d_placements(problem)
    least = min(largest_extent(problem, placed, operand, dim) for operand, dim in (("a", 0), ("b", 1)))
    if not config.slices or min(config.slices) < 1:
        raise LayoutError(f"panels of widths {config.slices}; give at least one, each 1 or more")
    if sum(config.slices) > least:
        raise LayoutError(
            f"{config.slices} are more panels than a chip has rows of A or columns of B: {least}"
        )


def _tile_program(problem: Matmul2dProblem, config: Matmul2dConfig, name: str) -> Program:
    placed = two_d_placements(problem)
    buffers: list[Buffer] = []
    panels: dict[str, Panels] = {}
    gathers: list[list[Op]] = []
    whole = {"a": "a", "b": "b"}
    for moving in (problem.horizontal, problem.vertical):
        operand = moving.operand
        extent = local_extent(problem, placed, operand, 1 - moving.dim)
        panels[operand] = panels_of(extent, config.slices)
        if problem.axis_size(moving.axis) == 1:
            gathers.append([])
            continue
        whole[operand] = f"{operand}_g"
        buffers.append(moving_scratch(problem, placed, moving, whole[operand], problem.k))
        gathers.append([_gather(problem, moving, Range(*panel)) for panel in panels[operand]])
    body: list[Op] = []
    for panel in range(config.slice_count):
        for moved, tiles in zip(gathers, growing_square(panel), strict=True):
            body += moved[panel : panel + 1]
            for i, j in tiles:
                rows, columns = Range(*panels["a"][i]), Range(*panels["b"][j])
                views = {
                    "a": matrix_slice(whole["a"], 0, rows),
                    "b": matrix_slice(whole["b"], 1, columns),
                    "c": View("c", (rows, columns)),
                }
                body.append(local_product("os", views, 0))
    return with_ops(problem.declarations(name, placed), buffers, ("compute", "row", "col"), body)


def _gather(problem: Matmul2dProblem, moving: MovingMatrix, panel: Range) -> Op:
    """Return the op that gathers a panel of a matrix: all of K, and those rows or columns."""
    whole, shard = (
        matrix_slice(buffer, 1 - moving.dim, panel) for buffer in (f"{moving.operand}_g", moving.operand)
    )
    sizes = chunk_extent(problem.k, problem.axis_size(moving.axis), Var("peer"))
    return collective_of(moving, whole, shard, sizes)


def _tile_tasks(problem: Matmul2dProblem, config: Matmul2dConfig) -> Iterator[tuple[Task, ...]]:
    """Yield, for each panel, the tasks of its gathers and tiles on the rank with the largest shards."""
    placed, both = two_d_placements(problem), (problem.horizontal, problem.vertical)
    widths: list[list[int]] = []
    for moving in both:
        extent = largest_extent(problem, placed, moving.operand, 1 - moving.dim)
        widths.append([cast(int, stop - start) for start, stop in panels_of(extent, config.slices)])
    for panel in range(config.slice_count):
        tasks: list[Task] = []
        waits: tuple[tuple[str, int], ...] = ()
        for moving, across, tiles in zip(both, widths, growing_square(panel), strict=True):
            size = problem.axis_size(moving.axis)
            if size > 1:
                part = largest_extent(problem, placed, moving.operand, moving.dim)
                part_bytes = part * across[panel] * dtype_bytes(problem.dtype)
                gather = Transfer("all_gather", f"{MESH}.{moving.axis}", size, part_bytes)
                tasks.append(Task(f"gather_{moving.operand}", moving.axis, gather))
                waits = (*waits, (tasks[-1].name, 0))
            for (rows, columns), equal in groupby((widths[0][i], widths[1][j]) for i, j in tiles):
                work = matmul_work(rows, columns, problem.k, problem.dtype)
                tasks.append(Task(f"matmul_{len(tasks)}", "compute", work, waits, len(list(equal))))
        yield tuple(tasks)


def panel_counts(problem: Matmul2dProblem) -> list[int]:
    """Return the numbers of panels that are offered, ascending, at most `MAX_PANELS`.

    Each divides the rows of A and the columns of B on a chip into multiples of `BLOCK`. Where chips have unequal
    ones, or none divides them, the result is instead the powers of two up to the least of the two.
    """
    placed = two_d_placements(problem)
    extents = [largest_extent(problem, placed, operand, dim) for operand, dim in (("a", 0), ("b", 1))]
    most = min(MAX_PANELS, *extents)
    if problem.m % problem.mesh_shape[0] == problem.n % problem.mesh_shape[1] == 0:
        counts = [n for n in range(1, most + 1) if all(extent % (n * BLOCK) == 0 for extent in extents)]
        if counts:
            return counts
    return [1 << e for e in range(most.bit_length())]


class MeshSliceTiled(MeshSlice):
    """MeshSlice, but where C stays gathers of panels of A and B beside products of whole tiles of C.

    A config chooses the panels: `slices` are their relative widths, of A and of B. Candidates are equal panels, as
    many as `panel_counts` says. Where A or B stays, all is as in MeshSlice.
    """

    name = "meshslice_tiled"
    title = "MeshSlice, tiled"
    source = "MeshSlice, section 3.1, with slices of M and N in place of K"
    config_fields = ("slices",)

    def candidates(
        self, problem: Matmul2dProblem, cluster: Cluster | None = None
    ) -> Iterator[Matmul2dConfig]:
        """Yield a config of equal panels, or slices, for each number of them, the fewest first.

        `cluster` is ignored.
        """
        if problem.dataflow != "os":
            yield from uniform_slices(problem, BLOCK)
            return
        for count in panel_counts(problem):
            yield Matmul2dConfig((1,) * count)

    def program(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Program:
        """Return the program of a config.

        Raises:
            LayoutError: there are more panels than a chip has rows of A or columns of B, or a width is below 1;
                where A or B stays, what `MeshSlice.program` raises.
        """
        if problem.dataflow != "os":
            return build(problem, slices_of(problem, replace(config, block=BLOCK)), self.name)
        _require_panels(problem, config)
        return _tile_program(problem, config, self.name)

    def skeleton(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Skeleton:
        """Return the skeleton of a config: the tasks of the rank with the largest shards.

        Raises LayoutError, as `program` does.
        """
        if problem.dataflow != "os":
            return super().skeleton(problem, replace(config, block=BLOCK))
        _require_panels(problem, config)
        return Skeleton.of_turns(_tile_tasks(problem, config))


MESHSLICE_TILED = MeshSliceTiled()
