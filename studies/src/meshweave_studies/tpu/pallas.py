"""Runs Pallas kernels of programs in TPU interpret mode: TPUs, their DMA and semaphores, simulated on CPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jax.experimental.pallas import tpu as pltpu
from numpy.typing import NDArray

from meshweave.base.errors import BindError
from meshweave.execute.jax.run import device_mesh
from meshweave.ir.program import Program
from meshweave_studies.tpu.pallas_source import ENTRY, pallas_source

DmaMode = Literal["eager", "on_wait"]


@dataclass(frozen=True)
class InterpretedRun:
    """The whole outputs of a program by name, and whether the race detector saw two accesses without an order."""

    outputs: dict[str, NDArray[Any]]
    has_races: bool


def run_interpreted(
    program: Program, inputs: Mapping[str, Any], dma: DmaMode = "on_wait", source: str | None = None
) -> InterpretedRun:
    """Run a program as a Pallas kernel in TPU interpret mode, with its race detector.

    Args:
        inputs: whole input tensors by name.
        dma: when a copy is made: as soon as it is issued, or as late as a wait for it allows.
        source: the kernel; by default `pallas_source` of the program.

    Raises:
        BindError: a tensor is missing, or there are too few devices.
        UnsupportedError: a kernel has no form for something in the program.
    """
    tensors = dict.fromkeys(buffer.tensor for buffer in program.buffers if buffer.kind == "input")
    missing = [name for name in tensors if name not in inputs]
    if missing:
        raise BindError(f"tensor {missing[0]} is an input of program {program.name} and was not given")
    names: dict[str, Any] = {}
    text = pallas_source(program) if source is None else source
    exec(compile(text, "<meshweave program as a Pallas kernel>", "exec"), names)
    pltpu.reset_tpu_interpret_mode_state()
    interpret = pltpu.InterpretParams(detect_races=True, dma_execution_mode=dma)
    results = names[ENTRY](device_mesh(program), interpret)(*(inputs[str(name)] for name in tensors))
    outputs = [buffer.tensor for buffer in program.buffers if buffer.kind == "output"]
    arrays = {str(name): np.asarray(value) for name, value in zip(outputs, results, strict=True)}
    return InterpretedRun(arrays, _has_races())


def _has_races() -> bool:
    """Return what the race detector of the last interpreted kernel says; jax has no public name for it."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return bool(interpret_pallas_call.races.races_found)
