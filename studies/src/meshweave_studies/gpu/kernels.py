"""The kernels of a GPU as lists of units and regions, as the core takes them (`csrc/gpu.hpp`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.int64]
_STORE, _PEER = 2, 12
"""Where a unit's row has how it stores, and the peer that it sends to."""


class Source(IntEnum):
    """Whom an access to memory is counted for."""

    PRODUCT_READ = 0
    PRODUCT_WRITE = 1
    REDUCE_SCATTER_READ = 2
    REDUCE_SCATTER_WRITE = 3
    ALL_GATHER_READ = 4
    ALL_GATHER_WRITE = 5
    OTHER_READ = 6
    OTHER_WRITE = 7


class StoreTarget(IntEnum):
    """How a unit stores: through the cache, past it, or to the next GPU; as a write or as an update."""

    CACHED = 0
    LOCAL = 1
    LOCAL_UPDATE = 2
    REMOTE = 3
    REMOTE_UPDATE = 4


@dataclass(frozen=True)
class Rectangle:
    """Rows of bytes in memory: address of the first, number, bytes of a row, bytes from one to the next."""

    base: int
    rows: int
    row_bytes: int
    stride: int


@dataclass
class Region:
    """A rectangle that units store to.

    Attributes:
        updates: stores of the whole region, local and remote, that complete it; 0 where it is not tracked.
        kernel: number of the kernel that ends only after the region is complete; -1 for none.
        dma_to: number of the region of another GPU, `dma_peer` places on, to which the tracker has it sent; -1 for
            none. A region without updates is sent when `kernel` starts.
        dma_updates: whether what is sent so is added to what is there.
        read, write: whom reads of it to be sent, and writes that arrive in it, are counted for.
        tracker_set: the set of the tracker that counts its stores, modulo the number of sets.
    """

    rectangle: Rectangle
    updates: int = 0
    kernel: int = -1
    dma_to: int = -1
    dma_updates: bool = False
    read: Source = Source.REDUCE_SCATTER_READ
    write: Source = Source.REDUCE_SCATTER_WRITE
    tracker_set: int = 0
    dma_peer: int = 0


@dataclass(frozen=True)
class ProductOperands:
    """A and B of a product: addresses, bytes from row to row, and whether elements along k lie side by side."""

    a: int
    a_stride: int
    a_by_k: bool
    b: int
    b_stride: int
    b_by_k: bool
    item_bytes: int
    slice_k: int


@dataclass
class GpuKernel:
    """Units that compute units take in turn.

    Attributes:
        units: rows of the core's table without the number of the kernel.
        compute_units: how many it may use; 0 for all.
        slots: work groups that each runs at once; 0 for as many as the machine says.
    """

    name: str
    read: Source
    write: Source
    units: list[tuple[int, ...]] = field(default_factory=list)
    compute_units: int = 0
    slots: int = 0


@dataclass
class Kernels:
    """What one GPU runs, kernel after kernel."""

    kernels: list[GpuKernel] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    operands: list[ProductOperands] = field(default_factory=list)

    @property
    def peers(self) -> frozenset[int]:
        """Return the GPUs that this one sends to, each by how many places after this one it stands."""
        stores = (unit for kernel in self.kernels for unit in kernel.units)
        remote = (StoreTarget.REMOTE, StoreTarget.REMOTE_UPDATE)
        to = {unit[_PEER] for unit in stores if unit[_STORE] in remote}
        return frozenset(to | {region.dma_peer for region in self.regions if region.dma_to >= 0})

    def add_kernel(self, name: str, read: Source, write: Source) -> int:
        """Append a kernel and return its number."""
        self.kernels.append(GpuKernel(name, read, write))
        return len(self.kernels) - 1

    def add_region(self, region: Region) -> int:
        """Append a region and return its number."""
        self.regions.append(region)
        return len(self.regions) - 1

    def add_operands(self, operands: ProductOperands) -> int:
        """Append operands and return their number."""
        self.operands.append(operands)
        return len(self.operands) - 1

    def add_tile(
        self,
        kernel: int,
        region: int,
        store: StoreTarget,
        operands: int,
        tile: tuple[int, int, int, int],
        k: tuple[int, int],
        *,
        peer: int = 0,
        waits: tuple[int, int] = (-1, 0),
    ) -> None:
        """Append to kernel number `kernel` a unit that computes rows and columns `tile` (i0, i1, j0, j1) of the
        product of operands number `operands` over `k` (k0, k1), and stores them to region number `region`.

        Args:
            peer: how many places on the GPU is that a remote store goes to.
            waits: the first region that it waits for, -1 for none, and how many that follow each other.
        """
        row = (region, waits[0], store, operands, *tile, *k, -1, -1, peer, waits[1])
        self.kernels[kernel].units.append(row)

    def add_move(
        self, kernel: int, region: int, store: StoreTarget, reads: tuple[int, ...], wait: int = -1
    ) -> None:
        """Append to kernel number `kernel` a unit that reads the regions numbered `reads`, one or two, and stores
        their sum into region number `region`; a remote store goes to the next GPU.

        Args:
            wait: the number of the region that must be complete first; -1 for none.
        """
        first, second = (*reads, -1)[:2]
        self.kernels[kernel].units.append(
            (region, wait, store, -1, 0, 0, 0, 0, 0, 0, first, second, 1, int(wait >= 0))
        )

    def columns(self, launch_ps: int, slots: int, compute_units: int, observed: int) -> Mapping[str, Column]:
        """Return the columns of kernels, units, regions and operands.

        Args:
            slots, compute_units: of kernels that do not say them.
            observed: the first units of a kernel of products, from which MCA takes its threshold; 0 for none.
        """
        kernels: list[tuple[int, ...]] = []
        first = 0
        for kernel in self.kernels:
            last = first + len(kernel.units)
            count = kernel.compute_units or compute_units
            watched = observed if kernel.read is Source.PRODUCT_READ else 0
            at_once = kernel.slots or slots
            kernels.append((first, last, count, at_once, launch_ps, kernel.read, kernel.write, watched))
            first = last
        return {
            "kernels": _column(kernels),
            "units": _column(
                (number, *unit) for number, kernel in enumerate(self.kernels) for unit in kernel.units
            ),
            "regions": _column(map(_region_row, self.regions)),
            "operands": _column(
                (x.a, x.a_stride, x.a_by_k, x.b, x.b_stride, x.b_by_k, x.item_bytes, x.slice_k)
                for x in self.operands
            ),
        }


def _region_row(region: Region) -> tuple[int, ...]:
    area = region.rectangle
    return (
        *(area.base, area.rows, area.row_bytes, area.stride),
        *(region.updates, region.kernel, region.dma_to, region.dma_updates),
        *(region.read, region.write, region.tracker_set, region.dma_peer),
    )


def _column(rows: Iterator[tuple[int, ...]] | list[tuple[int, ...]] | map[tuple[int, ...]]) -> Column:
    return np.array([value for row in rows for value in row], dtype=np.int64)
