"""Compile products for a TPU that need not be there, and read the cycles that the compiler expects of them.

The scheduled module says of every fused product how many cycles it is expected to take (`estimated_cycles`),
operands to and from the chip's memory included. What is compiled for is described in `tpu.targets`.
`meshweave calibrate --device tpu-v5e` is of this module (`calibrate_tpu`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from meshweave.calibrate.kernel_fit import Array, DeviceCalibration, Free, Hardware, fit_constants
from meshweave.cost.products import product_seconds
from meshweave.cost.systolic import systolic_seconds
from meshweave.describe.machine.kernels import ChipKernels, SystolicConstants
from meshweave_studies.tpu.targets import (
    TpuTarget,
    compiler_versions,
    require_tpu_compiler,
    tpu_devices,
    tpu_target,
)

Shape = tuple[int, int, int]

PLACES = {"memory": {"xla_msa_enable": "false"}, "prefetched": {}}
"""Compiler options by where operands are before the product: all in the chip's memory; or, which is the default,
one of them on the chip if it fits, since the program before fetches it (cross-program prefetch)."""


def hardware_of(target: TpuTarget) -> Hardware:
    """Return the units, peak FLOP/s and memory bandwidth of a target, which fitted rates stay below."""
    return Hardware(target.arrays, target.peak_flops_per_s, target.memory_bytes_per_s)


def product_cycles(
    target: TpuTarget, shapes: Sequence[Shape], out_dtype: str = "bfloat16", place: str = "memory"
) -> Iterator[int]:
    """Yield the cycles that the compiler expects of each bfloat16 product (m, k) by (k, n) on a target's device.

    Args:
        shapes: (m, n, k) of each.
        out_dtype: bfloat16 or float32.
        place: "memory" for operands in the chip's memory, "prefetched" to let one be on the chip beforehand.

    Raises:
        UnsupportedError: jax or libtpu is missing.
    """
    require_tpu_compiler()
    import jax.numpy as jnp
    from jax import ShapeDtypeStruct, jit
    from jax.sharding import SingleDeviceSharding

    sharding = SingleDeviceSharding(tpu_devices(target)[0])
    options = {**PLACES[place], **target.options}
    product = jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=out_dtype), out_shardings=sharding)
    for m, n, k in shapes:
        operands = (ShapeDtypeStruct(size, jnp.bfloat16, sharding=sharding) for size in ((m, k), (k, n)))
        compiled = product.lower(*operands).compile(compiler_options=options)
        yield expected_cycles(compiled.as_text())


def expected_cycles(module: str) -> int:
    """Return the sum of the cycles that the compiler expects of fusions and copies in a scheduled module.

    `module` is the text of that module, as the compiler prints it.
    """
    return sum(int(cycles) for cycles in re.findall(r'"estimated_cycles":"(\d+)"', module))


_SQUARE, _THIN, _ODD = "square", "thin", "odd"


def draw_tpu_shapes(count: int, seed: int, most_flops: float = 4e11) -> list[Shape]:
    """Return `count` different shapes (m, n, k); of four, one is large, two have a thin dim, one has any sizes.

    Large dims are multiples of 128 from 512 to 8192, thin ones multiples of 8 from 8 to 384, and any dims whole
    numbers from 16 to 8192. All are drawn evenly by logarithm. A product has `most_flops` FLOPs at most. Equal
    arguments, `seed` among them, give equal shapes.
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


def fit_systolic(
    sizes: Array, seconds: Array, hardware: Hardware, item_bytes: int, out_bytes: ArrayLike
) -> SystolicConstants:
    """Return the constants of products on systolic arrays.

    Args:
        sizes: (m, n, k) of each sample, shape (samples, 3).
        seconds: of each sample.
        item_bytes: of an element of an operand.
        out_bytes: of an element of C, of all samples or of each.
    """
    free = {
        "flops_per_s": Free(0.9 * hardware.peak_flops_per_s, hardware.peak_flops_per_s),
        "load_rows": Free(64.0),
        "rounded_per_s": Free(hardware.peak_flops_per_s / 1200),
        "launch_s": Free(2e-6),
        "memory_bytes_per_s": Free(0.6 * hardware.memory_bytes_per_s, hardware.memory_bytes_per_s),
        "first_bytes": Free(4e6),
        "last_bytes": Free(1e6),
        "window": Free(2048.0, least=1.0),
        "overlap": Free(3.0, 16.0, least=1.0),
    }

    m, n, k = sizes.T

    def seconds_of(constants: Mapping[str, float]) -> Array:
        return systolic_seconds(SystolicConstants(**constants), m, n, k, item_bytes, out_bytes)

    return SystolicConstants(**fit_constants(free, seconds_of, seconds, np.ones_like(seconds)))


def calibrate_tpu(
    device: str, count: int, seed: int, say: Callable[[str], None] = lambda text: None
) -> DeviceCalibration:
    """Return the constants of bfloat16 products as the compiler expects them, operands in the chip's memory.

    Args:
        device: a target's name, such as "tpu-v5e".
        count: the number of products.
        seed: of the shapes.
        say: called with lines of text on the progress.

    Raises:
        UnsupportedError: jax or libtpu is missing, or there is no such TPU.
    """
    target, shapes, cycles = tpu_target(device), draw_tpu_shapes(count, seed), []
    for at, expected in enumerate(product_cycles(target, shapes)):
        cycles.append(expected)
        say(f"products: {at + 1} of {count} compiled")
    sizes, seconds = np.array(shapes, dtype=np.float64), np.array(cycles) / target.cycles_per_s
    constants = fit_systolic(sizes, seconds, hardware_of(target), 2, 2)
    m, n, k = sizes.T
    errors = np.abs(product_seconds(constants, m, n, k, 2) / seconds - 1)
    used = " ".join(f"{name} {number}" for name, number in compiler_versions().items())
    source = f"meshweave calibrate --device {device}: {count} products in bfloat16, seed {seed}, {used}"
    kernels = ChipKernels(target.name, source, products=(("bfloat16", constants),))
    return DeviceCalibration(kernels, "bfloat16", count, float(errors.mean()), float(errors.max()))
