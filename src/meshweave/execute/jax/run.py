"""Loads what `jax_source` returns, as it stands, on a mesh of jax devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from meshweave.base.errors import BindError
from meshweave.execute.jax.devices import DeviceMesh
from meshweave.execute.jax.source import ENTRY
from meshweave.ir.program import Program


def load_source(
    source: str, mesh: Mesh | None, functions: Mapping[str, Callable[..., Any]] | None = None
) -> Any:
    """Execute a source from `jax_source`; return its jitted function, from global input to global output arrays.

    Args:
        mesh: the devices; None where the context of each call gives a mesh.
        functions: the functions of the program's calls by name, on jax arrays; None for a program without calls.
    """
    names: dict[str, Any] = {}
    exec(compile(source, "<meshweave program as a jax function>", "exec"), names)
    return names[ENTRY](*((mesh,) if functions is None else (mesh, functions)))


def device_mesh(program: Program, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a jax mesh with the shape and axes of the first mesh of the program that has all ranks.

    Args:
        devices: at least one for each rank, more are not used; None for `jax.devices()`.

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
