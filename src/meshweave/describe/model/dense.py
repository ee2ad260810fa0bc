"""The layers of dense transformers, and their heads, as graphs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshweave.describe.model.architecture import Norm as NormKind
from meshweave.describe.model.head_norm import HeadNorm
from meshweave.describe.model.layer import LayerGraph
from meshweave.describe.model.nodes import (
    Activation,
    Attention,
    EdgeSum,
    Features,
    Group,
    LayerNode,
    Linear,
    Norm,
)

Modules = tuple[tuple[str, int], ...]

WHOLE = 1.0
"""The value of `rotary` with which rotary positions turn all of a head."""


@dataclass(frozen=True)
class DenseForm:
    """What a dense layer has besides sizes.

    Attributes:
        gated: whether the feed-forward part is gated.
        norm: the kind of the norms.
        biases: which of the products "qkv", "out", "ff1" and "ff2" add a bias.
        rotary, window: as in `nodes.Attention`.
        post_norms: whether a norm follows each part, too, before it is added.
        parallel: whether both parts read the same residual, and are added to it at once.
        shared_norm: whether they then read one norm.
        qk_norm: whether queries and keys are normalised head by head.
    """

    gated: bool
    norm: NormKind
    biases: tuple[str, ...] = ()
    rotary: float = 0.0
    window: int | None = None
    post_norms: bool = False
    parallel: bool = False
    shared_norm: bool = False
    qk_norm: bool = False


@lru_cache(maxsize=4096)
def dense_layer(
    hidden: int,
    heads: int,
    kv_heads: int,
    width: int,
    ffn: int,
    form: DenseForm,
) -> LayerGraph:
    """Return a layer of attention and a feed-forward part, each after a norm and added to the residual.

    Its edges are X (input), NA (norm before attention), QKV, A (attention), O (its output projection), M
    (residual after attention), NF (norm before the feed-forward part), Y, H (activation), F and Z (output). By
    `form` QKVN, ON and FN (norms of QKV, O and F) join them; a parallel layer has no M, and with a shared norm
    no NF. Weights are WQKV, WO, W1_ (NF to Y) and W2_ (H to F), modules those of Llama. Columns of WQKV are
    ordered by groups of heads, within a group queries, keys, values; gate and input columns of a gated W1_
    alternate.

    Args:
        hidden: features of the residual.
        heads, kv_heads: heads of queries, and of keys and values.
        width: features of a head.
        ffn: inner features of the feed-forward part.
        form: what the layer has besides sizes.
    """
    gated, norm, biases = form.gated, form.norm, form.biases
    residual, per_group = Features("hidden", hidden), heads // kv_heads
    joint = "QKVN" if form.qk_norm else "QKV"
    attention = Attention(
        "A", (joint,), "attention", kv_heads, per_group, width, "L", form.window, form.rotary
    )
    activation = Activation("H", ("Y",), "feed_forward", ffn, gated)
    keys = kv_heads * width
    of_qkv = ("self_attn.q_proj", heads * width), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)
    of_ff1 = (("mlp.gate_proj", ffn), ("mlp.up_proj", ffn)) if gated else (("mlp.fc1", ffn),)

    def normed(edge: str, out: str, group: Group, letters: str, module: str = "") -> Norm:
        return Norm(out, (edge,), group, residual, norm, f"G{letters}", f"S{letters}", module)

    def linear(edge: str, out: str, of: LayerNode, name: str, weight: str, modules: Modules) -> Linear:
        ends = (residual, of.takes[0]) if edge != of.out else (of.makes, residual)
        return Linear(out, (edge,), of.group, *ends, name, weight, name in biases, modules)

    first = [
        normed("X", "NA", "attention", "A", "input_layernorm"),
        linear("NA", "QKV", attention, "qkv", "WQKV", of_qkv),
        *([HeadNorm("QKVN", ("QKV",), "attention", kv_heads, per_group, width)] if form.qk_norm else []),
        attention,
        linear("A", "O", attention, "out", "WO", (("self_attn.o_proj", hidden),)),
    ]
    is_shared = form.parallel and form.shared_norm
    second = [
        linear("NA" if is_shared else "NF", "Y", activation, "ff1", "W1_", of_ff1),
        activation,
        linear("H", "F", activation, "ff2", "W2_", (("mlp.down_proj" if gated else "mlp.fc2", hidden),)),
    ]
    if not is_shared:
        second.insert(
            0, normed("X" if form.parallel else "M", "NF", "feed_forward", "F", "post_attention_layernorm")
        )
    ends = ["O", "F"]
    if form.post_norms:
        first.append(normed("O", "ON", "attention", "PA"))
        second.append(normed("F", "FN", "feed_forward", "PF"))
        ends = ["ON", "FN"]
    if form.parallel:
        return LayerGraph((*first, *second, EdgeSum("Z", ("X", *ends), "feed_forward", residual)))
    middle = EdgeSum("M", ("X", ends[0]), "attention", residual)
    return LayerGraph((*first, middle, *second, EdgeSum("Z", ("M", ends[1]), "feed_forward", residual)))


@lru_cache(maxsize=256)
def dense_head(hidden: int, vocabulary: int, norm: NormKind) -> LayerGraph:
    """Return the head as a graph: a norm of Z, the last layer's output, then the product with WV to LOGITS.

    WV is (hidden, vocabulary).
    """
    residual, words = Features("hidden", hidden), Features("vocabulary", vocabulary)
    return LayerGraph(
        (
            Norm("NN", ("Z",), "feed_forward", residual, norm, "GN", "SN", "norm"),
            Linear("LOGITS", ("NN",), "feed_forward", residual, words, "head", "WV"),
        )
    )
