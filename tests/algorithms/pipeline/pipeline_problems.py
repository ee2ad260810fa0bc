"""Random problems of pipelines, and what any schedule of one must fulfil."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st
from schedule_reader import read_schedule

from meshweave.algorithms.pipeline import (
    ActionKind,
    Edge,
    PipelineAlgorithm,
    PipelineConfig,
    PipelineProblem,
)
from meshweave.algorithms.pipeline.examples import chain_of_ranks, small_stage
from meshweave.algorithms.pipeline.functions import reference
from meshweave.describe.layout import Replicate, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.lifetimes import peak_stash_bytes
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program

F, B, I, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD  # noqa: E741


@st.composite
def chains(draw: st.DrawFn) -> PipelineProblem:
    """Return stages of one chip each: any number, any micro-batches, skips, uneven work, some recomputing."""
    count = draw(st.integers(1, 6))
    ranks = draw(st.sampled_from([tuple(range(count)), *_shared(count)]))
    pairs = [(a, b) for a in range(count) for b in range(a + 2, count)]
    return chain_of_ranks(
        ranks,
        draw(st.integers(1, 9)),
        draw(st.integers(1, 2)),
        work=draw(st.lists(st.integers(1, 4), min_size=1, max_size=count)),
        skips=draw(st.lists(st.sampled_from(pairs), unique=True, max_size=3)) if pairs else (),
        recomputes=draw(st.lists(st.integers(0, count - 1), unique=True)),
    )


def _shared(count: int) -> Iterator[tuple[int, ...]]:
    """Yield pipeline ranks of stages that share some: dealt out in turn, and down and back up."""
    if count % 2 == 0 and count > 2:
        yield tuple(number % (count // 2) for number in range(count))
        yield (*range(count // 2), *reversed(range(count // 2)))


FOLDED = ("zbv", "dualpipev")
"""Schedules of two stages a rank, down the ranks and back up."""


@st.composite
def folded_chains(draw: st.DrawFn) -> PipelineProblem:
    """Return stages down the ranks and back up, and micro-batches enough for each of these schedules."""
    ranks = draw(st.sampled_from([(0, 0), (0, 1, 1, 0), (0, 1, 2, 2, 1, 0)]))
    work = draw(st.lists(st.integers(1, 4), min_size=1, max_size=len(ranks)))
    return chain_of_ranks(ranks, draw(st.integers(len(ranks), 9)), draw(st.integers(1, 2)), work=work)


@st.composite
def meshes(draw: st.DrawFn) -> PipelineProblem:
    """Return stages with data and tensor degrees of their own, and a layout on either side of each edge."""
    count, rows, first = draw(st.integers(2, 3)), 4, 0
    stages = []
    for number in range(count):
        shape = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)]))
        mesh = Mesh.of(f"p{number}", shape, ("dp", "tp"), first)
        first += mesh.num_ranks
        sharded = shape[0] > 1 and draw(st.booleans())
        stages.append(small_stage(mesh, rows, data_axes=("dp",), is_sharded=sharded))
    sides = st.sampled_from([(), (Shard(0), Replicate()), (Shard(0), Shard(1)), (Shard(0), Shard(2))])
    edges = [
        Edge(source, target, (4, 2), draw(sides), draw(sides))
        for source, target in [
            *pairwise(range(count)),
            *([(0, 2)] if count == 3 and draw(st.booleans()) else []),
        ]
    ]
    return PipelineProblem(tuple(stages), tuple(edges), draw(st.integers(1, 4)), rows, (3,), (2,))


def check(entry: PipelineAlgorithm, problem: PipelineProblem, config: PipelineConfig) -> Program:
    """Prove a program, run it in two orders, and read its schedule back."""
    program, schedule = entry.program(problem, config), entry.schedule(problem, config)
    validation = validate(program)
    assert validation.skipped == ()
    assert all(agreement.is_certain for agreement in validation.replicas), validation.replicas_text
    assert read_schedule(program) == schedule
    inputs, functions = entry.random_inputs(problem), entry.functions(problem)
    for seed in (None, 1):
        result = run_numpy(program, inputs, seed=seed, calls=functions)
        expected = reference(problem, inputs)
        assert result.outputs.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(result.outputs[name], value, name)
        for rank in program.ranks:
            assert result.peak_stash_bytes[rank] == peak_stash_bytes(program, rank)
    return program


CONFIGS = [
    PipelineConfig(),
    PipelineConfig("blocking"),
    PipelineConfig("paired"),
    PipelineConfig(chunks=3),
    PipelineConfig(delay=2),
]
