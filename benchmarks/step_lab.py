"""Training steps in a lab of 16 ranks: data, pipeline and tensor parallelism, beside what the plan says.

    python benchmarks/step_lab.py [--lab LAB.toml] [--cases 0,3] [--repeat N] [--save NAME]

First the lab is calibrated: small and large all-gathers as rings of steps, all-reduces of the transport and
messages, inside hosts and between them, with products beside them. They give a rate and latencies for both kinds
of links. With these `step_of` estimates a step of each configuration, and `simulate_step` simulates it. Then each
is run, as the Program of the step over gloo: forward and backward parts of all micro-batches, messages of the
pipeline, reductions of gradients, and Adam. Products, norms, attention, activations, losses and the optimizer are
paced.

The first step of each configuration is compared with one process: loss, and weights after it. A time is
from a common start to the end of the last rank, and what counts is the median.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from machine import RESULTS, save
from step_lab_rank import ADAM, calibrated, parallelism_of

from meshweave.algorithms.step import Step, StepProblem, simulate_step, step_of
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.model import Transformer
from meshweave_lab import Lab, RunningLab
from meshweave_lab.fork_server import fork_servers
from meshweave_lab.step_reference import random_batches, random_weights, reference_steps

LAB = Path(__file__).parent.parent / "examples" / "labs" / "hosts-4x4.toml"
APART = 0.08
"""Two measured times count as different where they are further apart than this share of the smaller one."""
TOLERANCE = 1e-3
"""The largest difference of a weight after one step, in learning rates, and of the loss, as a share of it."""

MODEL: dict[str, Any] = {
    "name": "gpt-small-lab",
    "num_layers": 4,
    "hidden": 128,
    "num_heads": 8,
    "num_kv_heads": 8,
    "head_dim": 16,
    "ffn_hidden": 512,
    "vocab_size": 512,
    "gated_ffn": False,
    "source": "a GPT small enough for 16 ranks on two cores",
    "tied_embeddings": False,
}
BATCH, SEQ = 32, 128
CASES: tuple[dict[str, Any], ...] = (
    {"data": 16},
    {"data": 4, "tensor": 4, "strategy": "megatron", "micro_batch": 4},
    {"data": 4, "pipeline": 4, "micro_batch": 1},
    {"data": 2, "pipeline": 2, "tensor": 4, "strategy": "megatron", "micro_batch": 4},
    {"data": 4, "pipeline": 2, "tensor": 2, "strategy": "megatron", "micro_batch": 2, "zero": 1},
    {"data": 4, "pipeline": 4, "micro_batch": 2, "schedule": "gpipe"},
    {"data": 2, "tensor": 8, "strategy": "megatron", "micro_batch": 8},
    {"data": 4, "tensor": [2, 2], "strategy": "meshslice_block", "micro_batch": 4},
    {"data": 8, "pipeline": 2, "micro_batch": 1, "virtual_stages": 2},
    {"data": 4, "tensor": [2, 2], "strategy": "atp", "micro_batch": 4},
    {"data": 16, "zero": 1},
    {"data": 4, "tensor": 4, "strategy": "megatron_sp", "micro_batch": 4},
)
"""The configurations, as fields of `Parallelism`."""


def name_of(fields: Mapping[str, Any]) -> str:
    """Return the words for a configuration in tables."""
    p = parallelism_of(fields)
    tensor = "x".join(map(str, p.tensor)) if isinstance(p.tensor, tuple) else str(p.tensor)
    words = [f"dp {p.data}, pp {p.pipeline}, tp {tensor}"]
    if p.tensor_size > 1:
        words.append(p.strategy)
    if p.pipeline > 1:
        words.append("interleaved" if p.virtual_stages > 1 else p.schedule)
    words.append(f"micro-batches of {p.micro_batch}")
    words += [f"ZeRO-{p.zero}"] if p.zero else []
    words += [f"order {' '.join(p.order)}"] if "order" in fields else []
    return ", ".join(words)


# --- what the plan says -------------------------------------------------------------------------------------


def predicted(cluster: Cluster) -> list[tuple[Step, float]]:
    """Return each configuration's step with its estimate, and the seconds of its simulation."""
    problem = StepProblem(Transformer(**MODEL), cluster, BATCH, SEQ, "float32", overlap="layers")
    out = []
    for fields in CASES:
        step = step_of(problem, parallelism_of(fields))
        out.append((step, simulate_step(step).time_s))
    return out


# --- what is measured ---------------------------------------------------------------------------------------


