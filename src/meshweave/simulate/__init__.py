"""The discrete-event reading of a program."""

from meshweave.simulate.reference import simulate

__all__ = ["simulate"]
