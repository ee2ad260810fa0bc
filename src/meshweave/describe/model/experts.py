"""The nodes of a layer that routes each token to a few experts (Shazeer et al., 2017; GShard, 2021).

Router            scores of all experts for a token, of which the highest are chosen
DispatchCopies    a copy of a token for each expert that it is routed to, on the rank that has the expert
Experts           a feed-forward part for each expert, on the copies that it gets: products of one kernel
CombineCopies     the sum of what a token's experts made, weighted by their scores
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshweave.describe.model.nodes import Features, Kept, LayerNode, NodeWeight


@dataclass(frozen=True)
class Router(LayerNode):
    """The node that chooses `chosen` of `experts` experts for each token, by a product with its `hidden` features.

    Attributes:
        groups, top_groups: number of groups of experts, and of those that a token may go to; 1 and 1 for any.
        parameters_each: parameters of each expert besides its column of the weight: biases of its score.
        module: the name of the router's module in transformers; "" where that is not known.
    """

    hidden: int
    experts: int
    chosen: int
    groups: int = 1
    top_groups: int = 1
    parameters_each: int = 0
    module: str = ""

    labels = ("module",)

    @property
    def takes(self) -> tuple[Features, ...]:
        """Return the `Features` of its input edge: the residual."""
        return (Features("hidden", self.hidden),)

    @property
    def makes(self) -> Features:
        """Return the `Features` of its output edge: the `chosen` experts of a token."""
        return Features("choices", self.chosen)

    @property
    def parameters(self) -> tuple[NodeWeight, ...]:
        """Return WR (hidden, experts), the weights of scores, and BR (`parameters_each`, experts), if any."""
        columns = Features("choices", self.experts)
        modules = ((self.module, self.experts),) if self.module else ()
        weights = [NodeWeight("WR", (Features("hidden", self.hidden), columns), "whole", modules)]
        if self.parameters_each:
            weights.append(NodeWeight("BR", (Features("", self.parameters_each), columns), "bias"))
        return tuple(weights)


@dataclass(frozen=True)
class DispatchCopies(LayerNode):
    """The dispatch node: a copy of each token (`hidden` features) for each expert that `router` chose for it.

    Copies are sent to the rank that has the expert.
    """

    hidden: int
    router: Router

    @property
    def takes(self) -> tuple[Features, ...]:
        """Return the `Features` of its input edges: the residual, and a token's chosen experts."""
        return Features("hidden", self.hidden), self.router.makes

    @property
    def makes(self) -> Features:
        """Return the `Features` of its output edge: the copies of a token."""
        return Features("copies", self.router.chosen, self.hidden)

    @property
    def reads_back(self) -> tuple[str, ...]:
        """Return the edge of chosen experts: it says which copies' gradients add up to that of a token."""
        return self.ins[1:]


@dataclass(frozen=True)
class Experts(LayerNode):
    """The node of `experts` feed-forward parts of `inner` features; each copy of a token passes through one.

    Attributes:
        hidden: features of a token.
        gated: whether the activation has a gate.
        chosen: number of experts that each token goes to.
        biases: whether both products add a bias.
    """

    hidden: int
    inner: int
    gated: bool
    experts: int
    chosen: int
    biases: bool = False

    @property
    def columns(self) -> int:
        """Return the columns of the first weight per inner feature: 2 if gated, else 1."""
        return 2 if self.gated else 1

    @property
    def makes(self) -> Features:
        """Return the `Features` of its output edge: the copies of a token."""
        return Features("copies", self.chosen, self.hidden)

    @property
    def parameters(self) -> tuple[NodeWeight, ...]:
        """Return WE1 (up, or gate and up) and WE2 (down), each of all experts together, and biases BE1, BE2."""
        residual, many = Features("hidden", self.hidden), (self.experts, self.chosen)
        sides = Features("inner", self.inner, self.columns), Features("inner", self.inner)
        ends = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        first = tuple((f"mlp.experts.*.{name}", self.inner) for name in ends)
        last = (("mlp.experts.*.down_proj", self.hidden),)
        weights = [
            NodeWeight("WE1", (residual, sides[0]), "experts", first, *many),
            NodeWeight("WE2", (sides[1], residual), "experts", last, *many),
        ]
        if self.biases:
            weights.append(NodeWeight("BE1", (sides[0],), "bias", (), *many))
            weights.append(NodeWeight("BE2", (residual,), "bias", (), *many))
        return tuple(weights)

    @property
    def kept(self) -> tuple[Kept, ...]:
        """Return one row: what the first product makes and what the second reads, for all copies of a token."""
        return (Kept("experts", self.out, self.chosen * (self.columns + 1) * self.inner),)

    @property
    def counts(self) -> Mapping[str, int]:
        """Return {"ffn": the inner features of all experts of a token}; see `LayerNode.counts`."""
        return {"ffn": self.chosen * self.inner}


@dataclass(frozen=True)
class CombineCopies(LayerNode):
    """The combine node: the sum of the copies of a token that its experts made, on the rank of the token.

    Copies are multiplied by their weights inside the experts, so that its gradient reads no copies.
    """

    hidden: int
    router: Router

    @property
    def takes(self) -> tuple[Features, ...]:
        """Return the `Features` of its input edges: the copies of a token, and its chosen experts."""
        return Features("copies", self.router.chosen, self.hidden), self.router.makes

    @property
    def makes(self) -> Features:
        """Return the `Features` of its output edge: the residual."""
        return Features("hidden", self.hidden)

    @property
    def reads_back(self) -> tuple[str, ...]:
        """Return the edge of chosen experts: it says to which copies the gradient of a token is sent."""
        return self.ins[1:]


@dataclass(frozen=True)
class SharedGate(LayerNode):
    """A sigmoid for each token by which the result of the shared experts is multiplied, as in Qwen2-MoE."""

    hidden: int

    @property
    def takes(self) -> tuple[Features, ...]:
        """Return the `Features` of its input edges: the shared experts' result, and the operand of the gate."""
        return Features("hidden", self.hidden), Features("hidden", self.hidden)

    @property
    def makes(self) -> Features:
        """Return the `Features` of its output edge: the residual."""
        return Features("hidden", self.hidden)

    @property
    def parameters(self) -> tuple[NodeWeight, ...]:
        """Return the weight of the gate, (hidden, 1)."""
        sides = Features("hidden", self.hidden), Features("choices", 1)
        return (NodeWeight("WG", sides, "whole", (("mlp.shared_expert_gate", 1),)),)
