"""Cannon: products on a square mesh in which only neighbours talk (Cannon 1969; MeshSlice, section 2.3.2).

The sliced dim has P chunks, P the side of the mesh. In turn t chip (i, j) works on chunk i + j + t, modulo P.
So at any time the chips of a row, and those of a column, all hold different chunks, and to go on to the next
turn every chip passes its part to the neighbour and takes one from the other neighbour. Inputs are first
skewed to where turn 0 needs them: row i (column j) of a moving input goes i (j) places round the ring. The sums
of a moving output travel the same way from wherever they start, and one permute in the end brings them home.

Partial sums of a moving output wait for nothing but their own addition: a turn multiplies into a buffer of
its own, adds what came from the neighbour and passes the sum on, so products and moves overlap here too.

Sizes need not divide: what a chip holds in turn t has the size of chunk i + j + t. A 2.5D product does only
some of these turns on each of several meshes, from different starts (`two_half_d`); it is built here as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshweave.algorithms.matmul2d.common.algorithm import Matmul2d
from meshweave.algorithms.matmul2d.common.extents import (
    chunk_extent,
    largest_extent,
    local_extent,
    slice_work,
)
from meshweave.algorithms.matmul2d.common.problem import (
    MESH,
    Config,
    MatmulProblem,
    Moving,
    Placements,
    two_d_placements,
)
from meshweave.base.errors import LayoutError
from meshweave.base.units import dtype_bytes
from meshweave.describe.layout import Layout, chunk_bounds
from meshweave.describe.machine.cluster import Cluster
from meshweave.ir.program import Buffer, Lane, On, Program, Repeat, Statement, When
from meshweave.ir.program.expressions import Index, Var, binary
from meshweave.ir.program.ops import Add, Matmul, Op, Permute, ReduceScatter
from meshweave.ir.program.views import FULL, Range, Selector, View
from meshweave.ir.skeleton import Phase, Skeleton, Task
from meshweave.ir.work import Transfer, move_work

SLOTS = 2
"""Double buffering: the product reads (or writes) one part while the ring moves the other."""

TURN = Var("t")


@dataclass(frozen=True)
class Turns:
    """Which turns of the product a mesh does: `count` of them from `start` on, which may depend on `depth`."""

    side: int
    count: int
    start: Index = 0

    @property
    def layers(self) -> int:
        return self.side // self.count

    def part(self, turn: Index) -> Index:
        """Number of the chunk that chip (row, col) works on."""
        return (Var(f"{MESH}.row") + Var(f"{MESH}.col") + self.start + turn) % self.side

    def skew(self, axis: str) -> Index:
        """How far the parts of a moving input must go along `axis` for turn 0."""
        return self.side - (self._across(axis) + self.start) % self.side

    def unskew(self, axis: str) -> Index:
        """How far those of a moving output must go after the last turn to be home."""
        return (self._across(axis) + self.start + (self.count - 1)) % self.side

    @staticmethod
    def _across(axis: str) -> Index:
        return Var(f"{MESH}.{_other(axis)}")


def all_turns(problem: MatmulProblem) -> Turns:
    """Raises LayoutError for a mesh that is not square."""
    shape = problem.mesh_shape
    if len(shape) != 2 or shape[0] != shape[1]:
        raise LayoutError(f"Cannon's product needs a square mesh, not {shape}")
    return Turns(shape[0], shape[0])


def _other(axis: str) -> str:
    return "row" if axis == "col" else "col"


# --- program --------------------------------------------------------------------------------------------


class _Builder:
    """`target` is the buffer in which this mesh's sum for its block of C ends."""

    def __init__(self, problem: MatmulProblem, turns: Turns, target: str) -> None:
        self.problem, self.turns, self.target = problem, turns, target
        self.moving = (problem.horizontal, problem.vertical)
        self.buffers: list[Buffer] = []
        if turns.side > 1:
            for moving in self.moving:
                for suffix, slots in (("p", SLOTS), ("in", 1)) if moving.scattered else (("s", SLOTS),):
                    self._declare(f"{moving.operand}_{suffix}", moving, slots)

    def _declare(self, name: str, moving: Moving, slots: int) -> None:
        problem = self.problem
        along = -(-problem.stored_shape(moving.operand)[moving.dim] // self.turns.side)
        across = local_extent(problem, two_d_placements(problem), moving.operand, 1 - moving.dim)
        shape = (across, along) if moving.dim == 1 else (along, across)
        # A part that is narrower than the buffer is still one run of memory where its dim is the outer one.
        order = (1, 0) if moving.dim == 1 and problem.sliced_size % self.turns.side else None
        self.buffers.append(
            Buffer(name, "scratch", MESH, problem.dtype, shape=shape, slots=slots, order=order)
        )

    def body(self) -> Iterator[Statement]:
        turns = self.turns
        if turns.side == 1:
            yield self._product("c", "a", "b")
            return
        for moving in self.moving:
            if not moving.scattered:
                got = self._part(moving, "s", 0)
                yield self._permute(moving, "skew", got, _whole(moving.operand), turns.skew(moving.axis))
        if turns.count > 1:
            yield Repeat("t", turns.count - 1, tuple(self._turn(TURN, last=False)))
        yield from self._turn(turns.count - 1, last=True)

    def _turn(self, turn: Index, last: bool) -> Iterator[Statement]:
        operand: dict[str, View] = {name: _whole(name) for name in "abc"}
        operand["c"] = _whole(self.target)
        for moving in self.moving:
            operand[moving.operand] = self._part(moving, "p" if moving.scattered else "s", turn)
        adds = binary(">", turn, 0) if self.problem.dataflow == "os" else 0
        yield self._product(operand["c"], operand["a"], operand["b"], adds)
        for moving in self.moving:
            if moving.scattered:
                yield from self._pass_on(moving, turn, last, operand["c"])
            elif not last:
                got = self._part(moving, "s", turn + 1)
                yield self._permute(moving, "shift", got, operand[moving.operand], -1)

    def _pass_on(self, moving: Moving, turn: Index, last: bool, sum_: View) -> Iterator[Statement]:
        """Adds the sum that has come by to this turn's product, and passes the result on, in the end home."""
        came = replace(self._part(moving, "in", turn), slot=0)
        add = Add(out=sum_, src=came, lane=moving.axis, name="add_c")
        guarded = binary(">", turn, 0)
        if not isinstance(guarded, int):
            yield When(guarded, (add,))
        elif guarded:
            yield add
        if last:
            shift = self.turns.unskew(moving.axis)
            yield self._permute(moving, "unskew", _whole(self.target), sum_, shift)
        else:
            # One slot is enough: the lane has added what came before it takes the next.
            got = replace(self._part(moving, "in", turn + 1), slot=0)
            yield self._permute(moving, "shift", got, sum_, -1)

    def _product(self, c: View | str, a: View | str, b: View | str, accumulate: Index = 0) -> Op:
        out, left, right = (_whole(view) if isinstance(view, str) else view for view in (c, a, b))
        dataflow = self.problem.dataflow
        return Matmul(
            out=out,
            a=left,
            b=right,
            transpose_a=dataflow == "rs",
            transpose_b=dataflow == "ls",
            accumulate=accumulate,
            lane="compute",
        )

    def _part(self, moving: Moving, suffix: str, turn: Index) -> View:
        size, side = self.problem.sliced_size, self.turns.side
        along: Selector = FULL
        if size % side:
            along = Range(0, chunk_extent(size, side, self.turns.part(turn)))
        selectors = (FULL, along) if moving.dim == 1 else (along, FULL)
        return View(f"{moving.operand}_{suffix}", selectors, turn % SLOTS)

    def _permute(self, moving: Moving, what: str, got: View, sent: View, shift: Index) -> Op:
        return Permute(
            over=f"{MESH}.{moving.axis}",
            out=got,
            src=sent,
            shift=shift,
            lane=moving.axis,
            name=f"{what}_{moving.operand}",
        )


def _whole(buffer: str) -> View:
    return View(buffer, (FULL, FULL))


def build(problem: MatmulProblem, turns: Turns, name: str, placements: Placements | None = None) -> Program:
    """The program of `name`. Where `turns` are not all, C is summed and cut up over `depth` in the end."""
    layered = turns.layers > 1
    placed = placements or two_d_placements(problem)
    builder = _Builder(problem, turns, "c_sum" if layered else "c")
    body = tuple(builder.body())
    lanes, buffers = ["compute", "row", "col"], builder.buffers
    if layered:
        lanes.append("depth")
        shape = tuple(local_extent(problem, two_d_placements(problem), "c", dim) for dim in (0, 1))
        buffers.append(Buffer("c_sum", "scratch", MESH, problem.dtype, shape=shape))
        total = ReduceScatter(
            over=f"{MESH}.depth",
            out=_whole("c"),
            src=_whole("c_sum"),
            dim=0,
            sizes=chunk_extent(shape[0], turns.layers, Var("peer")),
            lane="depth",
            name="sum_c",
        )
        body = (*body, total)
    declared = problem.declarations(name, placed)
    return replace(
        declared,
        buffers=declared.buffers + tuple(buffers),
        lanes=tuple(Lane(lane) for lane in lanes),
        body=(On(MESH, body),),
    )


# --- skeleton -------------------------------------------------------------------------------------------


def build_skeleton(problem: MatmulProblem, turns: Turns) -> Skeleton:
    """The skeleton of `build`, skew and unskew at the row and column that go farthest round.

    Every duration is the largest of any chip, so this is an upper bound. On even shards the chip in that row
    and column attains it. On uneven ones a chain of moves attains it as well, as it may follow the largest chunk
    all the way; a chip that computes all the time does not, since one of its products is smaller.
    """
    if turns.count == 1:
        return Skeleton((Phase(1, _tasks(problem, turns, first=True, last=True)),))
    phases = [Phase(1, _tasks(problem, turns, first=True, last=False))]
    if turns.count > 2:
        phases.append(Phase(turns.count - 2, _tasks(problem, turns, first=False, last=False)))
    phases.append(Phase(1, _tasks(problem, turns, first=False, last=True)))
    return Skeleton(tuple(phases))


def _tasks(problem: MatmulProblem, turns: Turns, first: bool, last: bool) -> tuple[Task, ...]:
    """One turn: the skew before the first, what ends the product after the last."""
    placed = two_d_placements(problem)
    each = -(-problem.sliced_size // turns.side)
    first_dim, second_dim = (largest_extent(problem, placed, problem.stationary, dim) for dim in (0, 1))
    product = Task("matmul", "compute", slice_work(problem, first_dim, second_dim, each))
    if turns.side == 1:
        return (product,)
    parts = {
        moving: each * largest_extent(problem, placed, moving.operand, 1 - moving.dim)
        for moving in (problem.horizontal, problem.vertical)
    }
    output = next((moving for moving in parts if moving.scattered), None)
    before: list[Task] = []
    after: list[Task] = []
    waits: list[tuple[str, int]] = []
    for moving, part in parts.items():
        if moving.scattered:
            waits.append(("shift_c", SLOTS))
            if not first:
                add = move_work(part, problem.dtype, "add")
                after.append(Task("add_c", moving.axis, add, (("matmul", 0),)))
            what = "unskew" if last else "shift"
            after.append(_move(problem, turns, moving, what, part, (("matmul", 0),)))
            continue
        if first:
            before.append(_move(problem, turns, moving, "skew", part))
        waits.append((f"skew_{moving.operand}", 0) if first else (f"shift_{moving.operand}", 1))
        if not last:  # what arrives takes the place of the part that the product before this one read
            after.append(_move(problem, turns, moving, "shift", part, (("matmul", 1),)))
    if last and turns.layers > 1:
        after.append(_sum(problem, turns, "unskew_c" if output else "matmul"))
    return (*before, replace(product, after=tuple(waits)), *after)


def _move(
    problem: MatmulProblem,
    turns: Turns,
    moving: Moving,
    what: str,
    elements: int,
    after: tuple[tuple[str, int], ...] = (),
) -> Task:
    hops = 1 if what == "shift" else turns.side // 2
    size = elements * dtype_bytes(problem.dtype)
    work = Transfer("permute", f"{MESH}.{moving.axis}", turns.side, size, hops=hops)
    return Task(f"{what}_{moving.operand}", moving.axis, work, after)


def _sum(problem: MatmulProblem, turns: Turns, after: str) -> Task:
    rows, columns = (largest_extent(problem, two_d_placements(problem), "c", dim) for dim in (0, 1))
    part = -(-rows // turns.layers) * columns * dtype_bytes(problem.dtype)
    work = Transfer("reduce_scatter", f"{MESH}.depth", turns.layers, part)
    return Task("sum_c", "depth", work, ((after, 0),))


# --- bytes ----------------------------------------------------------------------------------------------


def traffic(problem: MatmulProblem, rank: int, count: int, start: int = 0) -> dict[str, int]:
    """Bytes that a rank takes in on its own mesh in `count` turns from `start` on.

    An input: the part of every turn, but for the first where the ring's skew is no move. An output: the part
    of every turn after the first, and in the end the part that is at home, but for the same exception.
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
        later = sum(extent(row + col + start + turn) for turn in range(1, count))
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
    name = "cannon"
    title = "Cannon"
    source = "Cannon 1969; MeshSlice, section 2.3.2"
    estimate_is = "bound"

    def mesh_shapes(self, num_chips: int) -> tuple[tuple[int, ...], ...]:
        side = math.isqrt(num_chips)
        return ((side, side),) if side * side == num_chips else ()

    def candidates(self, problem: MatmulProblem, cluster: Cluster | None = None) -> Iterator[Config]:
        yield Config()

    def program(self, problem: MatmulProblem, config: Config) -> Program:
        return build(problem, all_turns(problem), self.name)

    def skeleton(self, problem: MatmulProblem, config: Config) -> Skeleton:
        return build_skeleton(problem, all_turns(problem))

    def traffic(self, problem: MatmulProblem, config: Config, rank: int) -> dict[str, int]:
        return traffic(problem, rank, problem.mesh_shape[0])


CANNON = Cannon()
