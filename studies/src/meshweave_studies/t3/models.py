"""The models of T3's table 2 and their sliced sub-layers, whose outputs are all-reduced.

A rank of P multiplies X (tokens, k) by W (k, H), where k is H / P for the output projection (OP) and 4 H / P
for the second fully connected layer (FC-2), forward; and the gradients of the inputs of the first one (FC-1, k
= 4 H / P) and of the input projection (IP, k = 3 H / P), backward. Forward W lies transposed in memory,
backward it does not (section 5.2).

Where a rank's part of the tokens is smaller than a tile, the transposed product C^T = W^T X^T is cut instead,
so that parts are rows of tiles of the hidden dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshweave.describe.model.transformer import Transformer
from meshweave.describe.model.workload import Workload
from meshweave_studies.t3.programs import SlicedProduct

SubLayerName = Literal["OP", "FC-2", "FC-1", "IP"]
DEPTHS: dict[SubLayerName, int] = {"OP": 1, "FC-2": 4, "FC-1": 4, "IP": 3}
"""The inner dimension of each sub-layer, in hidden sizes."""
FORWARD: tuple[SubLayerName, ...] = ("OP", "FC-2")
BACKWARD: tuple[SubLayerName, ...] = ("FC-1", "IP")
SEQUENCE = 1024
"""Tokens of a sequence (table 2)."""
TILE = 128
"""Rows of a tile: a part of fewer tokens is cut along the hidden dimension instead."""
DTYPE = "float16"


@dataclass(frozen=True)
class SlicedModel:
    """A model of table 2 with its batch and the tensor-parallel degrees that it is studied at.

    Heads are not in the table; they are those of the model's own paper, and only attention's scores depend on
    them.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    batch: int
    degrees: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Return the tokens of a batch."""
        return self.batch * SEQUENCE

    @property
    def transformer(self) -> Transformer:
        """Return the model as a `Transformer`."""
        return Transformer(
            self.name, self.layers, self.hidden, self.heads, self.heads, self.hidden // self.heads,
            4 * self.hidden, None, False, "T3, ASPLOS '24, table 2",
        )  # fmt: skip

    @property
    def workload(self) -> Workload:
        """Return its batch, sequence length and dtype."""
        return Workload(self.batch, SEQUENCE, DTYPE)


MODELS = {
    model.name: model
    for model in (
        SlicedModel("Mega-GPT-2", 3072, 74, 32, 16, (8, 16)),
        SlicedModel("T-NLG", 4256, 78, 28, 8, (8, 16)),
        SlicedModel("GPT-3", 12288, 96, 96, 2, (32, 64)),
        SlicedModel("PALM", 18432, 118, 48, 2, (32, 64)),
        SlicedModel("MT-NLG", 20480, 105, 128, 2, (32, 64)),
        SlicedModel("1T", 25600, 128, 160, 2, (64,)),
    )
}
"""By name. The paper has the large models at TP 32; TP 64 is its degree for future ones.

1T: the paper has a model of a trillion parameters at TP 64 without its sizes; these are those of Narayanan et al.
(SC '21), table 1, with the batch of the other large models. Its model of ten trillion is left out."""
STUDIED, LARGE, FUTURE = ("Mega-GPT-2", "T-NLG"), ("GPT-3", "PALM", "MT-NLG"), ("1T",)
SMALL_DEGREES, LARGE_DEGREE, FUTURE_DEGREE = (8, 16), 32, 64
"""Tensor-parallel degrees at which the paper studies the small, large and future models."""


@dataclass(frozen=True)
class SubLayer:
    """A sliced sub-layer of a model; `tokens` is another batch than the model's own where it is not 0."""

    model: str
    degree: int
    name: SubLayerName
    tokens: int = 0

    def __str__(self) -> str:
        return f"{self.model} TP {self.degree}, {self.name}"

    @property
    def product(self) -> SlicedProduct:
        """Return its product, transposed where the tokens of a part are fewer than a tile's rows."""
        model = MODELS[self.model]
        tokens, hidden = self.tokens or model.tokens, model.hidden
        depth, is_forward = DEPTHS[self.name] * hidden // self.degree, self.name in FORWARD
        if tokens >= TILE * self.degree:
            return SlicedProduct(tokens, hidden, depth, self.degree, False, is_forward, DTYPE)
        return SlicedProduct(hidden, tokens, depth, self.degree, not is_forward, True, DTYPE)

    @property
    def flops(self) -> int:
        """Return the FLOPs of one rank."""
        product = self.product
        return 2 * product.rows * product.columns * product.depth


def sub_layers(
    *models: str, degrees: tuple[int, ...] = (), names: tuple[SubLayerName, ...] = (*FORWARD, *BACKWARD)
) -> tuple[SubLayer, ...]:
    """Return the sub-layers of these names, of each model at its degrees that are in `degrees`; () for all."""
    return tuple(
        SubLayer(model, degree, name)
        for model in models
        for degree in MODELS[model].degrees
        if not degrees or degree in degrees
        for name in names
    )


def sub_layer_of(text: str) -> SubLayer:
    """Return the sub-layer whose `str` is this text, such as "T-NLG TP 8, FC-2". Raises KeyError for others."""
    return {str(layer): layer for layer in sub_layers(*MODELS)}[text]
