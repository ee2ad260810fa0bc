"""By which counters ops of different ranks wait for each other: T3's tracker on CPU ranks.

T3 counts the updates of a region in hardware, and starts its copy when all expected ones are there (Pati et al.,
ASPLOS '24, section 4.2). Here each lane that writes to a region counts for itself, in the memory of the rank that
reads it: no two processes count in one word, so that none needs an atomic add. The region is whole when each of
its counters has come to the tiles that its lane writes.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from meshweave.ir.analysis.edges import is_tracked, tracked_edges
from meshweave.ir.analysis.matching import Node, match
from meshweave.ir.analysis.sums import has_updates, update_order
from meshweave.ir.program import Program


@dataclass(frozen=True)
class Count:
    """What an op waits for from one lane of one rank: that a counter has counted `needed` steps of the run.

    A step is an op that writes to the region that the waiting op uses.

    Attributes:
        counter: index of the counter, which is in the memory of the rank that waits.
        writer: the global rank that counts.
        needed: how many steps of the run must be complete.
        region: the view that the steps write to, as text for errors.
    """

    counter: int
    writer: int
    needed: int
    region: str


Awaited = dict[Node, list[Count]]


@dataclass(frozen=True)
class CompletionCounters:
    """The counters by which ops of different ranks wait for each other. One lane of one rank counts in each.

    An op's key is (global rank, op index there); a counter's is (rank in whose memory it is, index there).

    Attributes:
        counts: for each op, the counters that it increments once it is complete.
        totals: for each counter, the number of steps that it counts in one run.
        to_start: for each op, what it waits for before it starts: regions that it reads and other ranks write.
        to_update: for each op, what it waits for before it updates memory that others must update first.
    """

    counts: dict[Node, list[tuple[int, int]]]
    totals: dict[tuple[int, int], int]
    to_start: Awaited
    to_update: Awaited

    def num_counters(self) -> int:
        """Return the number of counters on the rank that has the most."""
        return 1 + max((counter for _, counter in self.totals), default=-1)


def completion_counters(
    program: Program, *, in_arrival_order: bool = False, but: Container[Node] = ()
) -> CompletionCounters:
    """Return the counters of released remote writes and, unless updates go `in_arrival_order`, of updates.

    A released region has a counter for each lane that writes to it, and is complete when each has counted all
    tiles of its lane. Updates of the same elements wait for each other in a fixed order: a rank has one counter
    for each lane of another rank whose updates its own updates wait for.

    Args:
        in_arrival_order: let updates of the same elements run as they come, without counters.
        but: writes, as (rank, op index), that something else counts.
    """
    counters = CompletionCounters({}, {}, {}, {})
    ops = program.ops_by_rank
    known: dict[tuple[object, ...], int] = {}
    num_counters: dict[int, int] = {}

    def counter_of(reader: int, steps: tuple[Node, ...], kind: str) -> int:
        key = reader, steps, kind
        if key not in known:
            number = known[key] = num_counters.get(reader, 0)
            num_counters[reader] = number + 1
            counters.totals[reader, number] = len(steps)
            for node in steps:
                counters.counts.setdefault(node, []).append((reader, number))
        return known[key]

    def by_lane(nodes: Sequence[Node]) -> dict[tuple[int, str], list[Node]]:
        lanes: dict[tuple[int, str], list[Node]] = {}
        for node in sorted(node for node in nodes if node not in but):
            lanes.setdefault((node[0], ops[node[0]][node[1]].op.lane), []).append(node)
        return lanes

    if any(is_tracked(op) and any(view.rank is not None for view in op.writes) for op in program.ops()):
        for later, earlier in sorted(tracked_edges(match(program)).items()):
            op = ops[later[0]][later[1]].op
            released = {view.buffer for rank, index in earlier for view in ops[rank][index].op.writes}
            region = " and ".join(dict.fromkeys(str(view) for view in op.reads if view.buffer in released))
            for (writer, _), steps in by_lane(earlier).items():
                counter = counter_of(later[0], tuple(steps), "tiles")
                counters.to_start.setdefault(later, []).append(Count(counter, writer, len(steps), region))
    if not in_arrival_order and has_updates(program):
        edges = update_order(program)
        awaited: dict[tuple[int, int, str], set[Node]] = {}
        for later, earlier in edges.items():
            for (writer, lane), steps in by_lane(earlier).items():
                awaited.setdefault((later[0], writer, lane), set()).update(steps)
        for later, earlier in sorted(edges.items()):
            region = " and ".join(str(replace(view, rank=None)) for view in ops[later[0]][later[1]].op.writes)
            for (writer, lane), steps in by_lane(earlier).items():
                all_steps = tuple(sorted(awaited[later[0], writer, lane]))
                counter, needed = counter_of(later[0], all_steps, "updates"), all_steps.index(steps[-1]) + 1
                counters.to_update.setdefault(later, []).append(Count(counter, writer, needed, region))
    return counters
