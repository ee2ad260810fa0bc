"""How long planning takes after import, all mesh shapes and slice counts of every algorithm of the table.

    python benchmarks/planner_speed.py [--save]

Each run is the first one of a fresh process. "num_configs" is how many the search had to choose from once
mesh shapes that cannot win were out, "num_skeletons" how many it built, "num_exact" how many it costed exactly.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from machine import in_fresh_process, save

REPETITIONS = 7
MODEL = "gpt3"
CASES = {"256 chips, all algorithms": (256, 0.5), "65536 chips, all algorithms": (65536, 5.0)}
"""Number of chips of tpu-v4-pod, and the goal in seconds."""

CODE = """
import json, sys, time
from meshweave import load_cluster, load_model
from meshweave.tune import plan_model
from meshweave.describe.model.workload import Workload
from meshweave.tune.product import SearchCounts
chips = int(sys.argv[1])
model, cluster, counts = load_model(sys.argv[2]), load_cluster(f"tpu-v4-pod:{chips}"), SearchCounts()
wall, cpu = time.perf_counter(), time.process_time()
plan = plan_model(model, cluster, Workload(chips // 2, 2048), counts=counts)
row = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, **vars(counts)}
print(json.dumps({**row, "candidates": len(plan.candidates), "best": plan.best.algorithm}))
"""


def run(chips: int) -> dict[str, Any]:
    """One plan in a fresh process."""
    return in_fresh_process(CODE, str(chips), MODEL, timeout_s=300)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/planner_speed.json")
    arguments = parser.parse_args()
    rows = {}
    for name, (chips, goal_s) in CASES.items():
        runs = [run(chips) for _ in range(REPETITIONS)]
        row = {**runs[0], "goal_s": goal_s}
        for key in ("wall_s", "cpu_s"):
            row[key] = statistics.median(found[key] for found in runs)
            row[f"{key}_range"] = [min(found[key] for found in runs), max(found[key] for found in runs)]
        rows[name] = row
        low, high = row["wall_s_range"]
        print(
            f"{name:<28} wall {row['wall_s']:6.3f} s ({low:.3f} to {high:.3f}), cpu {row['cpu_s']:6.3f} s, "
            f"goal {goal_s} s: {'met' if row['wall_s'] <= goal_s else 'missed'}; configs "
            f"{row['num_configs']}, skeletons {row['num_skeletons']}, exact {row['num_exact']}"
        )
    if arguments.save:
        print(save("planner_speed", rows))


if __name__ == "__main__":
    main()
