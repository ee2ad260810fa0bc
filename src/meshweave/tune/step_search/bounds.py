"""Lower bounds of the time of a step, by which the search rules configurations out.

Each bound is a time that no step with some of its choices fixed can go under:

    compute     the FLOPs of the busiest pipeline rank at the highest rate of a chip
    one chip    its layers in the time that one chip alone takes for them, divided by the chips of a layer
    layers      the layers of the busiest rank, as laid, for every micro-batch, and those of the other ranks once
    relaxed     as layers, from the price of a relaxed layer: more sequences, shorter links, or fewer chips

The first and the third follow from the model of a step. The others are assumptions: a relaxed layer, or one on one
chip, takes at most 1 / `SLACK` times the chip-seconds a sequence. Tests compare them with prices, and the search
with the whole enumeration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from meshweave.base.errors import MeshweaveError
from meshweave.describe.machine.levels import level_sizes
from meshweave.describe.model.memory import Recompute
from meshweave.describe.model.transformer import Transformer
from meshweave.describe.model.workload import Workload
from meshweave.tune.step.layers import bare_layer_s, layer_time, least_layer_s
from meshweave.tune.step.problem import DEGREES, Degree, Parallelism
from meshweave.tune.step_search.space import (
    ONE_DIMENSIONAL,
    DegreeSizes,
    StepLayout,
    StepSpace,
    Tensor,
    divisors_of,
    place_on_levels,
    ranks_of,
)

SLACK = 0.97
"""The least ratio of chip-seconds a sequence, of a layer over the same layer relaxed: more sequences, shorter
links or fewer chips. It is below 1: kernels compute whole tiles, and collectives change algorithm with size."""


_ONE_CHIP_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Sequences of a micro-batch whose layers are looked at on one chip."""


def layer_flops(model: Transformer, sequences: int, seq: int, dtype: str) -> int:
    """Return the FLOPs of a layer, forward and backward, whose attention skips what a causal mask hides."""
    work = Workload(sequences, seq, dtype)
    weights = sum(layer.in_features * layer.out_features for layer in model.fc_layers())
    return 6 * work.tokens * weights + 6 * work.tokens * seq * model.num_heads * model.head_dim


@dataclass(frozen=True)
class LayerPlace:
    """A strategy and where its tensor and context ranks lie, on which the seconds of a layer depend.

    Attributes:
        layout: a layout with these ranks there.
        key: equal for layouts whose layers take equally long.
        num_chips: chips that share a layer.
    """

    layout: StepLayout
    key: tuple[object, ...]
    num_chips: int


