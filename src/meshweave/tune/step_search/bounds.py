"""Lower bounds of the time of a step, with which the search leaves out what cannot win.

Each bound says what no step with some choices can go under:

    compute     the FLOPs of the busiest pipeline rank at the highest rate of a chip
    layers      the layers of the busiest rank, as laid, for every micro-batch, and those of the other ranks once
    probe       layers, with the seconds per sequence that the largest micro-batch reaches with the degrees of the
                layer innermost: a smaller micro-batch, longer links, or more chips for as much work are assumed to
                take at least `PROBE_SLACK` times those chip-seconds

The first two follow from the model of a step. The last is an assumption about kernels and links; tests compare its
search with the whole enumeration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshweave.algorithms.pipeline.action_times import ActionTimes
from meshweave.base.errors import MeshweaveError
from meshweave.base.units import PS_PER_S
from meshweave.describe.machine.levels import level_sizes
from meshweave.describe.model.memory import Recompute
from meshweave.describe.model.transformer import Transformer
from meshweave.describe.model.workload import Workload
from meshweave.tune.step.layers import layer_time
from meshweave.tune.step.problem import DEGREES, Parallelism
from meshweave.tune.step_search.space import (
    StepLayout,
    StepSpace,
    Tensor,
    divisors_of,
    place_on_levels,
    ranks_of,
)

PROBE_SLACK = 0.95
"""Kernels pay for whole tiles: a smaller product can be up to so much faster per element than a larger one."""


def layer_flops(model: Transformer, sequences: int, seq: int, dtype: str) -> int:
    """Return the FLOPs of a layer, forward and backward, whose attention skips what a causal mask hides."""
    work = Workload(sequences, seq, dtype)
    weights = sum(layer.in_features * layer.out_features for layer in model.fc_layers())
    return 6 * work.tokens * weights + 6 * work.tokens * seq * model.num_heads * model.head_dim


Family = tuple[str, Tensor, int]
"""A strategy, its tensor degree, and the context degree."""


def _smaller(family: Family) -> Iterator[Family]:
    """Yield the families with half (or a third, ...) of the chips along one axis, and still as many axes."""
    strategy, tensor, context = family
    if context > 1:
        yield strategy, tensor, context // _least_factor(context)
    if isinstance(tensor, int):
        if tensor > 2:
            yield strategy, tensor // _least_factor(tensor), context
        return
    rows, columns = tensor
    if rows > 1:
        yield strategy, (rows // _least_factor(rows), columns), context
    if columns // _least_factor(columns) > 1:
        yield strategy, (rows, columns // _least_factor(columns)), context


def _least_factor(number: int) -> int:
    return divisors_of(number)[1]


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
        self._levels = level_sizes(self._problem.cluster.network)
        self._probes: dict[Family, float] = {}
        self._layers: dict[tuple[object, ...], float] = {}
        self.largest: dict[Family, int] = {}

    def compute_s(self, quad: Sequence[int], micro_batch: int) -> float:
        """Return the seconds of its FLOPs at the highest rate of a chip, for degrees and a micro-batch."""
        problem = self._problem
        flops = layer_flops(problem.model, micro_batch, problem.seq, problem.dtype)
        return flops / (quad[2] * quad[3]) / self._peak

    def inner_s(self, layout: StepLayout, micro_batch: int, enough_s: float) -> float:
        """Return what it takes at least, by the rate of the largest micro-batch, degrees of the layer innermost.

        Args:
            enough_s: a bound from which on it does not matter how much higher it is.
        """
        ranks = layout.context * ranks_of(layout.tensor)
        scale = PROBE_SLACK * micro_batch / ranks
        return scale * self._chip_s((layout.strategy, layout.tensor, layout.context), enough_s / scale)

    def placed_s(self, layout: StepLayout, micro_batch: int) -> float:
        """Return what it takes at least, by the rate of the largest micro-batch as the layout is."""
        largest = self.largest.get((layout.strategy, layout.tensor, layout.context), 1)
        return PROBE_SLACK * micro_batch / largest * self.layer_s(layout, largest)

    def layer_s(self, layout: StepLayout, micro_batch: int, recompute: Recompute = "none") -> float:
        """Return what it takes as it is laid, with what is recomputed."""
        places = tuple(
            place_on_levels(self._levels, size, layout.stride(degree))
            for degree, size in (("tensor", ranks_of(layout.tensor)), ("context", layout.context))
            if size > 1
        )
        key = layout.strategy, layout.tensor, layout.context, places, micro_batch, recompute
        if key not in self._layers:
            layer = layer_time(self._problem, layout.choice(micro_batch, "1f1b", 1, 0, recompute))
            self._layers[key] = layer.forward.total_s + layer.backward.total_s + layer.recompute.total_s
        return self._layers[key]

    def _chip_s(self, family: Family, enough_s: float) -> float:
        """Return a bound of the seconds per sequence of all chips that share it: probed, or from fewer chips."""
        if family not in self._probes:
            for smaller in _smaller(family):
                try:
                    bound = PROBE_SLACK * self._chip_s(smaller, enough_s / PROBE_SLACK)
                except MeshweaveError:
                    continue
                if bound >= enough_s:
                    return bound
            self._probes[family] = self._probed_s(family)
        return self._probes[family]

    def _probed_s(self, family: Family) -> float:
        strategy, tensor, context = family
        largest = self.largest.get(family, 1)
        layout = StepLayout(1, 1, context, tensor, strategy, DEGREES)
        return self.layer_s(layout, largest) / largest * context * ranks_of(tensor)


def step_bound_s(
    num_layers: int, pipeline: int, schedule: str, virtual: int, num_micro_batches: int, layer_s: float
) -> float:
    """Return the least seconds of a step whose layers take `layer_s` a micro-batch, forward and backward.

    The busiest rank has a p-th of the layers at least. With 1F1B the last rank, which may have a layer less than its
    share for the loss, also waits for the others before its first micro-batch, and they for it after the last:
    `(L - l) / v` layers (Narayanan et al. 2021, section 2.2). Zero-bubble schedules fill that time.
    """
    busiest = -(-num_layers // pipeline)
    if pipeline == 1 or schedule != "1f1b":
        return num_micro_batches * busiest * layer_s
    last = max(num_layers // pipeline - 1, 1)
    waits = (num_layers - last) / virtual
    return max(num_micro_batches * busiest, num_micro_batches * last + waits) * layer_s


def pipeline_bound_s(times: ActionTimes, choice: Parallelism, num_micro_batches: int) -> float:
    """Return the least seconds of a pipeline of stages with these times.

    Rank r begins when the ranks before it have sent it their first forward part. It is busy with its stages for every
    micro-batch. With 1F1B the ranks before it end their backward parts after it has; and with one stage a rank, of
    each p - r micro-batches the first must be back from the last rank before the next of them begins (the warm-up
    of Narayanan et al., SC '21, section 2.2.1).
    """
    p, m = choice.pipeline, num_micro_batches
    back = [a + b for a, b in zip(times.input_grad, times.weight_grad, strict=True)]
    hop = times.transfer[0] if times.transfer else 0
    if p == 1:
        return m * (sum(times.forward) + sum(back)) / PS_PER_S
    is_folded = choice.schedule in ("zbv", "dualpipev")
    bound = before = after = 0
    trip = sum(times.forward) + sum(back) + 2 * (p - 1) * hop
    for rank in range(p):
        own = (rank, len(back) - 1 - rank) if is_folded else range(rank, len(back), p)
        busy = m * sum(times.forward[stage] + back[stage] for stage in own)
        ends = after if choice.schedule == "1f1b" else 0
        bound = max(bound, before + busy + ends)
        if choice.schedule == "1f1b" and choice.virtual_stages == 1:
            bound = max(bound, before + ((m - 1) // (p - rank) + 1) * trip + ends)
        before += times.forward[rank] + hop
        after += back[rank] + hop
        trip -= times.forward[rank] + back[rank] + 2 * hop
    return bound / PS_PER_S
