"""Lower bounds of the time of a step, with which the search leaves out what cannot win.

Each bound says what no step with some choices can go under:

    compute     the FLOPs of the busiest pipeline rank at the highest rate of a chip
    layers      the layers of the busiest rank, as laid, for every micro-batch, and those of the other ranks once
    probe       layers, with the seconds per sequence that the largest micro-batch reaches with the degrees of the
                layer innermost: a smaller micro-batch or longer links are assumed not to be faster than
                `PROBE_SLACK` times that

The first two follow from the model of a step. The last is an assumption about kernels and links; tests compare its
search with the whole enumeration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshweave.algorithms.pipeline.action_times import ActionTimes
from meshweave.base.units import PS_PER_S
from meshweave.describe.model.memory import Recompute
from meshweave.describe.model.transformer import Transformer
from meshweave.describe.model.workload import Workload
from meshweave.tune.step.layers import layer_time
from meshweave.tune.step.problem import DEGREES, Parallelism
from meshweave.tune.step_search.space import StepLayout, StepSpace

PROBE_SLACK = 0.85
"""Kernels pay for whole tiles: a smaller product can be up to so much faster per element than a larger one."""


def layer_flops(model: Transformer, sequences: int, seq: int, dtype: str) -> int:
    """Return the FLOPs of a layer, forward and backward, whose attention skips what a causal mask hides."""
    work = Workload(sequences, seq, dtype)
    weights = sum(layer.in_features * layer.out_features for layer in model.fc_layers())
    return 6 * work.tokens * weights + 6 * work.tokens * seq * model.num_heads * model.head_dim


class LayerBounds:
    """Least seconds of a layer, forward and backward, of the layouts of a space."""

    def __init__(self, space: StepSpace) -> None:
        self._space, self._problem = space, space.problem
        chip = self._problem.cluster.chip
        rates = [rate for _, rate in (*chip.peak_flops_per_s, *chip.dtype_flops_per_s, *chip.call_flops_per_s)]
        self._peak = max(*rates, chip.effective_flops_per_s)
        self._probes: dict[tuple[object, ...], float] = {}

    def compute_s(self, quad: Sequence[int], micro_batch: int) -> float:
        """Return the seconds of its FLOPs at the highest rate of a chip, for degrees and a micro-batch."""
        problem = self._problem
        flops = layer_flops(problem.model, micro_batch, problem.seq, problem.dtype)
        return flops / (quad[2] * quad[3]) / self._peak

    def probe_s(self, layout: StepLayout, micro_batch: int) -> float:
        """Return what it takes at least by the rate of the largest micro-batch, tensor ranks innermost."""
        key = layout.context, layout.tensor, layout.strategy
        if key not in self._probes:
            sizes = self._space.micro_batches(1)
            largest = max(sizes, default=1)
            self._probes[key] = self._layer_s(replace(layout, order=DEGREES), largest, "none") / largest
        return PROBE_SLACK * micro_batch * self._probes[key]

    def layer_s(self, layout: StepLayout, micro_batch: int, recompute: Recompute = "none") -> float:
        """Return what it takes as it is laid, with what is recomputed."""
        return self._layer_s(layout, micro_batch, recompute)

    def _layer_s(self, layout: StepLayout, micro_batch: int, recompute: Recompute) -> float:
        layer = layer_time(self._problem, layout.choice(micro_batch, "1f1b", 1, 0, recompute))
        return layer.forward.total_s + layer.backward.total_s + layer.recompute.total_s


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
