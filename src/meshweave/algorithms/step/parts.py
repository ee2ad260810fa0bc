"""The configurations of a step as a tree of parts, with lower bounds of their times, within memory.

    plain, others   layouts with the first strategy, no context ranks and the usual order, then all others
    layout          a layout with a micro-batch; its bound is that of its layers on one chip, then of them as laid
    choice          a layout with micro-batch, schedule and recomputation, and with the highest ZeRO level for all
    configuration   one with its ZeRO level, if it may fit; its bound is `least_step_s`

Memory is checked before time, by a lower bound (`least_memory`): a layout is left out if even its choice that
keeps the least does not fit. Configurations that would enter a ranking are checked by the memory of their program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from meshweave.algorithms.step.bounds import LayerBounds, step_bound_s
from meshweave.algorithms.step.checks import can_be_laid_out
from meshweave.algorithms.step.memory import GATHERED_LAYERS
from meshweave.algorithms.step.orders import DegreeSizes
from meshweave.algorithms.step.pipeline import num_stashes
from meshweave.algorithms.step.problem import DEGREES, Parallelism
from meshweave.algorithms.step.space import StepLayout, StepSpace
from meshweave.algorithms.step.stage_layers import layer_costs
from meshweave.algorithms.step.step_memory import least_memory
from meshweave.base.errors import MeshweaveError
from meshweave.describe.model.memory import RECOMPUTES, Recompute


@dataclass(frozen=True, eq=False)
class LayoutsPart:
    """The configurations of a tree whose layouts are plain, or those of all others.

    A layout is plain if it has no context ranks, the first strategy and the default order of degrees.
    """

    tree: StepTree
    is_plain: bool


@dataclass(frozen=True, eq=False)
class LayoutPart:
    """The configurations with one layout and one size of micro-batch.

    Attributes:
        degrees: the sizes of the degrees of `layout`.
        micro_batch: sequences of a micro-batch.
        recompute: the least recomputation that may fit.
        bound_s: a lower bound of the seconds of its steps, wherever the ranks lie on the cluster.
    """

    tree: StepTree
    degrees: DegreeSizes
    layout: StepLayout
    micro_batch: int
    recompute: Recompute
    bound_s: float


@dataclass(frozen=True, eq=False)
class ChoicePart:
    """The configurations that differ in their ZeRO level alone.

    Attributes:
        choice: the one with the highest of these levels.
        bound_s: a lower bound of the seconds of its steps.
    """

    tree: StepTree
    choice: Parallelism
    bound_s: float


_NUM_CLOSEST = 8
"""How many of the configurations that do not fit are kept: their bounds do not say which of them is the least."""

StepPart = LayoutsPart | LayoutPart | ChoicePart | Parallelism


def row_key(of: Parallelism | StepLayout) -> tuple[object, ...]:
    """Return what configurations of one row of a ranking have in common, as a key.

    It is (data, pipeline, context, tensor, strategy, (expert, expert_tensor)).
    """
    return of.data, of.pipeline, of.context, of.tensor, of.strategy, of.experts


@dataclass(eq=False)
class StepTree:
    """The configurations of a space that may fit in memory, as a tree of parts (subsets); counts of the others.

    Attributes:
        memory_bytes: the most bytes that a chip may hold.
        over_memory: how often a configuration was found not to fit.
        refused: how many layouts were refused with an error; `reason` is that of the first.
        closest: of the configurations that do not fit at most eight with the fewest bytes, as (bytes or a lower
            bound of them, configuration in words, configuration), ascending.
    """

    space: StepSpace
    memory_bytes: int
    over_memory: int = 0
    refused: int = 0
    reason: str = ""
    closest: list[tuple[int, str, Parallelism]] = field(default_factory=list)
    _bounds: LayerBounds = field(init=False)
    _known_steps: dict[tuple[int, int, int], float] = field(init=False, default_factory=dict)
    _bytes: dict[tuple[object, ...], int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._problem, self._bounds = self.space.problem, LayerBounds(self.space)

    @property
    def parts(self) -> tuple[LayoutsPart, LayoutsPart]:
        """Return the two largest parts: (plain layouts, all others); searched in this order, fewer are priced."""
        return LayoutsPart(self, True), LayoutsPart(self, False)

    def fresh(self) -> StepTree:
        """Return a new tree of the same space with counts of 0 and an empty `closest`; caches are shared."""
        other = StepTree(self.space, self.memory_bytes)
        other._bytes, other._known_steps = self._bytes, self._known_steps
        other._bounds = self._bounds.with_empty_cache()
        return other

    def branches(self, part: StepPart, limit_s: float) -> Iterator[StepPart]:
        """Return the next smaller parts of `part`: `LayoutPart`s, a layout's `ChoicePart`s, or configurations.

        Layouts and configurations that surely do not fit the memory are left out.

        Args:
            limit_s: layouts whose steps surely take this many seconds or more are left out.
        """
        match part:
            case LayoutsPart():
                return self._layouts(part.is_plain, limit_s)
            case LayoutPart():
                return self._choices(part)
            case ChoicePart():
                return self._levels(part.choice)
        raise AssertionError("a configuration has no branches")

    def bound_s(self, part: LayoutPart | ChoicePart, *, is_tight: bool) -> float:
        """Return a lower bound, in seconds, of a step in every configuration of `part`.

        Args:
            is_tight: whether a `LayoutPart`'s communication is priced on the links between its ranks, which gives
                a higher bound. A `ChoicePart` ignores it.
        """
        if isinstance(part, ChoicePart) or not is_tight:
            return part.bound_s
        layer_s = self._bounds.layer_s(part.layout, part.micro_batch, part.recompute)
        return max(part.bound_s, self._steps_per_layer(part.degrees, part.micro_batch) * layer_s)

    # --- layouts ----------------------------------------------------------------------------------------

    def _is_plain(self, layout: StepLayout) -> bool:
        return (
            layout.context == 1
            and layout.strategy == self.space.options.strategies[0]
            and layout.order == DEGREES
        )

    def _layouts(self, is_plain: bool, limit_s: float) -> Iterator[StepPart]:
        """Yield layouts with each micro-batch that may fit; memory does not depend on the order."""
        for degrees in self.space.degrees:
            if is_plain and degrees.context > 1:
                continue
            sizes = self.space.micro_batches(degrees.data)
            ratio = [self._steps_per_layer(degrees, size) for size in sizes]
            least_s = min((size * each for size, each in zip(sizes, ratio, strict=True)), default=math.inf)
            if least_s * self._bounds.flops_s(degrees) >= limit_s:
                continue
            fitting: dict[tuple[object, ...], list[Recompute]] = {}
            for layout in self.space.layouts(degrees):
                if self._is_plain(layout) != is_plain:
                    continue
                key = layout.strategy, layout.tensor, layout.experts
                if key not in fitting:
                    fitting[key] = self._fitting_recomputes(layout, sizes)
                for size, recompute, seconds in zip(sizes, fitting[key], ratio, strict=False):
                    bound_s = seconds * self._bounds.kernels_s(layout, size, recompute)
                    yield LayoutPart(self, degrees, layout, size, recompute, bound_s)

    def _fitting_recomputes(self, layout: StepLayout, sizes: Sequence[int]) -> list[Recompute]:
        """Return the least recomputation that may fit, for each micro-batch up to the last that does."""
        levels = self._least_levels(layout)
        kinds = sorted(self.space.options.recompute, key=RECOMPUTES.index)
        least: list[Recompute] = []
        try:
            for size in sizes:
                count = self._problem.batch // layout.data // size
                pairs = _least_kept(layout.pipeline, count, self.space.schedules(layout.pipeline, count))
                for kind in tuple(kinds):
                    choices = (layout.choice(size, *pair, level, kind) for pair in pairs for level in levels)
                    if any(self._fits(choice) for choice in choices):
                        least.append(kind)
                        break
                    kinds.remove(kind)
                else:
                    break
        except MeshweaveError as error:
            self.refused += 1
            self.reason = self.reason or str(error)
            return []
        return least

    def _least_levels(self, layout: StepLayout) -> tuple[int, ...]:
        """Return the ZeRO levels of which one keeps least: the highest, or any where ranks have few layers.

        ZeRO-2 and 3 have a few layers and tables whole besides the shards; they save 1 - 1 / n of each layer.
        """
        model, levels = self._problem.model, self.space.zero_levels(layout.data, layout.context)
        weights = model.layer.num_active_weights
        whole = 2 * GATHERED_LAYERS + 4 * (model.vocab_size or 0) * model.hidden / weights
        saved = (model.num_layers // layout.pipeline - 1) * (1 - 1 / (layout.data * layout.context))
        return (max(levels),) if saved >= whole else tuple(sorted(levels, reverse=True))

    @property
    def _of_stages(self) -> tuple[tuple[int, int] | None, bool]:
        """Return the costs by which layers are divided among stages, and whether all stages have like layers."""
        return layer_costs(self._problem), len(self._problem.kinds) == 1 or not self._problem.model.layers

    def _steps_per_layer(self, degrees: DegreeSizes, size: int) -> float:
        """Return a lower bound, over all schedules, of the time of a step over that of a layer's micro-batch."""
        key = degrees.data, degrees.pipeline, size
        if key not in self._known_steps:
            count = self._problem.batch // degrees.data // size
            layers, of_stages = self._problem.model.num_layers, self._of_stages
            self._known_steps[key] = min(
                (
                    step_bound_s(layers, degrees.pipeline, schedule, virtual, count, 1.0, 0.0, *of_stages)
                    for schedule, virtual in self.space.schedules(degrees.pipeline, count)
                ),
                default=math.inf,
            )
        return self._known_steps[key]

    # --- choices ----------------------------------------------------------------------------------------

    def _choices(self, part: LayoutPart) -> Iterator[StepPart]:
        """Yield the schedules and recomputations of a layout, from the least recomputation that may fit on."""
        layout, micro_batch = part.layout, part.micro_batch
        count = self._problem.batch // layout.data // micro_batch
        kinds = sorted(self.space.options.recompute, key=RECOMPUTES.index)
        num_layers, head_s = self._problem.model.num_layers, self._bounds.head_s(layout, micro_batch)
        most = max(self.space.zero_levels(layout.data, layout.context))
        for recompute in kinds[kinds.index(part.recompute) :]:
            layer_s = self._bounds.recomputed_s(layout, micro_batch, recompute)
            for schedule, virtual in self.space.schedules(layout.pipeline, count):
                numbers = num_layers, layout.pipeline, schedule, virtual, count
                bound_s = step_bound_s(*numbers, layer_s, head_s, *self._of_stages)
                choice = layout.choice(micro_batch, schedule, virtual, most, recompute)
                yield ChoicePart(self, choice, bound_s)

    def _levels(self, choice: Parallelism) -> Iterator[StepPart]:
        """Yield a configuration with each of its ZeRO levels that fits."""
        for zero in sorted(self.space.zero_levels(choice.data, choice.context), reverse=True):
            each = replace(choice, zero=zero)
            if self._fits(each):
                yield each

    def _fits(self, choice: Parallelism) -> bool:
        """Return whether the fullest chip may have the memory; the order makes no difference."""
        p = choice
        degrees = p.data, p.pipeline, p.context, p.tensor, p.strategy, p.micro_batch, p.experts
        key = degrees, p.schedule, p.virtual_stages, p.zero, p.recompute
        size = self._bytes.get(key)
        if size is None:
            size = self._bytes[key] = least_memory(self._problem, choice).total
        return self.fits_or_counts(choice, size)

    def fits_or_counts(self, choice: Parallelism, size: int) -> bool:
        """Return whether a configuration whose fullest chip holds `size` bytes fits (`memory_bytes`).

        One that does not fit is counted in `over_memory`. If it is among the smallest such, it is also entered
        in `closest`, with the first order of its degrees in which it can be laid out: the order does not change
        `size`. It is not entered if there is no such order.
        """
        if size <= self.memory_bytes:
            return True
        self.over_memory += 1
        if len(self.closest) < _NUM_CLOSEST or size < self.closest[-1][0]:
            sizes = DegreeSizes(choice.data, choice.pipeline, choice.context, choice.tensor_size)
            ordered = (replace(choice, order=order) for order in self.space.orders(sizes))
            laid = next((each for each in ordered if can_be_laid_out(self._problem, each)), None)
            if laid is not None and (entry := (size, str(laid), laid)) not in self.closest:
                self.closest = sorted([*self.closest, entry])[:_NUM_CLOSEST]
        return False


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
