"""Broadcast and reduce as pipelined chains of `send` and `recv` along the ring (MeshSlice, section 2.3.3).

A broadcast is cut into D packets. Each runs from the root once along the ring, member after member, and every
member passes a packet on while the next one comes in. So packet d makes hop h in step d + h, and the last of
P - 1 hops ends after P + D - 2 steps. A reduce is the same chain with the root at its end: it begins at the
root's successor, and every member adds its own term to a packet before it passes it on.

A member sends and receives at the same time, which two lanes give: even hops run in the lane of the
collective, odd hops in one more, so that a member receives in one of them and sends in the other.

It cannot deadlock. Sort all messages by statement, packet and hop: every rank has its ops of either lane,
and everything that one of its ops waits for, in this order, so that the first message left can always take
place. That needs lanes that are first-in-first-out; a ready-first one could fill up with early receives.

The pass works on the template: place in the chain and neighbours are expressions in the member's coordinate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from meshweave.base.errors import ProgramError
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program import Buffer, Program, Repeat, Statement, When
from meshweave.ir.program.expressions import Index, Var, binary, equal, minimum, select
from meshweave.ir.program.ops import Broadcast, Copy, Op, Recv, Reduce, Send, CollectiveStep
from meshweave.ir.program.statements import rewrite, statements_of
from meshweave.ir.program.views import Range, View

ODD = "_odd"
"""Suffix of the lane for odd hops."""

SUMS = "_sum"
"""Suffix of the buffer in which a reduce adds up what it passes on."""


def lower_chains(
    program: Program, should_lower: Callable[[Broadcast | Reduce], bool] = lambda op: True
) -> Program:
    """The program with its broadcasts and reduces over mesh axes (those that are `wanted`) as chains.

    Packets are cut along the dim that is outermost in memory; never more than it has elements. Raises
    ProgramError for a reduction other than the sum, and for views that are no box along any dim.
    """
    return _ChainLowering(program, should_lower).run()


@dataclass(frozen=True)
class _ChainMember:
    """A chain of `count` members and where the executing rank stands in it: at `place` 0, ..., count - 1."""

    count: int
    place: Index
    before: Index
    after: Index
    """Global ranks of the neighbours on the ring."""
    lanes: tuple[str, str]
    """Of even and of odd hops; hop h leads from place h to place h + 1."""

    def where(self, places: range) -> Iterator[tuple[int, Index]]:
        """The even and the odd ones of some neighbouring places, each as 0 or 1 and a condition."""
        for odd in (0, 1):
            alike = [place for place in range(self.count) if place % 2 == odd]
            chosen = [place for place in alike if place in places]
            if not chosen:
                continue
            condition = equal(self.place % 2, odd)
            if len(chosen) == 1:
                condition = equal(self.place, chosen[0])
            else:
                if chosen[0] > alike[0]:
                    condition = binary("and", condition, self.place >= chosen[0])
                if chosen[-1] < alike[-1]:
                    condition = binary("and", condition, self.place <= chosen[-1])
            yield odd, condition


@dataclass(frozen=True)
class _PacketSplit:
    """How views are cut into `packets`: along `dim`, where they have `extent` elements. `number` is that of the
    packet at hand."""

    dim: int
    extent: Index
    packets: Index
    number: Index

    def piece(self, view: View) -> View:
        """The packet at hand of a view."""
        selector = view.selectors[self.dim]
        assert isinstance(selector, Range)
        selectors = list(view.selectors)
        start = selector.start
        selectors[self.dim] = Range(start + self._edge(self.number), start + self._edge(self.number + 1))
        return replace(view, selectors=tuple(selectors))

    def _edge(self, packet: Index) -> Index:
        extent, packets = self.extent, self.packets
        if isinstance(extent, int) and isinstance(packets, int) and extent % packets == 0:
            return packet * (extent // packets)
        return binary("//", packet * extent, packets)


class _ChainLowering:
    def __init__(self, program: Program, wanted: Callable[[Broadcast | Reduce], bool]) -> None:
        self.program, self.wanted = program, wanted
        self.lanes = dict(program.lane_of)
        self.sums: dict[str, Buffer] = {}
        taken = {statement.var for statement in statements_of(program.body) if isinstance(statement, Repeat)}
        self.packet = Var(_fresh("packet", taken))

    def run(self) -> Program:
        body = rewrite(self.program.body, self._lower)
        lanes, sums = tuple(self.lanes.values()), tuple(self.sums.values())
        return replace(self.program, body=body, lanes=lanes, buffers=self.program.buffers + sums)

    def _lower(self, op: Op) -> list[Statement]:
        if isinstance(op, Broadcast) and self._applies(op):
            return self._broadcast(op)
        if isinstance(op, Reduce) and self._applies(op):
            return self._reduce(op)
        return [op]

    def _applies(self, op: Broadcast | Reduce) -> bool:
        return isinstance(op.over, str) and "." in op.over and self.wanted(op)

    # --- chains ---------------------------------------------------------------------------------------

    def _broadcast(self, op: Broadcast) -> list[Statement]:
        """The root copies src to out packet by packet, beside its sends; then all only pass on out."""
        chain = self._chain(op, op.root)
        if chain.count == 1:
            return _copies(op, op.out, op.src)
        cut = self._cut(op, op.out, op.src)
        out = cut.piece(op.out)
        steps: list[Statement] = []
        if own := _copies(op, out, cut.piece(op.src), chain.lanes[1]):
            steps.append(When(equal(chain.place, 0), tuple(own)))
        steps += self._recvs(op, chain, range(1, chain.count), out)
        steps += self._sends(op, chain, cut, range(chain.count - 1), out)
        return self._for_all_packets(cut, steps)

    def _reduce(self, op: Reduce) -> list[Statement]:
        """Whoever receives starts from a copy of its own term, to which it adds what comes in; the root does
        so in out, the others in a buffer of sums, as src must stay what it is."""
        if op.op != "sum":
            raise ProgramError(f"a chain adds, it knows no '{op.op}'", op=op.name or op.kind)
        chain = self._chain(op, op.root + 1)
        if chain.count == 1:
            return _copies(op, op.out, op.src)
        cut = self._cut(op, op.src, op.out)
        src, out = cut.piece(op.src), cut.piece(op.out)
        last, between = chain.count - 1, range(1, chain.count - 1)
        copies: list[Statement] = []
        recvs: list[Statement] = []
        sends = self._sends(op, chain, cut, range(1), src)
        if between:
            sums = replace(op.src, buffer=self._sums(op.src.buffer))
            condition = binary("and", chain.place > 0, chain.place < last)
            copies.append(When(condition, tuple(_copies(op, sums, op.src))))
            recvs += self._recvs(op, chain, between, cut.piece(sums))
            sends += self._sends(op, chain, cut, between, cut.piece(sums))
        if own := _copies(op, op.out, op.src):
            copies.append(When(equal(chain.place, last), tuple(own)))
        recvs += self._recvs(op, chain, range(last, chain.count), out)
        return [*copies, *self._for_all_packets(cut, [*recvs, *sends])]

    def _for_all_packets(self, cut: _PacketSplit, steps: list[Statement]) -> list[Statement]:
        if isinstance(cut.number, Var):
            return [Repeat(cut.number.name, cut.packets, tuple(steps))]
        return steps if cut.packets else []

    def _recvs(
        self, op: Broadcast | Reduce, chain: _ChainMember, places: range, out: View
    ) -> list[Statement]:
        """Of the packet, at some places. A packet comes in by the hop before the place that takes it."""
        update, name = isinstance(op, Reduce), op.name or op.kind
        return [
            When(
                here, (Recv(out=out, peer=chain.before, update=update, lane=chain.lanes[1 - odd], name=name),)
            )
            for odd, here in chain.where(places)
        ]

    def _sends(
        self, op: Broadcast | Reduce, chain: _ChainMember, cut: _PacketSplit, places: range, src: View
    ) -> list[Statement]:
        assert isinstance(op.over, str)
        step = CollectiveStep(op.kind, chain.place + cut.number, cut.packets + (chain.count - 2), op.over)
        name = op.name or op.kind
        return [
            When(here, (Send(src=src, peer=chain.after, step=step, lane=chain.lanes[odd], name=name),))
            for odd, here in chain.where(places)
        ]

    def _chain(self, op: Broadcast | Reduce, first: Index) -> _ChainMember:
        """The chain along the ring from member number `first`, counted beyond the last where need be."""
        assert isinstance(op.over, str)
        mesh_name, _, axis = op.over.partition(".")
        mesh, at = self.program.mesh_of[mesh_name], Var(op.over)
        count = mesh.size(axis)
        first = first % count if isinstance(first, int) else first
        place = at if first == 0 else (at - first) % count
        before, after = (_rank(mesh, axis, (at + shift) % count) for shift in (count - 1, 1))
        even = replace(self.lanes[op.lane], order="fifo")
        self.lanes[op.lane] = even
        odd = op.lane + ODD if count > 2 else op.lane
        if count > 2:
            self.lanes[odd] = replace(self.lanes.get(odd, even), name=odd, order="fifo")
        return _ChainMember(count, place, before, after, (op.lane, odd))

    def _cut(self, op: Broadcast | Reduce, view: View, other: View) -> _PacketSplit:
        """Cuts `view`, whose shape is the same on all members, and `other` alike."""
        buffer = self.program.buffer_of[view.buffer]
        shape = self._shape(buffer)
        for dim in buffer.order or range(len(shape)):
            selector = view.selectors[dim]
            if isinstance(selector, Range) and isinstance(other.selectors[dim], Range):
                extent = (shape[dim] if selector.stop is None else selector.stop) - selector.start
                packets = minimum(op.packets, extent)
                several = not isinstance(packets, int) or packets > 1
                return _PacketSplit(dim, extent, packets, self.packet if several else 0)
        raise ProgramError(f"a chain moves boxes, not {view}", op=op.name or op.kind, buffer=view.buffer)

    # --- buffers --------------------------------------------------------------------------------------

    def _sums(self, of: str) -> str:
        """Name of the buffer of sums for terms in buffer `of`: one like it."""
        if of not in self.sums:
            buffer = self.program.buffer_of[of]
            taken = {*self.program.buffer_of, *(known.name for known in self.sums.values())}
            self.sums[of] = Buffer(
                _fresh(of + SUMS, taken),
                "scratch",
                buffer.mesh,
                buffer.dtype,
                shape=self._shape(buffer),
                slots=buffer.slots,
                order=buffer.order,
            )
        return self.sums[of].name

    def _shape(self, buffer: Buffer) -> tuple[Index, ...]:
        if buffer.tensor is None:
            return buffer.shape
        mesh = self.program.mesh_of[buffer.mesh]
        shapes = [self.program.local_shape(buffer.name, rank) for rank in mesh.ranks]
        return tuple(select(sizes, _position(mesh)) for sizes in zip(*shapes, strict=True))


def _copies(op: Broadcast | Reduce, out: View, src: View, lane: str = "") -> list[Statement]:
    if out == src:
        return []
    return [Copy(out=out, src=src, lane=lane or op.lane, name=f"{op.name or op.kind}_own")]


def _position(mesh: Mesh, coordinates: dict[str, Index] | None = None) -> Index:
    """Row-major position in a mesh of the executing rank, or of the one that differs in some coordinates."""
    position: Index = 0
    for axis, size in zip(mesh.axes, mesh.shape, strict=True):
        position = position * size + (coordinates or {}).get(axis, Var(f"{mesh.name}.{axis}"))
    return position


def _rank(mesh: Mesh, axis: str, coordinate: Index) -> Index:
    """The global rank that differs from the executing one in one coordinate."""
    position, first = _position(mesh, {axis: coordinate}), mesh.ranks[0]
    if mesh.ranks == tuple(range(first, first + mesh.num_ranks)):
        return position + first
    return select(mesh.ranks, position)


def _fresh(name: str, taken: Collection[str]) -> str:
    while name in taken:
        name += "_"
    return name
