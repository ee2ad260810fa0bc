"""The search for the fastest configuration of a step within memory: best first, by lower bounds, anytime.

This is branch and bound. A node is a layout with a micro-batch. Its first bound is that of its layers on one chip.
It is tightened to what a layer takes as it is laid, only as far as the next node makes it matter. Then the node
is branched into its choices (schedule, ZeRO level, recomputation): those that exceed the memory are dropped, and
those that their bounds rule out are not priced. The search ends when the least bound exceeds the time of the last
exact row of the ranking. The result is exact if the bounds are (see `bounds`).

A row of the ranking is a set of degrees with a strategy, in the order and with the choices that suit it best.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from meshweave.algorithms.step import Parallelism, Step, least_step_s, peak_memory, step_of
from meshweave.algorithms.step.memory import GATHERED_LAYERS
from meshweave.algorithms.step.pipeline import num_stashes
from meshweave.algorithms.step.problem import DEGREES
from meshweave.base.errors import MeshweaveError
from meshweave.base.progress import Progress, no_progress
from meshweave.describe.model.memory import RECOMPUTES, Recompute
from meshweave.tune.step_search.bounds import LayerBounds, step_bound_s
from meshweave.tune.step_search.space import DegreeSizes, StepLayout, StepSpace

NUM_EXACT = 2
"""Exact rows: the first of the ranking, than which no other configuration is faster."""
NUM_ROWS = 12
"""Rows of the ranking, if there are as many; those after the exact ones are the best that were priced."""


@dataclass(frozen=True)
class PricedStep:
    """A configuration that fits, with its step."""

    parallelism: Parallelism
    step: Step

    @property
    def time_s(self) -> float:
        """Return the seconds of the step."""
        return self.step.time_s

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of the fullest chip."""
        return self.step.memory.total

    @property
    def row_key(self) -> tuple[object, ...]:
        """Return what configurations share of which the ranking shows only the fastest: degrees and strategy."""
        return _row_key(self.parallelism)


def _row_key(layout: Parallelism | StepLayout) -> tuple[object, ...]:
    return layout.data, layout.pipeline, layout.context, layout.tensor, layout.strategy


def _rank_key(priced: PricedStep) -> tuple[float, int, str]:
    return priced.time_s, priced.memory_bytes, str(priced.parallelism)


@dataclass
class SearchCount:
    """Counts of what a search has visited.

    Attributes:
        nodes: layouts with a micro-batch, in all.
        priced: configurations whose step was computed.
        over_memory: nodes and configurations that do not fit.
        refused: nodes that the model of a step refuses, with the reason of the first.
    """

    nodes: int = 0
    priced: int = 0
    over_memory: int = 0
    refused: int = 0
    reason: str = ""


@dataclass(frozen=True)
class StepRanking:
    """The result of a search.

    Attributes:
        rows: the best configuration of each set of degrees and strategy, the fastest first.
        front: priced configurations on the Pareto front of time and memory, the fastest first.
        is_complete: whether the search ran to its end; otherwise these are the best so far.
        num_exact: the number of exact rows, if the search ran to its end.
        smallest: of what does not fit, the configuration with the least memory, and its bytes.
    """

    space: StepSpace
    memory_bytes: int
    rows: tuple[PricedStep, ...]
    front: tuple[PricedStep, ...]
    count: SearchCount
    is_complete: bool
    num_exact: int
    smallest: tuple[Parallelism, int] | None = None


@dataclass(order=True)
class _Node:
    """An entry of the queue, ordered by its bound: a layout with a micro-batch, or one choice of it.

    Attributes:
        recompute: the least recomputation that may fit.
        is_tight: whether the bound is that of the layers, and of a configuration that of all its step.
        choice: a configuration that fits, if the bound is tight; else one with the highest ZeRO level, for all
            levels; None for a layout with all its choices.
    """

    bound_s: float
    number: int
    degrees: DegreeSizes = field(compare=False)
    layout: StepLayout = field(compare=False)
    micro_batch: int = field(compare=False)
    recompute: Recompute = field(compare=False)
    is_tight: bool = field(compare=False, default=False)
    choice: Parallelism | None = field(compare=False, default=None)


