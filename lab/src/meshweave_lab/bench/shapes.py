"""One product on meshes of other shapes: what the choice of the shape is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshweave.algorithms.matmul2d import Matmul2dProblem
from meshweave.algorithms.matmul2d.common.problem import Dataflow
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.describe.machine.cluster import Cluster
from meshweave_lab.bench.results import MeasuredRound, Round
from meshweave_lab.bench.rivals import choose_rivals
from meshweave_lab.bench.rounds import run_rounds
from meshweave_lab.bench.yardsticks import balanced_flops_per_s, with_pace
from meshweave_lab.lab import Lab


@dataclass(frozen=True)
class ShapeComparison:
    """The same global product at the same pace on several labs, each of which is a mesh of its own shape."""

    labs: tuple[str, ...]
    measured: tuple[MeasuredRound, ...]

    def gains(self) -> dict[str, list[dict[str, float | None]]]:
        """Return by algorithm and lab how many times faster the algorithm is than on the first lab.

        Each entry has the ratio "measured", by "theory" and by "estimate", for the configuration that was the
        fastest on that lab; None where there is none.
        """
        gains: dict[str, list[dict[str, float | None]]] = {}
        for family in dict.fromkeys(result.family for result in self.measured[0].results):
            fastest = [
                next((result for result in measured.ranked() if result.family == family), None)
                for measured in self.measured
            ]
            first = fastest[0]
            assert first is not None
            gains[family] = [
                {
                    "measured": None if result is None else first.median_s / result.median_s,
                    "theory": None if result is None else _ratio(first.theory_s, result.theory_s),
                    "estimate": None if result is None else _ratio(first.estimate_s, result.estimate_s),
                }
                for result in fastest
            ]
        return gains

    def to_json(self) -> dict[str, Any]:
        """Return the rounds by lab and the gains, as plain values."""
        pairs = zip(self.labs, self.measured, strict=True)
        return {
            "shapes": [{"lab": lab, **measured.to_json()} for lab, measured in pairs],
            "times_faster_than_the_first": self.gains(),
        }


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def compare_shapes(
    labs: Sequence[tuple[Lab, tuple[int, ...], Cluster | None]],
    sizes: tuple[int, int, int],
    dataflow: Dataflow,
    ratio: float,
    names: Sequence[str],
    extra_slices: Sequence[Sequence[int]] = (),
    *,
    repeat: int = 5,
    timeout_s: float = 600.0,
) -> ShapeComparison:
    """Run one global product on each lab in turn, all at the pace that `ratio` sets on the first lab.

    Args:
        labs: each with its mesh shape and, if there is one, its calibrated cluster. Configurations are chosen by
            estimates on that cluster.
        sizes: m, n, k.
        names, extra_slices: see `choose_rivals`; only algorithms take part, no baselines.
        timeout_s: seconds for each lab.

    Raises:
        LayoutError: there are fewer than two labs, they have different numbers of ranks, `ratio` is 0, or what
            `choose_rivals` raises.
        UnsupportedError: no algorithm can use one of the meshes, or what `run_rounds` raises.
    """
    if len(labs) < 2:
        raise LayoutError("one lab has one shape; give two at least")
    if len({lab.num_ranks for lab, _, _ in labs}) > 1:
        counts = ", ".join(str(lab.num_ranks) for lab, _, _ in labs)
        raise LayoutError(f"the labs have {counts} ranks; shapes compare at the same number")
    if not ratio:
        raise LayoutError("without a pace this would compare cores; give a ratio over 0")
    m, n, k = sizes
    pace = 0.0
    rounds: list[Round] = []
    for lab, shape, calibrated in labs:
        problem = Matmul2dProblem(m, n, k, shape, dataflow)
        if not problem.traffic_bytes(0):
            raise LayoutError(f"a mesh of {problem.num_chips} rank communicates nothing; take a larger lab")
        pace = pace or balanced_flops_per_s(problem, lab.cluster(), ratio)
        tuned_on = with_pace(calibrated or lab.cluster(), pace)
        rivals = choose_rivals(problem, tuned_on, names, extra_slices, with_baselines=False)
        if not rivals:
            raise UnsupportedError(
                f"none of {', '.join(names)} can use a mesh of {'x'.join(map(str, shape))}"
            )
        rounds.append(Round(problem, tuple(rivals), pace, None if rounds else ratio))
    measured = []
    for (lab, _, calibrated), round_ in zip(labs, rounds, strict=True):
        with lab.up() as running:
            measured += run_rounds(
                running, [round_], calibrated=calibrated, repeat=repeat, timeout_s=timeout_s
            )
    return ShapeComparison(tuple(lab.description.name for lab, _, _ in labs), tuple(measured))
