"""A plan of a step in the words of other software, and what these words cannot say.

Each export is refused where the other software does not have the strategy of the plan: nothing is turned into
another strategy in silence. Smaller differences are listed in `Export.left_out`.
"""

from meshweave.tune.exports.export import TARGETS, export_plan
from meshweave.tune.exports.row import Export

__all__ = ["TARGETS", "Export", "export_plan"]
