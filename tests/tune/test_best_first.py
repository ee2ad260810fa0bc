"""Ranking by parts and bounds: the same best as pricing every candidate, with fewer priced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshweave as mw
from meshweave.algorithms.contract import Algorithm
from meshweave.algorithms.step import StepProblem
from meshweave.base.errors import DescriptionError, LayoutError
from meshweave.cost.machine import Machine
from meshweave.estimate import Estimate
from meshweave.tune import ranking
from meshweave.tune.best_first import BestFirst
from sampling import examples


@dataclass(frozen=True)
class Digits:
    """The time of a config of two digits; of None it is refused."""

    times: tuple[tuple[float | None, ...], ...]


class TwoDigits(Algorithm[Digits, tuple[int, int]]):
    """Parts are first digits; a bound is the least of a part, or half of it as long as it is not tight."""

    name = title = source = "two_digits"
    problem_type = Digits

    def branches(self, problem: Digits, part: Any = None, limit_s: float = 0.0) -> Iterator[Any] | None:
        if isinstance(part, tuple):
            return None
        if part is None:
            return iter(["all"])
        if part == "all":
            return iter(range(len(problem.times)))
        return ((part, second) for second in range(len(problem.times[part])))

    def lower_bound(self, problem: Digits, part: Any, *, is_tight: bool = False) -> float:
        if isinstance(part, tuple):
            return 0.0
        least = min((time for time in problem.times[part] if time is not None), default=0.0)
        return least if is_tight else least / 2

    def row(self, problem: Digits, part: Any) -> Any:
        return part[0] if isinstance(part, tuple) else part

    def estimate(self, problem: Digits, config: tuple[int, int], machine: Machine) -> Estimate:
        time = problem.times[config[0]][config[1]]
        if time is None:
            raise LayoutError(f"no time for {config}")
        return Estimate(time, time, 0.0, 0.0, 0.0, 0.0)

    def examples(self) -> Iterator[Digits]:
        yield Digits(((1.0,),))

    def candidates(self, problem: Digits, cluster: Any = None) -> Iterator[tuple[int, int]]:
        return ((one, two) for one, of in enumerate(problem.times) for two in range(len(of)))

    program = reference = placements = None  # type: ignore[assignment]


TIMES = st.lists(
    st.lists(st.integers(1, 30).map(float), min_size=1, max_size=5).map(tuple), min_size=1, max_size=8
)


@examples(200)
@given(TIMES, st.integers(1, 4))
def test_exact_rows_are_the_best_of_all(times: list[tuple[float, ...]], num_exact: int) -> None:
    search = BestFirst(TwoDigits(), Digits(tuple(times)), None, num_exact)  # type: ignore[arg-type]
    search.run(["all"])
    best = sorted(min(of) for of in times)
    ranked = [row.seconds for row in search.ranked()]
    assert search.is_complete and ranked[:num_exact] == best[:num_exact]
    assert ranked == sorted(ranked) and search.num_priced <= sum(map(len, times))


class EvenFirst(BestFirst):
    """A search that prefers even first digits."""

    def is_preferred(self, part: Any) -> bool:
        return (part[0] if isinstance(part, tuple) else part) % 2 == 0


@examples(200)
@given(TIMES, st.integers(1, 3), st.sampled_from((0.0, 0.1, 0.5, 2.0)))
def test_the_best_of_what_is_preferred_is_exact_within_the_margin(
    times: list[tuple[float, ...]], num_exact: int, margin: float
) -> None:
    search = EvenFirst(TwoDigits(), Digits(tuple(times)), None, num_exact, margin=margin)  # type: ignore[arg-type]
    search.run(["all"])
    best = sorted(min(of) for of in times)
    ranked = search.ranked()
    assert search.is_complete and [row.seconds for row in ranked][:num_exact] == best[:num_exact]
    preferred = min((min(of) for of in times[::2]), default=0.0)
    if preferred < best[0] * (1 + margin):
        assert preferred == next(row.seconds for row in ranked if search.is_preferred(row.config))


def test_what_is_preferred_is_not_looked_for_beyond_the_margin() -> None:
    times = ((50.0,) * 9, (5.0,), *((20.0 + number,) * 9 for number in range(20)))
    search = EvenFirst(TwoDigits(), Digits(times), None, 1, margin=0.5)  # type: ignore[arg-type]
    search.run(["all"])
    assert search.num_priced <= 2


def test_what_bounds_rule_out_is_not_priced() -> None:
    times = ((5.0, 6.0), *((20.0 + number,) * 9 for number in range(20)))
    search = BestFirst(TwoDigits(), Digits(times), None, 1)  # type: ignore[arg-type]
    search.run(["all"])
    assert search.num_first == 21 and search.num_priced <= 2


@pytest.mark.parametrize(
    ("times", "ranked"), [(((None,), (3.0,)), [(1, 0)]), (((None, 1.0), (3.0,)), [(0, 1), (1, 0)])]
)
def test_refused_configs_are_counted_and_those_beside_them_are_not_lost(
    times: tuple[tuple[float | None, ...], ...], ranked: list[tuple[int, int]]
) -> None:
    search = BestFirst(TwoDigits(), Digits(times), None, 2)  # type: ignore[arg-type]
    search.answer_early(["all"])
    assert search.early is not None
    search.run(["all"])
    assert (search.refused, search.reason) == (1, "no time for (0, 0)")
    assert [row.config for row in search.ranked()] == ranked


class ByCandidates(TwoDigits):
    """The same, priced one by one."""

    def branches(self, problem: Digits, part: Any = None, limit_s: float = 0.0) -> None:
        return None

    def machine(self, problem: Digits, config: tuple[int, int], cluster: Any) -> Any:
        return None


def test_progress_of_a_ranking_counts_what_was_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {"parts": TwoDigits(), "one by one": ByCandidates(), "parts again": TwoDigits()}
    monkeypatch.setattr(ranking, "algorithms_for", lambda problem: entries)
    counts: list[int] = []
    cluster = mw.load_cluster("dgx-h100:8")
    mw.rank(Digits(((5.0, 4.0, 3.0), (6.0, 1.0))), cluster, num_exact=9, progress=counts.append)
    assert counts == sorted(counts) and counts[-1] == 15


def test_rank_of_a_step_is_its_plan() -> None:
    model = mw.Transformer("small", 4, 1024, 8, 8, 128, 4096, 32000, False, "a test")
    problem = StepProblem(model, mw.load_cluster("dgx-h100:8"), 16, 1024)
    ranked = mw.rank(problem, problem.cluster)
    plan = mw.plan(model, problem.cluster, batch=16, sequence=1024, overlap=problem.overlap, stack="ideal")
    assert plan.step is not None
    assert [row.seconds for row in ranked][:2] == [row.step_s for row in plan.step.ranked][:2]
    assert ranked[0].config.num_ranks == 8 and ranked[0].algorithm.name == "step"


def test_an_unknown_algorithm_of_a_step_is_refused() -> None:
    model = mw.Transformer("small", 4, 1024, 8, 8, 128, 4096, 32000, False, "a test")
    problem = StepProblem(model, mw.load_cluster("dgx-h100:8"), 16, 1024)
    with pytest.raises(mw.errors.UnsupportedError, match="does not solve"):
        mw.rank(problem, problem.cluster, algorithms=["meshslice"])


def test_no_exact_row_is_refused() -> None:
    with pytest.raises(DescriptionError, match="num_exact is 0; give at least 1"):
        mw.plan("llama-2-7b", "dgx-h100:8", batch=16, sequence=512, num_exact=0)
