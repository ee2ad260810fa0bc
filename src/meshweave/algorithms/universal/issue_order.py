"""From slices to a schedule, and from a schedule to what a rank issues in which order (section 4.3).

Each step is a product, each of its panels that does not lie in one piece with the rank a tile. The order in which
a schedule fetches, multiplies and accumulates is kept on the three lanes of the program; its stages are not
barriers there. A panel gets the slot of its scratch buffer that is free for longest. There are as many slots as
the order needs where every fetch comes as late as it can, and `prefetch` more, by which fetches run ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshweave.algorithms.universal.problem import OPERANDS, Operand
from meshweave.algorithms.universal.schedule import (
    FetchNode,
    ScheduleGraph,
    StageLimits,
    ProductNode,
    IssueOrder,
    Stage,
    cost_greedy,
    direct,
    greedy,
    flatten_stages,
)
from meshweave.algorithms.universal.schedule_search import exhaustive
from meshweave.algorithms.universal.slicing import Slicing, ProductStep
from meshweave.base.errors import UnsupportedError
from meshweave.base.units import dtype_bytes
from meshweave.cost.rates import RankRates

STAGE_LIMITS = StageLimits()
MAX_STATES = 20_000
"""Of an exhaustive search: the best that was met within so many is taken, the same on every machine."""

PanelKey = tuple[int, Operand]
"""A panel that is not at hand: the number of its step, and the matrix."""


def needs_no_accumulate(slicing: Slicing) -> bool:
    """Whether every element of C is the result of one product of one rank, so that nothing is to be added."""
    stationary = slicing.config.stationary
    still = slicing.matrices[stationary]
    inner = still.dims[1 if stationary == "a" else 0]
    filled = sum(inner.size(number) > 0 for number in range(len(inner.classes)))
    return filled == 1 and still.num_terms * slicing.matrices["c"].num_terms == 1


def remote_panels(steps: Sequence[ProductStep], rank: int) -> tuple[PanelKey, ...]:
    """The panels of A and B that need scratch, in the order of steps."""
    return tuple(
        (number, operand)
        for number, step in enumerate(steps)
        for operand in OPERANDS[:2]
        if not step.panels[operand].is_local_to(rank)
    )


def schedule_graph(slicing: Slicing, rank: int, rates: RankRates, *, duplex: bool = False) -> ScheduleGraph:
    """A rank's steps as products and the panels that they need as tiles, numbered as in `tiles`."""
    steps = slicing.steps(rank)
    element, adds = dtype_bytes(slicing.problem.dtype), not needs_no_accumulate(slicing)

    def seconds(step: ProductStep, operand: Operand, *, adds: bool = False) -> float:
        blocks = step.panels[operand].blocks
        return sum(
            rates.transfer_s(rank, one.owner, one.num_elements * element, accumulates=adds) for one in blocks
        )

    wanted = remote_panels(steps, rank)
    needs: list[list[int]] = [[] for _ in steps]
    for tile, (number, _) in enumerate(wanted):
        needs[number].append(tile)
    products = []
    for step, need in zip(steps, needs, strict=True):
        m, n, k = step.sizes
        gives = 0.0 if slicing.config.stationary == "c" else seconds(step, "c", adds=adds)
        products.append(ProductNode(2 * m * n * k / rates.flops_per_s, tuple(need), gives))
    fetches = tuple(FetchNode(seconds(steps[number], operand)) for number, operand in wanted)
    return ScheduleGraph(fetches, tuple(products), duplex)


def direct_order(steps: Sequence[ProductStep], rank: int) -> IssueOrder:
    """Direct execution (section 4.2): steps as they are listed."""
    numbers = tuple(range(len(steps)))
    return IssueOrder(tuple(range(len(remote_panels(steps, rank)))), numbers, numbers)


