"""A product in one kernel that counts the tiles of each region once they are stored (T3: ASPLOS '24, section 4.2).

Programs of the kernel are persistent: each takes every so many tiles, region after region, in the order in which
a Program releases them (`ir.program.regions`). Operands are bf16, fp16 or fp32, sums are fp32. A tile is stored,
or added to memory by atomic additions from the epilogue, here or in another rank's memory. Then one is added to
its region's counter with release semantics over the system: who sees the count sees the tile. A stream that
waits for the counter (`trigger`) then sends the region on.

It has run in Triton's interpreter (fp32 and fp16 stored and added, bf16 stored) and on an H100 (bf16 stored).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshweave.base.errors import UnsupportedError
from meshweave.execute.cuda.kernels import INTERPRETED, check_atomic_add, launch_product
from meshweave.execute.cuda.tiling import Block, block_of, tiles_of_region
from meshweave.ir.program.release import Release

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_INTERPRETER_PROGRAMS = 5


WHOLE = Release()


@dataclass(frozen=True)
class TrackedRegion:
    """A region of a product: out = a b, or out += a b where it is released as updates.

    Attributes:
        a, b, out: (rows, K), (K, columns) and (rows, columns), of any strides; `out` may be another rank's memory.
        counter: one int32 that grows by the number of tiles; None where nobody waits for the region. A kernel
            counts only if all of its regions have one.
        release: the shape of its tiles, their order and which is first; `tiling` chooses what is left out.
    """

    a: Tensor
    b: Tensor
    out: Tensor
    counter: Tensor | None = None
    release: Release = WHOLE


class TrackedProduct:
    """One matmul kernel that computes regions of an output one after another; made once, run on the same memory.

    Each call queues one run on the current stream; a run adds to each region's counter its number of tiles.
    """

    def __init__(
        self,
        regions: Sequence[TrackedRegion],
        *,
        block: Block | None = None,
        num_programs: int | None = None,
        counts: bool = True,
    ) -> None:
        """Lay out the kernel's tables on the device of the regions.

        Args:
            regions: in the order in which they are computed; of equal strides, dtypes, K and kind of release.
            block: the largest tile computed at a time; None for `tiling.block_of` of the regions.
            num_programs: the most thread blocks to launch, never more than tiles; None for `multiprocessors`.
            counts: whether tiles are counted, where every region has a counter.

        Raises UnsupportedError for dtypes that are unequal or none of `DTYPES`, and for regions that are added to
        memory (`release.update`) in a dtype which the device cannot add atomically.
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
        self._regions = torch.tensor(addresses, dtype=torch.int64, device=self._device)
        self._tiles = torch.tensor(rows_of_table, dtype=torch.int32, device=self._device)
        if num_programs is None:
            num_programs = multiprocessors(self._device)
        self._grid = max(min(num_programs, len(rows_of_table)), 1)
        self._constants = {
            "ADDS": first.release.update,
            "COUNTS": counts and all(region.counter is not None for region in regions),
            "WIDENS": INTERPRETED and first.a.dtype == torch.bfloat16,
            "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
            "IS_ALIGNED": _are_aligned(addresses, rows_of_table),
            "IS_INSIDE": all(
                region.out.shape[0] >= self.block.rows and region.out.shape[1] >= self.block.columns
                for region in regions
            ),
            "IS_EVEN_K": depth % self.block.depth == 0,
            "IS_FAR": depth * max(first.a.stride(1), first.b.stride(0)) >= 1 << 31,
            "BLOCK_M": self.block.rows,
            "BLOCK_N": self.block.columns,
            "BLOCK_K": self.block.depth,
            "num_warps": self.block.num_warps,
            "num_stages": self.block.num_stages,
        }

    def __call__(self) -> None:
        """Queue one run of the kernel on the current stream."""
        first = self.regions[0]
        launch_product(
            self._grid,
            first.a,
            first.b,
            first.out,
            self._regions,
            self._tiles,
            len(self._tiles),
            self._grid,
            first.a.shape[1],
            *first.a.stride(),
            *first.b.stride(),
            *first.out.stride(),
            **self._constants,
        )


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors (SMs) of a GPU, each of which runs one thread block of the kernel.

    For a CPU, where kernels run in Triton's interpreter, return a small constant.
    """
    if device.type != "cuda":
        return _INTERPRETER_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def share_a_kernel(one: TrackedRegion, other: TrackedRegion) -> bool:
    """Return whether one kernel can compute both regions: equal strides, dtypes, K and `release.update`."""
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
    if first.a.dtype not in DTYPES or len({first.a.dtype, first.b.dtype, first.out.dtype}) > 1:
        raise UnsupportedError(
            f"a tracked product of {first.a.dtype} and {first.b.dtype} into {first.out.dtype}: "
            "all must be float32, float16 or bfloat16"
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
