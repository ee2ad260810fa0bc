"""The closed-form reading: time of a skeleton as a max-plus recurrence, jumped over once it is periodic.

A software pipeline costs prologue + (n - 1) steady + epilogue (MeshSlice, section 3.2.2). Instead of writing that
down per algorithm, the core follows the recurrence of its tasks (`estimate.chains`) for a few turns. Max-plus
recurrences are linear: once the ends that a turn depends on shift by one amount each, and each task waits for the
same input in all turns to come, these are skipped in one step. All in integers, so the result is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshweave.base.units import to_s
from meshweave.cost.calls import with_counts
from meshweave.cost.machine import Machine
from meshweave.cost.price import Price, price
from meshweave.estimate.chains import is_buffered, launch_and_packet_ps, makespan_ps
from meshweave.ir.skeleton import Skeleton
from meshweave.ir.work import Compute, Transfer, Work

CostPs = Callable[[Work], int]
"""Picoseconds of one op."""


@dataclass(frozen=True)
class Estimate:
    """The seconds of a program, in all and by what the ops of one rank spend them on.

    The parts are sums over the ops of the first rank, or those of a skeleton, whether they overlap or not.

    Attributes:
        total_s: until the last rank ends.
        compute_s: products, and calls with FLOPs.
        copy_s: copies, additions and zeros, calls without FLOPs, and packing of messages.
        launch_s, sync_s, transfer_s: of communication, the launches, synchronisations and flow of bytes.
    """

    total_s: float
    compute_s: float
    copy_s: float
    launch_s: float
    sync_s: float
    transfer_s: float

    @property
    def communication_s(self) -> float:
        """Return the seconds of launches, synchronisations and transfers together."""
        return self.launch_s + self.sync_s + self.transfer_s

    @property
    def exposed_s(self) -> float:
        """Return `total_s` less `compute_s`: the seconds without products and calls, if these do not overlap."""
        return self.total_s - self.compute_s


class TimedSkeleton:
    """A skeleton (`ir.skeleton`: tasks of a program on one rank) whose ops take `cost_ps(work)` picoseconds.

    Args:
        machine: whose send buffer and bursts of links count for chains of packets; None for neither.
    """

    __slots__ = ("_cost_ps", "_machine", "_skeleton")

    def __init__(self, skeleton: Skeleton, cost_ps: CostPs, machine: Machine | None = None) -> None:
        self._skeleton, self._cost_ps, self._machine = skeleton, cost_ps, machine

    def lower_bound_ps(self) -> int:
        """Return a quick lower bound on `total_ps`, in picoseconds: the largest sum of durations in one lane.

        A chain (a broadcast or reduce in packets) counts with its launch and its packets over one hop; with its
        launch alone where a send buffer takes the packets.
        """
        lanes: dict[str, int] = {}
        for count, task in self._skeleton.counted_tasks():
            if task.roots and isinstance(task.work, Transfer):
                launch_ps, packet_ps = launch_and_packet_ps(task.work, self._cost_ps)
                kept = 0 if is_buffered(task.work, self._machine) else task.work.packets
                duration = launch_ps + packet_ps * kept
            else:
                duration = self._cost_ps(task.work)
            lanes[task.lane] = lanes.get(task.lane, 0) + count * duration
        return max(lanes.values(), default=0)

    def total_ps(self) -> int:
        """Return the picoseconds until the last rank ends, exact. Raises ProgramError if over 106 days."""
        return makespan_ps(self._skeleton, self._cost_ps, self._machine)


def skeleton_ps(skeleton: Skeleton, cost_ps: CostPs, machine: Machine | None = None) -> int:
    """Return the picoseconds, exact, until the last rank ends, if each op takes `cost_ps(work)` picoseconds.

    Args:
        machine: whose send buffer and bursts of links count for chains of packets; None for neither.

    Raises:
        ProgramError: it takes longer than 106 days.
    """
    return TimedSkeleton(skeleton, cost_ps, machine).total_ps()


def estimate_skeleton(skeleton: Skeleton, machine: Machine) -> Estimate:
    """Return the time of a skeleton on a machine without contention, in parts.

    Raises:
        UnsupportedError: the machine has no meshes, no FLOPs are known for a call, or a product is outside of a
            table of measured ones.
        LayoutError: a mesh does not fit the network, or no mesh has the axis of an op.
        ProgramError: it takes longer than 106 days.
    """
    prices: dict[Work, Price] = {}
    totals: dict[Work, int] = {}

    def cost_ps(work: Work) -> int:
        known = totals.get(work)
        if known is None:
            cost = prices[work] = price(work, machine)
            known = totals[work] = cost.total_ps
        return known

    total = skeleton_ps(skeleton, cost_ps, machine)
    compute = copy = launch = sync = transfer = 0
    counts: dict[Work, int] = {}
    for count, task in skeleton.counted_tasks():
        counts[task.work] = counts.get(task.work, 0) + count
    for work, count in counts.items():
        total_ps = count * cost_ps(work)
        if not isinstance(work, Compute):
            cost = prices[work]
            launch += count * cost.launch_ps
            sync += count * cost.sync_ps
            transfer += count * cost.flow_ps
        elif with_counts(work).flops:
            compute += total_ps
        else:
            copy += total_ps
    return Estimate(to_s(total), to_s(compute), to_s(copy), to_s(launch), to_s(sync), to_s(transfer))
