"""ATP (Cheng et al., section 3): column-first products, then row-first ones, on DeviceMesh(d1, d2).

Rows of the mesh (d1) share the inner features, columns (d2) those of the residual: W_qkv and W_1 lie as
[Shard(1), Shard(0)], W_o and W_2 as [Shard(0), Shard(1)], X and Z as [Replicate, Shard(1)]. The first product of a
half is summed over columns, the second over rows; backward it is the reverse. Attention is scattered over
columns by groups of heads and gathered after: the paper's f1 and f2. A norm sums statistics over columns.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshweave.algorithms.block.problem import BlockConfig, BlockProblem
from meshweave.algorithms.block.roles import HIDDEN, INNER
from meshweave.algorithms.block.strategy import BlockAlgorithm
from meshweave.describe.machine.cluster import Cluster


class Atp(BlockAlgorithm):
    """Sums over columns after products that enter the inner features, over rows after those that leave them."""

    name = "atp"
    title = "ATP"
    source = "Cheng et al., ATP: Adaptive Tensor Parallelism for Foundation Models, sections 3 and 4"
    roles = (INNER, HIDDEN)

    def candidates(self, problem: BlockProblem, cluster: Cluster | None = None) -> Iterator[BlockConfig]:
        """Yield configs by number of chunks, first with `scatter` "reduce_scatter", then with "all_reduce".

        The paper uses an all-reduce, after which each rank takes its shard. If the mesh has one column, the two
        are equal, and only the configs with "reduce_scatter" are yielded. `cluster` is ignored.
        """
        yield from super().candidates(problem, cluster)
        if problem.mesh_shape[1] > 1:
            for config in super().candidates(problem, cluster):
                yield BlockConfig(config.chunks, "all_reduce")
