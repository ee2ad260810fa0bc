"""Clusters: a chip, and the network between chips, from a TOML file or the catalog."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from meshweave.base.errors import DescriptionError, nearest
from meshweave.base.units import DTYPES
from meshweave.describe.catalog import catalog_text, cluster_names
from meshweave.describe.files import (
    Count,
    Duration,
    FileModel,
    Name,
    Rate,
    Size,
    check,
    fail,
    is_path,
    load,
    parse,
    shown,
)
from meshweave.describe.machine.network import (
    COMM_KINDS,
    CommConstants,
    FullMesh,
    Hosts,
    Network,
    NetworkAxis,
    Ring,
    Switch,
    Torus,
    Tree,
    TreeLevel,
    require,
)

__all__ = [
    "COMM_KINDS",
    "Chip",
    "Cluster",
    "CommConstants",
    "FullMesh",
    "Hosts",
    "Network",
    "NetworkAxis",
    "Ring",
    "Switch",
    "Torus",
    "Tree",
    "TreeLevel",
    "load_cluster",
]


@dataclass(frozen=True)
class Chip:
    """One accelerator (or process) of a cluster.

    `peak_flops_per_s` holds (dtype, FLOP/s) pairs. `effective_flops_per_s` is what large GeMMs reach.
    `launch_s` is the time to start one kernel. `gemm_tile` is (m, n, k) in elements: the tiles in which a
    product streams through on-chip memory; None where products load the memory with nothing.
    `accumulate_share` is the share of the FLOP rate that is lost to products while an accumulate into another
    chip's memory runs at its full rate: it is a kernel. Only simulation knows of it. Raises DescriptionError.
    """

    name: str
    peak_flops_per_s: tuple[tuple[str, float], ...]
    effective_flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    launch_s: float = 0.0
    source: str = ""
    gemm_tile: tuple[int, int, int] | None = None
    accumulate_share: float = 0.0

    def __post_init__(self) -> None:
        if not self.peak_flops_per_s:
            raise DescriptionError(f"chip {self.name}: peak_flops_per_s is empty; give one dtype at least")
        require(f"chip {self.name}", 1, **{f"peak_flops_per_s.{d}": f for d, f in self.peak_flops_per_s})
        require(f"chip {self.name}", 1, effective_flops_per_s=self.effective_flops_per_s)
        require(
            f"chip {self.name}", 1, memory_bytes=self.memory_bytes, memory_bytes_per_s=self.memory_bytes_per_s
        )
        require(f"chip {self.name}", 0, launch_s=self.launch_s, accumulate_share=self.accumulate_share)
        if self.accumulate_share > 1:
            raise DescriptionError(
                f"chip {self.name}: accumulate_share is {self.accumulate_share}; give a share from 0 to 1"
            )
        if self.gemm_tile is not None and (len(self.gemm_tile) != 3 or min(self.gemm_tile) < 1):
            raise DescriptionError(
                f"chip {self.name}: gemm_tile is {self.gemm_tile}; give three counts (m, n, k) of at least 1"
            )

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s in `dtype`. Raises DescriptionError where the chip's table has none."""
        for known, flops_per_s in self.peak_flops_per_s:
            if known == dtype:
                return flops_per_s
        known_dtypes = [known for known, _ in self.peak_flops_per_s]
        raise DescriptionError(
            f"chip {self.name} has no peak_flops_per_s for '{dtype}'{nearest(dtype, known_dtypes)}; "
            f"it has {', '.join(known_dtypes)}"
        )


@dataclass(frozen=True)
class Cluster:
    """A named machine. `source` says where its numbers are from, `note` what to know before use.

    `host_launch_s` is the time the host spends to issue one operation of any sort. `send_buffer_bytes` is how
    much a rank's transport takes over of one message: a send of at most so many bytes ends once it is matched,
    while the bytes are still on their way (sockets); 0 where a send lasts until they have arrived. Only
    simulation knows of it.
    """

    name: str
    chip: Chip
    network: Network
    source: str
    host_launch_s: float = 0.0
    note: str = field(default="", compare=False)
    send_buffer_bytes: int = 0

    @property
    def num_chips(self) -> int:
        return self.network.num_chips

    def with_chips(self, chips: int) -> Cluster:
        """The same machine with another number of chips. Raises DescriptionError."""
        if chips < 1:
            raise DescriptionError(f"cluster {self.name}: {chips} chips; give at least 1")
        try:
            return replace(self, network=self.network.with_chips(chips))
        except DescriptionError as error:
            raise DescriptionError(f"cluster {self.name}: {error}") from None


