"""Broadcast and reduce as pipelined chains of `send` and `recv` along the ring (MeshSlice, section 2.3.3).

A broadcast is cut into D packets. Each travels from the root along the ring, and every member passes a packet on
while it receives the next. So packet d makes hop h in step d + h, and the last of P - 1 hops ends after P + D - 2
steps. A reduce is the same chain with the root at its end: it begins at the root's successor, and every member
adds its own term to a packet before it passes it on.

A member sends and receives at the same time because even hops run in the lane of the collective and odd hops in a
second lane: each member receives in one of them and sends in the other.

The chain cannot deadlock. Sort all messages by statement, packet and hop: every rank has the ops of each lane, and
everything that one of its ops waits for, in this order, so that the first remaining message can always take place.
That needs first-in-first-out lanes; a ready-first one could fill up with early receives.

The pass works on the template: position in the chain and neighbours are expressions in the member's coordinate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from meshweave.base.errors import ProgramError
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program import Buffer, Program, Repeat, Statement, When
from meshweave.ir.program.expressions import Index, Var, binary, equal, minimum, select
from meshweave.ir.program.ops import Broadcast, Copy, Op, Recv, Reduce, Send
from meshweave.ir.program.release import CollectiveStep
from meshweave.ir.program.renaming import fresh_name
from meshweave.ir.program.statements import rewrite, statements_of
from meshweave.ir.program.views import Range, View

ODD = "_odd"
"""Suffix of the lane for odd hops."""

SUMS = "_sum"
"""Suffix of the buffer in which members of a reduce add up the packets that they pass on."""


def lower_chains(
    program: Program, should_lower: Callable[[Broadcast | Reduce], bool] = lambda op: True
) -> Program:
    """Return the program with its broadcasts and reduces over mesh axes as chains of `send` and `recv`.

    Packets are cut along the dim that is outermost in memory among those in which both views are ranges; there
    are at most as many as the view has elements in that dim. Lanes of lowered collectives become first-in-first-
    out. Included sub-programs are lowered, too.

    Args:
        should_lower: returns whether to lower a collective; the others stay.

    Raises:
        ProgramError: a reduction is not a sum, or a collective has no dim in which both of its views are
            ranges, not blocks, so that none can be cut.
    """
    program = program.with_parts(lambda part: lower_chains(part, should_lower))
    return _ChainLowering(program, should_lower).run()


@dataclass(frozen=True)
class _ChainMember:
    """The executing rank as a member of a chain: its `position` 0, ..., count - 1 and its neighbours."""

    count: int
    position: Index
    before: Index
    after: Index
    """Global ranks of the neighbours on the ring."""
    lanes: tuple[str, str]
    """The lanes of even and of odd hops; hop h leads from position h to position h + 1."""

    def where(self, positions: range) -> Iterator[tuple[int, Index]]:
        """Yield (parity, condition) for each parity, 0 and 1, of which there is one among `positions`.

        The condition, on coordinates, holds on a rank whose position has that parity and is one of `positions`.
        """
        for parity in (0, 1):
            of_parity = [position for position in range(self.count) if position % 2 == parity]
            chosen = [position for position in of_parity if position in positions]
            if not chosen:
                continue
            condition = equal(self.position % 2, parity)
            if len(chosen) == 1:
                condition = equal(self.position, chosen[0])
            else:
                if chosen[0] > of_parity[0]:
                    condition = binary("and", condition, self.position >= chosen[0])
                if chosen[-1] < of_parity[-1]:
                    condition = binary("and", condition, self.position <= chosen[-1])
            yield parity, condition


@dataclass(frozen=True)
class _PacketSplit:
    """How views are cut into `packets`: along `dim`, in which they have `extent` elements.

    `number` is that of the current packet.
    """

    dim: int
    extent: Index
    packets: Index
    number: Index

    def piece(self, view: View) -> View:
        """Return the current packet of a view."""
        selector = view.selectors[self.dim]
        assert isinstance(selector, Range)
        selectors = list(view.selectors)
        start = selector.start
        selectors[self.dim] = Range(start + self._edge(self.number), start + self._edge(self.number + 1))
        return replace(view, selectors=tuple(selectors))

    def _edge(self, packet: Index) -> Index:
        extent, packets = self.extent, self.packets
        if isinstance(extent, int) and isinstance(packets, int) and extent % max(packets, 1) == 0:
            return packet * (extent // max(packets, 1))
        return binary("//", packet * extent, packets)


class _ChainLowering:
    """The lanes and buffers that the chains of one program add, and the ops that replace its collectives."""

    def __init__(self, program: Program, should_lower: Callable[[Broadcast | Reduce], bool]) -> None:
        self.program, self.should_lower = program, should_lower
        self.lanes = dict(program.lane_of)
        self.sums: dict[str, Buffer] = {}
        taken = {statement.var for statement in statements_of(program.body) if isinstance(statement, Repeat)}
        self.packet = Var(fresh_name("packet", taken))

    def run(self) -> Program:
        """Return the lowered program."""
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
        return isinstance(op.over, str) and "." in op.over and self.should_lower(op)

    # --- chains ---------------------------------------------------------------------------------------

    def _broadcast(self, op: Broadcast) -> list[Statement]:
        """Return the chain of a broadcast: the root copies src to out packet by packet, and all send from out."""
        chain = self._chain(op, op.root)
        if chain.count == 1:
            return _copies(op, op.out, op.src)
        cut = self._cut(op, op.out, op.src)
        out = cut.piece(op.out)
        steps: list[Statement] = []
        if own := _copies(op, out, cut.piece(op.src), chain.lanes[1]):
            steps.append(When(equal(chain.position, 0), tuple(own)))
        steps += self._recvs(op, chain, range(1, chain.count), out)
        steps += self._sends(op, chain, cut, range(chain.count - 1), out)
        return self._for_all_packets(cut, steps)

    def _reduce(self, op: Reduce) -> list[Statement]:
        """Return the chain of a reduce. A receiver copies its own term and adds each packet that arrives to it.

        The root does so in out, the others in a buffer of sums, because src must not change.
        """
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
            condition = binary("and", chain.position > 0, chain.position < last)
            copies.append(When(condition, tuple(_copies(op, sums, op.src))))
            recvs += self._recvs(op, chain, between, cut.piece(sums))
            sends += self._sends(op, chain, cut, between, cut.piece(sums))
        if own := _copies(op, op.out, op.src):
            copies.append(When(equal(chain.position, last), tuple(own)))
        recvs += self._recvs(op, chain, range(last, chain.count), out)
        return [*copies, *self._for_all_packets(cut, [*recvs, *sends])]

    def _for_all_packets(self, cut: _PacketSplit, steps: list[Statement]) -> list[Statement]:
        if isinstance(cut.number, Var):
            return [Repeat(cut.number.name, cut.packets, tuple(steps))]
        return steps if cut.packets else []

    def _recvs(
        self, op: Broadcast | Reduce, chain: _ChainMember, positions: range, out: View
    ) -> list[Statement]:
        """Return the receives of the current packet at some positions, over the hop that ends there."""
        update, name = isinstance(op, Reduce), op.name or op.kind
        return [
            When(
                here,
                (Recv(out=out, peer=chain.before, update=update, lane=chain.lanes[1 - parity], name=name),),
            )
            for parity, here in chain.where(positions)
        ]

    def _sends(
        self, op: Broadcast | Reduce, chain: _ChainMember, cut: _PacketSplit, positions: range, src: View
    ) -> list[Statement]:
        assert isinstance(op.over, str)
        step = CollectiveStep(op.kind, chain.position + cut.number, cut.packets + (chain.count - 2), op.over)
        name = op.name or op.kind
        return [
            When(here, (Send(src=src, peer=chain.after, step=step, lane=chain.lanes[parity], name=name),))
            for parity, here in chain.where(positions)
        ]

    def _chain(self, op: Broadcast | Reduce, first: Index) -> _ChainMember:
        """Return the chain along the ring from member number `first`, modulo the number of members."""
        assert isinstance(op.over, str)
        mesh_name, _, axis = op.over.partition(".")
        mesh, at = self.program.mesh_of[mesh_name], Var(op.over)
        count = mesh.size(axis)
        first = first % count if isinstance(first, int) else first
        position = at if first == 0 else (at - first) % count
        before, after = (_rank(mesh, axis, (at + shift) % count) for shift in (count - 1, 1))
        even = replace(self.lanes[op.lane], order="fifo")
        self.lanes[op.lane] = even
        odd_lane = op.lane
        if count > 2:
            odd_lane = fresh_name(op.lane + ODD, self.program.names - {*self.program.lane_of})
            self.lanes[odd_lane] = replace(self.lanes.get(odd_lane, even), name=odd_lane, order="fifo")
        return _ChainMember(count, position, before, after, (op.lane, odd_lane))

    def _cut(self, op: Broadcast | Reduce, view: View, other: View) -> _PacketSplit:
        """Return how to cut `view`, whose shape is the same on all members, and `other` in the same manner."""
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
        """Return the name of the buffer of sums for terms in buffer `of`, which has the same shape."""
        if of not in self.sums:
            buffer = self.program.buffer_of[of]
            taken = {*self.program.names, *self.lanes, *(known.name for known in self.sums.values())}
            self.sums[of] = Buffer(
                fresh_name(of + SUMS, taken),
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
    """Return the row-major position in a mesh of the executing rank, with some coordinates replaced."""
    position: Index = 0
    for axis, size in zip(mesh.axes, mesh.shape, strict=True):
        position = position * size + (coordinates or {}).get(axis, Var(f"{mesh.name}.{axis}"))
    return position


def _rank(mesh: Mesh, axis: str, coordinate: Index) -> Index:
    """Return the global rank that differs from the executing one in one coordinate."""
    position, first = _position(mesh, {axis: coordinate}), mesh.ranks[0]
    if mesh.ranks == tuple(range(first, first + mesh.num_ranks)):
        return position + first
    return select(mesh.ranks, position)
