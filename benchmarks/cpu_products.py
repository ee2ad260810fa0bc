"""Times of products on one thread of this CPU by their shape, beside measured ones that were not fitted.

python benchmarks/cpu_products.py [--repeat 25] [--save]

150 products of one seed are fitted and 60 of another are scored; all are measured in one run, interleaved.
The quick calibration, of other products and a few seconds before that run, is scored by the same 60.
`others_busy` is the share of the machine's CPUs that other programs took meanwhile: a busy machine is slower.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import save

from meshweave.calibrate.device import (
    calibrate_cpu_quickly,
    draw_shapes,
    fit_device,
    measure_products,
)
from meshweave.calibrate.kernel_fit import DeviceCalibration
from meshweave.cost.product_table import item_bytes
from meshweave.cost.products import product_seconds

FITTED, SCORED, MOST_FLOPS = 150, 60, 2e9
FITTED_SEED, SCORED_SEED, QUICK_SEED = 0, 1, 2


def score(calibration: DeviceCalibration, dtype: str, shapes: Any, seconds: Any) -> dict[str, Any]:
    """Return the relative errors of a calibration over measured products, and the worst shape."""
    constants = calibration.kernels.product(dtype)
    assert constants is not None
    times = product_seconds(constants, *np.array(shapes, dtype=np.float64).T, item_bytes(dtype))
    errors = np.abs(times / np.array(seconds) - 1)
    return {
        "products": len(shapes),
        "mean": round(float(errors.mean()), 4),
        "median": round(float(np.median(errors)), 4),
        "worst": round(float(errors.max()), 4),
        "worst_shape": list(shapes[int(errors.argmax())]),
        "within_20_percent": int((errors <= 0.2).sum()),
        "fitted_mean": round(calibration.mean_error, 4),
        "fitted_worst": round(calibration.worst_error, 4),
    }


def cpu_s() -> tuple[float, float]:
    """Return the CPU seconds that all programs, and that this one, have used so far."""
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    used = sum(fields) - fields[3] - fields[4]
    own = resource.getrusage(resource.RUSAGE_SELF)
    return used / os.sysconf("SC_CLK_TCK"), own.ru_utime + own.ru_stime


def measured(dtype: str, repeat: int) -> dict[str, Any]:
    """Return the scores of both calibrations in one dtype."""
    begin, before = time.perf_counter(), cpu_s()
    quick = calibrate_cpu_quickly(dtype, QUICK_SEED)
    quick_s = time.perf_counter() - begin
    fitted, scored = (
        draw_shapes(n, seed, MOST_FLOPS) for n, seed in ((FITTED, FITTED_SEED), (SCORED, SCORED_SEED))
    )
    scored = [shape for shape in scored if shape not in set(fitted)]
    seconds = measure_products("cpu", dtype, fitted + scored, repeat)
    calibration = fit_device("CPU", "this run", dtype, fitted, seconds[: len(fitted)], 1)
    wall_s, after = time.perf_counter() - begin, cpu_s()
    others_s = (after[0] - before[0]) - (after[1] - before[1])
    rows = {
        "calibrated": score(calibration, dtype, scored, seconds[len(fitted) :]),
        "calibrated quickly": {
            "seconds": round(quick_s, 1),
            **score(quick, dtype, scored, seconds[len(fitted) :]),
        },
    }
    return {
        **rows,
        "repeat": repeat,
        "wall_s": round(wall_s, 1),
        "others_busy": round(max(others_s, 0.0) / wall_s / (os.cpu_count() or 1), 3),
    }


def main() -> None:
    """Print the scores, and save them if wanted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=25, help="repetitions of each product")
    parser.add_argument("--dtypes", default="float32", help="separated by commas")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/cpu_products.json")
    arguments = parser.parse_args()
    assert arguments.repeat >= 1 and math.isfinite(MOST_FLOPS)
    rows = {dtype: measured(dtype, arguments.repeat) for dtype in arguments.dtypes.split(",")}
    for dtype, row in rows.items():
        print(dtype, row)
    if arguments.save:
        print(save("cpu_products", {"torch": torch.__version__, **rows}))


if __name__ == "__main__":
    main()
