"""How far the closed forms of transformer blocks are from their simulation with contention.

    python benchmarks/block_estimates.py [--save]

Every strategy on every mesh of each machine, forward and backward, with its fastest config by estimate. "error" is
estimate over simulation, less one: below 0 where the simulation met contention, of which the closed form knows
nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from machine import save

import meshweave as mw
from meshweave.algorithms.block import BlockProblem
from meshweave.describe.model.workload import Workload
from meshweave.tune.ranking import solvers
from meshweave_studies.blocks.ranking import block_machine

GOAL = 0.04
MAX_OPS = 300_000
CASES = (
    ("gpt3", "tpu-v4-pod:16", 4, 2048),
    ("gpt3", "tpu-v4-pod:64", 16, 2048),
    ("llama-2-7b", "dgx-h100:8", 4, 4096),
    ("llama-3-70b", "dgx-h100:32", 8, 4096),
    ("llama-2-7b", "atp-ic1", 4, 2048),
    ("gpt3", "atp-ic2", 4, 2048),
    ("llama-2-13b", "atp-ic3", 4, 2048),
    ("llama-2-13b", "atp-ic4", 4, 2048),
)
"""Model, cluster, sequences in the batch, tokens of a sequence."""


def rows_of(model: str, cluster_name: str, batch: int, sequence: int) -> list[dict[str, Any]]:
    """Return one row per strategy and mesh of a machine."""
    cluster, shape = mw.load_cluster(cluster_name), mw.load_model(model)
    chips = cluster.num_chips
    rows = []
    for first in (n for n in range(1, chips + 1) if chips % n == 0):
        problem = BlockProblem.of(shape, Workload(batch, sequence, "bfloat16"), (first, chips // first))
        try:
            machine = block_machine(cluster, problem.mesh_shape)
        except mw.MeshweaveError:
            continue
        for name, entry in solvers(problem).items():
            if entry.refusal(problem) is not None:
                continue
            timed = [(entry.estimate(problem, config, machine).total_s, str(config), config)
                     for config in entry.candidates(problem, cluster)]  # fmt: skip
            if not timed:
                continue
            estimated, text, config = min(timed, key=lambda item: item[:2])
            program = entry.program(problem, config)
            if sum(len(ops) for ops in program.expanded.ops_by_rank.values()) > MAX_OPS:
                continue
            simulated = mw.simulate(program, machine).duration_s
            error = estimated / simulated - 1
            rows.append(
                {"model": model, "cluster": cluster_name, "strategy": name, "mesh": list(problem.mesh_shape)}
                | {"config": text, "estimate_s": estimated, "simulation_s": simulated, "error": error}
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/block_estimates.json")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case in CASES:
        began = time.perf_counter()
        made = rows_of(*case)
        rows += made
        errors = [abs(row["error"]) for row in made]
        worst = max(made, key=lambda row: abs(row["error"]))
        print(
            f"{case[0]:<12} {case[1]:<14} {len(made):>3} rows, mean |error| {statistics.mean(errors):6.2%}, "
            f"largest {worst['error']:+.1%} ({worst['strategy']} {worst['mesh']}), "
            f"{time.perf_counter() - began:.0f} s"
        )
    errors = [abs(row["error"]) for row in rows]
    mean = statistics.mean(errors)
    print(
        f"all: {len(rows)} rows, mean |error| {mean:.2%}, goal {GOAL:.0%}: {'met' if mean <= GOAL else 'missed'}"
    )
    if arguments.save:
        print(save("block_estimates", {"goal": GOAL, "mean_error": mean, "rows": rows}))


if __name__ == "__main__":
    main()
