"""Layers of other graphs than today's families: every strategy computes them, and their folds agree."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshweave.algorithms.block import ENTRIES, BlockAlgorithm, BlockConfig, BlockProblem
from meshweave.algorithms.block.roles import IDLE
from meshweave.describe.model.dense import DenseForm, dense_layer
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.validate import validate
from sampling import mostly_slow

OPTIONS: dict[str, tuple[Any, ...]] = {
    "gated": (False, True),
    "norm": ("rms", "layer"),
    "biases": ((), ("qkv",), ("out", "ff2"), ("qkv", "out", "ff1", "ff2")),
    "rotary": (0.0, 0.5, 1.0),
    "window": (None, 1, 2),
    "post_norms": (False, True),
    "parallel": (False, True),
    "shared_norm": (False, True),
    "qk_norm": (False, True),
}


def layer(draw: random.Random, **given: Any) -> BlockProblem:
    """Return a problem of a layer whose options are drawn, unless they are given."""
    chosen = {name: draw.choice(values) for name, values in OPTIONS.items()} | given
    groups = draw.choice((1, 3, 4))
    heads, width, hidden, ffn = (
        groups * draw.choice((1, 2)),
        draw.choice((2, 4)),
        draw.choice((5, 8)),
        draw.choice((4, 7)),
    )
    graph = dense_layer(hidden, heads, groups, width, ffn, DenseForm(**chosen))
    batch, sequence = draw.choice((2, 4)), draw.choice((2, 3, 4))
    return BlockProblem(
        batch, sequence, hidden, heads, groups, width, ffn, layers=draw.choice((1, 2)), dtype="float64",
        vocabulary=draw.choice((0, 6)), graph=graph,
    )  # fmt: skip


def mesh(entry: BlockAlgorithm, draw: random.Random) -> tuple[int, ...]:
    """Return a mesh that the strategy takes."""
    if len(entry.roles) == 3:
        return draw.choice(((2, 1, 2), (2, 2, 2), (1, 2, 2)))
    return draw.choice(((2, 1), (3, 1)) if entry.roles[1] is IDLE else ((2, 2), (1, 2), (2, 3)))


def check(entry: BlockAlgorithm, problem: BlockProblem, config: BlockConfig) -> None:
    """Prove a program, and run it: functions of integers give the reference exactly, real ones to 1e-11."""
    program = entry.program(problem, config)
    assert validate(program).skipped == ()
    for is_exact in (True, False):
        stated = replace(problem, exact=is_exact)
        inputs = entry.random_inputs(stated, seed=1)
        expected = entry.reference(stated, inputs)
        outputs = run_numpy(program, inputs, calls=entry.functions(stated)).outputs
        assert set(outputs) == set(expected)
        for tensor, value in expected.items():
            bound = 0 if is_exact else 1e-11 * max(np.abs(value).max(), 1)
            assert np.abs(outputs[tensor] - value).max() <= bound, (tensor, problem, config)


CASES = [(entry, seed) for seed, entry in itertools.product(range(8), ENTRIES)]


@pytest.mark.parametrize("case", mostly_slow(CASES, 10), ids=lambda case: f"{case[0].name}, {case[1]}")
def test_strategies_compute_layers_of_drawn_options(case: tuple[BlockAlgorithm, int]) -> None:
    entry, seed = case
    draw = random.Random(f"{entry.name} {seed}")
    problem = replace(layer(draw), mesh_shape=mesh(entry, draw))
    for config in {next(iter(entry.candidates(problem))), [*entry.candidates(problem)][-1]}:
        check(entry, problem, config)
