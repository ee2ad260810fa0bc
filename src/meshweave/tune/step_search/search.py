"""The search for the fastest configuration of a step that fits in memory: best first, with lower bounds, anytime.

Nodes are layouts with a micro-batch. A node's bound begins as that of its FLOPs, is raised to what a layer takes as it
is laid, and at last the choices within it (schedule, ZeRO level, recomputation) are weighed one by one: what exceeds the
memory is dropped, and what its bound rules out is not priced. The search ends when the least bound is over the time of
the last row of the ranking. That is exact as far as the bounds are; see `bounds`.

A row of the ranking is a set of degrees with a strategy, in the order and with the choices that suit it best.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from meshweave.base.errors import MeshweaveError
from meshweave.base.progress import Progress, no_progress
from meshweave.describe.machine.levels import level_sizes
from meshweave.describe.model.memory import RECOMPUTES
from meshweave.tune.step import Parallelism, Step, memory_of, step_of
from meshweave.tune.step.stages import stages_of
from meshweave.tune.step_search.bounds import LayerBounds, pipeline_bound_s, step_bound_s
from meshweave.tune.step_search.space import StepLayout, StepSpace

NUM_EXACT = 2
"""Rows of the ranking that no other configuration is faster than."""
NUM_ROWS = 12
"""Rows of the ranking, if there are as many; those after the exact ones are the best that were priced."""
_SEEDS = 24


@dataclass(frozen=True)
class PricedStep:
    """A configuration that fits, with its step."""

    parallelism: Parallelism
    step: Step

    @property
    def seconds(self) -> float:
        """Return the seconds of the step."""
        return self.step.time_s

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of the fullest chip."""
        return self.step.memory.total

    @property
    def row_key(self) -> tuple[object, ...]:
        """Return what makes it a row of its own: degrees and strategy."""
        return _row_key(self.parallelism)


def _row_key(layout: Parallelism | StepLayout) -> tuple[object, ...]:
    return layout.data, layout.pipeline, layout.context, layout.tensor, layout.strategy


def _rank_key(priced: PricedStep) -> tuple[float, int, str]:
    return priced.seconds, priced.memory_bytes, str(priced.parallelism)


