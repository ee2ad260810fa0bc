"""Fit the constants of software stacks on half of the families of published training runs.

python validation/fit_stacks.py

writes src/meshweave/reproduce/training_runs/stacks.toml. Which families are fitted, a hash of the model's shape
decides (`reproduce/training_runs/split.py`); the others judge (`meshweave reproduce published`). The loss is the
mean over rows of the absolute logarithm of predicted over published seconds. Constants are searched one after the
other with ever smaller steps; the rates of kernels of attention, constants of a chip, over a grid.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from meshweave.reproduce.training_runs.cases import RunCase, case_of
from meshweave.reproduce.training_runs.figures import published_bytes, published_seconds
from meshweave.reproduce.training_runs.models import NoPredictionError
from meshweave.reproduce.training_runs.rows import PublishedRun, shipped_runs
from meshweave.reproduce.training_runs.score import predict, prediction_of
from meshweave.reproduce.training_runs.split import is_fitted
from meshweave.reproduce.training_runs.stacks import software_of, stack_of
from meshweave.tune.step import Parallelism, SoftwareStack, step_of

FILE = Path(__file__).parents[1] / "src/meshweave/reproduce/training_runs/stacks.toml"
BOUNDS = {"overlap": (0.0, 1.0), "extra_passes": (0.0, 60.0), "launch_s": (0.0, 2e-5), "step_s": (0.0, 0.2)}
FREE = {
    "megatron-2021": ("extra_passes", "launch_s"),
    "llm-foundry": ("overlap", "extra_passes", "launch_s"),
    "torchtitan": ("extra_passes",),
    "nanotron": ("overlap", "extra_passes", "launch_s"),
}
"""What is fitted of each stack. Megatron of 2021 waits for its reductions: overlap is 0."""
FIXED = {"megatron-2021": {"overlap": 0.0}}
ATTENTION = {"triton-1": ("A100", "H100"), "flash-2": ("H100",)}
"""Kernels of attention whose rate is fitted, by chip."""
RATES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18)
_KEPT = ("blocks", "ends", "machines", "collectives", "messages", "cluster")
"""Prices that do not depend on the constants of a stack."""


@dataclass(frozen=True)
class FittedRow:
    """A row on the side that is fitted."""

    case: RunCase
    parallelism: Parallelism
    seconds: float
    num_bytes: float | None

    def errors(self, stack: SoftwareStack) -> tuple[float, float | None]:
        """Return the logarithm of predicted over published seconds, and bytes, with these constants."""
        problem = replace(self.case.problem, stack=stack)
        for kind in _KEPT:
            problem.prices(kind).update(self.case.problem.prices(kind))
        case = replace(self.case, problem=problem)
        predicted = prediction_of(case, step_of(problem, self.parallelism))
        memory = None if self.num_bytes is None else math.log(predicted.num_bytes / self.num_bytes)
        return math.log(predicted.seconds / self.seconds), memory


def fitted_rows(runs: Sequence[PublishedRun], attention: float) -> list[FittedRow]:
    """Return the rows that are fitted, at a rate of the kernel of attention."""
    out = []
    for run in runs:
        try:
            case = case_of(run, replace(software_of(stack_of(run)), **NEUTRAL), attention)
            if not is_fitted(case.problem.model):
                continue
            step = predict(case).step
            out.append(
                FittedRow(case, step.parallelism, published_seconds(case, step), published_bytes(case))
            )
        except NoPredictionError:
            continue
    return out


NEUTRAL = {"overlap": 1.0, "extra_passes": 0.0, "launch_s": 0.0, "step_s": 0.0, "fragmentation": 0.0}


def search(
    rows: Sequence[FittedRow], start: SoftwareStack, free: Sequence[str]
) -> tuple[SoftwareStack, float]:
    """Return the constants with the least loss, and the loss."""

    def loss(stack: SoftwareStack) -> float:
        return sum(abs(row.errors(stack)[0]) for row in rows) / len(rows)

    best, least = start, loss(start)
    share = 0.25
    while share > 0.004:
        moved = False
        for name in free:
            low, high = BOUNDS[name]
            for sign in (1, -1):
                value = min(max(getattr(best, name) + sign * share * (high - low), low), high)
                trial = replace(best, **{name: value})
                if (of_trial := loss(trial)) < least - 1e-6:
                    best, least, moved = trial, of_trial, True
                    break
        share = share if moved else share / 2
    return best, least


def fit_stack(name: str, runs: Sequence[PublishedRun]) -> tuple[SoftwareStack, dict[str, float]]:
    """Return the constants of a stack, and the rates of its kernel of attention by chip."""
    own = [run for run in runs if stack_of(run).name == name]
    kernel = stack_of(own[0]).attention_kernel
    chips = ATTENTION.get(kernel, ())
    start = replace(software_of(stack_of(own[0])), **{**NEUTRAL, **FIXED.get(name, {})})
    by_chip: dict[str, dict[float, list[FittedRow]]] = {}
    for chip in chips or ("",):
        rates = RATES if chip else (1.0,)
        chosen = [run for run in own if chip.lower() in run.chips.lower()]
        by_chip[chip] = {rate: fitted_rows(chosen, rate) for rate in rates}
        print(name, chip, {rate: len(rows) for rate, rows in by_chip[chip].items()}, flush=True)
    rates = {chip: 0.5 for chip in chips if by_chip[chip][0.5]}
    stack, least = start, math.inf
    for _ in range(4):
        rows = [row for chip, priced in by_chip.items() for row in priced[rates.get(chip, 1.0)]]
        stack, now = search(rows, stack, FREE[name])
        for chip in rates:
            of_rate = {
                rate: sum(abs(row.errors(stack)[0]) for row in rows) for rate, rows in by_chip[chip].items()
            }
            rates[chip] = min(of_rate, key=lambda rate: of_rate[rate])
        print(name, stack, rates, round(now, 4), flush=True)
        if now > least - 1e-4:
            break
        least = now
    memory = [error for row in rows if (error := row.errors(stack)[1]) is not None]
    if memory and median(memory) < 0:
        stack = replace(stack, fragmentation=_fragmentation(rows, stack))
    return stack, rates


def _fragmentation(rows: Sequence[FittedRow], stack: SoftwareStack) -> float:
    """Return the share of fragmentation with the least median error of memory."""

    def loss(share: float) -> float:
        errors = (row.errors(replace(stack, fragmentation=share))[1] for row in rows)
        return median(abs(error) for error in errors if error is not None)

    return min((0.02 * number for number in range(51)), key=loss)


def toml_of(stacks: dict[str, SoftwareStack], attention: dict[str, dict[str, float]]) -> str:
    """Return the text of `stacks.toml`."""
    lines = [
        "# Constants of software stacks (tune.step.SoftwareStack), and rates of kernels of attention over the one",
        "# whose constants the chip has. Written by validation/fit_stacks.py.",
    ]
    for kernel, rates in attention.items():
        lines += ["", f"[attention.{kernel}]", *(f"{chip} = {rate:g}" for chip, rate in rates.items())]
    for name, stack in stacks.items():
        lines += ["", f"[stacks.{name}]"]
        lines += [f"{key} = {getattr(stack, key):.4g}" for key in NEUTRAL]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Fit all stacks and write their constants."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    stacks, attention = {}, dict[str, dict[str, float]]()
    for name in FREE:
        stacks[name], rates = fit_stack(name, shipped_runs())
        if rates:
            kernel = stack_of(
                next(run for run in shipped_runs() if stack_of(run).name == name)
            ).attention_kernel
            attention.setdefault(kernel, {}).update(rates)
    FILE.write_text(toml_of(stacks, attention), "utf-8")


if __name__ == "__main__":
    main()
