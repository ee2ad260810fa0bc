"""Random unit tasks for the tests of their order: without structure, and as a resharding has them."""

from __future__ import annotations

import itertools
from random import Random

from meshweave.algorithms.reshard.order import JobSet, TransferJob


def row_major(hosts: int, senders: int, sources: int, destinations: int) -> JobSet:
    """Equal jobs, one for each pair of a source slice and a destination slice, source by source.

    Sources and destinations are spread evenly over that many hosts of their mesh; each of the sending hosts' NICs
    is one resource and shared by its `senders` devices, which are the ways of a job and all the same here.
    """
    cells = itertools.product(range(sources), range(destinations))
    return JobSet(
        tuple(
            TransferJob(1, ((p * hosts // sources, hosts + q * hosts // destinations),) * senders)
            for p, q in cells
        ),
        (0,) * hosts + (1,) * hosts,
    )


def unstructured(rng: Random, most: int = 20) -> JobSet:
    """Any senders, any sets of up to three receivers."""
    senders, receivers = rng.randint(1, 8), rng.randint(1, 10)
    longest = rng.choice([1, 1, 3, 10, 1000])
    copies, fan_out = rng.randint(1, senders), rng.randint(1, min(3, receivers))
    jobs = []
    for _ in range(rng.randint(1, most)):
        to = sorted(senders + r for r in rng.sample(range(receivers), rng.randint(1, fan_out)))
        holders = sorted(rng.sample(range(senders), rng.randint(1, copies)))
        jobs.append(TransferJob(rng.randint(1, longest), tuple((s, *to) for s in holders)))
    return JobSet(tuple(jobs), (0,) * senders + tuple(range(1, receivers + 1)))


def reshard(rng: Random, least: int = 1, most: int = 20, loose: bool = True) -> JobSet:
    """A job for each pair of a source slice, held by some of the sending hosts, and a destination slice, wanted by
    up to three receiving hosts; with one NIC or two on each host. Unless `loose`, receiving hosts form disjoint
    groups, as along the axes of a mesh: only then can every NIC be kept busy."""
    large = most > 20
    while True:
        sources, destinations = (rng.randint(1, 16 if large else 6) for _ in range(2))
        if least <= sources * destinations <= most:
            break
    num_from, num_to, nics = rng.randint(1, 8), rng.randint(1, 8), rng.choice([1, 1, 2])
    copies, blocks = rng.randint(1, num_from), rng.random() < 0.5
    held_by = []
    for p in range(sources):
        if blocks:
            first = p * num_from // sources
            held_by.append(sorted({(first + i) % num_from for i in range(copies)}))
        else:
            held_by.append(sorted(rng.sample(range(num_from), rng.randint(1, num_from))))
    group = rng.randint(1, min(3, num_to))
    scattered = loose and rng.random() < 0.5
    wanted_by = []
    for q in range(destinations):
        if scattered:
            wanted_by.append(sorted(rng.sample(range(num_to), rng.randint(1, group))))
        else:
            first = q * (num_to // group) // destinations * group
            wanted_by.append(list(range(first, first + group)))
    uneven = rng.choice(["no", "slices", "jobs"])
    height = [rng.randint(1, 5) if uneven == "slices" else 1 for _ in range(sources)]
    width = [rng.randint(1, 5) if uneven == "slices" else 1 for _ in range(destinations)]
    jobs = []
    for p, q in itertools.product(range(sources), range(destinations)):
        duration = rng.randint(1, 1000) if uneven == "jobs" else height[p] * width[q]
        out = [host * nics + nic for host in held_by[p] for nic in range(nics)]
        into = [[(num_from + host) * nics + nic for nic in range(nics)] for host in wanted_by[q]]
        jobs.append(TransferJob(duration * 1000, tuple(itertools.product(out, *into))))
    class_of = [0] * num_from * nics + [1 + host for host in range(num_to) for _ in range(nics)]
    return JobSet(tuple(jobs), tuple(class_of))
