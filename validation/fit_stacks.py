"""Fit the constants of software stacks on half of the families of published training runs.

python validation/fit_stacks.py

writes src/meshweave/catalog/stacks.toml, and in catalog/kernels the share of the rate of products that chips
sustain, which all stacks share. Which families are fitted, a hash of the model's shape
decides (`training_runs/split.py`); the others judge (`meshweave reproduce published`). The loss is the
mean over rows of the absolute logarithm of predicted over published seconds. Each row is priced without constants
and with one of each at a time; between these its seconds are taken to be linear in a constant, and in the inverse
rates of products and of the kernel of attention. The least loss is searched one or two constants at a time with
ever smaller steps, from several points. The kernel of Transformer Engine has measured times, forward and backward
(`attention_training.csv`), and nothing of it is fitted on runs.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshweave.algorithms.step import StepProblem, step_of
from meshweave.algorithms.step.stacks import KERNELS_OF_ATTENTION
from meshweave.calibrate.cluster_toml import kernels_toml
from meshweave.cost.attention import attention_s
from meshweave.cost.compute import GRADIENT_FACTOR
from meshweave.describe.machine.kernels import ChipKernels, ProductConstants
from meshweave.describe.machine.kernels_file import load_kernels
from meshweave_studies.training_runs.cases import case_of
from meshweave_studies.training_runs.figures import published_bytes, published_seconds
from meshweave_studies.training_runs.models import NoPredictionError
from meshweave_studies.training_runs.rows import PublishedRun, shipped_runs
from meshweave_studies.training_runs.score import predict, prediction_of
from meshweave_studies.training_runs.split import is_fitted
from meshweave_studies.training_runs.stacks import software_of, stack_of

Array = NDArray[np.float64]

CATALOG = Path(__file__).parents[1] / "src/meshweave/catalog"
NEUTRAL: dict[str, float] = {
    "overlap": 1.0,
    "launch_s": 0.0,
    "step_s": 0.0,
    "fragmentation": 0.0,
}
UNITS = {"overlap": 0.0, "launch_s": 1e-5}
"""At which value of a constant each row is priced besides the neutral one."""
BOUNDS = {"overlap": (0.0, 1.0), "launch_s": (0.0, 1e-5)}
FREE = {
    "megatron-2021": ("launch_s",),
    "llm-foundry": ("overlap", "launch_s"),
    "torchtitan": ("overlap", "launch_s"),
    "nanotron": ("overlap", "launch_s"),
    "megatron-core": (),
    "maxtext": (),
}
"""What is fitted of each stack. Megatron of 2021 waits for its reductions: overlap is 0. Others run collectives
beside the backward part, and have one overlap: it is a matter of the machine more than of the stack."""
_SHARED = ("overlap",)
FIXED = {"megatron-2021": {"overlap": 0.0}}
LOW_PRECISION = "megatron-core"
"""The stack whose fitted rows are below 16 bits. It has the overlap of the others and no gap between kernels: of
it nothing is fitted, but the share of the rate of products that Blackwell sustains, one for its chips."""
TPUS = {"maxtext": ("tpu-v5e", "tpu-v6e")}
"""A stack, and kernels of chips on which its rate of attention and the share that products sustain are fitted, on
its own rows alone. Its overlap is that of the others."""
BLACKWELL = ("b200-sxm", "b300-sxm", "gb200", "gb300")
BY_LENGTH = "fp8"
"""Products of scaled rows, the one kind whose measured times on Blackwell fall behind by far as they get longer
(`slowdown`): a part of what steady training loses is in them."""
UNKNOWN = {"nvfp4": 1.0}
"""Products that no fitted row has keep the rate of short runs."""
ATTENTION_FILE = Path(__file__).parent / "attention_training.csv"
MEASURED_ON = {
    "H100": ("H200", "h100-sxm5-80gb"),
    "H200": ("H200", "h200-sxm"),
    "B200": ("GB200", "b200-sxm"),
    "B300": ("GB300", "b300-sxm"),
    "GB200": ("GB200", "gb200"),
    "GB300": ("GB300", "gb300"),
}
"""The device of `ATTENTION_FILE` that has the multiprocessors of a chip, and the chip's kernels in the catalog."""
FITTED_RATES = {"llm-foundry": ("A100", "H100")}
"""Stacks whose kernel of attention has a fitted rate, by chip."""
KNOWN_RATES = {"flash-2": {"H100": 0.57}}
"""FlashAttention-3 is 1.5 to 2 times as fast as FlashAttention-2 (Shah et al., 2024, abstract): 1 / 1.75; and it
is FlashAttention-3 that was measured on H100."""
MEASURED_KERNEL = "transformer-engine"
"""It prefers cuDNN's kernels on Hopper and Blackwell (docs/examples/attention, section 1)."""
SUSTAINED = {"A100": ("a100-sxm4-80gb", "a100-sxm4-40gb"), "H100": ("h100-sxm5-80gb", "h200-sxm")}
"""Kernels of the catalog whose sustained share of the rate of products is fitted, on all stacks together. No
fitted row ran on the H200, which has the multiprocessors and the power of the H100."""
_FITTED_KERNELS = {kernels: chip for chip, names in SUSTAINED.items() for kernels in names}
_STARTS = 12
"""From so many points, drawn with a seed, the search begins."""
_INVERSE_RATE = (1.0, 6.0)
_INVERSE_SHARE = (1.0, 1.6)
_PRICED_RATE = 0.5
_PRICED_SHARE = 0.8
_KEPT = ("blocks", "ends", "machines", "collectives", "messages", "cluster")
"""Prices that do not depend on the constants of a stack."""


