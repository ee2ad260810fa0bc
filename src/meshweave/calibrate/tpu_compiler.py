"""Compile products for a TPU that need not be there, and read the cycles that the compiler expects of them.

XLA's TPU compiler comes as a library of its own (libtpu, a proprietary wheel: `pip install 'meshweave[tpu]'`) and
compiles for a described topology on any machine. The scheduled module says of every fused product how many cycles
it is expected to take (`estimated_cycles`), operands to and from the chip's memory included.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import numpy as np

from meshweave.base.errors import UnsupportedError, did_you_mean, printable
from meshweave.calibrate.device import DeviceCalibration
from meshweave.calibrate.kernel_fit import Hardware, fit_systolic
from meshweave.cost.products import product_seconds
from meshweave.describe.machine.kernels import ChipKernels

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class TpuTarget:
    """A TPU that products are compiled for.

    Attributes:
        name: the device in files of products and of kernels.
        accelerator: the machine, as libtpu knows it (TPU_ACCELERATOR_TYPE).
        topology: the topology that is compiled for, whose first device runs the product.
        arrays: arrays of 128 x 128 that run one product.
        cycles_per_s: their clock.
        memory_bytes_per_s: the bandwidth of the memory of the cores that run one product.
        config: further settings of the topology; `chip_config_name` chooses between cores and whole chips.
    """

    name: str
    accelerator: str
    topology: str
    arrays: int
    cycles_per_s: float
    memory_bytes_per_s: float
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def hardware(self) -> Hardware:
        """Return the peak and the memory bandwidth that constants keep below."""
        peak = 2 * 128 * 128 * self.arrays * self.cycles_per_s
        return Hardware(self.arrays, peak, self.memory_bytes_per_s)


TPU_TARGETS = {
    "tpu-v4-core": TpuTarget("TPU v4 core", "v4-32", "v4:4x4x1", 4, 1.05e9, 0.614e12),
    "tpu-v4": TpuTarget("TPU v4", "v4-32", "v4:4x4x1", 8, 1.05e9, 1.228e12, {"chip_config_name": "megacore"}),
    "tpu-v5e": TpuTarget("TPU v5e", "v5litepod-16", "v5e:4x4", 4, 1.5e9, 0.819e12),
}
"""By the name that `meshweave calibrate --device` takes. The two cores of a v4 chip run as one by default.

Clocks and memory: 1050 MHz and 1228 GB/s of a v4 chip (Jouppi et al., ISCA '23, table 1); 197 TFLOP/s of v5e
(Google Cloud's documentation) are 4 arrays at 1.5 GHz, beside 819 GB/s.
"""

PLACES = {"memory": {"xla_msa_enable": "false"}, "prefetched": {}}
"""Compiler options by where operands are before the product: all in the chip's memory; or, which is the default,
one of them on the chip if it fits, since the program before fetches it (cross-program prefetch)."""


def has_tpu_compiler() -> bool:
    """Return whether jax and libtpu are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("jax", "libtpu"))


def compiler_versions() -> dict[str, str]:
    """Return the versions of jax and libtpu."""
    return {name: version(name) for name in ("jax", "libtpu")}


def tpu_target(name: str) -> TpuTarget:
    """Return a target by its name. Raises UnsupportedError for an unknown one."""
    if name not in TPU_TARGETS:
        raise UnsupportedError(
            f"there is no TPU '{printable(name)}'{did_you_mean(name, TPU_TARGETS)}; "
            f"give one of {', '.join(TPU_TARGETS)}"
        )
    return TPU_TARGETS[name]


def product_cycles(
    target: TpuTarget, shapes: Sequence[Shape], out_dtype: str = "bfloat16", place: str = "memory"
) -> Iterator[int]:
    """Yield the expected cycles of products of bfloat16 matrices (m, k) by (k, n) on one device of a target.

    Args:
        out_dtype: bfloat16 or float32.
        place: one of `PLACES`.

    Raises:
        UnsupportedError: jax or libtpu is missing.
    """
    if not has_tpu_compiler():
        raise UnsupportedError(
            "compiling for TPUs needs jax and libtpu, a proprietary wheel: pip install 'meshweave[tpu]'"
        )
    import jax.numpy as jnp
    from jax import ShapeDtypeStruct, jit
    from jax.sharding import SingleDeviceSharding

    sharding = SingleDeviceSharding(
        _device(target.accelerator, target.topology, tuple(target.config.items()))
    )
    product = jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=out_dtype), out_shardings=sharding)
    for m, n, k in shapes:
        operands = (ShapeDtypeStruct(size, jnp.bfloat16, sharding=sharding) for size in ((m, k), (k, n)))
        compiled = product.lower(*operands).compile(compiler_options=dict(PLACES[place]))
        yield expected_cycles(compiled.as_text())


