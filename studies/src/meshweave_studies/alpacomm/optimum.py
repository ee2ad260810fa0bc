"""The optimum by constraint programming (OR-tools CP-SAT): what the searches are compared with.

The model has one interval per job and route, of which one is present. The intervals on a resource do not overlap
(eq. 3 of AlpaComm, MLSys '23). The makespan is minimised.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from meshweave.algorithms.reshard.order.bounds import exclusive_bound
from meshweave.algorithms.reshard.order.jobs import JobSchedule, JobSet, by_start, schedule_in_order
from meshweave.algorithms.reshard.order.portfolio import best
from meshweave.base.errors import UnsupportedError

MAX_UNITS = 1 << 30
"""Longest makespan, in units of the model, that the solver is trusted with. Longer ones are rounded to fit."""


def exact(jobs: JobSet, time_s: float = 10.0) -> JobSchedule:
    """Return the best schedule that CP-SAT finds within `time_s` seconds, starting from the schedule of `best`.

    The result is `proven` if it is known to be optimal. If the durations are too long for the solver, it searches
    with rounded ones, and the order that it finds is then scheduled with the true durations; that schedule is
    `proven` only if it meets a lower bound. With a limit in seconds the result can differ between machines.

    Raises:
        UnsupportedError: OR-tools is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise UnsupportedError(
            "the exact order of a resharding needs OR-tools: pip install 'meshweave[exact]'"
        ) from error

    known = replace(best(jobs), algorithm="exact")
    if known.proven or not jobs.jobs:
        return replace(known, proven=True)
    step = math.gcd(*(job.duration for job in jobs.jobs))
    coarse = -(-known.makespan // (step * MAX_UNITS))
    unit = step * coarse
    durations = [max(1, round(job.duration / unit)) for job in jobs.jobs]
    rounded = JobSet(
        tuple(replace(job, duration=d) for job, d in zip(jobs.jobs, durations, strict=True)), jobs.class_of
    )
    hint = schedule_in_order(rounded, known.routes, known.order)

    model, starts, presences = _model(rounded, hint)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_time_in_seconds = time_s
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return known
    routes = [[bool(solver.value(p)) for p in present].index(True) for present in presences]
    order = by_start([solver.value(start) for start in starts])
    solved = schedule_in_order(jobs, routes, order, algorithm="exact")
    if solved.makespan > known.makespan:
        solved = known
    proven = (status == cp_model.OPTIMAL and coarse == 1) or solved.makespan <= exclusive_bound(jobs)
    return replace(solved, proven=proven)


def _model(jobs: JobSet, hint: JobSchedule) -> tuple[Any, list[Any], list[list[Any]]]:
    """Return the model, and its variables: the start of each job, and whether it takes each of its routes."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    makespan = model.new_int_var(exclusive_bound(jobs), hint.makespan, "makespan")
    model.add_hint(makespan, hint.makespan)
    on: list[list[cp_model.IntervalVar]] = [[] for _ in jobs.class_of]
    starts: list[Any] = []
    presences: list[list[Any]] = []
    for j, job in enumerate(jobs.jobs):
        start = model.new_int_var(0, hint.makespan - job.duration, f"start{j}")
        model.add_hint(start, hint.starts[j])
        model.add(start + job.duration <= makespan)
        present = [model.new_bool_var(f"job{j}route{w}") for w in range(len(job.routes))]
        model.add_exactly_one(present)
        for w, route in enumerate(job.routes):
            model.add_hint(present[w], hint.routes[j] == w)
            interval = model.new_optional_fixed_size_interval_var(
                start, job.duration, present[w], f"interval{j}route{w}"
            )
            for r in route:
                on[r].append(interval)
        starts.append(start)
        presences.append(present)
    for intervals in on:
        model.add_no_overlap(intervals)
    model.minimize(makespan)
    return model, starts, presences
