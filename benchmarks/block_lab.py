"""Whole blocks in a lab of 8 ranks: strategies for a GPT layer, forward and backward, beside what the plan says.

    python benchmarks/block_lab.py examples/labs/two-groups-8.toml [--repeat N] [--save NAME]

First the lab is calibrated: small and large all-gathers, as rings of steps, and small all-reduces of the
transport, with products beside them, give a goodput and latencies for all links. Then `rank_blocks` prices and
simulates every strategy on every mesh, and chooses chunks. Then each runs, in interleaved rounds: bound over gloo
with its gathers and reductions lowered to rings, its products and calls paced. PyTorch's `parallelize_module` with
sequence parallelism runs in the same rounds; its norms, attention and activation are paced by the same counts.

A time is from a common start to the end of the last rank, and what counts is the median.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from machine import save

from meshweave.algorithms.block import BlockConfig, BlockProblem
from meshweave.algorithms.block.megatron import Megatron
from meshweave.algorithms.block.problem import Overlap
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.links import CommConstants, NetworkAxis
from meshweave.describe.machine.network import HostsNetwork, TorusNetwork
from meshweave.describe.machine.tree import TreeNetwork
from meshweave.describe.model.transformer import Transformer
from meshweave.describe.model.workload import Workload
from meshweave.tune.ranking import RankedConfig, simulate_best
from meshweave_lab import Lab, RunningLab
from meshweave_studies.blocks.ranking import block_machine, mesh_of, rank_blocks

APART = 0.08
"""Two measured times count as different where they are further apart than this share of the smaller one."""
STRATEGIES = (
    *("atp", "megatron_sp", "collective_block", "meshslice_block", "wang_block", "summa_block"),
    *("data_parallel", "zero3", "all_to_all_heads", "ring_attention"),
)
"""Megatron 1D is ATP on a mesh of one column."""
INCLUDED_2D = ("collective_block", "meshslice_block", "wang_block", "summa_block")
MESHES = ((8, 1), (4, 2), (2, 4))
TORCH = "torch parallelize_module, sequence parallel"
SMALL_BYTES, LARGE_BYTES = 4096, 262144
LOOPS = {SMALL_BYTES: 20, LARGE_BYTES: 3}
PRODUCTS = 35
"""How many products run beside the calibration: for about as long as it takes."""


@dataclass(frozen=True)
class Constants:
    """What the lab is calibrated to: one latency, launch and goodput for all of its links.

    Attributes:
        goodput: bytes per second over the nominal rate of the slowest link of a ring of all ranks.
        step_s: seconds of a step of a ring in addition to its bytes.
        all_reduce_s: seconds of an all-reduce in addition to its bytes, all steps together.
    """

    goodput: float
    step_s: float
    all_reduce_s: float


# --- what the plan says -------------------------------------------------------------------------------------


def calibrate(running: RunningLab, cluster: Cluster, repeat: int) -> Constants:
    """Return the constants of a lab that is up, by ops over all ranks."""
    cases = [
        (kind, num_bytes, LOOPS[num_bytes])
        for kind in ("all_gather", "all_reduce")
        for num_bytes in (SMALL_BYTES, LARGE_BYTES)
    ]
    payload = {
        "cases": cases,
        "products": PRODUCTS,
        "flops_per_s": running.description.flops_per_s,
        "repeat": repeat,
        "deadline_s": 60.0,
    }
    ranks = _launch(running, "measure_constants", payload, 200.0)
    medians = {
        name: statistics.median(max(times) for times in zip(*(rank[name] for rank in ranks), strict=True))
        for name in ranks[0]
    }
    nominal = block_machine(cluster, (running.num_ranks, 1)).rate("tp.row", "all_gather", shared=True)
    steps = running.num_ranks - 1
    grown_s = medians[f"all_gather {LARGE_BYTES}"] - medians[f"all_gather {SMALL_BYTES}"]
    goodput = min(steps * (LARGE_BYTES - SMALL_BYTES) / grown_s / nominal, 1.0)
    bytes_s = steps * SMALL_BYTES / (goodput * nominal)
    return Constants(
        goodput,
        max(medians[f"all_gather {SMALL_BYTES}"] - bytes_s, 0.0) / steps,
        max(medians[f"all_reduce {SMALL_BYTES}"] - 2 * bytes_s, 0.0),
    )


def with_constants(cluster: Cluster, constants: Constants, num_ranks: int) -> Cluster:
    """Return a lab's cluster with calibrated links, whose rings go in one direction, as those of gloo do."""

    def calibrated(axis: NetworkAxis) -> NetworkAxis:
        rate, step_s = constants.goodput * axis.link_bytes_per_s, constants.step_s
        # The time beside the bytes is spread over the steps, so that smaller groups have less of it.
        own = CommConstants(rate, constants.all_reduce_s / (2 * (num_ranks - 1)), 0.0)
        return replace(
            axis,
            link_bytes_per_s=rate,
            link_latency_s=step_s,
            num_directions=1,
            constants=(("all_reduce", own), ("all_gather", CommConstants(rate, step_s, 0.0))),
        )

    network = cluster.network
    match network:
        case TorusNetwork():
            network = replace(network, axes=tuple(map(calibrated, network.axes)))
        case TreeNetwork():
            levels = (
                replace(level, axis=calibrated(level.axis), direct=level.direct and calibrated(level.direct))
                for level in network.levels
            )
            network = replace(network, levels=tuple(levels))
        case HostsNetwork():
            network = replace(network, intra=calibrated(network.intra), nic=calibrated(network.nic))
        case _:
            sys.exit(f"{cluster.name}: give a lab of kind torus or tree")
    return replace(cluster, network=network)


