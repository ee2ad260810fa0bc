"""What tests of the jax backend share: 16 devices of this process's CPU, and programs beside dense results."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from meshweave.algorithms.contract import Algorithm
from meshweave.base.errors import BindError, did_you_mean
from meshweave.execute.numpy import numpy_dtype
from meshweave.ir.program import Call, Program

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


def run_jax(
    program: Program,
    inputs: Mapping[str, Any],
    mesh: Any = None,
    calls: Mapping[str, Callable[..., Any]] | None = None,
    *,
    loops: Any = "unrolled",
    in_order: bool = False,
) -> dict[str, NDArray[Any]]:
    """Return the whole output tensors of a program by name, run on jax devices.

    Args:
        inputs: whole input tensors by name.
        mesh: a jax mesh of the shape of the program's; by default of the first devices of this process.
        calls: the functions that `call` ops name, on jax arrays.
        loops: "rolled" for loops as `lax.fori_loop`, as in `jax_source`.
        in_order: tie the order of ops to data, as in `jax_source`.

    Raises:
        BindError: a tensor or a function is missing, or there are too few devices.
        UnsupportedError: jax has no form for something in the program.
    """
    from meshweave.execute.jax.run import device_mesh, load_source
    from meshweave.execute.jax.source import jax_source

    mesh = device_mesh(program) if mesh is None else mesh
    needed = dict.fromkeys(op.fn for op in program.expanded.ops() if isinstance(op, Call))
    for name in needed:
        if name not in (calls or {}):
            raise BindError(f"no function is bound to call '{name}'{did_you_mean(name, calls or {})}")
    source = jax_source(program, mesh.axis_names, loops=loops, in_order=in_order)
    function = load_source(source, mesh, calls if needed else None)
    results = function(*_arguments(program, inputs))
    outputs = dict.fromkeys(b.tensor for b in program.buffers if b.kind == "output")
    listed = results if isinstance(results, tuple) else (results,)
    return {str(name): np.asarray(value) for name, value in zip(outputs, listed, strict=True)}


def _arguments(program: Program, inputs: Mapping[str, Any]) -> list[Any]:
    import jax

    listed = []
    for name in dict.fromkeys(
        b.tensor for b in program.buffers if b.kind == "input" and b.tensor is not None
    ):
        if name not in inputs:
            raise BindError(f"tensor {name} is an input of program {program.name} and was not given")
        dtype = program.tensor_of[name].dtype
        if dtype in ("float64", "int64") and not jax.config.jax_enable_x64:
            raise BindError(
                f"tensor {name} is {dtype}, for which jax needs jax.config.update('jax_enable_x64', True)"
            )
        listed.append(jax.numpy.asarray(inputs[name], dtype))
    return listed


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
