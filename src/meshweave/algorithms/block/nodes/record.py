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

    Forward equations end in the node's output edge. Backward ones end in its contributions to the gradients
    of the edges that it reads, and in the gradients of its parameters. `roles` say how each mesh axis shards the
    layer: equations may differ with them, as those of ring attention do.
    """

    node_type: ClassVar[type[LayerNode]]
    is_timed: ClassVar[bool] = False
    """Whether its program says what it costs and not what it computes: it has no equations."""

    def tensors(self, at: NodePlace[AnyNode], roles: Roles) -> Iterator[Tensor]:
        """Yield the tensors that the equations name besides edges, parameters and their gradients.

        Unless a kind of node overrides it, there are none.
        """
        del at, roles
        yield from ()

    @abstractmethod
    def meanings(self, at: NodePlace[AnyNode], roles: Roles) -> Iterator[Meaning]:
        """Yield the equations of the forward part, which end in the node's output edge."""

    @abstractmethod
    def gradient_meanings(self, at: NodePlace[AnyNode], roles: Roles) -> Iterator[Meaning]:
        """Yield the equations of contributions to gradients of inputs, and of gradients of parameters."""

    def functions(self, node: AnyNode, problem: BlockProblem) -> Mapping[str, Callable[..., Any]]:
        """Return the functions that the node's programs call, by name; of integers if the problem is `exact`.

        Names are those that `NodePlace.fn` takes. Unless a kind of node overrides it, there are none.
        """
        del node, problem
        return {}

    @abstractmethod
    def compute(self, at: NodePlace[AnyNode], known: Known, functions: Functions) -> None:
        """Compute the node's output without sharding from tensors in `known`, and store it there by name.

        `functions` has what `functions` of all nodes of the layer return, under the names of `NodePlace.fn`.
        """

    @abstractmethod
    def compute_gradient(self, at: NodePlace[AnyNode], known: Known, functions: Functions) -> None:
        """Store in `known` the contributions to gradients of the edges read, and gradients of parameters.

        `known` has the tensors of the forward part, and the gradient of the node's output.
        """

    def kernels(self, at: NodePlace[AnyNode], roles: Roles, sizes: RankSizes) -> Iterator[Kernel]:
        """Yield the node's kernels, forward and backward, on the first rank, which has the largest shards.

        This default yields none.
        """
        del at, roles, sizes
        yield from ()

    @abstractmethod
    def write(self, at: NodePlace[AnyNode], writer: NodeWriter) -> None:
        """Write the ops of the forward part of the node."""

    @abstractmethod
    def write_gradient(self, at: NodePlace[AnyNode], writer: NodeWriter) -> None:
        """Write the ops of the backward part of the node."""
