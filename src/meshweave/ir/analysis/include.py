"""A sub-program is proved once; each include of it is checked against a summary of that proof.

In the program that includes it, an include is one op: a collective of its ranks that reads what stands for its
inputs and writes what stands for its outputs. That reading is sound because a proved program ends wherever it
begins, and because what happens inside of it cannot meet what happens outside:

- scratch and stashes are its own, and inputs and outputs that stand for the same elements are refused;
- its ops are in order with those of other lanes' ops by data alone, and with those of the lanes that it shares by
  the order in which they are issued: an include waits for the ops before it in its lanes, and they for it;
- messages and collectives meet in the order in which the ranks issue them, lane by lane. Where an include shares a
  lane with others, all ranks must have them in the same order (`_check_crossings`).

An order of includes and other ops is then an order of the expanded program, with the sub-program's own order in
place of each include; in first-in-first-out lanes one order that ends means that all do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from meshweave.base.errors import ProgramError
from meshweave.ir.analysis.dataflow import Dataflow
from meshweave.ir.analysis.edges import access_conflicts
from meshweave.ir.analysis.matching import Joint, Node
from meshweave.ir.program import BoundOp, Include, Lane, Program, Send
from meshweave.ir.program.include import include_error
from meshweave.ir.program.ops import READ, WRITE

LaneKey = str | tuple[Any, ...]
"""A lane: its name, or for a lane that a sub-program has for itself (name of the sub-program, its lane)."""


@dataclass(frozen=True)
class Channel:
    """A queue of messages, or of collectives, that are matched in the order in which ranks issue them.

    Attributes:
        tag: that of the messages; None for collectives.
        ranks: sender and receiver, or the members.
    """

    lane: LaneKey
    tag: int | None
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class PartSummary:
    """What the check of an include uses of the proof of its sub-program.

    Attributes:
        lanes: the lanes in which the sub-program has ops.
        channels: the channels of its messages and collectives.
        notes: what its proof left out, in words.
    """

    lanes: frozenset[LaneKey]
    channels: frozenset[Channel]
    notes: tuple[str, ...]


Summaries = Mapping[str, PartSummary]
"""By the name of the sub-program."""


def with_include_lane(program: Program) -> Program:
    """Return the program with a lane "" for its includes, in which each starts as soon as it can.

    A program without includes is returned as it is.
    """
    if not program.includes:
        return program
    return replace(program, lanes=(*program.lanes, Lane("", "ready", 1 << 30)))


def summarise(flow: Dataflow, summaries: Summaries, notes: tuple[str, ...]) -> PartSummary:
    """Return what the check of an include needs of a sub-program that was proved.

    Args:
        flow: the dataflow of the sub-program, on which it was proved.
        summaries: the summaries of the programs that it includes itself, by name.
        notes: what its proof left out, in words.
    """
    lanes: set[LaneKey] = set()
    channels: set[Channel] = set()
    for op in {id(flow.op(node)): flow.op(node) for node in flow.nodes()}.values():
        lanes |= _lanes(op, summaries) if isinstance(op, Include) else {op.lane}
    for joint in flow.matched.joints:
        channels |= _channels(flow, joint, summaries)
    return PartSummary(frozenset(lanes), frozenset(channels), notes)


def _lane(op: Include, inner: LaneKey) -> LaneKey:
    given = dict(op.lanes).get(inner) if isinstance(inner, str) else None
    return (op.part, inner) if given is None else given


def _lanes(op: Include, summaries: Summaries) -> set[LaneKey]:
    return {_lane(op, inner) for inner in summaries[op.part].lanes}


def _channels(flow: Dataflow, joint: Joint, summaries: Summaries) -> set[Channel]:
    """Return the channels that a joint uses: its own, or those of the sub-program that it includes."""
    op = flow.op(joint.members[0])
    if not isinstance(op, Include):
        tag = op.tag if isinstance(op, Send) else None
        assert tag is None or isinstance(tag, int)
        return {Channel(op.lane, tag, tuple(rank for rank, _ in joint.members))}
    assert isinstance(op.over, tuple)
    ranks = dict(zip(op.program.ranks, op.over, strict=True))
    return {
        Channel(_lane(op, inner.lane), inner.tag, tuple(ranks[rank] for rank in inner.ranks))
        for inner in summaries[op.part].channels
    }


def check_include_uses(flow: Dataflow, summaries: Summaries) -> Dataflow:
    """Check every include of a program against the summary of its sub-program, and order ops around includes.

    Returns the dataflow of `flow` with further edges: an include waits for the earlier ops of its rank in the
    lanes that it uses, and later ops in these lanes wait for it.

    Args:
        flow: the dataflow of the program, in which an include is one op.
        summaries: the summary of each sub-program, by name.

    Raises:
        ProgramError: a view has another shape than what it stands for, or shares elements with that of an output;
            an output of an include is overwritten unread; or ranks issue an include and what shares a channel
            with it in different orders. The message names the include.
    """
    for rank, ops in flow.matched.ops.items():
        for bound in ops:
            if isinstance(bound.op, Include):
                try:
                    _check_views(bound.op, bound, rank)
                except ProgramError as error:
                    raise include_error(bound.op.title, error) from None
    _check_overwritten(flow)
    _check_crossings(flow, summaries)
    return replace(flow, predecessors={rank: _with_lanes(flow, rank, summaries) for rank in flow.matched.ops})


def _check_views(op: Include, bound: BoundOp, rank: int) -> None:
    """Raise ProgramError for a view of another shape than what it stands for, or two of the same elements."""
    assert isinstance(op.over, tuple)
    inner = op.program.ranks[op.over.index(rank)]
    for formal, view in op.buffers:
        shape = op.program.local_shape(formal, inner)
        if view.shape != shape:
            raise ProgramError(
                f"{formal} has shape {shape} on rank {inner}, {view} has {view.shape}",
                op=bound.label,
                rank=rank,
                buffer=view.buffer,
            )
    kinds = {formal: op.program.buffer_of[formal].kind for formal, _ in op.buffers}
    for (formal, view), (other_formal, other) in combinations(op.buffers, 2):
        if "output" in (kinds[formal], kinds[other_formal]) and view.overlaps(other):
            raise ProgramError(
                f"{formal} and {other_formal} would share elements of {view.buffer}, and one is an output",
                op=bound.label,
                rank=rank,
                buffer=view.buffer,
            )


def _check_overwritten(flow: Dataflow) -> None:
    """Raise ProgramError where an include overwrites an output that another one wrote and nothing has read."""
    outputs = {buffer.name for buffer in flow.program.buffers if buffer.kind == "output"}
    for rank, ops in flow.matched.ops.items():
        touching = [bound for bound in ops if any(view.buffer in outputs for _, view in bound.op.accesses())]
        if sum(isinstance(bound.op, Include) for bound in touching) < 2:
            continue
        written = {view.buffer for bound in touching for view in bound.op.writes}
        for bound, of_op in zip(touching, access_conflicts(touching), strict=True):
            if not isinstance(bound.op, Include):
                continue
            ordering = [view for _, view in bound.op.accesses() if view.buffer in written]
            for view, (mode, others) in zip(ordering, of_op, strict=True):
                if mode != WRITE or view.buffer not in outputs:
                    continue
                writers = [at for at in others if isinstance(touching[at].op, Include)]
                last = max((at for at in writers if _writes(touching[at], view.buffer)), default=None)
                if last is not None and not any(
                    at > last and _reads(touching[at], view.buffer) for at in others
                ):
                    raise include_error(
                        bound.op.title,
                        ProgramError(
                            f"writes {view}, which {touching[last].label} wrote and nothing has read",
                            op=bound.label,
                            rank=rank,
                            buffer=view.buffer,
                        ),
                    )


def _writes(bound: BoundOp, buffer: str) -> bool:
    return any(mode != READ and view.buffer == buffer for mode, view in bound.op.accesses())


def _reads(bound: BoundOp, buffer: str) -> bool:
    return any(mode == READ and view.buffer == buffer for mode, view in bound.op.accesses())


# --- lanes ----------------------------------------------------------------------------------------------


def _with_lanes(flow: Dataflow, rank: int, summaries: Summaries) -> tuple[tuple[int, ...], ...]:
    """Return what each op of a rank waits for, with the order in lanes that includes share."""
    since: dict[LaneKey, list[int]] = defaultdict(list)
    """The last include in a lane, and the other ops in it since then."""
    edges: list[tuple[int, ...]] = []
    for index, (bound, before) in enumerate(
        zip(flow.matched.ops[rank], flow.predecessors[rank], strict=True)
    ):
        op = bound.op
        if isinstance(op, Include):
            lanes = _lanes(op, summaries)
            edges.append(tuple(sorted({*before, *(other for lane in lanes for other in since[lane])})))
            since.update((lane, [index]) for lane in lanes)
        else:
            in_lane = since[op.lane]
            ahead = [other for other in in_lane[:1] if isinstance(flow.op((rank, other)), Include)]
            edges.append(tuple(sorted({*before, *ahead})))
            in_lane.append(index)
    return tuple(edges)


def _check_crossings(flow: Dataflow, summaries: Summaries) -> None:
    """Raise ProgramError where ranks issue an include and what shares a channel with it in different orders.

    Includes of one sub-program on the same ranks in the same lanes are matched in order already.
    """
    kinds: dict[tuple[object, ...], set[Channel]] = {}
    kind_of: dict[int, tuple[object, ...]] = {}
    users: dict[Channel, set[tuple[object, ...]]] = defaultdict(set)
    for number, joint in enumerate(flow.matched.joints):
        op = flow.op(joint.members[0])
        kind: tuple[object, ...] = (op.part, op.over, op.lanes) if isinstance(op, Include) else ()
        kind_of[number] = kind
        if kind and kind in kinds:
            continue
        channels = _channels(flow, joint, summaries)
        if kind:
            kinds[kind] = channels
        for channel in channels:
            users[channel].add(kind)
    contested = {channel for channel, known in users.items() if len(known) > 1}
    if not contested:
        return
    issued: dict[Channel, dict[int, list[Node]]] = {channel: defaultdict(list) for channel in contested}
    for number, joint in enumerate(flow.matched.joints):
        kind = kind_of[number]
        for channel in contested & (kinds[kind] if kind else _channels(flow, joint, summaries)):
            for node in joint.members:
                if node[0] in channel.ranks:
                    issued[channel][node[0]].append(node)
    for channel, by_rank in issued.items():
        _check_one_order(flow, channel, by_rank)


def _check_one_order(flow: Dataflow, channel: Channel, by_rank: Mapping[int, list[Node]]) -> None:
    first_rank = channel.ranks[0]
    first = sorted(by_rank[first_rank])
    for rank in channel.ranks[1:]:
        for here, there in zip(sorted(by_rank[rank]), first, strict=True):
            if flow.matched.joint_of[here] == flow.matched.joint_of[there]:
                continue
            pair = [node for node in (here, there) if isinstance(flow.op(node), Include)]
            node = pair[0] if pair else here
            raise include_error(
                flow.op(node).title,
                ProgramError(
                    f"signals cross in {_shown(channel)}: rank {first_rank} issues {flow.label(there)} where rank "
                    f"{rank} issues {flow.label(here)}; give the sub-program a lane of its own",
                    op=flow.label(node),
                    rank=rank,
                ),
            )


def _shown(channel: Channel) -> str:
    names: list[str] = []
    lane = channel.lane
    while isinstance(lane, tuple):
        names.append(lane[0])
        lane = lane[1]
    tag = "" if channel.tag is None else f", tag {channel.tag}"
    return f"lane {' > '.join([*names, lane])}{tag}"


def part_notes(summaries: Mapping[str, PartSummary]) -> Iterator[str]:
    """Yield each note on what the proof of a sub-program left out, after the sub-program's name and a colon."""
    for name, summary in summaries.items():
        yield from (f"{name}: {note}" for note in summary.notes)
