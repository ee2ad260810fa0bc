"""The constants of the cost model, measured on the machine at hand.

`sweep` lists what to run as programs, `rank` runs them, `fit` fits the constants, `write` makes a cluster of
them and its TOML file. Nothing here knows what a lab is: the caller says where the ranks run.
"""

from meshweave.calibrate.fit import Fit, Limits, Sample, fit_samples
from meshweave.calibrate.sweep import Case, Sweep, plan_sweep
from meshweave.calibrate.write import Calibration, calibrate, to_toml

__all__ = [
    "Calibration",
    "Case",
    "Fit",
    "Limits",
    "Sample",
    "Sweep",
    "calibrate",
    "fit_samples",
    "plan_sweep",
    "to_toml",
]
