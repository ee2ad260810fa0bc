"""The planner of a whole training step: which degrees of parallelism, within the memory of a chip.

    search      best first, within memory, anytime
    planner     the plan of a model on a cluster: the ranking as a `Plan`
    published   which strategies published runs have, and whether they are preferred
    curves      configurations with other chips, batches and links
    reasons     why the winner wins
    remedies    what would make a step fit that does not

What there is to choose, and bounds of times, are in `algorithms.step.space` and `algorithms.step.bounds`.
"""

from meshweave.algorithms.step.space import SpaceOptions, StepLayout, StepSpace
from meshweave.tune.step_search.planner import plan, plan_step
from meshweave.tune.step_search.search import PricedStep, StepRanking, StepSearch

__all__ = [
    "PricedStep",
    "SpaceOptions",
    "StepLayout",
    "StepRanking",
    "StepSearch",
    "StepSpace",
    "plan",
    "plan_step",
]
