"""Products on GPUs in detail (`simulate.gpu`) beside measured ones (`catalog/kernels/gpu_gemm.csv`).

    python benchmarks/gpu_model.py [--count N] [--save]

Nothing of the descriptions (`catalog/gpus`) was fitted to these rows. Of a device's products in bfloat16 with all
sizes of at least 128 and from 1e9 to 4e11 FLOPs, N are taken, evenly spaced in the order of their FLOPs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from machine import save

from meshweave.base.units import to_s
from meshweave.describe.machine.gpu import GpuFile, load_gpu
from meshweave.describe.machine.measured_file import MeasuredKernel, shipped_measured
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse
from meshweave_studies.gpu import lower, run

DEVICES = {"A100-SXM4-80GB": "a100", "H100-SXM5-80GB": "h100"}
SMALLEST_SIDE, FEWEST_FLOPS, MOST_FLOPS = 128, 1e9, 4e11
CLASSES = {"under 10 GFLOP": (0, 1e10), "10 to 100 GFLOP": (1e10, 1e11), "over 100 GFLOP": (1e11, 1e13)}


def product(m: int, n: int, k: int) -> Program:
    """Return one product of (m, k) and the transpose of (n, k) on one GPU."""
    return parse(f"""
program("product")
tp = mesh((1,), ("x",))
A = tensor(({m}, {k}), "bfloat16")
B = tensor(({n}, {k}), "bfloat16")
C = tensor(({m}, {n}), "bfloat16")
a = input(A, tp[R])
b = input(B, tp[R])
c = output(C, tp[R])
compute = lane()
with tp:
    matmul(c, a, b, transpose_b=True, lane=compute)
""")


def flops(kernel: MeasuredKernel) -> int:
    """Return the operations of a product (m, n, k)."""
    m, n, k = kernel.sizes
    return 2 * m * n * k


def chosen(device: str, count: int) -> list[MeasuredKernel]:
    """Return rows of a device by a rule that looks at no time."""
    rows = sorted(
        (
            row
            for row in shipped_measured("gpu_gemm.csv").rows
            if row.device == device and row.group == "bfloat16"
            if min(row.sizes) >= SMALLEST_SIDE and FEWEST_FLOPS <= flops(row) <= MOST_FLOPS
        ),
        key=lambda row: (flops(row), row.sizes),
    )
    return [rows[(2 * number + 1) * len(rows) // (2 * count)] for number in range(count)]


def compared(gpu: GpuFile, kernel: MeasuredKernel) -> dict[str, Any]:
    """Return the simulated seconds of a product beside the measured ones."""
    m, n, k = kernel.sizes
    begun = time.process_time()
    made = run(lower(product(m, n, k), gpu), gpu, link_bytes_per_s=10**9, link_ps=10**6)
    seconds = to_s(made.spans[-1][2])
    return {
        "m": m,
        "n": n,
        "k": k,
        "measured_us": round(1e6 * kernel.seconds, 1),
        "simulated_us": round(1e6 * seconds, 1),
        "error_percent": round(100 * (seconds / kernel.seconds - 1), 1),
        "memory_bytes": sum(made.traffic_bytes.values()),
        "cpu_s": round(time.process_time() - begun, 2),
    }


def errors_of(rows: list[dict[str, Any]], least: float, end: float) -> dict[str, float]:
    """Return mean, median and largest absolute error in percent of the products of a range of FLOPs."""
    errors = [abs(row["error_percent"]) for row in rows if least <= 2 * row["m"] * row["n"] * row["k"] < end]
    if not errors:
        return {}
    of = {"mean": statistics.mean, "median": statistics.median, "worst": max}
    return {label: round(float(statistic(errors)), 1) for label, statistic in of.items()}


def main() -> None:
    """Simulate products of the devices, print them beside measured ones, and save them."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--count", type=int, default=10)
    options.add_argument("--save", action="store_true")
    given = options.parse_args()
    out: dict[str, Any] = {}
    for device, name in DEVICES.items():
        gpu = load_gpu(name)
        print(f"{device}: {name}\n{'m':>7}{'n':>7}{'k':>7}{'measured':>11}{'simulated':>11}{'error':>9}")
        rows = []
        for kernel in chosen(device, given.count):
            row = compared(gpu, kernel)
            rows.append(row)
            sizes = "".join(f"{row[size]:>7}" for size in "mnk")
            print(
                f"{sizes}{row['measured_us']:>8} us{row['simulated_us']:>8} us{row['error_percent']:>7} %",
                flush=True,
            )
        errors = {"all": errors_of(rows, 0, MOST_FLOPS)} | {
            label: errors_of(rows, *bounds) for label, bounds in CLASSES.items()
        }
        for label, known in errors.items():
            print(f"{label}: " + ", ".join(f"{what} {value} %" for what, value in known.items()))
        print()
        out[device] = {
            "gpu": name,
            "rows": rows,
            "mean_error_percent": errors["all"]["mean"],
            "median_error_percent": errors["all"]["median"],
            "errors_percent": errors,
        }
    if given.save:
        save("gpu_model", out)


if __name__ == "__main__":
    main()
