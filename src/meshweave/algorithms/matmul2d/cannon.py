"""Cannon: products on a square mesh in which only neighbours talk (Cannon 1969; MeshSlice, section 2.3.2).

The sliced dim has P chunks, where P is the side of the mesh. In step t chip (i, j) works on chunk i + j + t,
modulo P. So at any time the chips of a row, and those of a column, all hold different chunks. Between two steps
every chip sends its part to one neighbour and receives one from the other. Inputs are first skewed to where step
0 needs them: row i (column j) of a moving input goes i (j) places around the ring. The sums of a moving output
travel in the same direction from wherever they start, and one permute in the end brings them to their owners.

Partial sums of a moving output wait for their own addition only: a step multiplies into a buffer of its own, adds
the sum that came from the neighbour and sends the result on. So products and moves overlap here too.

Sizes need not divide: what a chip holds in step t has the size of chunk i + j + t. A 2.5D product does some of
these steps on each of several meshes, from different starts (`two_half_d`); its program is written here as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshweave.algorithms.matmul2d.common.algorithm import Matmul2d
from meshweave.algorithms.matmul2d.common.extents import (
    chunk_extent,
    largest_extent,
    local_extent,
    product_task,
)
from meshweave.algorithms.matmul2d.common.ops import local_product, moving_scratch, with_ops
from meshweave.algorithms.matmul2d.common.problem import (
    MESH,
    Matmul2dConfig,
    Matmul2dProblem,
    MovingMatrix,
    Placements,
    two_d_placements,
)
from meshweave.algorithms.matrix_views import full_matrix
from meshweave.base.errors import LayoutError
from meshweave.base.units import dtype_bytes
from meshweave.describe.layout import Layout, chunk_bounds
from meshweave.ir.program import Buffer, Program, Repeat, Statement, When
from meshweave.ir.program.expressions import Index, Var, binary
from meshweave.ir.program.ops import Add, Op, Permute, ReduceScatter
from meshweave.ir.program.views import FULL, Range, Selector, View
from meshweave.ir.skeleton import Phase, Skeleton, Task
from meshweave.ir.work import Transfer, move_work

SLOTS = 2
"""Double buffering: the product reads (or writes) one part while the ring moves the other."""

STEP = Var("t")


@dataclass(frozen=True)
class CannonSteps:
    """The steps that a square mesh of side `side` does: `count` of the product's `side` steps, from `start` on.

    The dim that is sliced, shared by the two matrices that move, is cut into `side` chunks, and a chip multiplies
    one chunk per step. `Index` values are integers, or expressions in the chip's mesh coordinates.

    Attributes:
        side: chips along either axis of the mesh, which is also the number of chunks.
        count: steps that this mesh does; in a 2.5D product `side / count` meshes share the steps.
        start: the first step, modulo `side`; in a 2.5D product an expression in the coordinate along `depth`.
    """

    side: int
    count: int
    start: Index = 0

    @property
    def layers(self) -> int:
        """Return the number of square meshes that share the steps of a product: 1 but for a 2.5D product."""
        return self.side // self.count

    def chunk_at(self, step: Index) -> Index:
        """Return the number of the chunk that chip (row, col) multiplies at a step of this mesh, 0 for the first.

        It is (row + col + start + step) % side, an expression in the mesh coordinates.
        """
        return (Var(f"{MESH}.row") + Var(f"{MESH}.col") + self.start + step) % self.side

    def skew(self, axis: str) -> Index:
        """Return by how many chips a permute along `axis` shifts a moving input before this mesh's first step.

        It is an expression in the coordinate along the other axis, from 1 to `side`; a shift of `side` moves
        nothing. `axis` is "row" or "col".
        """
        return self.side - (self._other_coordinate(axis) + self.start) % self.side

    def unskew(self, axis: str) -> Index:
        """Return by how many chips a permute along `axis` shifts a moving output at the end, to its owners.

        It is an expression in the coordinate along the other axis, from 0 to `side` - 1. `axis` is "row" or "col".
        """
        return (self._other_coordinate(axis) + self.start + (self.count - 1)) % self.side

    @staticmethod
    def _other_coordinate(axis: str) -> Index:
        return Var(f"{MESH}.{'row' if axis == 'col' else 'col'}")


def all_steps(problem: Matmul2dProblem) -> CannonSteps:
    """Return all P steps of Cannon's product on one P x P mesh.

    Raises:
        LayoutError: the problem's mesh is not square.
    """
    shape = problem.mesh_shape
    if len(shape) != 2 or shape[0] != shape[1]:
        raise LayoutError(f"Cannon's product needs a square mesh, not {shape}")
    return CannonSteps(shape[0], shape[0])


# --- program --------------------------------------------------------------------------------------------


class _CannonProgramBuilder:
    """The program on one mesh, whose sums for its block of C end in buffer `target`."""

    def __init__(self, problem: Matmul2dProblem, steps: CannonSteps, target: str) -> None:
        self.problem, self.steps, self.target = problem, steps, target
        self.moving = (problem.horizontal, problem.vertical)
        self.buffers: list[Buffer] = []
        if steps.side > 1:
            along = -(-problem.sliced_size // steps.side)
            # A part that is narrower than the buffer is still one run of memory where its dim is the outer one.
            uneven = bool(problem.sliced_size % steps.side)
            for moving in self.moving:
                for suffix, slots in (("p", SLOTS), ("in", 1)) if moving.scattered else (("s", SLOTS),):
                    name, placed = f"{moving.operand}_{suffix}", two_d_placements(problem)
                    self.buffers.append(
                        moving_scratch(problem, placed, moving, name, along, slots, is_outermost=uneven)
                    )

    def body(self) -> Iterator[Statement]:
        """Yield the skews of operands that move, then a product at each step, with shifts between."""
        steps = self.steps
        if steps.side == 1:
            yield local_product(self.problem.dataflow, {name: full_matrix(name) for name in "abc"}, 0)
            return
        for moving in self.moving:
            if not moving.scattered:
                received = self._part(moving, "s", 0)
                yield self._permute(
                    moving, "skew", received, full_matrix(moving.operand), steps.skew(moving.axis)
                )
        if steps.count > 1:
            yield Repeat("t", steps.count - 1, tuple(self._step(STEP, last=False)))
        yield from self._step(steps.count - 1, last=True)

    def _step(self, step: Index, last: bool) -> Iterator[Statement]:
        operand: dict[str, View] = {name: full_matrix(name) for name in "abc"}
        operand["c"] = full_matrix(self.target)
        for moving in self.moving:
            operand[moving.operand] = self._part(moving, "p" if moving.scattered else "s", step)
        dataflow = self.problem.dataflow
        yield local_product(dataflow, operand, binary(">", step, 0) if dataflow == "os" else 0)
        for moving in self.moving:
            if moving.scattered:
                yield from self._send_sum(moving, step, last, operand["c"])
            elif not last:
                received = self._part(moving, "s", step + 1)
                yield self._permute(moving, "shift", received, operand[moving.operand], -1)

    def _send_sum(self, moving: MovingMatrix, step: Index, last: bool, sum_: View) -> Iterator[Statement]:
        """Add the sum that has arrived to this step's product, and send the result on, at last to its owner."""
        arrived = replace(self._part(moving, "in", step), slot=0)
        add = Add(out=sum_, src=arrived, lane=moving.axis, name="add_c")
        has_arrived = binary(">", step, 0)
        if not isinstance(has_arrived, int):
            yield When(has_arrived, (add,))
        elif has_arrived:
            yield add
        if last:
            shift = self.steps.unskew(moving.axis)
            yield self._permute(moving, "unskew", full_matrix(self.target), sum_, shift)
        else:
            # One slot is enough: the lane adds what has arrived before it receives the next.
            received = replace(self._part(moving, "in", step + 1), slot=0)
            yield self._permute(moving, "shift", received, sum_, -1)

    def _part(self, moving: MovingMatrix, suffix: str, step: Index) -> View:
        size, side = self.problem.sliced_size, self.steps.side
        along: Selector = FULL
        if size % side:
            along = Range(0, chunk_extent(size, side, self.steps.chunk_at(step)))
        selectors = (FULL, along) if moving.dim == 1 else (along, FULL)
        return View(f"{moving.operand}_{suffix}", selectors, step % SLOTS)

    def _permute(self, moving: MovingMatrix, move: str, received: View, sent: View, shift: Index) -> Op:
        return Permute(
            over=f"{MESH}.{moving.axis}",
            out=received,
            src=sent,
            shift=shift,
            lane=moving.axis,
            name=f"{move}_{moving.operand}",
        )


