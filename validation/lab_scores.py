"""What was measured in labs, predicted again with the models of today.

A lab runs for hours, and what it measured stays; what `plan` and `simulate` say of the same runs is computed anew,
so that a change of them shows. A lab is described as when it ran, with the constants that it was calibrated to.
That of reshards, which is not calibrated, is the file in `examples/labs`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "benchmarks"))

import block_lab  # noqa: E402
import lab_fidelity_again  # noqa: E402
import reshard_lab  # noqa: E402
import step_lab  # noqa: E402
from reshard_rank import problem_of  # noqa: E402
from step_lab_rank import calibrated  # noqa: E402

from meshweave.algorithms.reshard import plan_reshard  # noqa: E402
from meshweave.cost.fabric import HostTopology  # noqa: E402
from meshweave.describe.machine.cluster import load_cluster  # noqa: E402
from meshweave_lab import Lab  # noqa: E402
from meshweave_lab.description import LabDescription  # noqa: E402

Errors = dict[str, float]
"""Of each run, predicted over measured, less one."""
BLOCKS = ("block_lab_torus", "block_lab_two_groups", "block_lab_bridged_pairs")
RESHARDS = {
    "reshard_cases": reshard_lab.cases,
    "reshard_one_to_many": reshard_lab.one_to_many,
    "reshard_lab_llama": reshard_lab.llama,
}


def lab_scores() -> Iterator[tuple[str, Errors]]:
    """Yield the errors of each lab, estimates and simulations apart."""
    yield from products()
    yield from steps()
    for name in BLOCKS:
        yield from blocks(name)
    for name in RESHARDS:
        yield reshards(name)


def products() -> Iterator[tuple[str, Errors]]:
    """Yield the errors of 2D products on a torus."""
    saved = json.loads((RESULTS / "lab_fidelity.json").read_text())
    again = lab_fidelity_again.predicted_again(saved, load_cluster(str(RESULTS / "torus-4x4-50mbit.toml")))
    for what in ("estimate", "simulation"):
        rows = {f"{row['number']}: {row['title']}": row[f"{what}_error"] for row in again["cases"]}
        yield f"{saved['lab']}, products, {what}", rows


def steps() -> Iterator[tuple[str, Errors]]:
    """Yield the errors of whole training steps."""
    saved = _saved("step_lab")
    assert (saved["model"], saved["batch"], saved["seq"]) == (step_lab.MODEL, step_lab.BATCH, step_lab.SEQ)
    made = step_lab.predicted(calibrated(_lab(saved).cluster(), saved["constants"]))
    predicted = {
        step_lab.name_of(fields): {"estimate": step.time_s, "simulation": simulated_s}
        for fields, (step, simulated_s) in zip(step_lab.CASES, made, strict=True)
    }
    assert predicted.keys() >= {row["name"] for row in saved["rows"]}
    yield from _apart(f"{saved['lab']['name']}, training steps", saved["rows"], predicted)


def blocks(name: str) -> Iterator[tuple[str, Errors]]:
    """Yield the errors of layers. Where another configuration is the best of its strategy today, a row is gone."""
    saved = _saved(name)
    lab = _lab(saved)
    constants = block_lab.Constants(**saved["constants"])
    sizes = (saved["problem"][size] for size in ("batch", "sequence", "hidden", "heads"))
    problem = block_lab.problem_of(list(sizes))
    cluster = block_lab.with_constants(lab.cluster(), constants, lab.num_ranks)
    predicted = {
        block_lab.name_of(entry): {"estimate": entry.estimate.total_s, "simulation": entry.seconds}
        for entry in block_lab.planned(cluster, problem)
    }
    yield from _apart(f"{saved['lab']['name']}, layers", saved["rows"], predicted)


def reshards(name: str) -> tuple[str, Errors]:
    """Return the errors of the closed form of reshards."""
    saved = _saved(name)
    lab = Lab.load(reshard_lab.LAB)
    network = HostTopology.of(lab.cluster())
    options = argparse.Namespace(
        shape=saved["shape"], width=256, strategies=reshard_lab.STRATEGIES, only=list(reshard_lab.CASES)
    )
    settings = {setting["name"]: setting for setting in RESHARDS[name](options)}
    errors = {}
    for row in saved["rows"]:
        problem = problem_of(settings[row["setting"]])
        plan = plan_reshard(problem, network, strategy=row["strategy"], order=row["order"])
        title = f"{row['setting']}, {row['strategy']}, {row['order']}"
        errors[title] = plan.predicted_s / row["median_s"] - 1
    return f"{lab.description.name}, {name.replace('_', ' ')}, estimate", errors


def _apart(title: str, rows: list[dict[str, Any]], predicted: dict[str, Any]) -> Iterator[tuple[str, Errors]]:
    """Yield the errors of estimates, and of simulations, of the rows that are predicted by name."""
    for what in ("estimate", "simulation"):
        named = ((row["name"], row["median_s"]) for row in rows if row["name"] in predicted)
        yield f"{title}, {what}", {row: predicted[row][what] / median_s - 1 for row, median_s in named}


def _saved(name: str) -> dict[str, Any]:
    rows: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return rows


def _lab(saved: dict[str, Any]) -> Lab:
    """Return the lab that was measured, whose rates may since be others."""
    return Lab(TypeAdapter(LabDescription).validate_python(saved["lab"]))


if __name__ == "__main__":
    for group, errors in lab_scores():
        print(group, sorted(errors.items()))
