"""The time of the experts of a layer on a rank: grouped products up and down, with the activation between.

Each expert has rows of its own. A kernel cuts those of all experts into tiles of tm x tn, padded for each expert,
and takes the tm of a small menu that is fastest:

    step  = max(2 tm tn / (flops_per_s / units), (tm + tn) item / unit_bytes_per_s)   for each element of k
    tiles = sum over experts of ceil(rows / tm), times ceil(n / tn)
    c     = ceil(tiles / units) (k step + tile_s)
    m     = (n k item of each expert with rows + 2 bytes of rows (n + k)) / memory_bytes_per_s
    time  = launch_s + sum over both products of (c^p + m^p)^(1/p) + passes over rows

Where experts of tokens are chosen here too, kernels see copies whose experts lie on other ranks: passes go over
their buffers, and the grid of a product has tiles for them, which end at once. Constants are fitted by
`validation/fit_grouped.py` on measured layers and stand in `catalog/grouped.toml`, by the chip's kernels and
dtype. Chips of the same multiprocessors share them. A chip without them multiplies expert by expert in one batch
of equal products.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshweave.describe.files import parse_table

Array = NDArray[np.float64]

TILE_ROWS = np.array([16.0, 32.0, 64.0, 128.0])
"""Rows of a tile of C; it has 128 columns."""
_COLUMNS = 128
_ACTIVATION_BYTES = 2
_FILE = "grouped.toml"


@dataclass(frozen=True)
class GroupedConstants:
    """The constants of the time of experts' grouped products; the module docstring has the formula.

    Attributes:
        units: processors that compute a tile each. A count of the hardware, not fitted.
        item_bytes: bytes of an element of a weight. Not fitted.
        stream_passes: passes through memory over inputs, inner features and results of all rows.
        token_passes: passes over the features of tokens whose experts are chosen here.
        absent_passes: as `stream_passes`, over copies whose experts lie on other ranks.
        absent_tile_s: seconds of a tile without rows, on one unit.
    """

    units: int
    item_bytes: float
    launch_s: float
    flops_per_s: float
    unit_bytes_per_s: float
    memory_bytes_per_s: float
    tile_s: float
    overlap: float
    stream_passes: float
    token_passes: float
    absent_passes: float
    absent_tile_s: float


@dataclass(frozen=True)
class ExpertRows:
    """The sizes of the experts of one rank: arrays of equal length, one entry for each layer that is priced.

    Attributes:
        tokens: number of tokens whose experts are chosen on the rank; 0 where choosing is priced elsewhere.
        absent: number of copies of those tokens that go to experts on other ranks.
        absent_tiles: number of tiles, along the rows of C, that kernels launch for those copies.
        hidden, inner: features of a token, and inner features of an expert.
        columns: columns of the first product for each inner feature: 2 with a gate, else 1.
        rows: rows (copies of tokens) of all experts together.
        active: the number of experts that have rows.
        tiles: the number of tiles that the rows fill, shape (layers, heights of a tile in `TILE_ROWS`).
    """

    tokens: Array
    absent: Array
    absent_tiles: Array
    hidden: Array
    inner: Array
    columns: Array
    rows: Array
    active: Array
    tiles: Array


def even_rows(rows: int, hidden: int, inner: int, experts: int, columns: int) -> ExpertRows:
    """Return the sizes of one layer's experts on a rank, if its copies of tokens are evenly divided among them.

    Args:
        rows: number of copies of tokens on the rank.
        hidden, inner: features of a token, and inner features of an expert.
        experts: number of experts on the rank.
        columns: columns of the first product for each inner feature: 2 where experts are gated, else 1.

    Returns:
        One layer's sizes; `tokens` and `absent` are 0, so that the choice of experts is not priced.
    """
    active = float(min(experts, max(rows, 1)))
    tiles = active * np.ceil(rows / active / TILE_ROWS)[None, :]
    none, of_hidden, of_inner, of_columns, of_rows, of_active = (
        np.array([float(size)]) for size in (0, hidden, inner, columns, rows, active)
    )
    return ExpertRows(none, none, none, of_hidden, of_inner, of_columns, of_rows, of_active, tiles)


def grouped_seconds(of: GroupedConstants, rows: ExpertRows) -> Array:
    """Return the forward seconds of the experts of each layer in `rows` on one rank, shape (layers,)."""
    sizes = ((rows.columns * rows.inner, rows.hidden), (rows.hidden, rows.inner))
    total = sum((_product_seconds(of, rows, n, k) for n, k in sizes), np.zeros_like(rows.rows))
    row_s = (rows.hidden + (rows.columns + 1) * rows.inner) * _ACTIVATION_BYTES / of.memory_bytes_per_s
    total += of.launch_s + of.stream_passes * rows.rows * row_s
    if rows.tokens.any():
        token_s = of.token_passes * rows.hidden * _ACTIVATION_BYTES / of.memory_bytes_per_s
        num_tiles = rows.absent_tiles * sum(np.ceil(n / _COLUMNS) for n, _ in sizes)
        total += token_s * rows.tokens + of.absent_passes * rows.absent * row_s
        total += of.absent_tile_s * num_tiles / of.units
    return total


def _product_seconds(of: GroupedConstants, rows: ExpertRows, n: Array, k: Array) -> Array:
    waves = np.ceil(rows.tiles * np.ceil(n / _COLUMNS)[:, None] / of.units)
    step_s = np.maximum(
        2 * TILE_ROWS * _COLUMNS * of.units / of.flops_per_s,
        (TILE_ROWS + _COLUMNS) * of.item_bytes / of.unit_bytes_per_s,
    )
    compute_s = (waves * (k[:, None] * step_s + of.tile_s)).min(axis=1)
    weights = rows.active * n * k * of.item_bytes
    memory_s = (weights + rows.rows * (n + k) * _ACTIVATION_BYTES) / of.memory_bytes_per_s
    longer, shorter = np.maximum(compute_s, memory_s), np.minimum(compute_s, memory_s)
    out: Array = longer * (1 + (shorter / longer) ** of.overlap) ** (1 / of.overlap)
    return out


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    return parse_table((files("meshweave") / "catalog" / _FILE).read_text("utf-8"), _FILE, "toml")


@lru_cache(maxsize=256)
def grouped_constants(kernels: str, dtype: str) -> GroupedConstants | None:
    """Return the constants in `dtype` of a chip whose kernels are called `kernels`; None if the catalog has none.

    Where the catalog says that these kernels are like other ones, it returns the constants of those.
    """
    table = _table()
    names = kernels, table.get("like", {}).get(kernels, "")
    entry = next((of for name in names if (of := table["chips"].get(name, {}).get(dtype))), None)
    return None if entry is None else GroupedConstants(**entry["constants"])


@lru_cache(maxsize=1 << 14)
def grouped_s(of: GroupedConstants, shape: tuple[int, int, int, int, int]) -> float:
    """Return the forward seconds of one rank's experts with even rows.

    `shape` is (rows, hidden, inner, experts, columns), as of `even_rows`.
    """
    return float(grouped_seconds(of, even_rows(*shape))[0])