def planned(cluster: Cluster, problem: BlockProblem, overlap: Overlap = "layers") -> list[RankedConfig]:
    """Return the best config of every strategy on every mesh, simulated, the fastest first.

    Megatron 1D in one chunk, as it is mostly run, comes last.
    """
    model = Transformer(
        "block", 1, problem.hidden, problem.heads, problem.kv_heads, problem.head_dim, problem.ffn, None, False, ""
    )  # fmt: skip
    workload = Workload(problem.batch, problem.sequence, problem.dtype)
    ranking = rank_blocks(
        model,
        workload,
        cluster,
        algorithms=STRATEGIES,
        mesh_shapes=MESHES,
        max_simulated=1000,
        overlap=overlap,
    )
    entries = [entry for entry in ranking.ranked if entry.algorithm.name == "atp" or _is_native(entry)]
    plain = replace(problem, mesh_shape=(problem.mesh_shape[0] * problem.mesh_shape[1], 1))
    megatron, config = Megatron(), BlockConfig(overlap=overlap)
    estimate = megatron.estimate(plain, config, block_machine(cluster, plain.mesh_shape))
    last = [RankedConfig(megatron, plain, config, estimate)]
    return [*entries, *(last if overlap == "sites" else simulate_best(last, cluster, 1))]


def name_of(entry: RankedConfig) -> str:
    """Return the words for a strategy on its mesh, with its configuration, in tables."""
    return f"{entry.algorithm.name} {'x'.join(map(str, mesh_of(entry)))}, {entry.config}"


def _is_native(entry: RankedConfig) -> bool:
    """Return whether a strategy differs on its mesh from another of the list: 2D products need two axes."""
    return entry.algorithm.name not in INCLUDED_2D or mesh_of(entry)[1] > 1


# --- what is measured ---------------------------------------------------------------------------------------


def _launch(running: RunningLab, function: str, payload: dict[str, Any], timeout_s: float) -> list[Any]:
    # Every strategy is paced inside the ranks; references and checks are not.
    env = {"PYTHONPATH": str(Path(__file__).parent), "MESHWEAVE_PACE_FLOPS_PER_S": ""}
    return running.launch(f"block_lab_rank:{function}", payload, timeout_s=timeout_s, env=env)


def measure(
    running: RunningLab, problem: BlockProblem, entries: list[RankedConfig], options: argparse.Namespace
) -> dict[str, Any]:
    """Return the rows of the table, with the worst lateness of a rank and how well the pace was kept."""
    strategies: list[dict[str, Any]] = [
        {"algorithm": entry.algorithm.name, "mesh": mesh_of(entry), "config": asdict(entry.config)}
        for entry in entries
    ]
    description = running.description
    payload = {
        "problem": asdict(problem),
        "strategies": [*strategies, {"torch": True}],
        "repeat": options.repeat,
        "seed": 0,
        "flops_per_s": description.flops_per_s,
        "call_flops_per_s": dict(description.call_flops_per_s),
        "deadline_s": 60.0,
    }
    ranks = _launch(running, "measure_blocks", payload, options.timeout)
    rows = []
    for number, entry in enumerate([*entries, None]):
        runs = [max(run) for run in zip(*(rank["times"][number] for rank in ranks), strict=True)]
        row: dict[str, Any] = {
            "name": TORCH,
            "algorithm": "torch",
            "mesh": [running.num_ranks, 1],
            "config": "",
        }
        if entry is not None:
            row = {
                "name": name_of(entry),
                "algorithm": entry.algorithm.name,
                "mesh": list(mesh_of(entry)),
                "config": str(entry.config),
                "estimated_s": entry.estimate.total_s,
                "simulated_s": entry.seconds,
            }
        row |= {
            "median_s": statistics.median(runs),
            "runs_s": runs,
            "max_relative_error": max(rank["errors"][number] for rank in ranks),
            "num_overruns": sum(rank["overruns"][number][0] for rank in ranks),
            "overrun_s": max(rank["overruns"][number][1] for rank in ranks) / options.repeat,
        }
        rows.append(row)
    return {
        "rows": rows,
        "late_s": max(rank["late_s"] for rank in ranks),
        "pace": [rank["pace"] for rank in ranks],
    }


# --- verdicts -----------------------------------------------------------------------------------------------


