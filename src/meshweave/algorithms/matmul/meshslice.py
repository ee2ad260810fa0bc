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

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshweave.algorithms.matmul.problem import MESH, Algorithm, Config, MatmulProblem, Moving
from meshweave.errors import LayoutError
from meshweave.ir.expr import Index, Var, binary, maximum, minimum
from meshweave.ir.ops import AllGather, Copy, Matmul, Op, ReduceScatter
from meshweave.ir.program import Buffer, Lane, On, Program, Repeat
from meshweave.ir.skeleton import Skeleton, Task
from meshweave.ir.views import FULL, Blocked, Range, Selector, View
from meshweave.ir.work import Transfer, matmul_work, move_work
from meshweave.units import dtype_bytes

SLOTS = 2
"""Double buffering: the collective of one slice fills a buffer while the product reads the other."""

PEER = Var("peer")


@dataclass(frozen=True)
class Slices:
    """Which elements of the sliced dim (of `size`) form slice s, and how they lie on a mesh axis.

    Blocks of `block` elements are dealt to slices in periods of sum(widths) blocks.
    """

    size: int
    widths: tuple[int, ...]
    block: int

    @property
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
        start, stop = self.bounds(number)
        sizes = (self.part(axis_size, c, start, stop - start)[0] for c in range(axis_size))
        return max(size for size in sizes if isinstance(size, int))

    def total(self, number: int) -> int:
        start, stop = self.bounds(number)
        count = self.count_below(self.size, start, stop - start)
        assert isinstance(count, int)
        return count


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
    return Slices(size, config.slices, block)


# --- program --------------------------------------------------------------------------------------------


class _Builder:
    def __init__(self, problem: MatmulProblem, slices: Slices) -> None:
        self.problem, self.slices = problem, slices
        self.sliced = len(slices.widths) > 1
        self.buffers: list[Buffer] = []
        for moving in (problem.horizontal, problem.vertical):
            self._declare(moving)

    def gathers(self, moving: Moving) -> bool:
        return self.problem.axis_size(moving.axis) > 1

    def _declare(self, moving: Moving) -> None:
        """Scratch: the local slice `x_s` and the gathered (or not yet reduced) block `x_g` of operand x."""
        problem, slices = self.problem, self.slices
        shape = problem.stored_shape(moving.operand)
        other_axis = "row" if moving.axis == "col" else "col"
        other_size = shape[1 - moving.dim]
        parts = problem.axis_size(other_axis)
        each = -(-other_size // parts)
        across: Index = each
        if other_size % parts:
            at = Var(f"{MESH}.{other_axis}")
            across = minimum((at + 1) * each, other_size) - minimum(at * each, other_size)
        numbers = range(len(slices.widths))
        local = max(slices.largest_part(problem.axis_size(moving.axis), s) for s in numbers)
        whole = max(slices.total(s) for s in numbers)
        # Pieces of a collective along dim 1 are contiguous when dim 1 is the outer one in memory.
        order = (1, 0) if moving.dim == 1 else None
        slots = SLOTS if self.sliced else 1
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
        slot = number % SLOTS if self.sliced else 0
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


def build(problem: MatmulProblem, slices: Slices, name: str) -> Program:
    """The program of `name` for slices of any widths; one slice is Collective."""
    builder = _Builder(problem, slices)
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
    declared = problem.declarations(name)
    lanes = tuple(Lane(lane) for lane in ("compute", "row", "col"))
    return replace(
        declared, buffers=declared.buffers + tuple(builder.buffers), lanes=lanes, body=(On(MESH, body),)
    )


# --- skeleton -------------------------------------------------------------------------------------------


def build_skeleton(problem: MatmulProblem, slices: Slices) -> Skeleton:
    """The skeleton of `build`: rank (0, 0), which by the chunk rule has the largest shards."""
    return Skeleton.of_turns(_turn_tasks(problem, slices, number) for number in range(len(slices.widths)))


def _turn_tasks(problem: MatmulProblem, slices: Slices, number: int) -> tuple[Task, ...]:
    sliced = len(slices.widths) > 1
    before: list[Task] = []
    after: list[Task] = []
    waits: list[tuple[str, int]] = []
    for moving in (problem.horizontal, problem.vertical):
        tasks = _move_tasks(problem, slices, number, moving, sliced)
        if not tasks:
            continue
        (after if moving.scattered else before).extend(tasks)
        waits.append((tasks[0].name, SLOTS) if moving.scattered else (tasks[-1].name, 0))
    total = slices.total(number)
    sizes = {
        "m": problem.largest_part(problem.m, "row"),
        "n": problem.largest_part(problem.n, "col"),
        "k": total,
    }
    if problem.dataflow == "ls":
        sizes |= {"n": total, "k": problem.largest_part(problem.k, "col")}
    elif problem.dataflow == "rs":
        sizes |= {"m": total, "k": problem.largest_part(problem.k, "row")}
    product = Task("matmul", "compute", matmul_work(**sizes), tuple(waits))
    return (*before, product, *after)


def _move_tasks(
    problem: MatmulProblem, slices: Slices, number: int, moving: Moving, sliced: bool
) -> list[Task]:
    size = problem.axis_size(moving.axis)
    other_axis = "row" if moving.axis == "col" else "col"
    across = problem.largest_part(problem.stored_shape(moving.operand)[1 - moving.dim], other_axis)
    part = slices.largest_part(size, number)
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


# --- table entry ----------------------------------------------------------------------------------------


def program(problem: MatmulProblem, config: Config) -> Program:
    return build(problem, slices_of(problem, config), "meshslice")


def skeleton(problem: MatmulProblem, config: Config) -> Skeleton:
    return build_skeleton(problem, slices_of(problem, config))


def configs(problem: MatmulProblem, block: int = 8, most: int = 128) -> Iterator[Config]:
    """Every slice count that the paper allows: divisors of the local sliced dim over the block size, on
    both axes, 1 included; where nothing divides, every power of two up to the local dim."""
    size = problem.sliced_size
    local = [size // problem.axis_size(axis) // block for axis in ("row", "col")]
    exact = all(size % (problem.axis_size(axis) * block) == 0 for axis in ("row", "col"))
    if exact:
        counts = [s for s in range(1, min(most, *local) + 1) if all(part % s == 0 for part in local)]
    else:
        top = max(1, min(size // max(problem.mesh_shape), most))
        counts = [1 << e for e in range(top.bit_length())]
    for count in counts:
        yield Config((1,) * count, block)


MESHSLICE = Algorithm(
    name="meshslice",
    title="MeshSlice",
    source="Nam et al., ISCA '25, section 3.1",
    dataflows=("os", "ls", "rs"),
    program=program,
    skeleton=skeleton,
    configs=configs,
    traffic=lambda problem, config, rank: problem.traffic_bytes(rank),
)
