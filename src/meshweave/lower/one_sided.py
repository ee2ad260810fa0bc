"""One-sided accesses as matched send and recv, for transports that have no remote memory.

Every rank can compute every rank's list of ops, so the owner of the memory knows when it will be read or written
and can take part. Each get becomes a send by the owner and a recv at the same position of the sequential reading;
a put or accumulate becomes a send and a recv by the owner. Data edges then order everything that the fences
ordered, and the fences are left out. The result is a per-rank program.

Messages of a lane are queued by sender, in lanes of their own: the messages that one rank sends leave one after
another, and those that different ranks send to it arrive side by side. The program cannot deadlock: both ends of a
message have one position in the sequential reading, in lanes of one name, and these are first-in-first-out, so
that the earliest unfinished message is at the head of both. A ready-first lane could fill up with early receives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from meshweave.base.errors import ProgramError
from meshweave.ir.analysis.edges import is_one_sided, reads_in_place
from meshweave.ir.program import BoundOp, Buffer, Lane, On, Program, Statement
from meshweave.ir.program.expressions import Index, maximum
from meshweave.ir.program.ops import Accumulate, Add, Copy, Fence, Get, Matmul, Op, Put, Recv, Send
from meshweave.ir.program.renaming import fresh_name
from meshweave.ir.program.statements import ops_of
from meshweave.ir.program.views import Range, View
from meshweave.lower.boxes import mesh_with


def write_out_per_rank(program: Program) -> Program:
    """Return the same program with includes expanded, loops unrolled and each op in an `On` of one rank.

    The ops are in the order of the sequential reading, those of one statement in the order of ranks.
    """
    program = program.expanded
    return replace(
        program, body=tuple(On((rank,), (bound.op,)) for rank, bound in in_sequential_order(program))
    )


def lower_one_sided(program: Program) -> Program:
    """Return the program with gets, puts and accumulates as sends and recvs, written out per rank, without fences.

    The results of products and copies into another rank's memory are sent too, in the dtype that they have there.
    Accesses of a rank to its own memory become copies or additions. The messages of a lane run in up to
    `MAX_SENDER_LANES` lanes, by sender.

    Raises:
        ProgramError: a product, add or copy reads another rank's memory in place; an accumulate is no sum; or an
            op other than these, get, put and accumulate has a remote view.
    """
    program = program.expanded
    body: list[Statement] = []
    staging: dict[str, Buffer] = {}
    sender_lanes = _SenderLanes(program)
    for rank, bound in in_sequential_order(program):
        if isinstance(bound.op, Fence):
            continue
        if not is_one_sided(bound.op):
            body.append(On((rank,), (bound.op,)))
            continue
        for executor, op in _as_messages(program, rank, bound, staging):
            body.append(On((executor,), (sender_lanes.in_lane_of_sender(op, executor),)))
    emptied = sender_lanes.emptied(body)
    lanes = tuple(lane for lane in (*program.lanes, *sender_lanes.lanes()) if lane.name not in emptied)
    return replace(program, body=tuple(body), lanes=lanes, buffers=program.buffers + tuple(staging.values()))


MAX_SENDER_LANES = 8
"""Most sender lanes that replace one lane; more ranks than that share them."""


class _SenderLanes:
    """The lanes that messages run in: up to `MAX_SENDER_LANES` for each lane of the program, by sender."""

    def __init__(self, program: Program) -> None:
        self._sender_number = {rank: index % MAX_SENDER_LANES for index, rank in enumerate(program.ranks)}
        self._lanes = [lane.name for lane in program.lanes]
        self._taken = set(program.names)
        self._names: dict[tuple[str, int], str] = {}

    def in_lane_of_sender(self, op: Op, rank: int) -> Op:
        """Return the op of `rank` in its sender's lane; a recv's sender is its peer. A product is unchanged."""
        if isinstance(op, Matmul):
            return op
        sender = op.peer if isinstance(op, Recv) else rank
        assert isinstance(sender, int)
        return replace(op, lane=self._name(op.lane, self._sender_number[sender]))

    def _name(self, lane: str, number: int) -> str:
        name = self._names.get((lane, number))
        if name is None:
            name = fresh_name(f"{lane}_{number}", self._taken)
            self._taken.add(name)
            self._names[lane, number] = name
        return name

    def lanes(self) -> list[Lane]:
        """Return the sender lanes in use."""
        return [Lane(self._names[key]) for key in sorted(self._names)]

    def emptied(self, body: Iterable[Statement]) -> set[str]:
        """Return the lanes of the program in which no op of `body` runs."""
        return set(self._lanes) - {op.lane for op in ops_of(body)}


def in_sequential_order(program: Program) -> Iterator[tuple[int, BoundOp]]:
    """Yield (global rank, op) for every op of every rank, statement after statement as the program is written.

    Loops are unrolled, and the ops of one statement come in the order of ranks.
    """
    pairs = [(rank, bound) for rank, ops in program.ops_by_rank.items() for bound in ops]
    yield from sorted(pairs, key=lambda pair: (pair[1].key, pair[0]))


def _as_messages(
    program: Program, rank: int, bound: BoundOp, staging: dict[str, Buffer]
) -> list[tuple[int, Op]]:
    op = bound.op
    if reads_in_place(op):
        raise ProgramError("reads another rank's memory in place: no message does", op=bound.label, rank=rank)
    match op:
        case Get(src=src, out=out):
            owner = _owner(src)
            local = replace(src, rank=None)
            if owner == rank:
                return [(rank, Copy(out=out, src=local, lane=op.lane, name=op.name))]
            return [
                (owner, Send(src=local, peer=rank, lane=op.lane, name=op.name)),
                (rank, Recv(out=out, peer=owner, lane=op.lane, name=op.name)),
            ]
        case Accumulate(op=how) if how != "sum":
            raise ProgramError(f"accumulates by '{how}': a message adds", op=bound.label, rank=rank)
        case Put(src=src, out=out) | Accumulate(src=src, out=out) | Copy(src=src, out=out):
            update = isinstance(op, Accumulate) or _updates(op)
            if program.buffer_of[src.buffer].dtype == program.buffer_of[out.buffer].dtype:
                return _deliver(rank, src, out, update, op)
            stage = _staging_view(program, rank, out, staging)  # a message has the dtype of both ends
            cast = Copy(out=stage, src=src, lane=op.lane, name=op.name)
            return [(rank, cast), *_deliver(rank, stage, out, update, op)]
        case Matmul(out=out):
            stage = _staging_view(program, rank, out, staging)
            product = replace(op, out=stage, release=None, accumulate=0)
            return [(rank, product), *_deliver(rank, stage, out, bool(op.accumulate) or _updates(op), op)]
    raise ProgramError("cannot be lowered to send and recv", op=bound.label, rank=rank)


def _owner(view: View) -> int:
    assert isinstance(view.rank, int)
    return view.rank


def _updates(op: Op) -> bool:
    release = getattr(op, "release", None)
    return release is not None and release.update


def _deliver(rank: int, src: View, out: View, update: bool, op: Op) -> list[tuple[int, Op]]:
    owner, target = _owner(out), replace(out, rank=None)
    if owner == rank:
        if update:
            return [(rank, Add(out=target, src=src, lane=op.lane, name=op.name))]
        return [(rank, Copy(out=target, src=src, lane=op.lane, name=op.name))]
    return [
        (rank, Send(src=src, peer=owner, lane=op.lane, name=op.name)),
        (owner, Recv(out=target, peer=rank, update=update, lane=op.lane, name=op.name)),
    ]


def _staging_view(program: Program, rank: int, out: View, staging: dict[str, Buffer]) -> View:
    """Return a view of a local buffer for a product whose result belongs to another rank."""
    of = program.buffer_of[out.buffer]
    mesh = mesh_with(program, rank, of.mesh)
    name = fresh_name(f"{out.buffer}_out{'' if mesh == of.mesh else f'_{mesh}'}", program.names)
    known = staging.get(name)
    shape: tuple[Index, ...] = out.shape
    if known is not None:
        shape = tuple(maximum(a, b) for a, b in zip(out.shape, known.shape, strict=True))
    staging[name] = Buffer(name, "scratch", mesh, of.dtype, shape=shape)
    return View(name, tuple(Range(0, size) for size in out.shape))
