"""A reshard plan: which ranks send which pieces to which ranks, in which order, and the predicted time.

The bound. Whatever the strategy, every receiving host takes in one copy of what it needs and does not have, and
every piece leaves the hosts that have it at least once. So no plan ends before the busiest NIC has taken in its
share, or has sent its own where the sources share the sending as evenly as possible (AlpaComm, MLSys '23, eq. 4,
with tasks that may be divided). What a plan takes beyond the bound is the filling of chains, the latency of
messages, and NICs that idle because their tasks wait for other NICs, or for lanes of their ranks: in a lane a rank
sends or receives one message after another. So a multicast begins when the lanes of what its sender sends are
free, and what is passed on waits where it is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshweave.algorithms.reshard.multicast import Multicast, MulticastCost, Strategy, multicasts_of
from meshweave.algorithms.reshard.order import ORDERS, JobSchedule, JobSet
from meshweave.algorithms.reshard.problem import ReshardProblem
from meshweave.algorithms.reshard.resources import MulticastRoute, jobs_of, nic_bound_s, routes_of
from meshweave.algorithms.reshard.strategies import STRATEGIES
from meshweave.algorithms.reshard.tasks import TensorPiece, UnitTask, equal_shares, unit_tasks
from meshweave.algorithms.reshard.writer import TrafficCounter
from meshweave.base.errors import LayoutError, UnsupportedError, require_known
from meshweave.base.units import PS_PER_S
from meshweave.cost.fabric import HostTopology, Nic

SPLIT_ABOVE = 1.02
"""Multicasts are divided among senders while the schedule takes more than this times the bound."""
MIN_PART_BYTES = 1 << 18
"""The fewest bytes of a part that a multicast is divided into."""
MESSAGE_BYTES = 64 << 20
"""The largest message by default."""
MAX_MESSAGES = 2_000_000
"""A program of more takes minutes to write, and gigabytes."""
MAX_ROUNDS = 4
"""How often the larger multicasts are halved."""
MAX_DIVIDED = 512
"""The most multicasts after they are divided."""

MAX_SENDER_LANES = 4
"""The most lanes beside each other for ranks that send to each other: over gloo each lane is a thread."""

LEAST_BYTES_APART = 1 << 16
"""The size of the largest multicast from which on that is worth more lanes: a thread is woken for each message."""


@dataclass(frozen=True)
class ScheduledMulticast:
    """A multicast with its sender, gateways, start and cost.

    Attributes:
        multicast: the multicast; if the strategy uses one sender, `senders` is that rank alone, and each host's
            gateway comes first in the host.
        chunks: number of messages in which its bytes cross each link.
        cost: the seconds that it takes.
        start_s: predicted seconds from the start of the reshard to its start.
    """

    multicast: Multicast
    chunks: int
    cost: MulticastCost
    start_s: float

    @property
    def end_s(self) -> float:
        """Return the seconds from the start of the reshard until all receivers have this multicast's pieces."""
        return self.start_s + self.cost.occupied_s + self.cost.fill_s


