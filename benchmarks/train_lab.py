"""Layers of a user's model in a lab of 8 ranks: the planned strategy, Megatron 1D and torch's own, and the plan.

    python benchmarks/train_lab.py examples/labs/two-groups-8.toml [--repeat N] [--save NAME]

The lab is calibrated as in `block_lab.py`, and strategies are ranked by layers whose sites run one by one. What
the plan says is best is then put into a plain model of torch by `mw.parallelize`, and so is Megatron 1D, with and
without sequence parallelism; PyTorch's `parallelize_module` with sequence parallelism runs in the same rounds. A
step is forward and backward through all layers. Products, attention, norms and activations are paced at the lab's
rate.

A time is from a common start to the end of the last rank, and what counts is the median. Predicted is the
simulated time of the programs that the model runs, one after another, and of the products beside them. What the
plan estimates is beside it. The bytes that the programs of a step moved are compared
with those of the strategy's program, and losses with each other.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from block_lab import TORCH, Constants, calibrate, lab_parser, planned, problem_of, with_constants
from machine import save

from meshweave.algorithms.block import BlockProblem
from meshweave.tune.ranking import RankedConfig
from meshweave_lab import Lab, RunningLab
from meshweave_lab.fork_server import fork_servers
from meshweave_studies.blocks.ranking import mesh_of

GOAL = 0.08
"""How far a measured step may be from the predicted one."""
MEGATRON = ("megatron", "megatron_sp")


def chosen(entries: list[RankedConfig]) -> list[RankedConfig]:
    """Return what the plan says is fastest, and Megatron 1D with and without sequence parallelism."""
    two_axes = [entry for entry in entries if mesh_of(entry)[1] > 1]
    wanted = [entries[0], *two_axes[:1]]
    for name in MEGATRON:
        wanted.append(next(entry for entry in reversed(entries) if entry.algorithm.name == name))
    return [entry for place, entry in enumerate(wanted) if entry not in wanted[:place]]


def measure(
    running: RunningLab,
    problem: BlockProblem,
    entries: list[RankedConfig],
    constants: Constants,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Return the rows of the table: strategies, then torch."""
    payload = {
        "lab": str(options.lab.resolve()),
        "constants": asdict(constants),
        "problem": asdict(problem),
        "layers": options.layers,
        "strategies": [
            {"algorithm": entry.algorithm.name, "mesh": mesh_of(entry), "config": asdict(entry.config)}
            for entry in entries
        ],
        "repeat": options.repeat,
        "flops_per_s": running.description.flops_per_s,
        "deadline_s": 60.0,
    }
    env = {"PYTHONPATH": str(Path(__file__).parent), "MESHWEAVE_PACE_FLOPS_PER_S": ""}
    ranks = running.launch("train_lab_rank:measure_models", payload, timeout_s=options.timeout, env=env)
    rows = []
    for number, entry in enumerate([*entries, None]):
        runs = [max(run) for run in zip(*(rank["times"][number] for rank in ranks), strict=True)]
        row: dict[str, Any] = {"name": TORCH, "median_s": statistics.median(runs), "runs_s": runs}
        if entry is not None:
            mesh = mesh_of(entry)
            row |= {
                "name": f"{entry.algorithm.name} {mesh[0]}x{mesh[1]}, {entry.config}",
                "planned_s": options.layers * entry.seconds,
                "predicted_s": ranks[0]["predicted"][number],
                "loss": ranks[0]["losses"][number],
                "moved_bytes": [rank["moved"][number] for rank in ranks],
                "program_bytes": [rank["expected"][number] for rank in ranks],
            }
        rows.append(row)
    rows[0]["overrun_s"] = max(rank["overruns"][1] for rank in ranks)
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the rows."""
    first = rows[0]
    for row in sorted(rows, key=lambda row: row["median_s"]):
        predicted = ""
        if "predicted_s" in row:
            off = row["median_s"] / row["predicted_s"] - 1
            moved, said = sum(row["moved_bytes"]), sum(row["program_bytes"])
            predicted = (
                f"predicted {row['predicted_s']:.3f} ({off:+.1%}), planned {row['planned_s']:.3f}; bytes "
                f"{moved} of {said}"
            )
        print(
            f"{row['name']:46} measured {row['median_s']:.3f} ({min(row['runs_s']):.3f} to "
            f"{max(row['runs_s']):.3f}) {row['median_s'] / first['median_s']:.3f} of the planned {predicted}"
        )


def main() -> None:
    """Measure in a lab, print a table and save it."""
    parser = lab_parser(__doc__, repeat=3, timeout_s=280)
    parser.add_argument("--layers", type=int, default=1)
    options = parser.parse_args()
    problem = problem_of(options.sizes)
    # Element-wise kernels of torch are not paced, so that none of them has a rate of its own here.
    lab = Lab(replace(Lab.load(options.lab).description, call_flops_per_s=()))
    preload = ("meshweave.nn.parallel.parallelize", "meshweave_lab.pace", "torch.distributed.tensor.parallel")
    with lab.up() as running, fork_servers(preload):
        constants = calibrate(running, lab.cluster(), 2)
        print(constants, file=sys.stderr)
        entries = chosen(planned(with_constants(lab.cluster(), constants, lab.num_ranks), problem, "sites"))
        rows = measure(running, problem, entries, constants, options)
    print_table(rows)
    losses = [row["loss"] for row in rows if "loss" in row]
    if not all(abs(loss - losses[0]) <= 1e-3 for loss in losses):  # also where one is no number
        sys.exit(f"losses differ: {losses}")
    if options.save:
        result = {
            "lab": lab.description.to_json(),
            "problem": asdict(problem),
            "layers": options.layers,
            "goal": GOAL,
            "constants": asdict(constants),
            "rows": rows,
        }
        print(f"saved {save(options.save, result)}")


if __name__ == "__main__":
    main()