def issue_order(slicing: Slicing, rank: int) -> IssueOrder:
    """In which order a rank does its steps by the schedule that was chosen. Raises UnsupportedError for a schedule
    by costs, of a choice without rates."""
    choice = slicing.config
    if choice.schedule == "direct":
        return direct_order(slicing.steps(rank), rank)
    if choice.rates is None:
        raise UnsupportedError(f"schedule '{choice.schedule}' needs rates; give the choice some, too")
    return flatten_stages(_scheduled(choice.schedule, schedule_graph(slicing, rank, choice.rates)))


@lru_cache(maxsize=1024)
def _scheduled(schedule: str, of: ScheduleGraph) -> tuple[Stage, ...]:
    if schedule == "exhaustive":
        return exhaustive(of, STAGE_LIMITS, max_states=MAX_STATES).stages
    make: Mapping[str, Callable[[ScheduleGraph, StageLimits], tuple[Stage, ...]]] = {
        "direct": direct, "greedy": greedy, "cost-greedy": cost_greedy
    }  # fmt: skip
    return make[schedule](of, STAGE_LIMITS)


@dataclass(frozen=True)
class IssueStep:
    """A product, the fetches that stand before it, and the steps whose results are given after it; `slots` are
    those of scratch in which panels lie, of all that it names."""

    fetches: tuple[PanelKey, ...]
    step: int
    accumulates: tuple[int, ...]
    slots: Mapping[PanelKey, int]


def issue_steps(steps: Sequence[ProductStep], rank: int, issue: IssueOrder, away: Sequence[bool], prefetch: int) -> list[IssueStep]:
    """What a rank issues. Every order makes a right program: a fetch stands before the product that needs it, and
    with it those that the order has before; likewise results.

    `away` says of each step whether its result is made in scratch.
    """
    events = _events(remote_panels(steps, rank), issue, away)
    free = {operand: deque(range(_most(events, operand) + prefetch)) for operand in OPERANDS}
    slots: dict[PanelKey, int] = {}
    out: list[IssueStep] = []
    for event in events:
        for tile in event.begins:
            slots[tile] = free[tile[1]].popleft()
        named = {*event.fetches, *event.begins, *event.ends}
        out.append(
            IssueStep(event.fetches, event.step, event.accumulates, {tile: slots[tile] for tile in sorted(named)})
        )
        for tile in event.ends:
            free[tile[1]].append(slots[tile])
    return out


@dataclass(frozen=True)
class _SlotEvent:
    """A turn, and the panels whose time in scratch begins before or with its product, and ends after."""

    fetches: tuple[PanelKey, ...]
    step: int
    accumulates: tuple[int, ...]
    begins: tuple[PanelKey, ...]
    ends: tuple[PanelKey, ...]


def _events(wanted: Sequence[PanelKey], issue: IssueOrder, away: Sequence[bool]) -> list[_SlotEvent]:
    missing = set(wanted)
    needed = set(wanted)
    fetches, gives = deque(issue.fetches), deque(step for step in issue.accumulates if away[step])
    listed, done = set(gives), set[int]()
    out: list[_SlotEvent] = []
    for step in issue.products:
        operands: list[PanelKey] = [(step, operand) for operand in OPERANDS[:2] if (step, operand) in needed]
        before: list[PanelKey] = []
        while missing.intersection(operands):
            before.append(wanted[fetches.popleft()])
            missing.remove(before[-1])
        done.add(step)
        after = [step] if away[step] and step not in listed else []
        while gives and gives[0] in done:
            after.append(gives.popleft())
        begins = (*before, (step, "c")) if away[step] else tuple(before)
        ends = (*operands, *((other, "c") for other in after))
        out.append(_SlotEvent(tuple(before), step, tuple(after), begins, ends))
    assert not missing and not gives
    return out


def _most(events: Sequence[_SlotEvent], operand: Operand) -> int:
    """The most panels of a matrix that are in scratch at once, at least 1."""
    now, most = 0, 1
    for event in events:
        now += sum(tile[1] == operand for tile in event.begins)
        most = max(most, now)
        now -= sum(tile[1] == operand for tile in event.ends)
    return most
