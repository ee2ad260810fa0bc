"""Searches besides `meshweave.plan` and `meshweave.rank`: one family's own, and plan files.

`tune_universal` and `tune_fused` choose for one product, `plan_model` for the products of a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshweave.base.lazy import lazy_names

if TYPE_CHECKING:
    from meshweave.tune.exports import Export as Export
    from meshweave.tune.fused import FusedChoice as FusedChoice
    from meshweave.tune.fused import tune_fused as tune_fused
    from meshweave.tune.plan_file import load_plan as load_plan
    from meshweave.tune.product import TunedProduct as TunedProduct
    from meshweave.tune.product import tune_product as tune_product
    from meshweave.tune.ranked import RankedConfig as RankedConfig
    from meshweave.tune.ranking import simulate_best as simulate_best
    from meshweave.tune.search import plan_model as plan_model
    from meshweave.tune.step_search import SpaceOptions as SpaceOptions
    from meshweave.tune.universal import tune_universal as tune_universal

_MOVED = {
    "meshweave": "export_plan=export",
    "meshweave_studies.blocks.ranking": "BlockRanking rank_blocks",
    "meshweave_studies.blocks.reasons": "block_reason",
    "meshweave_studies.slicing.layouts": "tune_layouts",
    "meshweave_studies.slicing.schedules": "search_schedule",
}

__all__ = lazy_names(__name__, moved=_MOVED)
