"""Random products and reshards of the whole table of algorithms, each run on numpy in a random order.

`python tests/check/random_problems.py products|reshards SEED COUNT` says how many were exact, by algorithm.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from meshweave.algorithms.matmul2d import Matmul2dProblem
from meshweave.algorithms.reshard.problem import ReshardProblem, TensorMove
from meshweave.algorithms.table import ALGORITHMS
from meshweave.algorithms.universal import UniversalProblem
from meshweave.base.errors import MeshweaveError
from meshweave.describe.layout import Layout, Partial, Placement, Replicate, Shard, StridedShard, Tile
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.numpy import run_numpy
from meshweave.lower import lower_rings

_DTYPES = ("float64", "float32", "int64")


def _mesh(rng: random.Random, name: str, ranks: list[int]) -> Mesh:
    rows = rng.choice([rows for rows in range(1, len(ranks) + 1) if len(ranks) % rows == 0])
    return Mesh(name, (rows, len(ranks) // rows), ("x", "y"), tuple(ranks))


def _placement(rng: random.Random, num_dims: int, has_terms: bool) -> Placement:
    if num_dims == 0:
        return Replicate()
    dim, count = rng.randrange(num_dims), rng.randint(1, 4)
    kinds = [Shard(dim), Shard(dim), Replicate(), Tile(dim, count, rng.randrange(count))]
    kinds += [Partial()] if has_terms else [StridedShard(dim, rng.randint(1, 3))]
    return rng.choice(kinds)


def _layout(rng: random.Random, mesh: Mesh, num_dims: int, has_terms: bool = False) -> Layout:
    return Layout(mesh, tuple(_placement(rng, num_dims, has_terms) for _ in mesh.shape))


def random_product(rng: random.Random, example: Any) -> Any:
    """Return a product of the kind of an example: 2D, of any layouts, or fused with a collective."""
    dtype = rng.choice(("float32", "float64"))
    if isinstance(example, Matmul2dProblem):
        shape = tuple(rng.choice((1, 2, 2, 3, 4)) for _ in example.mesh_shape)
        m, n, k = (rng.choice((1, 3, 8, 12, 16, 24, 36, 48)) for _ in range(3))
        return Matmul2dProblem(m, n, k, shape, rng.choice(("os", "ls", "rs")), dtype)
    if rng.random() < 0.5 and type(example) is UniversalProblem:
        ranks = list(range(rng.choice((1, 2, 3, 4, 6, 8, 12))))
        layouts = []
        for name in "pqr":
            rng.shuffle(ranks)
            layouts.append(_layout(rng, _mesh(rng, name, ranks), 2, has_terms=True))
        return UniversalProblem(rng.randint(1, 20), rng.randint(1, 20), rng.randint(1, 20), *layouts, dtype)
    scale = rng.choice((1, 2, 3, 5))
    return UniversalProblem(
        *(example.m * rng.choice((1, scale)), example.n * scale, example.k * rng.choice((1, scale))),
        *(example.a, example.b, example.c, dtype, example.orders),
    )


def random_reshard(rng: random.Random, example: Any) -> ReshardProblem:
    """Return one to three tensors that move between meshes which share all ranks, some or none."""
    moves = []
    for number in range(rng.choice((1, 1, 2, 3))):
        pool = list(range(rng.randint(2, 14)))
        pair = []
        for name in "pq":
            rng.shuffle(pool)
            pair.append(
                _mesh(
                    rng, name, sorted(pool[: rng.randint(1, min(8, len(pool)))], key=lambda _: rng.random())
                )
            )
        shape = tuple(rng.choice((0, 1, 2, 3, 4, 5, 7, 8, 12, 16)) for _ in range(rng.randrange(4)))
        layouts = (_layout(rng, mesh, len(shape)) for mesh in pair)
        moves.append(TensorMove(f"item{number}", shape, rng.choice(_DTYPES), *layouts))
    return ReshardProblem(tuple(moves))


def is_exact(rng: random.Random, entry: Any, problem: Any) -> bool:
    """Return whether a random config, in a random order and now and then as rings, gives the reference."""
    config = rng.choice(list(islice(entry.candidates(problem), 24)))
    program = entry.program(problem, config)
    if rng.random() < 0.2 and isinstance(problem, Matmul2dProblem):
        program = lower_rings(program, rng.choice((1, 2)))
    inputs = entry.random_inputs(problem, rng.randrange(1 << 30))
    seed = rng.choice((None, rng.randrange(1 << 30)))
    outputs = run_numpy(program, inputs, seed=seed, calls=entry.functions(problem)).outputs
    expected = entry.reference(problem, inputs)
    return all(np.array_equal(outputs[name], value) for name, value in expected.items())


def campaign(kind: str, seed: int, count: int) -> Iterator[tuple[str, str]]:
    """Yield the algorithm of each of `count` problems, and what is wrong with it, or "".

    Problems that an algorithm refuses are drawn again.
    """
    wanted = (Matmul2dProblem, UniversalProblem) if kind == "products" else (ReshardProblem,)
    draw = random_product if kind == "products" else random_reshard
    entries = [(entry, next(iter(entry.examples()))) for entry in ALGORITHMS.values()]
    entries = [(entry, example) for entry, example in entries if isinstance(example, wanted)]
    for number in range(count):
        rng = random.Random(f"{kind}:{seed}:{number}")
        entry, _ = entries[number % len(entries)]
        for _ in range(1000):
            try:
                problem = draw(rng, rng.choice(list(entry.examples())))
                if entry.refusal(problem) is None and next(iter(entry.candidates(problem)), None) is not None:
                    break
            except MeshweaveError:
                continue
        else:
            yield entry.name, "no problem found that it takes"
            continue
        try:
            yield entry.name, "" if is_exact(rng, entry, problem) else f"{number}: not exact: {problem}"
        except Exception as error:
            yield entry.name, f"{number}: {type(error).__name__}: {error}: {problem}"


if __name__ == "__main__":
    counts: Counter[str] = Counter()
    num_wrong = 0
    for name, fault in campaign(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])):
        counts[name] += not fault
        num_wrong += bool(fault)
        if fault:
            print(f"{name}: {fault[:1000]}", flush=True)
    print(f"{sum(counts.values())} exact, {num_wrong} not: {dict(counts)}")
