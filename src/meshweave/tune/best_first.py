"""Rank the configs of an entry that divides them into parts: best first, by lower bounds, anytime.

This is branch and bound over `Algorithm.branches`. A part waits in a queue, by its bound. The bound of a part that
the search begins with is tightened only when it is the least, and the part is divided only when it still is. A
config is priced. The search ends when the least bound exceeds the time of the last exact row of the ranking. The
result is exact if the bounds are.

Until something is priced, what a part from the queue is divided into is looked at at once: an early answer rules
out most of the rest.

A search may prefer some parts by a margin (`is_preferred`). The best of their configs is exact too then, where it
takes less than 1 + margin times the best of all: their bounds must exceed that, and not the last exact row.

A large search bounds thousands of parts before it prices one. `answer_early` prices one of the first of these
before, for who stops the search then. It changes nothing of what the search finds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from meshweave.algorithms.contract import Algorithm
from meshweave.base.errors import DescriptionError, MeshweaveError
from meshweave.base.progress import Progress, no_progress
from meshweave.cost.machine import Machine
from meshweave.tune.ranked import RankedConfig

_FIRST = 256
"""Of the branches of a part, those that an early answer is looked for in."""


@dataclass(order=True)
class _Waiting:
    """A part, or a config, in the queue: the one with the least bound comes first.

    Attributes:
        is_tight: whether the bound has been tightened.
        is_first: whether it is one of those that the search has begun with.
    """

    bound_s: float
    number: int
    part: Any = field(compare=False)
    is_tight: bool = field(compare=False)
    is_first: bool = field(compare=False)


class BestFirst:
    """A best-first branch-and-bound search over the configs of a problem, to be run once.

    A config is one configuration of the algorithm; to price it is to estimate its seconds on the machine. A part
    is a set of configs, with a lower bound of their times, that `Algorithm.branches` divides into smaller ones. A
    row of the ranking is a group of configs (`Algorithm.row`), of which only the fastest is listed.

    Args:
        entry: the algorithm.
        problem: its problem.
        machine: the machine that configs are priced on.
        num_exact: how many of the first rows must be exact: no config that was not priced may be faster. The
            other rows are the best of those that were priced.
        progress: called with (parts done, parts in all) of the parts that the search begins with.
        margin: the fastest preferred config (`is_preferred`) is exact too, where it takes less than 1 + margin
            times the time of the fastest config of all.

    Raises:
        DescriptionError: `num_exact` is below 1.

    Attributes:
        rows: the fastest priced config of each row, by the row's key (`Algorithm.row`).
        priced: all priced configs, by config.
        early: what `answer_early` priced: the answer of a search that is interrupted before it prices anything.
        num_first: the number of parts that the search has begun with.
        num_priced: how often a config was priced.
        refused, reason: how many parts and configs the algorithm refused, and why the first one; "" for none.
        is_complete: whether the search has run to its end.
    """

    def __init__(
        self,
        entry: Algorithm[Any, Any],
        problem: Hashable,
        machine: Machine,
        num_exact: int,
        progress: Progress = no_progress,
        margin: float = 0.0,
    ) -> None:
        if num_exact < 1:
            raise DescriptionError(f"num_exact is {num_exact}; give at least 1")
        self._entry, self._problem, self._machine = entry, problem, machine
        self.num_exact, self.progress = num_exact, progress
        self.rows: dict[Hashable, RankedConfig] = {}
        self.early: RankedConfig | None = None
        self.priced: dict[Any, RankedConfig] = {}
        self.num_first = self.num_priced = self.refused = 0
        self.reason = ""
        self.is_complete = False
        self.margin, self._limit_s = margin, math.inf
        self._preferred_limit_s = math.inf if margin else 0.0
        self._queue: list[_Waiting] = []
        self._number = 0

    def run(self, parts: Iterable[Any]) -> None:
        """Search all configs in `parts` and put the fastest of each row into `rows`.

        Each of `parts` is divided at once, and the parts that it is divided into are searched in the order of
        their bounds, to the end, before the next one. These smaller parts are what `progress` and `num_first`
        count. Ctrl-C ends the search: `rows` keeps what was priced so far, or else gets `early`, and
        `is_complete` stays False.

        Args:
            parts: what `Algorithm.branches` yields for the whole problem.

        Raises:
            KeyboardInterrupt: Ctrl-C, before anything was priced and without `early`.
        """
        try:
            for part in parts:
                self._search(part)
        except KeyboardInterrupt:
            if not self.rows:
                if self.early is None:
                    raise
                self._take(self.early)
            return
        self.progress(self.num_first, self.num_first)
        self.is_complete = True

    def is_preferred(self, part: Any) -> bool:
        """Return whether a config is preferred, or all configs of a part are; False always in this base class.

        The argument `margin` of the class says how far the search goes for preferred configs.
        """
        return False

    def ranked(self) -> list[RankedConfig]:
        """Return the best config of each row, the fastest first."""
        return sorted(self.rows.values(), key=self._key)

    def answer_early(self, parts: Iterable[Any]) -> None:
        """Price one config of `parts` and store it in `early`, the answer if `run` is interrupted before any.

        Parts are tried in their order, and in each the first few parts that it is divided into, least bound
        first, until there is a config that the algorithm admits. Without one `early` stays None.
        """
        for part in parts:
            children = islice(self._entry.branches(self._problem, part, math.inf) or (), _FIRST)
            for _, config in sorted(self._bounded(children), key=lambda each: each[0]):
                for each in self._configs(config):
                    with suppress(MeshweaveError):
                        if self._admits(each):
                            estimate = self._entry.estimate(self._problem, each, self._machine)
                            self.early = RankedConfig(self._entry, self._problem, each, estimate)
                            return

    def _bounded(self, parts: Iterable[Any]) -> Iterator[tuple[float, Any]]:
        for part in parts:
            with suppress(MeshweaveError):
                yield self._entry.lower_bound(self._problem, part), part

    def _configs(self, part: Any) -> Iterator[Any]:
        """Yield the configs of a part, or the part where it is one."""
        with suppress(MeshweaveError):
            children = self._entry.branches(self._problem, part, math.inf)
            if children is None:
                yield part
            for child in children or ():
                yield from self._configs(child)

    def _search(self, part: Any) -> None:
        self._queue = queue = []
        for child in self._entry.branches(self._problem, part, self._widest_limit_s) or ():
            bound_s = self._entry.lower_bound(self._problem, child)
            if bound_s < self._limit_of(child):
                queue.append(self._waiting(child, bound_s, is_first=True))
        heapq.heapify(queue)
        left, total = len(queue), self.num_first + len(queue)
        self.num_first = total
        while queue and queue[0].bound_s < self._widest_limit_s:
            waiting = heapq.heappop(queue)
            left -= self._visit(waiting) and waiting.is_first
            self.progress(total - left, total)

    def _waiting(self, part: Any, bound_s: float, *, is_first: bool) -> _Waiting:
        self._number += 1
        return _Waiting(bound_s, self._number, part, not is_first, is_first)

    def _visit(self, waiting: _Waiting) -> bool:
        """Visit a part; return whether it is done with."""
        entry, problem, part = self._entry, self._problem, waiting.part
        with self._counts_refusals():
            if waiting.bound_s >= self._limit_for(part):
                return True
            if not waiting.is_tight:
                waiting.is_tight = True
                least_s = entry.lower_bound(problem, part, is_tight=True)
                if least_s > waiting.bound_s:
                    waiting.bound_s = least_s
                    if least_s >= self._limit_of(part):
                        return True
                    heapq.heappush(self._queue, waiting)
                    return False
            self._divide(part, waiting.bound_s)
        return True

    @contextmanager
    def _counts_refusals(self) -> Iterator[None]:
        """Count an error of the algorithm, instead of raising it."""
        try:
            yield
        except MeshweaveError as error:
            self.refused += 1
            self.reason = self.reason or str(error)

    def _divide(self, part: Any, bound_s: float) -> None:
        """Price a config, or put the branches of a part into the queue that their bounds do not rule out."""
        children = self._entry.branches(self._problem, part, self._limit_of(part))
        if children is None:
            self._price(part)
            return
        for child in children:
            with self._counts_refusals():  # of one alone, not of those beside it
                if not self.rows:
                    self._divide(child, bound_s)
                    continue
                least_s = self._entry.lower_bound(self._problem, child)
                if least_s < self._limit_for(child):
                    heapq.heappush(self._queue, self._waiting(child, max(least_s, bound_s), is_first=False))

    @property
    def _widest_limit_s(self) -> float:
        return max(self._limit_s, self._preferred_limit_s)

    def _limit_of(self, part: Any) -> float:
        """Return the seconds from which on a part changes no exact row, nor the best of what is preferred."""
        if self._limit_s < self._preferred_limit_s and self.is_preferred(part):
            return self._preferred_limit_s
        return self._limit_s

    def _limit_for(self, part: Any) -> float:
        """Return the seconds from which on a part changes no row of the ranking."""
        row, limit_s = self.rows.get(self._entry.row(self._problem, part)), self._limit_of(part)
        return limit_s if row is None else min(limit_s, row.seconds)

    def _price(self, config: Any) -> None:
        if not self._admits(config):
            return
        estimate = self._entry.estimate(self._problem, config, self._machine)
        self._take(RankedConfig(self._entry, self._problem, config, estimate))

    def _take(self, priced: RankedConfig) -> None:
        """Take what was priced into the ranking."""
        self.priced[priced.config] = priced
        self.num_priced += 1
        key = self._entry.row(self._problem, priced.config)
        if key not in self.rows or self._key(priced) < self._key(self.rows[key]):
            self.rows[key] = priced
            if len(self.rows) >= self.num_exact:
                times = (row.seconds for row in self.rows.values())
                self._limit_s = heapq.nsmallest(self.num_exact, times)[-1]
            self._narrow_preferred(priced)

    def _narrow_preferred(self, priced: RankedConfig) -> None:
        """Lower the seconds from which on preferred configs are not looked for, by one that was priced."""
        margin = 0.0 if self.is_preferred(priced.config) else self.margin
        self._preferred_limit_s = min(self._preferred_limit_s, priced.seconds * (1 + margin))

    def _admits(self, config: Any) -> bool:
        """Return whether a config may be in the ranking."""
        return self._entry.admits(self._problem, config)

    def _key(self, ranked: RankedConfig) -> tuple[float, Any]:
        return ranked.seconds, self._entry.preference(self._problem, ranked.config, ranked.estimate)
