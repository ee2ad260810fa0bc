"""Rings as Pallas kernels: equal to numpy in TPU interpret mode, without races unless a wait is left out."""

from __future__ import annotations

import numpy as np
import pytest
from jax_world import needs_jax, prepare_jax

import meshweave as mw
from meshweave.base.errors import UnsupportedError
from meshweave.ir.analysis.validate import validate
from meshweave_studies.tpu.pallas_source import pallas_source

RINGS = [("wang", "os", (1, 4))]
MORE = [
    *(("wang", dataflow, (1, 4)) for dataflow in ("ls", "rs")),
    *(("wang", dataflow, (1, 8)) for dataflow in ("os", "ls", "rs")),
    *(("meshslice", dataflow, shape) for dataflow in ("os", "ls", "rs") for shape in ((2, 2), (2, 4))),
]


def ring(
    name: str, dataflow: str, shape: tuple[int, int], size: int = 32
) -> tuple[mw.Program, mw.algorithms.Matmul2dProblem]:
    problem = mw.algorithms.Matmul2dProblem(size, size, size, shape, dataflow, "float32")  # type: ignore[arg-type]
    if name == "wang":
        return mw.algorithm(name).program(
            problem, mw.algorithms.Matmul2dConfig((1,) * 8, overlap="col")
        ), problem
    return mw.lower.lower_rings(
        mw.algorithm(name).program(problem, mw.algorithms.Matmul2dConfig((1, 1), 4)), 2
    ), problem


def operands(problem: mw.algorithms.Matmul2dProblem) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(3)
    return {x: draw.integers(-4, 5, problem.stored_shape(x.lower())).astype(np.float32) for x in "AB"}


def reference(problem: mw.algorithms.Matmul2dProblem, inputs: dict[str, np.ndarray]) -> np.ndarray:
    a = inputs["A"].T if problem.dataflow == "rs" else inputs["A"]
    return a @ (inputs["B"].T if problem.dataflow == "ls" else inputs["B"])


@needs_jax
@pytest.mark.parametrize(
    ("name", "dataflow", "shape"), [*RINGS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_a_ring_is_right_and_has_no_race(name: str, dataflow: str, shape: tuple[int, int]) -> None:
    """Copies are made as late as possible, so that what is not waited for is not there."""
    prepare_jax()
    from meshweave_studies.tpu.pallas import run_interpreted

    program, problem = ring(name, dataflow, shape)
    validate(program)
    inputs = operands(problem)
    run = run_interpreted(program, inputs)
    assert np.array_equal(run.outputs["C"], reference(problem, inputs))
    assert not run.has_races


@needs_jax
@pytest.mark.parametrize(
    "number", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_a_wait_left_out_is_a_race(number: int) -> None:
    """A product then reads what is still arriving: the detector says so where copies are made at once."""
    prepare_jax()
    from meshweave_studies.tpu.pallas import run_interpreted

    program, problem = ring("wang", "os", (1, 4))
    lines = pallas_source(program).splitlines()
    waits = [at for at, line in enumerate(lines) if line.endswith(".wait_recv()")]
    assert len(waits) == 3
    del lines[waits[number]]
    assert run_interpreted(program, operands(problem), "eager", "\n".join(lines)).has_races


@needs_jax
@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_inbox_that_is_filled_before_it_is_free_is_a_race(number: int) -> None:
    """A ring of eight in two directions uses slots of the inbox again in three of its seven steps."""
    prepare_jax()
    from meshweave_studies.tpu.pallas import run_interpreted

    program, problem = ring("wang", "ls", (1, 8))
    lines = pallas_source(program).splitlines()
    waits = [at for at, line in enumerate(lines) if "semaphore_wait(free" in line]
    assert len(waits) == 3
    del lines[waits[number]]
    assert run_interpreted(program, operands(problem), "eager", "\n".join(lines)).has_races


def test_the_kernel_waits_where_edges_say() -> None:
    """A part is sent on, and multiplied, after it has arrived; what leaves is waited for at the end."""
    program, _ = ring("wang", "os", (1, 4))
    body = pallas_source(program).partition("def kernel")[2].partition("def on_mesh")[0]
    order = [line.strip() for line in body.splitlines() if "wait_" in line or ".start()" in line]
    assert order == [
        "move_0.start()",
        "move_1.start()",
        "move_0.wait_recv()",
        "move_2.start()",
        "move_1.wait_recv()",
        "move_2.wait_recv()",
        "move_0.wait_send()",
        "move_1.wait_send()",
        "move_2.wait_send()",
    ]


def test_what_a_kernel_has_no_form_for() -> None:
    uneven = mw.algorithms.Matmul2dProblem(33, 47, 61, (1, 4))
    with pytest.raises(UnsupportedError, match="uneven"):
        pallas_source(
            mw.algorithm("wang").program(uneven, mw.algorithms.Matmul2dConfig((1,) * 4, overlap="col"))
        )
    gathers = mw.algorithm("collective").program(
        mw.algorithms.Matmul2dProblem(32, 32, 32, (1, 4)), mw.algorithms.Matmul2dConfig()
    )
    with pytest.raises(UnsupportedError, match="no form for gather_a"):
        pallas_source(gathers)
