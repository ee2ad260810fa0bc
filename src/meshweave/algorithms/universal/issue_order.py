"""What a rank of a universal product issues in which order, and in which slots of scratch its panels lie.

Slicing Is All You Need, sections 4.2 and 4.3. Steps are issued as they are listed ("direct"), or as a rule of
another schedule says (`IssueRule`). The order in which a schedule fetches, multiplies and accumulates is kept on
the three lanes of the program. A panel gets the slot of its scratch buffer that is free for longest. There are as
many slots as the order needs where every fetch comes as late as it can, and `prefetch` more, by which fetches run
ahead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from meshweave.algorithms.universal.config import ScheduleKind
from meshweave.algorithms.universal.panels import ProductStep
from meshweave.algorithms.universal.problem import OPERANDS, Operand
from meshweave.algorithms.universal.slicing import Slicing
from meshweave.base.errors import UnsupportedError
from meshweave.base.installed import offered_by_ours
from meshweave.cost.rates import RankRates

ENTRY_POINTS = "meshweave.issue_rules"
"""The group of entry points under which `meshweave-studies` offers the rule of each schedule but "direct"."""

Selection = tuple[int, ...]
"""Numbers of products, or of fetches."""


@dataclass(frozen=True)
class IssueOrder:
    """The order in which a rank issues its fetches, its products and its accumulates, each in a lane of its own.

    Entries are numbers of fetches and of products; an accumulate has the number of its product.
    """

    fetches: Selection
    products: Selection
    accumulates: Selection


class IssueRule(ABC):
    """The rule by which a schedule orders the steps of ranks by what they cost."""

    @abstractmethod
    def orders(self, slicing: Slicing, rates: RankRates) -> dict[int, IssueOrder]:
        """Return for each global rank the order of its steps, numbered as by `issue_orders`."""

    @abstractmethod
    def costs(self, slicing: Slicing, rank: int, rates: RankRates) -> object:
        """Return what the order of a rank follows from: where it is equal for two ranks, so are their orders."""


@cache
def rule_of(kind: ScheduleKind) -> IssueRule:
    """Return the rule of a schedule other than "direct".

    Raises:
        UnsupportedError: the package that has it is not installed.
    """
    rule: IssueRule = offered_by_ours(ENTRY_POINTS, kind)
    return rule


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


def direct_order(steps: Sequence[ProductStep], rank: int) -> IssueOrder:
    """Return the order of direct execution (section 4.2): fetches, products and accumulates follow the steps.

    Fetches are those of `remote_panels(steps, rank)`. Every step is listed as an accumulate.
    """
    numbers = tuple(range(len(steps)))
    return IssueOrder(tuple(range(len(remote_panels(steps, rank)))), numbers, numbers)


def issue_orders(slicing: Slicing) -> dict[int, IssueOrder]:
    """Return for each global rank the order of its fetches, products and accumulates by the config's schedule.

    Products and accumulates are numbered as the steps of `slicing.steps(rank)`, fetches as the panels of
    `remote_panels`.

    Raises:
        UnsupportedError: the schedule is not "direct", and the config has no rates or the schedule's package is
            not installed (`rule_of`).
    """
    config, ranks = slicing.config, slicing.problem.ranks
    if config.schedule == "direct":
        return {rank: direct_order(slicing.steps(rank), rank) for rank in ranks}
    if config.rates is None:
        raise UnsupportedError(f"schedule '{config.schedule}' needs rates; give the choice some, too")
    return rule_of(config.schedule).orders(slicing, config.rates)


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
