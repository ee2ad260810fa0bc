"""A reshard planned: which ranks send what to whom, in which order, and how long that takes.

The bound. Every receiving host takes in one copy of what it needs and does not hold, whatever the strategy;
every part leaves the hosts that hold it at least once. So no plan ends before the busiest NIC has taken in
its share, or sent its own where holders share the sending as evenly as can be (AlpaComm, MLSys '23, eq. 4,
with tasks that may be divided). What a plan takes beyond that is the filling of chains, the latency of
messages, and NICs that idle because the tasks that need them wait for other NICs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshweave.algorithms.reshard.fabric import Fabric
from meshweave.algorithms.reshard.multicast import Cost, Multicast, Strategy, multicasts
from meshweave.algorithms.reshard.order import ORDERS, Jobs, Schedule
from meshweave.algorithms.reshard.problem import ReshardProblem
from meshweave.algorithms.reshard.resources import jobs_of, nic_bound_s, ways
from meshweave.algorithms.reshard.strategies import STRATEGIES, known
from meshweave.algorithms.reshard.tasks import UnitTask, shared_out, unit_tasks
from meshweave.algorithms.reshard.writer import Tally
from meshweave.base.errors import LayoutError
from meshweave.base.units import PS_PER_S

SPLIT_ABOVE = 1.02
"""Tasks are divided among senders where that might save more than this factor says."""
LEAST_PART_BYTES = 1 << 18
"""A part that a task is divided into has no fewer bytes."""
MESSAGE_BYTES = 64 << 20
"""The largest message, where the caller says nothing."""
MAX_MESSAGES = 2_000_000
"""A program of more takes minutes to write, and gigabytes."""
MOST_ROUNDS = 4
MOST_DIVIDED = 512
"""How often the larger tasks are halved, and into how many parts in all."""


@dataclass(frozen=True)
class Turn:
    """A multicast in the schedule: `cast` with its sender chosen, if one is, and each host's gateway first."""

    cast: Multicast
    chunks: int
    cost: Cost
    start_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.cost.held_s + self.cost.fill_s


@dataclass(frozen=True)
class ReshardPlan:
    """`turns` stand in the order in which they are written. Times are those of the model, in seconds.

    `serial`: each turn between hosts waits for the one before, whoever takes part in them.
    """

    problem: ReshardProblem
    fabric: Fabric
    strategy: Strategy
    order: str
    tasks: tuple[UnitTask, ...]
    turns: tuple[Turn, ...]
    serial: bool = False

    @cached_property
    def predicted_s(self) -> float:
        """When the last rank has everything."""
        return max((turn.end_s for turn in self.turns), default=0.0)

    @cached_property
    def bound_s(self) -> float:
        """See the module; no program can be faster, as long as NICs are what there is to wait for."""
        return nic_bound_s(self.tasks, self.fabric)

    @cached_property
    def _tally(self) -> Tally:
        tally = Tally(self.fabric)
        for turn in self.turns:
            self.strategy.write(tally, turn.cast, turn.chunks)
        return tally

    @property
    def bytes_across_hosts(self) -> int:
        """What leaves a host for another one, over all messages of the plan."""
        return self._tally.bytes_across_hosts

    @property
    def num_messages(self) -> int:
        """Of one rank to another; those that pass on turns are not counted."""
        return self._tally.num_messages

    def scratch_bytes(self, rank: int) -> int:
        """What a rank needs beside the tensors, at most: room to pack what is not contiguous in memory."""
        return self._tally.scratch_bytes(rank)

    @property
    def least_bytes_across_hosts(self) -> int:
        """One copy of each part to each host that needs it and does not hold it."""
        host_of = self.fabric.host_of
        total = 0
        for task in self.tasks:
            there = {host_of[rank] for rank in task.holders}
            total += task.num_bytes * len({host_of[rank] for rank in task.needers} - there)
        return total

    def local_bytes(self, rank: int) -> int:
        """What a rank holds of the problem's tensors, before and after together: its part of the peak memory."""
        return sum(
            math.prod(layout.local_shape(item.shape, rank)) * item.element_bytes
            for item in self.problem.items
            for layout in (item.src, item.dst)
            if rank in layout.mesh
        )


