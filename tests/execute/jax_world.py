"""What tests of the jax backend share: 16 devices of this process's CPU, and programs beside dense results."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from meshweave.algorithms.contract import Algorithm
from meshweave.execute.numpy import numpy_dtype
from meshweave.ir.program import Program

FLAGS = "--xla_force_host_platform_device_count=16 --xla_backend_optimization_level=0"

needs_jax = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="jax is not installed: the jax rung cannot run here"
)


def prepare_jax() -> Any:
    """Return jax, with 16 CPU devices where this is its first import in the process."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    assert len(jax.devices()) == 16, "jax was imported before its devices were asked for"
    return jax


def assert_equals_reference(
    algorithm: Algorithm[Any, Any],
    problem: Any,
    program: Program,
    inputs: Mapping[str, Any],
    *,
    loops: Any = "unrolled",
    in_order: bool = False,
) -> None:
    """Assert that a program on jax devices gives what the dense reference does, exactly."""
    jax = prepare_jax()
    from meshweave.execute.jax.run import run_jax

    with jax.enable_x64(True):
        functions = algorithm.functions(problem)
        outputs = run_jax(program, inputs, calls=functions, loops=loops, in_order=in_order)
    reference = algorithm.reference(problem, inputs)
    assert outputs.keys() == reference.keys()
    for name, value in outputs.items():
        expected = reference[name].astype(numpy_dtype(program.tensor_of[name].dtype))
        assert value.shape == expected.shape
        assert np.array_equal(value.astype(expected.dtype), expected), (program.name, problem, name)


def lowered(program: Program) -> Any:
    """Return what jax lowers a program to."""
    jax = prepare_jax()
    from meshweave.execute.jax.run import device_mesh, load_source
    from meshweave.execute.jax.source import jax_source

    inputs = [program.tensor_of[b.tensor or ""] for b in program.buffers if b.kind == "input"]
    shapes = [jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for tensor in inputs]
    return load_source(jax_source(program), device_mesh(program)).lower(*shapes)