@dataclass(frozen=True)
class PricedRow:
    """A fitted row: published seconds, and predicted ones without constants and with one of each.

    Attributes:
        stack: the name of its stack.
        added: seconds that one unit of each constant adds; "attention": those of a kernel at half the rate, by the
            inverse rate; "products" likewise.
        bytes_error: predicted over published memory, None where none is published.
    """

    stack: str
    chip: str
    kernels: str
    published_s: float
    bare_s: float
    added: dict[str, float]
    bytes_error: float | None

    def predicted_s(self, values: dict[str, float]) -> float:
        """Return the seconds by constants: `_name`, "CHIP" of products, "STACK CHIP" of attention."""
        seconds = self.bare_s
        for name, added in self.added.items():
            if name == "products":
                seconds += (values.get(_FITTED_KERNELS.get(self.kernels, ""), 1.0) - 1) * added
            elif name == "attention":
                seconds += (values[f"{self.stack} {self.chip[:4]}"] - 1) * added
            else:
                value = values.get(
                    _name(self.stack, name), FIXED.get(self.stack, {}).get(name, NEUTRAL[name])
                )
                seconds += (value - NEUTRAL[name]) / (UNITS[name] - NEUTRAL[name]) * added
        return seconds


def priced_row(run: PublishedRun) -> PricedRow | None:
    """Return a row that is fitted; None for those that judge or cannot be predicted."""
    stack = stack_of(run)
    neutral = replace(software_of(stack), **NEUTRAL)
    fit_attention = bool(FITTED_RATES.get(stack.name))
    try:
        case = case_of(run, neutral, 1.0 if fit_attention else None)
        if case.problem.precision is not None or not is_fitted(case.problem.model):
            return None
        case = replace(case, problem=_at_share(case.problem, 1.0))
        prediction = predict(case)
        published_s = published_seconds(case, prediction.step)
    except NoPredictionError:
        return None

    def seconds(problem: StepProblem, kept: Sequence[str] = ()) -> float:
        for kind in kept:
            problem.cache(kind).update(case.problem.cache(kind))
        other = replace(case, problem=problem)
        return prediction_of(other, step_of(problem, prediction.step.parallelism)).seconds

    added = {}
    software = case.problem.stack
    for name in {*FREE[stack.name], *FIXED.get(stack.name, {})}:
        constants = replace(software, **dict[str, Any]({name: UNITS[name]}))
        added[name] = seconds(replace(case.problem, stack=constants), _KEPT) - prediction.seconds
    slower = seconds(_at_share(case.problem, _PRICED_SHARE))
    added["products"] = (slower - prediction.seconds) / (1 / _PRICED_SHARE - 1)
    if fit_attention:
        slower = seconds(replace(case.problem, attention_share=_PRICED_RATE))
        added["attention"] = (slower - prediction.seconds) / (1 / _PRICED_RATE - 1)
    num_bytes = published_bytes(case)
    chip = case.problem.cluster.chip
    return PricedRow(
        stack.name,
        chip.name,
        chip.kernels.reference if chip.kernels else "",
        published_s,
        prediction.seconds,
        added,
        None if num_bytes is None else prediction.num_bytes / num_bytes,
    )


