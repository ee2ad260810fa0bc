"""The layers of dense transformers, and their heads, as graphs."""

from __future__ import annotations

from functools import lru_cache

from meshweave.describe.model.architecture import Norm as NormKind
from meshweave.describe.model.layer import (
    Activation,
    Add,
    Attention,
    Features,
    LayerGraph,
    Linear,
    Node,
    Norm,
)

WHOLE = 1.0
"""Of `rotary`: all of a head turns."""


@lru_cache(maxsize=4096)
def dense_layer(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    *,
    gated: bool,
    norm: NormKind,
    biases: tuple[str, ...] = (),
    rotary: float = 0.0,
    window: int | None = None,
    soft_cap: float | None = None,
    post_norms: bool = False,
    parallel: bool = False,
    shared_norm: bool = False,
) -> LayerGraph:
    """Return a layer of attention and a feed-forward part, each after a norm and added to the residual.

    Tensors are called as in `algorithms.block.BlockProblem`, modules as in Llama. Of W_qkv the columns of a group
    of heads follow those of another; a gated W_1 has a gate and an input column by turns.

    Args:
        norm: the kind of the norms.
        biases: which of the products "qkv", "out", "ff1" and "ff2" add a bias.
        rotary, window, soft_cap: as in `layer.Attention`.
        post_norms: whether a norm follows each part, too, before it is added.
        parallel: whether both parts read the same residual, and are added to it at once.
        shared_norm: whether they then read one norm.
    """
    residual = Features("hidden", hidden)
    attention = Attention(
        "A", ("QKV",), "attention", kv_heads, heads // kv_heads, head_dim, "L", window, rotary, soft_cap
    )
    activation = Activation("H", ("Y",), "feed_forward", ffn, gated)
    queries, keys = heads * head_dim, kv_heads * head_dim
    of_qkv = ("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)
    of_ff1 = (("mlp.gate_proj", ffn), ("mlp.up_proj", ffn)) if gated else (("mlp.fc1", ffn),)
    of_ff2 = (("mlp.down_proj" if gated else "mlp.fc2", hidden),)

    def part(
        stream: str, core: Node, letters: str, normal: str | None, products: tuple[Linear, ...]
    ) -> list[Node]:
        """Return norm, product, core, product, and perhaps a norm."""
        nodes: list[Node] = []
        if normal is not None:
            module = "input_layernorm" if core is attention else "post_attention_layernorm"
            nodes.append(
                Norm(normal, (stream,), core.group, residual, norm, f"G{letters}", f"S{letters}", module)
            )
        nodes += [products[0], core, products[1]]
        if post_norms:
            out = products[1].out
            nodes.append(Norm(f"{out}N", (out,), core.group, residual, norm, f"GP{letters}", f"SP{letters}"))
        return nodes

    def products(normal: str, core: Node, names: tuple[str, str], weights: tuple[str, str], out: str,
                 modules: tuple[tuple[tuple[str, int], ...], ...]) -> tuple[Linear, Linear]:  # fmt: skip
        enters, leaves = (name in biases for name in names)
        return (
            Linear(
                core.ins[0],
                (normal,),
                core.group,
                residual,
                core.takes[0],
                names[0],
                weights[0],
                enters,
                modules[0],
            ),
            Linear(
                out, (core.out,), core.group, core.makes, residual, names[1], weights[1], leaves, modules[1]
            ),
        )

    normal = "NA" if parallel and shared_norm else "NF"
    middle, post = "X" if parallel else "M", "N" if post_norms else ""
    first = products(
        "NA", attention, ("qkv", "out"), ("WQKV", "WO"), "O", (of_qkv, (("self_attn.o_proj", hidden),))
    )
    second = products(normal, activation, ("ff1", "ff2"), ("W1_", "W2_"), "F", (of_ff1, of_ff2))
    nodes = part("X", attention, "A", "NA", first)
    if not parallel:
        nodes.append(Add("M", ("X", f"O{post}"), "attention", residual))
    nodes += part(middle, activation, "F", None if normal == "NA" else "NF", second)
    terms = ("X", f"O{post}", f"F{post}") if parallel else ("M", f"F{post}")
    return LayerGraph((*nodes, Add("Z", terms, "feed_forward", residual)))


@lru_cache(maxsize=256)
def dense_head(hidden: int, vocabulary: int, norm: NormKind) -> LayerGraph:
    """Return the last norm and the product to logits."""
    residual, words = Features("hidden", hidden), Features("vocabulary", vocabulary)
    return LayerGraph(
        (
            Norm("NN", ("Z",), "feed_forward", residual, norm, "GN", "SN", "norm"),
            Linear("LOGITS", ("NN",), "feed_forward", residual, words, "head", "WV"),
        )
    )
