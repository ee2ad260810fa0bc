"""Plan a reshard by every strategy and order, simulate the plans, and choose the fastest."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

from meshweave.algorithms.reshard import ReshardPlan, ReshardProblem, plan_reshard, reshard_program
from meshweave.algorithms.reshard.plan import MAX_MESSAGES
from meshweave.base.errors import UnsupportedError
from meshweave.base.progress import Progress, no_progress
from meshweave.cost.fabric import HostTopology
from meshweave.cost.machine import Machine
from meshweave.describe.layout import Replicate
from meshweave.describe.machine.cluster import Cluster
from meshweave.ir.program import Program

if TYPE_CHECKING:
    from meshweave.simulate.result import Simulation

MAX_PAIRS = 1 << 16
"""Shards of the source times shards of the destination, for one tensor; so many can take 10 s to plan."""
MAX_ALL_PAIRS = 1 << 21
"""For all tensors of a state dict together."""
MAX_SIMULATED_OPS = 600_000
"""Some 10 s of simulation, and of writing the program before."""
MAX_SHOWN = 8
"""The most ranks of `ReshardCandidate.busiest_ranks`."""


@dataclass(frozen=True)
class ReshardCandidate:
    """A plan of a reshard by one strategy and order, with its simulation; `note` says why it has none, else ""."""

    plan: ReshardPlan
    simulation: Simulation | None = None
    note: str = ""

    @property
    def title(self) -> str:
        """Return the names of the plan's strategy and order, as a heading."""
        return f"{self.plan.strategy.name}, order {self.plan.order}"

    @property
    def simulated_s(self) -> float | None:
        """Return the simulated seconds; None if it was not simulated."""
        return None if self.simulation is None else self.simulation.duration_s

    @cached_property
    def program(self) -> Program:
        """Return the program of the plan."""
        return self.simulation.program if self.simulation is not None else reshard_program(self.plan)

    @cached_property
    def peak_memory(self) -> tuple[int, int, int]:
        """Return (rank, bytes of its shards before and after, bytes of scratch) of the rank that needs most."""
        plan = self.plan
        needs = ((plan.local_bytes(rank), plan.scratch_bytes(rank), rank) for rank in plan.problem.ranks)
        local, scratch, rank = max(needs, key=lambda need: (need[0] + need[1], -need[2]))
        return rank, local, scratch

    def busiest_ranks(self) -> tuple[int, ...]:
        """Return for each host the rank that sends and receives the most bytes between hosts, in order of rank.

        Of more than `MAX_SHOWN` hosts those ranks are kept that move the most. Where nothing moves between hosts
        they are the first `MAX_SHOWN` ranks of the problem.
        """
        moved: dict[int, int] = {}
        for scheduled in self.plan.multicasts:
            for hop in self.plan.strategy.host_hops(scheduled.multicast):
                for rank in (hop.upstream, hop.gateway):
                    moved[rank] = moved.get(rank, 0) + scheduled.multicast.num_bytes
        first: dict[int, int] = {}
        for rank in sorted(moved, key=lambda r: (-moved[r], r)):
            first.setdefault(self.plan.network.host_of[rank], rank)
        return tuple(sorted(list(first.values())[:MAX_SHOWN])) or self.plan.problem.ranks[:MAX_SHOWN]


@dataclass(frozen=True)
class ReshardComparison:
    """All candidates in the order asked for, the chosen one, and the seconds that planning took."""

    candidates: tuple[ReshardCandidate, ...]
    chosen: ReshardCandidate
    planning_s: float