def measured_rates() -> dict[str, float]:
    """Return the rate of `MEASURED_KERNEL` over that of the chip's constants, forward and backward together.

    It is the geometric mean over the rows of `ATTENTION_FILE` of the priced seconds over the measured ones.
    """
    lines = ATTENTION_FILE.read_text("utf-8").splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    rates = {}
    for chip, (device, kernels) in MEASURED_ON.items():
        constants = load_kernels(kernels).attention_of("bfloat16")
        assert constants is not None
        logs = []
        for row in (row for row in rows if row["device"] == device):
            names = "batch", "sequence", "window", "heads", "kv_heads", "width"
            batch, sequence, window, heads, kv_heads, width = (int(row[name]) for name in names)
            seen = window or sequence
            keys = seen * (2 * sequence - seen + 1) / (2 * sequence)
            moved = 4 * batch * sequence * width * (heads + kv_heads)
            forward_s = attention_s(constants, batch * heads, sequence, round(keys), width, moved, False)
            priced_ms = 1e3 * forward_s * (1 + GRADIENT_FACTOR)
            logs.append(math.log(priced_ms / (float(row["forward_ms"]) + float(row["backward_ms"]))))
        rates[chip] = round(math.exp(mean(logs)), 3)
        print(MEASURED_KERNEL, chip, len(logs), "rows: rate", rates[chip])
    return rates


def blackwell_shares(rates: dict[str, float]) -> dict[str, float]:
    """Return what products sustain on Blackwell, "" and by dtype, on the fitted rows of `LOW_PRECISION`.

    That of `BY_LENGTH` products is fitted on the rows that have them, and the one of the others on the others.
    """
    shares = {"": 1.0}
    for dtype in ("", BY_LENGTH):
        rows = list(filter(None, (_blackwell_row(run, rates, dtype, shares[""]) for run in shipped_runs())))
        trials = np.arange(0.5, 1.0005, 0.001)
        losses = [
            mean(
                abs(math.log((bare + added * (1 / share - 1)) / published)) for bare, added, published in rows
            )
            for share in trials
        ]
        print(LOW_PRECISION, dtype, len(rows), "rows on Blackwell: mean", round(min(losses), 4))
        shares[dtype] = round(float(trials[losses.index(min(losses))]), 3)
    return shares


def _blackwell_row(
    run: PublishedRun, rates: dict[str, float], dtype: str, others: float
) -> tuple[float, float, float] | None:
    """Return a row's seconds at a share of 1 of a dtype, what the inverse of it adds, and the published ones."""
    if stack_of(run).name != LOW_PRECISION:
        return None
    try:
        case = case_of(run)
        chip = case.problem.cluster.chip
        reference = chip.kernels.reference if chip.kernels else ""
        has = BY_LENGTH in (case.problem.products or ())
        if not is_fitted(case.problem.model) or reference not in BLACKWELL or has != (dtype == BY_LENGTH):
            return None
        rate = next(rate for name, rate in rates.items() if chip.name.startswith(name))
        case = replace(case, problem=replace(case.problem, attention_share=rate))
        given = (
            {"": share, BY_LENGTH: 1.0} if not dtype else {"": others, dtype: share}
            for share in (1.0, _PRICED_SHARE)
        )
        first, second = (
            replace(case, problem=with_kernels(case.problem, partial(sustaining, shares=shares)))
            for shares in given
        )
        prediction = predict(first)
        slower_s = predict(second).seconds
        published_s = published_seconds(first, prediction.step)
    except NoPredictionError:
        return None
    return prediction.seconds, (slower_s - prediction.seconds) / (1 / _PRICED_SHARE - 1), published_s


def sustaining(kernels: ChipKernels, shares: dict[str, float]) -> ChipKernels:
    """Return kernels with shares that products sustain: "" of all, and by dtype."""
    products = [
        (name, replace(of, sustained_share=shares.get(name)) if isinstance(of, ProductConstants) else of)
        for name, of in kernels.products
    ]
    return replace(kernels, products=tuple(products), sustained_share=shares[""])


