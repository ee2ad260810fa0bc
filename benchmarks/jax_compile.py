"""Compile the fully connected products of GPT-3 and Megatron-NLG for TPUs, and save what overlaps.

python benchmarks/jax_compile.py --seconds 600 [--only v4:4x4x1]

compiles for that many seconds at most, one program after another, and adds each to
benchmarks/results/jax_compile.json when it is done; what is there is not compiled again. It needs meshweave[tpu],
no TPU. The table, benchmarks/results/jax_compile.md, is written with it, and the summary in
docs/guide/jax-compile.md.

Sizes are those of a step of 32 sequences of 2048 tokens on a 4 x 4 mesh, and of 128 on the 16 x 16 of MeshSlice's
256 chips. Slices are four; there Wang takes as many as its price says.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import meshweave as mw
from meshweave_studies.cli.compile import TOPOLOGIES, report
from meshweave_studies.tpu.compiled import compile_program, emission_named, target_cluster
from meshweave_studies.tpu.targets import compiler_versions

RESULTS = Path(__file__).parent / "results" / "jax_compile.json"
PAGE = RESULTS.with_suffix(".md")
GUIDE = Path(__file__).parents[1] / "docs" / "guide" / "jax-compile.md"
BLOCK = re.compile(r"(<!-- compiled: begin -->\n).*?(<!-- compiled: end -->)", re.DOTALL)
MODELS = {"gpt3": 12288, "megatron-nlg": 20480}
LAYERS = {"ff1": (1, 4), "out": (1, 1), "qkv": (1, 3), "ff2": (4, 1)}
"""(k, n) of each layer in hidden sizes."""
SLICES = 4
TARGETS = {
    **TOPOLOGIES,
    "v5e:16x16": replace(TOPOLOGIES["v5e:4x4"], accelerator="v5litepod-256", topology="v5e:16x16"),
}
SIZES = {"v4:4x4x1": (32 * 2048, 4), "v5e:4x4": (32 * 2048, 4), "v5e:16x16": (128 * 2048, 16)}
"""By topology: tokens, and chips along each axis of the mesh."""
FORMS = (
    ("collective", "collectives"),
    ("meshslice_tiled", "fused-gathers"),
    ("meshslice", "fused"),
    ("meshslice", "ordered-rings"),
    ("meshslice", "rings"),
    ("meshslice", "collectives"),
    ("wang", "collectives"),
)
"""(algorithm, emission), in the order in which they are compiled."""


def cases() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield (topology, model, layer, algorithm, emission), the most telling first."""
    for model in MODELS:
        for topology in TARGETS:
            for layer in LAYERS:
                for algorithm, emission in FORMS:
                    yield topology, model, layer, algorithm, emission


def problem_of(topology: str, model: str, layer: str) -> mw.algorithms.Matmul2dProblem:
    """Return the forward product of a layer."""
    k, n = (factor * MODELS[model] for factor in LAYERS[layer])
    tokens, side = SIZES[topology]
    return mw.algorithms.Matmul2dProblem(tokens, n, k, (side, side), dtype="bfloat16")


def config_of(
    topology: str, problem: mw.algorithms.Matmul2dProblem, algorithm: str
) -> mw.algorithms.Matmul2dConfig:
    """Return what is compiled of an algorithm: one slice or four; of Wang on 16 chips what its price says."""
    if algorithm != "wang":
        return mw.algorithms.Matmul2dConfig((1,) * (1 if algorithm == "collective" else SLICES))
    if problem.mesh_shape == (4, 4):
        return mw.algorithms.Matmul2dConfig((1,) * SLICES, overlap="col")
    cluster = target_cluster(TARGETS[topology], problem.num_chips)
    ranked = mw.rank(problem, cluster, algorithms=[algorithm])
    return ranked[0].config


def compile_case(topology: str, model: str, layer: str, algorithm: str, emission: str) -> dict[str, Any]:
    """Return what is saved of a case."""
    problem = problem_of(topology, model, layer)
    program = mw.algorithm(algorithm).program(problem, config_of(topology, problem, algorithm))
    said = report(compile_program(program, TARGETS[topology], emission_named(emission)))
    modes = [one["mode"] for one in said.pop("collectives")]
    return {
        "topology": topology,
        "model": model,
        "layer": layer,
        "sizes": [problem.m, problem.n, problem.k],
        "algorithm": algorithm,
        "emission": emission,
        **{mode: modes.count(mode) for mode in ("synchronous", "asynchronous", "fused")},
        **said,
        "versions": compiler_versions(),
    }


