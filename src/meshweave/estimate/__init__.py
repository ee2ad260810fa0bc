"""The closed-form reading: times from skeletons, or from a program whose ops meet nowhere."""

from meshweave.estimate.skeletons import Estimate, TimedSkeleton, estimate, skeleton_ps
from meshweave.estimate.uncontended import estimate_program

__all__ = ["Estimate", "TimedSkeleton", "estimate", "estimate_program", "skeleton_ps"]
