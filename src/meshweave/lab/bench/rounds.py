"""Every algorithm and PyTorch's DTensor on the same operands, on real sockets, against bounds and theory.

All rivals run interleaved in one set of processes, so that they meet the same machine. Paced, this measures
fidelity of schedules, not of this machine's products. Three yardsticks stand beside each time: the bound
max(compute, bytes per axis / rate), the algorithm's own theory without latency (its skeleton at link rate),
and, where a calibrated cluster is given, its estimate with the constants of that.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshweave.algorithms.matmul2d import MatmulProblem
from meshweave.algorithms.matmul2d.common.passes import STATIONARY_OF, PassName, pass_problem
from meshweave.algorithms.matmul2d.common.problem import Dataflow
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.describe.machine.cluster import Cluster
from meshweave.lab.bench.rivals import DTENSOR, REPLICATED_NOTE, Case, cases, sliced
from meshweave.lab.bench.yardsticks import (
    UNPACED_FLOPS_PER_S,
    at_pace,
    balanced_flops_per_s,
    bound_s,
    ideal,
    matmul_machine,
)
from meshweave.lab.lab import Lab, RunningLab

__all__ = [
    "DTENSOR",
    "REPLICATED_NOTE",
    "Case",
    "Comparison",
    "Measured",
    "Result",
    "Round",
    "balanced_flops_per_s",
    "bench",
    "bound_s",
    "cases",
    "compare_shapes",
    "ideal",
    "layer_rounds",
    "sliced",
    "unpaced",
]


@dataclass(frozen=True)
class Round:
    """Rivals on one product under one pace. `flops_per_s` 0 is unpaced; `ratio` is what it was set by."""

    problem: MatmulProblem
    rivals: tuple[Case, ...]
    flops_per_s: float = 0.0
    ratio: float | None = None
    pass_name: str = "forward"


@dataclass(frozen=True)
class Result:
    """One rival's times: seconds of each repetition, in the order of running, from the common start of all ranks
    to the end of the last.

    The yardsticks, in seconds: `theory_s` is None for DTensor, whose theory is not ours, and unpaced;
    `estimate_s` is None besides for gloo's own collectives and where no calibrated cluster was given. `error`
    is the largest difference from the dense product over all runs.
    """

    name: str
    family: str
    runs_s: tuple[float, ...]
    bound_s: float
    theory_s: float | None
    estimate_s: float | None
    error: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.runs_s)

    @property
    def fastest_s(self) -> float:
        return min(self.runs_s)

    @property
    def slowest_s(self) -> float:
        return max(self.runs_s)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """Lower and upper quartile, interpolated."""
        if len(self.runs_s) == 1:
            return self.runs_s[0], self.runs_s[0]
        low, _, high = statistics.quantiles(self.runs_s, n=4, method="inclusive")
        return low, high

    @property
    def over_bound(self) -> float:
        return self.median_s / self.bound_s

    @property
    def over_theory(self) -> float | None:
        return None if self.theory_s is None else self.median_s / self.theory_s

    @property
    def over_estimate(self) -> float | None:
        return None if self.estimate_s is None else self.median_s / self.estimate_s

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "median_s": self.median_s,
            "fastest_s": self.fastest_s,
            "slowest_s": self.slowest_s,
            "quartiles_s": self.quartiles_s,
            "over_bound": self.over_bound,
            "over_theory": self.over_theory,
            "over_estimate": self.over_estimate,
        }


@dataclass(frozen=True)
class Measured:
    """A round's results, in the order of its rivals, the ranks' pace reports (None: unpaced), and by how many
    seconds a rank began later than told, at worst: it is part of the times."""

    round: Round
    results: tuple[Result, ...]
    pace: tuple[dict[str, Any] | None, ...]
    late_s: float

    @property
    def bound_s(self) -> float:
        return self.results[0].bound_s

    def ranked(self) -> list[Result]:
        """The fastest first, by median."""
        return sorted(self.results, key=lambda result: result.median_s)

    @property
    def overruns(self) -> tuple[int, int]:
        """Of all ranks: products that took longer than their pace allows, and all paced products."""
        reports = [report for report in self.pace if report is not None]
        return sum(r["num_overruns"] for r in reports), sum(r["num_products"] for r in reports)

    def to_json(self) -> dict[str, Any]:
        return {
            "pass": self.round.pass_name,
            "problem": asdict(self.round.problem),
            "ratio": self.round.ratio,
            "flops_per_s": self.round.flops_per_s or None,
            "bound_s": self.bound_s,
            "late_s": self.late_s,
            "results": [result.to_json() for result in self.results],
            "pace": list(self.pace),
        }


def layer_rounds(
    sizes: tuple[int, int, int],
    mesh_shape: tuple[int, ...],
    dataflow: Dataflow,
    passes: Sequence[PassName],
    ratios: Sequence[float],
    lab: Cluster,
    tuned_on: Cluster,
    names: Sequence[str],
    slices: Sequence[Sequence[int]] = (),
) -> list[Round]:
    """A round per pass and ratio of the layer Y[m, n] = X[m, k] W[k, n], whose forward uses `dataflow`.

    Args:
        sizes: m, n, k.
        ratios: of compute to the slower axis' communication, in each pass; 0 is unpaced.
        lab: the described lab, whose rates set the pace.
        tuned_on: the cluster by whose estimates configurations are chosen, its products at the pace.
        names, slices: see `cases`.

    Raises LayoutError for sizes or a mesh that do not fit, and where no algorithm can use the mesh.
    """
    m, n, k = sizes
    out = []
    for pass_name in passes:
        problem = pass_problem(STATIONARY_OF[dataflow], pass_name, m, k, n, mesh_shape, "float32")
        if not problem.traffic_bytes(0):
            raise LayoutError(f"a mesh of {problem.num_chips} rank communicates nothing; take a larger lab")
        for ratio in ratios:
            pace = balanced_flops_per_s(problem, lab, ratio) if ratio else 0.0
            rivals = cases(problem, at_pace(tuned_on, pace), names, slices)
            out.append(Round(problem, tuple(rivals), pace, ratio or None, pass_name))
    return out


def unpaced(rounds: Sequence[Round]) -> list[Round]:
    """For each product of the rounds one without a pace, of all the rivals that it has in any of them."""
    found: dict[tuple[MatmulProblem, str], dict[Case, None]] = {}
    for one in rounds:
        found.setdefault((one.problem, one.pass_name), {}).update(dict.fromkeys(one.rivals))
    return [Round(problem, tuple(rivals), pass_name=name) for (problem, name), rivals in found.items()]


def bench(
    lab: RunningLab,
    rounds: Sequence[Round],
    *,
    calibrated: Cluster | None = None,
    repeat: int = 5,
    seed: int = 0,
    timeout_s: float = 600.0,
) -> list[Measured]:
    """Runs all rounds on a lab that is up, in one set of processes; a rival is bound once for all its rounds.

    Every rival runs once to warm up and then `repeat` times, in turn and in changing order.

    Args:
        calibrated: the cluster that estimates beside the results are made on, its products at the pace.
        seed: of the operands.
        timeout_s: seconds after which everything is stopped.

    Raises UnsupportedError where a problem has another number of ranks than the lab, and what
    `RunningLab.launch` raises.
    """
    for one in rounds:
        if one.problem.num_chips != lab.num_ranks:
            raise UnsupportedError(f"a mesh of {one.problem.num_chips} ranks on a lab of {lab.num_ranks}")
    products: dict[MatmulProblem, dict[Case, int]] = {}
    told: dict[MatmulProblem, list[dict[str, Any]]] = {}
    for one in rounds:
        bound = products.setdefault(one.problem, {})
        indices = [bound.setdefault(case, len(bound)) for case in one.rivals]
        told.setdefault(one.problem, []).append({"flops_per_s": one.flops_per_s, "cases": indices})
    payload = {
        "products": [
            {
                "problem": [problem.m, problem.n, problem.k, list(problem.mesh_shape), problem.dataflow],
                "cases": [case.payload(problem) for case in bound],
                "rounds": told[problem],
            }
            for problem, bound in products.items()
        ],
        "repeat": repeat,
        "seed": seed,
        "deadline_s": timeout_s,
    }
    # The benchmark sets its own pace; the lab's would hold where it sets none.
    no_pace = {"MESHWEAVE_PACE_FLOPS_PER_S": ""}
    ranks = lab.launch("meshweave.lab.bench.rank:bench_matmul", payload, timeout_s=timeout_s, env=no_pace)
    place = {problem: iter(range(len(told[problem]))) for problem in products}
    numbers = {problem: number for number, problem in enumerate(products)}
    return [
        _measured(
            one, [rank[numbers[one.problem]][at] for rank in ranks], lab.description.cluster(), calibrated
        )
        for one in rounds
        for at in (next(place[one.problem]),)
    ]


def _measured(
    one: Round, ranks: Sequence[dict[str, Any]], lab: Cluster, calibrated: Cluster | None
) -> Measured:
    problem, pace = one.problem, one.flops_per_s
    at_rate = matmul_machine(ideal(lab, pace or UNPACED_FLOPS_PER_S), problem)
    known = None if calibrated is None else matmul_machine(at_pace(calibrated, pace), problem)
    results = []
    for number, case in enumerate(one.rivals):
        runs = zip(*(rank["times"][number] for rank in ranks), strict=True)
        results.append(
            Result(
                case.name,
                case.family,
                tuple(max(run) for run in runs),
                bound_s(problem, at_rate),
                case.estimate_s(problem, at_rate) if pace else None,
                case.estimate_s(problem, known) if known is not None and case.rings else None,
                max(rank["errors"][number] for rank in ranks),
            )
        )
    return Measured(
        one, tuple(results), tuple(rank["pace"] for rank in ranks), max(rank["late_s"] for rank in ranks)
    )


@dataclass(frozen=True)
class Comparison:
    """The same global product at the same pace on several labs, each with the mesh that it is."""

    labs: tuple[str, ...]
    measured: tuple[Measured, ...]

    def gains(self) -> dict[str, list[dict[str, float | None]]]:
        """By algorithm, for each lab: how many times faster than on the first one, measured, by theory, and by
        estimate, each time with the configuration that was fastest there."""
        out: dict[str, list[dict[str, float | None]]] = {}
        for family in dict.fromkeys(result.family for result in self.measured[0].results):
            found = [
                next((result for result in one.ranked() if result.family == family), None)
                for one in self.measured
            ]
            first = found[0]
            assert first is not None
            out[family] = [
                {
                    "measured": None if other is None else first.median_s / other.median_s,
                    "theory": None if other is None else _over(first.theory_s, other.theory_s),
                    "estimate": None if other is None else _over(first.estimate_s, other.estimate_s),
                }
                for other in found
            ]
        return out

    def to_json(self) -> dict[str, Any]:
        pairs = zip(self.labs, self.measured, strict=True)
        return {
            "shapes": [{"lab": lab, **measured.to_json()} for lab, measured in pairs],
            "times_faster_than_the_first": self.gains(),
        }


def _over(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def compare_shapes(
    labs: Sequence[tuple[Lab, tuple[int, ...], Cluster | None]],
    sizes: tuple[int, int, int],
    dataflow: Dataflow,
    ratio: float,
    names: Sequence[str],
    slices: Sequence[Sequence[int]] = (),
    *,
    repeat: int = 5,
    timeout_s: float = 600.0,
) -> Comparison:
    """Runs one global product on each lab in turn, all at the pace that `ratio` sets on the first.

    Args:
        labs: each with its mesh shape and, if there is one, its calibrated cluster, by which configurations are
            chosen and estimates made.
        sizes: m, n, k.
        names, slices: see `cases`; only algorithms take part.
        timeout_s: seconds for each lab.

    Raises what `layer_rounds` and `bench` raise.
    """
    m, n, k = sizes
    pace = 0.0
    rounds: list[Round] = []
    for lab, shape, calibrated in labs:
        problem = MatmulProblem(m, n, k, shape, dataflow)
        if not problem.traffic_bytes(0):
            raise LayoutError(f"a mesh of {problem.num_chips} rank communicates nothing; take a larger lab")
        pace = pace or balanced_flops_per_s(problem, lab.cluster(), ratio)
        rivals = cases(problem, at_pace(calibrated or lab.cluster(), pace), names, slices, others=False)
        if not rivals:
            raise UnsupportedError(
                f"none of {', '.join(names)} can use a mesh of {'x'.join(map(str, shape))}"
            )
        rounds.append(Round(problem, tuple(rivals), pace, None if rounds else ratio))
    measured = []
    for (lab, _, calibrated), one in zip(labs, rounds, strict=True):
        with lab.up() as running:
            measured += bench(running, [one], calibrated=calibrated, repeat=repeat, timeout_s=timeout_s)
    return Comparison(tuple(lab.description.name for lab, _, _ in labs), tuple(measured))
