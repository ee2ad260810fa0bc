"""Measure products on one device, CPU or CUDA, and fit the constants of its kernels.

Shapes are drawn by a seed: logarithms of m, n and k evenly, products of at most some FLOPs, so that none
takes long. Operands are random numbers. Each repetition takes all shapes in another order and times each by
the best of three loops of at least a millisecond. A shape's time is the lower quartile of its repetitions:
what else runs on a machine only adds, for seconds at a time, and the least of many would be a luck of
addresses that no other run has.

On CUDA a loop is a graph of products of several pairs of operands, of more bytes than the device's cache:
neither the host's time to launch a kernel nor operands that are still in the cache belong to it.
"""

from __future__ import annotations

import math
import platform
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from meshweave.base.errors import DescriptionError, UnsupportedError
from meshweave.calibrate.kernel_fit import DeviceCalibration, Hardware, fit_cpu_products, fit_products
from meshweave.cost.product_table import item_bytes
from meshweave.cost.products import product_seconds
from meshweave.describe.machine.kernels import ChipKernels, ProductModel

if TYPE_CHECKING:
    import torch

Shape = tuple[int, int, int]
DEVICE_DTYPES = ("float32", "bfloat16", "float16")
_SMALLEST = 16
_LARGEST = {"cpu": 4096, "cuda": 16384}
_STEP = 8
_MOST_FLOPS = {"cpu": 2e9, "cuda": 2e12}
_LOOP_S = 1e-3
_MOST_LOOPS = 1000
_GRAPH_S = 1e-2
_MOST_PAIRS = 8
_BEST_OF = 3
_QUANTILE = 0.25
_QUICK_PRODUCTS = 96
_LEAST_PRODUCTS = 20
_QUICK_FLOPS = 4e8
_QUICK_LOOP_S = 2e-4
_ABOVE_BEST = 1.25
"""The peak of a device without a data sheet is at most this times the best rate that was measured."""
_MEMORY_BYTES_PER_S = 1e13
"""An upper bound that no device reaches."""


def draw_shapes(count: int, seed: int, most_flops: float, largest: int = _LARGEST["cpu"]) -> list[Shape]:
    """Return `count` different shapes (m, n, k) of at most `most_flops` FLOPs each.

    Sizes are drawn evenly by logarithm from 16 to `largest`; three in four are then rounded to multiples of 8.
    Equal arguments, `seed` among them, give equal shapes.
    """
    draw = random.Random(seed)
    out: dict[Shape, None] = {}
    while len(out) < count:
        shape = tuple(_size(draw, largest) for _ in range(3))
        if 2 * shape[0] * shape[1] * shape[2] <= most_flops:
            out[shape] = None  # type: ignore[index]
    return list(out)


def _size(draw: random.Random, largest: int) -> int:
    size = round(math.exp(draw.uniform(math.log(_SMALLEST), math.log(largest))))
    return size if draw.random() < 0.25 else max(round(size / _STEP) * _STEP, _STEP)


