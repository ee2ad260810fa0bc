"""Pipelines of torch modules in a lab of hosts with slow NICs: what overlap and eager schedules gain.

    python benchmarks/pipeline_lab.py [--models gpt,u] [--repeat N] [--save NAME]

A GPT and a model in the shape of a U, three stages of two ranks, train on `meshweave.pipeline`. Stages differ in
their layouts, so that what passes between them is resharded; the U has a skip connection over its middle stage.
Variants, in interleaved rounds: all-gather and broadcast resharding without overlap; overlap; eager-1F1B;
eager-1F1B with delayed weight gradients; and the last with messages of one byte, the bound of what any
transfer could reach. Every variant's program is simulated on the lab's description. Calls are paced by their
FLOPs.

A time is from a common start to the end of the last rank, and what counts is the median.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from machine import save

from meshweave.cost.machine import Machine
from meshweave.ir.program import parse
from meshweave.simulate.engine import simulate
from meshweave_lab import Lab, RunningLab

LAB = Path(__file__).parent.parent / "examples" / "labs" / "hosts-3x2.toml"
VARIANTS = (
    ("all-gather, no overlap", "1f1b", "blocking", "global_all_gather"),
    ("broadcast, no overlap", "1f1b", "blocking", "broadcast"),
    ("overlap", "1f1b", "overlapped", "broadcast"),
    ("eager-1F1B", "eager-1f1b", "overlapped", "broadcast"),
    ("eager-1F1B, delayed weight gradients", "eager-1f1b-delayed", "overlapped", "broadcast"),
    ("one-byte signals", "eager-1f1b-delayed", "signals", "broadcast"),
)
"""(name, schedule, transfers, strategy of reshards); the first is the baseline, the last the bound."""
TOLERANCE = 1e-3


def measure(running: RunningLab, lab: Lab, model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of one model, and how the ranks kept time."""
    keys = ("name", "plan", "transfers", "strategy")
    payload = {
        "lab": str(options.lab.resolve()),
        "model": model,
        "variants": [dict(zip(keys, variant, strict=True)) for variant in VARIANTS],
        "micro_batches": options.micro_batches,
        "repeat": options.repeat,
        "deadline_s": 60.0,
    }
    # Steps are paced inside the ranks; what they are compared with is not.
    env = {"PYTHONPATH": str(Path(__file__).parent), "MESHWEAVE_PACE_FLOPS_PER_S": ""}
    ranks = running.launch("pipeline_lab_rank:measure_pipelines", payload, timeout_s=options.timeout, env=env)
    rows = []
    for number, (name, plan, transfers, strategy) in enumerate(VARIANTS):
        runs = [max(run) for run in zip(*(rank["times"][number] for rank in ranks), strict=True)]
        program = parse(ranks[0]["programs"][number])
        simulated_s = simulate(program, Machine.of(lab.cluster(), program)).duration_s
        rows.append(
            {
                "name": name,
                "schedule": plan,
                "transfers": transfers,
                "strategy": strategy,
                "simulated_s": simulated_s,
                "median_s": statistics.median(runs),
                "runs_s": runs,
                "max_relative_error": max(rank["errors"][number] for rank in ranks),
            }
        )
    return {
        "model": model,
        "rows": rows,
        "late_s": max(rank["late_s"] for rank in ranks),
        "pace": [rank["pace"] for rank in ranks],
    }


def print_table(result: dict[str, Any]) -> None:
    """Print the rows of one model."""
    baseline, bound = result["rows"][0], result["rows"][-1]
    for row in result["rows"]:
        off = row["simulated_s"] / row["median_s"] - 1
        print(
            f"{result['model']:4} {row['name']:38} simulated {row['simulated_s']:7.3f} measured "
            f"{row['median_s']:7.3f} ({min(row['runs_s']):.3f} to {max(row['runs_s']):.3f}) {off:+6.1%}  "
            f"x {baseline['median_s'] / row['median_s']:.3f} "
            f"(simulated {baseline['simulated_s'] / row['simulated_s']:.3f})  "
            f"of the bound {bound['median_s'] / row['median_s']:.1%}  error {row['max_relative_error']:.1e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lab", type=Path, default=LAB)
    parser.add_argument("--models", type=lambda text: text.split(","), default=["gpt", "u"])
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=580.0)
    parser.add_argument("--save", help="the name of a file in benchmarks/results, without .json")
    options = parser.parse_args()
    lab = Lab.load(options.lab)
    results = []
    with lab.up() as running:
        for model in options.models:
            results.append(measure(running, lab, model, options))
            print_table(results[-1])
    wrong = [row["name"] for each in results for row in each["rows"] if row["max_relative_error"] > TOLERANCE]
    if wrong:
        sys.exit(f"wrong gradients: {', '.join(wrong)}")
    if options.save:
        result = {
            "lab": lab.description.to_json(),
            "micro_batches": options.micro_batches,
            "models": results,
        }
        print(f"saved {save(options.save, result)}")


if __name__ == "__main__":
    main()
