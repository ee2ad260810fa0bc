"""GPUs in detail: compute units, last-level cache, memory controllers, DRAM, and the tracker of T3.

`meshweave simulate-gpu` simulates what is described here; all else takes a chip by its rates alone.
All durations are integers in picoseconds, all rates integers, so that equal descriptions give equal runs.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from meshweave.describe.catalog import catalog_text, gpu_names
from meshweave.describe.files import (
    Count,
    FileModel,
    Name,
    Rate,
    Size,
    fail_with_all,
    is_path,
    load_table,
    parse_table,
    validate_table,
)

Arbitration = Literal["round-robin", "compute-first", "communication-aware"]
ARBITRATIONS: tuple[Arbitration, ...] = ("round-robin", "compute-first", "communication-aware")


class DramTiming(FileModel):
    """Delays of DRAM in cycles of the memory clock, named as data sheets name them.

    `ccdwl` is `ccdl` after a near-memory update (T3, section 5.1). Refresh is left out.
    """

    ccd: Count = Field(description="column command to column command of another bank group")
    ccdl: Count = Field(description="column command to column command of the same bank group")
    ccdwl: Count = Field(description="near-memory update to a column command of the same bank group")
    rcd: Count = Field(description="opening a row to its first column command")
    rp: Count = Field(description="closing a row to opening another one of the bank")
    ras: Count = Field(description="opening a row to closing it")
    rc: Count = Field(description="opening a row to opening another one of the bank")
    rrd: Count = Field(description="opening a row to opening one of another bank")
    cl: Count = Field(description="column command to the data that it reads")
    wl: Count = Field(description="column command to the data that it writes")
    wtr: Count = Field(description="written data to a read")
    wr: Count = Field(description="written data to closing the row")
    rtp: Count = Field(description="a read to closing the row")


class MemoryFile(FileModel):
    """The memory of a GPU and its controllers."""

    clock_hz: Rate = Field(description="cycles per second of the memory")
    channels: Count = Field(description="channels, each with a controller")
    bank_groups: Count = Field(description="groups of banks of a channel")
    banks: Count = Field(description="banks of a channel, at most 64")
    row_bytes: Count = Field(description="bytes of a row")
    column_bytes: Literal[32] = Field(description="bytes of a column command")
    queue: Count = Field(description="requests in the queue of a controller")
    turn_limit: Count = Field(description="column commands before the bus turns for those that wait")
    age_limit: Count = Field(
        description="cycles after which the oldest request may close a row that is wanted"
    )
    starvation: Count = Field(description="cycles after which communication goes before computing")
    timing: DramTiming = Field(description="a table of delays")

    @property
    def bytes_per_s(self) -> float:
        """Return the bytes per second that all channels move at most."""
        return self.channels * self.column_bytes * self.clock_hz / self.timing.ccd


class CacheFile(FileModel):
    """The last-level cache of a GPU."""

    num_bytes: Size = Field(description="bytes of all banks", alias="bytes")
    line_bytes: Count = Field(description="bytes of a line")
    lines_per_set: Count = Field(description="lines of a set", alias="ways")
    banks: Count = Field(description="banks")
    bank_ps: Count = Field(description="picoseconds of a line in a bank")
    hit_ps: Count = Field(description="picoseconds from a bank to a compute unit")
    to_memory_ps: Count = Field(description="picoseconds from a bank to a memory controller")
    from_memory_ps: Count = Field(description="picoseconds from a memory controller to a compute unit")


class TrackerFile(FileModel):
    """The tracker of T3 and the DMA engine that it triggers (T3, section 4.2)."""

    sets: Count = Field(description="sets, by the number of the work group")
    entries_per_set: Count = Field(description="entries of a set", alias="ways")
    dma_lines: Count = Field(description="lines that may be read and not yet sent")
    dma_ps: Count = Field(description="picoseconds from a trigger to the first read")


class GpuFile(FileModel):
    """A GPU: compute units that run work groups, and what lies between them and memory."""

    name: Name = Field(description="the GPU's name, a string of printable characters")
    source: str = Field(description="where its numbers are from, a string", min_length=1)
    note: str = Field("", description="what is not published, and what stands in for it, a string")
    compute_units: Count = Field(description="compute units")
    flops_per_s: Rate = Field(description="FLOP/s of all units in matrix instructions")
    slots: Count = Field(description="work groups that a unit runs at once")
    tile: list[Count] = Field(description="m, n and k of a work group's tile", min_length=3, max_length=3)
    tiles: list[list[Count]] = Field(
        [], description="m and n of the tiles that a library chooses among, with split-K; none: `tile` alone"
    )
    store_ps: Count = Field(description="picoseconds in which a unit stores a line")
    in_flight_bytes: Count = Field(description="bytes that a unit may have asked for and not yet have")
    launch_ps: Count = Field(description="picoseconds between kernels")
    wavefronts: Count = Field(description="parts of a tile that are tracked apart")
    cache: CacheFile = Field(description="a table that describes the last-level cache")
    memory: MemoryFile = Field(description="a table that describes the memory and its controllers")
    tracker: TrackerFile = Field(description="a table that describes the tracker and the DMA engine")


def is_catalog_gpu(name: str) -> bool:
    """Return whether the catalog has a GPU of this name."""
    return name in gpu_names()


def gpu_reference(name_or_path: str | GpuFile, folder: Path | None = None) -> str:
    """Return a name of a GPU for `load_gpu` that holds in any folder.

    It is the catalog name, the absolute path of its file, or for a `GpuFile` its whole description as JSON. A
    file is found from `folder`; None is the working directory.

    Raises:
        DescriptionError: there is no such entry or file, or the description is wrong.
    """
    if isinstance(name_or_path, GpuFile):
        return name_or_path.model_dump_json(by_alias=True)
    known = name_or_path in gpu_names() or not is_path(name_or_path)
    reference = name_or_path if known else str(((folder or Path()) / name_or_path).resolve())
    load_gpu(reference)
    return reference


def load_gpu(name_or_path: str) -> GpuFile:
    """Return the GPU of a catalog name, of a TOML or JSON file, or of the text of one in JSON.

    Raises:
        DescriptionError: there is no such entry or file, or the description is wrong.
    """
    if name_or_path.startswith("{"):
        return _gpu_from(parse_table(name_or_path, "gpu", "json"), "gpu")
    if name_or_path not in gpu_names() and is_path(name_or_path):
        return _gpu_from(load_table(name_or_path), name_or_path)
    return _from_catalog(name_or_path)


@lru_cache(maxsize=16)
def _from_catalog(name: str) -> GpuFile:
    file = f"{name}.toml"
    return _gpu_from(parse_table(catalog_text("gpus", name), file, "toml"), file)


def _gpu_from(data: dict[str, Any], file: str) -> GpuFile:
    top, problems = validate_table(GpuFile, data)
    if top is None or problems:
        fail_with_all(file, problems)
    return top