def build(
    problem: Matmul2dProblem, steps: CannonSteps, name: str, placements: Placements | None = None
) -> Program:
    """Return a program, called `name`, that does `steps` on each square mesh.

    If several meshes share the steps of the product (2.5D), it ends in a reduce-scatter of C over `depth`.

    Args:
        placements: for each of "a", "b" and "c" one placement per mesh axis; None for `two_d_placements`.
    """
    layered = steps.layers > 1
    placed = placements or two_d_placements(problem)
    builder = _CannonProgramBuilder(problem, steps, "c_sum" if layered else "c")
    body = tuple(builder.body())
    lanes, buffers = ["compute", "row", "col"], builder.buffers
    if layered:
        lanes.append("depth")
        shape = tuple(local_extent(problem, two_d_placements(problem), "c", dim) for dim in (0, 1))
        buffers.append(Buffer("c_sum", "scratch", MESH, problem.dtype, shape=shape))
        total = ReduceScatter(
            over=f"{MESH}.depth",
            out=full_matrix("c"),
            src=full_matrix("c_sum"),
            dim=0,
            sizes=chunk_extent(shape[0], steps.layers, Var("peer")),
            lane="depth",
            name="sum_c",
        )
        body = (*body, total)
    return with_ops(problem.declarations(name, placed), buffers, lanes, body)


