"""The highest share of its peak that was measured on a chip, to compare a step's utilization with.

A step that is priced at rates of short runs, at a datasheet's peak, or in a dtype with another peak may have a
higher utilization than was ever measured. It is printed with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshweave.algorithms.step.problem import StepProblem
from meshweave.describe.machine.chip import Chip
from meshweave.describe.machine.left_out import best_product_rate


@dataclass(frozen=True)
class RateCeiling:
    """The highest share of its peak that a chip has shown in products of a step's dtype.

    Attributes:
        share: measured share of the peak (0 to 1), in steady training where that is known; 1 where nothing
            was measured.
        shown: the share in words.
        priced: the parts of the step that are priced above it, each with its share of the peak, in words.
    """

    share: float
    shown: str
    priced: str

    def reason(self, utilization: float) -> str:
        """Return one line that says why a utilization (0 to 1) is above `share`; "" where it is not."""
        return f"above {self.shown}: {self.priced}" if utilization > self.share else ""


def rate_ceiling(problem: StepProblem) -> RateCeiling:
    """Return the highest measured share of peak of the problem's chips, with what is priced above it."""
    return problem.once("ceiling", "", lambda: _rate_ceiling(problem))


def _rate_ceiling(problem: StepProblem) -> RateCeiling:
    chip, priced, dtype = problem.cluster.chip, problem.priced_cluster.chip, problem.dtype
    peak, measured = chip.peak(dtype), best_product_rate(chip, dtype)
    sustained = 1.0 if chip.kernels is None else chip.kernels.sustained_of(dtype)
    share = min(1.0 if measured is None else measured * sustained / peak, 1.0)
    shown = f"the {dtype} peak of {chip.name}"
    if measured is not None:
        does = "reach" if sustained == 1 else "sustain in training"
        shown = f"the {100 * share:.1f} % of the {dtype} peak that products of {chip.name} {does}"
    rates = {"attention": _attention_rate(priced, dtype)}
    for each in {dtype: 0, **dict.fromkeys(filter(None, problem.products or ()), 0)}:
        rates[f"products in {each}"] = best_product_rate(priced, each) or priced.flops_per_s(each)
    above = [
        f"{name} at up to {100 * rate / peak:.1f} %" for name, rate in rates.items() if rate > share * peak
    ]
    short = " as in short runs" if measured is not None and not problem.stack.sustains else ""
    return RateCeiling(share, shown, f"the step has {' and '.join(above)}{short}")


def _attention_rate(chip: Chip, dtype: str) -> float:
    constants = None if chip.kernels is None else chip.kernels.attention_of(dtype)
    return chip.flops_per_s(dtype, "attention") if constants is None else constants.flops_per_s