class LayerBounds:
    """Least seconds of a layer, forward and backward, of the layouts of a space.

    Attributes:
        largest: for each strategy, tensor and context degree the largest micro-batch that may fit.
    """

    def __init__(self, space: StepSpace) -> None:
        self._space, self._problem = space, space.problem
        chip = self._problem.cluster.chip
        rates = [
            rate for _, rate in (*chip.peak_flops_per_s, *chip.dtype_flops_per_s, *chip.call_flops_per_s)
        ]
        self._peak = max(*rates, chip.effective_flops_per_s)
        self._flops = layer_flops(self._problem.model, 1, self._problem.seq, self._problem.dtype)
        self._levels = level_sizes(self._problem.cluster.network)
        self._known: dict[tuple[object, int], float] = {}
        self._least: dict[tuple[object, int], float] = {}
        self._relaxed_from: dict[tuple[object, int], tuple[tuple[LayerPlace, int], ...]] = {}
        self._places: dict[StepLayout, LayerPlace] = {}
        self.largest: dict[tuple[object, ...], int] = {}

    def compute_s(self, sizes: DegreeSizes, micro_batch: int, recompute: Recompute = "none") -> float:
        """Return the least seconds of a layer by degrees and micro-batch alone: by its FLOPs, or on one chip."""
        forward_s, whole_s = self._sequence_s
        chip_s = whole_s + (forward_s if recompute == "full" else 0.0)
        return micro_batch * chip_s / (sizes.context * sizes.tensor)

    @cached_property
    def _sequence_s(self) -> tuple[float, float]:
        """Return the least chip-seconds of a sequence in a layer, forward, and forward with backward."""
        whole_s = self._flops / self._peak
        known = [(whole_s / 3, whole_s)]
        sizes = self._space.options.micro_batches or _ONE_CHIP_SIZES
        try:
            of_sizes = [self.one_chip_s(size) for size in sizes if size <= self._problem.batch]
            known += [
                (SLACK * min(forward), SLACK * min(whole)) for forward, whole in [zip(*of_sizes, strict=True)]
            ]
        except (MeshweaveError, ValueError):
            pass
        return max(each[0] for each in known), max(each[1] for each in known)

    def one_chip_s(self, micro_batch: int) -> tuple[float, float]:
        """Return the seconds of a sequence in a layer on one chip, forward, and forward with backward."""
        alone = Parallelism(strategy=ONE_DIMENSIONAL[0], micro_batch=micro_batch)
        forward_s, whole_s = bare_layer_s(self._problem, alone)
        return forward_s / micro_batch, whole_s / micro_batch

    def layer_s(self, layout: StepLayout, micro_batch: int, recompute: Recompute = "none") -> float:
        """Return the seconds of a layer of a layout, recomputation included."""
        layer = layer_time(self._problem, layout.choice(micro_batch, "1f1b", 1, 0, recompute))
        return layer.forward.total_s + layer.backward.total_s + layer.recompute.total_s

    def least_s(self, place: LayerPlace, micro_batch: int, recompute: Recompute, enough_s: float) -> float:
        """Return the seconds of a layer at a place, or a lower bound of them that already reaches `enough_s`."""
        scale = micro_batch / place.num_chips
        again_s = scale * self._sequence_s[0] if recompute == "full" else 0.0
        bound = scale * self._chip_s(place, micro_batch, (enough_s - again_s) / scale) + again_s
        if bound >= enough_s or recompute != "full":
            return bound
        return max(bound, self.layer_s(place.layout, micro_batch, recompute))

    def place(self, layout: StepLayout) -> LayerPlace:
        """Return where the layers of a layout are."""
        if layout not in self._places:
            ranks = ranks_of(layout.tensor)
            sizes: dict[Degree, int] = {"tensor": ranks, "context": layout.context}
            places = (
                place_on_levels(self._levels, size, layout.stride(degree))
                for degree, size in sizes.items()
                if size > 1
            )
            key = layout.strategy, layout.tensor, layout.context, *places
            self._places[layout] = LayerPlace(layout, key, ranks * layout.context)
        return self._places[layout]

    def _chip_s(self, place: LayerPlace, micro_batch: int, enough_s: float) -> float:
        """Return the chip-seconds a sequence, or a lower bound of them that already reaches `enough_s`."""
        key = place.key, micro_batch
        if key in self._known:
            return self._known[key]
        if self._least.get(key, 0.0) >= enough_s:
            return self._least[key]
        if key not in self._relaxed_from:
            self._relaxed_from[key] = tuple(self._relaxations(place, micro_batch))
        for relaxed, size in self._relaxed_from[key]:
            try:
                bound = SLACK * self._chip_s(relaxed, size, enough_s / SLACK)
            except MeshweaveError:
                continue
            if bound >= enough_s:
                self._least[key] = bound
                return bound
        choice = place.layout.choice(micro_batch, "1f1b", 1, 0, "none")
        self._known[key] = least_layer_s(self._problem, choice) / micro_batch * place.num_chips
        return self._known[key]

    def _relaxations(self, place: LayerPlace, micro_batch: int) -> Iterator[tuple[LayerPlace, int]]:
        """Yield places and micro-batches that relax this one: fewer chips, shorter links, more sequences."""
        layout = place.layout
        inner = replace(layout, order=DEGREES)
        if self.place(inner).key != place.key:
            yield self.place(inner), micro_batch
        else:
            for tensor, context in _smaller(layout.tensor, layout.context):
                size = self.largest.get((layout.strategy, tensor, context), 1)
                yield self.place(replace(inner, tensor=tensor, context=context)), size
        largest = self.largest.get((layout.strategy, layout.tensor, layout.context), 1)
        if micro_batch < largest:
            yield place, min(2 * micro_batch, largest)


def _smaller(tensor: Tensor, context: int) -> Iterator[tuple[Tensor, int]]:
    """Yield tensor and context degrees with half (or a third, ...) of the chips along one axis, still of two or
    more."""
    if context > 1:
        yield tensor, context // _least_factor(context)
    if isinstance(tensor, int):
        if tensor // _least_factor(tensor) > 1:
            yield tensor // _least_factor(tensor), context
        return
    rows, columns = tensor
    if rows > 1:
        yield (rows // _least_factor(rows), columns), context
    if columns // _least_factor(columns) > 1:
        yield (rows, columns // _least_factor(columns)), context


def _least_factor(number: int) -> int:
    return divisors_of(number)[1] if number > 1 else 1


def step_bound_s(
    num_layers: int, pipeline: int, schedule: str, virtual: int, num_micro_batches: int, layer_s: float
) -> float:
    """Return the least seconds of a step whose layers take `layer_s` a micro-batch, forward and backward.

    The busiest rank has a p-th of the layers at least. With 1F1B the last rank, which may have a layer less
    than its share for the loss, also waits for the others before its first micro-batch, and they for it after
    the last: `(L - l) / v` layers (Narayanan et al. 2021, section 2.2). Zero-bubble schedules fill that time.
    """
    busiest = -(-num_layers // pipeline)
    if pipeline == 1 or schedule != "1f1b":
        return num_micro_batches * busiest * layer_s
    last = max(num_layers // pipeline - 1, 1)
    waits = (num_layers - last) / virtual
    return max(num_micro_batches * busiest, num_micro_batches * last + waits) * layer_s
