"""How long `validate` takes per op of a program, all ranks counted.

    python benchmarks/validate_speed.py [--save] [--repetitions N]

Each run is the first one of a fresh process, on a program of which nothing is cached. Times are of the processor,
so that other work on the machine counts for less. "python_us" is the proof in Python alone, "us" what `validate`
takes by default.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from machine import in_fresh_process, save

REPETITIONS = 5
GOAL_US = 10.0
CASES: dict[str, tuple[Any, ...]] = {
    "meshslice, 4x4": ("matmul2d", "meshslice", (4, 4), 8),
    "meshslice, 16x16": ("matmul2d", "meshslice", (16, 16), 8),
    "collective, 4x4": ("matmul2d", "collective", (4, 4), 1),
    "universal, 16 ranks": ("universal", 128, 16),
    "reshard of llama-2-7b, 8x8 to 4x2": ("reshard", "llama-2-7b", (8, 8), (4, 2)),
    "1F1B, 64 micro-batches": ("pipeline", 64),
}
"""A family and what it makes a program of."""

CODE = """
import json, sys, time
from dataclasses import fields
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program

def make(kind, *of):
    if kind == "matmul2d":
        from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem
        from meshweave.algorithms.table import PRODUCTS_2D
        name, shape, slices = of
        problem = Matmul2dProblem(128, 128, 128, tuple(shape), "os")
        return PRODUCTS_2D[name].program(problem, Matmul2dConfig((1,) * slices, 1))
    if kind == "universal":
        from meshweave.algorithms.universal import UniversalConfig, UniversalProblem, universal_program
        from meshweave.describe.layout.grid import column_block, cyclic, row_block
        size, ranks = of
        layouts = row_block(ranks), column_block(ranks), column_block(ranks)
        return universal_program(UniversalProblem(size, size, size, *layouts), UniversalConfig("b"))
    if kind == "reshard":
        from meshweave.algorithms.reshard import ReshardProblem, TensorMove, plan_reshard, reshard_program
        from meshweave.cost.fabric import HostTopology
        from meshweave.describe.layout.mesh import Mesh
        from meshweave.describe.machine.cluster import load_cluster
        from meshweave.describe.model import load_model
        from meshweave.describe.model.state_dict import llama_parameters, server_layout, trainer_layout
        name, trainer, server = of
        src = Mesh.of("trainer", tuple(trainer), ("fsdp", "tp"))
        dst = Mesh.of("server", tuple(server), ("replica", "tp"), src.num_ranks)
        cluster = load_cluster("dgx-h100").with_chips(-(-(src.num_ranks + dst.num_ranks) // 8) * 8)
        moves = tuple(
            TensorMove(one.name, one.shape, "bfloat16", trainer_layout(one, src), server_layout(one, dst))
            for one in llama_parameters(load_model(name))
        )
        return reshard_program(plan_reshard(ReshardProblem(moves), HostTopology.of(cluster)))
    from meshweave.algorithms.pipeline import OneForwardOneBackward, PipelineConfig
    from meshweave.algorithms.pipeline.examples import chain_of_ranks
    return OneForwardOneBackward().program(chain_of_ranks((0, 1), of[0], 4), PipelineConfig())

made = make(*json.loads(sys.argv[1]))
row = {}
for key, native in (("us", True), ("python_us", False)):
    program = Program(**{item.name: getattr(made, item.name) for item in fields(made)})
    began = time.process_time()
    proof = validate(program, native=native)
    row[key] = time.process_time() - began
row["ops"] = sum(len(ops) for ops in program.ops_by_rank.values())
row["skipped"] = list(proof.skipped)
for key in ("us", "python_us"):
    row[key] *= 1e6 / row["ops"]
print(json.dumps(row))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, help="runs of each case")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/validate_speed.json")
    arguments = parser.parse_args()
    rows = {}
    for name, case in CASES.items():
        runs = [in_fresh_process(CODE, json.dumps(case), timeout_s=600) for _ in range(arguments.repetitions)]
        row = rows[name] = {**runs[0], "goal_us": GOAL_US}
        for key in ("us", "python_us"):
            row[key] = statistics.median(run[key] for run in runs)
            row[f"{key}_range"] = [min(run[key] for run in runs), max(run[key] for run in runs)]
        low, high = row["us_range"]
        goal = "met" if row["us"] <= GOAL_US else "missed"
        print(
            f"{name:<34} {row['ops']:>7} ops, {row['us']:7.2f} us an op ({low:.2f} to {high:.2f}), "
            f"in Python alone {row['python_us']:7.2f}; goal {GOAL_US}: {goal}"
        )
        for note in row["skipped"]:
            print(f"    not proved: {note}")
    if arguments.save:
        print(save("validate_speed", rows))


if __name__ == "__main__":
    main()
