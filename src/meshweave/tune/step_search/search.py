"""The search for the fastest configuration of a step within memory: `tune.best_first` over the parts of a step.

A row of the ranking is a set of degrees with a strategy, in the order and with the choices that suit it best.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshweave.algorithms.step import Parallelism, Step, memory_of
from meshweave.algorithms.step.algorithm import TRAINING_STEP, StepEstimate
from meshweave.algorithms.step.parts import ChoicePart, LayoutPart, StepPart, StepTree
from meshweave.algorithms.step.space import StepLayout, StepSpace, ranks_of
from meshweave.algorithms.step.stacks import IDEAL, published_strategies
from meshweave.base.progress import Progress, no_progress
from meshweave.cost.machine import Machine
from meshweave.tune.best_first import BestFirst
from meshweave.tune.ranked import RankedConfig

# --- published strategies ---------------------------------------------------------------------------------

# Say which strategies published runs have, and whether a search prefers them where little is won.
#
# Predicted steps are off, by about `MARGIN` in the median over published runs that no constant was fitted on.
# All of these runs have strategies that the stacks of others execute. What the library's own runtime alone
# executes is predicted by the same model, and by no evidence of its own: a gain within the error is none to
# change a layout for.


def prefers_published(space: StepSpace) -> bool:
    """Return whether a search of `space` prefers tensor-parallel strategies that published runs have used.

    False where the options allow none of these strategies, where the stack is that of other software, which
    executes some strategies only, and for the stack "ideal".
    """
    stack, published = space.problem.stack, published_strategies()
    is_own = stack.runs.strategies is None and stack.name != IDEAL
    return is_own and any(name in published for name in space.options.strategies)


def is_published(choice: Parallelism | StepLayout) -> bool:
    """Return whether the strategy of a configuration is one that published runs have used.

    True as well for a tensor-parallel degree of 1, for which the strategy makes no difference.
    """
    return ranks_of(choice.tensor) == 1 or choice.strategy in published_strategies()


# --- search -----------------------------------------------------------------------------------------------

NUM_EXACT = 2
"""Exact rows: the first of the ranking, than which no other configuration is faster."""
NUM_ROWS = 12
"""Rows of the ranking, if there are as many; those after the exact ones are the best that were priced."""


@dataclass(frozen=True)
class PricedStep:
    """A configuration that fits the memory, with its priced training step."""

    parallelism: Parallelism
    step: Step

    @property
    def time_s(self) -> float:
        """Return the seconds of one step."""
        return self.step.time_s

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of the fullest chip."""
        return self.step.memory.total


def _rank_key(priced: PricedStep) -> tuple[float, int, str]:
    return priced.time_s, priced.memory_bytes, str(priced.parallelism)


@dataclass
class SearchCount:
    """Counts of what a search has visited.

    Attributes:
        nodes: layouts with a micro-batch, in all.
        priced: configurations whose step was computed.
        over_memory: nodes and configurations that do not fit.
        refused: nodes and configurations that cannot be laid out or priced; `reason` is that of the first.
    """

    nodes: int = 0
    priced: int = 0
    over_memory: int = 0
    refused: int = 0
    reason: str = ""


@dataclass(frozen=True)
class StepRanking:
    """The result of a search.

    Attributes:
        rows: the best configuration of each set of degrees and strategy, the fastest first, but for
            `is_published_first`.
        front: priced configurations on the Pareto front of time and memory, the fastest first.
        is_complete: whether the search ran to its end; otherwise these are the best so far.
        num_exact: the number of exact rows, if the search ran to its end.
        is_published_first: whether the first row stands before faster ones for its strategy, which published
            runs have; the exact rows come after it.
        smallest: where nothing fits, the configuration with the least memory, and its bytes.
    """

    space: StepSpace
    memory_bytes: int
    rows: tuple[PricedStep, ...]
    front: tuple[PricedStep, ...]
    count: SearchCount
    is_complete: bool
    num_exact: int
    is_published_first: bool = False
    smallest: tuple[Parallelism, int] | None = None


