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
    Fetch,
    Graph,
    Limits,
    LocalProduct,
    Order,
    Stage,
    cost_greedy,
    direct,
    greedy,
    order,
)
from meshweave.algorithms.universal.schedule_search import exhaustive
from meshweave.algorithms.universal.slicing import Slicing, Step
from meshweave.base.errors import UnsupportedError
from meshweave.base.units import dtype_bytes
from meshweave.cost.rates import RankRates

LIMITS = Limits()
MAX_STATES = 20_000
"""Of an exhaustive search: the best that was met within so many is taken, the same on every machine."""

Tile = tuple[int, Operand]
"""A panel that is not at hand: the number of its step, and the matrix."""


def is_single(slicing: Slicing) -> bool:
    """Whether every element of C is the result of one product of one rank, so that nothing is to be added."""
    stationary = slicing.choice.stationary
    still = slicing.matrices[stationary]
    inner = still.dims[1 if stationary == "a" else 0]
    filled = sum(inner.size(number) > 0 for number in range(len(inner.classes)))
    return filled == 1 and still.num_terms * slicing.matrices["c"].num_terms == 1


def tiles(steps: Sequence[Step], rank: int) -> tuple[Tile, ...]:
    """The panels of A and B that need scratch, in the order of steps."""
    return tuple(
        (number, operand)
        for number, step in enumerate(steps)
        for operand in OPERANDS[:2]
        if not step.panels[operand].lies_with(rank)
    )


def graph(slicing: Slicing, rank: int, rates: RankRates, *, duplex: bool = False) -> Graph:
    """A rank's steps as products and the panels that they need as tiles, numbered as in `tiles`."""
    steps = slicing.steps(rank)
    element, adds = dtype_bytes(slicing.problem.dtype), not is_single(slicing)

    def seconds(step: Step, operand: Operand, *, adds: bool = False) -> float:
        blocks = step.panels[operand].blocks
        return sum(
            rates.transfer_s(rank, one.owner, one.num_elements * element, accumulates=adds) for one in blocks
        )

    wanted = tiles(steps, rank)
    needs: list[list[int]] = [[] for _ in steps]
    for tile, (number, _) in enumerate(wanted):
        needs[number].append(tile)
    products = []
    for step, need in zip(steps, needs, strict=True):
        m, n, k = step.sizes
        gives = 0.0 if slicing.choice.stationary == "c" else seconds(step, "c", adds=adds)
        products.append(LocalProduct(2 * m * n * k / rates.flops_per_s, tuple(need), gives))
    fetches = tuple(Fetch(seconds(steps[number], operand)) for number, operand in wanted)
    return Graph(fetches, tuple(products), duplex)


def given_order(steps: Sequence[Step], rank: int) -> Order:
    """Direct execution (section 4.2): steps as they are listed."""
    numbers = tuple(range(len(steps)))
    return Order(tuple(range(len(tiles(steps, rank)))), numbers, numbers)


def issue_order(slicing: Slicing, rank: int) -> Order:
    """In which order a rank does its steps by the schedule that was chosen. Raises UnsupportedError for a schedule
    by costs, of a choice without rates."""
    choice = slicing.choice
    if choice.schedule == "direct":
        return given_order(slicing.steps(rank), rank)
    if choice.rates is None:
        raise UnsupportedError(f"schedule '{choice.schedule}' needs rates; give the choice some, too")
    return order(_scheduled(choice.schedule, graph(slicing, rank, choice.rates)))


@lru_cache(maxsize=1024)
def _scheduled(schedule: str, of: Graph) -> tuple[Stage, ...]:
    if schedule == "exhaustive":
        return exhaustive(of, LIMITS, max_states=MAX_STATES).stages
    make: Mapping[str, Callable[[Graph, Limits], tuple[Stage, ...]]] = {
        "direct": direct, "greedy": greedy, "cost-greedy": cost_greedy
    }  # fmt: skip
    return make[schedule](of, LIMITS)


@dataclass(frozen=True)
class Turn:
    """A product, the fetches that stand before it, and the steps whose results are given after it; `slots` are
    those of scratch in which panels lie, of all that it names."""

    fetches: tuple[Tile, ...]
    step: int
    gives: tuple[int, ...]
    slots: Mapping[Tile, int]


def turns(steps: Sequence[Step], rank: int, issue: Order, away: Sequence[bool], prefetch: int) -> list[Turn]:
    """What a rank issues. Every order makes a right program: a fetch stands before the product that needs it, and
    with it those that the order has before; likewise results.

    `away` says of each step whether its result is made in scratch.
    """
    events = _events(tiles(steps, rank), issue, away)
    free = {operand: deque(range(_most(events, operand) + prefetch)) for operand in OPERANDS}
    slots: dict[Tile, int] = {}
    out: list[Turn] = []
    for event in events:
        for tile in event.begins:
            slots[tile] = free[tile[1]].popleft()
        named = {*event.fetches, *event.begins, *event.ends}
        out.append(
            Turn(event.fetches, event.step, event.gives, {tile: slots[tile] for tile in sorted(named)})
        )
        for tile in event.ends:
            free[tile[1]].append(slots[tile])
    return out


@dataclass(frozen=True)
class _Event:
    """A turn, and the panels whose time in scratch begins before or with its product, and ends after."""

    fetches: tuple[Tile, ...]
    step: int
    gives: tuple[int, ...]
    begins: tuple[Tile, ...]
    ends: tuple[Tile, ...]


def _events(wanted: Sequence[Tile], issue: Order, away: Sequence[bool]) -> list[_Event]:
    missing = set(wanted)
    needed = set(wanted)
    fetches, gives = deque(issue.fetches), deque(step for step in issue.gives if away[step])
    listed, done = set(gives), set[int]()
    out: list[_Event] = []
    for step in issue.products:
        operands: list[Tile] = [(step, operand) for operand in OPERANDS[:2] if (step, operand) in needed]
        before: list[Tile] = []
        while missing.intersection(operands):
            before.append(wanted[fetches.popleft()])
            missing.remove(before[-1])
        done.add(step)
        after = [step] if away[step] and step not in listed else []
        while gives and gives[0] in done:
            after.append(gives.popleft())
        begins = (*before, (step, "c")) if away[step] else tuple(before)
        ends = (*operands, *((other, "c") for other in after))
        out.append(_Event(tuple(before), step, tuple(after), begins, ends))
    assert not missing and not gives
    return out


def _most(events: Sequence[_Event], operand: Operand) -> int:
    """The most panels of a matrix that are in scratch at once, at least 1."""
    now, most = 0, 1
    for event in events:
        now += sum(tile[1] == operand for tile in event.begins)
        most = max(most, now)
        now -= sum(tile[1] == operand for tile in event.ends)
    return most