class _ChipFile(FileModel):
    name: Name = Field(description="the chip's name, a string of printable characters")
    source: str = Field("", description="where the chip's numbers are from, a string")
    peak_flops_per_s: dict[str, Rate] = Field(
        description="a table of peak FLOP/s by dtype, each a number of at least 1", min_length=1
    )
    effective_flops_per_s: Rate | None = Field(
        None, description="FLOP/s that large GeMMs reach (left out: the highest peak), a number of at least 1"
    )
    memory_bytes: Size = Field(description="the memory of one chip in bytes, a whole number of at least 1")
    memory_bytes_per_s: Rate = Field(description="the memory's bytes per second, a number of at least 1")
    launch_s: Duration = Field(0.0, description="seconds to start one kernel, from 0 to 1e6")
    gemm_tile: list[Count] | None = Field(
        None,
        description="a list of three counts, m, n and k in elements: the tiles in which a product streams "
        "through on-chip memory (left out: products do not load the memory)",
        min_length=3,
        max_length=3,
    )
    accumulate_share: float = Field(
        0.0,
        description="the share of the FLOP rate that products lose beside an accumulate, from 0 to 1",
        ge=0,
        le=1,
    )


class _CommFile(FileModel):
    bytes_per_s: Rate = Field(description="bytes per second into one chip, a number of at least 1")
    sync_s: Duration = Field(description="seconds of synchronisation per step, from 0 to 1e6")
    launch_s: Duration = Field(description="seconds to launch the operation, from 0 to 1e6")


class _CommTable(FileModel):
    all_gather: _CommFile | None = Field(None, description="a table of bytes_per_s, sync_s and launch_s")
    reduce_scatter: _CommFile | None = Field(None, description="a table of bytes_per_s, sync_s and launch_s")
    all_reduce: _CommFile | None = Field(None, description="a table of bytes_per_s, sync_s and launch_s")
    broadcast: _CommFile | None = Field(None, description="a table of bytes_per_s, sync_s and launch_s")
    reduce: _CommFile | None = Field(None, description="a table of bytes_per_s, sync_s and launch_s")
    all_to_all: _CommFile | None = Field(None, description="a table of bytes_per_s, sync_s and launch_s")
    send_recv: _CommFile | None = Field(None, description="a table of bytes_per_s, sync_s and launch_s")
    accumulate: _CommFile | None = Field(None, description="a table of bytes_per_s, sync_s and launch_s")


class _AxisFile(FileModel):
    name: Name = Field(description="the axis's name, a string of printable characters")
    source: str = Field("", description="where the axis's numbers are from, a string")
    link_bytes_per_s: Rate = Field(
        description="bytes per second of one link in one direction, a number of at least 1"
    )
    link_latency_s: Duration = Field(0.0, description="seconds of latency of one link, from 0 to 1e6")
    ways: Literal[1, 2] = Field(1, description="the number of directions a ring collective uses, 1 or 2")
    launch_s: Duration = Field(0.0, description="seconds to launch a collective, from 0 to 1e6")
    constants: _CommTable = Field(
        default_factory=lambda: _CommTable.model_validate({}),
        description="a table of constants by kind of communication",
    )

    def axis(self) -> NetworkAxis:
        have = ((kind, getattr(self.constants, kind)) for kind in COMM_KINDS)
        constants = tuple((k, CommConstants(c.bytes_per_s, c.sync_s, c.launch_s)) for k, c in have if c)
        return NetworkAxis(
            self.name,
            self.link_bytes_per_s,
            self.link_latency_s,
            self.ways,
            constants,
            self.launch_s,
            self.source,
        )


class _TorusFile(FileModel):
    axes: list[_AxisFile] = Field(
        description="a list of 1 to 6 tables, one per dimension", min_length=1, max_length=6
    )
    shape: list[Count] | None = Field(None, description="a list of sizes, one per axis, each at least 1")
    reconfigurable: bool = Field(False, description="true where any shape can be had, else false")
    chips: Count | None = Field(None, description="the number of chips, a whole number of at least 1")
    min_chips: Count = Field(1, description="the fewest chips it comes with, a whole number of at least 1")
    max_chips: Count = Field(65536, description="the most chips it comes with, a whole number of at least 1")

    def network(self) -> Network:
        chips = self.chips
        if chips is None:
            if self.shape is None:
                raise DescriptionError("torus: neither a shape nor chips; give one of them")
            chips = 1
            for size in self.shape:
                chips *= size
        shape = tuple(self.shape) if self.shape is not None else None
        axes = tuple(axis.axis() for axis in self.axes)
        return Torus(axes, shape, chips, self.reconfigurable, self.min_chips, self.max_chips)


class _RingFile(FileModel):
    size: Count = Field(description="the number of chips, a whole number of at least 1")
    axis: _AxisFile = Field(description="a table that describes the links")

    def network(self) -> Network:
        return Ring(self.axis.axis(), self.size)


class _SwitchFile(_RingFile):
    def network(self) -> Network:
        return Switch(self.axis.axis(), self.size)


class _HostsFile(FileModel):
    num_hosts: Count = Field(description="the number of hosts, a whole number of at least 1")
    chips_per_host: Count = Field(description="the number of chips in a host, a whole number of at least 1")
    nics_per_host: Count = Field(description="the number of NICs of a host, a whole number of at least 1")
    intra: _AxisFile = Field(description="a table that describes the links inside a host")
    nic: _AxisFile = Field(description="a table that describes one NIC")

    def network(self) -> Network:
        return Hosts(
            self.num_hosts, self.chips_per_host, self.intra.axis(), self.nics_per_host, self.nic.axis()
        )


