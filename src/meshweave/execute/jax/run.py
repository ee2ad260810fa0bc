"""Runs a program on jax devices: what `jax_source` returns is executed as it stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from meshweave.base.errors import BindError, did_you_mean
from meshweave.execute.jax.devices import DeviceMesh
from meshweave.execute.jax.rolled_loops import Loops
from meshweave.execute.jax.source import ENTRY, jax_source
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Call


def load_source(
    source: str, mesh: Mesh | None, functions: Mapping[str, Callable[..., Any]] | None = None
) -> Any:
    """Return the jitted function of whole tensors that a source from `jax_source` is on `mesh`.

    Args:
        mesh: None for a mesh that the context of a call gives.
        functions: the functions of the program's calls by name, on jax arrays.
    """
    names: dict[str, Any] = {}
    exec(compile(source, "<meshweave program as a jax function>", "exec"), names)
    return names[ENTRY](*((mesh,) if functions is None else (mesh, functions)))


def device_mesh(program: Program, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a jax mesh of the program's shape on devices, by default the first of this process.

    Raises:
        BindError: there are too few devices.
        UnsupportedError: no mesh of the program has all ranks.
    """
    shape = DeviceMesh(program.expanded).mesh
    given = jax.devices() if devices is None else devices
    if len(given) < shape.num_ranks:
        raise BindError(
            f"program {program.name} runs on {shape.num_ranks} devices, and jax has {len(given)}; on a CPU "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={shape.num_ranks} gives as many"
        )
    return Mesh(np.asarray(given[: shape.num_ranks]).reshape(shape.shape), shape.axes)


def run_jax(
    program: Program,
    inputs: Mapping[str, Any],
    mesh: Mesh | None = None,
    calls: Mapping[str, Callable[..., Any]] | None = None,
    *,
    loops: Loops = "unrolled",
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
