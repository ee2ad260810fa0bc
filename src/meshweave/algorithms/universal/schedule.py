"""The order in which a rank fetches tiles, multiplies them, and accumulates what it made for others.

Slicing Is All You Need, section 4.3: the local products of a rank and the remote tiles that they need are a
bipartite graph, lowered to stages, each some products beside some transfers. A product needs fetches of
EARLIER stages, and its result is accumulated in a LATER one, so all of a stage runs at once and it takes
max(compute, communication). The sum over all stages is compute plus what communication sticks out of it:
reordering gains where tiles are misaligned, so that long products may hide long fetches. Section 4.2 has no
stages: it runs the given order and waits for data only, so that nothing is a barrier. `pipelined` is its time, to
be compared with the `cost` of stages; the paper found it almost always as good as their optimum.

Communication of a stage is the SUM of its fetches and accumulations. A rank fetches inwards and accumulates
outwards, but all ranks do alike: what others accumulate comes in where this rank fetches, and they fetch
where it accumulates, so each direction carries both. A `duplex` graph counts the longer of the two instead,
which is right where the other ranks do not. Either way a fetched tile is kept until its last product, and no
stage counts memory.

Pure combinatorics: tiles and products are numbers, all times are seconds, and the same input gives the same
output. Numbers and limits that make no sense are mistakes of the caller's code, and asserted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from itertools import accumulate, combinations
from itertools import product as cartesian

ScheduleState = tuple[int, int, int]
"""Bit sets: products done, tiles fetched, products whose results are accumulated."""

Selection = tuple[int, ...]


@dataclass(frozen=True)
class FetchNode:
    """A remote tile that some products need: its bytes over the bandwidth between the two ranks."""

    seconds: float


@dataclass(frozen=True)
class ProductNode:
    """`needs` are numbers of fetches; local operands are not listed. `gives` is how long its result takes to
    be accumulated into a remote tile; 0 where it stays here."""

    seconds: float
    needs: tuple[int, ...]
    accumulate_s: float = 0.0


@dataclass(frozen=True)
class StageLimits:
    """The most of each that one stage may hold, at least 1. Two fetches are the operands of one product."""

    products: int = 1
    fetches: int = 2
    accumulates: int = 1

    def __post_init__(self) -> None:
        assert min(self.products, self.fetches, self.accumulates) >= 1


@dataclass(frozen=True)
class ScheduleGraph:
    """The local products of one rank, in the order in which they were generated, and their remote tiles."""

    fetches: tuple[FetchNode, ...]
    products: tuple[ProductNode, ...]
    duplex: bool = False

    def __post_init__(self) -> None:
        assert all(0 <= tile < len(self.fetches) for product in self.products for tile in product.needs)
        times = [fetch.seconds for fetch in self.fetches]
        times += [t for product in self.products for t in (product.seconds, product.accumulate_s)]
        assert all(0 <= t < math.inf for t in times)

    @cached_property
    def needed_fetches(self) -> Selection:
        """The tiles that some product needs, by first use in the given order."""
        return tuple(dict.fromkeys(tile for product in self.products for tile in product.needs))

    @cached_property
    def accumulating(self) -> Selection:
        """The products whose results go elsewhere."""
        return tuple(i for i, product in enumerate(self.products) if product.accumulate_s > 0)

    @cached_property
    def needs(self) -> tuple[int, ...]:
        """Of each product the bit set of tiles."""
        return tuple(bit_set(product.needs) for product in self.products)

    def ready(self, state: ScheduleState) -> list[int]:
        """Products to do whose tiles are here, in the given order."""
        return [i for i, need in enumerate(self.needs) if not (state[0] >> i & 1 or need & ~state[1])]

    def unfetched(self, state: ScheduleState) -> list[int]:
        return [tile for tile in self.needed_fetches if not state[1] >> tile & 1]

    def unaccumulated(self, state: ScheduleState) -> list[int]:
        """Products done whose results are still to be accumulated."""
        return [i for i in self.accumulating if state[0] >> i & 1 and not state[2] >> i & 1]

    def communication_s(self, fetches: float, gives: float) -> float:
        return max(fetches, gives) if self.duplex else fetches + gives


@dataclass(frozen=True)
class Stage:
    """Numbers of products, of fetches, and of products whose results are accumulated, all of which run at once."""

    products: Selection
    fetches: Selection
    accumulates: Selection


@dataclass(frozen=True)
class IssueOrder:
    """What a program issues on each of its three lanes, first to last."""

    fetches: Selection
    products: Selection
    accumulates: Selection


def stage_s(stage: Stage, graph: ScheduleGraph) -> float:
    """Seconds of one stage."""
    fetches = sum(graph.fetches[i].seconds for i in stage.fetches)
    gives = sum(graph.products[i].accumulate_s for i in stage.accumulates)
    return max(sum(graph.products[i].seconds for i in stage.products), graph.communication_s(fetches, gives))


def staged_s(stages: Iterable[Stage], graph: ScheduleGraph) -> float:
    """Seconds of stages one after another."""
    return math.fsum(stage_s(stage, graph) for stage in stages)


def flatten_stages(stages: Sequence[Stage]) -> IssueOrder:
    """The linear issue order of a schedule: stage after stage, without the barriers between them."""
    return IssueOrder(
        tuple(tile for stage in stages for tile in stage.fetches),
        tuple(product for stage in stages for product in stage.products),
        tuple(product for stage in stages for product in stage.accumulates),
    )


def direct(graph: ScheduleGraph, limits: StageLimits) -> tuple[Stage, ...]:
    """The given order: beside the next products the next tiles to be needed (section 4.2)."""

    def pick(state: ScheduleState) -> Stage:
        ready, following = graph.ready(state), unset(state[0], len(graph.products))
        # A product whose tiles are here still waits for those before it.
        count = next((n for n, i in enumerate(following) if i not in ready), len(following))
        return _filled(graph, state, following[: min(count, limits.products)], limits)

    return _stages(graph, pick)


def greedy(graph: ScheduleGraph, limits: StageLimits) -> tuple[Stage, ...]:
    """First any product that can be done, then any transfer, up to the limits (section 4.3)."""
    return _stages(graph, lambda state: _filled(graph, state, graph.ready(state)[: limits.products], limits))


MAX_SELECTIONS = 2000
"""Selections that `cost_greedy` weighs per stage: where there are more, it looks at the earliest items only."""


def cost_greedy(graph: ScheduleGraph, limits: StageLimits) -> tuple[Stage, ...]:
    """Fills each stage to the limits with what leaves least of it exposed (section 4.3).

    Of the full selections first those after which there is something to multiply, then those whose compute and
    communication differ least, then those whose stage is longest: work that is well hidden.
    """

    def pick(state: ScheduleState) -> Stage:
        pools = [graph.ready(state), graph.unfetched(state), graph.unaccumulated(state)]
        sizes = [min(len(pool), most) for pool, most in zip(pools, astuple(limits), strict=True)]
        width = max(map(len, pools))
        while width > max(sizes) and _num_selections(pools, sizes, width) > MAX_SELECTIONS:
            width -= 1
        best: tuple[tuple[bool, float, float], Stage] | None = None
        for products, fetches, gives in cartesian(
            *(list(combinations(pool[:width], size)) for pool, size in zip(pools, sizes, strict=True))
        ):
            stage = Stage(products, fetches, gives)
            then = next_state(state, stage)
            compute = sum(graph.products[i].seconds for i in products)
            whole = stage_s(stage, graph)
            transfer = stage_s(Stage((), fetches, gives), graph)
            stalls = then[0].bit_count() < len(graph.products) and not graph.ready(then)
            score = (stalls, abs(compute - transfer), -whole)
            if best is None or score < best[0]:
                best = score, stage
        assert best is not None
        return best[1]

    return _stages(graph, pick)


def pipelined_s(issue: IssueOrder, graph: ScheduleGraph, prefetch: int) -> float:
    """Seconds of direct execution with asynchrony between iterations (section 4.2), without stages.

    Three lanes, each first-in-first-out and waiting for data only. A tile that the i-th product is the first to
    use is not fetched before product i - 1 - `prefetch` is done, as in a program with `prefetch` + 1 sets of
    buffers; a tile issued ahead of a more urgent one is as urgent as that. Unless the graph is `duplex` one
    transfer runs at a time: whichever can start first, a fetch where both can.
    """
    assert prefetch >= 0
    at = {product: i for i, product in enumerate(issue.products)}
    uses = [min(at[i] for i, need in enumerate(graph.needs) if need >> tile & 1) for tile in issue.fetches]
    gates = list(accumulate(reversed(uses), min))[::-1]
    here: dict[int, float] = {}
    done: list[float] = []
    free_in = free_out = 0.0
    fetch = give = 0
    while True:
        while len(done) < len(issue.products):
            local = graph.products[issue.products[len(done)]]
            if any(tile not in here for tile in local.needs):
                break
            start = max([done[-1] if done else 0.0, *(here[tile] for tile in local.needs)])
            done.append(start + local.seconds)
        get = put = math.inf
        if fetch < len(gates):
            before = gates[fetch] - 1 - prefetch
            get = max(free_in, done[before] if before >= 0 else 0.0)
        if give < len(issue.accumulates) and at[issue.accumulates[give]] < len(done):
            put = max(free_out, done[at[issue.accumulates[give]]])
        if get == put == math.inf:
            assert len(done) == len(issue.products) and give == len(issue.accumulates)
            return max([0.0, free_in, free_out, *done[-1:]])
        if get <= put:
            free_in = here[issue.fetches[fetch]] = get + graph.fetches[issue.fetches[fetch]].seconds
            free_out = free_out if graph.duplex else free_in
            fetch += 1
        else:
            free_out = put + graph.products[issue.accumulates[give]].accumulate_s
            free_in = free_in if graph.duplex else free_out
            give += 1


def _stages(graph: ScheduleGraph, pick: Callable[[ScheduleState], Stage]) -> tuple[Stage, ...]:
    """Stage after stage as `pick` chooses, until all is done."""
    state, stages = (0, 0, 0), []
    while unset(state[0], len(graph.products)) or graph.unaccumulated(state):
        stage = pick(state)
        assert stage.products or stage.fetches or stage.accumulates
        stages.append(stage)
        state = next_state(state, stage)
    return tuple(stages)


def _filled(graph: ScheduleGraph, state: ScheduleState, products: Sequence[int], limits: StageLimits) -> Stage:
    """These products beside the earliest transfers."""
    missing, owed = graph.unfetched(state)[: limits.fetches], graph.unaccumulated(state)[: limits.accumulates]
    return Stage(tuple(products), tuple(missing), tuple(owed))


def _num_selections(pools: Sequence[Sequence[int]], sizes: Sequence[int], width: int) -> int:
    """Full selections of the first `width` of each pool."""
    return math.prod(math.comb(min(len(pool), width), size) for pool, size in zip(pools, sizes, strict=True))


def next_state(state: ScheduleState, stage: Stage) -> ScheduleState:
    return (
        state[0] | bit_set(stage.products),
        state[1] | bit_set(stage.fetches),
        state[2] | bit_set(stage.accumulates),
    )


def bit_set(numbers: Iterable[int]) -> int:
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return bits


def unset(bits: int, count: int) -> list[int]:
    return [i for i in range(count) if not bits >> i & 1]
