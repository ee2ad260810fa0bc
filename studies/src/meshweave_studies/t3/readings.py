"""Readings of T3: what table 1 and section 5 leave open of the GPU, its links and the order of tiles.

A reading changes the description of the GPU, the rate of a link, the order in which tiles are computed, the sets
of the cache or what the arbitration does, and nothing else. Occupancy and link were known to move rows when they
were named, so that these are no predictions.
`READINGS` are scored side by side; `VARIATIONS` change one constant without a source each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from meshweave.describe.machine.gpu import GpuFile, load_gpu
from meshweave.ir.program.release import TileOrder
from meshweave_studies.published import NamedReading, by_name

LINK_BYTES_PER_S = 150 * 10**9
"""Table 1: "150 GB/s bi-directional", read as 150 GB/s each way."""
TABLE_1, OCCUPANCY = "table-1", "occupancy"


@dataclass(frozen=True)
class T3Reading(NamedReading):
    """A choice for what the paper leaves open.

    Attributes:
        changes: (dotted key of a GPU's description, value).
        link_bytes_per_s: bytes per second of a link, each way.
        order: "rows" or "columns", which tile comes next; "" goes down bands of eight tiles.
        threshold: entries of a queue below which T3-MCA issues communication; 0 takes one from the product's own
            use of memory, as the paper does.
        drains: whether T3-MCA holds no communication back from the end of the product's last work group on.
        plain_sets: whether the cache puts a line in the set of its number, and not in that of a hash.
    """

    changes: tuple[tuple[str, Any], ...] = ()
    link_bytes_per_s: int = LINK_BYTES_PER_S
    order: TileOrder = ""
    threshold: int = 0
    drains: bool = False
    plain_sets: bool = False

    def gpu(self, name: str) -> GpuFile:
        """Return a GPU of the catalog as the reading has it."""
        return _changed(name, self.changes)


@lru_cache(maxsize=64)
def _changed(name: str, changes: tuple[tuple[str, Any], ...]) -> GpuFile:
    top = load_gpu(name).model_dump(by_alias=True)
    for key, value in changes:
        *tables, last = key.split(".")
        table = top
        for part in tables:
            table = table[part]
        assert last in table, key
        table[last] = list(value) if isinstance(value, tuple) else value
    return GpuFile.model_validate(top)


_ONE_GROUP = (("slots", 1), ("tile", (128, 128, 32)))
_HALF, _LESS = 75 * 10**9, 90 * 10**9
SUB_LAYER_ROWS = (
    *("ideal_overlap", "ideal_case", "t3", "mca", "mca_over_t3", "order"),
    *("near_memory", "near_memory_gain", "op_close", "op_exceeds", "fc_far", "mca_far"),
    *("product_slowed", "traffic", "scatter_reads", "writes", "product_reads"),
)
"""The rows of the 16 sub-layers of figures 16 and 18."""
READINGS: dict[str, T3Reading] = by_name(
    T3Reading(
        TABLE_1, "150 GB/s each way; two work groups a compute unit, with two slices of 64 along k each"
    ),
    T3Reading(
        OCCUPANCY,
        "as table-1, with one work group a compute unit, and slices of 32",
        _ONE_GROUP,
        rows=SUB_LAYER_ROWS,
    ),
    T3Reading(
        "link-75",
        "as table-1, with 75 GB/s each way, 150 both together",
        link_bytes_per_s=_HALF,
        rows=SUB_LAYER_ROWS,
    ),
    T3Reading(
        "link-90",
        "as table-1, with 90 GB/s each way",
        link_bytes_per_s=_LESS,
        rows=SUB_LAYER_ROWS,
    ),
    T3Reading("occupancy-75", "occupancy and link-75 together", _ONE_GROUP, _HALF, rows=SUB_LAYER_ROWS),
    T3Reading("rows", "as table-1, with tiles of T3's product along rows", order="rows", rows=SUB_LAYER_ROWS),
    T3Reading(
        "occupancy-plain-sets",
        "as occupancy, with lines of the cache in the set of their number, and not of a hash of it",
        _ONE_GROUP,
        plain_sets=True,
        rows=SUB_LAYER_ROWS,
    ),
)
"""By name, the default first."""
THRESHOLDS = {5: "5", 10: "10", 30: "30", 65: "none"}
"""Entries of a queue of 64 below which T3-MCA issues communication, and their names (section 6.1.3)."""
VARIATIONS: dict[str, T3Reading] = by_name(
    *(
        T3Reading(f"threshold {name}", "no cut points: one threshold for all", threshold=entries)
        for entries, name in THRESHOLDS.items()
    ),
    *(
        T3Reading(f"{key} = {value}", "", ((key, value),))
        for key, values in (
            ("memory.starvation", (100, 10_000)),
            ("memory.turn_limit", (8, 128)),
            ("memory.age_limit", (200, 20_000)),
            ("tracker.dma_lines", (512, 32_768)),
            ("slots", (1,)),
            ("in_flight_bytes", (8192, 32_768)),
        )
        for value in values
    ),
    T3Reading("slices of 32", "", (("tile", (128, 128, 32)),)),
    T3Reading("90 GB/s each way", "", link_bytes_per_s=_LESS),
    T3Reading("sets not hashed", "", plain_sets=True),
    T3Reading("tiles along columns", "", order="columns"),
)
"""By name: one constant without a source each, at other values."""
