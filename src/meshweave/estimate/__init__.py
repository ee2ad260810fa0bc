"""The closed-form reading of a program, from its skeleton."""

from meshweave.estimate.skeletons import Estimate, estimate, skeleton_ps

__all__ = ["Estimate", "estimate", "skeleton_ps"]
