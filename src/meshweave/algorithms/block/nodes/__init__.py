"""The table of types of nodes: what `algorithms` knows of each, and what installed packages add."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from meshweave.algorithms.block.nodes.activation import ActivationRecord
from meshweave.algorithms.block.nodes.add import AddRecord
from meshweave.algorithms.block.nodes.attention import AttentionRecord, SinkAttentionRecord
from meshweave.algorithms.block.nodes.experts import (
    CombineRecord,
    DispatchRecord,
    ExpertsRecord,
    RouterRecord,
    SharedGateRecord,
)
from meshweave.algorithms.block.nodes.head_norm import HeadNormRecord, JointNormRecord
from meshweave.algorithms.block.nodes.kernel import Kernel as Kernel
from meshweave.algorithms.block.nodes.kernel import RankSizes
from meshweave.algorithms.block.nodes.latent import (
    LatentAttentionRecord,
    LatentNormRecord,
    LocalLinearRecord,
)
from meshweave.algorithms.block.nodes.linear import LinearRecord
from meshweave.algorithms.block.nodes.norm import NormRecord
from meshweave.algorithms.block.nodes.record import NodeRecord as NodeRecord
from meshweave.algorithms.block.place import layers_of
from meshweave.algorithms.block.problem import BlockProblem
from meshweave.algorithms.block.roles import Roles
from meshweave.algorithms.entries import installed
from meshweave.base.errors import UnsupportedError
from meshweave.describe.model.layer import LayerGraph
from meshweave.describe.model.nodes import LayerNode
from meshweave.ir.work import move_work

ENTRY_POINTS = "meshweave.nodes"
"""The group of entry points under which an installed package offers records of nodes of its own."""

_RECORDS: tuple[NodeRecord[Any], ...] = (
    NormRecord(),
    LinearRecord(),
    AttentionRecord(),
    ActivationRecord(),
    AddRecord(),
    HeadNormRecord(),
    JointNormRecord(),
    SinkAttentionRecord(),
    LatentAttentionRecord(),
    LatentNormRecord(),
    LocalLinearRecord(),
    RouterRecord(),
    DispatchRecord(),
    ExpertsRecord(),
    CombineRecord(),
    SharedGateRecord(),
)


@cache
def _table() -> dict[type[LayerNode], NodeRecord[Any]]:
    table: dict[type[LayerNode], NodeRecord[Any]] = {}
    for record in (*_RECORDS, *installed(ENTRY_POINTS, NodeRecord)):
        if table.setdefault(record.node_type, record) is not record:
            raise UnsupportedError(f"two records are of {record.node_type.__name__}; only one may be")
    return table


def record_of(node: LayerNode) -> NodeRecord[Any]:
    """Return the `NodeRecord` of a node's type: how its equations, functions, kernels and ops are made.

    Raises:
        UnsupportedError: neither this package nor an installed one has a record of the type, or two records are of
            one type.
    """
    record = _table().get(type(node))
    if record is None:
        raise UnsupportedError(
            f"no record of {type(node).__name__}, which makes {node.out}; give one under the entry points "
            f"'{ENTRY_POINTS}'"
        )
    return record


def is_timed(layer: LayerGraph) -> bool:
    """Return whether a layer has a node with costs only, such as experts, so that its programs have no equations.

    Raises:
        UnsupportedError: a node before the first such node has no `NodeRecord`.
    """
    return any(record_of(node).is_timed for node in layer.nodes)


def kernels_of(problem: BlockProblem, roles: Roles) -> Iterator[Kernel]:
    """Yield the kernels of a problem's first layer, forward and backward, on the rank with the largest shards.

    Sums of gradients are included, communication is not.

    Raises:
        UnsupportedError: a node has no `NodeRecord`.
    """
    sizes, layer = RankSizes(problem), layers_of(problem)[0]
    for at in layer.nodes:
        yield from record_of(at.node).kernels(at, roles, sizes)
        for edge, features in zip(at.node.ins, at.node.takes, strict=True):
            if at.is_first_reader(edge):  # contributions to its gradient are summed
                elements = sizes.tokens(roles.residual) * sizes.features(features, roles.residual)
                for _ in layer.graph.readers(edge)[1:]:
                    yield Kernel(move_work(elements, problem.dtype, "add"), "backward")
