"""Multicasts as jobs on NICs: which NICs a multicast occupies while it runs, for each route that it can take.

A resource is one direction of one NIC. Where one of several senders is chosen, all sending NICs form one class,
and the receiving NICs of each host form another. Where a multicast takes all NICs that there are to choose
from, each NIC is a class of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from meshweave.algorithms.reshard.multicast import Multicast, Strategy
from meshweave.algorithms.reshard.order import JobSet, TransferJob
from meshweave.algorithms.reshard.order.bounds import resource_loads
from meshweave.algorithms.reshard.tasks import UnitTask
from meshweave.base.units import PS_PER_S
from meshweave.cost.fabric import HostTopology, Nic

MAX_ROUTES = 16
"""The most choices of sender and gateways per multicast; of more, this many evenly spread ones are considered."""


@dataclass(frozen=True)
class MulticastRoute:
    """One choice of sender and gateways for a multicast.

    Attributes:
        multicast: the multicast; if one sender is chosen, `senders` is that rank alone. Each host's gateway, the
            rank that receives for it, comes first in the host.
        out: NICs of the senders.
        into: NICs through which the receiving hosts get their copies.
        forwarding: NICs of the gateways that send on to another host what they receive.
    """

    multicast: Multicast
    out: tuple[Nic, ...]
    into: tuple[Nic, ...]
    forwarding: tuple[Nic, ...] = ()


def routes_of(
    number: int, multicast: Multicast, network: HostTopology, strategy: Strategy
) -> list[MulticastRoute]:
    """Return the routes to consider for a multicast, at most `MAX_ROUTES`.

    A route has one sender, or all if the strategy uses all, and in each receiving host one gateway, or all ranks
    if the strategy uses all. Of ranks that share a NIC only the first is considered. A multicast inside one host
    has one route, over no NIC.

    Args:
        number: position of the multicast among all multicasts. If there are too many routes, it decides which are
            returned, so that different multicasts use different NICs.
    """
    picks = strategy.uses_one_sender(multicast)
    if multicast.is_local:
        sender = multicast.senders[number % len(multicast.senders)]
        return [MulticastRoute(replace(multicast, senders=(sender,)) if picks else multicast, (), ())]
    sender_of = _first_rank_by_nic(multicast.senders, network)
    gateways = [_first_rank_by_nic(host, network) for host in multicast.hosts]
    senders: list[tuple[tuple[Nic, ...], tuple[int, ...]]] = [
        ((nic,), (rank,)) for nic, rank in sender_of.items()
    ]
    if not picks:
        senders = [(tuple(sender_of), tuple(sender_of.values()))]
    if not strategy.one_gateway:
        every = tuple(nic for rank_of in gateways for nic in rank_of)
        routes = [MulticastRoute(replace(multicast, senders=ranks), nics, every) for nics, ranks in senders]
        return [routes[at] for at in _kept(len(routes), number)]
    entries = [
        [list(rank_of.items())[shift % len(rank_of)] for rank_of in gateways]
        for shift in range(max(map(len, gateways)))
    ]
    choices = [(sender, entry) for sender in senders for entry in entries]
    routes = []
    for (nics, ranks), entry in (choices[at] for at in _kept(len(choices), number)):
        hosts = tuple(map(_gateway_first, multicast.hosts, (rank for _, rank in entry)))
        into = tuple(nic for nic, _ in entry)
        routes.append(MulticastRoute(replace(multicast, senders=ranks, hosts=hosts), nics, into, into[:-1]))
    return routes


def _kept(count: int, number: int) -> Sequence[int]:
    """Return which of `count` choices to keep: at most `MAX_ROUTES`, evenly spread; `number` shifts them."""
    if count <= MAX_ROUTES:
        return range(count)
    return [(number + step * count // MAX_ROUTES) % count for step in range(MAX_ROUTES)]


def _first_rank_by_nic(ranks: Sequence[int], network: HostTopology) -> dict[Nic, int]:
    first: dict[Nic, int] = {}
    for rank in ranks:
        first.setdefault(network.nic(rank), rank)
    return first


def _gateway_first(host: tuple[int, ...], gateway: int) -> tuple[int, ...]:
    index = host.index(gateway)
    return (*host[index:], *host[:index])


@dataclass
class _NicResources:
    """Numbers of NICs and their classes; where `separate`, each NIC of a direction is a class of its own."""

    separate: dict[str, bool]
    class_of: list[int] = field(default_factory=list)
    _numbers: dict[tuple[str, Nic], int] = field(default_factory=dict)
    _classes: dict[object, int] = field(default_factory=dict)

    def number(self, direction: str, nic: Nic) -> int:
        """Return the number of a resource, one direction ("in", "out") of a NIC; it is given at its first use."""
        key = direction, nic
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            host = nic[0] if direction == "in" else None
            kind = direction, nic if self.separate[direction] else host
            self.class_of.append(self._classes.setdefault(kind, len(self._classes)))
        return self._numbers[key]


def jobs_of(
    multicasts: Sequence[Multicast], durations_s: Sequence[float], network: HostTopology, strategy: Strategy
) -> JobSet:
    """Return for each multicast a job to be ordered; the job's routes are the NICs of `routes_of`, in its order.

    Args:
        durations_s: for each multicast the seconds for which it occupies its NICs; the job's `duration` is this in
            whole picoseconds, at least 1.
    """
    picks_all_senders = all(map(strategy.uses_one_sender, multicasts))
    resources = _NicResources({"out": not picks_all_senders, "in": not strategy.one_gateway})
    jobs = []
    routes_by_job = [routes_of(number, each, network, strategy) for number, each in enumerate(multicasts)]
    senders = {nic for routes in routes_by_job for route in routes for nic in route.out}
    for routes, duration_s in zip(routes_by_job, durations_s, strict=True):
        occupied = []
        for route in routes:
            out = dict.fromkeys((*route.out, *(nic for nic in route.forwarding if nic in senders)))
            numbers = [resources.number("out", nic) for nic in out]
            occupied.append(tuple(sorted([*numbers, *(resources.number("in", nic) for nic in route.into)])))
        jobs.append(TransferJob(max(round(duration_s * PS_PER_S), 1), tuple(occupied)))
    return JobSet(tuple(jobs), tuple(resources.class_of))


def nic_bound_s(tasks: Sequence[UnitTask], network: HostTopology) -> float:
    """Return a lower bound on the time of any plan, in seconds: that of the bytes of the busiest NIC.

    Only tasks with destinations outside their source hosts count. One copy of a task's bytes leaves the source
    hosts, and one enters each other destination host. Copies are spread as evenly as possible over the NICs of the
    ranks that may send or receive them. Latency is not counted.
    """
    resources = _NicResources({"out": False, "in": False})
    jobs: list[TransferJob] = []

    def add_job(num_bytes: int, direction: str, ranks: Sequence[int]) -> None:
        nics = dict.fromkeys(map(network.nic, ranks))
        routes = tuple((resources.number(direction, nic),) for nic in nics)
        jobs.append(TransferJob(max(num_bytes, 1), routes))

    for task in tasks:
        source_hosts = {network.host_of[rank] for rank in task.sources}
        remote: dict[int, list[int]] = {}
        for rank in task.destinations:
            if network.host_of[rank] not in source_hosts:
                remote.setdefault(network.host_of[rank], []).append(rank)
        if remote:
            add_job(task.num_bytes, "out", task.sources)
        for ranks in remote.values():
            add_job(task.num_bytes, "in", ranks)
    loads = resource_loads(JobSet(tuple(jobs), tuple(resources.class_of)))
    return network.nic_transfer_s(max((load.lower_bound for load in loads), default=0))