def key_of(row: dict[str, Any]) -> tuple[str, ...]:
    """Return which case a saved row is."""
    return tuple(row[name] for name in ("topology", "model", "layer", "algorithm", "emission"))


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of positive numbers."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def summary(rows: list[dict[str, Any]]) -> str:
    """Return a table of one line for each topology and form, over all products."""
    collective = {key_of(row)[:3]: row for row in rows if row["algorithm"] == "collective"}
    forms = defaultdict(list)
    for row in sorted(rows, key=key_of):
        forms[row["topology"], row["algorithm"], row["emission"]].append(row)
    lines = [
        "| topology | algorithm, emission | programs | collectives | beside | bare | time / Collective | "
        "cycles of products / Collective | time / predicted |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for (topology, algorithm, emission), listed in forms.items():
        count = {row["synchronous"] + row["asynchronous"] + row["fused"] for row in listed}
        columns = (count, {row["beside"] for row in listed}, {row["exposed_within"] for row in listed})
        shown = (str(min(seen)) if len(seen) == 1 else f"{min(seen)} to {max(seen)}" for seen in columns)
        rivals = [(row, collective[key_of(row)[:3]]) for row in listed if key_of(row)[:3] in collective]
        ratios = (
            geometric_mean(row[name] / rival[name] for row, rival in rivals)
            for name in ("expected_s", "product_s")
        )
        error = geometric_mean(row["expected_s"] / row["predicted_s"] for row in listed)
        lines.append(
            f"| {topology} | {algorithm}, {emission} | {len(listed)} | {' | '.join(shown)} | "
            f"{' | '.join(f'{ratio:.2f}' for ratio in ratios)} | {error:.2f} |"
        )
    return "\n".join(lines) + "\n\n" + fastest(rows)


def fastest(rows: list[dict[str, Any]]) -> str:
    """Return a sentence: what the fastest form of each product takes, and how far its prediction is off."""
    said = []
    for topology in sorted({row["topology"] for row in rows}):
        products = defaultdict(list)
        for row in rows:
            if row["topology"] == topology:
                products[row["model"], row["layer"]].append(row)
        rivals = [
            next(row for row in forms if row["algorithm"] == "collective") for forms in products.values()
        ]
        taken = [min(forms, key=lambda row: row["expected_s"]) for forms in products.values()]
        ratio = geometric_mean(
            one["expected_s"] / rival["expected_s"] for one, rival in zip(taken, rivals, strict=True)
        )
        bound = geometric_mean(rival["product_s"] / rival["expected_s"] for rival in rivals)
        error = sum(abs(one["predicted_s"] / one["expected_s"] - 1) for one in taken) / len(taken)
        tiled = sum(one["algorithm"] == "meshslice_tiled" for one in taken)
        said.append(
            f"on {topology} {ratio:.3f} of Collective's time (its product alone {bound:.3f}), predicted within "
            f"{error:.1%} in the mean, and it is `meshslice_tiled` for {tiled} of {len(taken)}"
        )
    return f"The fastest form of each product takes {'; '.join(said)}.\n"


def guide(rows: list[dict[str, Any]]) -> str:
    """Return the guide page with the summary of rows in it."""
    return BLOCK.sub(lambda match: f"{match[1]}{summary(rows)}{match[2]}", GUIDE.read_text())


def table(rows: list[dict[str, Any]]) -> str:
    """Return the page: one line a compiled program."""
    lines = [
        "# Products as XLA's compiler for TPUs schedules them",
        "",
        "Written by `python benchmarks/jax_compile.py`. Sync, async, fused: collectives of the scheduled "
        "module by how they run; beside: those with a product between start and done; bare: those "
        "between the first product and the last without one. Expected: the time of the schedule, by the "
        "compiler's cycles of products and our price of transfers; waiting: the part of it in which only "
        "transfers run; predicted: our estimate of the same program. Products are those of a step of 65536 "
        "tokens, of 262144 on 16 x 16 chips.",
        "",
        "| topology | product | algorithm, emission | sync | async | fused | beside | bare | expected | "
        "products | waiting | predicted | memory | compiled in |",
        "|---|---|---|" + "---:|" * 11,
    ]
    for row in sorted(rows, key=key_of):
        lines.append(
            f"| {row['topology']} | {row['model']} {row['layer']} | {row['algorithm']}, {row['emission']} | "
            f"{row['synchronous']} | {row['asynchronous']} | {row['fused']} | {row['beside']} | "
            f"{row['exposed_within']} | {1e6 * row['expected_s']:.0f} us | {1e6 * row['product_s']:.0f} us | "
            f"{1e6 * row['exposed_s']:.0f} us | {1e6 * row['predicted_s']:.0f} us | "
            f"{row['peak_bytes'] / 2**20:.1f} MiB | {row['compile_cpu_s']:.0f} s |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compile what is not saved yet, for so many seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--only", default="", help="a part of the names of a case, such as v4:4x4x1")
    given = parser.parse_args()
    rows = json.loads(RESULTS.read_text())["programs"] if RESULTS.exists() else []
    known, begin = {key_of(row) for row in rows}, time.monotonic()
    for case in cases():
        if time.monotonic() - begin >= given.seconds:
            break
        if case not in known and given.only in " ".join(case):
            rows.append(compile_case(*case))
            RESULTS.write_text(json.dumps({"programs": rows}, indent=1) + "\n")
            PAGE.write_text(table(rows))
            GUIDE.write_text(guide(rows))
            print(*case, f"{rows[-1]['expected_s'] * 1e6:.0f} us", flush=True)


if __name__ == "__main__":
    main()
