"""The closed-form reading of a program, from its skeleton."""

from meshweave.estimate.skeletons import Estimate, Timed, estimate, skeleton_ps

__all__ = ["Estimate", "Timed", "estimate", "skeleton_ps"]
