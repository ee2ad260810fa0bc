"""The constants of the cost model, measured on the machine at hand.

`target` says where the ranks run, `sweep` lists what they run as programs, `rank` runs it, `fit` fits the
constants, `constants` makes a cluster of them and `cluster_toml` its file. `run` does all of it. Nothing here
knows what a lab is.
"""

from meshweave.calibrate.cluster_toml import to_toml
from meshweave.calibrate.constants import Calibration, fit_calibration
from meshweave.calibrate.fit import Fit, FitLimits, Sample, fit_samples
from meshweave.calibrate.sweep import Sweep, SweepCase, plan_sweep

__all__ = [
    "Calibration",
    "Fit",
    "FitLimits",
    "Sample",
    "Sweep",
    "SweepCase",
    "fit_calibration",
    "fit_samples",
    "plan_sweep",
    "to_toml",
]
