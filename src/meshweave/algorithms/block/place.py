"""Nodes at their place in a program: the names of their tensors there, and which of them share a gradient.

Names are those of the layer's edges and weights with the number of the layer; D names gradients. The residual is X
first, then X1, X2, ..., and Z last. An edge has as its gradient the sum of what its readers contribute; that of
an edge that a sum alone reads is the gradient of the sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Generic, TypeVar

from meshweave.algorithms.block.problem import BlockProblem
from meshweave.algorithms.block.roles import Side
from meshweave.describe.model.dense import dense_head
from meshweave.describe.model.layer import LayerGraph
from meshweave.describe.model.nodes import WITH_TOKENS, Features, LayerNode, NodeWeight
from meshweave.ir.program import Tensor
from meshweave.ir.program.meanings import PositionNames

AnyNode = TypeVar("AnyNode", bound=LayerNode, covariant=True)


@dataclass(frozen=True)
class LayerPlace:
    """A layer of a program, and the names of its tensors there.

    The layer's graph has nodes (ops) and edges (activations, by name). An edge has one tensor, and readers: the
    nodes that take it as input.

    Attributes:
        number: number of the layer in the program, from 0.
        suffix: what the names of the layer's tensors end in, such as "0".
        first, last: tensor names of the layer's input and output.
        is_flat: whether tokens are one dim of size batch x sequence; else they are two dims.
    """

    problem: BlockProblem
    graph: LayerGraph
    number: int
    suffix: str
    first: str
    last: str
    is_flat: bool = False

    @cached_property
    def nodes(self) -> list[NodePlace[LayerNode]]:
        """Return the nodes of the layer, as `NodePlace`, in the order of the forward part."""
        return [NodePlace(self, node) for node in self.graph.nodes]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the global sizes of the token dims: (batch, sequence), or (batch x sequence,) if flat."""
        return token_sizes(self.problem, self.is_flat)

    @property
    def token_names(self) -> PositionNames:
        """Return the index names of the token dims in equations: ("b", "s"), or ("i",) if tokens are flat."""
        return ("i",) if self.is_flat else ("b", "s")

    def own(self, name: str) -> str:
        """Return `name` with the layer's suffix, the name of a weight or other tensor here: "WO" -> "WO0"."""
        return f"{name}{self.suffix}"

    @cached_property
    def _edges(self) -> dict[str, str]:
        ends = {self.graph.input: self.first, self.graph.output: self.last}
        return {edge: ends.get(edge) or self.own(edge) for edge in self.graph.features}

    @cached_property
    def _gradients(self) -> dict[str, str]:
        names: dict[str, str] = {}
        for edge in reversed(self.graph.features):
            readers = self.graph.readers(edge)
            is_term = len(readers) == 1 and readers[0].is_sum
            names[edge] = names[readers[0].out] if is_term else f"D{self._edges[edge]}"
        return names

    @cached_property
    def _contributions(self) -> dict[str, list[str]]:
        return {
            edge: [
                NodePlace(self, reader).contribution_name(edge)
                for reader in reversed(self.graph.readers(edge))
            ]
            for edge in self.graph.features
        }

    def edge(self, edge: str) -> str:
        """Return the name of the tensor of an edge: its own name with the suffix, or `first` or `last`."""
        return self._edges[edge]

    def home(self, edge: str) -> str:
        """Return the name of the tensor in whose buffer an edge lies: its own, or a sum that is made in place."""
        return self._edges[self.graph.sum_of_term.get(edge, edge)]

    def gradient(self, edge: str) -> str:
        """Return the name of the tensor that holds the gradient with respect to an edge.

        If a sum is the edge's only reader, this is the gradient with respect to the sum.
        """
        return self._gradients[edge]

    def contributions(self, edge: str) -> list[str]:
        """Return the tensor names of the terms that add up to an edge's gradient.

        There is one term per reader, the last reader's first.
        """
        return self._contributions[edge]

    def parameters(self) -> list[Tensor]:
        """Return the tensors of all parameters of the layer, in global shapes."""
        return [self.parameter(weight) for weight in self.graph.parameters]

    def parameter(self, weight: NodeWeight) -> Tensor:
        """Return the tensor of a parameter, with its name in this layer and its global shape.

        A parameter of experts that ranks divide among them is flat: (ranks x elements of one rank,).
        """
        shape = tuple(side.size for side in weight.sides)
        ranks = self.problem.experts
        if ranks is not None and (own := ranks.side(weight)) is not None:
            shape = (own.size,)
        return Tensor(self.own(weight.name), shape, self.problem.dtype)


