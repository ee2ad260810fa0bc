"""How long the search of a training step takes after import: its whole space, and the first answer.

    python benchmarks/step_planner_speed.py [--save]

Each run is the first one of a fresh process. "first_s" is when the first configuration that fits was priced,
"memory_mb" the most that the process held.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from machine import in_fresh_process, save

REPETITIONS = 3
CASES = {
    "GPT-3, 512 chips": (("gpt3", "dgx-h100:512", "1536", "2048"), 5.0),
    "Llama-3.1-405B, 16384 chips": (("llama-3.1-405b", "dgx-h100:16384", "2048", "8192"), 20.0),
}
"""Model, cluster, batch and sequence, and the goal in seconds."""

CODE = """
import json, resource, sys, time
from meshweave import load_cluster, load_model
from meshweave.algorithms import StepProblem
from meshweave.tune.step_search import StepSearch, StepSpace
model, cluster, batch, seq = sys.argv[1:5]
problem = StepProblem(load_model(model), load_cluster(cluster), int(batch), int(seq))
search = StepSearch(StepSpace(problem), problem.cluster.chip.memory_bytes)
wall, cpu, first = time.perf_counter(), time.process_time(), []
def note(done, total):
    if search.rows and not first:
        first.append(time.perf_counter() - wall)
search.progress = note
ranking = search.ranking()
row = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "first_s": first[0]}
best = ranking.rows[0]
row |= {"memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, **vars(ranking.count)}
print(json.dumps({**row, "best_s": best.time_s, "mfu": best.step.mfu, "best": str(best.parallelism)}))
"""


def run(arguments: tuple[str, ...]) -> dict[str, Any]:
    """One search in a fresh process."""
    return in_fresh_process(CODE, *arguments, timeout_s=300)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/step_planner_speed.json"
    )
    arguments = parser.parse_args()
    rows = {}
    for name, (case, goal_s) in CASES.items():
        runs = [run(case) for _ in range(REPETITIONS)]
        row = {**runs[0], "goal_s": goal_s}
        for key in ("wall_s", "cpu_s", "first_s"):
            row[key] = statistics.median(each[key] for each in runs)
            row[f"{key}_range"] = [min(each[key] for each in runs), max(each[key] for each in runs)]
        rows[name] = row
        print(
            f"{name:<28} wall {row['wall_s']:6.2f} s, cpu {row['cpu_s']:6.2f} s, first {row['first_s']:.2f} s, "
            f"{row['memory_mb']} MB, goal {goal_s} s: {'met' if row['wall_s'] <= goal_s else 'missed'}"
        )
    if arguments.save:
        print(save("step_planner_speed", rows))


if __name__ == "__main__":
    main()
