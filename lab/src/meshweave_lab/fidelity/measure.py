"""How far estimates and simulations are off from measurement, for products that no constant was fitted on.

All cases run in one set of processes of a lab. Each is then estimated from its skeleton and simulated as it ran,
lowered, on one description of that lab.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshweave.base.errors import LayoutError
from meshweave.base.units import format_s
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import Cluster
from meshweave.estimate.timeline import timeline
from meshweave.ir.program.text import to_text
from meshweave.simulate import simulate
from meshweave.trace import Span, Trace, merge
from meshweave_lab.bench.yardsticks import matmul_machine
from meshweave_lab.fidelity.cases import FidelityCase, seeded_cases, with_pace_of_ranks
from meshweave_lab.fidelity.clocks import ClockOffset, align, offset_at
from meshweave_lab.lab import Lab, RunningLab

GOAL_MEAN, GOAL_WORST = 0.05, 0.15
"""The relative errors that predictions should keep to."""


@dataclass(frozen=True)
class CaseFidelity:
    """One case, measured and predicted.

    Attributes:
        runs_s: seconds of each run, from the common start to the end of the last rank.
        estimated_s, simulated_s: seconds as predicted.
        error: the largest absolute difference from the dense product.
        late_s: by how many seconds a rank began late, at worst.
        overruns: how many products took longer than their paced time; with any, the machine was too slow.
        measured: the trace of the median run, from the common start, on rank 0's clock.
    """

    case: FidelityCase
    runs_s: tuple[float, ...]
    estimated_s: float
    simulated_s: float
    error: float
    late_s: float
    overruns: int
    measured: Trace = field(repr=False)

    @property
    def median_s(self) -> float:
        """The median of `runs_s`."""
        return statistics.median(self.runs_s)

    @property
    def estimate_error(self) -> float:
        """(estimated - measured) / measured: positive if the run was faster than its estimate."""
        return self.estimated_s / self.median_s - 1

    @property
    def simulation_error(self) -> float:
        """(simulated - measured) / measured."""
        return self.simulated_s / self.median_s - 1

    def timelines(self, cluster: Cluster) -> dict[str, Trace]:
        """Return the traces of "estimate" and "simulation" on `cluster` and of the "measurement"."""
        estimated, simulated = predict(self.case, cluster)
        return {"estimate": estimated, "simulation": simulated, "measurement": self.measured}

    def to_json(self) -> dict[str, Any]:
        """Return the case and its times as plain values."""
        case = self.case
        return {
            "number": case.number,
            "title": str(case),
            "algorithm": case.algorithm,
            "dataflow": case.problem.dataflow,
            "m_n_k": [case.problem.m, case.problem.n, case.problem.k],
            "mesh_shape": list(case.problem.mesh_shape),
            "slices": list(case.config.slices),
            "packets": case.config.packets,
            "overlap": case.config.overlap,
            "ways": case.ring_directions,
            "flops_per_s": case.flops_per_s,
            "measured_s": list(self.runs_s),
            "median_s": self.median_s,
            "estimated_s": self.estimated_s,
            "estimate_error": self.estimate_error,
            "simulated_s": self.simulated_s,
            "simulation_error": self.simulation_error,
            "max_abs_error": self.error,
            "late_s": self.late_s,
            "overruns": self.overruns,
        }


@dataclass(frozen=True)
class FidelityReport:
    """All cases. `clocks` holds the offset of each rank's clock from rank 0's, before and after them."""

    outcomes: tuple[CaseFidelity, ...]
    clocks: tuple[tuple[ClockOffset, ...], ...]

    @property
    def summary(self) -> dict[str, dict[str, dict[str, float]]]:
        """Relative errors by algorithm, or "all", then by "estimate" or "simulation".

        "mean" and "worst" are of absolute errors, "bias" is the mean of signed ones.
        """
        groups = {"all": list(self.outcomes)}
        for outcome in self.outcomes:
            groups.setdefault(outcome.case.algorithm, []).append(outcome)
        return {
            name: {
                "estimate": _errors([outcome.estimate_error for outcome in group]),
                "simulation": _errors([outcome.simulation_error for outcome in group]),
            }
            for name, group in groups.items()
        }

    @property
    def median_case(self) -> CaseFidelity:
        """The case whose estimate is off by the median error."""
        ranked = sorted(self.outcomes, key=lambda o: (abs(o.estimate_error), o.case.number))
        return ranked[(len(ranked) - 1) // 2]

    @property
    def clock_uncertainty_s(self) -> float:
        """By how many seconds the offset of a rank's clock may be wrong, at worst."""
        return max(offset.uncertainty_ns for rank in self.clocks for offset in rank) / 1e9

    def verdict(self, what: str) -> str:
        """Return a sentence: whether the errors of "estimate" or "simulation" keep to the goal, and the
        worst case.
        """
        errors = self.summary["all"][what]
        mean, worst = errors["mean"], errors["worst"]
        error: Callable[[CaseFidelity], float] = (
            (lambda o: o.estimate_error) if what == "estimate" else (lambda o: o.simulation_error)
        )
        at = max(self.outcomes, key=lambda outcome: abs(error(outcome)))
        kept = "keeps to" if mean <= GOAL_MEAN and worst <= GOAL_WORST else "misses"
        return (
            f"{what}: mean error {mean:.1%}, worst {worst:.1%} (case {at.case.number}, {at.case}: "
            f"{error(at):+.1%}); {kept} the goal of {GOAL_MEAN:.0%} and {GOAL_WORST:.0%}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {
            "goal": {"mean": GOAL_MEAN, "worst": GOAL_WORST},
            "summary": self.summary,
            "verdicts": [self.verdict(what) for what in ("estimate", "simulation")],
            "clock_offsets_ns": [[vars(offset) for offset in rank] for rank in self.clocks],
            "cases": [outcome.to_json() for outcome in self.outcomes],
        }