@dataclass(frozen=True)
class NodePlace(Generic[AnyNode]):
    """A node (op) of a layer's graph in a program: the names of its tensors, and index names for its equations.

    Index names say what part of a tensor an equation is about, one per dim; None stands for a whole dim.
    """

    layer: LayerPlace
    node: AnyNode

    @property
    def problem(self) -> BlockProblem:
        """Return the problem that the layer belongs to."""
        return self.layer.problem

    @property
    def out(self) -> str:
        """Return the name of the tensor of the node's output edge."""
        return self.layer.edge(self.node.out)

    @property
    def operand(self) -> str:
        """Return the name of the tensor of the first edge that the node reads."""
        return self.layer.edge(self.node.ins[0])

    @property
    def arriving(self) -> str:
        """Return the name of the tensor of the gradient with respect to the node's output."""
        return self.layer.gradient(self.node.out)

    @property
    def row(self) -> PositionNames:
        """Return index names for all features of one token: ("b", "s", None), or ("i", None) if flat."""
        return (*self.layer.token_names, None)

    @property
    def element(self) -> PositionNames:
        """Return index names for one feature of one token: ("b", "s", "j"), or ("i", "j") if flat."""
        return (*self.layer.token_names, "j")

    @property
    def unit(self) -> PositionNames:
        """Return index names for one unit of features, such as a head, of one token: ("b", "s", "j", None).

        They are for a tensor with two dims of features (`units`); ("i", "j", None) if flat.
        """
        return (*self.layer.token_names, "j", None)

    def own(self, name: str) -> str:
        """Return `name` with the layer's suffix, the name of a weight or other tensor of the layer."""
        return self.layer.own(name)

    def fn(self, name: str) -> str:
        """Return the name in programs of the function `name` of the node's type: "norm" -> "norm" or "norm_1".

        Nodes of one type with different settings have different functions, told apart by a number at the end.
        """
        number = self.layer.graph.variants[self.node.out]
        return f"{name}_{number}" if number else name

    def tensor(self, edge: str, prefix: str = "") -> Tensor:
        """Return the tensor of an edge in its global shape, with `prefix`, such as "D", before its name."""
        layer, size = self.layer, self.layer.graph.features[edge].size
        return Tensor(f"{prefix}{layer.edge(edge)}", (*layer.tokens, size), self.problem.dtype)

    def units(self, name: str, features: Features, dtype: str = "", whole: bool = False) -> Tensor:
        """Return the tensor "{name}_units": tensor `name` with its features as (units, features of a unit).

        A head is a unit. The global shape is (batch, sequence, units, features of a unit), or (tokens, units,
        features of a unit) if tokens are flat.

        Args:
            features: the number of units, and of features of each.
            dtype: "" for the problem's dtype.
            whole: whether batch and sequence are two dims even if tokens are one dim elsewhere.
        """
        tokens = token_sizes(self.problem, False) if whole else self.layer.tokens
        return Tensor(f"{name}_units", (*tokens, features.count, features.unit), dtype or self.problem.dtype)

    # --- gradients ----------------------------------------------------------------------------------------------

    def is_first_reader(self, edge: str) -> bool:
        """Return whether the node is the first that reads an edge; it then adds to the edge's gradient last."""
        return self.layer.graph.readers(edge)[0] is self.node

    def contribution_name(self, edge: str) -> str:
        """Return the name of the tensor with the node's term of the gradient with respect to its input `edge`.

        For a sum it is the gradient of its result. For the only reader of an edge it is the whole gradient.
        """
        node = self.node
        if node.is_sum:
            return self.arriving
        if node.input_gradient:
            return self.own(node.input_gradient)
        gradient = self.layer.gradient(edge)
        return gradient if len(self.layer.graph.readers(edge)) == 1 else f"{gradient}_{node.out}"


def token_sizes(problem: BlockProblem, is_flat: bool) -> tuple[int, ...]:
    """Return the global sizes of the token dims: (batch, sequence), or (batch x sequence,) if `is_flat`."""
    return (problem.batch * problem.sequence,) if is_flat else (problem.batch, problem.sequence)


def side_of(features: Features) -> Side:
    """Return the `Side` (a tensor dim as roles see it) that holds `features`.

    Its `dim`, by which mesh axes shard it, is "hidden" for features of the residual stream, and "" for features
    that no axis shards: those without a dim, and those of activations that are sharded by tokens alone
    (`WITH_TOKENS`). For all others, such as heads, it is "inner".
    """
    dim = features.dim
    if not dim or dim in WITH_TOKENS:
        return Side("", features.count, features.unit)
    return Side("hidden" if dim == "hidden" else "inner", features.count, features.unit)


@lru_cache(maxsize=64)
def layers_of(problem: BlockProblem, is_flat: bool = False) -> tuple[LayerPlace, ...]:
    """Return all layers of a problem with the names of their tensors, in forward order.

    The input of the first layer is X, the output of the last Z.

    Args:
        is_flat: whether tokens are one dim of size batch x sequence; else they are two dims.
    """
    names = ["X", *(f"X{number}" for number in range(1, problem.layers)), "Z"]
    graph = problem.layer
    return tuple(
        LayerPlace(problem, graph, number, str(number), names[number], names[number + 1], is_flat)
        for number in range(problem.layers)
    )


@lru_cache(maxsize=64)
def head_of(problem: BlockProblem, is_flat: bool = False) -> LayerPlace:
    """Return the last norm and the product to logits as a layer of their own; names have no suffix.

    Args:
        is_flat: whether tokens are one dim of size batch x sequence; else they are two dims.
    """
    graph = dense_head(problem.hidden, problem.vocabulary, problem.norm)
    return LayerPlace(problem, graph, 0, "", graph.input, graph.output, is_flat)


@lru_cache(maxsize=64)
def attention_of(problem: BlockProblem) -> LayerPlace:
    """Return the attention of a problem's first layer as a layer of its own.

    Raises:
        ValueError: the layer has no attention, or several.
    """
    (node,) = problem.layer.attentions
    return LayerPlace(problem, LayerGraph((node,)), 0, "0", f"{node.ins[0]}0", f"{node.out}0")