# --- skeleton -------------------------------------------------------------------------------------------


def build_skeleton(problem: Matmul2dProblem, steps: CannonSteps) -> Skeleton:
    """Return the skeleton (tasks per lane and their order) of the program of `build`.

    Every task has the largest size of any chip. A skew or unskew takes the longer of going the most hops and of
    going none, which is a copy in memory. So the estimated time is an upper bound, exact if all shards are equal.
    """
    if steps.count == 1:
        return Skeleton((Phase(1, _tasks(problem, steps, first=True, last=True)),))
    phases = [Phase(1, _tasks(problem, steps, first=True, last=False))]
    if steps.count > 2:
        phases.append(Phase(steps.count - 2, _tasks(problem, steps, first=False, last=False)))
    phases.append(Phase(1, _tasks(problem, steps, first=False, last=True)))
    return Skeleton(tuple(phases))


def _tasks(problem: Matmul2dProblem, steps: CannonSteps, first: bool, last: bool) -> tuple[Task, ...]:
    """Return the tasks of one step, with the skew before the first and what ends the product after the last."""
    placed = two_d_placements(problem)
    each = -(-problem.sliced_size // steps.side)
    product = product_task(problem, placed, each)
    if steps.side == 1:
        return (product,)
    parts = {
        moving: each * largest_extent(problem, placed, moving.operand, 1 - moving.dim)
        for moving in (problem.horizontal, problem.vertical)
    }
    before: list[Task] = []
    after: list[Task] = []
    waits: list[tuple[str, int]] = []
    for moving, part in parts.items():
        if moving.scattered:
            waits.append(("shift_c", SLOTS))
            made = "matmul" if first else "add_c"
            if not first:
                after.append(Task(made, moving.axis, move_work(part, problem.dtype, "add"), (("matmul", 0),)))
            move = "unskew" if last else "shift"
            after += _moves(problem, steps, moving, move, part, ((made, 0),))
            continue
        moved = _moves(problem, steps, moving, "skew", part) if first else ()
        before += moved
        waits += _ends(moved) or ((f"shift_{moving.operand}", 1),)
        if not last:  # what arrives takes the place of the part that the product before this one read
            after += _moves(problem, steps, moving, "shift", part, (("matmul", 1), *_ends(moved[1:])))
    if last and steps.layers > 1:
        after.append(_sum(problem, steps, _ends(after) or (("matmul", 0),)))
    return (*before, replace(product, after=tuple(waits)), *after)


def _ends(tasks: Sequence[Task]) -> tuple[tuple[str, int], ...]:
    return tuple((task.name, 0) for task in tasks)


def _moves(
    problem: Matmul2dProblem,
    steps: CannonSteps,
    moving: MovingMatrix,
    name: str,
    elements: int,
    after: tuple[tuple[str, int], ...] = (),
) -> tuple[Task, ...]:
    """Return a shift, or both extremes of a skew or unskew: most hops, and none, a copy, in a lane beside it."""
    hops = 1 if name == "shift" else steps.side // 2
    size = elements * dtype_bytes(problem.dtype)
    work = Transfer("permute", f"{MESH}.{moving.axis}", steps.side, size, hops=hops)
    task = Task(f"{name}_{moving.operand}", moving.axis, work, after)
    copy = Task(f"stay_{moving.operand}", f"{moving.axis}_back", move_work(elements, problem.dtype), after)
    return (task,) if name == "shift" else (task, copy)


def _sum(problem: Matmul2dProblem, steps: CannonSteps, after: tuple[tuple[str, int], ...]) -> Task:
    rows, columns = (largest_extent(problem, two_d_placements(problem), "c", dim) for dim in (0, 1))
    part = -(-rows // steps.layers) * columns * dtype_bytes(problem.dtype)
    work = Transfer("reduce_scatter", f"{MESH}.depth", steps.layers, part)
    return Task("sum_c", "depth", work, after)


# --- bytes ----------------------------------------------------------------------------------------------


def traffic(problem: Matmul2dProblem, rank: int, count: int, start: int = 0) -> dict[str, int]:
    """Return the bytes that a rank receives in some steps of Cannon's product, by "mesh.axis", such as "tp.row".

    A moving input arrives once per step, except for the first step if the skew moves nothing. A moving output
    arrives once per step after the first, and once more at the end if the unskew is not 0. The reduction over
    `depth` is not counted. An axis without bytes is left out.

    Args:
        rank: a global rank.
        count: the number of steps.
        start: number of the first step.
    """
    mesh = problem.mesh
    layout = Layout(mesh, two_d_placements(problem)["a"])
    side, size, coords = problem.mesh_shape[0], problem.sliced_size, mesh.coords(rank)
    row, col = coords[:2]

    def extent(part: int) -> int:
        begin, stop = chunk_bounds(size, side, part % side)
        return stop - begin

    out = {}
    for moving in (problem.horizontal, problem.vertical):
        at, across = (col, row) if moving.axis == "col" else (row, col)
        later = sum(extent(row + col + start + step) for step in range(1, count))
        if moving.scattered:
            ends = extent(at) if (across + start + count - 1) % side else 0
        else:
            ends = extent(row + col + start) if (across + start) % side else 0
        local = layout.local_shape(problem.stored_shape(moving.operand), rank)
        moved = (later + ends) * local[1 - moving.dim] * dtype_bytes(problem.dtype)
        if moved:
            out[f"{MESH}.{moving.axis}"] = moved
    return out


# --- table entry ----------------------------------------------------------------------------------------


class Cannon(Matmul2d):
    """Cannon's product: skew the moving inputs, then multiply and shift to a neighbour in each of P steps.

    It needs a square mesh and has a single config. Its estimate is exact on even shards, else an upper bound.
    """

    name = "cannon"
    title = "Cannon"
    source = "Cannon 1969; MeshSlice, section 2.3.2"
    estimate_accuracy = "upper_bound"

    def mesh_shapes(self, num_chips: int) -> tuple[tuple[int, ...], ...]:
        """Return ((P, P),) for `num_chips` = P x P chips, or () if their number is no square."""
        side = math.isqrt(num_chips)
        return ((side, side),) if side * side == num_chips else ()

    def steps(self, problem: Matmul2dProblem) -> CannonSteps:
        """Return the steps that each square mesh does. Raises LayoutError where the mesh does not fit."""
        return all_steps(problem)

    def program(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Program:
        """Return the program: a skew of moving inputs, then products with shifts by one chip between them.

        If several meshes share the steps, it ends in a reduce-scatter of C over `depth`.

        Raises:
            LayoutError: the mesh does not fit (`steps`).
        """
        return build(problem, self.steps(problem), self.name, self.operand_placements(problem))

    def skeleton(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Skeleton:
        """Return a skeleton whose time is an upper bound, exact on equal shards (`build_skeleton`).

        Raises:
            LayoutError: the mesh does not fit (`steps`).
        """
        return build_skeleton(problem, self.steps(problem))

    def traffic(self, problem: Matmul2dProblem, config: Matmul2dConfig, rank: int) -> dict[str, int]:
        """Return the bytes that a global rank receives in the whole product, by "mesh.axis", such as "tp.row"."""
        return traffic(problem, rank, problem.mesh_shape[0])


CANNON = Cannon()
