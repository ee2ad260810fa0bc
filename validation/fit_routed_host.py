"""Fit how fast hosts issue the layers of models with experts under Megatron-Core, on published runs.

python validation/fit_routed_host.py RUNS.csv

writes `routed_hosts` of megatron-core in src/meshweave/catalog/stacks.toml: one constant for hosts with x86
processors and one for those with Grace, fitted on the families that `training_runs/split.py` draws, of the runs
that ship and of RUNS.csv; GPT-OSS 120B judges. The loss is the mean over rows of the absolute logarithm of
predicted over published seconds. A counted kernel of such a layer stands for many: small operations around choices
and copies, casts of each expert, and the Python code between.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean

from meshweave.describe.machine.host import HostRates
from meshweave_studies.training_runs.cases import RunCase, case_of
from meshweave_studies.training_runs.figures import published_seconds
from meshweave_studies.training_runs.models import NoPredictionError, has_experts
from meshweave_studies.training_runs.rows import read_runs, shipped_runs
from meshweave_studies.training_runs.score import predict
from meshweave_studies.training_runs.split import is_fitted_run

STACK = "megatron-core"
TABLE = Path(__file__).parents[1] / "src/meshweave/catalog/stacks.toml"
GRACE = ("GB",)
"""How the names of chips begin whose hosts have Grace."""
X86 = ("H", "B")
TRIED = tuple(range(100, 501, 10))
"""Microseconds a counted kernel."""
_KEPT = ("machines", "collectives", "messages", "cluster", "computing", "transfers", "steps", "sized")
"""Prices that do not depend on the host."""


def fitted_cases(path: str) -> list[RunCase]:
    """Return the runs with experts that constants may be fitted on."""
    cases = []
    for run in (*shipped_runs(), *read_runs(path)):
        if not has_experts(run):
            continue
        try:
            case = case_of(run, experts=True)
        except NoPredictionError:
            continue
        if is_fitted_run(run, case.problem.model):
            cases.append(case)
    return cases


def mean_error(cases: list[RunCase], kernel_s: float) -> float:
    """Return the mean absolute logarithm of predicted over published seconds."""
    errors = []
    for case in cases:
        stack = replace(case.problem.stack, routed_hosts=(("", HostRates(kernel_s)),))
        problem = replace(case.problem, stack=stack)
        for kind in _KEPT:
            problem.cache(kind).update(case.problem.cache(kind))
        try:
            prediction = predict(replace(case, problem=problem))
        except NoPredictionError:
            continue
        for kind in _KEPT:
            case.problem.cache(kind).update(problem.cache(kind))
        errors.append(abs(math.log(prediction.seconds / published_seconds(case, prediction.step))))
    return mean(errors)


def main(path: str) -> None:
    """Fit and write the constants."""
    cases, hosts = fitted_cases(path), []
    for names in (GRACE, X86):
        own = [case for case in cases if case.problem.cluster.chip.name.startswith(GRACE) == (names == GRACE)]
        least, best = min((mean_error(own, tried * 1e-6), tried * 1e-6) for tried in TRIED)
        print(names, len(own), "rows: mean", round(least, 4), "seconds a kernel", round(best, 6))
        hosts += [f"{name} = {{ kernel_s = {best:.3g} }}" for name in names]
    text = TABLE.read_text("utf-8")
    text = re.sub(rf"(\[stacks\.{STACK}\]\n(?:.+\n)*?)(?:routed_hosts = .*\n|(?=\n|\Z))",
                  rf"\g<1>routed_hosts = {{ {', '.join(hosts)} }}\n", text, count=1)  # fmt: skip
    TABLE.write_text(text, "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
