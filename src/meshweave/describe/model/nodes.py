"""The nodes of a layer of a transformer: sizes, parameters, and what their gradients need.

An edge is a tensor (batch, sequence, features). Its features are units that are never divided, under the name of a
dim: "hidden" (the residual), "heads" (groups of heads that share a head of keys and values), "inner" (of the
feed-forward part), "vocabulary"; and whole on a rank that has the token: "latent" (of latent attention), "choices"
(the experts of a token), "copies" (a token for each of its experts). A node reads edges by name and makes one.

What is kept follows Korthikanti et al., Reducing Activation Recomputation (MLSys '23), section 4: the operands of
products, the inputs of norms, attention and activation, and one byte an element for the masks of dropout.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from meshweave.describe.model.architecture import Norm as NormKind

Group = Literal["attention", "feed_forward"]
"""The part of a layer that a node belongs to: a strategy may lay out each in its own way."""

WITH_TOKENS = ("latent", "choices", "copies")
"""Dims that no role divides: edges of them lie as the tokens of the residual do."""


@dataclass(frozen=True)
class Features:
    """The features of an edge or a side of a weight: `count` units (such as heads) of `unit` elements each."""

    dim: str
    count: int
    unit: int = 1

    @property
    def size(self) -> int:
        """Return the number of elements: `count` times `unit`."""
        return self.count * self.unit

    def __str__(self) -> str:
        return f"{self.count} {self.dim}{f' of {self.unit}' if self.unit > 1 else ''}"


@dataclass(frozen=True)
class NodeWeight:
    """A tensor of parameters: its name, the features along each dim (`sides`), and what it is for.

    Attributes:
        kind: "whole" is a matrix that is never sharded, "experts" one for each of `experts`.
        modules: (name, output features) of each linear module that transformers has in place of a matrix; of the
            parameters of a norm, its module.
        experts, chosen: how many of it there are, and how many a token is multiplied by.
    """

    name: str
    sides: tuple[Features, ...]
    kind: Literal["matrix", "norm", "bias", "whole", "experts"]
    modules: tuple[tuple[str, int], ...] = ()
    experts: int = 1
    chosen: int = 1

    @property
    def size(self) -> int:
        """Return the number of parameters, those of all experts together."""
        return self.experts * math.prod(side.size for side in self.sides)

    @property
    def active_size(self) -> int:
        """Return the number of parameters that a token uses, of experts those of its chosen ones."""
        return self.size // self.experts * self.chosen


KeptKind = Literal[
    "sums", "scores", "dropped scores", "score mask", "mask", "gate", "copy", "joint", "experts"
]
"""Why the forward part keeps something besides edges.

"sums" are of softmax; "scores" are after softmax, "dropped scores" after dropout, "score mask" is its mask; "mask"
is of dropout of the residual; "gate" is of an activation; "copy" is a norm's input in float32; "joint" are keys
and values that are one tensor with queries; "experts" is what experts keep inside."""


@dataclass(frozen=True)
class Kept:
    """What a node keeps for its gradient besides edges: `elements` for each token, or with `by_keys` for each pair
    of tokens, of `item_bytes` each (0: those of an activation). It is sharded as the edge `edge` is."""

    kind: KeptKind
    edge: str
    elements: int
    item_bytes: int = 0
    by_keys: bool = False

    def num_bytes(self, item_bytes: int, keys: int) -> int:
        """Return the bytes per token, if activations have `item_bytes` an element and a token `keys` keys."""
        return self.elements * (self.item_bytes or item_bytes) * (keys if self.by_keys else 1)


@dataclass(frozen=True)
class LayerNode(ABC):
    """A step of the forward part of a layer. An edge is a tensor (batch, sequence, features), by name.

    Attributes:
        out: the edge that it writes.
        ins: the edges that it reads.
        group: the part of the layer that it belongs to.
        is_sum: whether it is the sum of what it reads: gradients of the terms are that of the sum.
        is_product: whether it is a product with a weight.
        labels: the fields that are names alone.
    """

    out: str
    ins: tuple[str, ...]
    group: Group

    is_sum: ClassVar[bool] = False
    is_product: ClassVar[bool] = False
    labels: ClassVar[tuple[str, ...]] = ()

    @property
    def takes(self) -> tuple[Features, ...]:
        """Return the `Features` of each input edge; by default those of the output."""
        return (self.makes,) * len(self.ins)

    @property
    @abstractmethod
    def makes(self) -> Features:
        """Return the `Features` (dim, count, unit) of its output edge."""

    @property
    def parameters(self) -> tuple[NodeWeight, ...]:
        """Return the parameters (weights, gains, biases) of the node; () for none."""
        return ()

    @property
    def behaviour(self) -> tuple[object, ...]:
        """Return the settings that the node's functions depend on: all fields but names."""
        names = ("out", "ins", "group", *self.labels)
        return tuple(getattr(self, field.name) for field in fields(self) if field.name not in names)

    @property
    def reads_back(self) -> tuple[str, ...]:
        """Return the edges that the gradient of the node reads; by default all inputs."""
        return self.ins

    @property
    def kept(self) -> tuple[Kept, ...]:
        """Return what is kept for the gradient of the node besides edges; () for nothing."""
        return ()

    @property
    def input_gradient(self) -> str:
        """Return the name of the tensor that it adds to the gradient of its input; "" for the default name."""
        return ""

    @property
    def makes_terms(self) -> bool:
        """Return whether its output may be partial sums on ranks, to be reduced later."""
        return False

    @property
    def counts(self) -> Mapping[str, int]:
        """Return {"heads", "keys" or "ffn": features per token}; software stacks count memory traffic by these."""
        return {}

    def attention_flops(self, pairs: int) -> int:
        """Return the FLOPs of attention between `pairs` pairs of tokens, forward; 0 for other nodes."""
        del pairs
        return 0

    def num_pairs(self, sequence: int) -> int:
        """Return the number of pairs of tokens of one sequence that attention computes with; 0 for other nodes."""
        del sequence
        return 0


