"""How long a pipeline of 64 stages and 1024 micro-batches takes to be written, proved and simulated.

    python benchmarks/pipeline_speed.py [--save] [--repetitions N] [--stages P] [--micro-batches M]

Each run is the first one of a fresh process. Seconds are of the wall clock, by step: the schedule, its Program,
the proof that it ends and computes what is declared (`validate`), and the simulation of all ranks, on hosts of
eight chips.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from machine import in_fresh_process, save

REPETITIONS = 3
STAGES, MICRO_BATCHES = 64, 1024
GOAL_S = 10.0
"""For the slowest of a schedule's runs: written, proved and simulated."""
SCHEDULES = ("1f1b", "eager-1f1b", "eager-1f1b-delayed", "interleaved-1f1b")
STEPS = ("schedule", "program", "proof", "simulation")

CODE = """
import json, sys, time
from meshweave.algorithms.pipeline import ENTRIES, Edge, PartCost, PipelineConfig, PipelineProblem, Stage, Stash
from meshweave.algorithms.pipeline import pipeline_program
from meshweave.cost.machine import Machine
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import load_cluster
from meshweave.ir.analysis.validate import validate
from meshweave.simulate import simulate

name, stages, count = json.loads(sys.argv[1])
entry = next(entry for entry in ENTRIES if entry.name == name)
ranks = stages // 2 if name.startswith("interleaved") else stages
meshes = [Mesh(f"p{rank}", (1,), ("x",), (rank,)) for rank in range(ranks)]
part = PartCost(10**12)
held = tuple(Stage(meshes[n % ranks], part, part, part, stash=Stash(10**6, 10**6)) for n in range(stages))
edges = tuple(Edge(n, n + 1, (1024, 4096), dtype="bfloat16") for n in range(stages - 1))
problem = PipelineProblem(held, edges, count)
config = PipelineConfig(delay=1)
row, at = {}, time.perf_counter()

def lap(step):
    global at
    now = time.perf_counter()
    row[step], at = now - at, now

schedule = entry.schedule(problem, config)
lap("schedule")
program = pipeline_program(problem, schedule)
lap("program")
validate(program)
lap("proof")
cluster = load_cluster("dgx-a100").with_chips(-(-ranks // 8) * 8)
result = simulate(program, Machine.of(cluster, program))
lap("simulation")
row["ops"] = result.num_ops
print(json.dumps(row))
"""


def main() -> None:
    """Measure, print and perhaps save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--stages", type=int, default=STAGES)
    parser.add_argument("--micro-batches", type=int, default=MICRO_BATCHES)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in SCHEDULES:
        case = json.dumps([name, arguments.stages, arguments.micro_batches])
        runs = [in_fresh_process(CODE, case, timeout_s=600) for _ in range(arguments.repetitions)]
        totals = [sum(run[step] for step in STEPS) for run in runs]
        row = {
            "schedule": name,
            "stages": arguments.stages,
            "micro_batches": arguments.micro_batches,
            "ops": runs[0]["ops"],
            **{f"{step}_s": statistics.median(run[step] for run in runs) for step in STEPS},
            "goal_s": GOAL_S,
            "repetitions": arguments.repetitions,
            "total_s": statistics.median(totals),
            "slowest_s": max(totals),
        }
        rows.append(row)
        steps = ", ".join(f"{step} {row[f'{step}_s']:.2f}" for step in STEPS)
        print(f"{name}: {row['total_s']:.2f} s ({steps}), {row['ops']} ops")
    if arguments.save:
        print(save("pipeline_speed", rows))


if __name__ == "__main__":
    main()