@dataclass(frozen=True)
class ReshardPlan:
    """The multicasts of a reshard in the order of the program. All times are predictions, in seconds.

    Attributes:
        network: the hosts and NICs that the plan is for.
        order: name of the search that chose the order, one of `order.ORDERS`.
        tasks: the data that has to move.
        serial: whether each multicast between hosts waits for the one before, whichever ranks take part.
    """

    problem: ReshardProblem
    network: HostTopology
    strategy: Strategy
    order: str
    tasks: tuple[UnitTask, ...]
    multicasts: tuple[ScheduledMulticast, ...]
    serial: bool = False

    @cached_property
    def predicted_s(self) -> float:
        """Return the predicted seconds of the whole reshard, until all ranks have everything."""
        return max((scheduled.end_s for scheduled in self.multicasts), default=0.0)

    @cached_property
    def bound_s(self) -> float:
        """Return a lower bound of the seconds of any plan: what the busiest NIC has to send or receive."""
        return nic_bound_s(self.tasks, self.network)

    @cached_property
    def sender_lanes(self) -> dict[int, str]:
        """Return by global rank what is appended to the names of the lanes in which it sends; "" for most.

        A rank that receives from another in one lane and sends in it would do one after the other. So of ranks
        that both send, and of which one sends to the other, each has lanes of its own, up to `MAX_SENDER_LANES`,
        unless all multicasts are below `LEAST_BYTES_APART`.
        """
        return _sender_lanes([scheduled.multicast for scheduled in self.multicasts])

    @cached_property
    def _traffic(self) -> TrafficCounter:
        traffic = TrafficCounter(self.network, self.sender_lanes)
        for scheduled in self.multicasts:
            self.strategy.write(traffic, scheduled.multicast, scheduled.chunks)
        return traffic

    @property
    def bytes_across_hosts(self) -> int:
        """Return the bytes of all messages from one host to another; a piece sent twice counts twice."""
        return self._traffic.bytes_across_hosts

    @property
    def num_messages(self) -> int:
        """Return the number of messages from rank to rank, inside hosts too, without completion signals."""
        return self._traffic.num_messages

    def scratch_bytes(self, rank: int) -> int:
        """Return an upper bound of the bytes that a global rank needs besides the tensors, to pack messages."""
        return self._traffic.scratch_bytes(rank)

    @property
    def least_bytes_across_hosts(self) -> int:
        """Return the bytes of one copy of each piece for every host that needs it and has no source of it."""
        host_of = self.network.host_of
        total = 0
        for task in self.tasks:
            source_hosts = {host_of[rank] for rank in task.sources}
            total += task.num_bytes * len({host_of[rank] for rank in task.destinations} - source_hosts)
        return total

    def local_bytes(self, rank: int) -> int:
        """Return the bytes of a global rank's shards of all tensors, source and destination shards together."""
        return sum(
            math.prod(layout.local_shape(move.shape, rank)) * move.element_bytes
            for move in self.problem.moves
            for layout in (move.src, move.dst)
            if rank in layout.mesh
        )


def plan_reshard(
    problem: ReshardProblem,
    network: HostTopology,
    *,
    strategy: str = "broadcast",
    order: str = "best",
    message_bytes: int = MESSAGE_BYTES,
) -> ReshardPlan:
    """Return a plan to move tensors to other layouts: who sends what to whom, in how many messages, and when.

    The same arguments give the same plan in every process, except for the order "exact", which has a time
    limit.

    Args:
        network: the hosts and NICs of all ranks.
        strategy: how one multicast is done, one of `strategies.STRATEGIES`.
        order: how multicasts are ordered, one of `order.ORDERS`. With "naive" the first source sends, and one
            multicast runs after another. "exact" orders the multicasts of "best" anew.
        message_bytes: the most bytes of a message, except that a message has at least one element. Besides
            the tensors ranks need room for a few messages: see `ReshardPlan.scratch_bytes`.

    Raises:
        LayoutError: the network does not know a rank, or messages have no bytes.
        UnsupportedError: there is no such strategy or order, or the order needs a library that is not
            installed.
    """
    if message_bytes < 1:
        raise LayoutError(f"messages have {message_bytes} bytes; give at least 1")
    require_known(strategy, STRATEGIES, "there is no strategy", UnsupportedError, "known:")
    require_known(order, ORDERS, "there is no order", UnsupportedError, "known:")
    planner = _Planner(network, STRATEGIES[strategy], order, message_bytes)
    if len(network.host_of) <= problem.ranks[-1]:
        raise LayoutError(
            f"the host network has {len(network.host_of)} ranks, and rank {problem.ranks[-1]} takes part"
        )
    tasks = unit_tasks(problem)
    multicasts, serial = planner.schedule(tasks)
    return ReshardPlan(problem, network, planner.strategy, order, tasks, multicasts, serial)


def _sender_lanes(multicasts: Sequence[Multicast]) -> dict[int, str]:
    """Return `ReshardPlan.sender_lanes` of multicasts."""
    if all(multicast.num_bytes < LEAST_BYTES_APART for multicast in multicasts):
        return {}
    senders = {rank for multicast in multicasts for rank in multicast.senders}
    peers: dict[int, set[int]] = defaultdict(set)
    for multicast in multicasts:
        both = senders.intersection(multicast.receivers)
        for sender in multicast.senders if both else ():
            peers[sender] |= both
            for receiver in both:
                peers[receiver].add(sender)
    numbers: dict[int, int] = {}
    for rank in sorted(peers):
        used = {numbers[peer] for peer in peers[rank] if peer in numbers}
        free = (number for number in range(MAX_SENDER_LANES) if number not in used)
        numbers[rank] = next(free, rank % MAX_SENDER_LANES)
    return {rank: f"_{number}" for rank, number in numbers.items() if number}


