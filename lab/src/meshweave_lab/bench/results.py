"""What a benchmark measured: the times of each rival, beside three yardsticks.

The bound is max(compute, bytes per axis / rate). The theory is the algorithm's own schedule at the links' rates,
without latency. The estimate uses the constants of a calibrated cluster.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from meshweave.algorithms.matmul2d import Matmul2dProblem
from meshweave_lab.bench.rivals import PRECONDITIONS, Rival


@dataclass(frozen=True)
class Round:
    """Rivals on one product at one pace.

    Attributes:
        flops_per_s: the pace of each rank's products; 0 means unpaced.
        ratio: the compute time over communication time that set the pace, if one did.
        pass_name: which product of a layer it is.
    """

    problem: Matmul2dProblem
    rivals: tuple[Rival, ...]
    flops_per_s: float = 0.0
    ratio: float | None = None
    pass_name: str = "forward"


@dataclass(frozen=True)
class RivalTimes:
    """The times of one rival in one round.

    Attributes:
        family: the name that all configurations of the rival share.
        runs_s: seconds of each repetition, in the order of running, from the common start of all ranks to the end
            of the last rank.
        bound_s: seconds of the bound.
        theory_s: seconds of the theory; None for DTensor, which has none here, and for unpaced rounds.
        estimate_s: seconds of the estimate; None for DTensor, for gloo's own collectives, and without a
            calibrated cluster.
        error: the largest absolute difference from the dense product over all runs.
    """

    name: str
    family: str
    runs_s: tuple[float, ...]
    bound_s: float
    theory_s: float | None
    estimate_s: float | None
    error: float

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RivalTimes:
        """Return the times that `to_json` wrote."""
        fields = ("name", "family", "runs_s", "bound_s", "theory_s", "estimate_s", "error")
        return cls(**{**{field: data[field] for field in fields}, "runs_s": tuple(data["runs_s"])})

    @property
    def precondition(self) -> str:
        """What this rival starts from and the others do not, in a sentence; "" if it starts from the same
        shards.
        """
        return PRECONDITIONS.get(self.name, "")

    @property
    def median_s(self) -> float:
        """The median of `runs_s`."""
        return statistics.median(self.runs_s)

    @property
    def fastest_s(self) -> float:
        """Seconds of the fastest run."""
        return min(self.runs_s)

    @property
    def slowest_s(self) -> float:
        """Seconds of the slowest run."""
        return max(self.runs_s)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """Lower and upper quartile in seconds, interpolated."""
        if len(self.runs_s) == 1:
            return self.runs_s[0], self.runs_s[0]
        low, _, high = statistics.quantiles(self.runs_s, n=4, method="inclusive")
        return low, high

    @property
    def over_bound(self) -> float:
        """Median time over the bound."""
        return self.median_s / self.bound_s

    @property
    def over_theory(self) -> float | None:
        """Median time over the theory."""
        return None if self.theory_s is None else self.median_s / self.theory_s

    @property
    def over_estimate(self) -> float | None:
        """Median time over the estimate."""
        return None if self.estimate_s is None else self.median_s / self.estimate_s

    def to_json(self) -> dict[str, Any]:
        """Return the times and what follows from them, as plain values."""
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
class MeasuredRound:
    """The results of a round.

    Attributes:
        results: the times of each rival, in the order of `round.rivals`.
        pace: the pace report of each rank, None where unpaced.
        late_s: by how many seconds a rank began after the common start, at worst. This is part of the times.
    """

    round: Round
    results: tuple[RivalTimes, ...]
    pace: tuple[dict[str, Any] | None, ...]
    late_s: float

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MeasuredRound:
        """Return the round that `to_json` wrote. Its `round` has no rivals, only their times."""
        problem = {**data["problem"], "mesh_shape": tuple(data["problem"]["mesh_shape"])}
        described = Round(
            Matmul2dProblem(**problem), (), data["flops_per_s"] or 0.0, data["ratio"], data["pass"]
        )
        results = tuple(RivalTimes.from_json(result) for result in data["results"])
        return cls(described, results, tuple(data["pace"]), data["late_s"])

    @property
    def bound_s(self) -> float:
        """Seconds of the bound, the same for all rivals."""
        return self.results[0].bound_s

    def ranked(self) -> list[RivalTimes]:
        """Return the rivals that start from the same shards, the fastest by median first, then the others."""
        return sorted(self.results, key=lambda result: (result.precondition != "", result.median_s))

    @property
    def overruns(self) -> tuple[int, int]:
        """Over all ranks: the number of products that took longer than their pace allows, and of all paced
        products.
        """
        reports = [report for report in self.pace if report is not None]
        return sum(r["num_overruns"] for r in reports), sum(r["num_products"] for r in reports)

    def to_json(self) -> dict[str, Any]:
        """Return the round as plain values."""
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