class StepSearch:
    """A search, to be run once.

    Args:
        space: what to choose among.
        memory_bytes: the most bytes that a chip may hold.
        num_exact: rows of the ranking that must be exact; the others are the best that were priced.
        progress: called with (nodes done, nodes).
    """

    def __init__(
        self,
        space: StepSpace,
        memory_bytes: int,
        num_exact: int = NUM_EXACT,
        progress: Progress = no_progress,
    ) -> None:
        self._space, self._problem, self._memory_bytes = space, space.problem, memory_bytes
        self._num_exact, self.progress = num_exact, progress
        self._bounds = LayerBounds(space)
        self.rows: dict[tuple[object, ...], PricedStep] = {}
        self._priced: dict[Parallelism, PricedStep] = {}
        self._count = SearchCount()
        self._smallest: tuple[Parallelism, int] | None = None
        self._limit_s = math.inf
        self._known_steps: dict[tuple[int, int, int], float] = {}
        self._bytes: dict[tuple[object, ...], int] = {}
        self._heap: list[_Node] = []
        self._num_pushed = 0

    def run(self) -> StepRanking:
        """Return the ranking. Ctrl-C ends the search with the best so far, once there is one."""
        is_complete = True
        try:
            self._search()
        except KeyboardInterrupt:
            if not self.rows:
                raise
            is_complete = False
        rows = sorted(self.rows.values(), key=_rank_key)[: max(NUM_ROWS, self._num_exact)]
        front = pareto_front(self._priced.values())
        return StepRanking(
            self._space,
            self._memory_bytes,
            tuple(rows),
            front,
            self._count,
            is_complete,
            min(self._num_exact, len(rows)),
            self._smallest,
        )

    def _search(self) -> None:
        for is_plain in (True, False):  # plain layouts give an early answer, which rules out most others
            self._heap = heap = list(self._nodes(is_plain))
            heapq.heapify(heap)
            done, left = self._count.nodes, len(heap)
            self._count.nodes = total = done + left
            while heap and heap[0].bound_s < self._limit_s:
                left -= self._visit(heapq.heappop(heap))
                self.progress(total - left, total)
        self.progress(total, total)

    def _is_plain(self, layout: StepLayout) -> bool:
        return (
            layout.context == 1
            and layout.strategy == self._space.options.strategies[0]
            and layout.order == DEGREES
        )

    def _nodes(self, is_plain: bool) -> Iterator[_Node]:
        """Yield plain or other layouts with each micro-batch that may fit; memory does not depend on the order."""
        number = self._count.nodes
        for degrees in self._space.degrees:
            if is_plain and degrees.context > 1:
                continue
            sizes = self._space.micro_batches(degrees.data)
            ratio = [self._steps_per_layer(degrees, size) for size in sizes]
            least_s = min((size * each for size, each in zip(sizes, ratio, strict=True)), default=math.inf)
            if least_s * self._bounds.flops_s(degrees) >= self._limit_s:
                continue
            fitting: dict[tuple[object, ...], list[Recompute]] = {}
            for layout in self._space.layouts(degrees):
                if self._is_plain(layout) != is_plain:
                    continue
                key = layout.strategy, layout.tensor
                if key not in fitting:
                    fitting[key] = self._fitting_recomputes(layout, sizes)
                if not fitting[key]:
                    continue
                for size, recompute, seconds in zip(sizes, fitting[key], ratio, strict=False):
                    bound = seconds * self._bounds.kernels_s(layout, size, recompute)
                    if bound >= self._limit_s:
                        continue
                    yield _Node(bound, number, degrees, layout, size, recompute)
                    number += 1

    def _fitting_recomputes(self, layout: StepLayout, sizes: Sequence[int]) -> list[Recompute]:
        """Return the least recomputation that may fit, for each micro-batch up to the last that does."""
        levels = self._least_levels(layout)
        kinds = sorted(self._space.options.recompute, key=RECOMPUTES.index)
        least: list[Recompute] = []
        try:
            for size in sizes:
                count = self._problem.batch // layout.data // size
                pairs = _least_kept(layout.pipeline, count, self._space.schedules(layout.pipeline, count))
                for kind in tuple(kinds):
                    choices = (layout.choice(size, *pair, level, kind) for pair in pairs for level in levels)
                    if any(self._fitting_bytes(choice) is not None for choice in choices):
                        least.append(kind)
                        break
                    kinds.remove(kind)
                else:
                    break
        except MeshweaveError as error:
            self._refuse(error)
            return []
        return least

    def _least_levels(self, layout: StepLayout) -> tuple[int, ...]:
        """Return the ZeRO levels of which one keeps least: the highest, or any where ranks have few layers.

        ZeRO-2 and 3 have a few layers and tables whole besides the shards; they save 1 - 1 / n of each layer.
        """
        model, levels = self._problem.model, self._space.zero_levels(layout.data, layout.context)
        weights = model.layer.num_weights
        whole = 2 * GATHERED_LAYERS + 4 * (model.vocab_size or 0) * model.hidden / weights
        saved = (model.num_layers // layout.pipeline - 1) * (1 - 1 / (layout.data * layout.context))
        return (max(levels),) if saved >= whole else tuple(sorted(levels, reverse=True))

    def _refuse(self, error: MeshweaveError) -> None:
        self._count.refused += 1
        self._count.reason = self._count.reason or str(error)

    def _steps_per_layer(self, degrees: DegreeSizes, size: int) -> float:
        """Return a lower bound, over all schedules, of the time of a step over that of a layer's micro-batch."""
        key = degrees.data, degrees.pipeline, size
        if key not in self._known_steps:
            count = self._problem.batch // degrees.data // size
            layers = self._problem.model.num_layers
            self._known_steps[key] = min(
                (
                    step_bound_s(layers, degrees.pipeline, schedule, virtual, count, 1.0)
                    for schedule, virtual in self._space.schedules(degrees.pipeline, count)
                ),
                default=math.inf,
            )
        return self._known_steps[key]

    def _visit(self, node: _Node) -> bool:
        """Visit a node, and push what it branches into; return whether its layout is done with."""
        row = self.rows.get(_row_key(node.layout))
        try:
            if row is not None and row.time_s <= node.bound_s:
                return node.choice is None
            if node.choice is not None:
                if node.is_tight:
                    self._price(node.choice)
                else:
                    self._branch_levels(node, node.choice)
                return False
            if not node.is_tight:
                return self._tighten(node)
            self._branch(node)
        except MeshweaveError as error:
            self._refuse(error)
        return True

    def _tighten(self, node: _Node) -> bool:
        """Raise the bound of a layout to that of its layers as laid; return whether it is out."""
        ratio = self._steps_per_layer(node.degrees, node.micro_batch)
        layer_s = self._bounds.layer_s(node.layout, node.micro_batch, node.recompute)
        node.bound_s, node.is_tight = max(node.bound_s, ratio * layer_s), True
        if node.bound_s >= self._limit_s:
            return True
        heapq.heappush(self._heap, node)
        return False

    def _fitting_bytes(self, choice: Parallelism) -> int | None:
        """Return the bytes of the fullest chip, or None where they do not fit; the order makes no difference."""
        p = choice
        degrees = p.data, p.pipeline, p.context, p.tensor, p.strategy, p.micro_batch
        key = degrees, p.schedule, p.virtual_stages, p.zero, p.recompute
        size = self._bytes.get(key)
        if size is None:
            size = self._bytes[key] = peak_memory(self._problem, choice).total
        if size <= self._memory_bytes:
            return size
        self._count.over_memory += 1
        if self._smallest is None or size < self._smallest[1]:
            self._smallest = choice, size
        return None

    def _branch(self, node: _Node) -> None:
        """Push the choices of a node that fit and that their bounds do not rule out."""
        layout = node.layout
        count = self._problem.batch // layout.data // node.micro_batch
        kinds = sorted(self._space.options.recompute, key=RECOMPUTES.index)
        num_layers, head_s = self._problem.model.num_layers, self._bounds.head_s(layout, node.micro_batch)
        for recompute in kinds[kinds.index(node.recompute) :]:
            layer_s = self._bounds.recomputed_s(layout, node.micro_batch, recompute)
            for schedule, virtual in self._space.schedules(layout.pipeline, count):
                numbers = num_layers, layout.pipeline, schedule, virtual, count
                bound = step_bound_s(*numbers, layer_s, head_s)
                most = max(self._space.zero_levels(layout.data, layout.context))
                choice = layout.choice(node.micro_batch, schedule, virtual, most, recompute)
                if bound < self._limit_for(choice):
                    if self.rows:
                        self._push(node, choice, bound, is_tight=False)
                    else:  # an early answer
                        self._branch_levels(node, choice)

    def _push(self, node: _Node, choice: Parallelism, bound_s: float, is_tight: bool) -> None:
        self._num_pushed += 1
        number = self._count.nodes + self._num_pushed
        bound_s = max(bound_s, node.bound_s)
        put = replace(node, bound_s=bound_s, number=number, choice=choice, is_tight=is_tight)
        heapq.heappush(self._heap, put)

    def _branch_levels(self, node: _Node, choice: Parallelism) -> None:
        """Put a configuration with each of its ZeRO levels that fits among the nodes, by the bound of its step."""
        for zero in sorted(self._space.zero_levels(choice.data, choice.context), reverse=True):
            each = replace(choice, zero=zero)
            if self._fitting_bytes(each) is None:
                continue
            if not self.rows:
                self._price(each)
                continue
            least_s = least_step_s(self._problem, each)
            if least_s < self._limit_for(each):
                self._push(node, each, least_s, is_tight=True)

    def _limit_for(self, choice: Parallelism) -> float:
        """Return the seconds from which on a choice changes no row of the ranking."""
        row = self.rows.get(_row_key(choice))
        return self._limit_s if row is None else min(self._limit_s, row.time_s)

    def _price(self, choice: Parallelism) -> None:
        priced = PricedStep(choice, step_of(self._problem, choice))
        self._count.priced += 1
        self._priced[choice] = priced
        row = self.rows.get(priced.row_key)
        if row is None or _rank_key(priced) < _rank_key(row):
            self.rows[priced.row_key] = priced
            if len(self.rows) >= self._num_exact:
                self._limit_s = heapq.nsmallest(self._num_exact, (row.time_s for row in self.rows.values()))[
                    -1
                ]


def pareto_front(priced: Iterable[PricedStep]) -> tuple[PricedStep, ...]:
    """Return those of which no other is both as fast and as small, the fastest first."""
    front: list[PricedStep] = []
    for each in sorted(priced, key=_rank_key):
        if not front or each.memory_bytes < front[-1].memory_bytes:
            front.append(each)
    return tuple(front)


@lru_cache(maxsize=4096)
def _least_kept(pipeline: int, count: int, pairs: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    """Return the (schedule, stages a rank) that keep least: those of which no other has less on every rank."""
    if len(pairs) == 1:
        return pairs
    kept = {
        pair: [stashes / pair[1] for stashes in num_stashes(pair[0], pipeline, pair[1], count)]
        for pair in pairs
    }
    least: list[tuple[str, int]] = []
    for pair in pairs:
        others = (kept[other] for other in least)
        if not any(all(a <= b for a, b in zip(other, kept[pair], strict=True)) for other in others):
            least.append(pair)
    return tuple(least)
