"""The order in which a rank fetches tiles, multiplies them, and accumulates what it made for others.

Slicing Is All You Need, section 4.3: the local products of a rank and the remote tiles that they need are a
bipartite graph. A schedule divides it into stages, each with some products and some transfers. A product needs
fetches of earlier stages, and its result is accumulated in a later one. So all of a stage runs at once, and it
takes max(compute, communication). The time of all stages is compute plus the communication that compute does not
hide. Reordering helps where tiles are misaligned, since long products may then hide long fetches. Direct
execution (section 4.2) has no stages: it runs the given order and waits for data only, not at barriers.
The paper found it almost always as good as the best stages.

The communication of a stage is the sum of its fetches and accumulates. A rank fetches inwards and accumulates
outwards, but all ranks do alike: what others accumulate comes in beside what this rank fetches, and they fetch
beside what it accumulates, so each direction of its link carries both. A fetched tile is
kept until its last product; memory is not counted.

This is pure combinatorics: tiles and products are numbers, all times are seconds, and the same input gives the
same output. Arguments out of range are mistakes of the calling code, and asserted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from itertools import combinations
from itertools import product as cartesian

from meshweave.algorithms.universal.config import StageLimits
from meshweave.algorithms.universal.issue_order import IssueOrder, Selection

ScheduleState = tuple[int, int, int]
"""Three bit sets: products done, tiles fetched, products whose results are accumulated."""


@dataclass(frozen=True)
class FetchNode:
    """A fetch of a remote tile that some products need; it takes `seconds`."""

    seconds: float


@dataclass(frozen=True)
class ProductNode:
    """A local product.

    Attributes:
        seconds: its compute time.
        needs: numbers of the fetches that must be done before it, as positions in `ScheduleGraph.fetches`.
            Operands in the rank's own memory need none.
        accumulate_s: the time to accumulate its result into a remote tile; 0 where the result is local.
    """

    seconds: float
    needs: tuple[int, ...]
    accumulate_s: float = 0.0


@dataclass(frozen=True)
class ScheduleGraph:
    """The local products of one rank, in the given order, and the remote tiles that they need.

    Products and tiles are numbered from 0. A state says what is done: three bit sets, of the products computed,
    the tiles fetched, and the products whose results are accumulated into remote tiles.

    Attributes:
        fetches: one for each remote tile, in the order of their numbers.
        products: in the order of their numbers.
    """

    fetches: tuple[FetchNode, ...]
    products: tuple[ProductNode, ...]

    def __post_init__(self) -> None:
        assert all(0 <= tile < len(self.fetches) for product in self.products for tile in product.needs)
        times = [fetch.seconds for fetch in self.fetches]
        times += [t for product in self.products for t in (product.seconds, product.accumulate_s)]
        assert all(0 <= t < math.inf for t in times)

    @cached_property
    def needed_fetches(self) -> Selection:
        """Return the numbers of the tiles that at least one product needs, in the order of first use."""
        return tuple(dict.fromkeys(tile for product in self.products for tile in product.needs))

    @cached_property
    def accumulating(self) -> Selection:
        """Return the numbers of the products whose results belong to remote tiles, and take time to accumulate."""
        return tuple(i for i, product in enumerate(self.products) if product.accumulate_s > 0)

    @cached_property
    def needs(self) -> tuple[int, ...]:
        """Return for each product the tiles that it needs, as an integer in which their bits are set."""
        return tuple(bit_set(product.needs) for product in self.products)

    def ready(self, state: ScheduleState) -> list[int]:
        """Return the numbers of the products that are not computed yet and whose tiles are all fetched."""
        return [i for i, need in enumerate(self.needs) if not (state[0] >> i & 1 or need & ~state[1])]

    def unfetched(self, state: ScheduleState) -> list[int]:
        """Return the numbers of the tiles that are still to be fetched, in the order of first use."""
        return [tile for tile in self.needed_fetches if not state[1] >> tile & 1]

    def unaccumulated(self, state: ScheduleState) -> list[int]:
        """Return the numbers of the computed products whose results are still to be accumulated."""
        return [i for i in self.accumulating if state[0] >> i & 1 and not state[2] >> i & 1]


@dataclass(frozen=True)
class IssueStage:
    """Numbers of products, fetches and accumulates that run at once. An accumulate has its product's number."""

    products: Selection
    fetches: Selection
    accumulates: Selection


def stage_s(stage: IssueStage, graph: ScheduleGraph) -> float:
    """Return the seconds of one stage: the larger of its products' time and its transfers' time.

    The time of its fetches and accumulates is added up.
    """
    fetch_s = sum(graph.fetches[i].seconds for i in stage.fetches)
    accumulate_s = sum(graph.products[i].accumulate_s for i in stage.accumulates)
    compute_s = sum(graph.products[i].seconds for i in stage.products)
    return max(compute_s, fetch_s + accumulate_s)


def staged_s(stages: Iterable[IssueStage], graph: ScheduleGraph) -> float:
    """Return the seconds that all stages take together, one after another (the sum of `stage_s`)."""
    return math.fsum(stage_s(stage, graph) for stage in stages)


