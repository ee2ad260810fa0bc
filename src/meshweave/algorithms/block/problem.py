"""What a block computes: layers of a transformer, forward and backward, on a mesh of two to five axes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from meshweave.algorithms.block.roles import Side
from meshweave.base.errors import LayoutError, require_count, require_known, require_whole
from meshweave.base.units import DTYPES
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.model.architecture import Norm as NormKind
from meshweave.describe.model.dense import WHOLE, DenseForm, dense_layer
from meshweave.describe.model.layer import LayerGraph
from meshweave.describe.model.nodes import Features, NodeWeight, Norm
from meshweave.describe.model.transformer import Transformer
from meshweave.describe.model.workload import Workload

Family = Literal["gpt", "llama"]

MESH = "tp"
AXES = ("outer", "replica", "depth", "row", "col")
"""Names of the mesh axes; a mesh of fewer axes has the last ones."""

_FAMILIES = ("gpt", "llama")


@dataclass(frozen=True)
class ExpertRanks:
    """How the experts of a layer are divided over ranks, which its cost depends on.

    Attributes:
        expert: expert-parallel degree: each rank has at most ceil(experts / `expert`) experts.
        tensor: number of ranks that share each expert, along its inner features.
        load: copies of tokens that the most loaded rank gets, divided by the mean over all ranks.
        dispatcher: the library that carries copies, a name in `cost.exchange.libraries()`.
        grouped: whether one kernel multiplies for all experts, and activates between its products.
        loads: for a program, the copies of each rank of a group divided by their mean; the first one's is `load`.
            () where all have equally many.
        mesh: for a program, the ranks of a block as a mesh whose axis "rank" has the ranks that share the experts
            and "tensor" those that share each expert, where there are several; other axes hold copies. None where
            work alone is counted.
    """

    expert: int = 1
    tensor: int = 1
    load: float = 1.0
    dispatcher: str = "all_to_all"
    grouped: bool = True
    loads: tuple[float, ...] = ()
    mesh: Mesh | None = None

    def elements(self, weight: NodeWeight) -> int:
        """Return the number of elements of a parameter of experts on the rank that has most of it.

        A rank has ceil(experts / `expert`) experts, and of each ceil(units / `tensor`) units of inner features.
        """
        own = math.prod(
            -(-side.count // self.tensor) * side.unit if side.dim == "inner" else side.size
            for side in weight.sides
        )
        return -(-weight.experts // self.expert) * own

    def side(self, weight: NodeWeight) -> Side | None:
        """Return the only dim of the tensor that stands for a parameter of experts in a program.

        Each rank of `mesh` has its part of the parameter flattened, `elements(weight)` elements. None without a
        `mesh`, or for a parameter that is not of several experts.
        """
        if self.mesh is None or weight.experts == 1:
            return None
        return Side("expert", self.mesh.num_ranks, self.elements(weight))


@dataclass(frozen=True)
class BlockProblem:
    """Layers of a transformer on a mesh of rows and columns, also with depth and replicas before them.

    Without a `graph` each layer is N = norm(X), M = X + attention(N W_qkv) W_o, N' = norm(M), Z = M +
    activation(N' W_1) W_2. Family "gpt" has layer norms with a gain and a bias, and GELU; "llama" has
    root-mean-square norms with a gain, rotary positions in attention, and SwiGLU, for which W_1 has a gate and an
    input column by turns. Attention is causal and grouped: `heads / kv_heads` heads of queries share one head of
    keys and values, and W_qkv has the columns of one such group after those of another.

    Without `training` X (batch, sequence, hidden) is taken to Z. With it DZ is one more input, the gradient of a
    loss with respect to Z, and DX and the gradients of all weights are outputs, too.

    With a vocabulary, TOKENS (batch, sequence) are looked up in E (vocabulary, hidden). A last norm, the product
    with W_v (hidden, vocabulary) and a cross entropy with TARGETS follow Z: LOSS is their sum over tokens. X, Z
    and their gradients are then no inputs and outputs, and E and W_v have gradients. They are two tables.

    Attributes:
        batch, sequence: sequences of all ranks together, and tokens of a sequence.
        hidden, ffn: features of the residual, and inner features of the feed-forward half.
        heads, kv_heads, head_dim: heads of queries, heads of keys and values, and the width of each.
        mesh_shape: the sizes of the mesh: rows and columns; with three axes depth before them, with four
            replicas before these, with five an outer axis before all (`AXES`).
        layers: how many consecutive layers.
        training: whether the gradients are computed, too.
        vocabulary: the number of different tokens; 0 for layers alone.
        counts_masked: whether attention is priced over all pairs of query and key, as for kernels that do not skip
            masked tiles, or in FLOPs as Megatron-LM counts them. Else it is over the pairs that attend, as
            FlashAttention counts them (Dao 2023, section 4.1): sequence // 2 + 1 keys a query.
        biases: whether each of the four products of a layer without `graph` has a bias, as in GPT-3: BQKV, BO,
            B1 and B2.
        exact: whether norms, attention and activations are replaced by functions of small integers that depend on
            the same elements, so that results compare with `==` (`functions.py`).
        graph: the layer, where it is another than that of the sizes and the family; it takes `hidden` features.
        experts: where the experts are of a layer that has some; None for all on each rank.

    Raises:
        LayoutError: a size is under 1, `vocabulary` is negative, the mesh has not two to five axes, `kv_heads`
            does not divide `heads`, `graph` does not take `hidden` features, or family or dtype is unknown.
    """

    batch: int
    sequence: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    mesh_shape: tuple[int, ...] = (2, 2)
    layers: int = 1
    family: Family = "gpt"
    training: bool = True
    dtype: str = "float32"
    exact: bool = False
    vocabulary: int = 0
    counts_masked: bool = False
    biases: bool = False
    graph: LayerGraph | None = None
    experts: ExpertRanks | None = None

    def __post_init__(self) -> None:
        shape = tuple(
            require_whole(size, "block: a size of mesh_shape", LayoutError) for size in self.mesh_shape
        )
        object.__setattr__(self, "mesh_shape", shape)
        if len(self.mesh_shape) not in (2, 3, 4, 5) or min(self.mesh_shape) < 1:
            raise LayoutError(
                f"block: mesh_shape is {self.mesh_shape}; give 2 to 5 sizes, the last two (rows, columns)"
            )
        for name in ("batch", "sequence", "hidden", "heads", "kv_heads", "head_dim", "ffn", "layers"):
            count = require_count(getattr(self, name), f"block: {name}", LayoutError)
            object.__setattr__(self, name, count)
        if self.vocabulary < 0:
            raise LayoutError(f"block: vocabulary is {self.vocabulary}; give 0 for none")
        if self.heads % self.kv_heads:
            raise LayoutError(
                f"{self.kv_heads} heads of keys and values do not divide {self.heads} heads; give a divisor"
            )
        if self.graph is not None and Features("hidden", self.hidden) != self.graph.nodes[0].takes[0]:
            raise LayoutError(
                f"block: the layer does not take {self.hidden} hidden features; give one that does"
            )
        for name, known in (("family", _FAMILIES), ("dtype", tuple(DTYPES))):
            word = getattr(self, name)
            require_known(word, known, f"block: unknown {name}", LayoutError)

    @classmethod
    def of(
        cls,
        model: Transformer,
        workload: Workload,
        mesh_shape: tuple[int, ...],
        *,
        layers: int = 1,
        training: bool = True,
        counts_masked: bool = False,
    ) -> BlockProblem:
        """Return the problem of `layers` layers of a model, each like `model.layer`, without embedding and head.

        The family is "llama" for a gated FFN, else "gpt". If `model.layer` is not the layer that sizes and family
        describe, it becomes the `graph`. `workload.batch` counts the sequences of all ranks together.

        Raises:
            LayoutError: a size of the model, the workload or the mesh fits no `BlockProblem`.
        """
        block = cls(
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
            training,
            workload.dtype,
            counts_masked=counts_masked,
        )
        return block if block.layer == model.layer else replace(block, graph=model.layer)

    @property
    def mesh(self) -> Mesh:
        """Return the mesh "tp" of shape `mesh_shape` over ranks from 0; its axes are the last ones of `AXES`."""
        return Mesh.of(MESH, self.mesh_shape, AXES[-len(self.mesh_shape) :])

    @property
    def norm(self) -> NormKind:
        """Return the kind of the norm before the logits, "layer" or "rms".

        It is the kind of the first norm in `graph`; without a graph or a norm in it, "layer" for family "gpt" and
        "rms" for "llama".
        """
        norms = (node.kind for node in self.graph.nodes if isinstance(node, Norm)) if self.graph else ()
        return next(iter(norms), "layer" if self.family == "gpt" else "rms")

    @property
    def layer(self) -> LayerGraph:
        """Return the graph of one layer: `graph` if it is given, else the layer that sizes and family describe."""
        if self.graph is not None:
            return self.graph
        is_gated = self.family == "llama"
        biases = ("qkv", "out", "ff1", "ff2") if self.biases else ()
        return dense_layer(
            self.hidden,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.ffn,
            DenseForm(is_gated, self.norm, biases, rotary=WHOLE if is_gated else 0.0),
        )

    @property
    def statistics_dtype(self) -> str:
        """Return the dtype of statistics of norms and softmax: float32 for 16-bit dtypes, else the problem's."""
        return "float32" if self.dtype in ("bfloat16", "float16") else self.dtype


Overlap = Literal["layers", "sites"]
"""What communication of a layer may run beside: "layers": whatever a program of the whole layer has beside it;
"sites": the product that it belongs to, as where each product is a program of its own (`nn.parallel`)."""


@dataclass(frozen=True)
class BlockConfig:
    """What a strategy leaves open.

    Attributes:
        chunks: the most chunks into which a rank's batch is cut, so that the communication of one runs beside the
            products of the next. All have ceil(batch / chunks) sequences, but the last may have fewer, and there
            may be fewer chunks: 5 sequences in at most 4 chunks are 2, 2 and 1.
        scatter: how partial sums of heads or FFN features become a rank's part, as before attention in ATP:
            by "reduce_scatter", or by "all_reduce", after which a rank takes its part.
        slices: the most slices of each 2D product, which has as many as its sizes allow up to this, or else the
            fewest that they allow; 0 for the fewest, and where a strategy has no 2D products.
        packets: the most packets of each broadcast and reduction of a 2D product.
        overlap: what communication runs beside: see `Overlap`.

    Raises:
        LayoutError: `scatter` or `overlap` is none of the words above.
    """

    chunks: int = 1
    scatter: Literal["reduce_scatter", "all_reduce"] = "reduce_scatter"
    slices: int = 0
    packets: int = 1
    overlap: Overlap = "layers"

    def __post_init__(self) -> None:
        require_known(self.scatter, ("reduce_scatter", "all_reduce"), "block: unknown scatter", LayoutError)
        require_known(self.overlap, get_args(Overlap), "block: unknown overlap", LayoutError)

    def __str__(self) -> str:
        text = f"{self.chunks} chunks" if self.chunks > 1 else "1 chunk"
        if self.slices:
            text = f"S={self.slices}" + (f" D={self.packets}" if self.packets > 1 else "")
        if self.overlap == "sites":
            text += ", by sites"
        return text if self.scatter == "reduce_scatter" else f"{text}, all-reduce before scatter"