class StepSearch(BestFirst):
    """A search of a space, to be run once.

    Args:
        space: what to choose among.
        memory_bytes: the most bytes that a chip may hold.
        num_exact: rows of the ranking that must be exact; the others are the best that were priced.
        progress: called with the numbers of layouts done, and of all.
        margin: the share of its time by which a strategy that no published run has must be faster than all that
            published runs have, to come first in the ranking; without effect where `prefers_published` is False.
    """

    def __init__(
        self,
        space: StepSpace,
        memory_bytes: int,
        num_exact: int = NUM_EXACT,
        progress: Progress = no_progress,
        margin: float = 0.0,
    ) -> None:
        machine = Machine(space.problem.priced_cluster, (), logical=True)
        margin = margin if prefers_published(space) else 0.0
        super().__init__(TRAINING_STEP, space.problem, machine, num_exact, progress, margin)
        self._tree = StepTree(space, memory_bytes)

    def _admits(self, config: Parallelism) -> bool:
        return self._tree.fits_or_counts(config, memory_of(self._tree.space.problem, config).total)

    def is_preferred(self, part: StepPart) -> bool:
        """Return whether all configurations of a part have a strategy of published runs, or one tensor rank.

        A part is a configuration, or a set of them that the search divides further. False for a part with
        many layouts (`LayoutsPart`), whatever their strategies. `margin` says what being preferred does.
        """
        match part:
            case LayoutPart():
                return is_published(part.layout)
            case ChoicePart():
                return is_published(part.choice)
            case Parallelism():
                return is_published(part)
        return False

    def ranking(self) -> StepRanking:
        """Run the search and return its ranking. Ctrl-C ends it with the best so far, if there is one."""
        tree, self._tree = self._tree, self._tree.fresh()
        self.answer_early(self._tree.parts)
        self._tree = tree
        self.run(tree.parts)
        ranked = self.ranked()
        first = self._preferred_of(ranked) if self.is_complete else None
        ranked.sort(
            key=lambda row: row is not first
        )  # stable: the others stay as they are, the fastest first
        rows = tuple(map(_priced, ranked[: max(NUM_ROWS, self.num_exact)]))
        return StepRanking(
            tree.space,
            tree.memory_bytes,
            rows,
            pareto_front(map(_priced, self.priced.values())),
            SearchCount(
                self.num_first,
                self.num_priced,
                tree.over_memory,
                tree.refused + self.refused,
                tree.reason or self.reason,
            ),
            self.is_complete,
            min(self.num_exact, len(rows)),
            first is not None,
            smallest=None if rows else self._smallest(),
        )

    def _preferred_of(self, ranked: list[RankedConfig]) -> RankedConfig | None:
        """Return the row that comes before faster ones, by the margin; None where the fastest comes first."""
        if not ranked or self.is_preferred(ranked[0].config):
            return None
        within_s = ranked[0].seconds * (1 + self.margin)
        preferred = (row for row in ranked if row.seconds < within_s and self.is_preferred(row.config))
        return next(preferred, None)

    def _smallest(self) -> tuple[Parallelism, int] | None:
        """Return what came closest to fitting, with its bytes and not a bound of them."""
        problem = self._tree.space.problem
        closest = ((choice, memory_of(problem, choice).total) for _, _, choice in self._tree.closest)
        return min(closest, key=lambda each: each[1], default=None)


def _priced(ranked: RankedConfig) -> PricedStep:
    assert isinstance(ranked.estimate, StepEstimate)
    return PricedStep(ranked.config, ranked.estimate.step)


def pareto_front(priced: Iterable[PricedStep]) -> tuple[PricedStep, ...]:
    """Return the configurations of which no other is both as fast and as small in memory, the fastest first."""
    front: list[PricedStep] = []
    for each in sorted(priced, key=_rank_key):
        if not front or each.memory_bytes < front[-1].memory_bytes:
            front.append(each)
    return tuple(front)
