"""A reshard planned: which ranks send what to whom, in which order, and how long that takes.

The bound. Every receiving host takes in one copy of what it needs and does not hold, whatever the strategy;
every part leaves the hosts that hold it at least once. So no plan ends before the busiest NIC has taken in
its share, or sent its own where holders share the sending as evenly as can be (AlpaComm, MLSys '23, eq. 4,
with tasks that may be divided). What a plan takes beyond that is the filling of chains, the latency of
messages, and NICs that idle because the tasks that need them wait for other NICs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshweave.algorithms.reshard.fabric import Fabric, Nic
from meshweave.algorithms.reshard.multicast import Cost, Multicast, Strategy, multicasts
from meshweave.algorithms.reshard.order import ORDERS, Job, Jobs, Schedule
from meshweave.algorithms.reshard.order.bounds import loads
from meshweave.algorithms.reshard.problem import ReshardProblem
from meshweave.algorithms.reshard.strategies import STRATEGIES, known
from meshweave.algorithms.reshard.tasks import UnitTask, shared_out, unit_tasks
from meshweave.algorithms.reshard.writer import Tally
from meshweave.errors import LayoutError
from meshweave.units import PS_PER_S

MOST_WAYS = 16
"""Choices of sender and gateways per task; of more, this many evenly spread ones are looked at."""
SPLIT_ABOVE = 1.02
"""Tasks are divided among senders where that might save more than this factor says."""
LEAST_PART_BYTES = 1 << 18
MESSAGE_BYTES = 64 << 20
MOST_ROUNDS = 4


@dataclass(frozen=True)
class Turn:
    """A multicast in the schedule: `cast` with its sender chosen, if it has one, and each host's gateway
    first."""

    cast: Multicast
    chunks: int
    cost: Cost
    start_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.cost.held_s + self.cost.fill_s


@dataclass(frozen=True)
class ReshardPlan:
    """`turns` stand in the order in which they are written. Times are those of the model, see `simulate` for
    more.

    `serial`: each turn waits for the one before, whoever takes part in them.
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
        return self._tally.bytes_across_hosts

    @property
    def num_messages(self) -> int:
        """Of one rank to another; those inside all-gathers and those that pass on turns are not counted."""
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
        """What a rank holds of the problem's tensors, before and after together: its part of the peak
        memory."""
        total = 0
        for item in self.problem.items:
            for layout in (item.src, item.dst):
                if rank in layout.mesh:
                    elements = 1
                    for size in layout.local_shape(item.shape, rank):
                        elements *= size
                    total += elements * item.element_bytes
        return total


