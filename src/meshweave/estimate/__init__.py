"""The closed-form reading: times from skeletons, or from a program whose ops meet nowhere."""

from meshweave.estimate.skeletons import Estimate as Estimate
from meshweave.estimate.skeletons import TimedSkeleton as TimedSkeleton
from meshweave.estimate.skeletons import estimate_skeleton as estimate_skeleton
from meshweave.estimate.skeletons import skeleton_ps as skeleton_ps
from meshweave.estimate.uncontended import estimate as estimate
