"""SUMMA: 2D products panel by panel (van de Geijn & Watts, Concurrency 9(4), 1997; MeshSlice, section 2.3.3).

Cut the sliced dim into panels, so thin that each lies in one shard of either moving matrix. Then every
panel has one owner in each mesh row or column. In its turn the owners broadcast it along their axis and all
chips multiply; a panel of a moving output is summed up at its owners instead. Over all turns the products
add up to C (os) or are its parts (ls, rs). No skewing, any mesh, any sizes, and while one panel is
multiplied the next ones are under way.

A broadcast keeps a ring busy only if it is streamed: D packets pass P - 1 hops in P + D - 2 steps, each with
its own synchronisation. With one broadcast per panel and a number of panels that grows with the mesh, these
steps add up quadratically; that is the price of one-to-all communication where an all-gather has all members
send at once. `Config.packets` is D. `Config.slices` counts turns. Fewer turns than panels are the unrolled
loop (MeshSlice, section 4.2): neighbouring panels, each broadcast by its owner, make one larger product.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from itertools import pairwise

from meshweave.algorithms.matmul2d.common.algorithm import Matmul2d
from meshweave.algorithms.matmul2d.common.extents import largest_extent, local_extent, slice_work
from meshweave.algorithms.matmul2d.common.problem import (
    MESH,
    Config,
    MatmulProblem,
    Moving,
    two_d_placements,
)
from meshweave.base.errors import LayoutError
from meshweave.base.units import dtype_bytes
from meshweave.describe.machine.cluster import Cluster
from meshweave.ir.program import Buffer, Lane, On, Program, Repeat
from meshweave.ir.program.expressions import Index, Var, binary, equal
from meshweave.ir.program.ops import Broadcast, Matmul, Op, Reduce
from meshweave.ir.program.views import FULL, Range, View
from meshweave.ir.skeleton import Phase, Skeleton, Task
from meshweave.ir.work import Transfer, matmul_work

SLOTS = 2
"""Double buffering: panels arrive in one slot while the product reads the other."""

PACKETS = (1, 4, 16, 64)
MOST_TURNS = 10
"""How many turn counts a tuner is offered."""


@dataclass(frozen=True)
class Turn:
    """Elements [start, start + width) of the sliced dim, which are multiplied together."""

    start: int
    width: int

    def panels(self, problem: MatmulProblem, moving: Moving) -> tuple[tuple[int, int], ...]:
        """(offset, width) of the parts that lie in one shard of a matrix each, in order."""
        each = problem.largest_part(problem.sliced_size, moving.axis)
        stop = self.start + self.width
        inner = range(self.start // each * each + each, stop, each)
        edges = [0, *(edge - self.start for edge in inner), self.width]
        return tuple((lo, hi - lo) for lo, hi in pairwise(edges))


def turns_of(problem: MatmulProblem, count: int) -> tuple[Turn, ...]:
    """`count` turns. They end at shard boundaries of either axis, nearest to their even shares; where there
    are too few of these, between them as well. Raises LayoutError for more turns than elements."""
    size = problem.sliced_size
    if not 1 <= count <= size:
        raise LayoutError(f"{count} turns over a dim of {size} elements; between 1 and {size} make sense")
    edges = _edges(problem, count)
    ends = [0]  # as positions in `edges`, of which enough must be left for the turns to come
    for number in range(1, count):
        above = bisect_left(edges, -(-number * size // count))
        below_is_nearer = (edges[above] + edges[above - 1]) * count >= 2 * number * size
        nearest = above - 1 if below_is_nearer else above
        ends.append(min(max(nearest, ends[-1] + 1), len(edges) - 1 - (count - number)))
    ends.append(len(edges) - 1)
    return tuple(Turn(edges[lo], edges[hi] - edges[lo]) for lo, hi in pairwise(ends))


def _edges(problem: MatmulProblem, least: int) -> list[int]:
    """Where turns may begin and end, so that at least `least` of them are possible: at shard boundaries, and
    where these are too few, between them as well, the widest pieces cut first."""
    size = problem.sliced_size
    edges = {0, size}
    for axis in ("row", "col"):
        edges.update(range(0, size, problem.largest_part(size, axis)))
    shards = sorted(edges)
    if len(shards) > least:
        return shards
    # A part is cut into equal pieces; it comes first in the heap by (minus) their width.
    parts = [(-float(hi - lo), lo, hi, 1) for lo, hi in pairwise(shards)]
    heapify(parts)
    for _ in range(least - len(parts)):
        _, lo, hi, pieces = parts[0]
        heapreplace(parts, (-(hi - lo) / (pieces + 1), lo, hi, pieces + 1))
    for _, lo, hi, pieces in parts:
        edges.update(lo + (hi - lo) * i // pieces for i in range(1, pieces))
    return sorted(edges)


def _are_alike(problem: MatmulProblem, turns: tuple[Turn, ...]) -> bool:
    """Whether all turns have the same panels, so that one stands for all."""
    moving = (problem.horizontal, problem.vertical)
    width = turns[0].width
    if any(turn.width != width for turn in turns):
        return False
    shards = [problem.largest_part(problem.sliced_size, matrix.axis) for matrix in moving]
    if all(width % each == 0 or each % width == 0 for each in shards):
        return True  # whole shards to a turn, or whole turns to a shard
    return len({(turn.width, *(turn.panels(problem, matrix) for matrix in moving)) for turn in turns}) == 1


# --- program --------------------------------------------------------------------------------------------


class _Builder:
    def __init__(self, problem: MatmulProblem, turns: tuple[Turn, ...], packets: int) -> None:
        self.problem, self.turns, self.packets = problem, turns, packets
        self.several = len(turns) > 1
        self.moving = (problem.horizontal, problem.vertical)

    def buffers(self) -> tuple[Buffer, ...]:
        """Per matrix that crosses its axis, the panels of a turn side by side."""
        problem = self.problem
        widest = max(turn.width for turn in self.turns)
        out = []
        for moving in self.moving:
            if problem.axis_size(moving.axis) == 1:
                continue
            across = local_extent(problem, two_d_placements(problem), moving.operand, 1 - moving.dim)
            # Column panels lie one after another in memory when columns are the outer dim.
            order = (1, 0) if moving.dim == 1 else None
            shape = (across, widest) if moving.dim == 1 else (widest, across)
            slots = SLOTS if self.several else 1
            name = _panels_of(moving)
            out.append(Buffer(name, "scratch", MESH, problem.dtype, shape=shape, slots=slots, order=order))
        return tuple(out)

    def turn(self, number: Index, turn: Turn) -> list[Op]:
        """The ops of one turn. Where `number` is an expression, they are those of any turn like `turn`."""
        dataflow = self.problem.dataflow
        slot = number % SLOTS if self.several else 0
        operand = {name: View(name, (FULL, FULL)) for name in "abc"}
        before: list[Op] = []
        after: list[Op] = []
        for moving in self.moving:
            if self.problem.axis_size(moving.axis) == 1:  # the shard is the whole: used where it lies
                start = turn.start if isinstance(number, int) else number * turn.width
                operand[moving.operand] = _along(moving, moving.operand, Range(start, start + turn.width))
                continue
            operand[moving.operand] = _along(moving, _panels_of(moving), Range(0, turn.width), slot)
            panels = turn.panels(self.problem, moving)
            ops = [self._move(moving, number, turn, slot, *panel) for panel in panels]
            (after if moving.scattered else before).extend(ops)
        product = Matmul(
            out=operand["c"],
            a=operand["a"],
            b=operand["b"],
            transpose_a=dataflow == "rs",
            transpose_b=dataflow == "ls",
            accumulate=binary(">", number, 0) if dataflow == "os" else 0,
            lane="compute",
        )
        return [*before, product, *after]

    def _move(self, moving: Moving, number: Index, turn: Turn, slot: Index, offset: int, width: int) -> Op:
        """One panel from its owner to all, or summed up from all to its owner.

        The others' view of the shard is empty: they neither read nor write it, and no edge should say so.
        """
        owner, local = self._place(moving, number, turn, offset)
        over = f"{MESH}.{moving.axis}"
        mine = equal(Var(over), owner)
        shard = _along(moving, moving.operand, Range(local * mine, (local + width) * mine))
        panel = _along(moving, _panels_of(moving), Range(offset, offset + width), slot)
        out, src = (shard, panel) if moving.scattered else (panel, shard)
        kind = Reduce if moving.scattered else Broadcast
        name, lane = _op_name(moving), moving.axis
        return kind(over=over, out=out, src=src, root=owner, packets=self.packets, lane=lane, name=name)

    def _place(self, moving: Moving, number: Index, turn: Turn, offset: int) -> tuple[Index, Index]:
        """Which shard element `offset` of a turn lies in, and where in it."""
        each = self.problem.largest_part(self.problem.sliced_size, moving.axis)
        if isinstance(number, int):
            return divmod(turn.start + offset, each)
        if turn.width % each == 0:
            return number * (turn.width // each) + offset // each, offset % each
        if each % turn.width == 0:
            per_shard = each // turn.width
            return number // per_shard, number % per_shard * turn.width + offset
        start = number * turn.width + offset
        return start // each, start % each


def _panels_of(moving: Moving) -> str:
    return f"{moving.operand}_panel"


def _op_name(moving: Moving) -> str:
    return f"{'reduce' if moving.scattered else 'broadcast'}_{moving.operand}"


def _along(moving: Moving, buffer: str, selector: Range, slot: Index = 0) -> View:
    return View(buffer, (selector, FULL) if moving.dim == 0 else (FULL, selector), slot)


def program(problem: MatmulProblem, config: Config) -> Program:
    turns = turns_of(problem, config.slice_count)
    builder = _Builder(problem, turns, config.packets)
    body: tuple[Op | Repeat, ...]
    if len(turns) > 1 and _are_alike(problem, turns):
        body = (Repeat("p", len(turns), tuple(builder.turn(Var("p"), turns[0]))),)
    else:
        body = tuple(op for number, turn in enumerate(turns) for op in builder.turn(number, turn))
    declared = problem.declarations("summa")
    lanes = tuple(Lane(lane) for lane in ("compute", "row", "col"))
    return replace(
        declared, buffers=declared.buffers + builder.buffers(), lanes=lanes, body=(On(MESH, body),)
    )


# --- skeleton -------------------------------------------------------------------------------------------


def skeleton(problem: MatmulProblem, config: Config) -> Skeleton:
    """Rank (0, 0) has the largest shard along either axis, so that it has the largest panels and products,
    and no group waits for anyone else."""
    turns = turns_of(problem, config.slice_count)
    # Of turns that are alike, the first ones wait for no slot and all others are the same.
    different = SLOTS + 1 if _are_alike(problem, turns) else len(turns)
    tasks = [_tasks(problem, turns, number, config.packets) for number in range(min(different, len(turns)))]
    return Skeleton.of_turns([*tasks, *tasks[-1:] * (len(turns) - len(tasks))])


def _tasks(problem: MatmulProblem, turns: tuple[Turn, ...], number: int, packets: int) -> tuple[Task, ...]:
    turn = turns[number]
    before: list[Task] = []
    after: list[Task] = []
    waits: list[tuple[str, int]] = []
    for moving in (problem.horizontal, problem.vertical):
        if problem.axis_size(moving.axis) == 1:
            continue
        works = _works(problem, moving, turn, packets)
        if not moving.scattered:
            before += [
                Task(f"{_op_name(moving)}{at}", moving.axis, work, _last_reader(turns, number, offset))
                for at, (offset, work) in enumerate(works)
            ]
            waits.append((before[-1].name, 0))
            continue
        after += [
            Task(f"{_op_name(moving)}{at}", moving.axis, work, (("matmul", 0),))
            for at, (_, work) in enumerate(works)
        ]
        if number >= SLOTS:  # the product overwrites panels that must be on their way
            left = [
                offset for offset, _ in turns[number - SLOTS].panels(problem, moving) if offset < turn.width
            ]
            waits.append((f"{_op_name(moving)}{len(left) - 1}", SLOTS))
    sizes = {
        "m": problem.largest_part(problem.m, "row"),
        "n": problem.largest_part(problem.n, "col"),
        "k": turn.width,
    }
    if problem.dataflow == "ls":
        sizes |= {"n": turn.width, "k": problem.largest_part(problem.k, "col")}
    elif problem.dataflow == "rs":
        sizes |= {"m": turn.width, "k": problem.largest_part(problem.k, "row")}
    return (
        *before,
        Task("matmul", "compute", matmul_work(**sizes, dtype=problem.dtype), tuple(waits)),
        *after,
    )


def _works(problem: MatmulProblem, moving: Moving, turn: Turn, packets: int) -> list[tuple[int, Transfer]]:
    """Offset and work of each panel of a turn."""
    size = problem.axis_size(moving.axis)
    across = largest_extent(problem, two_d_placements(problem), moving.operand, 1 - moving.dim)
    line_bytes = across * dtype_bytes(problem.dtype)
    kind, over = "reduce" if moving.scattered else "broadcast", f"{MESH}.{moving.axis}"
    return [
        (offset, Transfer(kind, over, size, width * line_bytes, packets))
        for offset, width in turn.panels(problem, moving)
    ]


def _last_reader(turns: tuple[Turn, ...], number: int, offset: int) -> tuple[tuple[str, int], ...]:
    """The last product that read a slot as far as `offset`, where the next panel is to arrive."""
    for past in range(number - SLOTS, -1, -SLOTS):
        if turns[past].width > offset:
            return (("matmul", number - past),)
    return ()


def floor(problem: MatmulProblem, config: Config) -> Skeleton:
    """At least this has to be done, however the turns fall: all products, per axis a broadcast for each panel,
    of which there are as many as turns or as shards, and the packets of all bytes."""
    size, placed = problem.sliced_size, two_d_placements(problem)
    first, second = (largest_extent(problem, placed, problem.stationary, dim) for dim in (0, 1))
    tasks = [Task("matmul", "compute", slice_work(problem, first, second, size))]
    for moving in (problem.horizontal, problem.vertical):
        parts = problem.axis_size(moving.axis)
        if parts == 1:
            continue
        count = max(config.slice_count, -(-size // problem.largest_part(size, moving.axis)))
        kind, over = "reduce" if moving.scattered else "broadcast", f"{MESH}.{moving.axis}"
        line_bytes = largest_extent(problem, placed, moving.operand, 1 - moving.dim) * dtype_bytes(
            problem.dtype
        )
        whole = size * line_bytes // config.packets * config.packets
        tasks += [
            Task("begin", moving.axis, Transfer(kind, over, parts, 0, config.packets), (), count - 1),
            Task("flow", moving.axis, Transfer(kind, over, parts, whole, config.packets)),
        ]
    return Skeleton((Phase(1, tuple(tasks)),))


def least(problem: MatmulProblem) -> Iterator[Skeleton]:
    """With as few turns as possible, for each number of packets that is offered."""
    return (floor(problem, Config(packets=packets)) for packets in PACKETS)


# --- table entry ----------------------------------------------------------------------------------------


def configs(problem: MatmulProblem) -> Iterator[Config]:
    """Turns: a common multiple of rows and columns, halved as long as it goes, doubled twice, and 1; each with
    several packet counts where a broadcast has a hop to pipeline over."""
    common = math.lcm(*problem.mesh_shape[:2])
    if problem.num_chips == 1:
        yield Config()
        return
    counts = {4 * common, 2 * common, common}
    while common % 2 == 0:
        common //= 2
        counts.add(common)
    offered = sorted(count for count in counts if count <= problem.sliced_size)[-MOST_TURNS + 1 :]
    packets = PACKETS if max(problem.mesh_shape[:2]) > 2 else PACKETS[:1]
    for count in sorted({1, *offered}):
        for number in packets:
            yield Config((1,) * count, packets=number)


class Summa(Matmul2d):
    name = "summa"
    title = "SUMMA"
    source = "van de Geijn and Watts 1997; MeshSlice, sections 2.3.3 and 4.2"

    def candidates(self, problem: MatmulProblem, cluster: Cluster | None = None) -> Iterator[Config]:
        return configs(problem)

    def program(self, problem: MatmulProblem, config: Config) -> Program:
        return program(problem, config)

    def skeleton(self, problem: MatmulProblem, config: Config) -> Skeleton:
        return skeleton(problem, config)

    def traffic(self, problem: MatmulProblem, config: Config, rank: int) -> dict[str, int]:
        # All panels that a rank does not own are what its shard lacks: each matrix crosses its axis once.
        return problem.traffic_bytes(rank)

    def floor(self, problem: MatmulProblem, config: Config) -> Skeleton:
        return floor(problem, config)

    def least(self, problem: MatmulProblem) -> Iterator[Skeleton]:
        return least(problem)


SUMMA = Summa()
