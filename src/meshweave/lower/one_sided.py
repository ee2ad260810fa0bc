"""One-sided accesses as matched send and recv, for transports that have no remote memory.

Every rank can compute every rank's list, so the owner of the memory knows when it will be read or written
and can take part. Each get becomes a send of the owner and a recv at the same place of the sequential
reading; a put or accumulate the other way round. Data edges then order everything that the fences
ordered, and the fences go. The result is a per-rank program.

Messages of a lane are queued by sender, in lanes of their own: a rank's transfers share its way out, and what
different ranks send it arrives side by side. It cannot deadlock: both ends of a message stand at one place of the
sequential reading, in lanes of one name, and these are first-in-first-out, so that the earliest unfinished message
is at the head of both. A ready-first lane could fill up with early receives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from meshweave.base.errors import ProgramError
from meshweave.ir.analysis.edges import is_one_sided, reads_in_place
from meshweave.ir.program import BoundOp, Buffer, Lane, On, Program, Statement
from meshweave.ir.program.expressions import Index, maximum
from meshweave.ir.program.ops import Accumulate, Add, Copy, Fence, Get, Matmul, Op, Put, Recv, Send
from meshweave.ir.program.statements import ops_of
from meshweave.ir.program.views import Range, View


def per_rank(program: Program) -> Program:
    """The same program with every op written out per rank, in the order of the sequential reading."""
    return replace(
        program, body=tuple(On((rank,), (bound.op,)) for rank, bound in in_sequential_order(program))
    )


def lower_one_sided(program: Program) -> Program:
    """The program without remote views and fences. Raises ProgramError for a remote view that it cannot
    take apart: only get, put, accumulate and the out of a released matmul or copy may be remote."""
    body: list[Statement] = []
    staging: dict[str, Buffer] = {}
    queues = _SenderLanes(program)
    for rank, bound in in_sequential_order(program):
        if isinstance(bound.op, Fence):
            continue
        if not is_one_sided(bound.op):
            body.append(On((rank,), (bound.op,)))
            continue
        for where, op in _as_messages(program, rank, bound, staging):
            body.append(On((where,), (queues.placed(op, where),)))
    idle = queues.replaced(body)
    lanes = tuple(lane for lane in (*program.lanes, *queues.lanes()) if lane.name not in idle)
    return replace(program, body=tuple(body), lanes=lanes, buffers=program.buffers + tuple(staging.values()))


MAX_SENDER_LANES = 8
"""Queues per lane at most; of more ranks several share one."""


class _SenderLanes:
    """The lanes that messages go to: one per lane of the program and sender."""

    def __init__(self, program: Program) -> None:
        self._place = {rank: index % MAX_SENDER_LANES for index, rank in enumerate(program.ranks)}
        self._lanes = [lane.name for lane in program.lanes]
        self._taken = set(self._lanes)
        self._names: dict[tuple[str, int], str] = {}

    def placed(self, op: Op, rank: int) -> Op:
        """The op of `rank` in the lane of whoever sends; what a rank does alone is its own message."""
        if isinstance(op, Matmul):
            return op
        sender = op.peer if isinstance(op, Recv) else rank
        assert isinstance(sender, int)
        return replace(op, lane=self._name(op.lane, self._place[sender]))

    def _name(self, lane: str, place: int) -> str:
        name = self._names.get((lane, place))
        if name is None:
            name = f"{lane}_{place}"
            while name in self._taken:
                name += "_"
            self._taken.add(name)
            self._names[lane, place] = name
        return name

    def lanes(self) -> list[Lane]:
        return [Lane(self._names[key]) for key in sorted(self._names)]

    def replaced(self, body: Iterable[Statement]) -> set[str]:
        """Lanes of which nothing is left."""
        return set(self._lanes) - {op.lane for op in ops_of(body)}


def in_sequential_order(program: Program) -> Iterator[tuple[int, BoundOp]]:
    pairs = [(rank, bound) for rank, ops in program.instance.items() for bound in ops]
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
        case Put(src=src, out=out) | Accumulate(src=src, out=out) | Copy(src=src, out=out):
            return _deliver(rank, src, out, isinstance(op, Accumulate) or _updates(op), op)
        case Matmul(out=out):
            stage = _staging_view(program, rank, out, staging)
            product = replace(op, out=stage, release=None)
            return [(rank, product), *_deliver(rank, stage, out, _updates(op), op)]
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
    """A local buffer for a product whose result belongs to another rank."""
    of = program.buffer_of[out.buffer]
    name = f"{out.buffer}_out"
    known = staging.get(name)
    shape: tuple[Index, ...] = out.shape
    if known is not None:
        shape = tuple(maximum(a, b) for a, b in zip(out.shape, known.shape, strict=True))
    staging[name] = Buffer(name, "scratch", of.mesh, of.dtype, shape=shape)
    return View(name, tuple(Range(0, size) for size in out.shape))
