"""What a rank of a universal product issues in which order: from its steps to a schedule, and from that to lanes.

Slicing Is All You Need, section 4.3. In the graph of a schedule each step is a product, and each of its panels
that is not one block of the rank's own memory a fetch. The order in which a schedule fetches, multiplies and
accumulates is kept on the three lanes of the program; its stages are no barriers there. A panel gets the slot of
its scratch buffer that is free for longest. There are as many slots as the order needs where every fetch comes as
late as it can, and `prefetch` more, by which fetches run ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshweave.algorithms.universal.config import ScheduleKind
from meshweave.algorithms.universal.panels import ProductStep
from meshweave.algorithms.universal.problem import OPERANDS, Operand
from meshweave.algorithms.universal.schedule import (
    MAX_SELECTIONS,
    STAGE_LIMITS,
    FetchNode,
    IssueOrder,
    IssueStage,
    ProductNode,
    ScheduleGraph,
    StageLimits,
    cost_greedy,
    direct,
    flatten_stages,
    greedy,
)
from meshweave.algorithms.universal.schedule_search import ScheduleSearchResult, exhaustive
from meshweave.algorithms.universal.slicing import Slicing
from meshweave.base.errors import UnsupportedError
from meshweave.base.units import dtype_bytes
from meshweave.cost.rates import RankRates

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
        """Return an effort for which the searches of all graphs, one per rank, take a second or two together.

        Args:
            limits: of one stage.
            max_states: replaces the number of states that follows from the graphs.
        """
        num_products = max(1, sum(len(graph.products) for graph in set(graphs)))
        if max_states is None:
            max_states = min(MAX_STATES, max(1, _STATES // num_products))
        return cls(max_states, min(MAX_SELECTIONS, max(1, _SELECTIONS // num_products)), limits)


PanelKey = tuple[int, Operand]
"""The number of a step, and one of its matrices."""


def needs_no_accumulate(slicing: Slicing) -> bool:
    """Return whether every element of C is the result of one product of one rank, so that nothing is added.

    Asked only where A or B is stationary; for a stationary C the answer means nothing.
    """
    stationary = slicing.config.stationary
    matrix = slicing.matrices[stationary]
    inner = matrix.dims[1 if stationary == "a" else 0]
    num_filled = sum(inner.size(number) > 0 for number in range(len(inner.classes)))
    return num_filled == 1 and matrix.num_terms * slicing.matrices["c"].num_terms == 1


def remote_panels(steps: Sequence[ProductStep], rank: int) -> tuple[PanelKey, ...]:
    """Return the panels of A and B that a rank needs scratch for, each as (number of its step, "a" or "b").

    They are in the order of steps, "a" before "b". The position of a panel is the number of its fetch.
    """
    return tuple(
        (number, operand)
        for number, step in enumerate(steps)
        for operand in OPERANDS[:2]
        if not step.panels[operand].is_local_to(rank)
    )


def schedule_graph(slicing: Slicing, rank: int, rates: RankRates) -> ScheduleGraph:
    """Return a rank's graph: its steps as products, and its `remote_panels` as fetches, in that order.

    Args:
        rates: from which the seconds of products, fetches and accumulates follow.
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


def direct_order(steps: Sequence[ProductStep], rank: int) -> IssueOrder:
    """Return the order of direct execution (section 4.2): all three lanes go through the steps in turn."""
    numbers = tuple(range(len(steps)))
    return IssueOrder(tuple(range(len(remote_panels(steps, rank)))), numbers, numbers)


def schedule_stages(
    kind: ScheduleKind, graph: ScheduleGraph, effort: SearchEffort = SearchEffort()
) -> tuple[IssueStage, ...]:
    """Return the stages that the schedule `kind` makes of one rank's fetches, products and accumulates.

    `effort` limits the search, and what one stage has.
    """
    if kind == "exhaustive":
        return exhaustive_search(graph, effort).stages
    return _heuristic_stages(kind, graph, effort.max_selections, effort.limits)


@lru_cache(maxsize=4096)
def exhaustive_search(graph: ScheduleGraph, effort: SearchEffort = SearchEffort()) -> ScheduleSearchResult:
    """Return the fastest stages that branch and bound finds for one rank's `graph`, within limits `effort`."""
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


