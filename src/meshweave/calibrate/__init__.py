"""The constants of the cost model, measured on the machine at hand.

`target` says where the ranks run, `sweep` lists what they run as programs, `rank` runs it, `fit` fits the
constants, `constants` makes a cluster of them and `cluster_toml` its file. `run` does all of it. Nothing here
knows what a lab is.
"""

from meshweave.calibrate.cluster_toml import to_toml as to_toml
from meshweave.calibrate.constants import Calibration as Calibration
from meshweave.calibrate.constants import fit_calibration as fit_calibration
from meshweave.calibrate.fit import FitLimits as FitLimits
from meshweave.calibrate.fit import Sample as Sample
from meshweave.calibrate.fit import fit_samples as fit_samples
from meshweave.calibrate.sweep import Sweep as Sweep
from meshweave.calibrate.sweep import plan_sweep as plan_sweep
