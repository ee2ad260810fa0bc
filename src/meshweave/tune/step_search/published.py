"""Put a strategy that published runs have before one that no published run has, where little is won.

Predicted steps are off, by about `MARGIN` in the median over published runs that no constant was fitted on. All of
these runs have strategies that the stacks of others execute. What the library's own runtime alone executes is
predicted by the same model, and by no evidence of its own: a gain within the error is none to change a layout for.
"""

from __future__ import annotations

import math
from dataclasses import replace

from meshweave.algorithms.step.problem import Parallelism
from meshweave.algorithms.step.space import StepSpace
from meshweave.algorithms.step.stacks import IDEAL, published_strategies
from meshweave.describe.scores import MARGIN
from meshweave.tune.step_search.search import StepRanking, StepSearch


def published_first(ranking: StepRanking, margin: float = MARGIN) -> StepRanking:
    """Return a ranking with a published strategy in its first row, where one is within `margin` of the fastest.

    The fastest by prediction is the second row then. A ranking is returned as it is where its first row has such a
    strategy, where the options leave none to choose, for a stack of others, which executes no other strategies,
    for kernels alone, and where a search was interrupted.
    """
    space = ranking.space
    known = published_strategies()
    published = tuple(name for name in space.options.strategies if name in known)
    stack = space.problem.stack
    if not ranking.rows or not ranking.is_complete or not published:
        return ranking
    if stack.runs.strategies is not None or stack.name == IDEAL:
        return ranking
    fastest = ranking.rows[0]
    if is_published(fastest.parallelism):
        return ranking
    within_s = fastest.time_s * (1 + margin)
    narrowed = StepSpace(space.problem, replace(space.options, strategies=published))
    try:
        others = StepSearch(narrowed, ranking.memory_bytes, 1, within_s=within_s).ranking()
    except KeyboardInterrupt:  # the ranking is whole without it
        return ranking
    if not others.is_complete or not others.rows or others.rows[0].time_s >= within_s:
        return ranking
    first = others.rows[0]
    rows = (first, *(row for row in ranking.rows if row.row_key != first.row_key))
    return replace(ranking, rows=rows, is_published_first=True)


def is_published(choice: Parallelism) -> bool:
    """Return whether some stack with published runs executes what tensor ranks do in a configuration."""
    return math.prod(choice.tensor_mesh) == 1 or choice.strategy in published_strategies()