def issue_orders(slicing: Slicing) -> dict[int, IssueOrder]:
    """Return for each rank the order of its fetches, products and accumulates by the schedule of the config.

    Products and accumulates have the numbers of steps, fetches those of `remote_panels`.

    Raises:
        UnsupportedError: the schedule is not "direct", and the config has no rates.
    """
    config, ranks = slicing.config, slicing.problem.ranks
    if config.schedule == "direct":
        return {rank: direct_order(slicing.steps(rank), rank) for rank in ranks}
    if config.rates is None:
        raise UnsupportedError(f"schedule '{config.schedule}' needs rates; give the choice some, too")
    graphs = {rank: schedule_graph(slicing, rank, config.rates) for rank in ranks}
    effort = SearchEffort.of(graphs.values(), config.limits)
    return {
        rank: flatten_stages(schedule_stages(config.schedule, graph, effort))
        for rank, graph in graphs.items()
    }


@dataclass(frozen=True)
class IssueStep:
    """A product with the fetches issued before it and the accumulates issued after it.

    Attributes:
        fetches: the panels that are fetched.
        step: the number of the product's step.
        accumulates: the steps whose results are accumulated.
        slots: the number of the scratch slot of each panel in scratch that these fetches, the product and the
            accumulates write or read. The panel "c" of a step is its result.
    """

    fetches: tuple[PanelKey, ...]
    step: int
    accumulates: tuple[int, ...]
    slots: Mapping[PanelKey, int]


def issue_steps(
    steps: Sequence[ProductStep], rank: int, order: IssueOrder, in_scratch: Sequence[bool], prefetch: int
) -> list[IssueStep]:
    """Return the steps of a rank in the order of issue, with their fetches, accumulates and scratch slots.

    Every order makes a correct program. A fetch stands before the first product that needs it, and with it
    all fetches that the order has before it. Likewise, an accumulate stands after the product of its step.

    Args:
        in_scratch: for each step whether its result is computed in scratch.
        prefetch: slots per matrix beyond those that the order needs, by which fetches can run ahead.
    """
    lifetimes = _panel_lifetimes(remote_panels(steps, rank), order, in_scratch)
    free = {operand: deque(range(_max_in_scratch(lifetimes, operand) + prefetch)) for operand in OPERANDS}
    slots: dict[PanelKey, int] = {}
    issued: list[IssueStep] = []
    for step in lifetimes:
        for panel in step.begins:
            slots[panel] = free[panel[1]].popleft()
        named = sorted({*step.fetches, *step.begins, *step.ends})
        issued.append(
            IssueStep(step.fetches, step.step, step.accumulates, {panel: slots[panel] for panel in named})
        )
        for panel in step.ends:
            free[panel[1]].append(slots[panel])
    return issued


@dataclass(frozen=True)
class _PanelLifetimes:
    """An issue step without slots, and the panels whose time in scratch begins before or with its product, and
    ends after."""

    fetches: tuple[PanelKey, ...]
    step: int
    accumulates: tuple[int, ...]
    begins: tuple[PanelKey, ...]
    ends: tuple[PanelKey, ...]


def _panel_lifetimes(
    panels: Sequence[PanelKey], order: IssueOrder, in_scratch: Sequence[bool]
) -> list[_PanelLifetimes]:
    remote, unfetched = set(panels), set(panels)
    fetches = deque(order.fetches)
    accumulates = deque(step for step in order.accumulates if in_scratch[step])
    listed, done = set(accumulates), set[int]()
    lifetimes: list[_PanelLifetimes] = []
    for step in order.products:
        operands: list[PanelKey] = [(step, operand) for operand in OPERANDS[:2] if (step, operand) in remote]
        before: list[PanelKey] = []
        while unfetched.intersection(operands):
            before.append(panels[fetches.popleft()])
            unfetched.remove(before[-1])
        done.add(step)
        after = [step] if in_scratch[step] and step not in listed else []
        while accumulates and accumulates[0] in done:
            after.append(accumulates.popleft())
        begins = (*before, (step, "c")) if in_scratch[step] else tuple(before)
        ends = (*operands, *((number, "c") for number in after))
        lifetimes.append(_PanelLifetimes(tuple(before), step, tuple(after), begins, ends))
    assert not unfetched and not accumulates
    return lifetimes


def _max_in_scratch(lifetimes: Sequence[_PanelLifetimes], operand: Operand) -> int:
    """Return the most panels of a matrix that are in scratch at once, at least 1."""
    count, most = 0, 1
    for step in lifetimes:
        count += sum(panel[1] == operand for panel in step.begins)
        most = max(most, count)
        count -= sum(panel[1] == operand for panel in step.ends)
    return most
