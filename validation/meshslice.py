"""Published numbers of MeshSlice beside ours, with a verdict.

    python -m validation.meshslice [--cluster tpu-v4-pod-fitted] [--save]

Ours are estimates on the machines of the catalog, with their committed constants. The fitted pod has one factor
that was fitted on the rows marked cal; it is scored on the others.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from meshweave.algorithms.matmul import ALGORITHMS, MatmulProblem
from meshweave.algorithms.matmul.passes import PASSES, Stationary, pass_problem
from meshweave.cost.machine import Machine, mesh_machine
from meshweave.describe.cluster import Cluster, load_cluster
from meshweave.describe.model import load_model
from meshweave.describe.workload import Workload, block_gemms
from meshweave.errors import UnsupportedError
from meshweave.estimate import estimate
from meshweave.ir.skeleton import Skeleton
from meshweave.ir.work import traffic
from meshweave.tune.dataflow import choose_stationary
from meshweave.tune.product import Tuned, tune_product

HERE = Path(__file__).parent
MODELS = ("gpt3", "megatron-nlg")
KIBI = 1024

_pod = ["tpu-v4-pod"]


@dataclass(frozen=True)
class Row:
    """One published number beside ours. `ours` is None where we have none, and `reason` says why."""

    id: str
    what: str
    where: str
    model: str
    unit: str
    published: float | None
    ours: float | None
    reason: str = ""

    @property
    def verdict(self) -> str:
        """Within 3 points of a percentage or 3 % of another number: "holds"; within 10: "near"; else "differs"."""
        if self.ours is None:
            return "not reproduced: " + self.reason
        if self.published is None:
            return "ours alone"
        gap = abs(self.ours - self.published)
        relative = gap / 100 if self.unit.startswith("%") else gap / abs(self.published)
        return "holds" if relative <= 0.03 else "near" if relative <= 0.1 else "differs"


# --- what is computed -----------------------------------------------------------------------------------


@cache
def cluster(chips: int, name: str = "") -> Cluster:
    """The pod that is judged with so many chips, or another machine as it is."""
    return load_cluster(name) if name else load_cluster(_pod[0]).with_chips(chips)


@cache
def machine(shape: tuple[int, ...], name: str = "") -> Machine:
    chips = shape[0] * shape[1]
    return mesh_machine(cluster(chips, name), shape, ("row", "col"), "tp")


def shapes(chips: int) -> list[tuple[int, ...]]:
    return [shape for shape in cluster(chips).network.mesh_shapes(2) if min(shape) > 1]


def problems(
    model: str, chips: int, shape: tuple[int, ...], always: Stationary | None = None
) -> list[MatmulProblem]:
    """The 12 products of a block under weak scaling (batch = chips / 2, sequence 2048, bf16)."""
    tokens = chips // 2 * 2048
    out = []
    for layer in load_model(model).fc_layers():
        stays = always or choose_stationary(tokens, layer.in_features, layer.out_features)[0]
        for name in PASSES:
            out.append(
                pass_problem(stays, name, tokens, layer.in_features, layer.out_features, shape, "bfloat16")
            )
    return out


@cache
def tuned(algorithm: str, problem: MatmulProblem) -> Tuned:
    return tune_product(ALGORITHMS[algorithm], problem, machine(problem.mesh_shape))


def unrolled_to(problem: MatmulProblem, count: int) -> float:
    """Seconds of Wang with as many turns as MeshSlice has slices, in its better direction."""
    entry, at = ALGORITHMS["wang"], machine(problem.mesh_shape)
    tried = [c for c in entry.configs(problem) if c.slice_count == 2] or list(entry.configs(problem))
    return min(
        estimate(entry.skeleton(problem, replace(c, slices=(1,) * max(count, 2))), at).total_s for c in tried
    )


def block_s(
    model: str, chips: int, shape: tuple[int, ...], algorithm: str, always: Stationary | None = None
) -> float:
    if algorithm == "wang[S=meshslice]":
        return sum(
            unrolled_to(p, tuned("meshslice", p).config.slice_count)
            for p in problems(model, chips, shape, always)
        )
    return sum(tuned(algorithm, p).estimate.total_s for p in problems(model, chips, shape, always))


@cache
def best_s(model: str, chips: int, algorithm: str, always: Stationary | None = None) -> float:
    """Seconds of a block at the algorithm's best mesh."""
    return min(block_s(model, chips, shape, algorithm, always) for shape in shapes(chips))


