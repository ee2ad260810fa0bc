"""Products overlapped with the ring steps of one moving matrix (Wang et al., ASPLOS '23, section 3).

An all-gather around a ring delivers one part after another, so the product can start with the part that is at
home and take each further one as it arrives. A reduce-scatter passes partial sums on, so the product of a part
is needed just before that part moves, the one that stays last. Cut in S turns, neighbouring parts share a
product: fewer and larger products, at the price of a coarser overlap ("unrolling"; MeshSlice, section 4.2).

Parts travel both ways around the ring at once, as Wang et al. have them, so that both links of an axis are busy:
of the P - 1 parts that must come to a chip, P // 2 come forwards and (P - 1) // 2 backwards, each whole. The ring
takes P // 2 steps then; on two chips both ways are the same link, and one is used. The ring steps that one turn
takes in a direction are issued as one operation, so that S turns pay for S launches.

At home, in turn 0 of a gather (or the last of a scatter), nothing has to move; the P // 2 steps are dealt to the
other S - 1 turns as evenly as possible, so that S is at most P // 2 + 1. Parts that came the same way in one turn
share a product. They lie side by side except where they wrap around the end of the matrix, and are then two
products. This module builds such rings for any operand and axis, `ring_costs` says what they cost; `wang` uses it
on a 2D mesh and `one_dim` for 1D tensor parallelism and FSDP.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from meshweave.algorithms.matmul2d.common.extents import largest_extent
from meshweave.algorithms.matmul2d.common.problem import MESH, MatmulProblem, Moving, Placements
from meshweave.ir.program import Buffer, Lane, On, Program
from meshweave.ir.program.expressions import Index, Var, binary, minimum
from meshweave.ir.program.ops import Add, AllGather, CollectiveStep, Matmul, Op, Permute, ReduceScatter
from meshweave.ir.program.views import FULL, Range, Selector, View
from meshweave.lower.rings import BACK

Letters = tuple[str, str]


@dataclass(frozen=True)
class Way:
    """One direction of a ring: parts from `sign` * 1, `sign` * 2, ... `steps` places on come to a chip (gathered),
    or sums of theirs go out to them. `suffix` tells its lane, ops and buffers from those of the other one."""

    sign: int
    steps: int
    suffix: str

    def in_turn(self, turn: tuple[int, int]) -> range:
        """The steps of a turn [first, last + 1) that there are in this direction."""
        return range(turn[0], min(turn[1], self.steps))


@dataclass(frozen=True)
class Ring:
    """How to overlap one product: `moving` goes around its axis in parts; `other`, where there is one, is
    gathered before (or reduced after) all products, by a collective. `count` is the number of turns S."""

    problem: MatmulProblem
    placements: Placements
    moving: Moving
    other: Moving | None
    count: int

    @property
    def parts(self) -> int:
        return self.problem.axis_size(self.moving.axis)

    @property
    def letters(self) -> dict[str, Letters]:
        """Which of m, n, k each stored dim of each operand is."""
        dataflow = self.problem.dataflow
        return {
            "a": ("k", "m") if dataflow == "rs" else ("m", "k"),
            "b": ("n", "k") if dataflow == "ls" else ("k", "n"),
            "c": ("m", "n"),
        }

    @property
    def cut(self) -> str:
        """The letter of the dim that is cut in parts."""
        return self.letters[self.moving.operand][self.moving.dim]

    @property
    def size(self) -> int:
        return self.problem.stored_shape(self.moving.operand)[self.moving.dim]

    @property
    def each(self) -> int:
        return -(-self.size // self.parts)

    @property
    def ways(self) -> tuple[Way, ...]:
        """The directions in which parts travel, the one with more steps first."""
        both = Way(1, self.parts // 2, ""), Way(-1, (self.parts - 1) // 2, BACK)
        return tuple(way for way in both if way.steps)

    @cached_property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """[first, last + 1) of the ring steps of each turn that moves something, in either direction."""
        sizes = (size for count, size, _ in self.group_sizes for _ in range(count))
        return tuple(pairwise(accumulate(sizes, initial=0)))

    @property
    def group_sizes(self) -> list[tuple[int, int, int]]:
        """(number of groups, steps forwards and backwards in each) of `groups`, larger ones first."""
        steps = self.parts // 2
        count = min(max(self.count - 1, 1), steps)
        if not count:
            return []
        each, rest = divmod(steps, count)
        last = each - (self.parts + 1) % 2  # with an even number of parts one step more goes forwards
        sizes = [(rest, each + 1, each + 1), (count - rest - 1, each, each), (1, each, last)]
        return [size for size in sizes if size[0]]

    def bounds(self, part: Index) -> tuple[Index, Index]:
        """[start, stop) of a part within the cut dim."""
        begin, end = part * self.each, (part + 1) * self.each
        if self.size % self.parts:
            return minimum(begin, self.size), minimum(end, self.size)
        return begin, end

    def extent(self, part: Index) -> Index:
        if self.size % self.parts == 0:
            return self.each
        begin, end = self.bounds(part)
        return end - begin

    def local_extents(self) -> dict[str, int]:
        """Largest local size of m, n, k in a product, the cut one whole."""
        sizes = {"m": self.problem.m, "n": self.problem.n, "k": self.problem.k}
        for operand, letters in self.letters.items():
            whole = {m.dim for m in (self.moving, self.other) if m is not None and m.operand == operand}
            for dim, letter in enumerate(letters):
                if dim not in whole:
                    local = largest_extent(self.problem, self.placements, operand, dim)
                    sizes[letter] = min(sizes[letter], local)
        sizes[self.cut] = self.size
        return sizes


# --- program --------------------------------------------------------------------------------------------


def build(ring: Ring, name: str) -> Program:
    """The program of a ring product."""
    builder = _Builder(ring)
    body = tuple(builder.body())
    declared = ring.problem.declarations(name, ring.placements)
    lanes = {op.lane: Lane(op.lane) for op in body}
    return replace(
        declared,
        buffers=declared.buffers + tuple(builder.buffers.values()),
        lanes=tuple(lanes.values()),
        body=(On(MESH, body),),
    )


class _Builder:
    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.buffers: dict[str, Buffer] = {}
        self.at = Var(f"{MESH}.{ring.moving.axis}")
        self.holder = {operand: operand for operand in "abc"}
        """The buffer from which (or into which) products take an operand."""

    def body(self) -> Iterator[Op]:
        ring, other = self.ring, self.ring.other
        if other is not None and ring.problem.axis_size(other.axis) > 1:
            whole = self._whole_buffer(other)
            if other.scattered:
                self.holder["c"] = whole
            else:
                self.holder[other.operand] = whole
                yield self._collective(other, whole)
        yield from self._scatter() if ring.moving.scattered else self._gather()
        if other is not None and other.scattered and self.holder["c"] != "c":
            yield self._collective(other, self.holder["c"])

    def _collective(self, other: Moving, whole: str) -> Op:
        over, lane = f"{MESH}.{other.axis}", other.axis
        shard, block = _full(other.operand), _full(whole)
        size = self.ring.problem.stored_shape(other.operand)[other.dim]
        parts = self.ring.problem.axis_size(other.axis)
        sizes: Index = size // parts
        if size % parts:
            each, peer = -(-size // parts), Var("peer")
            sizes = minimum((peer + 1) * each, size) - minimum(peer * each, size)
        if other.scattered:
            return ReduceScatter(
                over=over,
                out=shard,
                src=block,
                dim=other.dim,
                sizes=sizes,
                lane=lane,
                name=f"scatter_{other.operand}",
            )
        return AllGather(
            over=over,
            out=block,
            src=shard,
            dim=other.dim,
            sizes=sizes,
            lane=lane,
            name=f"gather_{other.operand}",
        )

    def _gather(self) -> Iterator[Op]:
        ring, moving = self.ring, self.ring.moving
        yield self._product(*ring.bounds(self.at), own=True, first=True)
        if ring.parts == 1:
            return
        whole = self.holder[moving.operand] = self._whole_buffer(moving)
        for turn in ring.groups:
            for step in range(*turn):
                for way in ring.ways:
                    if step in way.in_turn(turn):
                        at = self._beside(way.sign * step)
                        sent = self._part(whole, at) if step else _full(moving.operand)
                        got = self._part(whole, self._beside(way.sign * (step + 1)))
                        yield self._permute(got, sent, -way.sign, step, way, turn)
            for way in ring.ways:
                yield from self._products(*(way.sign * (step + 1) for step in way.in_turn(turn)))

    def _scatter(self) -> Iterator[Op]:
        ring = self.ring
        if ring.parts == 1:
            yield self._product(*ring.bounds(self.at), own=True, first=True)
            return
        own, whole = self.holder["c"], self._whole_buffer(ring.moving)
        inboxes = {way: self._inbox(way) for way in ring.ways}
        for turn in ring.groups:
            self.holder["c"] = whole
            for way in ring.ways:
                yield from self._products(*(way.sign * (way.steps - step) for step in way.in_turn(turn)))
            for step in range(*turn):
                for way in ring.ways:
                    if step in way.in_turn(turn):
                        yield from self._pass_on(whole, inboxes[way], step, way, turn)
        self.holder["c"] = own
        yield self._product(*ring.bounds(self.at), own=True, first=True)
        for way in ring.ways:
            yield self._add(_full("c"), self._box(inboxes[way], self.at, way.steps - 1), way)

    def _pass_on(self, whole: str, inbox: str, step: int, way: Way, turn: tuple[int, int]) -> Iterator[Op]:
        """A step of a scatter: what has arrived and the own term go on."""
        part = self._beside(way.sign * (way.steps - step))
        sent = self._part(whole, part)
        if step:
            arrived = self._box(inbox, part, step - 1)
            yield self._add(arrived, sent, way)
            sent = arrived
        got = self._box(inbox, self._beside(way.sign * (way.steps - step - 1)), step)
        yield self._permute(got, sent, way.sign, step, way, turn)

    def _beside(self, places: int) -> Index:
        """The part of the member so many places on."""
        if not places:
            return self.at
        return (self.at + places if places > 0 else self.at - -places) % self.ring.parts

    def _products(self, *places: int) -> Iterator[Op]:
        """Products over the parts of members so many places on, which are side by side: in up to two pieces."""
        if not places:
            return
        ring = self.ring
        first, last = self._beside(min(places)), self._beside(max(places))
        begin, end = ring.bounds(first)[0], ring.bounds(last)[1]
        if first == last:
            yield self._product(begin, end)
            return
        wraps = binary("<", last, first)
        yield self._product(begin, wraps * ring.size + (1 - wraps) * end)
        yield self._product(0, wraps * end)

    def _product(self, begin: Index, end: Index, own: bool = False, first: bool = False) -> Op:
        """The product over [begin, end) of the cut dim; `own` takes the part at home from the shard itself."""
        ring, dataflow = self.ring, self.ring.problem.dataflow
        views = {}
        for operand, letters in ring.letters.items():
            if own and operand == ring.moving.operand:
                views[operand] = _full(operand)
                continue
            selectors: list[Selector] = [
                Range(begin, end) if letter == ring.cut else FULL for letter in letters
            ]
            views[operand] = View(self.holder[operand], tuple(selectors))
        return Matmul(
            out=views["c"],
            a=views["a"],
            b=views["b"],
            transpose_a=dataflow == "rs",
            transpose_b=dataflow == "ls",
            accumulate=int(ring.cut == "k" and not first),
            lane="compute",
        )

    # --- moving ---------------------------------------------------------------------------------------

    def _permute(self, got: View, sent: View, shift: int, step: int, way: Way, turn: tuple[int, int]) -> Op:
        """Ring step `step` of a direction, one of those of a turn."""
        axis, steps = self.ring.moving.axis, way.in_turn(turn)
        return Permute(
            over=f"{MESH}.{axis}",
            out=got,
            src=sent,
            shift=shift,
            step=turn_step(self.ring, step - steps.start, len(steps)),
            lane=axis + way.suffix,
            name=f"step{step}_{self.ring.moving.operand}{way.suffix}",
        )

    def _add(self, out: View, src: View, way: Way) -> Op:
        lane = self.ring.moving.axis + way.suffix
        return Add(out=out, src=src, lane=lane, name=f"add_{self.ring.moving.operand}{way.suffix}")

    def _part(self, buffer: str, part: Index) -> View:
        return _along(buffer, self.ring.moving.dim, Range(*self.ring.bounds(part)))

    def _box(self, buffer: str, part: Index, step: int) -> View:
        return _along(buffer, self.ring.moving.dim, Range(0, self.ring.extent(part)), step % 2)

    def _whole_buffer(self, moving: Moving) -> str:
        """Scratch `x_g` for a moving operand along its whole dim, which is outermost in memory."""
        size = self.ring.problem.stored_shape(moving.operand)[moving.dim]
        return self._scratch(f"{moving.operand}_g", moving, size, 1)

    def _inbox(self, way: Way) -> str:
        return self._scratch(f"c_in{way.suffix}", self.ring.moving, self.ring.each, 2)

    def _scratch(self, name: str, moving: Moving, along: int, slots: int) -> str:
        problem = self.ring.problem
        shape: list[Index] = [along, along]
        shape[1 - moving.dim] = self._across(moving)
        order = (1, 0) if moving.dim == 1 else None
        self.buffers[name] = Buffer(
            name, "scratch", MESH, problem.dtype, shape=tuple(shape), slots=slots, order=order
        )
        return name

    def _across(self, moving: Moving) -> Index:
        """Local extent of the dim of a moving matrix that does not move."""
        problem, dim = self.ring.problem, 1 - moving.dim
        size = problem.stored_shape(moving.operand)[dim]
        for axis, placement in zip(problem.mesh.axes, self.ring.placements[moving.operand], strict=True):
            if getattr(placement, "dim", None) == dim:
                parts = problem.axis_size(axis)
                each = -(-size // parts)
                if size % parts == 0:
                    return each
                at = Var(f"{MESH}.{axis}")
                return minimum((at + 1) * each, size) - minimum(at * each, size)
        return size


def turn_step(ring: Ring, index: int, count: int) -> CollectiveStep | None:
    """Which of the `count` ring steps of a turn in a direction this is; only the first pays the launch. One of a
    ring with one direction is alone in its turn."""
    return CollectiveStep("send_recv", index, count, num_directions=2) if len(ring.ways) == 2 else None


def _full(buffer: str) -> View:
    return View(buffer, (FULL, FULL))


def _along(buffer: str, dim: int, selector: Selector, slot: int = 0) -> View:
    return View(buffer, (selector, FULL) if dim == 0 else (FULL, selector), slot)