def plan_reshard(
    problem: ReshardProblem,
    fabric: Fabric,
    *,
    strategy: str = "broadcast",
    order: str = "best",
    message_bytes: int = MESSAGE_BYTES,
) -> ReshardPlan:
    """Chooses senders, gateways, chunks and the order. The same arguments give the same plan everywhere.

    Args:
        strategy: one of `strategies.STRATEGIES`.
        order: one of `order.ORDERS`; "naive" lets the first holder send, and one task run after another.
        message_bytes: no message is larger, except that it has one element at least. What ranks need beside the
            tensors themselves is a few messages: see `ReshardPlan.scratch_bytes`.

    Raises:
        LayoutError: the fabric does not know a rank.
        UnsupportedError: there is no such strategy or order, or the order needs a library that is not
        installed.
    """
    how = STRATEGIES[known(strategy, STRATEGIES, "strategy")]
    known(order, ORDERS, "order")
    if len(fabric.host_of) <= problem.ranks[-1]:
        raise LayoutError(
            f"the fabric has {len(fabric.host_of)} ranks, and rank {problem.ranks[-1]} takes part"
        )
    tasks = unit_tasks(problem)
    casts = [cast for task in tasks for cast in multicasts(task, fabric, how)]
    casts, schedule = _ordered(casts, tasks, fabric, how, order)
    turns = []
    choices = [_ways(number, cast, fabric, how) for number, cast in enumerate(casts)]
    for number in sorted(range(len(casts)), key=lambda n: (schedule.starts[n], n)):
        cast = choices[number][schedule.ways[number]][0]
        chunks = max(how.num_chunks(cast, fabric), -(-cast.num_bytes // message_bytes))
        turns.append(Turn(cast, chunks, how.cost(cast, fabric, chunks), schedule.starts[number] / PS_PER_S))
    return ReshardPlan(problem, fabric, how, order, tasks, tuple(turns), serial=order == "naive")


def _ordered(
    casts: list[Multicast], tasks: Sequence[UnitTask], fabric: Fabric, how: Strategy, order: str
) -> tuple[list[Multicast], Schedule]:
    """Multicasts and their schedule; the largest ones divided while that helps."""
    schedule = ORDERS[order](_jobs(casts, fabric, how))
    if order == "naive" or not all(map(how.picks_sender, casts)):
        return casts, schedule
    aim = nic_bound_s(tasks, fabric) * PS_PER_S
    for _ in range(MOST_ROUNDS):
        if schedule.makespan <= SPLIT_ABOVE * aim:
            break
        divided = _divided(casts, fabric, how)
        if len(divided) == len(casts):
            break
        found = ORDERS[order](_jobs(divided, fabric, how))
        if found.makespan >= schedule.makespan:
            break
        casts, schedule = divided, found
    return casts, schedule


def _divided(casts: Sequence[Multicast], fabric: Fabric, how: Strategy) -> list[Multicast]:
    """The multicasts that have a choice of NICs and are among the larger ones, in two parts each."""
    open_ones = [len(_ways(n, cast, fabric, how)) > 1 for n, cast in enumerate(casts)]
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


# --- jobs
# ---------------------------------------------------------------------------------------------------------


def _jobs(casts: Sequence[Multicast], fabric: Fabric, how: Strategy) -> Jobs:
    """Multicasts as the order sees them. All that send are one class of resources, what a host takes in
    another."""
    numbers: dict[tuple[str, Nic], int] = {}
    class_of: list[int] = []
    classes: dict[object, int] = {}

    shared = all(how.picks_sender(cast) for cast in casts)

    def resource(direction: str, nic: Nic) -> int:
        key = direction, nic
        if key not in numbers:
            numbers[key] = len(numbers)
            kind = ("in", nic[0]) if direction == "in" else ("out", None if shared else nic)
            class_of.append(classes.setdefault(kind, len(classes)))
        return numbers[key]

    jobs = []
    for number, cast in enumerate(casts):
        chunks = how.num_chunks(cast, fabric)
        duration = max(round(how.cost(cast, fabric, chunks).held_s * PS_PER_S), 1)
        ways = []
        for chosen, senders, gateways in _ways(number, cast, fabric, how):
            held = [resource("out", nic) for nic in senders] + [resource("in", nic) for nic in gateways]
            ways.append(() if chosen.is_local else tuple(sorted(held)))
        jobs.append(Job(duration, tuple(ways)))
    return Jobs(tuple(jobs), tuple(class_of))


def _ways(
    number: int, cast: Multicast, fabric: Fabric, how: Strategy
) -> list[tuple[Multicast, tuple[Nic, ...], tuple[Nic, ...]]]:
    """The multicast with each choice of sender and gateways, and the NICs that it takes: one rank for each NIC.

    Ranks behind one NIC are as good as one another: the first sends, so that one rank's messages follow each
    other without turns.
    """
    behind: dict[Nic, int] = {}
    for rank in cast.senders:
        behind.setdefault(fabric.nic(rank), rank)
    if cast.is_local:
        sender = cast.senders[number % len(cast.senders)]
        return [(replace(cast, senders=(sender,)) if how.picks_sender(cast) else cast, (), ())]
    gateways: list[dict[Nic, int]] = []
    for host in cast.hosts:
        found: dict[Nic, int] = {}
        for rank in host:
            found.setdefault(fabric.nic(rank), rank)
        gateways.append(found)
    entries = [
        [list(found.items())[shift % len(found)] for found in gateways]
        for shift in range(max(map(len, gateways)))
    ]
    senders: list[tuple[tuple[Nic, ...], tuple[int, ...]]] = [
        ((nic,), (rank,)) for nic, rank in behind.items()
    ]
    if not how.picks_sender(cast):
        senders = [(tuple(behind), tuple(behind.values()))]
    combined = [(sender, entry) for sender in senders for entry in entries]
    if len(combined) > MOST_WAYS:
        combined = [
            combined[(number + step * len(combined) // MOST_WAYS) % len(combined)]
            for step in range(MOST_WAYS)
        ]
    return [
        (
            replace(
                cast, senders=ranks, hosts=tuple(map(_gateway_first, cast.hosts, (rank for _, rank in entry)))
            ),
            nics,
            tuple(nic for nic, _ in entry),
        )
        for (nics, ranks), entry in combined
    ]


def _gateway_first(host: tuple[int, ...], gateway: int) -> tuple[int, ...]:
    at = host.index(gateway)
    return (*host[at:], *host[:at])


def nic_bound_s(tasks: Sequence[UnitTask], fabric: Fabric) -> float:
    """Seconds that the busiest NIC needs for its bytes, if all shared them as evenly as can be."""
    numbers: dict[tuple[str, Nic], int] = {}
    class_of: list[int] = []
    classes: dict[object, int] = {}
    jobs: list[Job] = []

    def demand(num_bytes: int, direction: str, nics: Sequence[Nic]) -> None:
        ways = []
        for nic in dict.fromkeys(nics):
            if (direction, nic) not in numbers:
                numbers[direction, nic] = len(numbers)
                kind = (direction, nic[0] if direction == "in" else None)
                class_of.append(classes.setdefault(kind, len(classes)))
            ways.append((numbers[direction, nic],))
        jobs.append(Job(max(num_bytes, 1), tuple(ways)))

    for task in tasks:
        holding = {fabric.host_of[rank] for rank in task.holders}
        remote: dict[int, list[Nic]] = {}
        for rank in task.needers:
            if fabric.host_of[rank] not in holding:
                remote.setdefault(fabric.host_of[rank], []).append(fabric.nic(rank))
        if remote:
            demand(task.num_bytes, "out", [fabric.nic(rank) for rank in task.holders])
        for nics in remote.values():
            demand(task.num_bytes, "in", nics)
    busiest = max((load.least for load in loads(Jobs(tuple(jobs), tuple(class_of)))), default=0)
    return busiest / fabric.nic_bytes_per_s