def _errors(errors: Sequence[float]) -> dict[str, float]:
    sizes = [abs(error) for error in errors]
    return {"mean": statistics.fmean(sizes), "worst": max(sizes), "bias": statistics.fmean(errors)}


def run_fidelity(
    lab: Lab,
    cluster: Cluster,
    mesh_shape: tuple[int, ...],
    *,
    num_cases: int = 40,
    names: Sequence[str] | None = None,
    repeat: int = 3,
    seed: int = 0,
    timeout_s: float = 900.0,
    on_case: Callable[[str], None] = lambda line: None,
) -> FidelityReport:
    """Draw cases by the seed, build the lab, run and predict them, take the lab down.

    Raises what `seeded_cases` and `measure_fidelity` raise, and UnsupportedError where there can be no lab.
    """
    cases = seeded_cases(seed, num_cases, cluster, mesh_shape, names)
    with lab.up() as running:
        return measure_fidelity(
            running, cases, cluster, repeat=repeat, seed=seed, timeout_s=timeout_s, on_case=on_case
        )


def measure_fidelity(
    lab: RunningLab,
    cases: Sequence[FidelityCase],
    cluster: Cluster,
    *,
    repeat: int = 3,
    seed: int = 0,
    timeout_s: float = 900.0,
    on_case: Callable[[str], None] = lambda line: None,
) -> FidelityReport:
    """Run all cases on a lab that is up, and predict them on `cluster`, its description.

    Args:
        repeat: measured runs of each case, after one to warm up.
        on_case: takes a line about each case once it is predicted.

    Raises:
        LayoutError: a case's mesh has another number of ranks than the lab; else what `RunningLab.launch` raises.
    """
    for case in cases:
        if case.problem.num_chips != lab.num_ranks:
            raise LayoutError(f"a mesh of {case.problem.num_chips} ranks on a lab of {lab.num_ranks}")
    payload = {
        "cases": [
            {
                "title": str(case),
                "program": to_text(case.program),
                "flops_per_s": case.flops_per_s,
            }
            for case in cases
        ],
        "repeat": repeat,
        "seed": seed,
        "deadline_s": timeout_s,
    }
    # Every case has its own pace; products outside of them, such as checks, have none.
    unpaced = {"MESHWEAVE_PACE_FLOPS_PER_S": ""}
    target = "meshweave_lab.fidelity.rank:fidelity_runs"
    ranks = lab.launch(target, payload, timeout_s=timeout_s, env=unpaced)
    clocks = tuple(tuple(ClockOffset(*offset) for offset in rank["offsets"]) for rank in ranks)
    outcomes = []
    for number, case in enumerate(cases):
        outcome = _outcome(case, [rank["cases"][number] for rank in ranks], clocks, cluster)
        outcomes.append(outcome)
        on_case(
            f"case {case.number} predicted: measured {format_s(outcome.median_s)}, "
            f"estimate {outcome.estimate_error:+.1%}, simulation {outcome.simulation_error:+.1%}"
        )
    return FidelityReport(tuple(outcomes), clocks)


def _outcome(
    case: FidelityCase,
    ranks: Sequence[dict[str, Any]],
    clocks: Sequence[Sequence[ClockOffset]],
    cluster: Cluster,
) -> CaseFidelity:
    runs = list(zip(*(rank["runs"] for rank in ranks), strict=True))
    durations_ns = [
        max(run["end_ns"] - offset_at(run["end_ns"], clocks[rank]) for rank, run in enumerate(run_of))
        - run_of[0]["start_ns"]
        for run_of in runs
    ]
    middle = sorted(range(len(runs)), key=durations_ns.__getitem__)[(len(runs) - 1) // 2]
    estimated, simulated = predict(case, cluster)
    return CaseFidelity(
        case,
        tuple(ns / 1e9 for ns in durations_ns),
        estimated.duration_s,
        simulated.duration_s,
        max(rank["error"] for rank in ranks),
        max(run["late_ns"] for run_of in runs for run in run_of) / 1e9,
        sum(rank["overruns"] for rank in ranks),
        _measured(case, runs[middle], clocks),
    )


def _measured(
    case: FidelityCase, runs: Sequence[dict[str, Any]], clocks: Sequence[Sequence[ClockOffset]]
) -> Trace:
    """Return the trace of a run, from its common start on."""
    traces = []
    for rank, run in enumerate(runs):
        edges = iter(run["spans"])
        spans = [
            Span(rank, index, bound.op.lane, bound.op.kind, bound.label, 1000 * start, 1000 * next(edges))
            for index, (bound, start) in enumerate(zip(case.program.ops_on_rank(rank), edges, strict=False))
        ]
        traces.append(align(Trace(case.program.name, "torch", tuple(spans)), *clocks[rank]))
    whole = merge(traces)
    zero = 1000 * runs[0]["start_ns"]
    return replace(
        whole,
        spans=tuple(replace(s, start_ps=s.start_ps - zero, end_ps=s.end_ps - zero) for s in whole.spans),
    )


def predict(case: FidelityCase, cluster: Cluster) -> tuple[Trace, Trace]:
    """Return the timeline of the case's skeleton and the simulation of its program, on `cluster` at the
    case's pace.
    """
    paced = with_pace_of_ranks(cluster, case.flops_per_s)
    drawn = timeline(case.skeleton, matmul_machine(paced, case.problem), case.program.name)
    return drawn, simulate(case.program, Machine.of(paced, case.program)).trace()
