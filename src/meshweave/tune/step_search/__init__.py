"""The planner of a whole training step: which degrees of parallelism, within the memory of a chip.

    search      best first, within memory, anytime; which strategies published runs have, and are preferred
    planner     the plan of a model on a cluster: the ranking as a `Plan`
    curves      configurations with other chips, batches and links
    reasons     why the winner wins
    remedies    what would make a step fit that does not

What there is to choose, and bounds of times, are in `algorithms.step.space` and `algorithms.step.bounds`.
"""

from meshweave.algorithms.step.space import SpaceOptions as SpaceOptions
from meshweave.algorithms.step.space import StepSpace as StepSpace
from meshweave.tune.step_search.planner import plan as plan
from meshweave.tune.step_search.planner import plan_step as plan_step
from meshweave.tune.step_search.search import StepRanking as StepRanking
from meshweave.tune.step_search.search import StepSearch as StepSearch