@dataclass(frozen=True)
class Norm(LayerNode):
    """A norm over all features: "layer" with a gain and a bias, or "rms" with a gain.

    Attributes:
        gain, statistics: the names of its parameters, and of the sums that it normalises by.
        module: the name of its module in transformers; "" where that is not known.
    """

    features: Features
    kind: NormKind
    gain: str
    statistics: str
    module: str = ""

    labels = ("gain", "statistics", "module")

    @property
    def makes(self) -> Features:
        """Return the `Features` of its output edge, those of its input."""
        return self.features

    @property
    def rows(self) -> int:
        """Return the parameters per feature, and statistics per token: 2 for "layer", 1 for "rms"."""
        return 2 if self.kind == "layer" else 1

    @property
    def parameters(self) -> tuple[NodeWeight, ...]:
        """Return gain and bias as one tensor (rows, features)."""
        modules = ((self.module, self.features.size),) if self.module else ()
        return (NodeWeight(self.gain, (Features("", self.rows), self.features), "norm", modules),)

    @property
    def input_gradient(self) -> str:
        """Return the name of the tensor that the norm adds to the gradient of its input."""
        return f"DI{self.statistics[1:]}"

    @property
    def kept(self) -> tuple[Kept, ...]:
        """Return the float32 copy of its input that some software keeps."""
        return (Kept("copy", self.ins[0], self.features.size, 4),)


@dataclass(frozen=True)
class Linear(LayerNode):
    """A product with a weight (operand, result), and a bias where it has one.

    Attributes:
        name: what the layer is called in plans, such as "qkv".
        weight: the name of the weight; that of the bias has a B in place of its W.
        modules: as in `NodeWeight`.
    """

    operand: Features
    result: Features
    name: str
    weight: str
    bias: bool = False
    modules: tuple[tuple[str, int], ...] = ()

    is_product = True
    weight_kind: ClassVar[Literal["matrix", "whole"]] = "matrix"
    labels = ("operand", "result", "name", "weight", "bias", "modules")

    @property
    def takes(self) -> tuple[Features, ...]:
        """Return the `Features` of its operand, the only input edge."""
        return (self.operand,)

    @property
    def makes(self) -> Features:
        """Return the `Features` of its result, the output edge."""
        return self.result

    @property
    def reads_residual(self) -> bool:
        """Return whether its operand is the residual or a latent, as Megatron's column-parallel ones have."""
        return self.operand.dim in ("hidden", *WITH_TOKENS)

    @property
    def makes_terms(self) -> bool:
        """Return whether its result may be partial sums on ranks, to be reduced later: if it adds no bias."""
        return not self.bias

    @property
    def bias_name(self) -> str:
        """Return the name of the bias, whether or not there is one."""
        return f"B{self.weight[1:]}"

    @property
    def parameters(self) -> tuple[NodeWeight, ...]:
        """Return the weight, and the bias if there is one."""
        weight = NodeWeight(self.weight, (self.operand, self.result), self.weight_kind, self.modules)
        return (weight, NodeWeight(self.bias_name, (self.result,), "bias")) if self.bias else (weight,)


