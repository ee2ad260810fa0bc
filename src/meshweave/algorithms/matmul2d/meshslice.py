"""MeshSlice: 2D products with sliced collectives (Nam et al., ISCA '25, section 3.1).

Cut the sliced dim into S slices. In turn s each chip gathers only slice s of the moving inputs, multiplies,
and scatters only slice s of a moving output; gathers of later slices, the product, and scatters of earlier
ones run at the same time, in both mesh directions. The slice is not a contiguous part but every S-th
block of the sliced dim, so that every chip holds an equal share of every slice and the gathered pieces of
A and B carry the same k in the same order.

Here blocks are counted from the start of the *global* dim, whatever the shards are. A shard boundary in
the middle of a block cuts it, and the two parts meet again in the gathered slice. So any M, N, K works on
any mesh, and slices of unequal width (tapered: thin first and last slices shorten prologue and epilogue)
are the same program with other numbers. For sizes that divide this is the paper's slicing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from meshweave.algorithms.matmul2d.common.algorithm import Matmul2d
from meshweave.algorithms.matmul2d.common.extents import largest_extent, local_extent, slice_work
from meshweave.algorithms.matmul2d.common.problem import (
    MESH,
    Config,
    MatmulProblem,
    Moving,
    Placements,
    two_d_placements,
)
from meshweave.algorithms.matmul2d.common.slices import Slices, slices_of
from meshweave.base.units import dtype_bytes
from meshweave.describe.machine.cluster import Cluster
from meshweave.ir.program import Buffer, Lane, On, Program, Repeat
from meshweave.ir.program.expressions import Index, Var, binary
from meshweave.ir.program.ops import AllGather, Copy, Matmul, Op, ReduceScatter
from meshweave.ir.program.views import FULL, Range, Selector, View
from meshweave.ir.skeleton import Phase, Skeleton, Task
from meshweave.ir.work import Transfer, move_work

SLOTS = 4
"""Buffers per moving matrix, where there are as many slices: a product reads one while a collective fills the
next. Two suffice where nothing is ever late; two more keep a late slice from stopping the lane that is not."""

PEER = Var("peer")


# --- program --------------------------------------------------------------------------------------------


class _Builder:
    def __init__(self, problem: MatmulProblem, slices: Slices, placements: Placements) -> None:
        self.problem, self.slices, self.placements = problem, slices, placements
        self.sliced = len(slices.widths) > 1
        self.slots = min(SLOTS, len(slices.widths))
        self.buffers: list[Buffer] = []
        for moving in (problem.horizontal, problem.vertical):
            self._declare(moving)

    def gathers(self, moving: Moving) -> bool:
        return self.problem.axis_size(moving.axis) > 1

    def _declare(self, moving: Moving) -> None:
        """Scratch: the local slice `x_s` and the gathered (or not yet reduced) block `x_g` of operand x."""
        problem, slices = self.problem, self.slices
        across = local_extent(problem, self.placements, moving.operand, 1 - moving.dim)
        numbers = range(len(slices.widths))
        local = max(slices.largest_part(problem.axis_size(moving.axis), s) for s in numbers)
        whole = max(slices.total(s) for s in numbers)
        # Pieces of a collective along dim 1 are contiguous when dim 1 is the outer one in memory.
        order = (1, 0) if moving.dim == 1 else None
        slots = self.slots
        if self.sliced and self.gathers(moving):
            self._scratch(f"{moving.operand}_s", moving, across, local, slots, order)
        if self.sliced or self.gathers(moving):
            self._scratch(f"{moving.operand}_g", moving, across, whole, slots, order)

    def _scratch(
        self, name: str, moving: Moving, across: Index, along: int, slots: int, order: tuple[int, ...] | None
    ) -> None:
        shape = (across, along) if moving.dim == 1 else (along, across)
        self.buffers.append(
            Buffer(name, "scratch", MESH, self.problem.dtype, shape=shape, slots=slots, order=order)
        )

    def turn(self, number: Index, start: Index, width: Index, total: Index) -> list[Op]:
        """The ops of one slice: `number` picks the slot, [start, start + width) the slice of the period."""
        problem = self.problem
        slot = number % self.slots if self.sliced else 0
        before: list[Op] = []
        after: list[Op] = []
        operand = {"a": _whole("a"), "b": _whole("b"), "c": _whole("c")}
        for moving in (problem.horizontal, problem.vertical):
            ops, view = self._move(moving, slot, start, width, total)
            operand[moving.operand] = view
            (after if moving.scattered else before).extend(ops)
        sums = problem.dataflow == "os" and self.sliced
        product = Matmul(
            out=operand["c"],
            a=operand["a"],
            b=operand["b"],
            transpose_a=problem.dataflow == "rs",
            transpose_b=problem.dataflow == "ls",
            accumulate=binary(">", number, 0) if sums else 0,
            lane="compute",
        )
        return [*before, product, *after]

    def _move(
        self, moving: Moving, slot: Index, start: Index, width: Index, total: Index
    ) -> tuple[list[Op], View]:
        """Ops that bring one slice of a matrix together (or apart), and the view that the product uses."""
        size = self.problem.axis_size(moving.axis)
        name = moving.operand
        at = Var(f"{MESH}.{moving.axis}")
        part, selector = self.slices.part(size, at, start, width)
        shard = _along(name, moving.dim, selector if self.sliced else FULL)
        gathered = _along(f"{name}_g", moving.dim, Range(0, total), slot)
        if not self.gathers(moving):
            if not self.sliced:
                return [], _whole(name)
            pair = (shard, gathered) if moving.scattered else (gathered, shard)
            return [Copy(out=pair[0], src=pair[1], lane=moving.axis, name=_copy_name(moving))], gathered
        piece = _along(f"{name}_s", moving.dim, Range(0, part), slot) if self.sliced else shard
        sizes = self.slices.part(size, PEER, start, width)[0]
        over = f"{MESH}.{moving.axis}"
        copy: list[Op] = []
        if self.sliced:
            pair = (shard, piece) if moving.scattered else (piece, shard)
            copy = [Copy(out=pair[0], src=pair[1], lane=moving.axis, name=_copy_name(moving))]
        if moving.scattered:
            scatter = ReduceScatter(
                over=over,
                out=piece,
                src=gathered,
                dim=moving.dim,
                sizes=sizes,
                lane=moving.axis,
                name=f"scatter_{name}",
            )
            return [scatter, *copy], gathered
        gather = AllGather(
            over=over,
            out=gathered,
            src=piece,
            dim=moving.dim,
            sizes=sizes,
            lane=moving.axis,
            name=f"gather_{name}",
        )
        return [*copy, gather], gathered


def _copy_name(moving: Moving) -> str:
    return f"{'place' if moving.scattered else 'slice'}_{moving.operand}"


def _whole(buffer: str) -> View:
    return View(buffer, (FULL, FULL))


def _along(buffer: str, dim: int, selector: Selector, slot: Index = 0) -> View:
    return View(buffer, (selector, FULL) if dim == 0 else (FULL, selector), slot)


def build(problem: MatmulProblem, slices: Slices, name: str, placements: Placements | None = None) -> Program:
    """The program of `name` for slices of any widths; one slice is Collective. `placements` may cut the dims
    that are not sliced over further axes."""
    placed = placements or two_d_placements(problem)
    builder = _Builder(problem, slices, placed)
    count = len(slices.widths)
    even = problem.sliced_size % slices.period == 0
    if count > 1 and len(set(slices.widths)) == 1 and even:
        s = Var("s")
        width = slices.widths[0] * slices.block
        ops = builder.turn(s, s * width, width, slices.total(0))
        body: tuple[Op | Repeat, ...] = (Repeat("s", count, tuple(ops)),)
    else:
        listed: list[Op] = []
        for number in range(count):
            start, stop = slices.bounds(number)
            listed += builder.turn(number, start, stop - start, slices.total(number))
        body = tuple(listed)
    declared = problem.declarations(name, placed)
    lanes = tuple(Lane(lane) for lane in ("compute", "row", "col"))
    return replace(
        declared, buffers=declared.buffers + tuple(builder.buffers), lanes=lanes, body=(On(MESH, body),)
    )


# --- skeleton -------------------------------------------------------------------------------------------


def build_skeleton(problem: MatmulProblem, slices: Slices, placements: Placements | None = None) -> Skeleton:
    """The skeleton of `build`: rank (0, 0), which by the chunk rule has the largest shards."""
    return Skeleton.of_runs(runs(problem, slices, placements or two_d_placements(problem)))


def runs(
    problem: MatmulProblem, slices: Slices, placements: Placements
) -> Iterator[tuple[int, tuple[Task, ...]]]:
    """The tasks of `build`, slice by slice, and how many neighbours share them."""
    axis_sizes = [problem.axis_size(moving.axis) for moving in (problem.horizontal, problem.vertical)]
    sliced = len(slices.widths) > 1
    if all(slices.size % (size * slices.period) == 0 for size in axis_sizes):
        for relative, group in groupby(slices.widths):  # all that matters follows from the width
            total = slices.size // slices.period * relative * slices.block
            parts = [total // size for size in axis_sizes]
            yield len(list(group)), _turn_tasks(problem, placements, total, parts, sliced)
        return
    known: dict[tuple[int, ...], tuple[Task, ...]] = {}
    start = 0
    for relative in slices.widths:
        width = relative * slices.block
        total = slices.below(slices.size, start, width)
        parts = [slices.largest(size, start, width) for size in axis_sizes]
        tasks = known.get((total, *parts))
        if tasks is None:
            tasks = known[total, *parts] = _turn_tasks(problem, placements, total, parts, sliced)
        yield 1, tasks
        start += width


def _turn_tasks(
    problem: MatmulProblem, placements: Placements, total: int, parts: list[int], sliced: bool
) -> tuple[Task, ...]:
    """One turn, in which the largest `parts` of the moving matrices make a slice of `total` elements."""
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
    first, second = (largest_extent(problem, placements, problem.stationary, dim) for dim in (0, 1))
    product = Task("matmul", "compute", slice_work(problem, first, second, total), tuple(waits))
    return (*before, product, *after)


def _move_tasks(problem: MatmulProblem, part: int, moving: Moving, across: int, sliced: bool) -> list[Task]:
    size = problem.axis_size(moving.axis)
    # A collective waits for the member that copies most, whichever that is in this turn.
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


def least_tasks(problem: MatmulProblem, placements: Placements) -> tuple[Task, ...]:
    """What is left of any slicing: the whole product, and each moving matrix across its axis in one go."""
    first, second = (largest_extent(problem, placements, problem.stationary, dim) for dim in (0, 1))
    tasks = [Task("matmul", "compute", slice_work(problem, first, second, problem.sliced_size))]
    for moving in (problem.horizontal, problem.vertical):
        size = problem.axis_size(moving.axis)
        if size > 1:
            across = largest_extent(problem, placements, moving.operand, 1 - moving.dim)
            part = -(-problem.sliced_size // size)
            tasks += _move_tasks(problem, part, moving, across, sliced=False)
    return tuple(replace(task, after=()) for task in tasks)


def least(problem: MatmulProblem) -> Iterator[Skeleton]:
    yield Skeleton((Phase(1, least_tasks(problem, two_d_placements(problem))),))


# --- table entry ----------------------------------------------------------------------------------------


def slice_counts(problem: MatmulProblem, block: int = 8, most: int = 128) -> list[int]:
    """Every slice count that the paper allows: divisors of the local sliced dim over the block size, on
    both axes, 1 included; where nothing divides, every power of two up to the local dim."""
    size = problem.sliced_size
    local = [size // problem.axis_size(axis) // block for axis in ("row", "col")]
    if all(size % (problem.axis_size(axis) * block) == 0 for axis in ("row", "col")):
        common = math.gcd(*local)
        return [count for count in range(1, min(most, common) + 1) if common % count == 0]
    top = max(1, min(size // max(problem.mesh_shape), most))
    return [1 << e for e in range(top.bit_length())]


def uniform_slices(problem: MatmulProblem, block: int = 8) -> Iterator[Config]:
    """Equal slices, in each number that the paper allows."""
    for count in slice_counts(problem, block):
        yield Config((1,) * count, block)


class MeshSlice(Matmul2d):
    name = "meshslice"
    title = "MeshSlice"
    source = "Nam et al., ISCA '25, section 3.1"

    def candidates(self, problem: MatmulProblem, cluster: Cluster | None = None) -> Iterator[Config]:
        yield from uniform_slices(problem)

    def program(self, problem: MatmulProblem, config: Config) -> Program:
        return build(problem, slices_of(problem, config), self.name)

    def skeleton(self, problem: MatmulProblem, config: Config) -> Skeleton:
        return build_skeleton(problem, slices_of(problem, config))

    def traffic(self, problem: MatmulProblem, config: Config, rank: int) -> dict[str, int]:
        return problem.traffic_bytes(rank)

    def least(self, problem: MatmulProblem) -> Iterator[Skeleton]:
        return least(problem)


MESHSLICE = MeshSlice()
