"""The memory that training a transformer takes on one chip, and the FLOPs of a step.

Under 2D tensor parallelism every matrix, weights and activations alike, is sharded over all chips of the mesh
and none is replicated, so each count is the model's, divided by the number of chips. The buffers in which a
product gathers slices of its operands come on top: they are part of a plan's peak memory.

Sources:
    Rajbhandari et al., ZeRO (SC '20), section 3.1: bytes of weights, gradients and optimiser states.
    Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (MLSys '23), section 4:
    bytes of activations, equation 1; what recomputation leaves of them, table 2; FLOPs of a step, equations 7, 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshweave.base.errors import DescriptionError
from meshweave.base.units import dtype_bytes, format_bytes
from meshweave.describe.model.nodes import KeptKind
from meshweave.describe.model.transformer import Transformer
from meshweave.describe.model.workload import Workload

Recompute = Literal["none", "selective", "full"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")

Pairs = Literal["causal", "all"]
"""The pairs of tokens whose attention counts as FLOPs. "causal": the s (s + 1) / 2 of a sequence that a causal
mask leaves, which kernels compute and prices have (Dao, FlashAttention-2, 2023, section 4.1; Megatron-LM of 2025,
`num_floating_point_operations`). "all": s s, masked or not (Chowdhery et al., PaLM, 2022, appendix B; Korthikanti
et al., equation 7)."""

ADAM_BYTES = {2: 12, 4: 8, 8: 16}
"""Adam's bytes per parameter beyond weights and gradients, by bytes of a weight. Beside 16-bit weights: a
float32 copy of them, momentum and variance, 4 bytes each (ZeRO, section 3.1). Wider weights are their own
copy, which leaves momentum and variance."""


@dataclass(frozen=True)
class OptimizerStates:
    """The states that an optimizer keeps of each parameter, besides an fp32 copy of narrower weights.

    Attributes:
        count: how many: Adam's are momentum and variance (ZeRO, SC '20, section 3.1).
        num_bytes: the bytes of each.
    """

    count: int
    num_bytes: int

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all states of a parameter."""
        return self.count * self.num_bytes


def activation_bytes(model: Transformer, workload: Workload, recompute: Recompute = "none") -> int:
    """Return the bytes that the forward pass of one block stores for its backward pass, on all chips together.

    With s tokens in each of b sequences, hidden size h, a heads of size d (g of them for keys and for values),
    inner FFN size f and e bytes per element; masks of dropout, counted for every
    model, take one byte per element:

        attention     input (s b h), Q (s b a d), K and V (s b g d), input of `out` (s b a d), mask (s b h);
                      scores after softmax and after dropout (a s s b each) and their mask
        FFN           input (s b h), input and output of the activation (s b f each), mask (s b h); a gated
                      FFN keeps the other half of its input, and the product of both halves (s b f each)
        layer norms   two inputs (s b h each)

    For e = 2, a d = g d = h and f = 4 h, that is `s b h (34 + 5 a s / h)`, equation 1 of Korthikanti et al.
    "selective" recomputes all that grows with s squared: `34 s b h`; "full" keeps the input of the block:
    `2 s b h` (table 2 there). Of several kinds of layers it is the first.
    """
    e, layer = dtype_bytes(workload.dtype), model.layer
    if recompute == "full":
        return e * workload.tokens * layer.features[layer.input].size
    kinds: tuple[KeptKind, ...] = ("mask", "gate")
    if recompute == "none":
        kinds += ("scores", "dropped scores", "score mask")
    return workload.tokens * layer.kept_bytes(e, workload.sequence, kinds)


def layers_activation_bytes(model: Transformer, workload: Workload, recompute: Recompute = "none") -> int:
    """Return the bytes that the forward pass of all layers stores, on all chips (see `activation_bytes`)."""
    return sum(count * activation_bytes(kind, workload, recompute) for count, kind in model.kinds)


