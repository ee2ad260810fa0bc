"""Digests of all that a block writes for a case: programs, skeletons, parts, sites and kernels.

    python tests/algorithms/block/block_digests.py      # writes tests/golden/block_digests.json of this tree

Declarations count as a set, ops in their order: a digest is that of the same ops with the same bytes. The
file was written when layers were two halves in code, before they were graphs.
"""

# ruff: noqa: B023

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshweave.algorithms.block import ENTRIES, BlockAlgorithm, BlockConfig, BlockProblem
from meshweave.algorithms.block.nodes import kernels_of
from meshweave.algorithms.block.parts import BlockParts
from meshweave.algorithms.block.roles import BATCH, RING
from meshweave.algorithms.block.sites import product_parts, ring_parts
from meshweave.algorithms.block.sized import FlatTask
from meshweave.algorithms.step.strategies import StrategyAround
from meshweave.base.errors import MeshweaveError
from meshweave.describe.layout.shapes import factorisations
from meshweave.ir.program import Program
from meshweave.ir.program.text import to_text
from product_sites import product_sites

GOLDEN = Path(__file__).parents[2] / "golden" / "block_digests.json"
EVERY = 7
"""Of the grid, each so many cases one is kept."""

SHAPES = {
    "gpt": BlockProblem(4, 2, 6, 3, 3, 2, 7),
    "gpt biases": BlockProblem(4, 2, 6, 3, 3, 2, 7, biases=True, dtype="bfloat16"),
    "gpt loss": BlockProblem(3, 4, 8, 4, 2, 2, 16, vocabulary=10, counts_masked=True),
    "llama": BlockProblem(8, 4, 8, 8, 4, 2, 16, family="llama"),
    "llama loss": BlockProblem(4, 3, 5, 6, 3, 3, 5, family="llama", vocabulary=7),
}


def _lines(program: Program) -> list[str]:
    """Return the text of a program, its declarations in the order of the alphabet."""
    text = to_text(program).splitlines()
    first = next((at for at, line in enumerate(text) if line.startswith("with ")), len(text))
    return sorted(text[:first]) + text[first:]


def _steps(steps: list[FlatTask]) -> str:
    """Return tasks in words, without the product that each is of."""
    words = ", ".join(f"{name}={{{name}!r}}" for name in FlatTask._fields if name != "part")
    return f"[{', '.join(f'FlatTask({words})'.format(**task._asdict()) for task in steps)}]"


def _tried(make: Callable[[], Any]) -> Any:
    """Return what is made, or why it is not."""
    try:
        return make()
    except (MeshweaveError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"


def _parts(make: Callable[[], BlockParts]) -> Any:
    def made() -> list[str]:
        parts = make()
        both = [*_lines(parts.forward), *_lines(parts.backward)]
        return [*both, repr(parts.kept), repr(sorted(parts.sums.items()))]

    return _tried(made)


def _meshes(entry: BlockAlgorithm) -> Iterator[tuple[int, ...]]:
    if isinstance(entry, StrategyAround):
        yield from ((2, 2, 2, 1), (1, 2, 1, 1), (2, 1, 2, 1))
        return
    for ranks in (1, 2, 6, 8) if len(entry.roles) == 2 else (2, 4):
        for shape in factorisations(ranks, len(entry.roles)):
            if entry.refusal(replace(SHAPES["gpt"], mesh_shape=shape)) is None:
                yield shape


def cases() -> dict[str, tuple[BlockAlgorithm, BlockProblem]]:
    """Return the cases of the grid by name."""
    around = (
        StrategyAround(each, (BATCH, RING)) for each in ENTRIES if each.name in ("megatron_sp", "megatron")
    )
    found = {}
    for entry in (*ENTRIES, *around):
        for name, shape in SHAPES.items():
            for mesh in _meshes(entry):
                for layers, training in ((1, True), (1, False), (2, True)):
                    problem = replace(shape, mesh_shape=mesh, layers=layers, training=training)
                    text = f"{'x'.join(map(str, mesh))}, {layers} layers, {'training' if training else 'forward'}"
                    found[f"{entry.name}, {name}, {text}"] = entry, problem
    return found


def _rows(entry: BlockAlgorithm, problem: BlockProblem) -> Iterator[Any]:
    yield "layers"
    configs = [*entry.candidates(problem)]
    configs = [configs[0], configs[-1]] if len(configs) > 1 else configs
    if entry.name == "atp":
        configs.append(replace(configs[0], scatter="all_reduce"))
    for config in configs:
        yield _tried(lambda: _lines(entry.program(problem, config)))
        for overlap in ("layers", "sites"):
            yield _tried(lambda: repr(entry.skeleton(problem, replace(config, overlap=overlap))))
        for piece in (
            ("layers", "embedding", "head")[: 3 if problem.vocabulary else 1] if problem.training else ()
        ):
            for recompute in ("none", "selective", "full") if piece == "layers" else ("none",):
                yield _parts(lambda: entry.parts(problem, config, piece=piece, recompute=recompute))
            yield _tried(lambda: repr(entry.skeleton(problem, config, piece)))
    for overlap in ("layers", "sites"):
        sizes = (1, 2, 5)
        yield _tried(
            lambda: [_steps(entry.sized_skeleton(problem, overlap).steps(n, BlockConfig())) for n in sizes]
        )
    if problem.training and problem.layers == 1:
        yield from _site_rows(entry, problem)


def _site_rows(entry: BlockAlgorithm, problem: BlockProblem) -> Iterator[Any]:
    roles = entry.roles_of(problem)
    yield sorted(map(repr, kernels_of(problem, roles)))
    sites = product_sites(problem)
    yield sorted(map(repr, sites))
    for site in sites:
        yield _parts(lambda: product_parts(site, problem, BlockConfig(), roles, problem.mesh))
    if roles.ring_axis is not None:
        plain = replace(problem, biases=False, layers=1)
        yield _parts(lambda: ring_parts(plain, BlockConfig(), roles, problem.mesh))


def digest(entry: BlockAlgorithm, problem: BlockProblem) -> str:
    """Return the digest of all that is written for a case."""
    return hashlib.sha256(json.dumps(list(_rows(entry, problem))).encode()).hexdigest()[:12]


if __name__ == "__main__":
    kept = list(cases().items())[::EVERY]
    GOLDEN.write_text(json.dumps({name: digest(*case) for name, case in kept}, indent=0) + "\n")
