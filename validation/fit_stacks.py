"""Fit the constants of software stacks on half of the families of published training runs.

python validation/fit_stacks.py

writes src/meshweave/catalog/stacks.toml. Which families are fitted, a hash of the model's shape
decides (`reproduce/training_runs/split.py`); the others judge (`meshweave reproduce published`). The loss is the
mean over rows of the absolute logarithm of predicted over published seconds. Each row is priced without constants
and with one of each at a time; between these its seconds are taken to be linear in a constant, and in the inverse
rate of the kernel of attention. The least loss is searched one constant after the other with ever smaller steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshweave.reproduce.training_runs.cases import RunCase, case_of
from meshweave.reproduce.training_runs.figures import published_bytes, published_seconds
from meshweave.reproduce.training_runs.models import NoPredictionError
from meshweave.reproduce.training_runs.rows import PublishedRun, shipped_runs
from meshweave.reproduce.training_runs.score import predict, prediction_of
from meshweave.reproduce.training_runs.split import is_fitted
from meshweave.reproduce.training_runs.stacks import software_of, stack_of
from meshweave.tune.step import step_of

Array = NDArray[np.float64]

FILE = Path(__file__).parents[1] / "src/meshweave/catalog/stacks.toml"
NEUTRAL: dict[str, Any] = {
    "overlap": 1.0,
    "extra_passes": 0.0,
    "launch_s": 0.0,
    "step_s": 0.0,
    "fragmentation": 0.0,
}
UNITS = {"overlap": 0.0, "extra_passes": 10.0, "launch_s": 1e-5}
"""At which value of a constant each row is priced besides the neutral one."""
BOUNDS = {"overlap": (0.0, 1.0), "extra_passes": (0.0, 30.0), "launch_s": (0.0, 1e-5)}
FREE = {
    "megatron-2021": ("extra_passes", "launch_s"),
    "llm-foundry": ("overlap", "extra_passes", "launch_s"),
    "torchtitan": ("overlap", "extra_passes"),
    "nanotron": ("overlap", "extra_passes", "launch_s"),
}
"""What is fitted of each stack. Megatron of 2021 waits for its reductions: overlap is 0."""
FIXED = {"megatron-2021": {"overlap": 0.0}}
FITTED_RATES = {"llm-foundry": ("A100", "H100")}
"""Stacks whose kernel of attention has a fitted rate, by chip."""
KNOWN_RATES = {"flash-2": {"H100": 0.57}}
"""FlashAttention-3 is 1.5 to 2 times as fast as FlashAttention-2 (Shah et al., 2024, abstract): 1 / 1.75."""
_INVERSE_RATE = (1.0, 6.0)
_PRICED_RATE = 0.5
_KEPT = ("blocks", "ends", "machines", "collectives", "messages", "cluster")
"""Prices that do not depend on the constants of a stack."""


@dataclass(frozen=True)
class PricedRow:
    """A fitted row: published seconds, and predicted ones without constants and with one of each.

    Attributes:
        added: seconds that one unit of each constant adds; "attention": those of a kernel at half the rate.
        bytes_error: predicted over published memory, None where none is published.
    """

    chip: str
    published_s: float
    bare_s: float
    added: dict[str, float]
    bytes_error: float | None


def priced_row(run: PublishedRun, free: Sequence[str], fit_attention: bool) -> PricedRow | None:
    """Return a row that is fitted; None for those that judge or cannot be predicted."""
    neutral = replace(software_of(stack_of(run)), **NEUTRAL)
    try:
        case = case_of(run, neutral, 1.0 if fit_attention else None)
        if not is_fitted(case.problem.model):
            return None
        prediction = predict(case)
        published_s = published_seconds(case, prediction.step)
    except NoPredictionError:
        return None

    def seconds(other: RunCase) -> float:
        return prediction_of(other, step_of(other.problem, prediction.step.parallelism)).seconds

    added = {}
    for name in {*free, *FIXED.get(stack_of(run).name, {})}:
        if name == "extra_passes" and case.problem.loss != stack_of(run).loss:
            added[name] = 0.0  # compiled: no pass is left
            continue
        problem = replace(case.problem, stack=replace(neutral, **dict[str, Any]({name: UNITS[name]})))
        for kind in _KEPT:
            problem.cache(kind).update(case.problem.cache(kind))
        added[name] = seconds(replace(case, problem=problem)) - prediction.seconds
    if fit_attention:
        slower = replace(case, problem=replace(case.problem, attention_share=_PRICED_RATE))
        added["attention"] = (seconds(slower) - prediction.seconds) / (1 / _PRICED_RATE - 1)
    num_bytes = published_bytes(case)
    return PricedRow(
        case.problem.cluster.chip.name,
        published_s,
        prediction.seconds,
        added,
        None if num_bytes is None else prediction.num_bytes / num_bytes,
    )


def search(
    loss: Callable[[dict[str, float]], float], start: dict[str, float], bounds: dict[str, tuple[float, float]]
) -> dict[str, float]:
    """Return the constants with the least loss, one after the other with ever smaller steps."""
    best, least, share = dict(start), loss(start), 0.25
    while share > 0.002:
        moved = False
        for name, (low, high) in bounds.items():
            for sign in (1, -1):
                trial = {**best, name: min(max(best[name] + sign * share * (high - low), low), high)}
                if (of_trial := loss(trial)) < least - 1e-7:
                    best, least, moved = trial, of_trial, True
                    break
        share = share if moved else share / 2
    return best


def fit_stack(name: str, runs: Sequence[PublishedRun]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the constants of a stack, and the rates of its kernel of attention by chip."""
    chips = FITTED_RATES.get(name, ())
    own = [run for run in runs if stack_of(run).name == name]
    rows = [row for run in own if (row := priced_row(run, FREE[name], bool(chips))) is not None]
    columns = {key: np.array([row.added[key] for row in rows]) for key in rows[0].added}
    bare, published = (np.array([getattr(row, key) for row in rows]) for key in ("bare_s", "published_s"))
    of_chip = {chip: np.array([row.chip.startswith(chip) for row in rows]) for chip in chips}
    fixed = {**NEUTRAL, **FIXED.get(name, {})}

    def predicted(values: dict[str, float]) -> Array:
        seconds: Array = bare.copy()
        for key in set(columns) - {"attention"}:
            share = (values[key] - NEUTRAL[key]) / (UNITS[key] - NEUTRAL[key])
            seconds += share * columns[key]
        for chip, is_there in of_chip.items():
            seconds += np.where(is_there, (values[chip] - 1) * columns["attention"], 0.0)
        return seconds

    def loss(values: dict[str, float]) -> float:
        return float(np.abs(np.log(predicted(values) / published)).mean())

    bounds = {key: BOUNDS[key] for key in FREE[name]} | dict.fromkeys(chips, _INVERSE_RATE)
    starts = [
        {**fixed, **{key: low + share * (high - low) for key, (low, high) in bounds.items()}}
        for share in (0.0, 0.3, 0.6, 1.0)
    ]
    best = min((search(loss, start, bounds) for start in starts), key=loss)
    errors = np.abs(np.log(predicted(best) / published))
    print(name, len(rows), "rows: mean", round(loss(best), 4), "median", round(float(np.median(errors)), 4))
    memory = [row.bytes_error for row in rows if row.bytes_error is not None]
    print("  memory: median of predicted over published", median(memory) if memory else None, flush=True)
    return {key: best[key] for key in NEUTRAL}, {chip: 1 / best[chip] for chip in chips}


def toml_of(stacks: dict[str, dict[str, float]], attention: dict[str, dict[str, float]]) -> str:
    """Return the text of `stacks.toml`."""
    lines = [
        "# Constants of software stacks (tune.step.SoftwareStack), and rates of kernels of attention over the one",
        "# whose constants the chip has. Written by validation/fit_stacks.py.",
    ]
    for kernel, rates in attention.items():
        lines += ["", f"[attention.{kernel}]", *(f"{chip} = {rate:.3g}" for chip, rate in rates.items())]
    for name, constants in stacks.items():
        lines += ["", f"[stacks.{name}]", *(f"{key} = {value:.3g}" for key, value in constants.items())]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Fit all stacks and write their constants."""
    stacks, attention = {}, {kernel: dict(rates) for kernel, rates in KNOWN_RATES.items()}
    runs = shipped_runs()
    for name in FREE:
        stacks[name], rates = fit_stack(name, runs)
        if rates:
            kernel = next(stack_of(run).attention_kernel for run in runs if stack_of(run).name == name)
            attention[kernel] = rates
    FILE.write_text(toml_of(stacks, attention), "utf-8")


if __name__ == "__main__":
    main()
