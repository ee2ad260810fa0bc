"""What is given to a compiler beside dense results, on jax's CPU devices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from jax_world import assert_equals_reference, needs_jax

import meshweave as mw
from meshweave_studies.tpu.compiled import EMISSIONS
from sampling import mostly_slow

pytestmark = needs_jax


def emitted() -> Iterator[tuple[str, str, mw.algorithms.Matmul2dProblem]]:
    """Yield emissions and algorithms in each dataflow, on uneven sizes."""
    for emission in EMISSIONS:
        for name in ("meshslice", "wang", "collective"):
            for dataflow in ("os", "ls", "rs"):
                problem = mw.algorithms.Matmul2dProblem(13, 18, 22, (2, 4), dataflow, "int32")  # type: ignore[arg-type]
                yield emission, name, problem


@pytest.mark.parametrize("case", mostly_slow(emitted(), 2))
def test_emissions_for_a_compiler_equal_the_dense_product(
    case: tuple[str, str, mw.algorithms.Matmul2dProblem],
) -> None:
    """Parts, rings and an order that is tied to data change no number."""
    emission, name, problem = EMISSIONS[case[0]], case[1], case[2]
    draw = np.random.default_rng(5)
    inputs = {
        tensor: draw.integers(-9, 9, problem.stored_shape(tensor.lower())).astype("int32") for tensor in "AB"
    }
    program = emission.program(mw.algorithm(name).program(problem, mw.algorithms.Matmul2dConfig((1,) * 3, 2)))
    assert_equals_reference(mw.algorithm(name), problem, program, inputs, in_order=emission.in_order)
