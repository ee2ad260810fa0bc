"""The order in which ranks of a universal product issue their steps, by stages of what these cost.

Slicing Is All You Need, section 4.3. In the graph of a schedule each step is a product, and each of its panels
that is not one block of the rank's own memory a fetch. The order in which a schedule fetches, multiplies and
accumulates is kept on the three lanes of the program; its stages are no barriers there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from meshweave.algorithms.universal.config import STAGE_LIMITS, ScheduleKind, StageLimits
from meshweave.algorithms.universal.issue_order import (
    IssueOrder,
    IssueRule,
    needs_no_accumulate,
    remote_panels,
)
from meshweave.algorithms.universal.panels import ProductStep
from meshweave.algorithms.universal.problem import Operand
from meshweave.algorithms.universal.slicing import Slicing
from meshweave.base.units import dtype_bytes
from meshweave.cost.rates import RankRates
from meshweave_studies.slicing.stage_search import ScheduleSearchResult, exhaustive
from meshweave_studies.slicing.stages import (
    MAX_SELECTIONS,
    FetchNode,
    IssueStage,
    ProductNode,
    ScheduleGraph,
    cost_greedy,
    direct,
    flatten_stages,
    greedy,
)

MAX_STATES = 20_000
"""The most states that an exhaustive search weighs per rank. Unlike a time limit, it gives the same schedule on
every machine."""
_STATES, _SELECTIONS = 160_000, 80_000
"""The most states, and selections, that are weighed per kind, each times the products of its graph, unless told
otherwise: the time of each grows with the graph."""


@dataclass(frozen=True)
class SearchEffort:
    """Limits of the search for one rank's schedule. Equal efforts give equal schedules.

    Attributes:
        max_states: the most states that an exhaustive search weighs.
        max_selections: the most choices of products, fetches and accumulates that `cost_greedy` weighs a stage.
        limits: the most products, fetches and accumulates of one stage.
    """

    max_states: int = MAX_STATES
    max_selections: int = MAX_SELECTIONS
    limits: StageLimits = STAGE_LIMITS

    @classmethod
    def of(
        cls, graphs: Collection[ScheduleGraph], limits: StageLimits, max_states: int | None = None
    ) -> SearchEffort:
        """Return limits with which the searches of all graphs together take a second or two.

        Args:
            graphs: one graph per rank.
            limits: the most products, fetches and accumulates of one stage.
            max_states: the result's `max_states`; None to choose it by the number of products in the graphs.
        """
        num_products = max(1, sum(len(graph.products) for graph in set(graphs)))
        if max_states is None:
            max_states = min(MAX_STATES, max(1, _STATES // num_products))
        return cls(max_states, min(MAX_SELECTIONS, max(1, _SELECTIONS // num_products)), limits)


def schedule_graph(slicing: Slicing, rank: int, rates: RankRates) -> ScheduleGraph:
    """Return the graph to schedule for a rank: its steps are the products, its `remote_panels` the fetches.

    Both keep their order. `rates` of the machine give the seconds of products, fetches and accumulates.
    """
    steps = slicing.steps(rank)
    element_bytes, adds = dtype_bytes(slicing.problem.dtype), not needs_no_accumulate(slicing)

    def transfer_s(step: ProductStep, operand: Operand, *, accumulates: bool = False) -> float:
        return sum(
            rates.transfer_s(rank, block.owner, block.num_elements * element_bytes, accumulates=accumulates)
            for block in step.panels[operand].blocks
        )

    panels = remote_panels(steps, rank)
    needs: list[list[int]] = [[] for _ in steps]
    for fetch, (number, _) in enumerate(panels):
        needs[number].append(fetch)
    products = []
    for step, need in zip(steps, needs, strict=True):
        m, n, k = step.sizes
        accumulate_s = 0.0
        if slicing.config.stationary != "c":
            accumulate_s = transfer_s(step, "c", accumulates=adds)
        products.append(ProductNode(2 * m * n * k / rates.flops_per_s, tuple(need), accumulate_s))
    fetches = tuple(FetchNode(transfer_s(steps[number], operand)) for number, operand in panels)
    return ScheduleGraph(fetches, tuple(products))


def schedule_stages(
    kind: ScheduleKind, graph: ScheduleGraph, effort: SearchEffort = SearchEffort()
) -> tuple[IssueStage, ...]:
    """Return the stages into which the schedule `kind` divides one rank's fetches, products and accumulates.

    `effort` limits how long the search takes, and how many products and transfers a stage has.
    """
    if kind == "exhaustive":
        return exhaustive_search(graph, effort).stages
    return _heuristic_stages(kind, graph, effort.max_selections, effort.limits)


@lru_cache(maxsize=4096)
def exhaustive_search(graph: ScheduleGraph, effort: SearchEffort = SearchEffort()) -> ScheduleSearchResult:
    """Return the fastest stages that branch and bound finds for one rank's `graph` within the limits `effort`."""
    return exhaustive(
        graph, effort.limits, max_states=effort.max_states, max_selections=effort.max_selections
    )


@lru_cache(maxsize=1024)
def _heuristic_stages(
    kind: ScheduleKind, graph: ScheduleGraph, max_selections: int, limits: StageLimits
) -> tuple[IssueStage, ...]:
    if kind == "cost-greedy":
        return cost_greedy(graph, limits, max_selections)
    return (direct if kind == "direct" else greedy)(graph, limits)


@dataclass(frozen=True)
class StagedRule(IssueRule):
    """Steps stage by stage, as the schedule `kind` divides them; a search is limited for all graphs together."""

    kind: ScheduleKind

    def orders(self, slicing: Slicing, rates: RankRates) -> dict[int, IssueOrder]:
        """Return for each global rank its order, without the barriers between stages."""
        graphs = {rank: schedule_graph(slicing, rank, rates) for rank in slicing.problem.ranks}
        effort = SearchEffort.of(graphs.values(), slicing.config.limits)
        return {
            rank: flatten_stages(schedule_stages(self.kind, graph, effort)) for rank, graph in graphs.items()
        }

    def costs(self, slicing: Slicing, rank: int, rates: RankRates) -> ScheduleGraph:
        """Return the graph of a rank."""
        return schedule_graph(slicing, rank, rates)


GREEDY = StagedRule("greedy")
COST_GREEDY = StagedRule("cost-greedy")
EXHAUSTIVE = StagedRule("exhaustive")