def plan_reshard(
    problem: ReshardProblem,
    fabric: Fabric,
    *,
    strategy: str = "broadcast",
    order: str = "best",
    message_bytes: int = MESSAGE_BYTES,
) -> ReshardPlan:
    """Chooses senders, gateways, chunks and the order. The same arguments give the same plan everywhere, except
    for the order "exact", which has a time limit.

    Args:
        strategy: one of `strategies.STRATEGIES`.
        order: one of `order.ORDERS`; "naive" lets the first holder send, and one task run after another.
        message_bytes: no message is larger, except that it has one element at least. What ranks need beside the
            tensors themselves is a few messages: see `ReshardPlan.scratch_bytes`.

    Raises:
        LayoutError: the fabric does not know a rank.
        UnsupportedError: there is no such strategy or order, or the order needs a library that is not there.
    """
    how = STRATEGIES[known(strategy, STRATEGIES, "strategy")]
    known(order, ORDERS, "order")
    if len(fabric.host_of) <= problem.ranks[-1]:
        raise LayoutError(
            f"the fabric has {len(fabric.host_of)} ranks, and rank {problem.ranks[-1]} takes part"
        )
    tasks = unit_tasks(problem)
    casts = _senders_last([cast for task in tasks for cast in multicasts(task, fabric, how)], fabric)
    casts, schedule = _ordered(casts, tasks, fabric, how, order, message_bytes)
    turns = []
    choices = [ways(number, cast, fabric, how) for number, cast in enumerate(casts)]
    for number in sorted(range(len(casts)), key=lambda n: (schedule.starts[n], n)):
        cast = choices[number][schedule.ways[number]].cast
        chunks = _num_chunks(cast, fabric, how, message_bytes)
        turns.append(Turn(cast, chunks, how.cost(cast, fabric, chunks), schedule.starts[number] / PS_PER_S))
    return ReshardPlan(problem, fabric, how, order, tasks, tuple(turns), schedule.serial)


def _senders_last(casts: Sequence[Multicast], fabric: Fabric) -> list[Multicast]:
    """Hosts that send something of their own come last in each chain, where they have nothing to pass on."""
    sending = {fabric.host_of[rank] for cast in casts if not cast.is_local for rank in cast.senders}
    return [
        replace(cast, hosts=tuple(sorted(cast.hosts, key=lambda host: fabric.host_of[host[0]] in sending)))
        for cast in casts
    ]


def _ordered(
    casts: list[Multicast],
    tasks: Sequence[UnitTask],
    fabric: Fabric,
    how: Strategy,
    order: str,
    message_bytes: int,
) -> tuple[list[Multicast], Schedule]:
    """Multicasts and their schedule; the largest ones divided while that helps."""
    search = ORDERS["best" if order == "exact" else order]
    aim = nic_bound_s(tasks, fabric) * PS_PER_S
    schedule, divided = search(_jobs(casts, fabric, how, message_bytes)), casts
    rounds = MOST_ROUNDS if not schedule.serial and all(map(how.picks_sender, casts)) else 0
    for _ in range(rounds):
        count = len(divided)
        divided = _divided(divided, fabric, how)
        if schedule.makespan <= SPLIT_ABOVE * aim or not count < len(divided) <= MOST_DIVIDED:
            break
        found = search(_jobs(divided, fabric, how, message_bytes))
        if found.makespan < schedule.makespan:
            casts, schedule = divided, found
    if order == "exact":  # once, for it may take its time
        schedule = ORDERS[order](_jobs(casts, fabric, how, message_bytes))
    return casts, schedule


def _num_chunks(cast: Multicast, fabric: Fabric, how: Strategy, message_bytes: int) -> int:
    return max(how.num_chunks(cast, fabric), -(-cast.num_bytes // message_bytes))


def _divided(casts: Sequence[Multicast], fabric: Fabric, how: Strategy) -> list[Multicast]:
    """The multicasts that have a choice of NICs and are among the larger ones, in two parts each."""
    open_ones = [len(ways(n, cast, fabric, how)) > 1 for n, cast in enumerate(casts)]
    largest = max(
        (cast.num_bytes for cast, is_open in zip(casts, open_ones, strict=True) if is_open), default=0
    )
    out = []
    for cast, is_open in zip(casts, open_ones, strict=True):
        if is_open and 2 * cast.num_bytes > largest and cast.num_bytes >= 2 * LEAST_PART_BYTES:
            out += [replace(cast, pieces=lot) for lot in shared_out(cast.pieces, 2) if lot]
        else:
            out.append(cast)
    return out


def _jobs(casts: Sequence[Multicast], fabric: Fabric, how: Strategy, message_bytes: int) -> Jobs:
    held_s = [how.cost(cast, fabric, _num_chunks(cast, fabric, how, message_bytes)).held_s for cast in casts]
    return jobs_of(casts, held_s, fabric, how)
