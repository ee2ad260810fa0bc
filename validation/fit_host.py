"""Fit how fast the host of a software stack issues operations, on published runs of few chips.

python validation/fit_host.py

writes the table `host` of megatron-deepspeed in src/meshweave/catalog/stacks.toml, fitted on vTrain's runs on 2
and 4 GPUs; those on 8 and 512 judge (`meshweave reproduce published FILE`, that file of the studies). The loss is
the mean over rows of the absolute logarithm of predicted over published seconds. A step is no linear function of
its constants, so every trial prices all rows again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from fit_stacks import Array, search

from meshweave.algorithms.step import StepProblem, step_of
from meshweave.describe.machine.host import HostRates
from meshweave_studies.training_runs.cases import RunCase, case_of
from meshweave_studies.training_runs.rows import parse_runs
from meshweave_studies.training_runs.split import is_fitted_run

STACK = "megatron-deepspeed"
TABLE = Path(__file__).parents[1] / "src/meshweave/catalog/stacks.toml"
BOUNDS = {"kernel_s": (5e-6, 1e-4), "layer_s": (0.0, 5e-3)}
"""What is fitted. No kernel is launched in less than some 5 us. What issuing a collective takes changes nothing
where the host waits for it."""
_START = {"kernel_s": 2e-5, "layer_s": 1.5e-3}
_OF_HOST = ("layers", "ends", "kinds")
"""Prices that depend on the host; others are kept from trial to trial."""


def fitted_cases() -> list[RunCase]:
    """Return the runs that constants are fitted on."""
    text = files("meshweave_studies").joinpath("published", "vtrain_runs.csv").read_text("utf-8")
    cases = [case_of(run) for run in parse_runs(text, "vtrain_runs.csv") if is_fitted_run(run)]
    shared: dict[tuple[object, ...], dict[str, Any]] = {}
    for case in cases:
        _share(case.problem, shared)
        step_of(case.problem, case.choices[0])
    return cases


def _share(problem: StepProblem, shared: dict[tuple[object, ...], dict[str, Any]]) -> None:
    """Let a problem keep its prices with those of other batches, of which they do not depend."""
    key = problem.model, problem.cluster.num_chips
    problem.__dict__["_cache"] = shared.setdefault(key, {})


def mean_error(cases: Sequence[RunCase], host: HostRates) -> float:
    """Return the mean absolute logarithm of predicted over published seconds with a host."""
    total, shared = 0.0, dict[int, dict[str, Any]]()
    for case in cases:
        stack = replace(case.problem.stack, host=host)
        problem = replace(case.problem, stack=stack)
        kept = case.problem.__dict__["_cache"]
        own = {kind: known for kind, known in kept.items() if kind not in _OF_HOST}
        problem.__dict__["_cache"] = shared.setdefault(id(kept), own)
        total += abs(math.log(step_of(problem, case.choices[0]).time_s / case.run.value))
    return total / len(cases)


def _host(values: Array) -> HostRates:
    kernel_s, layer_s = map(float, values)
    return HostRates(kernel_s, layer_s=layer_s, waits=True)


def main() -> None:
    """Fit and write the constants."""
    cases, names = fitted_cases(), list(BOUNDS)

    def loss(values: Array) -> float:
        return mean_error(cases, _host(values))

    start = np.array([_START[name] for name in names])
    least, best = search(loss, start, list(BOUNDS.values()))
    words = ", ".join(f"{name} = {value:.3g}" for name, value in zip(names, best, strict=True))
    print(len(cases), "rows: mean", round(least, 4), words)
    text = TABLE.read_text("utf-8")
    pattern = rf"(\[stacks\.{STACK}\]\n(?:.+\n)*?host = ).*\n"
    TABLE.write_text(re.sub(pattern, rf"\g<1>{{ {words}, waits = true }}\n", text), "utf-8")


if __name__ == "__main__":
    main()