@dataclass
class SearchCount:
    """What a search has looked at.

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
    """What a search gives.

    Attributes:
        rows: the best configuration of each set of degrees and strategy, the fastest first.
        front: priced configurations of which none is both faster and smaller, the fastest first.
        is_complete: whether the search ran to its end; otherwise these are the best so far.
        num_exact: the first rows that no configuration is faster than, if it did.
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
    """A layout with a micro-batch. `num_raised` counts how often its bound was raised."""

    bound_s: float
    number: int
    layout: StepLayout = field(compare=False)
    micro_batch: int = field(compare=False)
    num_raised: int = field(compare=False, default=0)


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
        self._num_exact, self._progress = num_exact, progress
        self._bounds = LayerBounds(space)
        self._rows: dict[tuple[object, ...], PricedStep] = {}
        self._priced: dict[Parallelism, PricedStep] = {}
        self._count = SearchCount()
        self._smallest: tuple[Parallelism, int] | None = None
        self._limit_s = math.inf

    def run(self) -> StepRanking:
        """Return the ranking. Ctrl-C ends the search with the best so far, once there is one."""
        is_complete = True
        try:
            self._search()
        except KeyboardInterrupt:
            if not self._rows:
                raise
            is_complete = False
        rows = sorted(self._rows.values(), key=_rank_key)[: max(NUM_ROWS, self._num_exact)]
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
        self._price_seeds()
        heap = list(self._nodes())
        heapq.heapify(heap)
        self._count.nodes = total = len(heap)
        done = 0
        while heap and heap[0].bound_s < self._limit_s:
            node = heap[0]
            if self._is_open(node):
                heapq.heapreplace(heap, node)
                continue
            heapq.heappop(heap)
            done += 1
            self._progress(done, total)
        self._progress(total, total)

    def _nodes(self) -> Iterator[_Node]:
        """Yield the layouts with each micro-batch that may fit: all orders of some degrees keep as much."""
        number = 0
        for quad in self._space.degrees:
            sizes = self._space.micro_batches(quad[0])
            bounds = [self._node_bound_s(quad, size, self._bounds.compute_s(quad, size)) for size in sizes]
            num_fitting: dict[tuple[object, ...], int] = {}
            for layout in self._space.layouts(quad):
                key = layout.strategy, layout.tensor
                if key not in num_fitting:
                    num_fitting[key] = self._num_fitting(layout, sizes)
                    self._note_largest(layout, sizes[: num_fitting[key]])
                for size, bound in zip(sizes[: num_fitting[key]], bounds, strict=False):
                    yield _Node(bound, number, layout, size)
                    number += 1

    def _note_largest(self, layout: StepLayout, sizes: Sequence[int]) -> None:
        family = layout.strategy, layout.tensor, layout.context
        largest = self._bounds.largest
        largest[family] = max(largest.get(family, 1), *sizes, 1)

    def _num_fitting(self, layout: StepLayout, sizes: Sequence[int]) -> int:
        """Return how many of the micro-batches, ascending, may fit with the choice that keeps least."""
        level = max(self._space.zero_levels(layout.data, layout.context))
        recompute = max(self._space.options.recompute, key=RECOMPUTES.index)
        try:
            for number, size in enumerate(sizes):
                count = self._problem.batch // layout.data // size
                pairs = self._space.schedules(layout.pipeline, count)
                plain = [pair for pair in pairs if pair == ("1f1b", 1)] or pairs
                choices = (layout.choice(size, *pair, level, recompute) for pair in plain)
                if all(self._fitting_bytes(choice) is None for choice in choices):
                    return number
        except MeshweaveError as error:
            self._refuse(error)
            return 0
        return len(sizes)

    def _refuse(self, error: MeshweaveError) -> None:
        self._count.refused += 1
        self._count.reason = self._count.reason or str(error)

    def _node_bound_s(self, quad: Sequence[int], size: int, layer_s: float) -> float:
        """Return the least seconds of a step with any schedule, for layers of so many seconds a micro-batch."""
        count = self._problem.batch // quad[0] // size
        layers = self._problem.model.num_layers
        return min(
            (
                step_bound_s(layers, quad[1], schedule, virtual, count, layer_s)
                for schedule, virtual in self._space.schedules(quad[1], count)
            ),
            default=math.inf,
        )

    def _is_open(self, node: _Node) -> bool:
        """Raise the bound of a node, or weigh its choices; return whether it must be looked at again."""
        row = self._rows.get(_row_key(node.layout))
        if row is not None and row.seconds <= node.bound_s:
            return False
        try:
            if node.num_raised < 3:
                per_s = self._node_bound_s(node.layout.quad, node.micro_batch, 1.0)
                layer_s = self._layer_bound_s(node, self._limit_s / per_s)
                node.bound_s = max(node.bound_s, per_s * layer_s)
                node.num_raised += 1
                return True
            self._weigh_choices(node)
        except MeshweaveError as error:
            self._refuse(error)
        return False

    def _layer_bound_s(self, node: _Node, enough_s: float) -> float:
        match node.num_raised:
            case 0:
                return self._bounds.inner_s(node.layout, node.micro_batch, enough_s)
            case 1:
                return self._bounds.placed_s(node.layout, node.micro_batch)
        return self._bounds.layer_s(node.layout, node.micro_batch)

    def _fitting_bytes(self, choice: Parallelism) -> int | None:
        """Return the bytes of the fullest chip, or None where they do not fit."""
        size = memory_of(self._problem, choice).total
        if size <= self._memory_bytes:
            return size
        self._count.over_memory += 1
        if self._smallest is None or size < self._smallest[1]:
            self._smallest = choice, size
        return None

    def _weigh_choices(self, node: _Node) -> None:
        """Price the choices of a node whose bounds leave them a chance."""
        layout = node.layout
        count = self._problem.batch // layout.data // node.micro_batch
        bounded = []
        for schedule, virtual in self._space.schedules(layout.pipeline, count):
            for recompute in self._space.options.recompute:
                layer_s = self._bounds.layer_s(layout, node.micro_batch, recompute)
                bound = step_bound_s(
                    self._problem.model.num_layers, layout.pipeline, schedule, virtual, count, layer_s
                )
                for zero in self._space.zero_levels(layout.data, layout.context):
                    choice = layout.choice(node.micro_batch, schedule, virtual, zero, recompute)
                    bounded.append((bound, len(bounded), choice))
        for bound, _, choice in sorted(bounded):
            if bound >= self._limit_for(choice):
                break
            if choice in self._priced or self._fitting_bytes(choice) is None:
                continue
            stages = stages_of(self._problem, choice)
            pipeline_s = pipeline_bound_s(stages.action_times(), choice, count)
            if pipeline_s + stages.gathers_s() < self._limit_for(choice):
                self._price(choice)

    def _limit_for(self, choice: Parallelism) -> float:
        """Return the seconds from which on a choice changes no row of the ranking."""
        row = self._rows.get(_row_key(choice))
        return self._limit_s if row is None else min(self._limit_s, row.seconds)

    def _price(self, choice: Parallelism) -> None:
        priced = PricedStep(choice, step_of(self._problem, choice))
        self._count.priced += 1
        self._priced[choice] = priced
        row = self._rows.get(priced.row_key)
        if row is None or _rank_key(priced) < _rank_key(row):
            self._rows[priced.row_key] = priced
            if len(self._rows) >= self._num_exact:
                self._limit_s = heapq.nsmallest(
                    self._num_exact, (row.seconds for row in self._rows.values())
                )[-1]

    def _price_seeds(self) -> None:
        """Price a few likely configurations, for an early answer and an early limit."""
        inner = (level_sizes(self._problem.cluster.network) or (8,))[:1] or (self._problem.cluster.num_chips,)
        quads = [quad for quad in self._space.degrees if quad[3] <= inner[0]]
        for quad in sorted(quads, key=lambda quad: (quad[2], abs(math.log2(quad[3] * quad[1] / 16))))[
            :_SEEDS
        ]:
            for choice in self._seeds(quad):
                try:
                    if self._fitting_bytes(choice) is not None:
                        self._price(choice)
                        break
                except MeshweaveError:
                    continue

    def _seeds(self, quad: tuple[int, int, int, int]) -> Iterator[Parallelism]:
        """Yield choices of the first layout of some degrees, the likely faster first."""
        layout = next(self._space.layouts(quad), None)
        sizes = self._space.micro_batches(quad[0])
        if layout is None or not sizes:
            return
        pairs = self._space.schedules(quad[1], self._problem.batch // quad[0] // sizes[0])
        levels = self._space.zero_levels(quad[0], quad[2])
        for zero in sorted(levels, key=lambda level: (level == 0, level)):
            for recompute in sorted(self._space.options.recompute, key=RECOMPUTES.index):
                for schedule, virtual in pairs[:1]:
                    yield layout.choice(sizes[0], schedule, virtual, zero, recompute)


def pareto_front(priced: Iterable[PricedStep]) -> tuple[PricedStep, ...]:
    """Return those of which no other is both as fast and as small, the fastest first."""
    front: list[PricedStep] = []
    for each in sorted(priced, key=_rank_key):
        if not front or each.memory_bytes < front[-1].memory_bytes:
            front.append(each)
    return tuple(front)
