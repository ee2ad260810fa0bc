"""Fit the constants of GPU kernels, and score the fit on parts that it has not seen.

python validation/fit_kernels.py

writes the catalog's kernels, benchmarks/results/kernels.json and validation/results/kernels.md.

The data are AIConfigurator's (src/meshweave/catalog/kernels/NOTICE.md). Held-out scores are of five parts,
each predicted by constants fitted on the other four. All products of one (n, k), attentions of one head count
and length, and collectives of one number of chips and bytes are in the same part, by a hash. Products are
besides fitted on m <= 2048 and scored above, and the other way round; and each third of the rows, by a hash of
m, n and k, is predicted by the others, as rows of another sample would be. The committed constants are those of
all rows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fit_stacks import sustaining

from meshweave.calibrate.cluster_toml import kernels_toml
from meshweave.calibrate.kernel_fit import Hardware, fit_products
from meshweave.cost.product_table import TableInterpolation, item_bytes
from meshweave.describe.catalog import kernel_constants_names
from meshweave.describe.machine.kernels import ChipKernels, ProductTable
from meshweave.describe.machine.kernels_file import load_kernels
from meshweave.describe.machine.measured_file import (
    ATTENTION,
    COLLECTIVES,
    LOW_PRECISIONS,
    MEASURED,
    PRODUCTS,
    MeasuredKernel,
    shipped_measured,
)
from meshweave_studies.kernels.fits import fit_attention, fit_collective
from meshweave_studies.kernels.score import (
    Score,
    attention_columns,
    overall,
    predicted,
    scores_of,
    sizes_of,
)
from meshweave_studies.kernels.tables import results_page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "kernels.json"
PAGE = ROOT / "validation" / "results" / "kernels.md"
CATALOG = ROOT / "src" / "meshweave" / "catalog" / "kernels"
PARTS = 5
MIDDLE_M = 2048
DATA = (
    "AIConfigurator (ai-dynamo/aiconfigurator, Apache-2.0, states of 2026-08 and 2026-09), a part of its rows"
)

DEVICES = {
    "A100-SXM4-80GB": Hardware(108, 312e12, 2.039e12),
    "H100-SXM5-80GB": Hardware(132, 989.5e12, 3.35e12),
    "H200-SXM": Hardware(132, 989.5e12, 4.8e12),
    "B200-SXM": Hardware(148, 2.25e15, 8e12),
    "B300-SXM": Hardware(148, 2.25e15, 8e12),
    "GB200": Hardware(148, 2.5e15, 8e12),
    "GB300": Hardware(148, 2.5e15, 8e12),
}
"""SMs, peak bfloat16 FLOP/s without sparsity and memory bandwidth, of NVIDIA's datasheets."""
PEAK_TIMES = {"bfloat16": 1, "fp8": 2, "fp8_tensor": 2, "fp8_block": 2, "nvfp4": 4}
"""Peaks of dtypes over that of bfloat16, of the same datasheets; that of nvfp4 on B300 and GB300 is 6."""
LIKE = {"B300-SXM": "B200-SXM", "GB300": "GB200"}
"""Devices without measured attention or collectives, and the one whose constants stand for theirs."""


@dataclass(frozen=True)
class Group:
    """The rows of one device and dtype (or kind of collective)."""

    kind: str
    device: str
    group: str
    rows: tuple[MeasuredKernel, ...]

    @property
    def sizes(self) -> Any:
        """Return the sizes, shape (rows, sizes)."""
        return sizes_of(self.rows)

    @property
    def seconds(self) -> Any:
        """Return the measured seconds."""
        return np.array([row.seconds for row in self.rows])

    def parts(self) -> Any:
        """Return the number of the part that each row is in, without neighbours in other parts."""
        return self._hashed({PRODUCTS: (1, 2), ATTENTION: (1, 2, 3), COLLECTIVES: (0, 1)}[self.kind], PARTS)

    def thirds(self) -> Any:
        """Return the number of the third that each row is in."""
        return self._hashed(tuple(range(len(self.rows[0].sizes))), 3)

    def _hashed(self, columns: tuple[int, ...], count: int) -> Any:
        keys = (",".join(str(row.sizes[column]) for column in columns) for row in self.rows)
        return np.array([int(hashlib.sha256(key.encode()).hexdigest(), 16) % count for key in keys])


def groups() -> list[Group]:
    """Return the groups of all files."""
    out = []
    for name in MEASURED:
        measured = shipped_measured(name)
        for device, group in sorted({(row.device, row.group) for row in measured.rows}):
            rows = tuple(row for row in measured.rows if (row.device, row.group) == (device, group))
            out.append(Group(measured.kind, device, group, rows))
    return out


def fitted(group: Group, chosen: Any) -> ChipKernels:
    """Return kernels with the constants of one group, fitted on the chosen rows."""
    sizes, seconds, hardware = group.sizes[chosen], group.seconds[chosen], DEVICES[group.device]
    if group.kind == COLLECTIVES:
        collective = fit_collective(group.group, sizes[:, 0], sizes[:, 1], seconds)
        return ChipKernels(group.device, DATA, collectives=((group.group, collective),))
    assert hardware is not None
    if group.kind == ATTENTION:
        attention = fit_attention(attention_columns(sizes), seconds, hardware)
        return ChipKernels(group.device, DATA, attention=((group.group, attention),))
    is_cast = group.group in LOW_PRECISIONS
    times = 6 if group.group == "nvfp4" and group.device in LIKE else PEAK_TIMES[group.group]
    known = Hardware(hardware.units, times * hardware.peak_flops_per_s, hardware.memory_bytes_per_s)
    tiles = "gpu-by-m" if group.group == "fp8" else "gpu"
    products = fit_products(sizes, seconds, known, tiles, item_bytes(group.group), is_cast=is_cast)
    return ChipKernels(group.device, DATA, products=((group.group, products),))


