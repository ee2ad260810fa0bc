"""The models of Zero Bubble's table 3, cut into stages: FLOPs, parameters and stashes of each.

A model of L layers has L + 2 slots: the embedding, the layers, and the head over the vocabulary. Each of P GPUs
holds (L + 2) / P slots in a row, so that the end stages have one layer less. For interleaved 1F1B each slot is a
stage of its own, dealt out in turn.

The counts, with s tokens a sequence, b sequences a micro-batch, h hidden, a heads, V words, in fp16:

- FLOPs of a layer (the paper's table 1): forward s b h (24 h + 4 s), input gradient s b h (24 h + 8 s), weight
  gradient 24 s b h^2. Of the head 2 s b h V each; of the embedding none.
- Stash of a layer: s b (34 h + 5 a s) bytes (the same table; Korthikanti et al., MLSys '23, equation 1), scores of
  attention kept, no fused attention. The weight gradient needs the inputs of its four products, 14 s b h of these,
  and the gradients of their outputs, 18 s b h, which the input gradient makes: 32 s b h in all, as in the table.
- Stash of the embedding: its dropout mask, s b h. Of the head (Korthikanti et al., section 4.3): the inputs of
  norm and product, 4 s b h, and logits in fp32, 4 s b V; the gradient of the logits in fp16, 2 s b V, is kept for
  the weight gradient.
- Parameters: 12 h^2 + 13 h a layer, V h in the head, and V h + s h in the embedding with its positions.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshweave.algorithms.pipeline import Stash
from meshweave.describe.model.transformer import Transformer

SEQUENCE = 1024
VOCABULARY = 32_000
"""Not stated. One table of 28 to 35 thousand rows fits all four sizes as printed (1.5B to 28.3B); 32000 is the
usual SentencePiece vocabulary in that range, and the authors' scripts use SentencePiece."""
BYTES_PER_ELEMENT = 2
BYTES_PER_PARAMETER = 20
"""fp16 weights and gradients, and in fp32 a copy of both and two moments (Megatron-LM's documentation of its
optimizer, "fp16 param, fp16 grads"). The authors' scripts train in fp16 and shard nothing."""
OPTIMIZER_BYTES_PER_PARAMETER = 52
"""Moved through memory by a step of Adam: gradients to fp32 6, unscaled 8, their norm 4, Adam 28, weights to fp16
6."""


@dataclass(frozen=True)
class Slots:
    """What a stage holds.

    Attributes:
        layers: the number of layers.
        has_embedding, has_head: whether it holds the embedding, the head.
    """

    layers: int
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True)
class TrainedModel:
    """A model of table 3 with the sequences of its micro-batch and the number of its GPUs."""

    name: str
    layers: int
    hidden: int
    heads: int
    micro_batch: int
    gpus: int

    @property
    def transformer(self) -> Transformer:
        """Return the model as a `Transformer`."""
        return Transformer(
            self.name, self.layers, self.hidden, self.heads, self.heads, self.hidden // self.heads,
            4 * self.hidden, VOCABULARY, False, "Zero Bubble, arXiv 2401.10241, table 3",
        )  # fmt: skip

    @property
    def tokens(self) -> int:
        """Return the tokens of a micro-batch."""
        return SEQUENCE * self.micro_batch

    @property
    def boundary_bytes(self) -> int:
        """Return the bytes that a micro-batch sends from one stage to the next."""
        return BYTES_PER_ELEMENT * self.tokens * self.hidden

    def stages(self, per_gpu: int = 1) -> tuple[Slots, ...]:
        """Return what each stage holds, with `per_gpu` stages on a GPU."""
        count = self.gpus * per_gpu
        size = (self.layers + 2) // count
        return tuple(
            Slots(size - (number == 0) - (number == count - 1), number == 0, number == count - 1)
            for number in range(count)
        )

    @property
    def most_stages_per_gpu(self) -> int:
        """Return the stages of a GPU where each layer is one, as the paper's interleaved 1F1B has it."""
        return (self.layers + 2) // self.gpus

    def flops(self, stage: Slots) -> tuple[int, int, int]:
        """Return the FLOPs of a forward, an input gradient and a weight gradient of a micro-batch."""
        tokens, h = self.tokens, self.hidden
        head = 2 * tokens * h * VOCABULARY * stage.has_head
        forward, backward, weights = 24 * h + 4 * SEQUENCE, 24 * h + 8 * SEQUENCE, 24 * h
        return (
            stage.layers * tokens * h * forward + head,
            stage.layers * tokens * h * backward + head,
            stage.layers * tokens * h * weights + head,
        )

    def stash(self, stage: Slots) -> Stash:
        """Return the bytes that a stage keeps of a micro-batch."""
        row, scores = self.tokens * self.hidden, 5 * self.heads * SEQUENCE * self.tokens
        logits = self.tokens * VOCABULARY * stage.has_head
        return Stash(
            until_input_grad=stage.layers * (20 * row + scores)
            + row * stage.has_embedding
            + 2 * row * stage.has_head
            + 4 * logits,
            until_weight_grad=stage.layers * 14 * row + 2 * row * stage.has_head,
            from_input_grad=stage.layers * 18 * row + 2 * logits,
        )

    def parameters(self, stage: Slots) -> int:
        """Return the parameters of a stage."""
        h = self.hidden
        tables = VOCABULARY * h * (stage.has_embedding + stage.has_head) + SEQUENCE * h * stage.has_embedding
        return stage.layers * (12 * h * h + 13 * h) + tables


MODELS = {
    model.name: model
    for model in (
        TrainedModel("1.5B", 22, 2304, 24, 6, 8),
        TrainedModel("6.2B", 30, 4096, 32, 3, 8),
        TrainedModel("14.6B", 46, 5120, 40, 1, 16),
        TrainedModel("28.3B", 62, 6144, 48, 1, 32),
    )
}
"""By name. From memory of table 3, not read verbatim."""
