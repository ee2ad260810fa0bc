"""The planner of a whole training step: which degrees of parallelism, within the memory of a chip.

space     what there is to choose: degrees, strategies, micro-batches, ZeRO, recomputation, orders
bounds    times that no step with some choices can go under
search    best first, within memory, anytime
planner   the plan of a model on a cluster: the ranking as a `Plan`
reasons   why the winner wins, and what would make fit what does not
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
