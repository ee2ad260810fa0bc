"""Search: in which order the ranks of a universal product issue their fetches, products and accumulates.

Slicing Is All You Need, sections 4.2, 4.3 and 5.2. Every schedule kind gives an order per rank, whose program is
simulated. The paper found direct execution almost always as good as the order of least staged cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshweave.algorithms.universal import Slicing, UniversalConfig, UniversalProblem, universal_program
from meshweave.algorithms.universal.config import SCHEDULE_KINDS, ScheduleKind
from meshweave.algorithms.universal.issue_order import IssueOrder, direct_order
from meshweave.base.progress import Progress, no_progress
from meshweave.cost.machine import Machine
from meshweave.cost.rates import RankRates
from meshweave.describe.machine.cluster import Cluster
from meshweave.simulate import simulate
from meshweave_studies.slicing.issue_rules import (
    SearchEffort,
    exhaustive_search,
    schedule_graph,
    schedule_stages,
)
from meshweave_studies.slicing.stages import flatten_stages, staged_s


@dataclass(frozen=True)
class SimulatedSchedule:
    """The order that one schedule kind gives, and its time.

    Attributes:
        kind: the schedule kind.
        orders: for each rank the order in which it issues; `universal_program` takes them as `orders`.
        simulated_s: simulated seconds of the program, with contention.
        staged_s: seconds of the stages of the slowest rank, as if each stage ended with a barrier (section 4.3).
        bound_s: no schedule has a lower `staged_s`; None for other kinds than "exhaustive".
        num_proven: the number of ranks whose search proved its schedule to be the best.
        num_states: the number of states that the searches weighed.
    """

    kind: ScheduleKind
    orders: Mapping[int, IssueOrder]
    simulated_s: float
    staged_s: float
    bound_s: float | None = None
    num_proven: int = 0
    num_states: int = 0


def search_schedule(
    problem: UniversalProblem,
    config: UniversalConfig,
    cluster: Cluster,
    *,
    kinds: Sequence[ScheduleKind] = SCHEDULE_KINDS,
    max_states: int | None = None,
    progress: Progress = no_progress,
) -> tuple[SimulatedSchedule, ...]:
    """Return the order that each schedule kind gives on a cluster, the fastest in simulation first.

    Of equally fast ones, those earlier in `kinds` come first. `config.schedule` is not used. To compute by a
    schedule of the result, pass its `orders` to `universal_program`.

    Raises LayoutError where the problem does not fit the cluster.

    Args:
        max_states: the most states that the exhaustive search weighs per rank. The search ends there with the best
            order so far, the same on every machine. By default `MAX_STATES`, or fewer where ranks have many
            products, or each its own graph, such that the search takes seconds.
    """
    schedules = []
    for number, kind in enumerate(kinds):
        schedules.append(schedule_universal(problem, config, cluster, kind, max_states=max_states))
        progress(number + 1, len(kinds))
    return tuple(sorted(schedules, key=lambda schedule: schedule.simulated_s))


def schedule_universal(
    problem: UniversalProblem,
    config: UniversalConfig,
    cluster: Cluster,
    kind: ScheduleKind,
    *,
    max_states: int | None = None,
) -> SimulatedSchedule:
    """Return the order that one schedule kind gives on a cluster, simulated; see `search_schedule`."""
    slicing, rates = Slicing(problem, config), RankRates.of(cluster, problem.dtype)
    graphs = {rank: schedule_graph(slicing, rank, rates) for rank in problem.ranks}
    effort = SearchEffort.of(graphs.values(), config.limits, max_states)
    stages = {rank: schedule_stages(kind, graph, effort) for rank, graph in graphs.items()}
    if kind == "direct":
        orders = {rank: direct_order(slicing.steps(rank), rank) for rank in problem.ranks}
    else:
        orders = {rank: flatten_stages(stages[rank]) for rank in problem.ranks}
    program = universal_program(problem, config, orders=orders)
    simulated_s = simulate(program, Machine.of(cluster, program, logical=True)).duration_s
    slowest_s = max(staged_s(stages[rank], graph) for rank, graph in graphs.items())
    if kind != "exhaustive":
        return SimulatedSchedule(kind, orders, simulated_s, slowest_s)
    results = [exhaustive_search(graph, effort) for graph in graphs.values()]
    return SimulatedSchedule(
        kind,
        orders,
        simulated_s,
        slowest_s,
        bound_s=max(result.bound_seconds for result in results),
        num_proven=sum(result.proven for result in results),
        num_states=sum(result.states for result in results),
    )
