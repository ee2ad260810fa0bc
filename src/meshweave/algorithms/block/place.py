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
    """A layer at its place in a program, with the names of its tensors there.

    Attributes:
        number: number of the layer, from 0.
        suffix: what the names of the layer's tensors end in.
        first, last: names of the layer's input and output.
        is_flat: whether tokens are one dim, batch times sequence, and not two.
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
        """Return the nodes of the layer in the order of the forward part, each with its place."""
        return [NodePlace(self, node) for node in self.graph.nodes]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the sizes of the token dims over all ranks: (batch, sequence), or their product if flat."""
        return token_sizes(self.problem, self.is_flat)

    @property
    def token_names(self) -> PositionNames:
        """Return the index names of the token dims in equations: ("b", "s"), or ("i",) if tokens are flat."""
        return ("i",) if self.is_flat else ("b", "s")

    def own(self, name: str) -> str:
        """Return `name` with the layer's suffix, as weights and other tensors of this layer are called."""
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
        """Return the tensor name of an edge of the layer's graph."""
        return self._edges[edge]

    def home(self, edge: str) -> str:
        """Return the name of the tensor whose buffer holds an edge: its own, or a sum made in place of it."""
        return self._edges[self.graph.sum_of_term.get(edge, edge)]

    def gradient(self, edge: str) -> str:
        """Return the tensor name of the gradient with respect to an edge.

        If a sum is the only reader of the edge, it is the gradient of the sum.
        """
        return self._gradients[edge]

    def contributions(self, edge: str) -> list[str]:
        """Return the names of the terms of the gradient of an edge, one per reader, the last reader's first."""
        return self._contributions[edge]

    def parameters(self) -> list[Tensor]:
        """Return the tensors of all parameters of the layer, in global shapes."""
        return [self.parameter(weight) for weight in self.graph.parameters]

    def parameter(self, weight: NodeWeight) -> Tensor:
        """Return the tensor of a parameter, with its name in this layer and its global shape.

        Parameters of experts that lie on ranks of their own are flat: (ranks x elements of one rank,).
        """
        shape = tuple(side.size for side in weight.sides)
        ranks = self.problem.experts
        if ranks is not None and (own := ranks.side(weight)) is not None:
            shape = (own.size,)
        return Tensor(self.own(weight.name), shape, self.problem.dtype)


@dataclass(frozen=True)
class NodePlace(Generic[AnyNode]):
    """A node at its place in a program, with index names for its equations."""

    layer: LayerPlace
    node: AnyNode

    @property
    def problem(self) -> BlockProblem:
        """Return the problem that the layer belongs to."""
        return self.layer.problem

    @property
    def out(self) -> str:
        """Return the tensor name of the node's output edge."""
        return self.layer.edge(self.node.out)

    @property
    def operand(self) -> str:
        """Return the tensor name of the first edge that the node reads."""
        return self.layer.edge(self.node.ins[0])

    @property
    def arriving(self) -> str:
        """Return the tensor name of the gradient with respect to the node's output."""
        return self.layer.gradient(self.node.out)

    @property
    def row(self) -> PositionNames:
        """Return index names for all features of one token: ("b", "s", None), where None is a whole dim."""
        return (*self.layer.token_names, None)

    @property
    def element(self) -> PositionNames:
        """Return index names for one feature of one token: ("b", "s", "j"), flat ("i", "j")."""
        return (*self.layer.token_names, "j")

    @property
    def unit(self) -> PositionNames:
        """Return index names for one unit of features of one token, such as a head: ("b", "s", "j", None)."""
        return (*self.layer.token_names, "j", None)

    def own(self, name: str) -> str:
        """Return `name` with the layer's suffix, as weights and other tensors of this layer are called."""
        return self.layer.own(name)

    def fn(self, name: str) -> str:
        """Return what the function `name` of the node's record is called in programs.

        Nodes of one type with unlike settings have unlike functions, told apart by a number at the end.
        """
        number = self.layer.graph.variants[self.node.out]
        return f"{name}_{number}" if number else name

    def tensor(self, edge: str, prefix: str = "") -> Tensor:
        """Return the tensor of an edge in its global shape; `prefix` goes before its name, as "D"."""
        layer, size = self.layer, self.layer.graph.features[edge].size
        return Tensor(f"{prefix}{layer.edge(edge)}", (*layer.tokens, size), self.problem.dtype)

    def units(self, name: str, features: Features, dtype: str = "", whole: bool = False) -> Tensor:
        """Return the tensor "NAME_units", `name` with two dims of features: (tokens, units, features of a unit).

        With `whole` batch and sequence are two dims even if tokens are flat elsewhere. A `dtype` of "" is the
        problem's.
        """
        tokens = token_sizes(self.problem, False) if whole else self.layer.tokens
        return Tensor(f"{name}_units", (*tokens, features.count, features.unit), dtype or self.problem.dtype)

    # --- gradients ----------------------------------------------------------------------------------------------

    def is_first_reader(self, edge: str) -> bool:
        """Return whether the node reads an edge first, and so contributes last to the gradient of the edge."""
        return self.layer.graph.readers(edge)[0] is self.node

    def contribution_name(self, edge: str) -> str:
        """Return the name of the tensor that the node contributes to the gradient of its input `edge`.

        A sum contributes the gradient of its result; the only reader of an edge, the whole gradient.
        """
        node = self.node
        if node.is_sum:
            return self.arriving
        if node.input_gradient:
            return self.own(node.input_gradient)
        gradient = self.layer.gradient(edge)
        return gradient if len(self.layer.graph.readers(edge)) == 1 else f"{gradient}_{node.out}"


def token_sizes(problem: BlockProblem, is_flat: bool) -> tuple[int, ...]:
    """Return the sizes of the token dims over all ranks: (batch, sequence), or (batch x sequence,) if flat."""
    return (problem.batch * problem.sequence,) if is_flat else (problem.batch, problem.sequence)


def side_of(features: Features) -> Side:
    """Return the side (dim) of a tensor that holds `features`; roles shard it by the word in its `dim`.

    That is "hidden" for features of the residual, and "" for those that nothing shards: features without a dim,
    and those whose edges are sharded by tokens alone (`WITH_TOKENS`). All others are "inner".
    """
    dim = features.dim
    if not dim or dim in WITH_TOKENS:
        return Side("", features.count, features.unit)
    return Side("hidden" if dim == "hidden" else "inner", features.count, features.unit)


@lru_cache(maxsize=64)
def layers_of(problem: BlockProblem, is_flat: bool = False) -> tuple[LayerPlace, ...]:
    """Return all layers of a problem with the names of their tensors, in forward order.

    The input of the first is X, the output of the last Z.

    Args:
        is_flat: whether tokens are one dim, batch times sequence, and not two.
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
        is_flat: whether tokens are one dim, batch times sequence, and not two.
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
