"""A layer of a transformer as data: nodes in the order of the forward part, on edges with named dims.

Parameters, FLOPs and what the forward part keeps for the backward part are sums over the nodes, here. Equations,
functions, kernels and programs are in `algorithms.block.nodes`, which has a record for each type of node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from meshweave.base.errors import DescriptionError
from meshweave.base.shown import Shown
from meshweave.describe.model.nodes import (
    WITH_TOKENS,
    Attention,
    Features,
    Kept,
    KeptKind,
    LayerNode,
    Linear,
    NodeWeight,
)

Place = Literal["residual", "operand", "attention", "feed_forward", "experts"]
"""How an edge lies on ranks."""


@dataclass(frozen=True)
class LayerGraph(Shown):
    """The nodes of a layer in the order of the forward part.

    A node is an operation, such as a norm or a product. An edge is a tensor (batch, sequence, features) between
    nodes, by name: a node makes one and reads some. The first edge that is read is the layer's input, the last
    that is made its output.

    Raises:
        DescriptionError: there is no node, or one that reads no edge or more or fewer than its type takes; an
            edge is made twice, read before it is made or never read; the features that its maker and a reader
            give it differ; or two weights have one name.
    """

    nodes: tuple[LayerNode, ...]

    def __post_init__(self) -> None:
        if not self.nodes:
            raise DescriptionError("layer: it has no node; give at least 1")
        for node in self.nodes:
            if not node.ins or len(node.ins) != len(node.takes):
                raise DescriptionError(
                    f"layer: {node.out} reads {len(node.ins)} edges; give {type(node).__name__} "
                    f"{len(node.takes) or 1}"
                )
        known = {self.input: self.nodes[0].takes[0]}
        for node in self.nodes:
            for edge, features in zip(node.ins, node.takes, strict=True):
                if edge not in known:
                    raise DescriptionError(
                        f"layer: {node.out} reads {edge} before it is made; give its maker first"
                    )
                if known[edge] != features:
                    raise DescriptionError(
                        f"layer: {node.out} reads {edge} as {features}, and it has {known[edge]}; "
                        "give both the same"
                    )
            if node.out in known:
                raise DescriptionError(f"layer: {node.out} is made twice; give one of both another name")
            known[node.out] = node.makes
        if unread := [node.out for node in self.nodes[:-1] if not self.readers(node.out)]:
            raise DescriptionError(f"layer: {unread[0]} is never read; leave its node out")
        names = Counter(weight.name for weight in self.parameters)
        if twice := [name for name, count in names.items() if count > 1]:
            raise DescriptionError(f"layer: two weights are called {twice[0]}; give one of both another name")

    # --- edges --------------------------------------------------------------------------------------------------

    @property
    def input(self) -> str:
        """Return the name of the layer's input edge."""
        return self.nodes[0].ins[0]

    @property
    def output(self) -> str:
        """Return the name of the layer's output edge."""
        return self.nodes[-1].out

    @cached_property
    def features(self) -> dict[str, Features]:
        """Return {name of an edge: its `Features`} of all edges."""
        return {self.input: self.nodes[0].takes[0], **{node.out: node.makes for node in self.nodes}}

    @cached_property
    def _readers(self) -> dict[str, tuple[LayerNode, ...]]:
        return {
            edge: tuple(node for node in self.nodes if edge in node.ins)
            for edge in (self.input, *(node.out for node in self.nodes))
        }

    def readers(self, edge: str) -> tuple[LayerNode, ...]:
        """Return the nodes that read an edge, in forward order."""
        return self._readers[edge]

    @cached_property
    def sum_of_term(self) -> dict[str, str]:
        """Return {edge of a term: edge of its sum} of the terms that may be computed in the buffer of the sum.

        Each sum (residual addition) has at most one: an edge that only the sum reads, and that the gradient of
        the node which makes it does not read. Of several it is the first that may be partial sums
        (`LayerNode.makes_terms`), else the first.
        """
        made = {node.out: node for node in self.nodes}
        homes: dict[str, str] = {}
        for node in self.nodes:
            if node.is_sum:
                own = [edge for edge in node.ins if edge in made and self.readers(edge) == (node,)]
                own.sort(key=lambda edge: not made[edge].makes_terms)
                edge = next((edge for edge in own if edge not in made[edge].reads_back), None)
                homes |= {edge: node.out} if edge is not None else {}
        return homes

    @cached_property
    def jointly_reduced(self) -> frozenset[str]:
        """Return the edges that may be partial sums on ranks and that one sum node adds to another such edge.

        Each rank adds up its own partial sums of these edges first, so that one reduction over ranks is enough.
        """
        open_edges = {
            node.out for node in self.nodes if node.makes_terms and len(self.readers(node.out)) == 1
        }
        terms = [open_edges.intersection(node.ins) for node in self.nodes if node.is_sum]
        return frozenset(edge for edges in terms if len(edges) > 1 for edge in edges)

    @cached_property
    def variants(self) -> dict[str, int]:
        """Return {output edge of a node: number of its settings among the nodes of its type, from 0}.

        Nodes of one type with equal settings (`LayerNode.behaviour`) have the same number.
        """
        known: dict[type[LayerNode], list[object]] = {}
        numbers = {}
        for node in self.nodes:
            behaviours = known.setdefault(type(node), [])
            if node.behaviour not in behaviours:
                behaviours.append(node.behaviour)
            numbers[node.out] = behaviours.index(node.behaviour)
        return numbers

    # --- folds --------------------------------------------------------------------------------------------------

    @cached_property
    def parameters(self) -> tuple[NodeWeight, ...]:
        """Return all parameters, group by group (attention, feed-forward part), biases last in each group."""
        weights: list[NodeWeight] = []
        for group in dict.fromkeys(node.group for node in self.nodes):
            own = [weight for node in self.nodes if node.group == group for weight in node.parameters]
            weights += sorted(own, key=lambda weight: weight.kind == "bias")
        return tuple(weights)

    @cached_property
    def num_weights(self) -> int:
        """Return the number of elements of the matrices that tensor parallelism shards."""
        return sum(weight.size for weight in self.parameters if weight.kind == "matrix")

    @cached_property
    def num_whole_weights(self) -> int:
        """Return the number of elements of the matrices that every tensor-parallel rank has whole."""
        return sum(weight.size for weight in self.parameters if weight.kind == "whole")

    @cached_property
    def num_expert_weights(self) -> int:
        """Return the number of elements of the matrices of all experts together."""
        return sum(weight.size for weight in self.parameters if weight.kind == "experts")

    @cached_property
    def num_active_weights(self) -> int:
        """Return the number of matrix elements that a token is multiplied by, of experts the chosen ones'."""
        kinds = ("matrix", "whole", "experts")
        return sum(weight.active_size for weight in self.parameters if weight.kind in kinds)

    @cached_property
    def num_experts(self) -> int:
        """Return the number of experts that tokens are routed to; 1 for a layer without experts."""
        return max(weight.experts for weight in self.parameters)

    @cached_property
    def attentions(self) -> tuple[Attention, ...]:
        """Return the attention nodes."""
        return tuple(node for node in self.nodes if isinstance(node, Attention))

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        """Return the nodes that are products with weights, those of experts left out."""
        return tuple(node for node in self.nodes if isinstance(node, Linear))

    def attention_flops(self, sequence: int, *, counts_masked: bool = False) -> int:
        """Return the forward FLOPs of the layer's attention for one sequence.

        They are those of the pairs of tokens that mask and window leave; with `counts_masked`, of all pairs.
        """
        pairs = (sequence * sequence if counts_masked else node.num_pairs(sequence) for node in self.nodes)
        return sum(node.attention_flops(count) for node, count in zip(self.nodes, pairs, strict=True))

    @cached_property
    def counts(self) -> dict[str, int]:
        """Return the sums over all nodes of `LayerNode.counts`, in features per token.

        Keys are "residual" (the features of the layer's input, once), "heads", "keys" and "ffn".
        """
        sums = Counter({"residual": self.features[self.input].size})
        for node in self.nodes:
            sums.update(node.counts)
        return dict(sums)

    @cached_property
    def kept_edges(self) -> tuple[str, ...]:
        """Return the edges that gradients read, which are kept for the backward part."""
        return tuple(dict.fromkeys(edge for node in self.nodes for edge in node.reads_back))

    @cached_property
    def selective_edges(self) -> tuple[tuple[str, int, bool], ...]:
        """Return (edge, features per token, whether a gradient reads it) of what selective checkpointing keeps.

        Software that checkpoints op by op (torchtitan) keeps the layer's input, outputs that the backward of
        their own node reads (attention), and the output of every second linear module, from the first; it
        computes all else again. Modules of a fused matrix (q, k, v; gate, up) count one by one, so an edge can
        occur more than once. Linears of experts are left out.
        """
        whole = [self.input, *(node.out for node in self.nodes if node.out in node.reads_back)]
        products = [(node.out, size) for node in self.linears for _, size in node.modules][::2]
        rows = [*((edge, self.features[edge].size) for edge in whole), *products]
        return tuple((edge, size, edge in self.kept_edges) for edge, size in rows)

    @cached_property
    def places(self) -> dict[str, Place]:
        """Return {edge: kind}, where the kind decides how tensor-parallel ranks shard the edge.

        Edges of the residual, of latents and of chosen experts are "operand" if a product reads them, so that a
        strategy may gather them, else "residual". Copies of tokens are "experts". Any other edge is "attention"
        or "feed_forward", the group of the node that makes it, and is sharded by heads or inner features.
        """
        groups: dict[str, Place] = {node.out: node.group for node in self.nodes}
        for edge, features in self.features.items():
            if features.dim == "copies":
                groups[edge] = "experts"
            elif features.dim in ("hidden", *WITH_TOKENS):
                is_operand = any(node.is_product for node in self.readers(edge))
                groups[edge] = "operand" if is_operand else "residual"
        return groups

    def kept(self, kinds: Collection[KeptKind]) -> Iterator[Kept]:
        """Yield the `Kept` rows of the given kinds, of all nodes; edges that are kept are in `kept_edges`."""
        return (row for node in self.nodes for row in node.kept if row.kind in kinds)

    def kept_bytes(self, item_bytes: int, keys: int, kinds: Collection[KeptKind]) -> int:
        """Return the bytes per token that are kept: edges that gradients read, and what is of the given kinds.

        Args:
            item_bytes: bytes of an element of an activation.
            keys: the number of keys that each token attends to.
        """
        edges = sum(self.features[edge].size for edge in self.kept_edges) * item_bytes
        return edges + sum(row.num_bytes(item_bytes, keys) for row in self.kept(kinds))