def flatten_stages(stages: Sequence[IssueStage]) -> IssueOrder:
    """Return the issue order of a schedule: stage after stage, without the barriers between them."""
    return IssueOrder(
        tuple(tile for stage in stages for tile in stage.fetches),
        tuple(product for stage in stages for product in stage.products),
        tuple(product for stage in stages for product in stage.accumulates),
    )


def direct(graph: ScheduleGraph, limits: StageLimits) -> tuple[IssueStage, ...]:
    """Return stages that compute the products in the graph's order (section 4.2), as many as `limits` allow.

    A stage fetches the next tiles that will be needed.
    """

    def pick(state: ScheduleState) -> IssueStage:
        ready, following = graph.ready(state), unset(state[0], len(graph.products))
        # A product whose tiles are here still waits for those before it.
        count = next((n for n, i in enumerate(following) if i not in ready), len(following))
        return _filled(graph, state, following[: min(count, limits.products)], limits)

    return _stages(graph, pick)


def greedy(graph: ScheduleGraph, limits: StageLimits) -> tuple[IssueStage, ...]:
    """Return stages of the first products whose tiles are there, and the first fetches and accumulates.

    Each stage has as many of them as `limits` allow (greedy scheduling, section 4.3).
    """
    return _stages(graph, lambda state: _filled(graph, state, graph.ready(state)[: limits.products], limits))


MAX_SELECTIONS = 2000
"""The most selections that `cost_greedy` weighs per stage unless told otherwise; if there are more, it takes the
first items only."""


def cost_greedy(
    graph: ScheduleGraph, limits: StageLimits, max_selections: int = MAX_SELECTIONS
) -> tuple[IssueStage, ...]:
    """Return stages, each chosen so that its compute and communication times differ least (section 4.3).

    A stage has as many products, fetches and accumulates as `limits` allow. Preferred are choices after which some
    product has all its tiles, then those of the least difference, then those of the longest stage. If a stage has
    more than `max_selections` choices, only choices among the first products and transfers are compared.
    """

    def pick(state: ScheduleState) -> IssueStage:
        pools = [graph.ready(state), graph.unfetched(state), graph.unaccumulated(state)]
        sizes = [min(len(pool), most) for pool, most in zip(pools, astuple(limits), strict=True)]
        width = max(map(len, pools))
        while width > max(sizes) and _num_selections(pools, sizes, width) > max_selections:
            width -= 1
        best: tuple[tuple[bool, float, float], IssueStage] | None = None
        for products, fetches, accumulates in cartesian(
            *(list(combinations(pool[:width], size)) for pool, size in zip(pools, sizes, strict=True))
        ):
            stage = IssueStage(products, fetches, accumulates)
            following = next_state(state, stage)
            compute_s = sum(graph.products[i].seconds for i in products)
            transfer_s = stage_s(IssueStage((), fetches, accumulates), graph)
            stalls = following[0].bit_count() < len(graph.products) and not graph.ready(following)
            score = (stalls, abs(compute_s - transfer_s), -stage_s(stage, graph))
            if best is None or score < best[0]:
                best = score, stage
        assert best is not None
        return best[1]

    return _stages(graph, pick)


def _stages(graph: ScheduleGraph, pick: Callable[[ScheduleState], IssueStage]) -> tuple[IssueStage, ...]:
    """Return stage after stage as `pick` chooses, until all is done."""
    state, stages = (0, 0, 0), []
    while unset(state[0], len(graph.products)) or graph.unaccumulated(state):
        stage = pick(state)
        assert stage.products or stage.fetches or stage.accumulates
        stages.append(stage)
        state = next_state(state, stage)
    return tuple(stages)


def _filled(
    graph: ScheduleGraph, state: ScheduleState, products: Sequence[int], limits: StageLimits
) -> IssueStage:
    """Return a stage of these products and the earliest transfers."""
    fetches = graph.unfetched(state)[: limits.fetches]
    accumulates = graph.unaccumulated(state)[: limits.accumulates]
    return IssueStage(tuple(products), tuple(fetches), tuple(accumulates))


def _num_selections(pools: Sequence[Sequence[int]], sizes: Sequence[int], width: int) -> int:
    """Return how many full selections there are of the first `width` items of each pool."""
    return math.prod(math.comb(min(len(pool), width), size) for pool, size in zip(pools, sizes, strict=True))


def next_state(state: ScheduleState, stage: IssueStage) -> ScheduleState:
    """Return the state after a stage: bit sets of products computed, tiles fetched and results accumulated."""
    return (
        state[0] | bit_set(stage.products),
        state[1] | bit_set(stage.fetches),
        state[2] | bit_set(stage.accumulates),
    )


def bit_set(numbers: Iterable[int]) -> int:
    """Return the integer in which the bits with these numbers are set: [0, 3] -> 9."""
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return bits


def unset(bits: int, count: int) -> list[int]:
    """Return the numbers of the bits that are 0 among the lowest `count` bits: (9, 4) -> [1, 2]."""
    return [i for i in range(count) if not bits >> i & 1]
