"""An algorithm of each family that plans choose among, as a package might add them: a trial of the contract."""

from __future__ import annotations

import meshweave as mw
from meshweave.algorithms.fused import DirectReduceScatter
from meshweave.algorithms.matmul2d.collective import CollectiveProduct


class TwinProduct(CollectiveProduct):
    """Collective under another name."""

    name, title, source = "twin_product", "Twin of Collective", "a trial"


class TwinFused(DirectReduceScatter):
    """Direct reduce-scatter under another name."""

    name, title, source = "twin_fused", "Twin of the direct reduce-scatter", "a trial"


class TwinStrategy(mw.algorithms.BlockAlgorithm):
    """Megatron under another name."""

    name, title, source = "twin_strategy", "Twin of Megatron", "a trial"
    roles = (mw.algorithms.BLOCK_ROLES["inner"], mw.algorithms.BLOCK_ROLES["idle"])


PRODUCT, FUSED, STRATEGY = TwinProduct(), TwinFused(), TwinStrategy()
