"""The constants of the cost model, measured on the machine at hand.

`sweep` lists what to run as programs, `rank` runs them, `fit` fits the constants, `write` makes a cluster of
them and its TOML file. Nothing here knows what a lab is: the caller says where the ranks run.
"""

from meshweave.calibrate.fit import Fit, FitLimits, Sample, fit_samples
from meshweave.calibrate.sweep import Sweep, SweepCase, plan_sweep
from meshweave.calibrate.write import Calibration, fit_calibration, to_toml

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
