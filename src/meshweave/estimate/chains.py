"""The time of a skeleton, which the core follows: on every rank of a grid where there are chains, else on one.

A broadcast of D packets is a chain: D messages pass P - 1 hops, from the root to the member before it, and a hop
carries one packet at a time. Hop h begins when both its members have come to the op. Where a packet takes t, its
last packet is through at

    E(0) = A(0) + launch + D t        E(h) = max(E(h - 1) + t, A(h) + D t)

where A(h) is when the later of the two members of hop h began. Member h is free at E(h), and the last one at
E(P - 2). So each member is busy for D packets, and not for P + D - 2. The next chain in the lane may begin at a
root that is free while the packets of this one are still on their way to others. Chains from one root follow each
other after D + 1 packets, and those from roots in turn after D + 2, which is what van de Geijn and Watts (1997,
section 3) rely on. A reduction is the same chain from the member after the root to the root.

Where the machine's send buffer takes a packet, a member is free when its last packet begins to flow, at E(h) - t.
The link of a hop is not yet free then and holds up the next chain instead: A(h) is when the link is free, if that
is later. Chains from roots in turn then follow each other after D + 1 packets. A link behind a token bucket, as in
a lab, makes up for the time that it was idle: its packets flow as if they had arrived up to a burst sooner, and
none ends before it has arrived.

The recurrence is exact where links are not shared. It needs the times of all members, because who is late delays
those after it: every rank along the axes that have chains is followed, the others are alike. Other collectives
wait for all of their members, as a ring of P - 1 exchanges does, and permutes for neighbours.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from meshweave._core import ProgramFault, skeleton_ps
from meshweave.base.errors import ProgramError
from meshweave.base.units import to_ps
from meshweave.cost.machine import Machine
from meshweave.ir.skeleton import Part, Skeleton, Task
from meshweave.ir.work import Transfer, Work

_LOCAL, _MEET, _EXCHANGE, _BROADCAST, _REDUCE, _PART = range(6)
"""What the tasks of a rank wait for: the order is that of `How` in csrc/skeleton.cpp."""

_ALL = -1
"""In place of an axis: all ranks."""


def has_chains(skeleton: Skeleton) -> bool:
    """Return whether a skeleton (`ir.skeleton`) has chains: broadcasts or reduces that are timed hop by hop."""
    return any(task.roots for _, task in skeleton.counted_tasks())


def launch_and_packet_ps(work: Transfer, cost_ps: Callable[[Work], int]) -> tuple[int, int]:
    """Return (picoseconds to launch a broadcast or reduce, picoseconds of one packet over one hop after that).

    `cost_ps` returns the picoseconds of one op.
    """
    launch_ps = cost_ps(work.launch)
    return launch_ps, cost_ps(work.hop) - launch_ps


def is_buffered(work: Transfer, machine: Machine | None) -> bool:
    """Return whether a packet of a broadcast or reduce fits into the machine's send buffer.

    Its sender is then free before it has arrived. False where `machine` is None, and for packets of 0 bytes.
    """
    return machine is not None and 0 < work.hop.part_bytes <= machine.cluster.send_buffer_bytes


def link_burst_ps(work: Transfer, machine: Machine) -> int:
    """Return the picoseconds that a link's burst takes at the link's rate: `burst_bytes` over bytes per second.

    The link is that of the mesh axis of `work`, a broadcast or reduce. 0 for a link without a token bucket.
    """
    axis = machine.axis(work.axis)
    return to_ps(axis.burst_bytes / axis.link_bytes_per_s)


def chain_period(members: int, packets: int, buffered: bool) -> int:
    """Return the time from the begin of one broadcast to that of the next, in times of one packet over one hop.

    The broadcasts (or reduces) of `packets` packets follow each other in a loop, their roots taking turns around
    `members` ranks. The result is `packets` for two members, `packets` + 1 for three members or where a send
    buffer takes the packets (`buffered`), else `packets` + 2.
    """
    return packets + min(1 if buffered else 2, max(members - 2, 0))


def grid_of(skeleton: Skeleton) -> dict[str, int]:
    """Return {mesh axis ("tp.row"): number of ranks along it} of the axes over which a skeleton has chains."""
    return {
        task.work.axis: task.work.num_ranks
        for _, task in skeleton.counted_tasks()
        if task.roots and isinstance(task.work, Transfer)
    }


def makespan_ps(skeleton: Skeleton, cost_ps: Callable[[Work], int], machine: Machine | None = None) -> int:
    """Return the picoseconds from the start of a skeleton to the end of its last rank, computed in C++.

    Args:
        cost_ps: returns the picoseconds of one op.
        machine: whose send buffer and bursts of links count for chains; None for neither.

    Raises:
        ProgramError: it takes longer than 64 bits of picoseconds, some 106 days.
    """
    try:
        return skeleton_ps(skeleton_code(skeleton, cost_ps, machine))
    except (ProgramFault, OverflowError):
        raise ProgramError("takes longer than 106 days; give a faster machine, or less to do") from None


def skeleton_code(
    skeleton: Skeleton, cost_ps: Callable[[Work], int], machine: Machine | None = None
) -> NDArray[np.int64]:
    """Return a skeleton and the picoseconds of its ops as the integers that the core's `skeleton_ps` takes.

    `cost_ps` and `machine` are those of `makespan_ps`; csrc/skeleton.cpp reads the integers.
    """
    return np.array(_CodeWriter(skeleton, cost_ps, machine).code(), dtype=np.int64)


class _CodeWriter:
    """A skeleton as the integers that the core reads."""

    def __init__(self, skeleton: Skeleton, cost_ps: Callable[[Work], int], machine: Machine | None) -> None:
        self.skeleton, self.cost_ps, self.machine = skeleton, cost_ps, machine
        grid = grid_of(skeleton)
        self.extents = list(grid.values())
        self.axes = {axis: number for number, axis in enumerate(grid)}
        self.lanes: dict[str, int] = {}
        self.parts: list[list[int]] = []
        self.numbers: dict[int, int] = {}

    def code(self) -> list[int]:
        """Return the number of axes, the size of each, the number of lanes, that of skeletons, and the skeletons.

        Those of parts come first. A skeleton is: number of task names, 1 + the longest wait in turns, number of
        its lanes, these, number of phases, the phases. A phase is: turns, number of tasks, the tasks. A task is
        what `_task` returns, number of waits, and for each (name, turns back); a part is what `_part` returns.
        """
        self._add(self.skeleton)
        out = [len(self.extents), *self.extents, len(self.lanes), len(self.parts)]
        for part in self.parts:
            out += part
        return out

    def _add(self, skeleton: Skeleton) -> int:
        """Return the number of a skeleton, which is written if it is new."""
        known = self.numbers.get(id(skeleton))
        if known is None:
            code = self._skeleton(skeleton)
            known = self.numbers[id(skeleton)] = len(self.parts)
            self.parts.append(code)
        return known

    def _skeleton(self, skeleton: Skeleton) -> list[int]:
        names: dict[str, int] = {}
        lanes: dict[int, None] = {}
        depth = 1
        phases = []
        for phase in skeleton.phases:
            items: list[int] = []
            seen: set[str] = set()
            for task in phase.tasks:
                seen.add(task.name)
                number = names.setdefault(task.name, len(names))
                if isinstance(task, Part):
                    items += self._part(task, number, names)
                    lanes.update(dict.fromkeys(map(self._lane, task.skeleton.lanes)))
                    continue
                lanes[self._lane(task.lane)] = None
                items += self._task(task, number)
                waits = task.after
                items.append(len(waits))
                for name, back in waits:
                    assert back or name in seen, f"{task.name} waits for what comes later in its turn"
                    items += (names.setdefault(name, len(names)), back)
                    depth = max(depth, back + 1)
            phases.append([phase.turns, len(phase.tasks), *items])
        out = [len(names), depth, len(lanes), *lanes, len(phases)]
        for one in phases:
            out += one
        return out

    def _lane(self, lane: str) -> int:
        return self.lanes.setdefault(lane, len(self.lanes))

    def _part(self, part: Part, number: int, names: dict[str, int]) -> list[int]:
        out = [_PART, number, self._add(part.skeleton), len(part.after)]
        for lane, waits in part.after:
            out += (self._lane(lane), len(waits))
            for name in waits:
                out += (names[name], 0)
        return out

    def _task(self, task: Task, number: int) -> list[int]:
        """Return the integers of a task, up to what it waits for."""
        work, cost_ps = task.work, self.cost_ps
        head = [number, self._lane(task.lane)]
        if not isinstance(work, Transfer):
            return [_LOCAL, *head, cost_ps(work), task.times]
        if task.roots:
            launch_ps, packet_ps = launch_and_packet_ps(work, cost_ps)
            kind = _REDUCE if work.kind == "reduce" else _BROADCAST
            sending = [0, 0]
            if self.machine is not None and is_buffered(work, self.machine):
                sending = [1, link_burst_ps(work, self.machine)]
            chain = [self.axes[work.axis], launch_ps, work.packets, *sending, len(task.roots), *task.roots]
            return [kind, *head, packet_ps, task.times, *chain]
        axis = self.axes.get(work.axis)
        if work.kind == "permute" and axis is not None:
            return [_EXCHANGE, *head, cost_ps(work), task.times, axis]
        if axis is None and "." in work.axis:  # along an axis whose ranks are alike
            return [_LOCAL, *head, cost_ps(work), task.times]
        return [_MEET, *head, cost_ps(work), task.times, _ALL if axis is None else axis]