def measure_products(
    device: str,
    dtype: str,
    shapes: Sequence[Shape],
    repeat: int,
    say: Callable[[str], None] = lambda text: None,
    loop_s: float = 0.0,
    most_s: float = math.inf,
) -> list[float]:
    """Return the seconds of each product on a torch device, on one thread of a CPU.

    Args:
        dtype: of the operands.
        shapes: (m, n, k) of each product.
        repeat: how often all shapes are measured; the lower quartile counts.
        say: called with lines of text on the progress.
        loop_s: the least seconds of a loop (a run of one product, timed as a whole) on a CPU; 0: a millisecond.
            On CUDA a loop takes about 10 ms.
        most_s: seconds after which no further repetition begins; there is always one.

    Raises:
        UnsupportedError: torch is missing, or has no such device, or it is neither a CPU nor of CUDA.
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
    if torch.device(device).type not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"products are measured on cpu and cuda, and not on '{device}', of which a host's clock says nothing"
        )
    times: list[list[float]] = [[] for _ in shapes]
    order = list(range(len(shapes)))
    draw = random.Random(0)
    begin = time.perf_counter()
    with _on_one_thread(torch):
        for turn in range(repeat):
            if turn and time.perf_counter() - begin > most_s:
                break
            say(f"products: repetition {turn + 1} of {repeat}")
            draw.shuffle(order)
            for at in order:
                if device.startswith("cuda"):
                    times[at].append(_graph_s(torch, device, dtype, shapes[at]))
                else:
                    a, b = _operands(torch, shapes[at], device, dtype)
                    times[at].append(_best_loop_s(torch, a, b, loop_s or _LOOP_S))
    return [float(np.quantile(seconds, _QUANTILE)) for seconds in times]


@contextmanager
def _on_one_thread(torch: Any) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _operands(torch: Any, shape: Shape, device: str, dtype: str) -> list[torch.Tensor]:
    """Return A (m, k) and B (k, n) of normal random numbers: a GPU multiplies ones with less power, so faster."""
    m, n, k = shape
    return [torch.randn(each, device=device).to(getattr(torch, dtype)) for each in ((m, k), (k, n))]


def _best_loop_s(torch: Any, a: torch.Tensor, b: torch.Tensor, loop_s: float) -> float:
    """Return the seconds of a product on a CPU: the best of loops of at least `loop_s`, after one to warm up."""
    out = torch.mm(a, b)

    def each_s(loops: int) -> float:
        begin = time.perf_counter()
        for _ in range(loops):
            torch.mm(a, b, out=out)
        return (time.perf_counter() - begin) / loops

    loops = min(math.ceil(loop_s / max(each_s(2), 1e-7)), _MOST_LOOPS)
    return min(each_s(loops) for _ in range(_BEST_OF))


def _graph_s(torch: Any, device: str, dtype: str, shape: Shape) -> float:
    """Return the seconds of a product on a CUDA device: the best of replays of a graph of products."""
    m, n, k = shape
    num_bytes = item_bytes(dtype) * (m * k + k * n + m * n)
    cache_bytes = 2 * int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 1 << 26))
    pairs = min(max(math.ceil(cache_bytes / num_bytes), 1), _MOST_PAIRS)
    with torch.cuda.device(device):
        operands = [_operands(torch, shape, device, dtype) for _ in range(pairs)]
        outs = [torch.mm(a, b) for a, b in operands]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def all_pairs(turns: int) -> None:
            for _ in range(turns):
                for (a, b), out in zip(operands, outs, strict=True):
                    torch.mm(a, b, out=out)

        def loop_s(work: Callable[[], None]) -> float:
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            return float(begin.elapsed_time(end)) * 1e-3

        turns = min(max(math.ceil(_GRAPH_S / max(loop_s(lambda: all_pairs(1)), 1e-6)), 1), _MOST_LOOPS)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_pairs(turns)
        loop_s(graph.replay)
        return min(loop_s(graph.replay) for _ in range(_BEST_OF)) / (turns * pairs)


def fit_device(
    name: str, source: str, dtype: str, shapes: Sequence[Shape], seconds: Sequence[float], units: int
) -> DeviceCalibration:
    """Return the constants of products that give the measured seconds best.

    Args:
        name, source: what the kernels are called, and where their numbers are from.
        dtype: of the operands.
        shapes: (m, n, k) of each product.
        seconds: of each of `shapes`.
        units: the compute units of the device, such as multiprocessors; 1 for one thread of a CPU.

    Raises:
        DescriptionError: there are fewer products than constants can be fitted to.
    """
    _check_count(len(shapes))
    sizes, measured = np.array(shapes, dtype=np.float64), np.array(seconds)
    best = float((2 * sizes.prod(axis=1) / measured).max())
    constants: ProductModel
    if units == 1:
        constants = fit_cpu_products(sizes, measured, item_bytes(dtype))
    else:
        hardware = Hardware(units, _ABOVE_BEST * best, _MEMORY_BYTES_PER_S)
        constants = fit_products(sizes, measured, hardware, "gpu", item_bytes(dtype))
    m, n, k = sizes.T
    errors = np.abs(product_seconds(constants, m, n, k, item_bytes(dtype)) / measured - 1)
    kernels = ChipKernels(name, source, products=((dtype, constants),))
    return DeviceCalibration(kernels, dtype, len(shapes), float(errors.mean()), float(errors.max()))


def _check_count(count: int) -> None:
    if count < _LEAST_PRODUCTS:
        raise DescriptionError(
            f"{count} products are too few to fit constants; give at least {_LEAST_PRODUCTS}"
        )


def calibrate_device(
    device: str,
    dtype: str,
    count: int,
    repeat: int,
    seed: int,
    say: Callable[[str], None] = lambda text: None,
) -> DeviceCalibration:
    """Return the constants of products of a torch device ("cpu", "cuda", "cuda:1"), measured here and now.

    Args:
        dtype: of the operands.
        count: the number of products.
        repeat: measured repetitions of each.
        seed: of the shapes (`draw_shapes`).
        say: called with lines of text on the progress.

    Raises:
        DescriptionError: `count` is less than 20, too few to fit constants to.
        UnsupportedError: torch is missing, or has no such device.
    """
    is_cuda = device.startswith("cuda")
    kind = "cuda" if is_cuda else "cpu"
    _check_count(count)
    shapes = draw_shapes(count, seed, _MOST_FLOPS[kind], _LARGEST[kind])
    seconds = measure_products(device, dtype, shapes, repeat, say)
    name, units = _identity(device)
    source = (
        f"meshweave calibrate --device {device}: {count} products in {dtype}, seed {seed}, {repeat} times"
    )
    return fit_device(name, source, dtype, shapes, seconds, units)


def calibrate_cpu_quickly(dtype: str = "float32", seed: int = 0, most_s: float = 3.5) -> DeviceCalibration:
    """Return the constants of products on one thread of this CPU from about `most_s` seconds of measuring.

    Products are small, and each is timed briefly: good enough to predict a run that follows at once. `dtype` is
    that of the operands; `seed` chooses their shapes.

    Raises:
        UnsupportedError: torch is missing.
    """
    shapes = draw_shapes(_QUICK_PRODUCTS, seed, _QUICK_FLOPS)
    begin = time.perf_counter()
    seconds = measure_products("cpu", dtype, shapes, 1000, loop_s=_QUICK_LOOP_S, most_s=most_s)
    name, units = _identity("cpu")
    source = f"{time.perf_counter() - begin:.1f} s of {len(shapes)} products in {dtype}, seed {seed}"
    return fit_device(name, source, dtype, shapes, seconds, units)


def _identity(device: str) -> tuple[str, int]:
    """Return the name of a device, and its SMs; 1 for a CPU, of which one thread is measured."""
    import torch

    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        return str(properties.name), int(properties.multi_processor_count)
    return f"one thread of {platform.processor() or platform.machine()}", 1
