"""How long it takes to plan the move of a whole state dict, and what the plan says of it.

    python benchmarks/reshard_llama.py [--save]

Llama weights in bfloat16 from FSDP x TP to replicas x TP on hosts of dgx-h100, as in `meshweave reshard MODEL`.
Each run is the first one of a fresh process: "plan" is the schedule, "program" its statements for all ranks. Time
and memory of the move are the plan's own, with a simulation beside them where the program is not too large.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from machine import in_fresh_process, save

REPETITIONS = 5
CASES = {
    "llama-2-7b, 8x8 to 4x2": ("llama-2-7b", (8, 8), (4, 2), 5.0),
    "llama-2-70b, 8x8 to 2x8": ("llama-2-70b", (8, 8), (2, 8), None),
    "llama-3.1-405b, 16x8 to 4x8": ("llama-3.1-405b", (16, 8), (4, 8), None),
}
"""Model, trainer's mesh, server's mesh, and the goal in seconds for plan and program together."""
MAX_SIMULATED_OPS = 600_000

CODE = """
import json, sys, time
from meshweave.algorithms.reshard import ReshardProblem, TensorMove, plan_reshard, reshard_program
from meshweave.cost.fabric import HostTopology
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.model import load_model
from meshweave.describe.model.state_dict import llama_parameters, server_layout, trainer_layout

name, trainer, server, most = json.loads(sys.argv[1])
model = load_model(name)
src = Mesh.of("trainer", tuple(trainer), ("fsdp", "tp"))
dst = Mesh.of("server", tuple(server), ("replica", "tp"), src.num_ranks)
cluster = load_cluster("dgx-h100").with_chips(-(-(src.num_ranks + dst.num_ranks) // 8) * 8)
network = HostTopology.of(cluster)
began = time.perf_counter()
problem = ReshardProblem(
    tuple(
        TensorMove(one.name, one.shape, "bfloat16", trainer_layout(one, src), server_layout(one, dst))
        for one in llama_parameters(model)
    )
)
plan = plan_reshard(problem, network)
planned = time.perf_counter()
program = reshard_program(plan)
done = time.perf_counter()
peaks = {rank: (plan.local_bytes(rank), plan.scratch_bytes(rank)) for rank in problem.ranks}
rank = max(peaks, key=lambda one: sum(peaks[one]))
row = {
    "plan_s": planned - began, "program_s": done - planned, "wall_s": done - began,
    "tensors": len(problem.moves), "unit_tasks": len(plan.tasks), "turns": len(plan.multicasts),
    "pieces": sum(len(task.pieces) for task in plan.tasks), "messages": plan.num_messages,
    "ops": len(program.body), "bound_s": plan.bound_s, "predicted_s": plan.predicted_s,
    "bytes_across_hosts": plan.bytes_across_hosts, "least_bytes_across_hosts": plan.least_bytes_across_hosts,
    "peak_rank": rank, "before_and_after_bytes": peaks[rank][0], "scratch_bytes": peaks[rank][1],
}
if len(program.body) <= most:
    from meshweave.cost.machine import Machine
    from meshweave.simulate import simulate
    row["simulated_s"] = simulate(program, Machine.of(cluster, program)).duration_s
print(json.dumps(row))
"""


def run(model: str, trainer: tuple[int, int], server: tuple[int, int], most: int) -> dict[str, Any]:
    """One plan in a fresh process; simulated where it has at most `most` ops."""
    return in_fresh_process(CODE, json.dumps([model, trainer, server, most]), timeout_s=600)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/reshard_llama.json")
    arguments = parser.parse_args()
    rows = {}
    for name, (model, trainer, server, goal_s) in CASES.items():
        runs = [
            run(model, trainer, server, 0 if number else MAX_SIMULATED_OPS) for number in range(REPETITIONS)
        ]
        row = {**runs[0], "goal_s": goal_s}
        for key in ("plan_s", "program_s", "wall_s"):
            row[key] = statistics.median(found[key] for found in runs)
        low, high = row["wall_s_range"] = [f(found["wall_s"] for found in runs) for f in (min, max)]
        rows[name] = row
        goal = (
            "" if goal_s is None else f", goal {goal_s} s: {'met' if row['wall_s'] <= goal_s else 'missed'}"
        )
        simulated = f", simulated {1e3 * row['simulated_s']:.2f} ms" if "simulated_s" in row else ""
        print(
            f"{name}: planned in {row['wall_s']:.2f} s ({low:.2f} to {high:.2f}; plan {row['plan_s']:.2f}, "
            f"program {row['program_s']:.2f}){goal}\n"
            f"  {row['tensors']} tensors, {row['pieces']:,} pieces, {row['unit_tasks']} unit tasks, "
            f"{row['messages']:,} messages\n"
            f"  bound {1e3 * row['bound_s']:.2f} ms, predicted {1e3 * row['predicted_s']:.2f} ms{simulated}\n"
            f"  rank {row['peak_rank']}: {row['before_and_after_bytes'] / 1e9:.3f} GB before and after, "
            f"{row['scratch_bytes'] / 1e6:.1f} MB of scratch"
        )
    if arguments.save:
        print(save("reshard_llama", rows))


if __name__ == "__main__":
    main()