class _LaneUses(TrafficCounter):
    """Counts what the ranks of a multicast do in each of their lanes.

    Attributes:
        hops: for each (rank, lane) how many hops from the source its messages are, the fewest and the most.
        busy_s: for each (rank, lane) the seconds of its messages, one after another.
        most: hops that any message is from the source.
    """

    def __init__(self, network: HostTopology, sender_lanes: Mapping[int, str]) -> None:
        super().__init__(network, sender_lanes)
        self.network, self.most = network, 0
        self.hops: dict[tuple[int, str], tuple[int, int]] = {}
        self.busy_s = defaultdict[tuple[int, str], float](float)
        self._hops_to: dict[int, int] = {}
        self._seconds: dict[tuple[int, bool], float] = {}

    def message(
        self, piece: TensorPiece, src: int, dst: int, lane: str, *, from_source: bool, signals: bool = True
    ) -> None:
        """Count a message in its lane on both its ranks, once for each chunk that it stands for."""
        lane, hops = lane + self._sender_lanes.get(src, ""), 0 if from_source else self._hops_to[src]
        self._hops_to[dst] = hops + 1
        if hops > self.most:
            self.most = hops
        is_local = self._host_of[src] == self._host_of[dst]
        seconds = self._seconds.get((piece.num_bytes, is_local))
        if seconds is None:
            times = self.network.transfer_times(piece.num_bytes, is_local)
            seconds = times.inter_host_s + times.inter_host_latency_s
            self._seconds[piece.num_bytes, is_local] = seconds
        for key in ((src, lane), (dst, lane)):
            least, most = self.hops.get(key, (hops, hops))
            self.hops[key] = (least if least < hops else hops), (most if most > hops else hops)
            self.busy_s[key] += self._times * seconds


