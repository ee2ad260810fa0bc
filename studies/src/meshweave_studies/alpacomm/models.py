"""The models of AlpaComm's end-to-end evaluation (section 5.2, table 3), each in two stages of four GPUs.

GPT: hidden 2048 and 24 layers, or 2560 and 32; sequences of 1024, vocabulary 51200 (the authors' benchmark suite);
1024 sequences in micro-batches of 16. Layers are dealt to the two stages so that FLOPs are as equal as whole
layers allow, the head over the vocabulary counted.

U-Transformer. The paper does not give its shape. Ours is that of the authors' benchmark suite and model (in
alpa-projects/alpa: benchmark/alpa/suite_unet.py, alpa/model/unet_2d.py), read from stored copies, so that results
are illustrative: images of 32 x 32, C channels in the first of four levels (C, 2C, 4C, 4C), one residual block a
level with attention in the upper three, and the same on the way up, 13 layers in all; 2048 images in micro-batches
of 64. C is 480 (1B) or 672 (2.1B). A convolution is a product: 3 x 3 over c channels to d at n pixels is (n, 9 c)
by (9 c, d). The stages are those with the most equal FLOPs, as the paper says; its suite cuts two layers earlier.
What crosses between them is the activation and each residual that the second stage reads.

A part of a stage is its FLOPs at one rate and, where operators are split, the all-reduces of the split between the
GPUs of the host. Layers are recomputed in the backward (the suite's `use_remat`), so that an input gradient costs
two forwards and a weight gradient one; between the parts the inputs of layers are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from meshweave.base.units import dtype_bytes

GPUS = 4
"""Of a stage: all of a host."""
SEQUENCE, VOCABULARY = 1024, 51200
FLOPS_PER_S = {"float16": 39e12, "float32": 15.7e12}
"""Of a V100. Half precision: what a GPT of 1.2B parameters sustains on one (Shoeybi et al., Megatron-LM, 2019: 39
TFLOP/s, 30 % of its peak). Single precision: the peak of the datasheet, for want of a measured number."""


@dataclass(frozen=True)
class StageWork:
    """A stage of a model.

    Attributes:
        flops: of a forward of one row.
        parameters: of all GPUs together.
        kept: elements of one row that are kept from the forward to the backward.
        reduced: elements of one row that an all-reduce between GPUs of split operators takes in a forward.
    """

    flops: int
    parameters: int
    kept: int
    reduced: int = 0


@dataclass(frozen=True)
class GptShape:
    """A GPT, a row of whose batch is a sequence."""

    hidden: int
    layers: int

    @property
    def _layer_flops(self) -> int:
        return SEQUENCE * (24 * self.hidden**2 + 4 * SEQUENCE * self.hidden)

    @property
    def _head_flops(self) -> int:
        return 2 * SEQUENCE * self.hidden * VOCABULARY

    @cached_property
    def stages(self) -> tuple[StageWork, StageWork]:
        """Return the two stages."""
        layer, head = self._layer_flops, self._head_flops
        first = min(range(1, self.layers), key=lambda n: abs(n * layer - ((self.layers - n) * layer + head)))
        shapes = []
        for count, more in ((first, 0), (self.layers - first, head)):
            row = SEQUENCE * self.hidden
            parameters = 12 * count * self.hidden**2 + VOCABULARY * self.hidden
            shapes.append(StageWork(count * layer + more, parameters, count * row, 2 * count * row))
        return shapes[0], shapes[1]

    @property
    def boundary(self) -> tuple[int, ...]:
        """Return the shape of one row of what crosses to the second stage."""
        return SEQUENCE, self.hidden


@dataclass(frozen=True)
class UNetShape:
    """A U-Transformer, a row of whose batch is an image."""

    channels: int

    @cached_property
    def stages(self) -> tuple[StageWork, StageWork]:
        """Return the two stages."""
        shapes = []
        for part in (self._layers[: self.split], self._layers[self.split :]):
            parameters = sum(size for layer in part for _, size in layer.products)
            flops = sum(layer.flops for layer in part)
            shapes.append(StageWork(flops, parameters, sum(layer.kept for layer in part)))
        return shapes[0], shapes[1]

    @cached_property
    def split(self) -> int:
        """Return the number of layers in the first stage."""
        flops = [layer.flops for layer in self._layers]
        return min(range(1, len(flops)), key=lambda n: abs(sum(flops[:n]) - sum(flops[n:])))

    @property
    def boundary(self) -> tuple[int, ...]:
        """Return the shape of one row of what crosses to the second stage."""
        crossing = [self._layers[self.split - 1].out]
        crossing += [size for source, target, size in self._residuals if source < self.split <= target]
        return (sum(crossing),)

    @property
    def _residuals(self) -> tuple[tuple[int, int, int], ...]:
        """Return the layers that make and read each residual, and its elements."""
        c = self.channels
        first, second, third, last = c * 32 * 32, 2 * c * 16 * 16, 4 * c * 8 * 8, 4 * c * 4 * 4
        return (1, 11, first), (2, 10, second), (3, 9, third), (3, 8, last), (4, 7, last)

    @cached_property
    def _layers(self) -> tuple[_Layer, ...]:
        return tuple(self._generate_layers())

    def _generate_layers(self) -> Iterator[_Layer]:
        """Yield the 13 layers, from the input on."""
        c = self.channels
        levels = ((c, 32), (2 * c, 16), (4 * c, 8), (4 * c, 4))
        context = (16, 4 * c)
        yield _Layer.joined(3 * 32 * 32, _convolution(3, c, 32))
        before = c
        for (width, side), (_, smaller) in pairwise(levels):
            block = _residual_block(before, width, side), _transformer(width, side, context)
            yield _Layer.joined(before * side * side, *block, _convolution(width, width, smaller))
            before = width
        yield _Layer.joined(before * 16, _residual_block(before, 4 * c, 4))
        yield _Layer.joined(4 * c * 16, _residual_block(4 * c, 4 * c, 4), _transformer(4 * c, 4, context))
        yield _Layer.joined(4 * c * 16, _residual_block(4 * c, 4 * c, 4))
        yield _Layer.joined(8 * c * 16, _residual_block(8 * c, 4 * c, 4))
        yield _Layer.joined(8 * c * 16, _residual_block(8 * c, 4 * c, 4))
        before = 4 * c
        for width, side in reversed(levels[:3]):
            up = _convolution(before, before, side), _residual_block(before + width, width, side)
            kept = before * (side // 2) ** 2 + width * side * side
            yield _Layer.joined(kept, *up, _transformer(width, side, context))
            before = width
        yield _Layer.joined(c * 32 * 32, _convolution(c, 4, 32))


@dataclass(frozen=True)
class _Layer:
    """Operations of one row.

    Attributes:
        products: (pixels, elements of the weight) of each.
        attention: FLOPs of attention.
        kept, out: elements that the layer reads and makes.
    """

    products: tuple[tuple[int, int], ...] = ()
    attention: int = 0
    kept: int = 0
    out: int = 0

    @classmethod
    def joined(cls, kept: int, *parts: _Layer) -> _Layer:
        """Return a layer of some parts, whose input is kept."""
        products = tuple(product for part in parts for product in part.products)
        return cls(products, sum(part.attention for part in parts), kept, parts[-1].out)

    @property
    def flops(self) -> int:
        """Return the FLOPs of a forward."""
        return 2 * sum(pixels * size for pixels, size in self.products) + self.attention


def _convolution(width: int, out: int, side: int, kernel: int = 3) -> _Layer:
    """Return a convolution to an image of side x side."""
    return _Layer(((side * side, kernel * kernel * width * out),), out=side * side * out)


def _residual_block(width: int, out: int, side: int) -> _Layer:
    """Return two convolutions, and one of 1 x 1 beside them where the number of channels changes."""
    parts = [_convolution(width, out, side, 1)] if width != out else []
    return _Layer.joined(0, *parts, _convolution(width, out, side), _convolution(out, out, side))


def _transformer(width: int, side: int, context: tuple[int, int]) -> _Layer:
    """Return self-attention, attention to a context of (length, width) and a gated feed-forward, all projected."""
    pixels, (length, of_context) = side * side, context
    projections = (2 + 4 + 2 + 12) * width * width
    attention = 4 * pixels * (pixels + length) * width
    return _Layer(((pixels, projections), (length, 2 * of_context * width)), attention, out=pixels * width)


@dataclass(frozen=True)
class TrainedCase:
    """A row of table 3.

    Attributes:
        shape: the model.
        rows: of a micro-batch.
        micro_batches: of a step.
        operators: the GPUs between which operators are split; the others share rows.
        dtype: of activations and arithmetic.
        flops_per_s: of a GPU; None for the rate of the dtype.
    """

    shape: GptShape | UNetShape
    rows: int
    micro_batches: int
    operators: int = 1
    dtype: str = "float16"
    flops_per_s: float | None = None

    def part_s(self, stage: StageWork, forwards: int, nvlink_bytes_per_s: float) -> float:
        """Return the seconds of a part of a stage (a forward or a gradient) that costs as much as `forwards`
        forwards.
        """
        compute_s = self.rows * stage.flops / GPUS / (self.flops_per_s or FLOPS_PER_S[self.dtype])
        replicas = GPUS // self.operators
        moved = 2 * (self.operators - 1) / self.operators * dtype_bytes(self.dtype)
        reduce_s = self.rows // replicas * stage.reduced * moved / nvlink_bytes_per_s
        return forwards * (compute_s + reduce_s)


CASES: dict[str, TrainedCase] = {
    "GPT 1.3B (2, 2, 2)": TrainedCase(GptShape(2048, 24), 16, 64, operators=2),
    "GPT 2.6B (2, 2, 2)": TrainedCase(GptShape(2560, 32), 16, 64, operators=2),
    "GPT 2.6B (4, 1, 2)": TrainedCase(GptShape(2560, 32), 16, 64),
    "U-Transformer 1B": TrainedCase(UNetShape(480), 64, 32),
    "U-Transformer 2.1B": TrainedCase(UNetShape(672), 64, 32),
    "U-Transformer 2.1B, fp32": TrainedCase(UNetShape(672), 64, 32, dtype="float32"),
}
"""By name: the parallel degrees are (data, operator, pipeline)."""

FITTED = "U-Transformer 2.1B, fitted"
FITTED_FLOPS_PER_S = 24e12
"""The rate, in steps of 2 TFLOP/s, with which the one-byte-signal bound of this model is 1.5 times the
all-gathers, the most that section 4 states: transfers as heavy as theirs. Fitted on that number alone."""
ALL_CASES = {
    **CASES,
    FITTED: TrainedCase(UNetShape(672), 64, 32, flops_per_s=FITTED_FLOPS_PER_S),
}
"""Those of table 3, and the fitted one."""
