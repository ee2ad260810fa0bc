"""MeshSlice: 2D products with sliced collectives (Nam et al., ISCA '25, section 3.1).

The sliced dim is cut into S slices. In step s each chip gathers slice s of the moving inputs, multiplies, and
reduces and scatters slice s of a moving output. Gathers of later slices, the product, and scatters of earlier
ones run at the same time, along both mesh axes. A slice is not a contiguous part but every S-th block of the
sliced dim. So every chip holds an equal share of every slice, and the gathered parts of A and B have the same k
in the same order.

Blocks are counted from the start of the global dim, whatever the shards are. Where a shard boundary cuts a block,
the two parts meet again in the gathered slice. So any M, N, K works on any mesh, and slices of unequal width
(tapered: thin first and last slices shorten prologue and epilogue) are the same program with other numbers. For
sizes that divide this is the slicing of the paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import ClassVar

from meshweave.algorithms.matmul2d.common.algorithm import Matmul2d
from meshweave.algorithms.matmul2d.common.extents import largest_extent, product_task
from meshweave.algorithms.matmul2d.common.ops import collective_of, local_product, moving_scratch, with_ops
from meshweave.algorithms.matmul2d.common.problem import (
    MESH,
    Matmul2dConfig,
    Matmul2dProblem,
    MovingMatrix,
    Placements,
    two_d_placements,
)
from meshweave.algorithms.matmul2d.common.slices import Slices, slices_of
from meshweave.algorithms.matrix_views import full_matrix, matrix_slice
from meshweave.base.units import dtype_bytes
from meshweave.describe.machine.cluster import Cluster
from meshweave.ir.program import Buffer, Program, Repeat
from meshweave.ir.program.expressions import Index, Var, binary
from meshweave.ir.program.ops import Copy, Op
from meshweave.ir.program.views import FULL, Range, View
from meshweave.ir.skeleton import Phase, Skeleton, Task
from meshweave.ir.work import Transfer, move_work

SLOTS = 4
"""The most buffers per moving matrix. A product reads one while a collective fills the next. Two suffice where no
collective is late; with two more, a late slice of one matrix does not stop the lane of the other."""

PEER = Var("peer")


# --- program --------------------------------------------------------------------------------------------


class _MeshSliceProgramBuilder:
    def __init__(self, problem: Matmul2dProblem, slices: Slices, placements: Placements) -> None:
        self.problem, self.slices, self.placements = problem, slices, placements
        self.sliced = len(slices.widths) > 1
        self.slots = min(SLOTS, len(slices.widths))
        self.buffers: list[Buffer] = []
        for moving in (problem.horizontal, problem.vertical):
            self._declare(moving)

    def is_communicated(self, moving: MovingMatrix) -> bool:
        """Return whether a matrix moves between chips: not on a mesh axis of one chip."""
        return self.problem.axis_size(moving.axis) > 1

    def _declare(self, moving: MovingMatrix) -> None:
        """Declare scratch: the local slice `x_s` and the gathered (or unreduced) block `x_g` of operand x."""
        problem, slices = self.problem, self.slices
        numbers = range(len(slices.widths))
        local = max(slices.largest_part(problem.axis_size(moving.axis), s) for s in numbers)
        whole = max(slices.total(s) for s in numbers)
        is_communicated = self.is_communicated(moving)
        for suffix, along, is_needed in (
            ("s", local, self.sliced and is_communicated),
            ("g", whole, self.sliced or is_communicated),
        ):
            if is_needed:
                name = f"{moving.operand}_{suffix}"
                self.buffers.append(moving_scratch(problem, self.placements, moving, name, along, self.slots))

    def step_ops(self, number: Index, start: Index, width: Index, total: Index) -> list[Op]:
        """Return the ops of slice `number`: [start, start + width) of a period, `total` elements in all."""
        problem = self.problem
        slot = number % self.slots if self.sliced else 0
        before: list[Op] = []
        after: list[Op] = []
        operand = {"a": full_matrix("a"), "b": full_matrix("b"), "c": full_matrix("c")}
        for moving in (problem.horizontal, problem.vertical):
            ops, view = self._move(moving, slot, start, width, total)
            operand[moving.operand] = view
            (after if moving.scattered else before).extend(ops)
        sums = problem.dataflow == "os" and self.sliced
        accumulate = binary(">", number, 0) if sums else 0
        return [*before, local_product(problem.dataflow, operand, accumulate), *after]

    def _move(
        self, moving: MovingMatrix, slot: Index, start: Index, width: Index, total: Index
    ) -> tuple[list[Op], View]:
        """Return the ops that gather (or scatter) one slice of a matrix, and the view that the product uses."""
        size = self.problem.axis_size(moving.axis)
        name = moving.operand
        at = Var(f"{MESH}.{moving.axis}")
        part, selector = self.slices.part(size, at, start, width)
        shard = matrix_slice(name, moving.dim, selector if self.sliced else FULL)
        gathered = matrix_slice(f"{name}_g", moving.dim, Range(0, total), slot)
        if not self.is_communicated(moving):
            if not self.sliced:
                return [], full_matrix(name)
            pair = (shard, gathered) if moving.scattered else (gathered, shard)
            return [Copy(out=pair[0], src=pair[1], lane=moving.axis, name=_copy_name(moving))], gathered
        piece = matrix_slice(f"{name}_s", moving.dim, Range(0, part), slot) if self.sliced else shard
        sizes = self.slices.part(size, PEER, start, width)[0]
        copy: list[Op] = []
        if self.sliced:
            pair = (shard, piece) if moving.scattered else (piece, shard)
            copy = [Copy(out=pair[0], src=pair[1], lane=moving.axis, name=_copy_name(moving))]
        moved = collective_of(moving, gathered, piece, sizes)
        return ([moved, *copy] if moving.scattered else [*copy, moved]), gathered


def _copy_name(moving: MovingMatrix) -> str:
    return f"{'place' if moving.scattered else 'slice'}_{moving.operand}"


def build(
    problem: Matmul2dProblem, slices: Slices, name: str, placements: Placements | None = None
) -> Program:
    """Return a program, called `name`, that gathers, multiplies and scatters one slice after another.

    One slice gives the collective product.

    Args:
        slices: the slices of the dim that both moving matrices share, of equal or unequal widths.
        placements: for each of "a", "b" and "c" one placement per mesh axis; the dims that are not sliced may be
            sharded over further axes. None for `two_d_placements`.
    """
    placed = placements or two_d_placements(problem)
    builder = _MeshSliceProgramBuilder(problem, slices, placed)
    count = len(slices.widths)
    even = problem.sliced_size % slices.period == 0
    if count > 1 and len(set(slices.widths)) == 1 and even:
        s = Var("s")
        width = slices.widths[0] * slices.block
        ops = builder.step_ops(s, s * width, width, slices.total(0))
        body: tuple[Op | Repeat, ...] = (Repeat("s", count, tuple(ops)),)
    else:
        listed: list[Op] = []
        for number in range(count):
            start, stop = slices.bounds(number)
            listed += builder.step_ops(number, start, stop - start, slices.total(number))
        body = tuple(listed)
    return with_ops(problem.declarations(name, placed), builder.buffers, ("compute", "row", "col"), body)


# --- skeleton -------------------------------------------------------------------------------------------


def build_skeleton(problem: Matmul2dProblem, slices: Slices) -> Skeleton:
    """Return the skeleton of the program of `build`: the tasks of the chip at (0, 0), with the largest shards.

    Equal neighbouring slices are one phase that repeats.
    """
    return Skeleton.of_runs(task_runs(problem, slices, two_d_placements(problem)))


def task_runs(
    problem: Matmul2dProblem, slices: Slices, placements: Placements
) -> Iterator[tuple[int, tuple[Task, ...]]]:
    """Yield (count, tasks) in the order of slices: `count` neighbouring slices that each have these tasks.

    They are the tasks of the rank with the largest shards. If a mesh axis does not divide the sliced dim into
    whole periods (`Slices`), each slice is yielded on its own, with count 1.

    Args:
        placements: for each of "a", "b" and "c" one placement per mesh axis.
    """
    axis_sizes = [problem.axis_size(moving.axis) for moving in (problem.horizontal, problem.vertical)]
    sliced = len(slices.widths) > 1
    if all(slices.size % (size * slices.period) == 0 for size in axis_sizes):
        for relative, group in groupby(slices.widths):  # the tasks follow from the width
            total = slices.size // slices.period * relative * slices.block
            parts = [total // size for size in axis_sizes]
            yield len(list(group)), _step_tasks(problem, placements, total, parts, sliced)
        return
    known: dict[tuple[int, ...], tuple[Task, ...]] = {}
    start = 0
    for relative in slices.widths:
        width = relative * slices.block
        total = slices.num_below(slices.size, start, width)
        parts = [slices.largest_part_of(size, start, width) for size in axis_sizes]
        tasks = known.get((total, *parts))
        if tasks is None:
            tasks = known[total, *parts] = _step_tasks(problem, placements, total, parts, sliced)
        yield 1, tasks
        start += width


def _step_tasks(
    problem: Matmul2dProblem, placements: Placements, total: int, parts: list[int], sliced: bool
) -> tuple[Task, ...]:
    """Return the tasks of a slice of `total` elements, of which the largest shards hold `parts`."""
    before: list[Task] = []
    after: list[Task] = []
    waits: list[tuple[str, int]] = []
    for moving, part in zip((problem.horizontal, problem.vertical), parts, strict=True):
        across = largest_extent(problem, placements, moving.operand, 1 - moving.dim)
        tasks = _move_tasks(problem, part, moving, across, sliced)
        if not tasks:
            continue
        (after if moving.scattered else before).extend(tasks)
        waits.append((tasks[0].name, SLOTS) if moving.scattered else (tasks[-1].name, 0))
    return (*before, replace(product_task(problem, placements, total), after=tuple(waits)), *after)


def _move_tasks(
    problem: Matmul2dProblem, part: int, moving: MovingMatrix, across: int, sliced: bool
) -> list[Task]:
    size = problem.axis_size(moving.axis)
    # A collective waits for the member that copies most, whichever that is in this step.
    copy = Task(_copy_name(moving), moving.axis, move_work(across * part, problem.dtype))
    if size == 1:
        if not sliced:
            return []
        after = (("matmul", 0),) if moving.scattered else (("matmul", SLOTS),)
        return [replace(copy, after=after)]
    kind = "reduce_scatter" if moving.scattered else "all_gather"
    work = Transfer(kind, f"{MESH}.{moving.axis}", size, part * across * dtype_bytes(problem.dtype))
    if moving.scattered:
        scatter = Task(f"scatter_{moving.operand}", moving.axis, work, (("matmul", 0),))
        return [scatter, copy] if sliced else [scatter]
    gather = Task(f"gather_{moving.operand}", moving.axis, work, (("matmul", SLOTS),))
    return [copy, gather] if sliced else [gather]


def lower_bound_tasks(problem: Matmul2dProblem, placements: Placements) -> tuple[Task, ...]:
    """Return tasks that together take no longer than any choice of slices.

    They are the whole product and one collective per moving matrix, and none waits for another.

    Args:
        placements: for each of "a", "b" and "c" one placement per mesh axis.
    """
    tasks = [product_task(problem, placements, problem.sliced_size)]
    for moving in (problem.horizontal, problem.vertical):
        size = problem.axis_size(moving.axis)
        if size > 1:
            across = largest_extent(problem, placements, moving.operand, 1 - moving.dim)
            part = -(-problem.sliced_size // size)
            tasks += _move_tasks(problem, part, moving, across, sliced=False)
    return tuple(replace(task, after=()) for task in tasks)


# --- table entry ----------------------------------------------------------------------------------------


def slice_counts(problem: Matmul2dProblem, block: int = 8, most: int = 128) -> list[int]:
    """Return the numbers of slices that the paper allows (MeshSlice, section 3.1), ascending.

    Each divides the number of blocks of the sliced dim in a shard, along `row` and along `col`: 4 and 6 blocks
    -> [1, 2]. If the mesh axes do not divide the sliced dim into whole blocks, the result is instead the powers of
    two up to the elements of the sliced dim per chip of the longer axis.

    Args:
        block: elements of a block.
        most: the largest number to return.
    """
    size = problem.sliced_size
    local = [size // problem.axis_size(axis) // block for axis in ("row", "col")]
    if all(size % (problem.axis_size(axis) * block) == 0 for axis in ("row", "col")):
        common = math.gcd(*local)
        return [count for count in range(1, min(most, common) + 1) if common % count == 0]
    top = max(1, min(size // max(problem.mesh_shape[:2]), most))
    return [1 << e for e in range(top.bit_length())]


def uniform_slices(problem: Matmul2dProblem, block: int = 8) -> Iterator[Matmul2dConfig]:
    """Yield a config of equal slices for each number in `slice_counts`, the fewest first.

    `block` is the number of neighbouring elements that stay together in a slice.
    """
    for count in slice_counts(problem, block):
        yield Matmul2dConfig((1,) * count, block)


class MeshSlice(Matmul2d):
    """Sliced collectives along both mesh axes, overlapped with the products of earlier and later slices.

    A config chooses the slices and their `block`. Candidates are equal slices, as many as the paper allows. The
    sliced dim is the one that the two moving matrices share.
    """

    name = "meshslice"
    title = "MeshSlice"
    source = "Nam et al., ISCA '25, section 3.1"
    config_fields: ClassVar[tuple[str, ...]] = ("slices", "block")

    def candidates(
        self, problem: Matmul2dProblem, cluster: Cluster | None = None
    ) -> Iterator[Matmul2dConfig]:
        """Yield a config of equal slices for each number of slices in `slice_counts`, the fewest first.

        `cluster` is ignored.
        """
        yield from uniform_slices(problem)

    def program(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Program:
        """Return the program of a config.

        Raises:
            LayoutError: there are more slices than elements of the sliced dim, or a width or `block` is below 1.
        """
        return build(problem, slices_of(problem, config), self.name)

    def skeleton(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Skeleton:
        """Return the skeleton of a config: the tasks of the rank with the largest shards.

        Raises:
            LayoutError: there are more slices than elements of the sliced dim, or a width or `block` is below 1.
        """
        return build_skeleton(problem, slices_of(problem, config))

    def traffic(self, problem: Matmul2dProblem, config: Matmul2dConfig, rank: int) -> dict[str, int]:
        """Return a global rank's bytes of communication, by "mesh.axis"; equal for every number of slices."""
        return problem.traffic_bytes(rank)

    def lower_bounds(self, problem: Matmul2dProblem) -> Iterator[Skeleton]:
        """Yield one skeleton no slower than any candidate: the whole product beside one collective per matrix."""
        yield Skeleton((Phase(1, lower_bound_tasks(problem, two_d_placements(problem))),))


MESHSLICE = MeshSlice()