@dataclass(frozen=True)
class _Planner:
    """The arguments of `plan_reshard` that every step of planning needs."""

    network: HostTopology
    strategy: Strategy
    order: str
    message_bytes: int

    def schedule(self, tasks: Sequence[UnitTask]) -> tuple[tuple[ScheduledMulticast, ...], bool]:
        """Return the multicasts of all tasks in the order of their starts, and whether they run one by one."""
        multicasts = [each for task in tasks for each in multicasts_of(task, self.network, self.strategy)]
        multicasts, schedule = self.order_multicasts(self.put_senders_last(multicasts), tasks)
        routes = [
            routes_of(number, each, self.network, self.strategy)[route]
            for number, (each, route) in enumerate(zip(multicasts, schedule.routes, strict=True))
        ]
        chosen = [route.multicast for route in routes]
        turns, free_s, lanes = _local_turns(chosen), defaultdict[object, float](float), _sender_lanes(chosen)
        out: list[ScheduledMulticast] = []
        for number in sorted(range(len(chosen)), key=lambda n: (schedule.starts[n], turns[n], n)):
            multicast, chunks = chosen[number], self.num_chunks(chosen[number])
            cost, uses = self.strategy.cost(multicast, self.network, chunks), _LaneUses(self.network, lanes)
            self.strategy.write(uses, multicast, chunks)
            ports: list[object] = [*_local_ports(multicast), *_nic_ports(routes[number])]
            ports += ["all"] if schedule.serial and not multicast.is_local else []
            ports += [lane for lane, (least, _) in uses.hops.items() if not least]
            start_s = max(schedule.starts[number] / PS_PER_S, *(free_s[port] for port in ports))
            end_s, hop_s = start_s + cost.occupied_s, cost.fill_s / max(uses.most, 1)
            free_s.update(dict.fromkeys(ports, end_s))
            for lane, (least, most) in uses.hops.items():  # what is passed on waits at the rank that has it
                waits_s = free_s[lane] + uses.busy_s[lane] if least else 0.0
                free_s[lane] = max(end_s + most * hop_s, waits_s)
            last_s = max((free_s[lane] for lane in uses.hops), default=end_s)
            cost = replace(cost, fill_s=max(cost.fill_s, last_s - end_s))
            out.append(ScheduledMulticast(multicast, chunks, cost, start_s))
        return tuple(out), schedule.serial

    def put_senders_last(self, multicasts: Sequence[Multicast]) -> list[Multicast]:
        """Return the multicasts, in each the hosts that send others last: the last host passes nothing on."""
        host_of = self.network.host_of
        sending = {host_of[rank] for each in multicasts if not each.is_local for rank in each.senders}

        def sends(host: tuple[int, ...]) -> bool:
            return host_of[host[0]] in sending

        return [replace(each, hosts=tuple(sorted(each.hosts, key=sends))) for each in multicasts]

    def order_multicasts(
        self, multicasts: list[Multicast], tasks: Sequence[UnitTask]
    ) -> tuple[list[Multicast], JobSchedule]:
        """Return the multicasts and their schedule, after halving the largest ones as long as that helps."""
        search: Callable[[JobSet], JobSchedule] = ORDERS["best" if self.order == "exact" else self.order]
        bound_ps = nic_bound_s(tasks, self.network) * PS_PER_S
        schedule, divided = search(self.jobs(multicasts)), multicasts
        may_divide = not schedule.serial and all(map(self.strategy.uses_one_sender, multicasts))
        for _ in range(MAX_ROUNDS if may_divide else 0):
            count = len(divided)
            divided = self.halve_large(divided)
            if schedule.makespan <= SPLIT_ABOVE * bound_ps or not count < len(divided) <= MAX_DIVIDED:
                break
            shorter = search(self.jobs(divided))
            if shorter.makespan < schedule.makespan:
                multicasts, schedule = divided, shorter
        if self.order == "exact":  # once, for it may take its time
            schedule = ORDERS["exact"](self.jobs(multicasts))
        return multicasts, schedule

    def num_chunks(self, multicast: Multicast) -> int:
        """Return the number of messages in which a multicast crosses each link."""
        least = -(-multicast.num_bytes // self.message_bytes)
        return max(self.strategy.num_chunks(multicast, self.network), least)

    def halve_large(self, multicasts: Sequence[Multicast]) -> list[Multicast]:
        """Return the multicasts with the larger ones halved, of those that have several routes.

        Larger ones have over half the bytes of the largest, and a half has `MIN_PART_BYTES` or more.
        """
        has_choice = [
            len(routes_of(number, each, self.network, self.strategy)) > 1
            for number, each in enumerate(multicasts)
        ]
        largest = max(
            (each.num_bytes for each, chooses in zip(multicasts, has_choice, strict=True) if chooses),
            default=0,
        )
        out = []
        for each, chooses in zip(multicasts, has_choice, strict=True):
            if chooses and 2 * each.num_bytes > largest and each.num_bytes >= 2 * MIN_PART_BYTES:
                out += [replace(each, pieces=share) for share in equal_shares(each.pieces, 2) if share]
            else:
                out.append(each)
        return out

    def jobs(self, multicasts: Sequence[Multicast]) -> JobSet:
        """Return the multicasts as jobs that occupy NICs."""
        occupied_s = [
            self.strategy.cost(each, self.network, self.num_chunks(each)).occupied_s for each in multicasts
        ]
        return jobs_of(multicasts, occupied_s, self.network, self.strategy)


_Port = tuple[str, int]
"""("in" or "out", global rank): one direction of the link of a rank inside its host."""


def _local_ports(multicast: Multicast) -> list[_Port]:
    """Return the ports that a multicast inside one host occupies; [] between hosts, where NICs are slower."""
    if not multicast.is_local:
        return []
    passing_on = multicast.receivers if len(multicast.receivers) > 1 else ()
    out = dict.fromkeys((*multicast.senders, *passing_on))
    return [*(("out", rank) for rank in out), *(("in", rank) for rank in multicast.receivers)]


def _nic_ports(route: MulticastRoute) -> list[tuple[str, Nic]]:
    """Return the directions of NICs that a multicast occupies on its route."""
    return [*(("out", nic) for nic in (*route.out, *route.forwarding)), *(("in", nic) for nic in route.into)]


def _local_turns(multicasts: Sequence[Multicast]) -> list[int]:
    """Return for each multicast the first turn in which none before it occupies one of its ports in its host."""
    taken, turns = defaultdict[_Port, int](int), []
    for ports in map(_local_ports, multicasts):
        busy = 0  # bit t: turn t is taken
        for port in ports:
            busy |= taken[port]
        turn = ~busy & (busy + 1)
        for port in ports:
            taken[port] |= turn
        turns.append(turn.bit_length() - 1)
    return turns