def block_flops(model: str, chips: int) -> int:
    return sum(gemm.flops for gemm in block_gemms(load_model(model), Workload(chips // 2, 2048)))


def utilisation(model: str, chips: int, seconds: float) -> float:
    return 100 * block_flops(model, chips) / chips / cluster(chips).chip.peak("bfloat16") / seconds


def faster(slow_s: float, fast_s: float) -> float:
    return 100 * (slow_s / fast_s - 1)


def product_gain(rival: str) -> float:
    """Mean gain in percent over the 16 distinct products, each at its own best mesh."""
    gains = []
    for model in MODELS:
        distinct = {(p.m, p.n, p.k, p.dataflow): i for i, p in enumerate(problems(model, 256, (16, 16)))}
        for index in distinct.values():
            times = {
                name: min(tuned(name, problems(model, 256, s)[index]).estimate.total_s for s in shapes(256))
                for name in ("meshslice", rival)
            }
            gains.append(faster(times[rival], times["meshslice"]))
    return mean(gains)


def real_4x4(model: str, algorithm: str, overlap: bool) -> float:
    """Utilisation on the machine measured in the paper; without overlap every op follows the one before it."""
    entry, at = ALGORITHMS[algorithm], machine((4, 4), "tpu-v4-4x4")
    total = 0.0
    for problem in problems(model, 16, (4, 4)):
        times = []
        for config in entry.configs(problem):
            skeleton = entry.skeleton(problem, config)
            if not overlap and algorithm == "meshslice" and config.slice_count == 1:
                continue  # that would be Collective
            times.append(estimate(skeleton if overlap else one_lane(skeleton), at).total_s)
        total += min(times)
    return utilisation(model, 16, total)


def one_lane(skeleton: Skeleton) -> Skeleton:
    return Skeleton(
        tuple(
            replace(phase, tasks=tuple(replace(task, lane="one") for task in phase.tasks))
            for phase in skeleton.phases
        )
    )


def mesh_effect(model: str) -> float:
    times = [block_s(model, 256, shape, "meshslice") for shape in shapes(256) if min(shape) >= 4]
    return max(times) / min(times)


def scaling_loss(model: str) -> float:
    small, large = (utilisation(model, chips, best_s(model, chips, "meshslice")) for chips in (16, 256))
    return 100 * (1 - large / small)


def moved_bytes(algorithm: str, mesh_shape: tuple[int, ...]) -> float:
    """Bytes per chip of (1024K, 12K, 48K), read off the program; the weights of MeshSlice + DP come with it."""
    if algorithm not in ALGORITHMS:
        raise UnsupportedError(f"{algorithm} is not in the table")
    entry = ALGORITHMS[algorithm]
    sizes = (1024 * KIBI, 12 * KIBI, 48 * KIBI)
    if algorithm == "25d":
        problem = MatmulProblem(*sizes, mesh_shape, "os", "bfloat16")
        moved = traffic(entry.program(problem, next(entry.configs(problem))), 0)
        return sum(amount for axis, amount in moved.items() if axis != "tp.depth")
    forward = pass_problem("x", "forward", sizes[0], sizes[2], sizes[1], mesh_shape, "bfloat16")
    weight = pass_problem("x", "backward_weight", sizes[0], sizes[2], sizes[1], mesh_shape, "bfloat16")
    total = sum(traffic(entry.program(forward, next(entry.configs(forward))), 0).values())
    return total + traffic(entry.program(weight, next(entry.configs(weight))), 0).get("tp.depth", 0)


OURS: dict[str, Callable[[str], float]] = {
    "flops": lambda model: block_flops(model, 256) / 256 / 1e13,
    "utilisation": lambda model: utilisation(model, 256, best_s(model, 256, "meshslice")),
    "over_wang": lambda model: faster(
        best_s(model, 256, "wang[S=meshslice]"), best_s(model, 256, "meshslice")
    ),
    "over_wang_at_its_best": lambda model: faster(
        best_s(model, 256, "wang"), best_s(model, 256, "meshslice")
    ),
    "unoptimised": lambda model: utilisation(model, 256, best_s(model, 256, "meshslice", "y")),
    "dataflow_gain": lambda model: faster(
        best_s(model, 256, "meshslice", "y"), best_s(model, 256, "meshslice")
    ),
    "scaling_loss": scaling_loss,
    "products_over_collective": lambda model: product_gain("collective"),
    "products_over_wang": lambda model: product_gain("wang"),
    "mesh_effect": mesh_effect,
    "real_collective": lambda model: real_4x4(model, "collective", overlap=False),
    "real_meshslice": lambda model: real_4x4(model, "meshslice", overlap=False),
    "real_overlap": lambda model: real_4x4(model, "meshslice", overlap=True),
    "bytes_25d": lambda model: moved_bytes("25d", (16, 16, 4)) / 1e9,
    "bytes_meshslice_dp": lambda model: moved_bytes("meshslice_dp", (32, 8, 4)) / 1e6,
}


def published() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = tomllib.loads((HERE / "published" / "meshslice.toml").read_text())["row"]
    return rows


def rows(wanted: Sequence[str] | None = None) -> list[Row]:
    """All rows, or those with the wanted ids, computed."""
    out = []
    for entry in published():
        if wanted is not None and entry["id"] not in wanted:
            continue
        models = [model for model in (*MODELS, "both") if model in entry] or list(MODELS)
        for model in models:
            common = entry["id"], entry["what"], entry["where"], model, entry["unit"], entry.get(model)
            if "without" in entry:
                out.append(Row(*common, None, entry["without"]))
            else:
                out.append(Row(*common, OURS[entry["id"]](model)))
    return out


def table(computed: Sequence[Row]) -> str:
    """A Markdown table."""
    lines = [
        "| what | model | published | ours | unit | verdict | where |",
        "|---|---|---:|---:|---|---|---|",
    ]
    for row in computed:
        shown = ["-" if value is None else f"{value:.4g}" for value in (row.published, row.ours)]
        lines.append(
            f"| {row.what} | {row.model} | {shown[0]} | {shown[1]} | {row.unit} | {row.verdict} | {row.where} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--save", action="store_true", help="write validation/results/meshslice-CLUSTER.{json,md}"
    )
    parser.add_argument("--cluster", default=_pod[0], help="the pod whose constants are judged")
    arguments = parser.parse_args()
    _pod[0] = arguments.cluster
    computed = rows()
    print(table(computed))
    if arguments.save:
        results = HERE / "results"
        results.mkdir(exist_ok=True)
        data = [{**vars(row), "verdict": row.verdict} for row in computed]
        (results / f"meshslice-{_pod[0]}.json").write_text(json.dumps(data, indent=1) + "\n")
        (results / f"meshslice-{_pod[0]}.md").write_text(table(computed) + "\n")


if __name__ == "__main__":
    main()