def tpu_rates(stack: str, kernels: str) -> tuple[float, float]:
    """Return a stack's rate of attention over that of products on a chip, and the share that products sustain."""
    rows = []
    for run in (*shipped_runs(), *shipped_runs("dense_runs.csv")):
        if stack_of(run).name != stack:
            continue
        try:
            case = case_of(run, attention=1.0)
            chip = case.problem.cluster.chip
            if not is_fitted(case.problem.model) or not chip.kernels or chip.kernels.reference != kernels:
                continue
            case = replace(case, problem=_at_share(case.problem, 1.0))
            first = predict(case)
            slower = (
                replace(case.problem, attention_share=_PRICED_RATE),
                _at_share(case.problem, _PRICED_SHARE),
            )
            attention, products = (predict(replace(case, problem=each)).seconds for each in slower)
            published_s = published_seconds(case, first.step)
        except NoPredictionError:
            continue
        added = attention - first.seconds, (products - first.seconds) / (1 / _PRICED_SHARE - 1)
        rows.append((first.seconds, *added, published_s))
    bare, attention_s, products_s, published = np.array(rows).T

    def loss(inverse: Array) -> float:
        seconds = bare + (inverse[0] - 1) * attention_s + (inverse[1] - 1) * products_s
        return float(np.abs(np.log(seconds / published)).mean())

    bounds = _INVERSE_RATE, _INVERSE_SHARE
    starts = [np.array([first, second]) for first in (1.0, 3.0, 5.0) for second in (1.0, 1.3, 1.6)]
    least, best = min((search(loss, start, bounds) for start in starts), key=lambda pair: pair[0])
    print(stack, kernels, len(rows), "rows: mean", round(least, 4))
    return 1 / float(best[0]), round(1 / float(best[1]), 3)


def _name(stack: str, constant: str) -> str:
    """Return the name of a stack's constant among all that are fitted; stacks share some."""
    return constant if constant in _SHARED and constant not in FIXED.get(stack, {}) else f"{stack} {constant}"


def _at_share(problem: StepProblem, share: float) -> StepProblem:
    """Return a problem whose chips sustain a share of the rate of products, where that share is fitted."""
    chip = problem.cluster.chip
    tpus = [kind for kinds in TPUS.values() for kind in kinds]
    if chip.kernels is None or chip.kernels.reference not in (*_FITTED_KERNELS, *tpus):
        return problem
    return with_kernels(problem, partial(sustaining, shares={"": share}))


def with_kernels(problem: StepProblem, change: Callable[[ChipKernels], ChipKernels]) -> StepProblem:
    """Return a problem whose chips have other constants of kernels."""
    chip = problem.cluster.chip
    assert chip.kernels is not None
    chip = replace(chip, kernels=change(chip.kernels))
    return replace(problem, cluster=replace(problem.cluster, chip=chip))


def search(
    loss: Callable[[Array], float], start: Array, bounds: Sequence[tuple[float, float]]
) -> tuple[float, Array]:
    """Return the least loss and its constants: one or two of them move at a time, with ever smaller steps."""
    low, high = np.array(bounds).T
    units = np.eye(len(bounds)) * (high - low)
    moves = [sign * unit for unit in units for sign in (1, -1)]
    moves += [
        first + sign * second for first, second in permutations([*units, *-units], 2) for sign in (0.3, 1)
    ]
    best, least, share = start, loss(start), 0.25
    while share > 0.002:
        before = least
        for move in moves:
            trial = np.clip(best + share * move, low, high)
            if (of_trial := loss(trial)) < least - 1e-7:
                best, least = trial, of_trial
        share = share if least < before else share / 2
    return least, best