def table_seconds(group: Group, kernels: ChipKernels, chosen: Any, asked: Any) -> Any:
    """Return the seconds of some products by a table of the chosen ones."""
    points = {row.sizes: row.seconds for row, is_in in zip(group.rows, chosen, strict=True) if is_in}
    table = ProductTable.of(points)
    return TableInterpolation(table, kernels.product(group.group), group.group).seconds(*group.sizes[asked].T)


def held_out(group: Group, parts: Any) -> list[Score]:
    """Return the scores of each part by constants of the others; of products also by tables of the others."""
    model, table = np.zeros(len(group.rows)), np.zeros(len(group.rows))
    for part in range(parts.max() + 1):
        chosen, asked = parts != part, parts == part
        if not asked.any():
            continue
        kernels = fitted(group, chosen)
        times = predicted(kernels, group.kind, group.group, group.sizes[asked])
        assert times is not None
        model[asked] = times
        if group.kind == PRODUCTS:
            table[asked] = table_seconds(group, kernels, chosen, asked)
    methods = [("model", model)] + ([("table", table)] if group.kind == PRODUCTS else [])
    return [
        score
        for method, times in methods
        for score in scores_of(
            group.kind, group.device, group.group, method, group.sizes, times, group.seconds
        )
    ]


def extrapolated(group: Group) -> dict[str, list[Score]]:
    """Return the scores of large m by constants of small m, and the other way round, from m = 256 up."""
    m = group.sizes[:, 0]
    small, large = (m >= 256) & (m <= MIDDLE_M), m > MIDDLE_M
    out = {}
    for name, chosen, asked in (("large m by small", small, large), ("small m by large", large, small)):
        times = predicted(fitted(group, chosen), group.kind, group.group, group.sizes[asked])
        assert times is not None
        sizes, seconds = group.sizes[asked], group.seconds[asked]
        out[name] = scores_of(group.kind, group.device, group.group, "model", sizes, times, seconds)
    return out


def joined(device: str, fits: list[ChipKernels]) -> ChipKernels:
    """Return one chip's kernels from those of each group; float16 runs as bfloat16 does."""
    products = [entry for known in fits for entry in known.products]
    attention = [entry for known in fits for entry in known.attention]
    for entries in (products, attention):
        entries += [("float16", constants) for dtype, constants in entries if dtype == "bfloat16"]
    streaming = dict(products).get("bfloat16")
    said = f". Attention and collectives are those of {LIKE[device]}" if device in LIKE else ""
    said += ". Element-wise calls are not measured: launch and memory of products" if streaming else ""
    kernels = ChipKernels(
        device,
        f"Fitted by validation/fit_kernels.py on {DATA}; errors on parts that were not fitted stand in "
        f"benchmarks/results/kernels.json{said}",
        tuple(products),
        tuple(attention),
        tuple(entry for known in fits for entry in known.collectives),
        (streaming.launch_s, streaming.memory_bytes_per_s) if streaming else None,
        switch_reduces=not device.startswith("A100"),  # NVLink SHARP came with the switch of H100
    )
    if device.lower() not in kernel_constants_names():
        return kernels
    fitted = load_kernels(device.lower())  # what validation/fit_stacks.py fitted stays
    shares = {dtype: fitted.sustained_of(dtype) for dtype, _ in products}
    own = {dtype: share for dtype, share in shares.items() if share != fitted.sustained_share}
    return sustaining(kernels, {"": fitted.sustained_share} | own)


def borrowed(device: str, by_device: dict[str, list[ChipKernels]]) -> list[ChipKernels]:
    """Return the fits of attention and collectives that stand for those of a device without any."""
    return [fit for fit in by_device[LIKE[device]] if not fit.products] if device in LIKE else []


def main(say: Callable[[str], None] = print) -> None:
    """Write the kernels of the catalog and the scores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    by_device: dict[str, list[ChipKernels]] = {device: [] for device in DEVICES}
    results: dict[str, Any] = {
        "data": DATA,
        "parts": PARTS,
        "middle_m": MIDDLE_M,
        "held_out": {},
        "thirds": [],
        "extrapolated": {},
    }
    for group in groups():
        by_device[group.device].append(fitted(group, np.ones(len(group.rows), dtype=bool)))
        scores = held_out(group, group.parts())
        results["held_out"].setdefault(group.kind, []).extend(score.to_json() for score in scores)
        for score in scores:
            say(f"{group.kind} {score}")
        if group.kind == PRODUCTS:
            thirds = held_out(group, group.thirds())
            results["thirds"] += [score.to_json() for score in thirds]
            say(f"thirds: {thirds}")
            for name, apart in extrapolated(group).items():
                results["extrapolated"].setdefault(name, []).extend(score.to_json() for score in apart)
                say(f"{name}: {apart}")
    for kind, scores_json in results["held_out"].items():
        results.setdefault("overall", {})[kind] = [
            score.to_json() for score in overall([Score(**score) for score in scores_json])
        ]
    for device, fits in by_device.items():
        text = kernels_toml(joined(device, fits + borrowed(device, by_device)))
        (CATALOG / f"{device.lower()}.toml").write_text(text, encoding="utf-8")
    PAGE.write_text(results_page(results), encoding="utf-8")
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
