"""Z = X + P + ..., of which the first term that is made for it alone is summed in place. Its gradient is that of
every term."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshweave.algorithms.block.functions import Functions
from meshweave.algorithms.block.node_writer import NodeWriter
from meshweave.algorithms.block.nodes.kernel import Kernel, RankSizes
from meshweave.algorithms.block.nodes.record import Known, NodeRecord
from meshweave.algorithms.block.place import NodePlace
from meshweave.algorithms.block.roles import Roles
from meshweave.describe.model.nodes import EdgeSum
from meshweave.ir.program.meanings import Meaning, Sum
from meshweave.ir.work import move_work


class AddRecord(NodeRecord[EdgeSum]):
    """A sum of activations. Terms that are partial sums on each rank are added first and then reduced together."""

    node_type = EdgeSum

    def meanings(self, at: NodePlace[EdgeSum], roles: Roles) -> Iterator[Meaning]:
        """Yield the equation of the sum."""
        yield Sum(at.out, tuple(map(at.layer.edge, at.node.ins)))

    def gradient_meanings(self, at: NodePlace[EdgeSum], roles: Roles) -> Iterator[Meaning]:
        """Yield nothing: each term has the gradient of the sum."""
        yield from ()

    def compute(self, at: NodePlace[EdgeSum], known: Known, functions: Functions) -> None:
        """Compute the sum and store it in `known`.

        `known` has whole arrays by tensor name.
        """
        known[at.out] = np.sum([known[at.layer.edge(edge)] for edge in at.node.ins], 0)

    def compute_gradient(self, at: NodePlace[EdgeSum], known: Known, functions: Functions) -> None:
        """Do nothing: each term has the gradient of the sum."""

    def kernels(self, at: NodePlace[EdgeSum], roles: Roles, sizes: RankSizes) -> Iterator[Kernel]:
        """Yield the first rank's additions of the forward part: one for each term but the first."""
        elements = sizes.tokens(roles.residual) * sizes.features(at.node.features, roles.residual)
        for _ in at.node.ins[1:]:
            yield Kernel(move_work(elements, sizes.problem.dtype, "add"), "forward")

    def write(self, at: NodePlace[EdgeSum], writer: NodeWriter) -> None:
        """Write the addition of terms that are partial sums, their reduction over ranks, and other additions."""
        out, layer, ops = writer.out(at), at.layer, writer.writer
        terms = [layer.edge(edge) for edge in at.node.ins if layer.home(edge) != at.out]
        in_parts = [
            writer.unmoved.pop(name) for name in map(layer.edge, at.node.ins) if name in writer.unmoved
        ]
        if in_parts:
            landed, *others = sorted(in_parts, key=lambda part: part.tensor != out.tensor)
            for term in others:
                ops.add(landed, term)
                terms.remove(term.tensor)
            ops.move(landed, out.dims, "moved", into=writer.stored[landed.tensor])
            writer.end_site()
        for name in terms:
            ops.add(out, writer.stored[name])

    def write_gradient(self, at: NodePlace[EdgeSum], writer: NodeWriter) -> None:
        """Write nothing: each term has the gradient of the sum."""
