"""Compile products for TPUs, fit the constants of their kernels to the expected cycles, and score the fit.

python validation/fit_tpu.py --compile 150     # adds what compiles in 150 s; needs meshweave[tpu], but no TPU
python validation/fit_tpu.py                   # fits and scores what was compiled

writes the catalog's tpu_gemm.csv and tpu-*.toml, benchmarks/results/tpu_kernels.json and
validation/results/tpu_kernels.md. (The CSV of v6e has fewer shapes than the others', C in bfloat16 alone.)

Shapes are drawn by a seed, and those are added that a chip of the 4x4 mesh multiplies in the readings
`fixed-batch` and `public-defaults` of MeshSlice. Of each device, 60 products are scored by constants that are
fitted on the others, beside those of the same (n, k) with C in float32. All products of one (n, k) are on one
side, by a hash. The committed constants are those of all rows.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from meshweave.calibrate.cluster_toml import kernels_toml
from meshweave.cost.product_table import item_bytes
from meshweave.describe.machine.kernels import ChipKernels
from meshweave.describe.machine.kernels_file import load_kernels
from meshweave_studies.kernels.score import Score, predicted
from meshweave_studies.kernels.tables import tpu_page
from meshweave_studies.meshslice.measured_mesh import local_shapes
from meshweave_studies.meshslice.readings import READINGS
from meshweave_studies.tpu.products import (
    draw_tpu_shapes,
    fit_systolic,
    hardware_of,
    product_cycles,
)
from meshweave_studies.tpu.targets import TPU_TARGETS, TpuTarget, compiler_versions

ROOT = Path(__file__).parents[1]
CATALOG = ROOT / "src" / "meshweave" / "catalog" / "kernels"
PRODUCTS = CATALOG / "tpu_gemm.csv"
RESULTS = ROOT / "benchmarks" / "results" / "tpu_kernels.json"
PAGE = ROOT / "validation" / "results" / "tpu_kernels.md"
COLUMNS = ("device", "dtype", "out_dtype", "m", "n", "k", "cycles", "latency_ms")
DTYPE = "bfloat16"
DRAWN, SEED, SCORED = 200, 18, 60
GROUPS = [(name, out_dtype) for out_dtype in ("bfloat16", "float32") for name in TPU_TARGETS]
VERSIONS = "jax 0.10.2, libtpu 0.0.42.1"
"""The compiler of the kept cycles. Another one may expect others: then all are compiled anew."""

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Group:
    """The compiled products of one target: (m, n, k), dtype of C and cycles of each."""

    target: TpuTarget
    products: tuple[tuple[Shape, str, int], ...]

    @property
    def sizes(self) -> Any:
        """Return the sizes, shape (rows, 3)."""
        return np.array([shape for shape, _, _ in self.products], dtype=np.float64)

    @property
    def seconds(self) -> Any:
        """Return the expected seconds."""
        return np.array([cycles for _, _, cycles in self.products]) / self.target.cycles_per_s

    @property
    def out_dtypes(self) -> Any:
        """Return the dtype of C of each row."""
        return np.array([out_dtype for _, out_dtype, _ in self.products])

    def is_scored(self) -> Any:
        """Return which rows are scored: the (n, k) that a hash puts first, with `SCORED` rows in bfloat16."""
        keys = [hashlib.sha256(f"{n},{k}".encode()).hexdigest() for (_, n, k), _, _ in self.products]
        first = sorted(key for key, (_, out, _) in zip(keys, self.products, strict=True) if out == DTYPE)
        return np.array([key <= first[SCORED - 1] for key in keys])

    def kernels(self, chosen: Any) -> ChipKernels:
        """Return kernels with the constants fitted on the chosen rows."""
        out_bytes = np.array([item_bytes(dtype) for dtype in self.out_dtypes[chosen]])
        hardware, item = hardware_of(self.target), item_bytes(DTYPE)
        constants = fit_systolic(self.sizes[chosen], self.seconds[chosen], hardware, item, out_bytes)
        return ChipKernels(self.target.name, "", products=((DTYPE, constants),))


def wanted_shapes() -> list[Shape]:
    """Return the shapes to compile: drawn ones, and with every fifth of them a local one of MeshSlice."""
    runs = [READINGS[name].mesh for name in ("fixed-batch", "public-defaults")]
    local = sorted(
        {shape for run in runs if run for shape in local_shapes(run)}, key=lambda x: x[0] * x[1] * x[2]
    )
    out: list[Shape] = []
    for at, shape in enumerate(draw_tpu_shapes(DRAWN, SEED)):
        out.append(shape)
        if at % 5 == 4 and local:
            out.append(local.pop(0))
    return out + local


def read_products() -> dict[tuple[str, str], dict[Shape, int]]:
    """Return the kept cycles by device and dtype of C."""
    out: dict[tuple[str, str], dict[Shape, int]] = {}
    if PRODUCTS.exists():
        for row in csv.DictReader(PRODUCTS.read_text("utf-8").splitlines()):
            shape = int(row["m"]), int(row["n"]), int(row["k"])
            out.setdefault((row["device"], row["out_dtype"]), {})[shape] = int(row["cycles"])
    return out


def write_products(kept: dict[tuple[str, str], dict[Shape, int]]) -> None:
    """Write the cycles, and the milliseconds that they are at the device's clock."""
    clocks = {target.name: target.cycles_per_s for target in TPU_TARGETS.values()}
    lines = [",".join(COLUMNS)]
    for (device, out_dtype), products in sorted(kept.items()):
        for shape, cycles in products.items():
            values = (device, DTYPE, out_dtype, *shape, cycles, f"{1e3 * cycles / clocks[device]:.6g}")
            lines.append(",".join(map(str, values)))
    PRODUCTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def compile_more(seconds: float, say: Callable[[str], None]) -> None:
    """Compile products that are not kept yet, one group after another, until so many seconds have passed."""
    end, kept, shapes = time.monotonic() + seconds, read_products(), wanted_shapes()
    for name, out_dtype in GROUPS:
        target = TPU_TARGETS[name]
        products = kept.setdefault((target.name, out_dtype), {})
        missing = [shape for shape in shapes if shape not in products]
        for shape, cycles in zip(missing, product_cycles(target, missing, out_dtype), strict=False):
            products[shape] = cycles
            if time.monotonic() > end:
                break
        say(f"{target.name}, {out_dtype}: {len(products)} of {len(shapes)} products")
        write_products(kept)
        if time.monotonic() > end:
            return


