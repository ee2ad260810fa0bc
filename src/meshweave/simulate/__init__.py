"""The discrete-event reading of a program: `engine` is fast, `reference` the oracle that it agrees with."""

from meshweave.simulate.engine import simulate
from meshweave.simulate.result import LinkUse, Simulation

__all__ = ["LinkUse", "Simulation", "simulate"]
