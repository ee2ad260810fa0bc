"""2D products in a layer: the batch lies over rows of the mesh, and features over its columns.

Weights are sharded by their first dim over rows and by their second over columns. Activations stay where the
products leave them, so norms sum statistics over columns and residuals are added in place. The three products of
each weight are one dataflow each: output stationary forward, left stationary for the gradient of the operand,
right stationary for that of the weight (MeshSlice, Table 1). No matrix is transposed or moved between them.

But for Collective, which is written by roles, each product is an include of the algorithm's own program. A product
whose parts are uneven groups of heads or sequences is done as Collective does it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from meshweave.algorithms.block.problem import BlockConfig, BlockProblem
from meshweave.algorithms.block.roles import BATCH, COLUMNS, ROWS, AxisRole, Roles
from meshweave.algorithms.block.strategy import BlockAlgorithm
from meshweave.describe.machine.cluster import Cluster


class Collective2d(BlockAlgorithm):
    """One all-gather per moving operand of a product, one reduce-scatter of a moving result."""

    name = "collective_block"
    title = "Collective block"
    source = "Schatz et al. 2016; MeshSlice, section 2.3.4"
    roles = (ROWS, COLUMNS)


class IncludedProducts(BlockAlgorithm):
    """Layers whose products are programs of an algorithm of `matmul2d`, which the layer's program includes.

    Attributes:
        product_2d: the name of the algorithm.
        slices: values of `BlockConfig.slices`, the most slices of a product, to choose among.
        packets: values of `BlockConfig.packets` to choose among.
    """

    roles: ClassVar[tuple[AxisRole, ...]] = (ROWS, COLUMNS)
    product_2d: ClassVar[str]
    slices: ClassVar[tuple[int, ...]] = (1, 2, 4, 8)
    max_equal_slices: ClassVar[int | None] = None
    packets: ClassVar[tuple[int, ...]] = (1,)

    def examples(self) -> Iterator[BlockProblem]:
        """Yield two `exact` problems: one whose products are all 2D products, one with uneven groups of heads."""
        yield BlockProblem(2, 2, 5, 4, 2, 1, 6, (2, 2), exact=True)
        yield BlockProblem(1, 2, 4, 3, 3, 1, 3, (1, 2), family="llama", training=False, exact=True)

    def roles_of(self, problem: BlockProblem) -> Roles:
        """Return the roles of the axes of a problem's mesh, with `product_2d` as the algorithm of its products."""
        return Roles(super().roles_of(problem).axes, self.product_2d)

    def max_chunks(self, problem: BlockProblem) -> int:
        """Return 1: these strategies cut products into slices, and never the batch into chunks."""
        return 1

    def candidates(self, problem: BlockProblem, cluster: Cluster | None = None) -> Iterator[BlockConfig]:
        """Yield a config for each value of `slices` with each value of `packets`; `cluster` is ignored.

        If no mesh axis has more than two ranks, the number of packets is always 1.
        """
        packets = self.packets if max(problem.mesh_shape) > 2 else (1,)
        return (BlockConfig(slices=count, packets=each) for count in self.slices for each in packets)


class MeshSliceBlock(IncludedProducts):
    """Gathers and reductions of a product in slices, each beside the product of another slice."""

    name = "meshslice_block"
    title = "MeshSlice block"
    source = "MeshSlice, section 3"
    product_2d = "meshslice"
    max_equal_slices = max(IncludedProducts.slices)


class WangBlock(IncludedProducts):
    """Communication along one mesh axis cut into ring steps beside products, along the other axis whole."""

    name = "wang_block"
    title = "Wang block"
    source = "Wang et al., ASPLOS '23"
    is_searched = False  # estimates of its products and SUMMA's take as long as those of all other strategies
    product_2d = "wang"
    slices = (1, 4)


class SummaBlock(IncludedProducts):
    """Broadcasts of panels: the 2D tensor parallelism that the ATP paper compares with."""

    name = "summa_block"
    title = "SUMMA block (2D tensor parallelism)"
    source = "Xu et al., An Efficient 2D Method for Training Super-Large Deep Learning Models, 2021"
    is_searched = False  # as Wang's
    product_2d = "summa"
    slices = (1, 4)
    packets = (1, 4, 16)


class TwoHalfDBlock(IncludedProducts):
    """2.5D tensor parallelism as in Tesseract and Colossal-AI: SUMMA on `depth` meshes of rows and columns.

    Each mesh has whole weights, which 2D products shard over it, and a part of the batch. Only gradients of
    weights and of the parameters of norms are summed over depth. The product `25d` of `matmul2d` is another one:
    it splits the steps of a product over depth and sums C there, in a layer once for each of twelve products.
    """

    name = "25d_block"
    title = "2.5D block (2.5D tensor parallelism)"
    source = "Wang et al., Tesseract, ICPP '22, section 3; Solomonik and Demmel, Euro-Par 2011"
    roles = (BATCH, ROWS, COLUMNS)
    product_2d = "summa"
    slices = (1, 4)
    packets = (4,)

    def examples(self) -> Iterator[BlockProblem]:
        """Yield two `exact` problems: one whose products are all 2D products, one of a batch uneven over depth."""
        yield BlockProblem(4, 2, 4, 2, 2, 1, 6, (2, 2, 2), exact=True)
        yield BlockProblem(3, 2, 4, 3, 3, 1, 3, (2, 1, 2), family="llama", training=False, exact=True)
