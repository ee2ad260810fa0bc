"""Time our jax functions beside the MeshSlice authors' own, on 16 devices of this machine's CPU.

python benchmarks/jax_authors.py --checkout FOLDER [--save] [--only meshslice] [--scale 16] [--repeats 5]

FOLDER holds the authors' TensorParallel.py, which is no part of this project: it is loaded from there and asked
for its functions. Twelve products: the two fully connected layers of the feed-forward network of GPT-3 and
Megatron-NLG, each with the output, the data and the weights stationary, on a 4 x 4 mesh, for each of Collective,
Wang and MeshSlice. Every size is a 16th of that of a step of 32 sequences of 2048 tokens. Both sides have equal
operands, slices, blocks, and for Wang the same ring. Results are compared first, then both run in turn, the one
that begins alternating; times are the median and the least by the clock, and the median of all processors' (which
other work on the machine disturbs less). `--save` writes benchmarks/results/jax_authors.json.

The file imports `jax.experimental.shard_map`, which is deprecated. Where jax has it no more, a module of that name
is made before, with `jax.shard_map` without its check of replication.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import math
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from machine import save

import meshweave as mw

FLAGS = "--xla_force_host_platform_device_count=16"
MESH, AXES = (4, 4), ("row", "col")
HIDDEN = {"gpt3": 12288, "megatron-nlg": 20480}
LAYERS = {"ff1": (1, 4), "ff2": (4, 1)}
"""(k, n) of each layer in hidden sizes."""
TOKENS, SLICES, BLOCK = 32 * 2048, 8, 8
METHODS = {"os": "OS", "ls": "IS", "rs": "WS"}
"""The authors' name of each dataflow."""
ALGORITHMS = {"collective": "collective", "wang": "wang", "meshslice": "systolic"}
"""The authors' name of each algorithm."""

KINDS = ("median", "least", "cpu")

Product = Callable[[Any, Any], Any]


def problems(scale: int) -> Iterator[tuple[str, str, mw.algorithms.Matmul2dProblem]]:
    """Yield (model, layer, product) of the twelve products."""
    for model, hidden in HIDDEN.items():
        for layer, (k, n) in LAYERS.items():
            for dataflow in METHODS:
                sizes = (TOKENS // scale, n * hidden // scale, k * hidden // scale)
                yield model, layer, mw.algorithms.Matmul2dProblem(*sizes, MESH, dataflow)  # type: ignore[arg-type]


def authors_module(checkout: Path) -> Any:
    """Return the authors' module, loaded from a folder."""
    import jax

    name = "jax.experimental.shard_map"
    if importlib.util.find_spec(name) is None:
        stand_in = types.ModuleType(name)
        stand_in.shard_map = functools.partial(jax.shard_map, check_vma=False)  # type: ignore[attr-defined]
        sys.modules[name] = stand_in
    spec = importlib.util.spec_from_file_location("authors_tensor_parallel", checkout / "TensorParallel.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def theirs(authors: Any, algorithm: str, dataflow: str, mesh: Any) -> Product:
    """Return the authors' jitted function of one dataflow."""
    methods = authors.SPMD(mesh, ALGORITHMS[algorithm], BLOCK)
    function: Product = getattr(methods, METHODS[dataflow])(SLICES)
    return function


def wang_axis(problem: mw.algorithms.Matmul2dProblem) -> str:
    """Return the axis of the authors' ring: with the weights stationary, that which has more to move."""
    rows, columns = problem.mesh_shape
    moved_by_rows, moved_by_columns = problem.n * rows**2, problem.k * columns**2
    return "row" if problem.dataflow == "rs" and moved_by_columns > moved_by_rows else "col"


def ours(algorithm: str, problem: mw.algorithms.Matmul2dProblem, mesh: Any) -> Product:
    """Return our jitted function of a product."""
    from meshweave.execute.jax.run import load_source
    from meshweave.execute.jax.source import jax_source

    config = {
        "collective": mw.algorithms.Matmul2dConfig(),
        "wang": mw.algorithms.Matmul2dConfig((1,) * MESH[0], overlap=wang_axis(problem)),  # type: ignore[arg-type]
        "meshslice": mw.algorithms.Matmul2dConfig((1,) * SLICES, BLOCK),
    }[algorithm]
    function: Product = load_source(
        jax_source(mw.algorithm(algorithm).program(problem, config), mesh.axis_names), mesh
    )
    return function


def operands(problem: mw.algorithms.Matmul2dProblem, mesh: Any) -> tuple[Any, Any]:
    """Return small integers, sharded over the mesh, whose product is exact in single precision."""
    import jax
    import numpy as np

    lying = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*AXES))
    draw = np.random.default_rng(1)
    arrays = (draw.integers(-3, 4, problem.stored_shape(name)).astype("float32") for name in ("a", "b"))
    a, b = (jax.device_put(array, lying) for array in arrays)
    return a, b


