"""The order in which updates of the same elements are made, so that their sums have the same bits in every run.

Updates (`accumulate`, and products or copies that are released as updates) commute in exact arithmetic, and a
program leaves their order open. In floating point they do not. An executor that makes them wait for one
another as this module says adds them up in one order, that of `untimed_order`. These waits add no deadlock, since
all ops can happen in that order.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from meshweave.ir.analysis.dataflow import analyse, untimed_order
from meshweave.ir.analysis.matching import Node
from meshweave.ir.program import Lane, Program
from meshweave.ir.program.ops import UPDATE, Fence
from meshweave.ir.program.views import View


def has_updates(program: Program) -> bool:
    """Return whether any op of a program updates memory: an accumulate, or a release with `update`.

    Ops inside included sub-programs are not seen: give the expanded program for these.
    """
    return any(mode == UPDATE for op in program.ops() for mode, _ in op.accesses())


def update_order(program: Program) -> dict[Node, tuple[Node, ...]]:
    """Return {update: the earlier updates of the same elements that must be complete before it is made}.

    Updates are ops (rank, index) of the program with its includes expanded. It is assumed that lanes (issue
    queues) run one op at a time, in program order, and what that implies is left out: of each other lane of each
    rank only the last such update is listed, and none of the op's own lane. An update that waits for none is left
    out too.

    Raises:
        ProgramError: messages or collectives do not match, or the program deadlocks.
    """
    flow = analyse(replace(program, lanes=tuple(Lane(lane.name) for lane in program.lanes)))
    made: dict[tuple[int, str, int], list[tuple[Node, View]]] = defaultdict(list)
    before: dict[Node, tuple[Node, ...]] = {}
    for event in untimed_order(flow):
        if isinstance(flow.op(event[0]), Fence) and len(event) == len(program.ranks):
            made.clear()
        for node in event:
            op = flow.op(node)
            earlier: set[Node] = set()
            for mode, view in op.accesses():
                if mode == UPDATE:
                    owner = node[0] if view.rank is None else view.rank
                    assert isinstance(owner, int) and isinstance(view.slot, int)
                    known = made[owner, view.buffer, view.slot]
                    last: dict[tuple[int, str], Node] = {(node[0], op.lane): node}
                    for other, other_view in reversed(known):
                        lane = other[0], flow.op(other).lane
                        if lane not in last and other_view.overlaps(view):
                            last[lane] = other
                    earlier.update(last.values())
                    known.append((node, view))
            if earlier - {node}:
                before[node] = tuple(sorted(earlier - {node}))
    return before
