"""Programs without a template on jax devices: one-sided ops, messages between two ranks, released tiles."""

from __future__ import annotations

from itertools import islice, product
from typing import Any

import numpy as np
import pytest
from jax_world import assert_equals_reference, lowered, needs_jax, prepare_jax

import meshweave as mw
from meshweave.algorithms import fused
from sampling import mostly_slow

pytestmark = needs_jax

NAMES = ("universal", *(entry.name for entry in fused.ENTRIES))


@pytest.mark.parametrize(
    "case", [*mostly_slow(product(NAMES, (1,)), 2), *mostly_slow(product(NAMES, (3,)), 0)]
)
def test_every_example_equals_the_dense_product(case: tuple[str, int]) -> None:
    name, num_configs = case
    entry = mw.algorithm(name)
    for problem in entry.examples():
        for config in islice(entry.candidates(problem), num_configs):
            program = entry.program(problem, config)
            assert_equals_reference(entry, problem, program, entry.random_inputs(problem, seed=3))


def test_in_order_messages_run() -> None:
    entry = mw.algorithm("universal")
    problem = next(entry.examples())
    program = mw.lower.lower_one_sided(entry.program(problem, next(iter(entry.candidates(problem)))))
    assert_equals_reference(entry, problem, program, entry.random_inputs(problem, seed=3), in_order=True)


def universal_problem(mesh_shape: tuple[int, int], placements: Any, dtype: str) -> Any:
    mesh = mw.Mesh.of("tp", mesh_shape, ("row", "col"))
    a, b, c = (mw.Layout(mesh, each) for each in placements)
    return mw.algorithms.UniversalProblem(11, 13, 9, a, b, c, dtype)


ROWS, COLUMNS, EVERYWHERE, TERMS = mw.Shard(0), mw.Shard(1), mw.Replicate(), mw.Partial()
PLACEMENTS = (
    ((ROWS, COLUMNS), (ROWS, COLUMNS), (ROWS, COLUMNS)),
    ((COLUMNS, ROWS), (EVERYWHERE, COLUMNS), (ROWS, ROWS)),
    ((TERMS, ROWS), (COLUMNS, EVERYWHERE), (EVERYWHERE, COLUMNS)),
    ((COLUMNS, COLUMNS), (ROWS, EVERYWHERE), (TERMS, TERMS)),
)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 3), (2, 4), (4, 4)])
def test_the_universal_product_of_layouts(mesh_shape: tuple[int, int], dtype: str) -> None:
    entry = mw.algorithm("universal")
    for placements in PLACEMENTS:
        problem = universal_problem(mesh_shape, placements, dtype)
        program = entry.program(problem, next(iter(entry.candidates(problem))))
        draw = np.random.default_rng(5)
        kind = dtype if dtype.startswith("int") else "float32"  # sums of 9 products stay exact in halves
        inputs = {name: draw.integers(-1, 2, problem.shape(name.lower())).astype(kind) for name in "AB"}
        assert_equals_reference(entry, problem, program, inputs)


@pytest.mark.parametrize("mesh_shape", mostly_slow([(2, 3), (2, 2), (2, 4), (4, 4)], 1))
def test_chains_of_messages(mesh_shape: tuple[int, int]) -> None:
    entry = mw.algorithm("summa")
    for dataflow in ("os", "ls", "rs"):
        problem = mw.algorithms.Matmul2dProblem(13, 18, 22, mesh_shape, dataflow, "int32")
        program = mw.lower.lower_chains(entry.program(problem, mw.algorithms.Matmul2dConfig((1,) * 3, 2)))
        assert any(op.kind == "send" for op in program.ops())
        assert_equals_reference(entry, problem, program, entry.random_inputs(problem, seed=4))


@pytest.mark.parametrize("name", mostly_slow(NAMES, 1))
def test_the_module_sends_the_messages_of_the_program(name: str) -> None:
    jax = prepare_jax()
    from jax_lowered import lowered_messages, program_messages

    entry = mw.algorithm(name)
    for problem in entry.examples():
        program = entry.program(problem, next(iter(entry.candidates(problem))))
        if not program_messages(program):
            assert {op.kind for op in program.ops()} & {"permute", "all_gather", "reduce_scatter"}
            continue
        with jax.enable_x64(True):
            assert lowered_messages(lowered(program)) == program_messages(program)
