"""Layers with experts, and dense ones beside them, as graphs of other attention and feed-forward parts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshweave.describe.model.architecture import Norm as NormKind
from meshweave.describe.model.dense import DenseForm, dense_layer
from meshweave.describe.model.experts import CombineCopies, DispatchCopies, Experts, Router, SharedGate
from meshweave.describe.model.head_norm import JointNorm, SinkAttention
from meshweave.describe.model.latent import LatentAttention, LatentNorm, LocalLinear, mean_width
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


@dataclass(frozen=True)
class GroupedHeads:
    """Attention of heads that share heads of keys and values.

    Attributes:
        heads, kv_heads, width: heads of queries, heads of keys and values, and the features of a head.
        window, rotary: as in `nodes.Attention`.
        biases: which of the products "qkv" and "out" add a bias.
        qk_norm: norms of queries and keys: "head" of each head, "joint" of all heads together, "" for none.
        sinks: whether each head has a learned score beside those of keys.
    """

    heads: int
    kv_heads: int
    width: int
    window: int | None = None
    rotary: float = 1.0
    biases: tuple[str, ...] = ()
    qk_norm: str = ""
    sinks: bool = False


@dataclass(frozen=True)
class LatentHeads:
    """Latent attention.

    Attributes:
        query_rank, rank: features of the latent of queries (0: they have none), and of keys and values.
        own, shared, value: as in `latent.LatentAttention`.
    """

    heads: int
    query_rank: int
    rank: int
    own: int
    shared: int
    value: int


@dataclass(frozen=True)
class FeedForward:
    """A dense feed-forward part of `inner` features."""

    inner: int
    gated: bool = True


@dataclass(frozen=True)
class RoutedExperts:
    """A feed-forward part of experts.

    Attributes:
        experts, chosen, inner: how many there are, how many a token is routed to, and inner features of each.
        shared: inner features of a shared part that every token passes through besides; 0 for none.
        shared_gate: whether its result is multiplied by a gate.
        groups, top_groups: groups of experts, and those of them that a token may go to.
        router_parameters: parameters of each expert beside its column of scores.
        biases: whether experts add biases.
    """

    experts: int
    chosen: int
    inner: int
    gated: bool = True
    shared: int = 0
    shared_gate: bool = False
    groups: int = 1
    top_groups: int = 1
    router_parameters: int = 0
    biases: bool = False


@lru_cache(maxsize=4096)
def composed_layer(
    hidden: int,
    heads: GroupedHeads | LatentHeads,
    feed_forward: FeedForward | RoutedExperts,
    norm: NormKind = "rms",
) -> LayerGraph:
    """Return a layer of attention and a feed-forward part, each after a norm and added to the residual.

    Edges are X (input), M (residual after attention) and Z (output), and between them those of `dense_layer`. In
    place of QKV latent attention has Q, KV (keys and values), KVA (their latent) and KVN (its norm), and with a
    latent of queries QA and QN. Experts have R (router), C (copies) and E, and F is their combined result; a
    shared part beside them has Y, H and FS, and with a gate FG.
    """
    first = _latent(hidden, heads, norm) if isinstance(heads, LatentHeads) else _grouped(hidden, heads, norm)
    if isinstance(feed_forward, FeedForward):
        return LayerGraph((*first, *_dense_part(hidden, feed_forward, norm)))
    return LayerGraph((*first, *_routed_part(hidden, feed_forward, norm)))


def _dense_part(hidden: int, of: FeedForward, norm: NormKind) -> tuple[LayerNode, ...]:
    like = dense_layer(hidden, 1, 1, 1, of.inner, DenseForm(of.gated, norm))
    return tuple(node for node in like.nodes if node.group == "feed_forward")


def _grouped(hidden: int, of: GroupedHeads, norm: NormKind) -> tuple[LayerNode, ...]:
    form = DenseForm(True, norm, of.biases, of.rotary, of.window, qk_norm=of.qk_norm != "")
    like = dense_layer(hidden, of.heads, of.kv_heads, of.width, 1, form)
    nodes = []
    for node in like.nodes:
        if node.group != "attention":
            continue
        if of.qk_norm == "joint" and node.out == "QKVN":
            node = JointNorm("QKVN", ("QKV",), "attention", of.kv_heads, of.heads // of.kv_heads, of.width)
        if of.sinks and isinstance(node, Attention):
            node = SinkAttention(**vars(node))
        nodes.append(node)
    return tuple(nodes)


def _latent(hidden: int, of: LatentHeads, norm: NormKind) -> tuple[LayerNode, ...]:
    group: Group = "attention"
    residual = Features("hidden", hidden)
    names = "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"
    width = mean_width(of.own, of.shared, of.value)
    shape = (of.heads, 1, width, "L", None, of.shared / (of.own + of.shared))
    sizes = of.own, of.shared, of.value, of.rank
    core = LatentAttention("A", ("Q", "KV", "KVA"), "attention", *shape, *sizes)
    queries, keys, latent = core.takes
    nodes: list[LayerNode] = [
        Norm("NA", ("X",), group, residual, norm, "GA", "SA", "input_layernorm"),
        *_queries(hidden, of, queries),
        _local("KVA", "NA", hidden, latent.size, "WKVA", names[0]),
        LatentNorm(
            "KVN",
            ("KVA",),
            group,
            Features("latent", of.rank),
            "rms",
            "GKV",
            "SKV",
            f"self_attn.{names[1]}",
            of.shared,
        ),
        Linear(
            "KV",
            ("KVN",),
            group,
            Features("latent", of.rank),
            keys,
            "kv_b",
            "WKVB",
            False,
            ((f"self_attn.{names[2]}", keys.size),),
        ),
        core,
        Linear(
            "O",
            ("A",),
            group,
            core.makes,
            residual,
            "out",
            "WO",
            False,
            (("self_attn.o_proj", hidden),),
        ),
        EdgeSum("M", ("X", "O"), group, residual),
    ]
    return tuple(nodes)


def _queries(hidden: int, of: LatentHeads, queries: Features) -> list[LayerNode]:
    residual = Features("hidden", hidden)
    if not of.query_rank:
        modules = (("self_attn.q_proj", queries.size),)
        return [Linear("Q", ("NA",), "attention", residual, queries, "q", "WQ", False, modules)]
    latent, modules = Features("latent", of.query_rank), (("self_attn.q_b_proj", queries.size),)
    return [
        _local("QA", "NA", hidden, of.query_rank, "WQA", "q_a_proj"),
        LatentNorm("QN", ("QA",), "attention", latent, "rms", "GQ", "SQ", "self_attn.q_a_layernorm"),
        Linear("Q", ("QN",), "attention", latent, queries, "q_b", "WQB", False, modules),
    ]


def _local(out: str, edge: str, hidden: int, size: int, weight: str, module: str) -> LocalLinear:
    ends = Features("hidden", hidden), Features("latent", size)
    modules = ((f"self_attn.{module}", size),)
    return LocalLinear(out, (edge,), "attention", *ends, module, weight, False, modules)


def _routed_part(hidden: int, of: RoutedExperts, norm: NormKind) -> tuple[LayerNode, ...]:
    group: Group = "feed_forward"
    residual = Features("hidden", hidden)
    many = of.experts, of.chosen
    limits = of.groups, of.top_groups, of.router_parameters
    router = Router("R", ("NF",), group, hidden, *many, *limits, "mlp.gate")
    nodes: list[LayerNode] = [
        Norm("NF", ("M",), group, residual, norm, "GF", "SF", "post_attention_layernorm"),
        router,
        DispatchCopies("C", ("NF", "R"), group, hidden, router),
    ]
    ends = ["M", "F"]
    if of.shared:
        nodes += _shared_part(hidden, of)
        ends.append("FG" if of.shared_gate else "FS")
    nodes.append(Experts("E", ("C",), group, hidden, of.inner, of.gated, *many, of.biases))
    nodes.append(CombineCopies("F", ("E", "R"), group, hidden, router))
    return (*nodes, EdgeSum("Z", tuple(ends), group, residual))


def _shared_part(hidden: int, of: RoutedExperts) -> list[LayerNode]:
    """Return the nodes of the part that every token meets, between dispatch and experts."""
    group: Group = "feed_forward"
    residual = Features("hidden", hidden)
    activation = Activation("H", ("Y",), group, of.shared, of.gated)
    at = "mlp.shared_expert" if of.shared_gate else "mlp.shared_experts"
    ends = ("gate_proj", "up_proj") if of.gated else ("up_proj",)
    first = tuple((f"{at}.{name}", of.shared) for name in ends)
    last = ((f"{at}.down_proj", hidden),)
    nodes: list[LayerNode] = [
        Linear("Y", ("NF",), group, residual, activation.takes[0], "ff1", "W1_", False, first),
        activation,
        Linear("FS", ("H",), group, activation.makes, residual, "ff2", "W2_", False, last),
    ]
    return [*nodes, SharedGate("FG", ("FS", "NF"), group, hidden)] if of.shared_gate else nodes