def compare_reshards(
    problem: ReshardProblem,
    cluster: Cluster,
    strategies: Sequence[str],
    orders: Sequence[str],
    *,
    simulate_all: bool = False,
    on_planned: Progress = no_progress,
    on_simulated: Progress = no_progress,
) -> ReshardComparison:
    """Return the plans of a problem by each strategy with each order, and the fastest one as chosen.

    That is the fastest in simulation if all candidates are simulated, else by prediction; of equals the
    first.

    Args:
        cluster: the machine, rank r being its chip r.
        strategies: names in `algorithms.reshard.STRATEGIES`.
        orders: names in `algorithms.reshard.order.ORDERS`.
        simulate_all: whether every candidate is simulated, message by message, unless its program is too
            large.
        on_planned, on_simulated: called with (candidates done, candidates in all).

    Raises:
        LayoutError: the cluster has fewer chips than there are ranks.
        UnsupportedError: there is no such strategy or order, or an order needs a library that is not installed;
            or the problem takes too long to plan, see `check_size`; or a plan has too many messages.
    """
    check_size(problem)
    began = time.perf_counter()
    pairs = list(product(strategies, orders))
    candidates = []
    for number, (strategy, order) in enumerate(pairs):
        candidates.append(plan_candidate(problem, cluster, strategy, order))
        on_planned(number + 1, len(pairs))
    planning_s = time.perf_counter() - began
    if simulate_all:
        for number, candidate in enumerate(candidates):
            candidates[number] = simulate_candidate(candidate, cluster)
            on_simulated(number + 1, len(candidates))
    return ReshardComparison(tuple(candidates), fastest(candidates), planning_s)


def plan_candidate(problem: ReshardProblem, cluster: Cluster, strategy: str, order: str) -> ReshardCandidate:
    """Return the plan of one strategy and order, not simulated.

    Raises:
        LayoutError: the cluster has fewer chips than there are ranks.
        UnsupportedError: there is no such strategy or order, the order needs a library that is not installed, or
            the plan has more messages than a program may have.
    """
    plan = plan_reshard(problem, HostTopology.of(cluster), strategy=strategy, order=order)
    at_least = sum(
        max(scheduled.chunks, len(scheduled.multicast.pieces)) * len(scheduled.multicast.receivers)
        for scheduled in plan.multicasts
    )
    if at_least > MAX_MESSAGES:
        raise UnsupportedError(
            f"by {strategy} this takes about {at_least:,} messages, more than the {MAX_MESSAGES:,} of a "
            "plan; give a smaller problem"
        )
    return ReshardCandidate(plan)


def simulate_candidate(candidate: ReshardCandidate, cluster: Cluster) -> ReshardCandidate:
    """Return the candidate with its simulation, or with a note if the program is too large for one.

    One that has a simulation or a note is returned as it is. Meshes that a torus does not carry are simulated
    over links of several hops.
    """
    from meshweave.simulate import simulate

    if candidate.simulation is not None or candidate.note:
        return candidate
    ops = 2 * candidate.plan.num_messages
    if ops <= MAX_SIMULATED_OPS:
        ops = len(candidate.program.body)
    if ops > MAX_SIMULATED_OPS:
        return replace(candidate, note=f"{ops:,} ops, more than the {MAX_SIMULATED_OPS:,} that are simulated")
    machine = Machine.of(cluster, candidate.program, logical=True)
    return replace(candidate, simulation=simulate(candidate.program, machine))


def fastest(candidates: Sequence[ReshardCandidate]) -> ReshardCandidate:
    """Return the fastest candidate in simulation if all are simulated, else by prediction; of equals the first."""
    if all(candidate.simulation is not None for candidate in candidates):
        return min(candidates, key=lambda candidate: candidate.simulated_s or 0.0)
    return min(candidates, key=lambda candidate: candidate.plan.predicted_s)


def check_size(problem: ReshardProblem) -> None:
    """Raise UnsupportedError if a problem has too many pairs of a source and a destination shard to plan.

    The limits are `MAX_PAIRS` for one tensor and `MAX_ALL_PAIRS` for all; replicas do not count.
    """
    pairs = []
    for move in problem.moves:
        num_shards = [
            math.prod(
                size
                for size, placement in zip(layout.mesh.shape, layout.placements, strict=True)
                if not isinstance(placement, Replicate)
            )
            for layout in (move.src, move.dst)
        ]
        pairs.append(math.prod(num_shards))
    if max(pairs) > MAX_PAIRS or sum(pairs) > MAX_ALL_PAIRS:
        raise UnsupportedError(
            f"{sum(pairs):,} pairs of a source and a destination shard are more than is planned here "
            f"({MAX_PAIRS:,} for a tensor, {MAX_ALL_PAIRS:,} for a model); give smaller meshes"
        )
