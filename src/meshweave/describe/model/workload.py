"""A training step's matrix products, from a model and a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshweave.base.errors import DescriptionError, did_you_mean
from meshweave.base.units import DTYPES
from meshweave.describe.files import format_value
from meshweave.describe.model.transformer import Transformer

MAX_SIZE = 2**31
"""The most sequences in a batch, and tokens in a sequence: more is a typing mistake."""

Pass = Literal["forward", "backward_data", "backward_weight"]


def _check_dtype(owner: str, dtype: str) -> None:
    if dtype not in DTYPES:
        raise DescriptionError(
            f"{owner}: unknown dtype '{dtype}'{did_you_mean(dtype, DTYPES)}; known: {', '.join(DTYPES)}"
        )


@dataclass(frozen=True)
class Workload:
    """A global batch of `batch` sequences of `sequence` tokens each. Raises DescriptionError."""

    batch: int
    sequence: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for key, size in (("batch", self.batch), ("sequence", self.sequence)):
            if size < 1:
                raise DescriptionError(f"workload: {key} is {size}; give at least 1")
            if size > MAX_SIZE:
                raise DescriptionError(f"workload: {key} is {format_value(size)}; give at most {MAX_SIZE}")
        _check_dtype("workload", self.dtype)

    @property
    def tokens(self) -> int:
        """Return the number of tokens of the global batch."""
        return self.batch * self.sequence


@dataclass(frozen=True)
class Gemm:
    """C (m, n) = A (m, k) B (k, n), in global sizes. Raises DescriptionError for a wrong size or dtype."""

    name: str
    pass_: Pass
    m: int
    n: int
    k: int
    dtype: str

    def __post_init__(self) -> None:
        if min(self.m, self.n, self.k) < 1:
            raise DescriptionError(
                f"gemm {self.name}: (m, n, k) is {self.m, self.n, self.k}; give at least 1 each"
            )
        _check_dtype(f"gemm {self.name}", self.dtype)

    @property
    def flops(self) -> int:
        """Return the FLOPs of the product, 2 m n k: one multiply-add is 2 FLOPs."""
        return 2 * self.m * self.n * self.k


def block_gemms(model: Transformer, workload: Workload) -> tuple[Gemm, ...]:
    """Return the 12 GEMMs of one transformer block's fully connected layers, layer by layer.

    | pass            | product      | (m, n, k)         |
    |-----------------|--------------|-------------------|
    | forward         | Y  = X W     | (tokens, out, in) |
    | backward_data   | X' = Y' W^T  | (tokens, in, out) |
    | backward_weight | W' = X^T Y'  | (in, out, tokens) |
    """
    tokens, dtype = workload.tokens, workload.dtype
    gemms: list[Gemm] = []
    for layer in model.fc_layers():
        name, fan_in, fan_out = layer.name, layer.in_features, layer.out_features
        gemms.append(Gemm(name, "forward", tokens, fan_out, fan_in, dtype))
        gemms.append(Gemm(name, "backward_data", tokens, fan_in, fan_out, dtype))
        gemms.append(Gemm(name, "backward_weight", fan_in, fan_out, tokens, dtype))
    return tuple(gemms)
