"""An iteration of training and a prompt, as T3 composes them (section 5.1.2): sliced sub-layers and all else.

The paper scales the sliced sub-layers' share of an iteration by their simulated speed-ups. Its breakdown
(figure 4) comes from MLPerf's BERT on an MI210, and is not in its text. Two readings give what it leaves open,
fixed before any row:

`counted`: what a layer does besides, by count. The other products (forward those of IP and FC-1; backward the
input gradients of OP and FC-2 and all weight gradients) at the rate of the simulated ones; attention and
element-wise operations of `layer_operations`, without fused attention as in the paper, at the GPU's
peak rates, those over the heads and the FFN's inner size sliced and the others not; Adam on the rank's
parameters when training.

`stated`: section 6.3 says that attention outside the sliced sub-layers takes 40 to 45 % of the time: 42.5 %
besides products and all-reduces, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshweave.describe.machine.gpu import load_gpu
from meshweave_studies.layer_operations import ops_besides_fc_layers
from meshweave_studies.t3.models import BACKWARD, FORWARD, MODELS, SubLayer
from meshweave_studies.t3.study import GPU, T3Study
from meshweave_studies.zero_bubble.models import OPTIMIZER_BYTES_PER_PARAMETER

Phase = Literal["training", "prompt"]
Basis = Literal["counted", "stated"]
BASES: tuple[Basis, ...] = ("counted", "stated")
STATED_SHARE = 0.425
"""Section 6.3: 40 to 45 % of the execution time."""
_WHOLE = ("layer norms", "bias, dropout, residual")
"""Operations that every rank does on all of the hidden size."""
_PRODUCTS_H2 = {"prompt": (12, 5), "training": (36, 12)}
"""Of all products of a layer, and of those with an all-reduce: FLOPs over 2 tokens H^2."""


@dataclass(frozen=True)
class Iteration:
    """Seconds of one layer in an iteration.

    Attributes:
        sequential, t3, mca: the sliced sub-layers by configuration.
        product, reduce_scatter, all_gather: the parts of the sequential ones.
        other_products: products without a collective.
        rest: what is no product.
    """

    sequential: float
    t3: float
    mca: float
    product: float
    reduce_scatter: float
    all_gather: float
    other_products: float
    rest: float

    @property
    def others(self) -> float:
        """Return the seconds besides the sliced sub-layers."""
        return self.other_products + self.rest

    @property
    def seconds(self) -> float:
        """Return the seconds of a layer with sequential sub-layers."""
        return self.sequential + self.others

    @property
    def communication_share(self) -> float:
        """Return the percentage of the time that collectives take."""
        return self.share_with_faster_products(1)

    def share_with_faster_products(self, times: float) -> float:
        """Return the percentage of the time that collectives take with products so many times as fast."""
        collectives = self.reduce_scatter + self.all_gather
        saved = (self.product + self.other_products) * (1 - 1 / times)
        return 100 * collectives / (self.seconds - saved)

    def gain(self, configuration: Literal["t3", "mca"]) -> float:
        """Return by how many percent an iteration is faster than the sequential one."""
        return 100 * (self.seconds / (float(getattr(self, configuration)) + self.others) - 1)


def iteration(study: T3Study, model: str, degree: int, phase: Phase, basis: Basis) -> Iteration:
    """Return an iteration of a model at a tensor-parallel degree."""
    names = FORWARD if phase == "prompt" else (*FORWARD, *BACKWARD)
    layers = [SubLayer(model, degree, name) for name in names]
    times = [study.times(layer) for layer in layers]
    sequential = sum(one.sequential for one in times)
    every, sliced = _PRODUCTS_H2[phase]
    products = sum(one.product for one in times) * (every - sliced) / sliced
    if basis == "stated":
        rest = (sequential + products) * STATED_SHARE / (1 - STATED_SHARE)
    else:
        rest = besides_products_s(model, degree, phase)
    return Iteration(
        sequential,
        sum(one.t3 for one in times),
        sum(one.mca for one in times),
        sum(one.product for one in times),
        sum(one.reduce_scatter for one in times),
        sum(one.all_gather for one in times),
        products,
        rest,
    )


def besides_products_s(model: str, degree: int, phase: Phase) -> float:
    """Return the seconds of a layer's attention and element-wise operations on a rank, in training with Adam."""
    sizes, gpu = MODELS[model], load_gpu(GPU)
    bytes_per_s = gpu.memory.bytes_per_s
    seconds = sum(
        max(op.flops / gpu.flops_per_s, op.bytes / bytes_per_s) / (1 if op.name in _WHOLE else degree)
        for op in ops_besides_fc_layers(sizes.transformer, sizes.workload)
        if phase == "training" or op.direction == "forward"
    )
    if phase == "training":
        seconds += 12 * sizes.hidden**2 / degree * OPTIMIZER_BYTES_PER_PARAMETER / bytes_per_s
    return seconds
