"""Lower bounds of every schedule: how much work must go through how few NICs.

`bound` holds for any sharing of the NICs, also where tasks are cut or run at a fraction of a NIC's rate: within
a class of resources each job takes up one of its alternatives for its duration, so a set S of them carries at
least the jobs whose alternatives all lie in S, and one of S is busy for that total over |S|. Over all S this is
the least possible load of eq. 4 of AlpaComm (MLSys '23) with the work divided at will (the linear program's dual).

Where tasks have several receivers, no schedule may come near `bound`: three tasks for the hosts (1, 2), (2, 3) and
(1, 3) run one after another though each NIC is busy for two of them only.
`exclusive_bound` adds what holds for whole tasks only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshweave.algorithms.reshard.order.jobs import JobSet, route_masks

MAX_SETS = 4096
MAX_STEPS = 1 << 17
"""Comparisons of two sets in a component of a class; some 10 ms."""
MAX_IN_CLIQUE = 400


@dataclass(frozen=True)
class ResourceLoad:
    """A set of resources of one class, and the jobs that occupy one of them whichever route they take.

    Attributes:
        resources: the set, as an integer in which the bits of its resources' numbers are set.
        size: how many resources are in the set.
        members: numbers of the jobs.
        total: sum of the jobs' durations, in their unit.
    """

    resources: int
    size: int
    members: tuple[int, ...]
    total: int

    @property
    def lower_bound(self) -> int:
        """Return ceil(total / size): the least time for which the set's busiest resource is occupied.

        It is in the unit of durations.
        """
        return -(-self.total // self.size)


def resource_loads(jobs: JobSet) -> list[ResourceLoad]:
    """Return sets of resources from which lower bounds follow, with the jobs that must occupy each of them.

    The resources of a class fall into components that share no job. The sets are those left when the least loaded
    resource of a component is removed again and again, and unions of the sets of resources that single jobs can
    occupy, up to 4096 of them or what 2^17 comparisons yield. A set that is left out makes a bound weaker, not
    wrong.
    """
    loads = []
    for cls in range(max(jobs.class_of, default=-1) + 1):
        members: dict[int, list[int]] = {}
        for j, job in enumerate(jobs.jobs):
            in_class = [[r for r in route if jobs.class_of[r] == cls] for route in job.routes]
            mask = sum(1 << r for r in {r for resources in in_class for r in resources})
            if mask and all(in_class):  # a job that can do without this class need not load it
                members.setdefault(mask, []).append(j)
        for component in _components(sorted(members)):
            total = {mask: sum(jobs.jobs[j].duration for j in members[mask]) for mask in component}
            for union in dict.fromkeys([*_peeled(total), *_unions(component)]):
                inside = [mask for mask in component if not mask & ~union]
                if inside:
                    everyone = tuple(j for mask in inside for j in members[mask])
                    loads.append(
                        ResourceLoad(union, union.bit_count(), everyone, sum(total[mask] for mask in inside))
                    )
    return loads


def bound(jobs: JobSet) -> int:
    """Return a lower bound of the time at which the last job ends in any schedule, in the unit of durations.

    It holds even if jobs are cut, or run at a part of a resource's rate. It is at least the longest duration.
    """
    longest = max((job.duration for job in jobs.jobs), default=0)
    return max([longest, *(load.lower_bound for load in resource_loads(jobs))])


def exclusive_bound(jobs: JobSet, known: Sequence[ResourceLoad] | None = None) -> int:
    """Return a lower bound of the time at which the last job ends if each resource serves one job at a time.

    It is in the unit of durations, for jobs that are not cut. Besides what `bound` uses, it uses that

    - jobs of which any two exclude each other, in whatever routes, run one after another (a clique found
      greedily, among the longest 400 jobs);
    - of k m + 1 jobs on m resources some k + 1 share one, and take at least as long as the k + 1 shortest;
    - in a schedule without needless gaps every start is a sum of durations, so it ends at a multiple of their
      greatest common divisor.

    Args:
        known: the result of `resource_loads(jobs)`; None to compute it.
    """
    durations = [job.duration for job in jobs.jobs]
    least = max([0, *durations])
    for load in resource_loads(jobs) if known is None else known:
        least = max(least, load.lower_bound)
        longest_first = sorted((durations[j] for j in load.members), reverse=True)
        for k in range(1, (len(longest_first) - 1) // load.size + 1):
            last = k * load.size
            least = max(least, sum(longest_first[last - k : last + 1]))
            if k == 8:  # further on the mean load says as much
                break
    step = math.gcd(*durations) if durations else 1
    return -(-max(least, _clique(jobs)) // step) * step


def _components(masks: Sequence[int]) -> list[list[int]]:
    """Group the sets so that no two groups have a resource in common."""
    groups: list[tuple[int, list[int]]] = []
    for mask in masks:
        touching = [group for group in groups if group[0] & mask]
        groups = [group for group in groups if not group[0] & mask]
        union = mask
        for resources, _ in touching:
            union |= resources
        groups.append((union, [m for _, inside in touching for m in inside] + [mask]))
    return [inside for _, inside in groups]


def _unions(masks: Sequence[int]) -> list[int]:
    unions = list(masks)
    seen = dict.fromkeys(unions)
    most = min(MAX_SETS, max(1, MAX_STEPS // len(masks)))
    at = 0
    while at < len(unions) < most:
        for mask in masks:
            union = unions[at] | mask
            if union not in seen:
                seen[union] = None
                unions.append(union)
        at += 1
    return unions[:most]


def _peeled(total: dict[int, int]) -> list[int]:
    whole = 0
    for mask in total:
        whole |= mask
    bits = [1 << r for r in range(whole.bit_length()) if whole >> r & 1]
    degree = {bit: sum(d for mask, d in total.items() if mask & bit) for bit in bits}
    peeled, left = [], dict(total)
    while left:
        peeled.append(whole)
        bit = min(degree, key=lambda b: (degree[b], b))
        whole ^= bit
        del degree[bit]
        for mask in [mask for mask in left if mask & bit]:
            duration = left.pop(mask)
            for other in degree:
                if mask & other:
                    degree[other] -= duration
    return peeled


def _clique(jobs: JobSet) -> int:
    """Return the total duration of a set of jobs of which any two share a resource in all their routes."""
    durations = [job.duration for job in jobs.jobs]
    masks = route_masks(jobs)
    longest = sorted(range(len(durations)), key=lambda j: (-durations[j], j))[:MAX_IN_CLIQUE]
    rivals = dict.fromkeys(longest, 0)
    for n, i in enumerate(longest):
        for j in longest[:n]:
            if all(a & b for a in masks[i] for b in masks[j]):
                rivals[i] |= 1 << j
                rivals[j] |= 1 << i
    # Jobs with much work against them first.
    rank = {i: durations[i] + sum(durations[j] for j in longest if rivals[i] >> j & 1) for i in longest}
    by_rank = sorted(longest, key=lambda j: (-rank[j], j))
    best = 0
    for first in by_rank[:32]:
        allowed, total = rivals[first], durations[first]
        for j in by_rank:
            if allowed >> j & 1:
                total += durations[j]
                allowed &= rivals[j]
        best = max(best, total)
    return best
