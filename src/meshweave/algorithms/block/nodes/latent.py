"""What latent attention costs: products that every rank makes for its tokens, and attention of two widths."""

from __future__ import annotations

from collections.abc import Iterator

from meshweave.algorithms.block.node_writer import NodeWriter
from meshweave.algorithms.block.nodes.attention import AttentionRecord
from meshweave.algorithms.block.nodes.kernel import PassPart
from meshweave.algorithms.block.nodes.norm import NormRecord
from meshweave.algorithms.block.nodes.timed import TimedRecord
from meshweave.algorithms.block.place import NodePlace
from meshweave.algorithms.block.problem import BlockProblem
from meshweave.algorithms.block.roles import AxisDims
from meshweave.algorithms.block.writer import COMPUTE, Stored
from meshweave.base.errors import LayoutError
from meshweave.describe.model.latent import LatentAttention, LatentNorm, LocalLinear
from meshweave.describe.model.nodes import Features
from meshweave.ir.program.expressions import Index
from meshweave.ir.work import Work, matmul_work


class LocalLinearRecord(TimedRecord[LocalLinear]):
    """A product of a rank's own tokens with a weight that every rank has whole."""

    node_type = LocalLinear

    def works(
        self, node: LocalLinear, problem: BlockProblem, tokens: int, part: PassPart
    ) -> Iterator[tuple[str, Work]]:
        """Yield ("compute", work): the product for one rank's `tokens`; backward, those for its two gradients."""
        k, n = node.operand.size, node.result.size
        if part == "forward":
            yield COMPUTE, matmul_work(tokens, n, k, problem.dtype)
            return
        yield COMPUTE, matmul_work(tokens, k, n, problem.dtype)
        yield COMPUTE, matmul_work(k, n, tokens, problem.dtype)


class LatentNormRecord(NormRecord):
    """A norm over the features of a latent (compressed queries, or keys and values)."""

    node_type = LatentNorm


class LatentAttentionRecord(AttentionRecord):
    """Attention whose keys end in features that all heads share, and that every rank has whole."""

    node_type = LatentAttention

    def write(self, at: NodePlace[LatentAttention], writer: NodeWriter) -> None:  # type: ignore[override]
        """Write attention of a rank's heads, after an all-gather of the latent if an axis shards its tokens.

        The last features of the latent are those of the keys that all heads share.

        Raises:
            LayoutError: a role is that of ring attention, which latent attention does not have.
        """
        if writer.roles.ring_axis is not None:
            raise LayoutError("latent attention has no ring yet; give context=1")
        out, ins = writer.out(at), self._ins(at, writer)
        sums = writer.new(
            at.own(at.node.sums),
            writer.sides(Features("heads", at.node.heads, 1)),
            ins[0].dims,
            at.problem.statistics_dtype,
        )
        writer.writer.call("attention", (out, sums), ins, "attention", self._shape(at, writer))
        writer.end_site()

    def write_gradient(self, at: NodePlace[LatentAttention], writer: NodeWriter) -> None:  # type: ignore[override]
        """Write the call for the gradients of the queries, of the keys with values, and of the latent.

        If the node is the first reader of one of these, the terms of other readers are added to its gradient.
        Along axes that shard the heads, ranks have terms of the latent's gradient, which are summed over ranks if
        the latent is sharded there.
        """
        arriving, ins = writer.arriving(at), self._ins(at, writer)
        queries, keys = (writer.contribution(at, edge) for edge in at.node.ins[:2])
        sums = writer.stored[at.own(at.node.sums)]
        reads = (arriving, *ins, writer.stored[at.out], sums)
        shape = self._shape(at, writer)
        latent, gathered = writer.edge(at, 2), ins[2]
        natural: AxisDims = tuple(
            "partial" if heads and not whole else whole
            for whole, heads in zip(gathered.dims, arriving.dims, strict=True)
        )
        name = writer.contribution(at, at.node.ins[2]).tensor
        landed, shared = writer.result_buffers(name, latent.sides, natural, latent.dims)
        writer.writer.call("attention_grad", (queries, keys, landed), reads, "attention", shape, "input_grad")
        writer.writer.move(landed, latent.dims, "moved", into=shared)
        for edge in at.node.ins:
            writer.sum_contributions(at, edge)

    def _ins(self, at: NodePlace[LatentAttention], writer: NodeWriter) -> tuple[Stored, Stored, Stored]:
        name = f"{at.layer.home(at.node.ins[2])} gathered"
        gathered = writer.moved_once(writer.edge(at, 2), writer.roles.operand(True), "all", name)
        return writer.edge(at), writer.edge(at, 1), gathered

    def _shape(self, at: NodePlace[LatentAttention], writer: NodeWriter) -> tuple[Index, ...]:
        tokens, features = writer.rows_and_features(writer.out(at))
        sequence = at.problem.sequence
        keys = sequence if at.problem.counts_masked else at.node.mean_keys(sequence)
        return tokens // sequence, features // at.node.value, sequence, keys, at.node.width
