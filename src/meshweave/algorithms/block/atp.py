"""ATP (Cheng et al., section 3): column-first products, then row-first ones, on DeviceMesh(d1, d2).

Rows of the mesh (d1) share the inner features, columns (d2) those of the residual: W_qkv and W_1 lie as
[Shard(1), Shard(0)], W_o and W_2 as [Shard(0), Shard(1)], X and Z as [Replicate, Shard(1)]. The first product of a
half is summed over columns, the second over rows; backward it is the reverse. Attention is scattered over
columns by groups of heads and gathered after: the paper's f1 and f2. A norm sums statistics over columns.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshweave.algorithms.block.place import side_of
from meshweave.algorithms.block.problem import MESH, BlockConfig, BlockProblem
from meshweave.algorithms.block.roles import HIDDEN, INNER, AxisDims, Side
from meshweave.algorithms.block.sides import extent
from meshweave.algorithms.block.strategy import BlockAlgorithm
from meshweave.base.units import dtype_bytes
from meshweave.describe.machine.cluster import Cluster
from meshweave.ir.program.expressions import evaluate


class Atp(BlockAlgorithm):
    """Sums over columns after products that enter the inner features, over rows after those that leave them."""

    name = "atp"
    title = "ATP"
    source = "Cheng et al., ATP: Adaptive Tensor Parallelism for Foundation Models, sections 3 and 4"
    roles = (INNER, HIDDEN)

    def candidates(self, problem: BlockProblem, cluster: Cluster | None = None) -> Iterator[BlockConfig]:
        """Yield 1, 2 and 4 chunks, scattering before attention by a reduce-scatter, then as the paper does."""
        yield from super().candidates(problem, cluster)
        if problem.mesh_shape[1] > 1:
            for config in super().candidates(problem, cluster):
                yield BlockConfig(config.chunks, "all_reduce")

    def traffic(self, problem: BlockProblem, config: BlockConfig, rank: int) -> dict[str, int]:
        """Return the bytes of f1 to f4 (Eq. 2), and of the statistics of norms, which that leaves out.

        In residuals of all tokens, of a GPT and with "all_reduce": over rows four sums of 1 / d2; over columns
        sums of 3 + 4 forward and 1 + 4 backward and gathers of 1 + 3, each of which is half a sum, all over d1.
        These are the 4 and 14 of Eq. 2.
        """
        if problem.vocabulary or problem.graph is not None:
            return super().traffic(problem, config, rank)
        d1, d2 = problem.mesh_shape
        item = dtype_bytes(problem.dtype)
        hidden = self._local(problem, rank, Side("hidden", problem.hidden), ("", "hidden"))
        of_qkv, of_out, of_ff1, of_ff2 = problem.layer.linears
        qkv, heads = (
            tuple(
                self._local(problem, rank, side_of(each), dims)
                for dims in (("inner", ""), ("inner", "inner"))
            )
            for each in (of_qkv.result, of_out.operand)
        )
        first, second = (
            self._local(problem, rank, side_of(each), ("inner", ""))
            for each in (of_ff1.result, of_ff2.operand)
        )
        over_rows = over_columns = 0
        for tokens in self._tokens_of_chunks(problem, config):
            statistics = tokens * (1 if problem.norm == "rms" else 2) * dtype_bytes(problem.statistics_dtype)
            passes = (
                [(qkv, heads, first), (heads, qkv, second)] if problem.training else [(qkv, heads, first)]
            )
            for scattered, gathered, summed in passes:
                over_rows += 2 * _summed(d1, tokens * hidden * item)
                over_columns += 2 * _summed(d2, statistics) + _summed(d2, tokens * summed * item)
                over_columns += tokens * (gathered[0] - gathered[1]) * item
                if config.scatter == "all_reduce":
                    over_columns += _summed(d2, tokens * scattered[0] * item)
                else:
                    over_columns += tokens * (scattered[0] - scattered[1]) * item
        moved = {f"{MESH}.row": over_rows, f"{MESH}.col": over_columns}
        return {axis: problem.layers * count for axis, count in moved.items() if count}

    def _local(self, problem: BlockProblem, rank: int, side: Side, dims: AxisDims) -> int:
        """Return the elements of a side that a rank has."""
        mesh = problem.mesh
        coordinates = {f"{MESH}.{axis}": at for axis, at in zip(mesh.axes, mesh.coords(rank), strict=True)}
        return evaluate(extent(mesh, side, dims), coordinates)

    @staticmethod
    def _tokens_of_chunks(problem: BlockProblem, config: BlockConfig) -> Iterator[int]:
        size = -(-problem.batch // config.chunks)
        for start in range(0, problem.batch, size):
            yield min(size, problem.batch - start) * problem.sequence


def _summed(num_ranks: int, num_bytes: int) -> int:
    """Return the bytes that a rank moves in an all-reduce."""
    return 2 * (num_ranks - 1) * num_bytes // num_ranks