class _FullMeshFile(FileModel):
    num_packages: Count = Field(description="the number of packages, a whole number of at least 1")
    chips_per_package: Count = Field(1, description="the number of chips in a package, at least 1")
    inner: _AxisFile | None = Field(
        None, description="a table that describes a link inside a package (left out: as between packages)"
    )
    link: _AxisFile = Field(description="a table that describes a link between packages")

    def network(self) -> Network:
        link = self.link.axis()
        inner = self.inner.axis() if self.inner else link
        return FullMesh(self.num_packages, self.chips_per_package, inner, link)


class _LevelFile(FileModel):
    fanout: Count = Field(description="how many of the level below hang on one switch, at least 1")
    links: Count = Field(1, description="the number of parallel links of each of them, at least 1")
    axis: _AxisFile = Field(description="a table that describes one such link")


class _TreeFile(FileModel):
    levels: list[_LevelFile] = Field(
        description="a list of 1 to 6 tables, one per level of switches from the chips up",
        min_length=1,
        max_length=6,
    )

    def network(self) -> Network:
        return Tree(tuple(TreeLevel(one.fanout, one.axis.axis(), one.links) for one in self.levels))


_NETWORKS: dict[str, type[_TorusFile | _RingFile | _HostsFile | _TreeFile | _FullMeshFile]] = {
    "torus": _TorusFile,
    "ring": _RingFile,
    "switch": _SwitchFile,
    "hosts": _HostsFile,
    "tree": _TreeFile,
    "full_mesh": _FullMeshFile,
}


_Room = Annotated[int, Field(ge=0, le=2**60)]


class _ClusterFile(FileModel):
    name: Name = Field(description="the cluster's name, a string of printable characters")
    source: str = Field(description="where the numbers are from, a string", min_length=1)
    note: str = Field("", description="what to know before use, a string")
    host_launch_s: Duration = Field(0.0, description="seconds the host spends per operation, from 0 to 1e6")
    send_buffer_bytes: _Room = Field(
        0, description="bytes of a message that a send need not wait for, a whole number of at least 0"
    )
    chip: _ChipFile = Field(description="a table that describes the chip")
    network: dict[str, Any] = Field(description="a table that describes the network, with its kind")


def _cluster(data: dict[str, Any], file: str | Path) -> Cluster:
    top = check(_ClusterFile, data, file)
    table = dict(top.network)
    kind = table.pop("kind", None)
    if not isinstance(kind, str) or kind not in _NETWORKS:
        what = "missing" if kind is None else f"{shown(kind)} is not a kind of network"
        hint = nearest(kind, _NETWORKS) if isinstance(kind, str) else ""
        fail(file, "network.kind", f"{what}{hint}; give one of {', '.join(_NETWORKS)}")
    network = check(_NETWORKS[kind], table, file, ("network",))
    for dtype in top.chip.peak_flops_per_s:
        if dtype not in DTYPES:
            key = f"chip.peak_flops_per_s.{dtype}"
            fail(file, key, f"unknown dtype{nearest(dtype, DTYPES)}; known dtypes: {', '.join(DTYPES)}")
    c = top.chip
    peaks = tuple(c.peak_flops_per_s.items())
    effective = c.effective_flops_per_s
    if effective is None:
        effective = max(flops_per_s for _, flops_per_s in peaks)
    tile = (c.gemm_tile[0], c.gemm_tile[1], c.gemm_tile[2]) if c.gemm_tile else None
    source = c.source or top.source
    sizes = c.memory_bytes, c.memory_bytes_per_s
    chip = Chip(c.name, peaks, effective, *sizes, c.launch_s, source, tile, c.accumulate_share)
    try:
        return Cluster(
            top.name,
            chip,
            network.network(),
            top.source,
            top.host_launch_s,
            top.note,
            top.send_buffer_bytes,
        )
    except DescriptionError as error:
        fail(file, "network", str(error))


def load_cluster(name_or_path: str | Path) -> Cluster:
    """The cluster of a catalog name (`tpu-v4-pod`) or of a TOML or JSON file.

    `:N` after either sets the number of chips (`tpu-v4-pod:64`). Raises DescriptionError.
    """
    given = str(name_or_path)
    as_is = isinstance(name_or_path, Path) or os.path.exists(given)  # noqa: PTH110  (unlike Path's, never raises)
    match = None if as_is else re.fullmatch(r"(.+):([^:/\\]*)", given, re.DOTALL)
    where, chips = (match[1], match[2]) if match else (given, None)
    if chips is not None and not re.fullmatch(r"[0-9]{1,9}", chips):
        fail(given, "", "what follows the colon is the number of chips; give a whole number such as :64")
    if isinstance(name_or_path, Path) or (where not in cluster_names() and is_path(where)):
        cluster = _cluster(load(where), where)
    else:
        cluster = _cluster(parse(catalog_text("clusters", where), f"{where}.toml", "toml"), f"{where}.toml")
    return cluster if chips is None else cluster.with_chips(int(chips))
