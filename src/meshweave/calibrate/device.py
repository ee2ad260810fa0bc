"""Measure products on one device, CPU or CUDA, and fit the constants of its kernels.

Shapes are drawn by a seed: logarithms of m, n and k evenly, products of at most some FLOPs, so that none
takes long. Each is timed in loops of at least a millisecond, in another order each time, and its time is the
least: what else runs on a device only adds.
"""

from __future__ import annotations

import math
import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshweave.base.errors import DescriptionError, UnsupportedError
from meshweave.calibrate.kernel_fit import Hardware, fit_products
from meshweave.cost.product_table import item_bytes
from meshweave.cost.products import product_seconds
from meshweave.describe.machine.kernels import ChipKernels

if TYPE_CHECKING:
    import torch

Shape = tuple[int, int, int]
DEVICE_DTYPES = ("float32", "bfloat16", "float16")
_SMALLEST, _LARGEST = 16, 4096
_STEP = 8
_MOST_FLOPS = {"cpu": 2e9, "cuda": 2e12}
_LOOP_S = 1e-3
_MOST_LOOPS = 1000
_ABOVE_BEST = 1.25
"""The peak of a device without a data sheet is at most this times the best rate that was measured."""
_MEMORY_BYTES_PER_S = 1e13
"""An upper bound that no device reaches."""


@dataclass(frozen=True)
class DeviceCalibration:
    """The constants of products on a device, and the relative errors over the products they are fitted to."""

    kernels: ChipKernels
    dtype: str
    num_products: int
    mean_error: float
    worst_error: float

    @property
    def quality(self) -> str:
        """Return the errors in words."""
        return f"mean error {self.mean_error:.1%}, worst {self.worst_error:.1%} over {self.num_products} products"


def draw_shapes(count: int, seed: int, most_flops: float) -> list[Shape]:
    """Return so many different shapes (m, n, k), multiples of 8 and odd ones, of at most so many FLOPs."""
    draw = random.Random(seed)
    out: dict[Shape, None] = {}
    while len(out) < count:
        shape = tuple(_size(draw) for _ in range(3))
        if 2 * shape[0] * shape[1] * shape[2] <= most_flops:
            out[shape] = None  # type: ignore[index]
    return list(out)


def _size(draw: random.Random) -> int:
    size = round(math.exp(draw.uniform(math.log(_SMALLEST), math.log(_LARGEST))))
    return size if draw.random() < 0.25 else max(round(size / _STEP) * _STEP, _STEP)


def measure_products(
    device: str,
    dtype: str,
    shapes: Sequence[Shape],
    repeat: int,
    say: Callable[[str], None] = lambda text: None,
) -> list[float]:
    """Return the seconds of each product on a torch device, on one thread of a CPU.

    Raises:
        UnsupportedError: torch is missing, or has no such device.
    """
    try:
        import torch
    except ImportError:
        raise UnsupportedError("measuring products needs torch: pip install 'meshweave[torch]'") from None
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UnsupportedError(
            f"torch cannot use the device '{device}': {str(error).splitlines()[0]}"
        ) from None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(torch, device, dtype, shapes, repeat, say)
    finally:
        torch.set_num_threads(threads)


def _measure(
    torch: Any, device: str, dtype: str, shapes: Sequence[Shape], repeat: int, say: Callable[[str], None]
) -> list[float]:
    times: list[list[float]] = [[] for _ in shapes]
    order = list(range(len(shapes)))
    draw = random.Random(0)
    for turn in range(repeat + 1):
        say(f"products: {'warming up' if not turn else f'repetition {turn} of {repeat}'}")
        draw.shuffle(order)
        for at in order:
            m, n, k = shapes[at]
            a = torch.ones((m, k), device=device, dtype=getattr(torch, dtype))
            b = torch.ones((k, n), device=device, dtype=getattr(torch, dtype))
            seconds = _loop_s(torch, device, a, b)
            if turn:
                times[at].append(seconds)
    return [min(seconds) for seconds in times]


def _loop_s(torch: Any, device: str, a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the seconds of a product, from a loop that takes at least a millisecond after one to warm up."""
    out = torch.mm(a, b)
    loops, done = 1, 0.0
    while True:
        _wait(torch, device)
        begin = time.perf_counter()
        for _ in range(loops):
            torch.mm(a, b, out=out)
        _wait(torch, device)
        done = time.perf_counter() - begin
        if done >= _LOOP_S or loops >= _MOST_LOOPS:
            return done / loops
        loops = min(max(2 * loops, round(1.5 * loops * _LOOP_S / max(done, 1e-7))), _MOST_LOOPS)


def _wait(torch: Any, device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def fit_device(
    name: str, source: str, dtype: str, shapes: Sequence[Shape], seconds: Sequence[float], units: int
) -> DeviceCalibration:
    """Return the constants of products that give the measured seconds best, over the menus of tiles.

    Raises:
        DescriptionError: there are fewer products than constants can be fitted to.
    """
    if len(shapes) < 20:
        raise DescriptionError(f"{len(shapes)} products are too few to fit constants; give at least 20")
    sizes, measured = np.array(shapes, dtype=np.float64), np.array(seconds)
    best = float((2 * sizes.prod(axis=1) / measured).max())
    hardware = Hardware(units, _ABOVE_BEST * best, _MEMORY_BYTES_PER_S)
    constants = fit_products(sizes, measured, hardware, "cpu" if units == 1 else "gpu", item_bytes(dtype))
    m, n, k = sizes.T
    errors = np.abs(product_seconds(constants, m, n, k, item_bytes(dtype)) / measured - 1)
    kernels = ChipKernels(name, source, products=((dtype, constants),))
    return DeviceCalibration(kernels, dtype, len(shapes), float(errors.mean()), float(errors.max()))


def calibrate_device(
    device: str,
    dtype: str,
    count: int,
    repeat: int,
    seed: int,
    say: Callable[[str], None] = lambda text: None,
) -> DeviceCalibration:
    """Return the constants of products of a torch device ("cpu", "cuda", "cuda:1"), measured here and now.

    Raises:
        UnsupportedError: torch is missing, or has no such device.
    """
    is_cuda = device.startswith("cuda")
    most_flops = _MOST_FLOPS["cuda" if is_cuda else "cpu"]
    shapes = draw_shapes(count, seed, most_flops)
    seconds = measure_products(device, dtype, shapes, repeat, say)
    name, units = _identity(device)
    source = (
        f"meshweave calibrate --device {device}: {count} products in {dtype}, seed {seed}, least of {repeat}"
    )
    return fit_device(name, source, dtype, shapes, seconds, units)


def _identity(device: str) -> tuple[str, int]:
    """Return the name of a device, and its SMs; 1 for a CPU, of which one thread is measured."""
    import torch

    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        return str(properties.name), int(properties.multi_processor_count)
    return f"one thread of {platform.processor() or platform.machine()}", 1
