"""A plan of a step as settings of other software, and what these settings cannot say.

Each export is refused where the other software does not have the strategy of the plan: nothing is turned into
another strategy in silence. Smaller differences are listed in `Export.left_out`.
"""

from meshweave.tune.exports.launch_files import LAUNCHERS as LAUNCHERS
from meshweave.tune.exports.launch_files import launch_file as launch_file
from meshweave.tune.exports.row import Export as Export
from meshweave.tune.exports.targets import TARGETS as TARGETS
from meshweave.tune.exports.targets import export as export