def groups() -> list[tuple[str, Group]]:
    """Return the products of each target of which twice as many are kept as are scored."""
    kept, out = read_products(), []
    for name, target in TPU_TARGETS.items():
        products = [
            (shape, out_dtype, cycles)
            for (device, out_dtype), by_shape in kept.items()
            if device == target.name
            for shape, cycles in by_shape.items()
        ]
        if len(products) >= 2 * SCORED:
            out.append((name, Group(target, tuple(products))))
    return out


def score(group: Group) -> list[Score]:
    """Return the scores of the rows that are scored, by dtype of C, by constants fitted on the others."""
    scored, out = group.is_scored(), []
    kernels = group.kernels(~scored)
    for out_dtype in dict.fromkeys(group.out_dtypes):
        rows = scored & (group.out_dtypes == out_dtype)
        name = DTYPE if out_dtype == DTYPE else f"{DTYPE} to {out_dtype}"
        times = predicted(kernels, "products", name, group.sizes[rows])
        assert times is not None
        errors = np.abs(times / group.seconds[rows] - 1)
        figures = (round(float(of(errors)), 4) for of in (np.mean, np.median, np.max))
        out.append(Score(group.target.name, name, "model", "not fitted", int(rows.sum()), *figures))
    return out


def catalog_entry(name: str, group: Group) -> ChipKernels:
    """Return the kernels of the catalog: constants of all rows of a group."""
    kernels = group.kernels(np.ones(len(group.products), dtype=bool))
    source = (
        f"Fitted by validation/fit_tpu.py on cycles that XLA's compiler for TPUs expects ({VERSIONS}), operands "
        "in the chip's memory; errors on products not fitted stand in benchmarks/results/tpu_kernels.json"
    )
    path = CATALOG / f"{name}.toml"
    share = load_kernels(name).sustained_share if path.exists() else 1.0  # fit_stacks.py's
    return replace(kernels, source=source, sustained_share=share)


def main(say: Callable[[str], None] = print) -> None:
    """Compile what is missing if asked for, else write the kernels of the catalog and the scores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compile", type=float, default=0.0, metavar="SECONDS", help="compile for so long")
    given = parser.parse_args()
    if given.compile:
        used = ", ".join(f"{name} {number}" for name, number in compiler_versions().items())
        if used != VERSIONS:
            raise SystemExit(f"{PRODUCTS.name} was compiled by {VERSIONS}, here is {used}")
        compile_more(given.compile, say)
        return
    results: dict[str, Any] = {"scored": SCORED, "versions": VERSIONS, "held_out": []}
    for name, group in groups():
        fitted = int((~group.is_scored()).sum())
        for entry in score(group):
            results["held_out"].append({**entry.to_json(), "fitted": fitted})
            say(str(entry))
        text = kernels_toml(catalog_entry(name, group))
        (CATALOG / f"{name}.toml").write_text(text, encoding="utf-8")
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(tpu_page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
