"""Fit the fragmentation of software stacks on half of the families of published training runs.

python validation/fit_memory.py

writes src/meshweave/catalog/fragmentation.toml. Which families are fitted, a hash of the model's shape decides
(`training_runs/split.py`); the others judge (`meshweave reproduce published`). Figures of memory are
what PyTorch's allocator has reserved at most, blocks that nothing fits into included. The loss is the mean over
rows of the absolute logarithm of predicted over published bytes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import mean

from meshweave.algorithms.step import stack_names
from meshweave_studies.training_runs.cases import case_of
from meshweave_studies.training_runs.figures import published_bytes
from meshweave_studies.training_runs.models import NoPredictionError
from meshweave_studies.training_runs.rows import shipped_runs
from meshweave_studies.training_runs.score import predict, run_bytes
from meshweave_studies.training_runs.split import is_fitted
from meshweave_studies.training_runs.stacks import software_of, stack_of

FILE = Path(__file__).parents[1] / "src/meshweave/catalog/fragmentation.toml"
SHARES = [number / 100 for number in range(51)]
"""Values that are tried: shares of activations and buffers."""
_SHARE = 0.5


def priced_bytes() -> dict[str, list[tuple[float, float]]]:
    """Return for each stack and fitted row, over the published bytes, those without fragments and those of all."""
    out: dict[str, list[tuple[float, float]]] = {}
    for run in shipped_runs():
        stack = stack_of(run)
        try:
            case, whole = (
                case_of(run, replace(software_of(stack), fragmentation=share)) for share in (0.0, _SHARE)
            )
            published = published_bytes(case)
            if published is None or not is_fitted(case.problem.model):
                continue
            chosen = case.choices[0] if len(case.choices) == 1 else predict(case).step.parallelism
            plain, more = run_bytes(case, chosen), run_bytes(whole, chosen)
        except NoPredictionError:
            continue
        out.setdefault(stack.name, []).append((plain / published, (more - plain) / _SHARE / published))
    return out


def fragmentation(rows: list[tuple[float, float]]) -> float:
    """Return the share with the least loss."""
    return min(SHARES, key=lambda share: mean(abs(math.log(plain + share * all_)) for plain, all_ in rows))


def main() -> None:
    """Fit all stacks with rows that state memory, and write their constants."""
    lines = [
        "# Bytes that the allocator cannot use, as a share of activations and buffers, by stack",
        "# (algorithms.step.SoftwareStack). Written by validation/fit_memory.py.",
        "",
    ]
    for name, rows in priced_bytes().items():
        if name in stack_names():
            lines.append(f"{name} = {fragmentation(rows):g}")
            print(lines[-1], "from", len(rows), "rows")
    FILE.write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