def step_flops(
    model: Transformer, workload: Workload, pairs: Pairs = "causal", recompute: Recompute = "none"
) -> int:
    """Return the FLOPs of a training step, forward and backward; a multiply-add is 2 FLOPs.

    Three products of 2 FLOPs per weight and token for each fully connected layer and for the logits (where the
    vocabulary is known), and attention's two products, `12 b p a d` a block with p pairs of tokens a sequence.
    With all pairs, for a d = h and f = 4 h, that is `72 b s L h h (1 + s / 6 h + v / 12 h L)`, equation 7 of
    Korthikanti et al.

    Args:
        pairs: the pairs of tokens that count: "causal" for those that mask and window leave, or "all".
        recompute: what is computed again, and counts too: attention (equation 8 there), or all of a block's
            forward part (Narayanan et al., SC '21, equation 3).
    """
    attention = workload.batch * sum(  # of all layers, forward
        count * kind.layer.attention_flops(workload.sequence, counts_masked=pairs == "all")
        for count, kind in model.kinds
    )
    weights = sum(count * kind.layer.num_active_weights for count, kind in model.kinds)
    products = 2 * workload.tokens * weights
    again = {"none": 0, "selective": attention, "full": products + attention}
    logits = 6 * workload.tokens * model.hidden * (model.vocab_size or 0)
    return 3 * products + logits + 3 * attention + again[recompute]


@dataclass(frozen=True)
class ChipMemory:
    """The share of one of `num_chips` chips in a training step: bytes that it holds and FLOPs, rounded up.

    All fields but `num_chips` are shares of one chip. `activation_bytes` is by kind of recomputation ("none",
    "selective", "full").
    """

    num_chips: int
    num_parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: dict[Recompute, int]
    step_flops: int

    @property
    def state_bytes(self) -> int:
        """Return the bytes of weights, gradients and optimiser states on the chip."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes

    def total_bytes(self, recompute: Recompute = "none") -> int:
        """Return the bytes of states and activations on the chip, under a kind of recomputation."""
        return self.state_bytes + self.activation_bytes[recompute]

    def least_recompute(self, memory_bytes: int) -> Recompute | None:
        """Return the least recomputation with which all fits into `memory_bytes`; None if "full" does not."""
        return next((kind for kind in RECOMPUTES if self.total_bytes(kind) <= memory_bytes), None)

    def summary(self, memory_bytes: int) -> str:
        """Return one line: bytes of weights, gradients, Adam and activations beside the chip's `memory_bytes`.

        It ends with whether they fit, and with which kind of recomputation.
        """
        activations = self.activation_bytes
        kind = self.least_recompute(memory_bytes)
        if kind is None:
            verdict = "does not fit, with full recomputation neither"
        else:
            verdict = {
                "none": "fits",
                "selective": "fits with selective recomputation",
                "full": "fits with full recomputation",
            }[kind]
        return (
            f"memory per chip: weights {format_bytes(self.weight_bytes)}, gradients "
            f"{format_bytes(self.gradient_bytes)}, Adam {format_bytes(self.optimizer_bytes)}, activations "
            f"{format_bytes(activations['none'])} (selective recomputation "
            f"{format_bytes(activations['selective'])}, full {format_bytes(activations['full'])}) "
            f"of {format_bytes(memory_bytes)}: {verdict}"
        )


def chip_memory(model: Transformer, workload: Workload, num_chips: int) -> ChipMemory:
    """Return the share of one of `num_chips` chips in a whole model, under 2D tensor parallelism over all.

    Raises:
        DescriptionError: there is less than one chip, or the workload's dtype is not a floating-point one.
    """
    if num_chips < 1:
        raise DescriptionError(f"{num_chips} chips; give at least 1")
    element = dtype_bytes(workload.dtype)
    if not workload.dtype.startswith(("float", "bfloat")):
        raise DescriptionError(f"models are not trained in {workload.dtype}; give a floating-point dtype")
    count = model.num_parameters

    def share(total: int) -> int:
        return -(-total // num_chips)

    return ChipMemory(
        num_chips,
        share(count),
        share(element * count),
        share(element * count),
        share(ADAM_BYTES[element] * count),
        {kind: share(layers_activation_bytes(model, workload, kind)) for kind in RECOMPUTES},
        share(step_flops(model, workload)),
    )
