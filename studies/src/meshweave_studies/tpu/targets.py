"""TPUs that need not be there: which of them XLA's compiler is asked to compile for.

The compiler comes as a library of its own (libtpu, a proprietary wheel: `pip install 'meshweave[tpu]'`) and
compiles for a described topology on any machine.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from meshweave.base.errors import UnsupportedError, require_known


@dataclass(frozen=True)
class TpuTarget:
    """A TPU that matmuls are compiled for.

    Attributes:
        name: the device's name in files of measured matmuls and of fitted kernels.
        accelerator: the machine, as libtpu knows it (TPU_ACCELERATOR_TYPE).
        topology: the topology that is compiled for, such as "v5e:4x4"; its first device runs the matmul.
        arrays: number of systolic arrays of 128 x 128 cells that run one matmul.
        cycles_per_s: the clock of the arrays, in Hz.
        memory_bytes_per_s: the HBM bandwidth of the cores that run one matmul, in bytes a second.
        cluster: the name of the catalog's cluster of such chips, for the rates of links.
        kernels: the name of the catalog's matmul constants, fitted to cycles of this compiler; "" for none.
        config: further settings of the topology; `chip_config_name` chooses between cores and whole chips.
        options: options of XLA's compiler that matmuls are compiled with, by name.
    """

    name: str
    accelerator: str
    topology: str
    arrays: int
    cycles_per_s: float
    memory_bytes_per_s: float
    cluster: str
    kernels: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def peak_flops_per_s(self) -> float:
        """Return the peak FLOP/s of all arrays that run one matmul: two FLOPs per cell and clock cycle."""
        return 2 * 128 * 128 * self.arrays * self.cycles_per_s


TPU_TARGETS = {
    "tpu-v4-core": TpuTarget(
        "TPU v4 core", "v4-32", "v4:4x4x1", 4, 1.05e9, 0.614e12, cluster="tpu-v4", kernels="tpu-v4-core"
    ),
    "tpu-v4": TpuTarget(
        "TPU v4",
        "v4-32",
        "v4:4x4x1",
        8,
        1.05e9,
        1.228e12,
        cluster="tpu-v4",
        config={"chip_config_name": "megacore"},
    ),
    "tpu-v5e": TpuTarget(
        "TPU v5e", "v5litepod-16", "v5e:4x4", 4, 1.5e9, 0.819e12, cluster="tpu-v5e", kernels="tpu-v5e"
    ),
    "tpu-v6e": TpuTarget(
        "TPU v6e",
        "v6e-16",
        "v6e:4x4",
        16,
        1.75e9,
        1.64e12,
        cluster="tpu-v6e",
        kernels="tpu-v6e",
        options={"xla_tpu_scoped_vmem_limit_kib": "98304"},
    ),
}
"""By the name that `meshweave calibrate --device` takes. The two cores of a v4 chip run as one by default.

Clocks and memory: 1050 MHz and 1228 GB/s of a v4 chip (Jouppi et al., ISCA '23, table 1); 197 TFLOP/s of v5e
(Google Cloud's documentation) are 4 arrays at 1.5 GHz, beside 819 GB/s. 918 TFLOP/s of v6e are, as we read them,
16 such arrays at 1.75 GHz. Its products are compiled with the memory on the chip that MaxText's recipes give them
(benchmarks/xla_flags_library.py, DENSE_VMEM_LIMIT_FLAG); without it large ones take 1.5 times as long.
"""


def has_tpu_compiler() -> bool:
    """Return whether jax and libtpu are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("jax", "libtpu"))


def compiler_versions() -> dict[str, str]:
    """Return {"jax": version, "libtpu": version}. Raises PackageNotFoundError where one is missing."""
    return {name: version(name) for name in ("jax", "libtpu")}


def tpu_target(name: str) -> TpuTarget:
    """Return `TPU_TARGETS[name]`, for example of "tpu-v5e". Raises UnsupportedError for an unknown name."""
    require_known(name, TPU_TARGETS, "there is no TPU", UnsupportedError, "give one of")
    return TPU_TARGETS[name]


def require_tpu_compiler() -> None:
    """Raise UnsupportedError where jax or libtpu is missing."""
    if not has_tpu_compiler():
        raise UnsupportedError(
            "compiling for TPUs needs jax and libtpu, a proprietary wheel: pip install 'meshweave[tpu]'"
        )


def tpu_devices(target: TpuTarget) -> tuple[Any, ...]:
    """Return the jax devices of a target's topology, one per chip, sorted by chip coordinates, the first slowest.

    The first call for a target sets the environment variables of this process that libtpu needs without a TPU,
    and JAX_PLATFORMS=cpu. Call `require_tpu_compiler` before: without jax or libtpu this raises other errors.
    """
    return _devices(target.accelerator, target.topology, tuple(target.config.items()))


@lru_cache(maxsize=4)
def _devices(accelerator: str, topology: str, config: tuple[tuple[str, Any], ...]) -> tuple[Any, ...]:
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE=accelerator,
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_WORKER_ID="0",
        ALLOW_MULTIPLE_LIBTPU_LOAD="true",
        JAX_PLATFORMS="cpu",
    )
    from jax.experimental import topologies

    described = topologies.get_topology_desc(platform="tpu", topology_name=topology, **dict(config))
    first = (device for device in described.devices if getattr(device, "core_on_chip", 0) == 0)
    return tuple(sorted(first, key=lambda device: tuple(device.coords)))