def verdicts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how the ranking of the plan agrees with the measured one, and what the chosen strategy gains."""
    ours = [row for row in rows if row["algorithm"] != "torch"]
    out: dict[str, Any] = {"apart": APART}
    pairs = []
    for a, b in itertools.combinations(ours, 2):
        faster, slower = sorted((a, b), key=lambda row: row["median_s"])
        if slower["median_s"] > (1 + APART) * faster["median_s"]:
            pairs.append((faster, slower))
    out["pairs_apart"] = len(pairs)
    for reading in ("estimated_s", "simulated_s"):
        errors = [row[reading] / row["median_s"] - 1 for row in ours]
        missed = [(a["name"], b["name"]) for a, b in pairs if a[reading] >= b[reading]]
        out[reading] = {
            "mean_error": statistics.fmean(map(abs, errors)),
            "worst_error": max(errors, key=abs),
            "pairs_missed": missed,
        }
    chosen = min(ours, key=lambda row: row["simulated_s"])
    out["chosen"] = chosen["name"]
    out["chosen_over"] = {}
    for row in rows:
        is_megatron = row["algorithm"] == "megatron" or (row["algorithm"], row["mesh"]) == ("atp", [8, 1])
        if row is chosen or not (is_megatron or row["algorithm"] == "torch"):
            continue
        gain: dict[str, float] = {"measured": row["median_s"] / chosen["median_s"]}
        if "simulated_s" in row:
            gain["predicted"] = row["simulated_s"] / chosen["simulated_s"]
            gain["difference"] = gain["measured"] / gain["predicted"] - 1
        out["chosen_over"][row["name"]] = gain
    return out


def print_table(result: dict[str, Any]) -> None:
    """Print rows and verdicts."""
    for row in sorted(result["rows"], key=lambda row: row["median_s"]):
        expected = "                              "
        if "simulated_s" in row:
            off = row["simulated_s"] / row["median_s"] - 1
            expected = f"{row['estimated_s']:9.3f} {row['simulated_s']:9.3f} ({off:+6.1%})"
        print(
            f"{row['name']:46} {expected:30} measured {row['median_s']:.3f} "
            f"({min(row['runs_s']):.3f} to {max(row['runs_s']):.3f})  error {row['max_relative_error']:.1e}  "
            f"overruns {row['num_overruns']} ({row['overrun_s'] * 1e3:.0f} ms a step)"
        )
    said = result["verdicts"]
    for reading in ("estimated_s", "simulated_s"):
        one = said[reading]
        print(
            f"{reading}: mean error {one['mean_error']:.1%}, worst {one['worst_error']:+.1%}; "
            f"{len(one['pairs_missed'])} of {said['pairs_apart']} pairs in another order"
        )
        for faster, slower in one["pairs_missed"]:
            print(f"    measured faster: {faster}; than {slower}")
    print(f"chosen: {said['chosen']}")
    for name, gain in said["chosen_over"].items():
        predicted = (
            f", predicted {gain['predicted']:.3f} ({gain['difference']:+.1%})" if "predicted" in gain else ""
        )
        print(f"    {gain['measured']:.3f} times faster than {name}{predicted}")


def lab_parser(description: str | None, repeat: int, timeout_s: float) -> argparse.ArgumentParser:
    """Return a parser of a lab, the sizes of a layer, repetitions, and where results go."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lab", type=Path)
    parser.add_argument(
        "--sizes",
        type=lambda text: [int(n) for n in text.split(",")],
        default=[8, 128, 384, 8],
        help="batch, sequence, hidden, heads",
    )
    parser.add_argument("--repeat", type=int, default=repeat)
    parser.add_argument("--timeout", type=float, default=timeout_s)
    parser.add_argument("--save", help="the name of a file in benchmarks/results, without .json")
    return parser


def problem_of(sizes: list[int]) -> BlockProblem:
    """Return a layer on eight ranks of these sizes: batch, sequence, hidden, heads."""
    batch, sequence, hidden, heads = sizes
    return BlockProblem(batch, sequence, hidden, heads, heads, hidden // heads, 4 * hidden, (8, 1))


def main() -> None:
    """Measure in a lab, print tables and verdicts, and save them."""
    options = lab_parser(__doc__, repeat=5, timeout_s=580).parse_args()
    problem = problem_of(options.sizes)
    lab = Lab.load(options.lab)
    with lab.up() as running:
        constants = calibrate(running, lab.cluster(), 3)
        print(constants)
        entries = planned(with_constants(lab.cluster(), constants, lab.num_ranks), problem)
        result = measure(running, problem, entries, options)
    result |= {
        "lab": lab.description.to_json(),
        "problem": asdict(problem),
        "constants": asdict(constants),
        "verdicts": verdicts(result["rows"]),
    }
    print_table(result)
    wrong = [row["name"] for row in result["rows"] if row["max_relative_error"] > 1e-3]
    if wrong:
        sys.exit(f"wrong results: {', '.join(wrong)}")
    if options.save:
        print(f"saved {save(options.save, result)}")


if __name__ == "__main__":
    main()