def measure(
    running: RunningLab, options: argparse.Namespace, cases: list[int], before: Mapping[str, Any]
) -> dict[str, Any]:
    """Return medians and constants of the calibration, and the measured part of each configuration's row."""
    problem = StepProblem(Transformer(**MODEL), running.description.cluster(), BATCH, SEQ, "float32")
    weights, batches = random_weights(problem), random_batches(problem, 1)
    expected = reference_steps(problem, weights, batches, ADAM)
    (tokens, targets), (loss,) = batches[0], expected.losses
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "arrays.npz"
        named = {f"before {name}": value for name, value in weights.items()}
        named |= {f"after {name}": value for name, value in expected.weights.items()}
        np.savez(file, **named, tokens=tokens, targets=targets)
        payload = {
            "lab": str(options.lab.resolve()),
            "constants": before.get("constants", {}),
            "medians": before.get("calibration", {}),
            "model": MODEL,
            "batch": BATCH,
            "seq": SEQ,
            "cases": [CASES[number] for number in cases],
            "repeat": options.repeat,
            "arrays": str(file),
            "deadline_s": 60.0,
            "until": time.monotonic() + options.within,
        }
        # Steps are paced inside the ranks.
        env = {"PYTHONPATH": str(Path(__file__).parent), "MESHWEAVE_PACE_FLOPS_PER_S": ""}
        target = "step_lab_rank:measure_steps"
        ranks = running.launch(target, payload, timeout_s=options.timeout, env=env)
    rows = []
    for number in range(len(ranks[0]["rows"])):
        own = [rank["rows"][number] for rank in ranks]
        runs = [max(run) for run in zip(*(rank["times"] for rank in own), strict=True)]
        rows.append(
            {
                "median_s": statistics.median(runs),
                "runs_s": runs,
                "loss_error": abs(sum(rank["loss"] for rank in own) / loss - 1),
                "weight_error": max(rank["difference"] for rank in own) / ADAM.lr,
                "num_overruns": sum(rank["overruns"][0] for rank in own),
                "overrun_s": max(rank["overruns"][1] for rank in own) / options.repeat,
                "late_s": max(rank["late_s"] for rank in own),
            }
        )
    return {**ranks[0], "rows": rows}


# --- verdicts -----------------------------------------------------------------------------------------------


def verdicts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how far estimate and simulation are from what was measured, and which pairs they order otherwise."""
    pairs = []
    for a, b in itertools.combinations(rows, 2):
        faster, slower = sorted((a, b), key=lambda row: row["median_s"])
        if slower["median_s"] > (1 + APART) * faster["median_s"]:
            pairs.append((faster, slower))
    out: dict[str, Any] = {"apart": APART, "pairs_apart": len(pairs)}
    for reading in ("estimated_s", "simulated_s"):
        errors = [row[reading] / row["median_s"] - 1 for row in rows]
        out[reading] = {
            "mean_error": statistics.fmean(map(abs, errors)),
            "worst_error": max(errors, key=abs),
            "within": sum(abs(error) <= APART for error in errors),
            "pairs_missed": [(a["name"], b["name"]) for a, b in pairs if a[reading] >= b[reading]],
        }
    return out


def wrong_rows(rows: list[dict[str, Any]]) -> list[str]:
    """Return the names of the configurations whose loss or weights are off, or are no numbers."""
    return [
        row["name"]
        for row in rows
        if not all(row[which] <= TOLERANCE for which in ("loss_error", "weight_error"))
    ]


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print rows and verdicts."""
    for row in sorted(rows, key=lambda row: row["median_s"]):
        off = [row[reading] / row["median_s"] - 1 for reading in ("estimated_s", "simulated_s")]
        print(
            f"{row['name']:66} estimate {row['estimated_s']:.3f} ({off[0]:+6.1%}) simulated "
            f"{row['simulated_s']:.3f} ({off[1]:+6.1%}) measured {row['median_s']:.3f} "
            f"({min(row['runs_s']):.3f} to {max(row['runs_s']):.3f}) loss {row['loss_error']:.0e} weights "
            f"{row['weight_error']:.0e} overruns {row['num_overruns']} ({1e3 * row['overrun_s']:.0f} ms)"
        )
    said = verdicts(rows)
    for reading in ("estimated_s", "simulated_s"):
        one = said[reading]
        print(
            f"{reading}: mean error {one['mean_error']:.1%}, worst {one['worst_error']:+.1%}, {one['within']} of "
            f"{len(rows)} within {APART:.0%}; {len(one['pairs_missed'])} of {said['pairs_apart']} pairs in "
            "another order"
        )
        for faster, slower in one["pairs_missed"]:
            print(f"    measured faster: {faster}; than {slower}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lab", type=Path, default=LAB)
    parser.add_argument("--cases", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument(
        "--within", type=float, default=330.0, help="seconds after which no configuration begins"
    )
    parser.add_argument("--timeout", type=float, default=580.0)
    parser.add_argument(
        "--save", nargs="?", const="step_lab", help="a file in benchmarks/results, without .json"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep calibration and other rows of the saved file"
    )
    options = parser.parse_args()
    if options.resume and not options.save:
        parser.error("--resume goes on with a saved file; name it with --save")
    lab = Lab.load(options.lab)
    cases = options.cases or list(range(len(CASES)))
    before: dict[str, Any] = {}
    if options.resume:
        before = json.loads((RESULTS / f"{options.save}.json").read_text())["rows"]
    with lab.up() as running, fork_servers(("meshweave_lab.step_run", "meshweave_lab.pace")):
        measured = measure(running, options, cases, before)
    constants = measured["constants"]
    steps = predicted(calibrated(lab.cluster(), constants))
    rows = []
    for number, row in zip(cases, measured["rows"], strict=False):
        step, simulated_s = steps[number]
        names = {"name": name_of(CASES[number]), "parallelism": CASES[number], "constants": constants}
        rows.append({**names, "estimated_s": step.time_s, "simulated_s": simulated_s, **row})
    if options.resume:
        again = {row["name"] for row in rows}
        rows += [row for row in before["rows"] if row["name"] not in again]
    print_table(rows)
    result = {
        "lab": lab.description.to_json(),
        "model": MODEL,
        "batch": BATCH,
        "seq": SEQ,
        "constants": constants,
        "calibration": measured["medians"],
        "rows": rows,
        "verdicts": verdicts(rows),
    }
    wrong = wrong_rows(rows)
    if wrong:
        sys.exit(f"wrong results: {'; '.join(wrong)}")
    if options.save:
        print(f"saved {save(options.save, result)}")


if __name__ == "__main__":
    main()