def fit(rows: Sequence[PricedRow]) -> dict[str, float]:
    """Return the constants of all stacks and chips, by the names of `PricedRow.predicted_s`."""
    stacks = list(dict.fromkeys(row.stack for row in rows))
    bounds = {_name(name, key): BOUNDS[key] for name in stacks for key in FREE[name]}
    bounds |= {f"{name} {chip}": _INVERSE_RATE for name in stacks for chip in FITTED_RATES.get(name, ())}
    bounds |= dict.fromkeys(SUSTAINED, _INVERSE_SHARE)
    names, limits = list(bounds), list(bounds.values())
    lowest = {name: low for name, (low, _) in bounds.items()}
    published = np.array([row.published_s for row in rows])
    least = np.array([row.predicted_s(lowest) for row in rows])
    columns = [[row.predicted_s({**lowest, name: lowest[name] + 1}) for row in rows] for name in names]
    added = np.array(columns).T - least[:, None]

    def loss(values: Array) -> float:
        seconds = least + added @ (values - np.array(list(lowest.values())))
        return float(np.abs(np.log(seconds / published)).mean())

    random = Random(0)
    starts = [
        np.array([low + random.random() * (high - low) for low, high in limits]) for _ in range(_STARTS)
    ]
    _, nearest = min((search(loss, start, limits) for start in starts), key=lambda pair: pair[0])
    best = dict(zip(names, map(float, nearest), strict=True))
    for name in stacks:
        own = [row for row in rows if row.stack == name]
        errors = [abs(math.log(row.predicted_s(best) / row.published_s)) for row in own]
        print(name, len(own), "rows: mean", round(mean(errors), 4), "median", round(median(errors), 4))
        memory = [row.bytes_error for row in own if row.bytes_error is not None]
        print("  memory: median of predicted over published", median(memory) if memory else None, flush=True)
    return best


def stacks_toml(values: dict[str, float], measured: dict[str, float]) -> str:
    """Return the text of `stacks.toml`."""
    attention = {kernel: dict(rates) for kernel, rates in KNOWN_RATES.items()} | {MEASURED_KERNEL: measured}
    for name, chips in FITTED_RATES.items():
        attention[KERNELS_OF_ATTENTION[name]] = {chip: 1 / values[f"{name} {chip}"] for chip in chips}
    for name, kinds in TPUS.items():
        attention[KERNELS_OF_ATTENTION[name]] = {
            f'"{load_kernels(kind).name}"': values[f"{name} {kind}"] for kind in kinds
        }
    lines = [
        "# Constants of software stacks (`SoftwareStack`), and rates of kernels of attention over the one",
        "# whose constants the chip has. Written by validation/fit_stacks.py.",
    ]
    for kernel, rates in attention.items():
        lines += ["", f"[attention.{kernel}]", *(f"{chip} = {rate:.3g}" for chip, rate in rates.items())]
    elsewhere = _stacks_as_they_stand()
    for name in FREE:
        constants = {
            **NEUTRAL, **{key: values[key] for key in _SHARED}, **FIXED.get(name, {}),
            **{key: values[_name(name, key)] for key in FREE[name]}
        }  # fmt: skip
        lines += ["", f"[stacks.{name}]", *(f"{key} = {value:.3g}" for key, value in constants.items())]
        lines += [line for line in elsewhere.pop(name, [])[1:] if line.split(" = ")[0] not in constants]
    lines += [line for section in elsewhere.values() for line in ("", *section)]
    return "\n".join(lines) + "\n"


def _stacks_as_they_stand() -> dict[str, list[str]]:
    """Return the lines of each stack: of some all, of some a few are fitted elsewhere (`fit_host.py`)."""
    text = (CATALOG / "stacks.toml").read_text("utf-8").rstrip()
    sections = re.split(r"\n+(?=\[)", text)
    named = ((re.match(r"\[stacks\.(.+)\]", section), section.splitlines()) for section in sections)
    return {name[1]: lines for name, lines in named if name}


def main() -> None:
    """Fit all stacks and chips and write their constants."""
    rows = [
        row
        for run in shipped_runs()
        if stack_of(run).name in FREE
        and stack_of(run).name not in (LOW_PRECISION, *TPUS)
        and (row := priced_row(run)) is not None
    ]
    values = fit(rows)
    shares = {name: {"": round(1 / values[chip], 3)} for name, chip in _FITTED_KERNELS.items()}
    for stack, kinds in TPUS.items():
        for kind in kinds:
            values[f"{stack} {kind}"], share = tpu_rates(stack, kind)
            shares[kind] = {"": share}
    measured = measured_rates()
    shares |= dict.fromkeys(BLACKWELL, blackwell_shares(measured) | UNKNOWN)
    (CATALOG / "stacks.toml").write_text(stacks_toml(values, measured), "utf-8")
    for name, own in shares.items():
        print(name, "sustains", own)
        kernels = sustaining(load_kernels(name), own)
        (CATALOG / "kernels" / f"{name}.toml").write_text(kernels_toml(kernels), "utf-8")


if __name__ == "__main__":
    main()
