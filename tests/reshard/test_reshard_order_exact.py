"""The optimum by CP-SAT, checked by trying everything, and the default order against it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import permutations, product
from random import Random

import pytest
from random_jobs import reshard, unstructured

from meshweave.algorithms.reshard.order import (
    JobSet,
    TransferJob,
    best,
    bound,
    dfs,
    exclusive_bound,
    schedule_in_order,
)
from meshweave.base.errors import UnsupportedError
from meshweave_studies.alpacomm.optimum import exact
from sampling import mostly_slow


def test_without_ortools_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'meshweave\[exact\]'"):
        exact(JobSet((TransferJob(1, ((0,),)),), (0,)))


@pytest.mark.parametrize("seed", range(30))
def test_nothing_beats_exact_or_a_complete_search(seed: int) -> None:
    pytest.importorskip("ortools")
    jobs = unstructured(Random(seed), most=5)
    jobs = JobSet(tuple(TransferJob(job.duration, job.routes[:3]) for job in jobs.jobs), jobs.class_of)
    orders = list(permutations(range(len(jobs.jobs))))
    everything = product(product(*(range(len(job.routes)) for job in jobs.jobs)), orders)
    least = min(schedule_in_order(jobs, routes, order).makespan for routes, order in everything)
    for found in (exact(jobs), dfs(jobs), best(jobs)):
        assert (found.makespan, found.proven) == (least, True)
    assert bound(jobs) <= exclusive_bound(jobs) <= least


@pytest.mark.parametrize("seed", mostly_slow(range(120), 15))
@pytest.mark.parametrize("family", [unstructured, reshard])
def test_the_default_is_within_a_twentieth_of_the_optimum(
    family: Callable[[Random], JobSet], seed: int
) -> None:
    """Where the solver finds no proof in time the measure is the best that it met, from the default's on."""
    pytest.importorskip("ortools")
    jobs = family(Random(1000 + seed))
    assert best(jobs).makespan <= 1.05 * exact(jobs, time_s=2.0).makespan


def test_long_durations_are_rounded_for_the_solver_only() -> None:
    """On a case that `best` cannot prove, or the solver would not be asked."""
    pytest.importorskip("ortools")
    jobs = _unproven()
    long = JobSet(
        tuple(TransferJob(job.duration * 10**10 + 1, job.routes) for job in jobs.jobs), jobs.class_of
    )
    short, found = exact(jobs, time_s=3.0), exact(long, time_s=3.0)
    assert found.makespan <= best(long).makespan
    assert found.makespan == pytest.approx(short.makespan * 10**10, rel=1e-3)


def _unproven() -> JobSet:
    return next(
        jobs
        for jobs in (reshard(Random(seed), least=9, most=12) for seed in range(10**6))
        if not best(jobs).proven
    )