@dataclass(frozen=True)
class Attention(LayerNode):
    """Causal attention within groups of heads: of each group its queries, its keys, then its values.

    Attributes:
        groups: heads of keys and values; `per_group` heads of queries share each. All are of `width` features.
        sums: the name of the logarithms of softmax's sums (log-sum-exp), one for each token and head of queries.
        window: the tokens that a token attends to, itself included; None for all before it.
        rotary: the share of each head that is turned by positions; 0 for none.
    """

    groups: int
    per_group: int
    width: int
    sums: str
    window: int | None = None
    rotary: float = 0.0

    labels = ("sums",)

    @property
    def takes(self) -> tuple[Features, ...]:
        """Return the `Features` of its input edge: queries, keys and values of all groups."""
        return (Features("heads", self.groups, (self.per_group + 2) * self.width),)

    @property
    def makes(self) -> Features:
        """Return the `Features` of its output edge: all heads of queries."""
        return Features("heads", self.groups, self.per_group * self.width)

    @property
    def heads(self) -> int:
        """Return the number of heads of queries."""
        return self.groups * self.per_group

    @property
    def reads_back(self) -> tuple[str, ...]:
        """Return its input and output edges: its gradient reads both."""
        return (*self.ins, self.out)

    @property
    def kept(self) -> tuple[Kept, ...]:
        """Return all that software may keep for backward besides edges; callers choose by `Kept.kind`."""
        kinds: tuple[KeptKind, KeptKind] = ("scores", "dropped scores")
        scores = (Kept(kind, self.out, self.heads, by_keys=True) for kind in kinds)
        mask = Kept("score mask", self.out, self.heads, 1, by_keys=True)
        rows = (Kept("sums", self.out, self.heads, 4), *scores, mask)
        return (*rows, Kept("joint", self.out, 2 * self.heads * self.width)) if self.per_group == 1 else rows

    @property
    def counts(self) -> Mapping[str, int]:
        """Return {"heads": features of all queries, "keys": of all keys} of a token; see `LayerNode.counts`."""
        return {"heads": self.makes.size, "keys": self.groups * self.width}

    def num_pairs(self, sequence: int) -> int:
        """Return the number of pairs of query and key in one sequence that causal mask and window leave."""
        reach = sequence if self.window is None else min(self.window, sequence)
        return reach * (reach + 1) // 2 + (sequence - reach) * reach

    def mean_keys(self, sequence: int) -> int:
        """Return the mean number of keys that a query attends to, rounded up (Dao 2023, section 4.1)."""
        if self.window is None or self.window >= sequence:
            return sequence // 2 + 1
        return -(-self.num_pairs(sequence) // sequence)

    def attention_flops(self, pairs: int) -> int:
        """Return the FLOPs of both products for `pairs` pairs of query and key, over all heads."""
        return 4 * pairs * self.heads * self.width


@dataclass(frozen=True)
class Activation(LayerNode):
    """An activation of inner features. If gated, it reads two columns for each: a gate, then an input."""

    inner: int
    gated: bool

    @property
    def columns(self) -> int:
        """Return the input columns per feature: 2 if gated, else 1."""
        return 2 if self.gated else 1

    @property
    def takes(self) -> tuple[Features, ...]:
        """Return the `Features` of its input edge: `columns` for each inner feature."""
        return (Features("inner", self.inner, self.columns),)

    @property
    def makes(self) -> Features:
        """Return the `Features` of its output edge: the inner features."""
        return Features("inner", self.inner)

    @property
    def counts(self) -> Mapping[str, int]:
        """Return {"ffn": the inner features}; see `LayerNode.counts`."""
        return {"ffn": self.inner}

    @property
    def kept(self) -> tuple[Kept, ...]:
        """Return the activated gate, by which the gradient of the input is multiplied; () if not gated."""
        return (Kept("gate", self.out, self.inner),) if self.gated else ()


@dataclass(frozen=True)
class EdgeSum(LayerNode):
    """The sum of edges. Dropout, where there is any, is on each term but the first, before they are added."""

    features: Features

    is_sum = True

    @property
    def makes(self) -> Features:
        """Return the `Features` of the sum, those of each term."""
        return self.features

    @property
    def reads_back(self) -> tuple[str, ...]:
        """Return (): the gradient of each term is that of the sum."""
        return ()

    @property
    def kept(self) -> tuple[Kept, ...]:
        """Return a dropout mask for each term but the first."""
        return tuple(Kept("mask", self.out, self.features.size, 1) for _ in self.ins[1:])
