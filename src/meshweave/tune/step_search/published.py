"""Say which strategies published runs have, and whether a search prefers them where little is won.

Predicted steps are off, by about `MARGIN` in the median over published runs that no constant was fitted on. All of
these runs have strategies that the stacks of others execute. What the library's own runtime alone executes is
predicted by the same model, and by no evidence of its own: a gain within the error is none to change a layout for.
"""

from __future__ import annotations

from meshweave.algorithms.step.problem import Parallelism
from meshweave.algorithms.step.space import StepLayout, StepSpace, ranks_of
from meshweave.algorithms.step.stacks import IDEAL, published_strategies


def prefers_published(space: StepSpace) -> bool:
    """Return whether a search of a space prefers strategies that published runs have.

    It does not where the options leave no such strategy to choose, where the stack executes some strategies only
    (those of other software), and for the stack "ideal".
    """
    stack, published = space.problem.stack, published_strategies()
    is_own = stack.runs.strategies is None and stack.name != IDEAL
    return is_own and any(name in published for name in space.options.strategies)


def is_published(choice: Parallelism | StepLayout) -> bool:
    """Return whether a stack with published runs executes the strategy of a configuration.

    True as well for one tensor rank, which has no strategy.
    """
    return ranks_of(choice.tensor) == 1 or choice.strategy in published_strategies()
