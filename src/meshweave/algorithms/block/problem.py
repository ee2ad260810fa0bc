"""What a block computes: layers of a transformer, forward and backward, on a mesh of two axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshweave.base.errors import LayoutError, did_you_mean
from meshweave.base.units import DTYPES
from meshweave.describe.model.transformer import Transformer
from meshweave.describe.model.workload import Workload

Family = Literal["gpt", "llama"]
Part = Literal["forward", "training"]

_FAMILIES = ("gpt", "llama")
_PARTS = ("forward", "training")


@dataclass(frozen=True)
class BlockProblem:
    """Layers of a transformer on a (rows, columns) mesh.

    Each layer is N = norm(X), M = X + attention(N W_qkv) W_o, N' = norm(M), Z = M + activation(N' W_1) W_2. Family
    "gpt" has layer norms with a gain and a bias, and GELU; "llama" has root-mean-square norms with a gain, rotary
    positions in attention, and SwiGLU, for which W_1 has a gate and an input column by turns. Attention is causal
    and grouped: `heads / kv_heads` heads of queries share one head of keys and values, and W_qkv has the columns
    of one such group after those of another.

    Part "forward" takes X (batch, sequence, hidden) to Z. Part "training" also takes DZ, the gradient of a loss by
    Z, and gives DX and the gradients of all weights.

    With a vocabulary, TOKENS (batch, sequence) are looked up in E (vocabulary, hidden). A last norm, the product
    with W_v (hidden, vocabulary) and a cross entropy with TARGETS follow Z: LOSS is their sum over tokens. X, Z
    and their gradients are then no inputs and outputs, and E and W_v have gradients. They are two tables.

    Attributes:
        vocabulary: the number of different tokens; 0 for layers alone.
        exact: whether norms, attention and activations are replaced by functions of small integers that depend on
            the same elements, so that results compare with `==` (`functions.py`).

    Raises:
        LayoutError: a size is under 1, heads are not divided by `kv_heads`, or a word is none of those above.
    """

    batch: int
    sequence: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    mesh_shape: tuple[int, int] = (2, 2)
    layers: int = 1
    family: Family = "gpt"
    part: Part = "training"
    dtype: str = "float32"
    exact: bool = False
    vocabulary: int = 0

    def __post_init__(self) -> None:
        sizes = (self.batch, self.sequence, self.hidden, self.heads, self.kv_heads, self.head_dim, self.ffn)
        if len(self.mesh_shape) != 2 or min(*sizes, *self.mesh_shape, self.layers) < 1 or self.vocabulary < 0:
            raise LayoutError("sizes, layers and the two mesh sides of a block must be positive")
        if self.heads % self.kv_heads:
            raise LayoutError(
                f"{self.kv_heads} heads of keys and values do not divide {self.heads} heads; give a divisor"
            )
        for word, known in (
            (self.family, _FAMILIES),
            (self.part, _PARTS),
            (self.dtype, DTYPES),
        ):
            if word not in known:
                raise LayoutError(f"a block has no '{word}'{did_you_mean(word, known)}")

    @classmethod
    def of(
        cls,
        model: Transformer,
        workload: Workload,
        mesh_shape: tuple[int, int],
        *,
        layers: int = 1,
        part: Part = "training",
    ) -> BlockProblem:
        """Return the problem of `layers` layers of a model, by its sizes.

        A gated FFN makes it "llama" (root-mean-square norms, rotary positions, SwiGLU), any other "gpt" (layer
        norms, GELU), whatever norms and positions the model has. Raises LayoutError.
        """
        return cls(
            workload.batch,
            workload.sequence,
            model.hidden,
            model.num_heads,
            model.num_kv_heads,
            model.head_dim,
            model.ffn_hidden,
            mesh_shape,
            layers,
            "llama" if model.gated_ffn else "gpt",
            part,
            workload.dtype,
        )

    @property
    def is_training(self) -> bool:
        """Return whether the gradients are computed, too."""
        return self.part == "training"

    @property
    def queries_per_group(self) -> int:
        """Return the number of heads of queries that share one head of keys and values."""
        return self.heads // self.kv_heads

    @property
    def group_width(self) -> int:
        """Return the columns of W_qkv of one group: its queries, then its keys, then its values."""
        return (self.queries_per_group + 2) * self.head_dim

    @property
    def gates(self) -> int:
        """Return the columns of W_1 per inner feature: 2 where the activation is gated."""
        return 2 if self.family == "llama" else 1

    @property
    def norm_rows(self) -> int:
        """Return the parameters of a norm per feature, and its statistics per token: 2 with a mean and a bias."""
        return 2 if self.family == "gpt" else 1

    @property
    def statistics_dtype(self) -> str:
        """Return the dtype of statistics of norms and of softmax: never a half one."""
        return "float32" if self.dtype in ("bfloat16", "float16") else self.dtype


@dataclass(frozen=True)
class BlockConfig:
    """What a strategy leaves open.

    Attributes:
        chunks: the number of parts into which a rank's batch is cut, so that the communication of one runs beside
            the products of the next. The last one may be smaller.
        scatter: how a sum of which each rank needs a part gets there: by "reduce_scatter", or by "all_reduce",
            after which a rank takes its part.
        slices: the most slices of each 2D product.
        packets: the packets of each broadcast and reduction of a 2D product.
    """

    chunks: int = 1
    scatter: Literal["reduce_scatter", "all_reduce"] = "reduce_scatter"
    slices: int = 0
    packets: int = 1

    def __str__(self) -> str:
        text = f"{self.chunks} chunks" if self.chunks > 1 else "1 chunk"
        if self.slices:
            text = f"S={self.slices}" + (f" D={self.packets}" if self.packets > 1 else "")
        return text if self.scatter == "reduce_scatter" else f"{text}, all-reduce before scatter"
