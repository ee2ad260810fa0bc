"""2D products in a layer: the batch lies over rows of the mesh, and features over its columns.

Weights are sharded by their first dim over rows and by their second over columns. Activations stay where the
products leave them, so norms sum statistics over columns and residuals are added in place.
"""

from __future__ import annotations

from meshweave.algorithms.block.roles import COLUMNS, FULLY_SHARDED
from meshweave.algorithms.block.strategy import BlockAlgorithm


class Collective2d(BlockAlgorithm):
    """One all-gather per moving operand of a product, one reduce-scatter of a moving result."""

    name = "collective_2d"
    title = "Collective 2D"
    source = "Schatz et al. 2016; Wang et al., ASPLOS '23 (without decomposition); MeshSlice, section 2.3.4"
    roles = (FULLY_SHARDED, COLUMNS)
