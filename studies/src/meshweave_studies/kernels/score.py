"""Score the times of kernels by constants, and by a table of measured products, against measured ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshweave.cost.attention import attention_seconds
from meshweave.cost.libraries import collective_seconds
from meshweave.cost.product_table import TableInterpolation, item_bytes
from meshweave.cost.products import product_seconds
from meshweave.describe.catalog import kernel_constants_names
from meshweave.describe.machine.kernels import ChipKernels, ProductTable
from meshweave.describe.machine.kernels_file import load_kernels
from meshweave.describe.machine.measured_file import ATTENTION as ATTENTION
from meshweave.describe.machine.measured_file import COLLECTIVES as COLLECTIVES
from meshweave.describe.machine.measured_file import PRODUCTS as PRODUCTS
from meshweave.describe.machine.measured_file import (
    MeasuredKernel,
    MeasuredKernels,
    product_dtypes,
    shipped_measured,
)

Array = NDArray[np.float64]

LARGE_M = 256
LARGE_BYTES = 1 << 16
NO_CONSTANTS = "no constants"


@dataclass(frozen=True)
class Score:
    """Relative errors of one method over the rows of a device and dtype (or kind of collective), in one range.

    Attributes:
        method: "model", "table", or `NO_CONSTANTS`, whose errors are None.
        subset: the range of sizes in words, such as "m >= 256".
    """

    device: str
    group: str
    method: str
    subset: str
    rows: int
    mean: float | None = None
    median: float | None = None
    worst: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the score as plain values."""
        return asdict(self)


def sizes_of(rows: Sequence[MeasuredKernel]) -> Array:
    """Return the sizes of rows of one kind, shape (rows, sizes)."""
    return np.array([row.sizes for row in rows], dtype=np.float64)


def attention_columns(sizes: Array) -> Array:
    """Return (heads of all sequences, length, head size, bytes) of each attention in a dtype of two bytes.

    `sizes` has (batch, length, query heads, key heads, head size) of each.
    """
    batch, length, heads, kv_heads, width = sizes.T
    num_bytes = 2 * batch * length * width * (2 * heads + 2 * kv_heads)
    return np.stack([batch * heads, length, width, num_bytes], axis=1)


def subsets(kind: str, sizes: Array) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Yield (name, mask of the rows in it) of each range of sizes in which rows of a kind are scored apart."""
    if kind == ATTENTION:
        yield "all", np.ones(len(sizes), dtype=bool)
        return
    if kind == PRODUCTS:
        name, is_large = f"m >= {LARGE_M}", sizes[:, 0] >= LARGE_M
        other = f"m < {LARGE_M}"
    else:
        name, is_large, other = "from 64 KiB", sizes[:, 1] >= LARGE_BYTES, "below 64 KiB"
    yield name, is_large
    yield other, ~is_large


def predicted(kernels: ChipKernels, kind: str, group: str, sizes: Array) -> Array | None:
    """Return the seconds of kernels by constants; None where there are none for this kind and group."""
    if kind == PRODUCTS:
        (dtype, out_dtype), (m, n, k) = product_dtypes(group), sizes.T
        products, item = kernels.product(dtype), item_bytes(dtype)
        out_bytes = item_bytes(out_dtype) if out_dtype != dtype else 0
        return None if products is None else product_seconds(products, m, n, k, item, out_bytes=out_bytes)
    if kind == ATTENTION:
        attention = kernels.attention_of(group)
        if attention is None:
            return None
        heads, length, width, num_bytes = attention_columns(sizes).T
        return attention_seconds(attention, heads, length, length, width, num_bytes, causal=True)
    collective = kernels.collective(group)
    return None if collective is None else collective_seconds(collective, group, *sizes.T)


def scores_of(
    kind: str, device: str, group: str, method: str, sizes: Array, seconds: Array, measured: Array
) -> list[Score]:
    """Return the scores of predicted seconds beside measured ones, one for each range that has rows."""
    errors = np.abs(seconds / measured - 1)
    return [
        Score(
            device,
            group,
            method,
            name,
            int(chosen.sum()),
            *(round(float(of(errors[chosen])), 4) for of in (np.mean, np.median, np.max)),
        )
        for name, chosen in subsets(kind, sizes)
        if chosen.any()
    ]


@lru_cache(maxsize=1)
def _catalog() -> dict[str, ChipKernels]:
    return {kernels.name: kernels for kernels in map(load_kernels, kernel_constants_names())}


def catalog_kernels(device: str) -> ChipKernels | None:
    """Return the kernels of the catalog for a device by its name; None where it has none."""
    return _catalog().get(device)


def shipped_table(device: str, dtype: str) -> ProductTable | None:
    """Return the measured products of the catalog for a device and dtype; None where it has none."""
    rows = shipped_measured("gpu_gemm.csv").rows
    points = {row.sizes: row.seconds for row in rows if (row.device, row.group) == (device, dtype)}
    return ProductTable.of(points, "gpu_gemm.csv") if points else None


def score_kernels(
    measured: MeasuredKernels,
    kernels_of: Callable[[str], ChipKernels | None] = catalog_kernels,
    table_of: Callable[[str, str], ProductTable | None] = shipped_table,
) -> list[Score]:
    """Return the scores of measured kernels by device and dtype (or kind of collective).

    Products are scored by constants, and by a table of other measured products of the device: rows that are points
    of the table are left out there, because it gives them back.
    """
    groups: dict[tuple[str, str], list[MeasuredKernel]] = {}
    for row in measured.rows:
        groups.setdefault((row.device, row.group), []).append(row)
    out: list[Score] = []
    for (device, group), rows in sorted(groups.items()):
        kernels = kernels_of(device)
        sizes, seconds = sizes_of(rows), np.array([row.seconds for row in rows])
        times = None if kernels is None else predicted(kernels, measured.kind, group, sizes)
        if kernels is None or times is None:
            out.append(Score(device, group, NO_CONSTANTS, "all", len(rows)))
            continue
        out += scores_of(measured.kind, device, group, "model", sizes, times, seconds)
        table = (kernels.table(group) or table_of(device, group)) if measured.kind == PRODUCTS else None
        if table is not None:
            points = {point[:3] for point in table.points}
            is_new = np.array([row.sizes not in points for row in rows])
            if is_new.any():
                known = TableInterpolation(table, kernels.product(group), group)
                times = known.seconds(*sizes[is_new].T)
                out += scores_of(measured.kind, device, group, "table", sizes[is_new], times, seconds[is_new])
    return out


def overall(scores: Sequence[Score]) -> list[Score]:
    """Return the scores over all devices and groups by method and range: the mean, each row weighing alike, and
    the worst error. There is none for a method and range of one group.
    """
    out = []
    for method, subset in dict.fromkeys((score.method, score.subset) for score in scores):
        chosen = [x for x in scores if (x.method, x.subset) == (method, subset) and x.mean is not None]
        rows = sum(score.rows for score in chosen)
        if len(chosen) > 1:
            mean = sum(score.rows * (score.mean or 0) for score in chosen) / rows
            worst = max(score.worst or 0 for score in chosen)
            out.append(Score("all", "all", method, subset, rows, round(mean, 4), None, worst))
    return out