def expected_cycles(module: str) -> int:
    """Return the cycles that a scheduled module expects of its fusions and copies, all together."""
    return sum(int(cycles) for cycles in re.findall(r'"estimated_cycles":"(\d+)"', module))


@lru_cache(maxsize=4)
def _device(accelerator: str, topology: str, config: tuple[tuple[str, Any], ...]) -> Any:
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE=accelerator,
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_WORKER_ID="0",
        JAX_PLATFORMS="cpu",
    )
    from jax.experimental import topologies

    described = topologies.get_topology_desc(platform="tpu", topology_name=topology, **dict(config))
    return described.devices[0]


_SQUARE, _THIN, _ODD = "square", "thin", "odd"


def draw_tpu_shapes(count: int, seed: int, most_flops: float = 4e11) -> list[Shape]:
    """Return so many different shapes (m, n, k): in turn large ones of whole tiles, one dim thin, and odd ones.

    Large dims are multiples of 128 from 512 to 8192; thin ones from 8 to 384; odd shapes have any dims from 16
    to 8192, logarithms evenly.
    """
    draw = random.Random(seed)
    out: dict[Shape, None] = {}
    while len(out) < count:
        kind = (_SQUARE, _THIN, _THIN, _ODD)[len(out) % 4]
        if kind == _ODD:
            sizes = [round(16 * 512 ** draw.random()) for _ in range(3)]
        else:
            sizes = [128 * round(4 * 16 ** draw.random()) for _ in range(3)]
        if kind == _THIN:
            sizes[draw.randrange(3)] = 8 * round(48 ** draw.random())
        if 2 * sizes[0] * sizes[1] * sizes[2] <= most_flops:
            out[sizes[0], sizes[1], sizes[2]] = None
    return list(out)


def calibrate_tpu(
    device: str, count: int, seed: int, say: Callable[[str], None] = lambda text: None
) -> DeviceCalibration:
    """Return the constants of products in bfloat16 as the compiler expects them, operands in the chip's memory.

    Raises:
        UnsupportedError: jax or libtpu is missing, or there is no such TPU.
    """
    target, shapes, cycles = tpu_target(device), draw_tpu_shapes(count, seed), []
    for at, expected in enumerate(product_cycles(target, shapes)):
        cycles.append(expected)
        say(f"products: {at + 1} of {count} compiled")
    sizes, seconds = np.array(shapes, dtype=np.float64), np.array(cycles) / target.cycles_per_s
    constants = fit_systolic(sizes, seconds, target.hardware, 2, 2)
    m, n, k = sizes.T
    errors = np.abs(product_seconds(constants, m, n, k, 2) / seconds - 1)
    used = " ".join(f"{name} {number}" for name, number in compiler_versions().items())
    source = f"meshweave calibrate --device {device}: {count} products in bfloat16, seed {seed}, {used}"
    kernels = ChipKernels(target.name, source, products=(("bfloat16", constants),))
    return DeviceCalibration(kernels, "bfloat16", count, float(errors.mean()), float(errors.max()))