def timed(function: Product, a: Any, b: Any) -> tuple[float, float]:
    """Return the seconds that a call takes, by the clock and of all processors."""
    begin, used = time.perf_counter(), time.process_time()
    function(a, b).block_until_ready()
    return time.perf_counter() - begin, time.process_time() - used


def in_turn(both: tuple[Product, Product], a: Any, b: Any, repeats: int) -> list[dict[str, float]]:
    """Return the median, the least and the processors' seconds of two functions that run in turn."""
    taken: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    for turn in range(repeats):
        for number in (0, 1) if turn % 2 == 0 else (1, 0):
            taken[number].append(timed(both[number], a, b))
    kinds = []
    for listed in taken:
        wall_s, cpu_s = zip(*listed, strict=True)
        kinds.append(
            {"median": statistics.median(wall_s), "least": min(wall_s), "cpu": statistics.median(cpu_s)}
        )
    return kinds


def compared(
    authors: Any, algorithm: str, problem: mw.algorithms.Matmul2dProblem, mesh: Any, repeats: int
) -> dict[str, Any]:
    """Return whether results are equal, and the times of both."""
    import numpy as np

    a, b = operands(problem, mesh)
    both = ours(algorithm, problem, mesh), theirs(authors, algorithm, problem.dataflow, mesh)
    results = [np.asarray(function(a, b)) for function in both]
    mine, other = in_turn(both, a, b, repeats)
    return {
        "equal": bool(np.array_equal(*results)),
        "ours_s": mine,
        "authors_s": other,
        "times_faster": {kind: other[kind] / mine[kind] for kind in KINDS},
    }


def geometric_mean(values: list[float]) -> float:
    """Return the geometric mean of positive numbers."""
    return math.exp(statistics.fmean(map(math.log, values)))


def main() -> None:
    """Compare all products, print a line each, and save them if asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkout", type=Path, required=True, help="where the authors' file is")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--only", choices=tuple(ALGORITHMS))
    parser.add_argument("--scale", type=int, default=16, help="sizes are divided by this")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    authors, mesh = authors_module(given.checkout), jax.make_mesh(MESH, AXES)
    rows, means = [], {}
    for algorithm in [given.only] if given.only else ALGORITHMS:
        for model, layer, problem in problems(given.scale):
            row = {"algorithm": algorithm, "model": model, "layer": layer, "dataflow": problem.dataflow}
            row["sizes"] = [problem.m, problem.n, problem.k]
            row |= compared(authors, algorithm, problem, mesh, given.repeats)
            rows.append(row)
            print(*row.values(), flush=True)
        of_it = [row["times_faster"] for row in rows if row["algorithm"] == algorithm]
        means[algorithm] = {kind: geometric_mean([ratios[kind] for ratios in of_it]) for kind in KINDS}
        print(algorithm, means[algorithm], flush=True)
    if given.save:
        how = {"mesh": MESH, "scale": given.scale, "repeats": given.repeats, "slices": SLICES, "block": BLOCK}
        save("jax_authors", {**how, "jax": jax.__version__, "geometric_means": means, "rows": rows})


if __name__ == "__main__":
    main()
