"""A product in one kernel that counts the tiles of each region once they are stored (T3: ASPLOS '24, section 4.2).

Programs of the kernel are persistent: each takes every so many tiles, region after region, in the order in which
a Program releases them (`ir.program.regions`). Operands are bf16, fp16, fp32 or e4m3, sums fp32. A tile is stored,
or added to memory by atomic additions from the epilogue, here or in another rank's memory. Then one is added to
its region's counter with release semantics over the system: who sees the count sees the tile. A stream that
waits for the counter (`trigger`) then sends the region on.

There are two kernels. One describes operands to the tensor memory accelerator: of one or two bytes an element,
with contiguous rows that begin at multiples of 16 bytes, where regions are rows of one A and columns of one B. The
other takes operands of any strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshweave.base.errors import UnsupportedError
from meshweave.execute.cuda.kernels import (
    INTERPRETED,
    check_atomic_add,
    described,
    launch_described_product,
    launch_product,
)
from meshweave.execute.cuda.tiling import Block, block_of, tiles_of_region
from meshweave.ir.program.release import Release

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EIGHT_BITS = (torch.float8_e4m3fn,)
"""Dtypes of operands whose results are in one of `DTYPES`."""
_DESCRIBED_BYTES = 16
"""What addresses and strides of described operands are multiples of."""
_INTERPRETER_PROGRAMS = 5


WHOLE = Release()


@dataclass(frozen=True)
class TrackedRegion:
    """A region of a product: out = a b, or out += a b where it is released as updates.

    Attributes:
        a, b, out: (rows, K), (K, columns) and (rows, columns), of any strides; `out` may be another rank's memory.
        counter: one int32 that grows by the number of tiles; None where nobody waits for the region.
        release: its tiles, their order and which one is first; tiles and order of the machine where it names none.
    """

    a: Tensor
    b: Tensor
    out: Tensor
    counter: Tensor | None = None
    release: Release = WHOLE


class TrackedProduct:
    """One kernel that computes regions one after another; made once, run many times on the same memory."""

    def __init__(
        self,
        regions: Sequence[TrackedRegion],
        *,
        block: Block | None = None,
        num_programs: int | None = None,
        counts: bool = True,
        scale: Tensor | None = None,
    ) -> None:
        """Lay out the kernel's tables on the device of the regions.

        Args:
            regions: in the order in which they are computed; of equal strides, dtypes, K and kind of release.
            block: None for that of `tiling.BLOCKS`, made smaller to fit the regions and the tiles that they name.
            num_programs: how many persistent programs; None for one on each multiprocessor.
            counts: whether tiles are counted; without, it is the same kernel less its counters.
            scale: one float32 by which results are multiplied: that of operands of eight bits, a tensor each.

        Raises UnsupportedError for operands that the kernel does not take.
        """
        first = regions[0]
        _check(regions)
        self.regions, self._device = tuple(regions), first.out.device
        depth, size = first.a.shape[1], first.a.element_size()
        shapes = [(*region.out.shape, region.release) for region in regions]
        self.block = block or block_of(shapes, depth, size)
        boxes = [
            tiles_of_region(region.out.shape[0], region.out.shape[1], region.release, self.block)
            for region in regions
        ]
        self.num_tiles = tuple(len(listed) for listed in boxes)
        """The tiles of each region: what its counter grows by."""
        rows_of_table = [
            (number, *_table_row(region, self.block, down, across))
            for number, (region, listed) in enumerate(zip(regions, boxes, strict=True))
            for down, across in listed
        ]
        addresses = [_addresses(region, first) for region in regions]
        self._described = _described(regions, self.block, [row[2] for row in rows_of_table])
        if self._described is None and (first.a.dtype in EIGHT_BITS or scale is not None):
            raise UnsupportedError(
                f"a tracked product of {first.a.dtype} with a scale takes operands with contiguous rows at "
                f"multiples of {_DESCRIBED_BYTES} bytes, and regions that are rows of one A, columns of one B"
            )
        self._scale = first.out if scale is None else scale
        if self._described is not None:
            addresses = [
                (*place, *entry[2:]) for place, entry in zip(self._described.places, addresses, strict=True)
            ]
        self._regions = torch.tensor(addresses, dtype=torch.int64, device=self._device)
        self._tiles = torch.tensor(rows_of_table, dtype=torch.int32, device=self._device)
        if num_programs is None:
            num_programs = multiprocessors(self._device) * self.block.at_once
        self._grid = max(min(num_programs, len(rows_of_table)), 1)
        self._constants: dict[str, Any] = {
            "ADDS": first.release.update,
            "COUNTS": counts and all(region.counter is not None for region in regions),
            "WIDENS": INTERPRETED and size < 4,
            "BLOCK_M": self.block.rows,
            "BLOCK_N": self.block.columns,
            "BLOCK_K": self.block.depth,
            "num_warps": self.block.num_warps,
            "num_stages": self.block.num_stages,
        }
        if self._described is not None:
            self._constants |= {
                "SCALES": scale is not None,
                "IS_TURNED": self._described.is_turned,
                "IS_WHOLE": all(
                    (row[5] - row[3], row[6] - row[4]) == (self.block.rows, self.block.columns)
                    for row in rows_of_table
                ),
            }
            return
        self._constants |= {
            "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
            "IS_ALIGNED": _are_aligned(addresses, rows_of_table),
            "IS_INSIDE": all(
                region.out.shape[0] >= self.block.rows and region.out.shape[1] >= self.block.columns
                for region in regions
            ),
            "IS_EVEN_K": depth % self.block.depth == 0,
        }

    def __call__(self) -> None:
        """Queue the kernel on the current stream."""
        first = self.regions[0]
        tables = self._regions, self._tiles
        sizes = len(self._tiles), self._grid, first.a.shape[1]
        if self._described is not None:
            operands = self._described.a, self._described.b, first.out, *tables, self._scale
            launch_described_product(self._grid, *operands, *sizes, *first.out.stride(), **self._constants)
            return
        strides = *first.a.stride(), *first.b.stride(), *first.out.stride()
        launch_product(self._grid, first.a, first.b, first.out, *tables, *sizes, *strides, **self._constants)


@dataclass(frozen=True)
class _Described:
    """Operands as the tensor memory accelerator loads them.

    Attributes:
        a, b: descriptions of both whole; `b` is of its columns where `is_turned`.
        places: for each region its first row of `a` and its first column of `b`.
    """

    a: Any
    b: Any
    places: tuple[tuple[int, int], ...]
    is_turned: bool


def _described(
    regions: Sequence[TrackedRegion], block: Block, first_columns: Sequence[int]
) -> _Described | None:
    """Return the operands of regions described, None where they have not the form; blocks begin at columns."""
    size, is_turned = regions[0].a.element_size(), regions[0].b.stride(0) == 1
    a = min((region.a for region in regions), key=Tensor.data_ptr)
    b = min((region.b for region in regions), key=Tensor.data_ptr)
    b = b.t() if is_turned else b
    for matrix in (a, b):
        row = matrix.stride(0)
        is_contiguous = matrix.stride(1) == 1 and row >= matrix.shape[1]
        if (
            size > 2
            or not is_contiguous
            or matrix.data_ptr() % _DESCRIBED_BYTES
            or row * size % _DESCRIBED_BYTES
        ):
            return None
    places, rows, columns = [], 0, 0
    for region in regions:
        beyond_a, beyond_b = (
            (own.data_ptr() - of.data_ptr()) // size for own, of in ((region.a, a), (region.b, b))
        )
        row, beside = divmod(beyond_a, a.stride(0))
        column, above = divmod(beyond_b, b.stride(0)) if is_turned else divmod(beyond_b, 1)
        rows, columns = max(rows, row + region.a.shape[0]), max(columns, column + region.b.shape[1])
        if beside or above or (not is_turned and columns > b.stride(0)):
            return None
        places.append((row, column))
    begins = [] if is_turned else [*first_columns, *(column for _, column in places)]
    if any(column * size % _DESCRIBED_BYTES for column in begins):
        return None
    depth = a.shape[1]
    sides = (block.columns, block.depth) if is_turned else (block.depth, block.columns)
    return _Described(
        described(a, (rows, depth), (block.rows, block.depth)),
        described(b, (columns, depth) if is_turned else (depth, columns), sides),
        tuple(places),
        is_turned,
    )


def multiprocessors(device: torch.device) -> int:
    """Return how many programs of a kernel run at a time."""
    if device.type != "cuda":
        return _INTERPRETER_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def share_a_kernel(one: TrackedRegion, other: TrackedRegion) -> bool:
    """Return whether one kernel can compute both regions."""
    return all(
        left.stride() == right.stride() and left.dtype == right.dtype
        for left, right in ((one.a, other.a), (one.b, other.b), (one.out, other.out))
    ) and (one.a.shape[1], one.release.update) == (other.a.shape[1], other.release.update)


def _check(regions: Sequence[TrackedRegion]) -> None:
    first = regions[0]
    for region in regions:
        (rows, depth), (other_depth, columns) = region.a.shape, region.b.shape
        assert region.out.shape == (rows, columns) and depth == other_depth, region
        assert share_a_kernel(first, region), "regions of one kernel are alike"
    operands = {first.a.dtype, first.b.dtype}
    same = operands == {first.out.dtype} and first.out.dtype in DTYPES
    if not same and not (operands <= set(EIGHT_BITS) and first.out.dtype in DTYPES):
        raise UnsupportedError(
            f"a tracked product of {first.a.dtype} and {first.b.dtype} into {first.out.dtype}: "
            "all must be float32, float16 or bfloat16, or operands float8_e4m3fn"
        )
    if first.release.update:
        check_atomic_add(first.out.dtype, first.out.device)


def _table_row(
    region: TrackedRegion, block: Block, down: tuple[int, int], across: tuple[int, int]
) -> tuple[int, ...]:
    """Return where a block begins in a region, and the first and last row and column of its tile."""
    rows, columns = region.out.shape
    begins = _first(down[0], rows, block.rows), _first(across[0], columns, block.columns)
    return (*begins, down[0], across[0], down[1], across[1])


def _addresses(region: TrackedRegion, first: TrackedRegion) -> tuple[int, int, int, int]:
    """Return by how many elements operands lie beyond those of the first region, and addresses of out, counter."""
    size = first.a.element_size()
    offsets = [
        (own.data_ptr() - of.data_ptr()) // size for own, of in ((region.a, first.a), (region.b, first.b))
    ]
    counter = 0 if region.counter is None else region.counter.data_ptr()
    return offsets[0], offsets[1], region.out.data_ptr(), counter


def _first(start: int, size: int, block: int) -> int:
    """Return where a block begins that covers a tile from `start` on: earlier, where it would go beyond `size`."""
    return max(min(start, size - block), 0)


def _are_aligned(addresses: Sequence[tuple[int, ...]], rows: Sequence[tuple[int, ...]]) -> bool:
    """Return whether the kernel may take offsets, and where blocks begin, for multiples of 16."""
    offsets = (value for entry in addresses for value in entry[:2])
    return all(value % 16 == 0 for value in offsets) and all(
        value % 16 == 0 for entry in rows for value in entry[1:3]
    )
