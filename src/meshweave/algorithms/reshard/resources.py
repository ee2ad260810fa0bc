"""Multicasts as jobs on NICs: what each of them holds while it runs, in each way that it can be done.

A resource is a NIC in one direction. Where one of several senders is chosen, all that send are one class, and what
a host takes in is another; where a multicast takes up all NICs that there are to choose from, each is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from meshweave.algorithms.reshard.fabric import Fabric, Nic
from meshweave.algorithms.reshard.multicast import Multicast, Strategy
from meshweave.algorithms.reshard.order import Job, Jobs
from meshweave.algorithms.reshard.order.bounds import loads
from meshweave.algorithms.reshard.tasks import UnitTask
from meshweave.base.units import PS_PER_S

MOST_WAYS = 16
"""Choices of sender and gateways per task; of more, this many evenly spread ones are looked at."""


@dataclass(frozen=True)
class Way:
    """A multicast with its sender chosen, if it has one, and each host's gateway first; the NICs that it holds."""

    cast: Multicast
    out: tuple[Nic, ...]
    into: tuple[Nic, ...]
    passing: tuple[Nic, ...] = ()
    """NICs of gateways that pass on what they get."""


def ways(number: int, cast: Multicast, fabric: Fabric, how: Strategy) -> list[Way]:
    """Each choice of sender and gateways of multicast `number`: one rank for each NIC.

    Ranks behind one NIC are as good as one another: the first sends, so that one rank's messages follow each
    other without turns.
    """
    picks = how.picks_sender(cast)
    if cast.is_local:
        sender = cast.senders[number % len(cast.senders)]
        return [Way(replace(cast, senders=(sender,)) if picks else cast, (), ())]
    behind = _first_behind(cast.senders, fabric)
    gateways = [_first_behind(host, fabric) for host in cast.hosts]
    senders: list[tuple[tuple[Nic, ...], tuple[int, ...]]] = [
        ((nic,), (rank,)) for nic, rank in behind.items()
    ]
    if not picks:
        senders = [(tuple(behind), tuple(behind.values()))]
    if not how.one_gateway:
        every = tuple(nic for found in gateways for nic in found)
        return [Way(replace(cast, senders=ranks), nics, every) for nics, ranks in senders]
    entries = [
        [list(found.items())[shift % len(found)] for found in gateways]
        for shift in range(max(map(len, gateways)))
    ]
    combined = [(sender, entry) for sender in senders for entry in entries]
    if len(combined) > MOST_WAYS:
        combined = [
            combined[(number + step * len(combined) // MOST_WAYS) % len(combined)]
            for step in range(MOST_WAYS)
        ]
    return [
        Way(
            replace(
                cast, senders=ranks, hosts=tuple(map(_gateway_first, cast.hosts, (at for _, at in entry)))
            ),
            nics,
            tuple(nic for nic, _ in entry),
            tuple(nic for nic, _ in entry[:-1]),
        )
        for (nics, ranks), entry in combined
    ]


def _first_behind(ranks: Sequence[int], fabric: Fabric) -> dict[Nic, int]:
    """The first of the ranks that use each NIC."""
    found: dict[Nic, int] = {}
    for rank in ranks:
        found.setdefault(fabric.nic(rank), rank)
    return found


def _gateway_first(host: tuple[int, ...], gateway: int) -> tuple[int, ...]:
    at = host.index(gateway)
    return (*host[at:], *host[:at])


@dataclass
class _Resources:
    """Numbers of NICs and their classes. `apart`: each NIC of a direction is a class of its own."""

    apart: dict[str, bool]
    class_of: list[int] = field(default_factory=list)
    _numbers: dict[tuple[str, Nic], int] = field(default_factory=dict)
    _classes: dict[object, int] = field(default_factory=dict)

    def number(self, direction: str, nic: Nic) -> int:
        key = direction, nic
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            of_host = nic[0] if direction == "in" else None
            kind = direction, nic if self.apart[direction] else of_host
            self.class_of.append(self._classes.setdefault(kind, len(self._classes)))
        return self._numbers[key]


def jobs_of(casts: Sequence[Multicast], durations_s: Sequence[float], fabric: Fabric, how: Strategy) -> Jobs:
    """Multicasts as the order sees them, each with the seconds for which it holds its NICs."""
    resources = _Resources({"out": not all(map(how.picks_sender, casts)), "in": not how.one_gateway})
    jobs = []
    choices = [ways(number, cast, fabric, how) for number, cast in enumerate(casts)]
    senders = {nic for found in choices for way in found for nic in way.out}
    for found, duration_s in zip(choices, durations_s, strict=True):
        held = []
        for way in found:
            out = dict.fromkeys((*way.out, *(nic for nic in way.passing if nic in senders)))
            numbers = [resources.number("out", nic) for nic in out]
            held.append(tuple(sorted([*numbers, *(resources.number("in", nic) for nic in way.into)])))
        jobs.append(Job(max(round(duration_s * PS_PER_S), 1), tuple(held)))
    return Jobs(tuple(jobs), tuple(resources.class_of))


def nic_bound_s(tasks: Sequence[UnitTask], fabric: Fabric) -> float:
    """Seconds that the busiest NIC needs for its bytes, if all shared them as evenly as can be."""
    resources = _Resources({"out": False, "in": False})
    jobs: list[Job] = []

    def demand(num_bytes: int, direction: str, ranks: Sequence[int]) -> None:
        nics = dict.fromkeys(map(fabric.nic, ranks))
        jobs.append(Job(max(num_bytes, 1), tuple((resources.number(direction, nic),) for nic in nics)))

    for task in tasks:
        holding = {fabric.host_of[rank] for rank in task.holders}
        remote: dict[int, list[int]] = {}
        for rank in task.needers:
            if fabric.host_of[rank] not in holding:
                remote.setdefault(fabric.host_of[rank], []).append(rank)
        if remote:
            demand(task.num_bytes, "out", task.holders)
        for ranks in remote.values():
            demand(task.num_bytes, "in", ranks)
    busiest = max((load.least for load in loads(Jobs(tuple(jobs), tuple(resources.class_of)))), default=0)
    return busiest / fabric.nic_bytes_per_s
