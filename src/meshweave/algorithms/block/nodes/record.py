"""What `algorithms` knows of a type of node: its equations, functions, kernels, and how its program is written.

Sizes are the node's own (`describe.model.nodes`). Everything here is about one node at its place; `layer.py`,
`assembly.py`, `reference.py` and `kernels_of` fold over the nodes of a layer and know none of them. What many
nodes share is written by the folds: tensors of edges and weights, their gradients, and sums of contributions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar

from meshweave.algorithms.block.functions import Functions
from meshweave.algorithms.block.node_writer import NodeWriter
from meshweave.algorithms.block.nodes.kernel import Kernel, RankSizes
from meshweave.algorithms.block.place import NodePlace
from meshweave.algorithms.block.problem import BlockProblem
from meshweave.algorithms.block.roles import Roles
from meshweave.algorithms.contract import Array
from meshweave.describe.model.nodes import LayerNode
from meshweave.ir.program import Tensor
from meshweave.ir.program.meanings import Meaning

AnyNode = TypeVar("AnyNode", bound=LayerNode)

Known = dict[str, Array]
"""Tensors of a dense run, by name."""


class NodeRecord(ABC, Generic[AnyNode]):
    """What programs know about one type of node: its equations, functions, kernels and ops.

    A layer's graph has nodes (ops) and edges (activations). The gradient with respect to an edge is a sum of
    terms, its contributions, one from each node that reads the edge. `roles` say how each mesh axis shards the
    layer: equations may differ with them, as those of ring attention do. `at` is a node with the names of its
    tensors. `known` are whole arrays by tensor name.
    """

    node_type: ClassVar[type[LayerNode]]
    is_timed: ClassVar[bool] = False
    """Whether its program says what it costs and not what it computes: it has no equations."""

    def tensors(self, at: NodePlace[AnyNode], roles: Roles) -> Iterator[Tensor]:
        """Yield the tensors that the node's equations name besides edges, parameters and their gradients.

        They have global shapes. This default yields none.
        """
        del at, roles
        yield from ()

    @abstractmethod
    def meanings(self, at: NodePlace[AnyNode], roles: Roles) -> Iterator[Meaning]:
        """Yield the equations of the forward part, from the node's inputs and parameters to its output edge."""

    @abstractmethod
    def gradient_meanings(self, at: NodePlace[AnyNode], roles: Roles) -> Iterator[Meaning]:
        """Yield the equations of the backward part.

        They lead to the node's contributions to the gradients of its inputs, and to gradients of parameters.
        """

    def functions(self, node: AnyNode, problem: BlockProblem) -> Mapping[str, Callable[..., Any]]:
        """Return the functions that the node's programs call, by name; they give integers for an `exact` problem.

        Names are those that `NodePlace.fn` takes. This default returns none.
        """
        del node, problem
        return {}

    @abstractmethod
    def compute(self, at: NodePlace[AnyNode], known: Known, functions: Functions) -> None:
        """Compute the node's output in one process from tensors in `known`, and store it there by name.

        `functions` are those of all nodes of the layer, by the names that `NodePlace.fn` returns.
        """

    @abstractmethod
    def compute_gradient(self, at: NodePlace[AnyNode], known: Known, functions: Functions) -> None:
        """Compute the node's contributions to gradients of its inputs, and gradients of parameters, into `known`.

        `known` must have the tensors of the forward part, and the gradient of the node's output.
        """

    def kernels(self, at: NodePlace[AnyNode], roles: Roles, sizes: RankSizes) -> Iterator[Kernel]:
        """Yield the node's computations, forward and backward, on the first rank, which has the largest shards.

        `sizes` has the sizes of that rank's shards. This default yields none.
        """
        del at, roles, sizes
        yield from ()

    @abstractmethod
    def write(self, at: NodePlace[AnyNode], writer: NodeWriter) -> None:
        """Write the ops of the forward part of the node."""

    @abstractmethod
    def write_gradient(self, at: NodePlace[AnyNode], writer: NodeWriter) -> None:
        """Write the ops of the backward part of the node."""
