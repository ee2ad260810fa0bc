"""The closed-form reading: times from skeletons, or from a program whose ops meet nowhere."""

from meshweave.estimate.skeletons import Estimate, TimedSkeleton, estimate_skeleton, skeleton_ps
from meshweave.estimate.uncontended import estimate

__all__ = ["Estimate", "TimedSkeleton", "estimate", "estimate_skeleton", "skeleton_ps"]
