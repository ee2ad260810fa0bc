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


PanelKey = tuple[int, Operand]
"""The number of a step, and one of its matrices."""


def needs_no_accumulate(slicing: Slicing) -> bool:
    """Return whether every element of C is the result of one product of one rank, so that nothing is added to it.

    The result has a meaning only if A or B is stationary, not if C is.
    """
    stationary = slicing.config.stationary
    matrix = slicing.matrices[stationary]
    inner = matrix.dims[1 if stationary == "a" else 0]
    num_filled = sum(inner.size(number) > 0 for number in range(len(inner.classes)))
    return num_filled == 1 and matrix.num_terms * slicing.matrices["c"].num_terms == 1


def remote_panels(steps: Sequence[ProductStep], rank: int) -> tuple[PanelKey, ...]:
    """Return the panels that a rank copies into scratch, as (position in `steps`, "a" or "b").

    They are all but those that are one block of the rank's own shard. They are in the order of steps, "a" before
    "b"; the position of a panel in the result is the number of its fetch in schedules.
    """
    return tuple(
        (number, operand)
        for number, step in enumerate(steps)
        for operand in OPERANDS[:2]
        if not step.panels[operand].is_local_to(rank)
    )


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


def direct_order(steps: Sequence[ProductStep], rank: int) -> IssueOrder:
    """Return the order of direct execution (section 4.2): fetches, products and accumulates follow the steps.

    Fetches are those of `remote_panels(steps, rank)`. Every step is listed as an accumulate.
    """
    numbers = tuple(range(len(steps)))
    return IssueOrder(tuple(range(len(remote_panels(steps, rank)))), numbers, numbers)


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


def issue_orders(slicing: Slicing) -> dict[int, IssueOrder]:
    """Return for each global rank the order of its fetches, products and accumulates by the config's schedule.

    Products and accumulates are numbered as the steps of `slicing.steps(rank)`, fetches as the panels of
    `remote_panels`.

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
        fetches: the panels that are fetched, as (number of a step, "a" or "b").
        step: number of the step whose product is computed.
        accumulates: numbers of the steps whose results are accumulated.
        slots: for each panel in scratch that is written or read here, (number of a step, "a", "b" or "c"), the
            number of its scratch slot. Panel "c" of a step is its result.
    """

    fetches: tuple[PanelKey, ...]
    step: int
    accumulates: tuple[int, ...]
    slots: Mapping[PanelKey, int]


def issue_steps(
    steps: Sequence[ProductStep], rank: int, order: IssueOrder, in_scratch: Sequence[bool], prefetch: int
) -> list[IssueStep]:
    """Return the steps of a rank in the order of issue, with their fetches, accumulates and scratch slots.

    Any `order` gives a correct program: a fetch is issued before the first product that needs its panel, together
    with all fetches that `order` lists before it, and an accumulate after the product of its step.

    Args:
        steps: the steps of `rank`, as `Slicing.steps` lists them.
        in_scratch: for each step whether its result is computed in scratch.
        prefetch: scratch slots per matrix beyond those that `order` needs, so that fetches can be issued earlier.
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
