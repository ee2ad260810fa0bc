"""A product in Triton that counts the tiles of each region once they are stored (T3: ASPLOS '24, section 4.2).

Programs are persistent: each takes every so many tiles, region after region, in the rank's own order. Operands may
be bf16, fp16 or fp32, sums are fp32. A tile is stored, or added to memory by atomic adds from the epilogue, and
then one is added to its region's counter with release semantics over the system: who sees the count sees the tile.
A stream that waits for a counter (`trigger`) then copies the region with a copy engine.

It has been run in Triton's interpreter with fp16 and fp32, and on no GPU. The interpreter of Triton 3.9 gives
wrong products of bf16, so that bf16 has not been run at all.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _tracked_product(  # type: ignore[no-untyped-def]
    a: Any,
    b: Any,
    out: Any,
    counters: Any,
    n: Any,
    k: Any,
    a_row: Any,
    a_column: Any,
    b_row: Any,
    b_column: Any,
    out_row: Any,
    out_column: Any,
    region_rows: Any,
    first: Any,
    num_regions: Any,
    num_programs: Any,
    ADDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_across = tl.cdiv(n, BLOCK_N)
    tiles_of_region = tl.cdiv(region_rows, BLOCK_M) * tiles_across
    for tile in range(tl.program_id(0), num_regions * tiles_of_region, num_programs):
        place = tile // tiles_of_region
        region = (first + num_regions - place) % num_regions
        inside = tile % tiles_of_region
        row = (inside // tiles_across) * BLOCK_M + tl.arange(0, BLOCK_M)
        column = (inside % tiles_across) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_row, is_column = row < region_rows, column < n
        row = region * region_rows + row
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, k, BLOCK_K):
            depth = start + tl.arange(0, BLOCK_K)
            left = tl.load(
                a + row[:, None] * a_row + depth[None, :] * a_column,
                mask=is_row[:, None] & (depth[None, :] < k),
                other=0.0,
            )
            right = tl.load(
                b + depth[:, None] * b_row + column[None, :] * b_column,
                mask=(depth[:, None] < k) & is_column[None, :],
                other=0.0,
            )
            total = tl.dot(left, right, total)
        target = out + row[:, None] * out_row + column[None, :] * out_column
        value = total.to(out.dtype.element_ty)
        if ADDS:
            tl.atomic_add(
                target, value, mask=is_row[:, None] & is_column[None, :], sem="relaxed", scope="sys"
            )
        else:
            tl.store(target, value, mask=is_row[:, None] & is_column[None, :])
        tl.debug_barrier()  # all threads of the tile have stored before one of them counts it
        tl.atomic_add(counters + region, 1, sem="release", scope="sys")


def tracked_product(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    counters: Tensor,
    first: int,
    *,
    adds: bool = False,
    block: tuple[int, int, int] = (128, 128, 64),
    num_programs: int | None = None,
) -> int:
    """Compute out = a b, or with `adds` out += a b, region by region, and count the tiles of each.

    Args:
        a, b, out: (M, K), (K, N) and (M, N), of any strides; regions are M / len(counters) rows each.
        counters: int32, one for each region; each grows by the number of tiles that this returns.
        first: the region that is computed first; those before it follow, downwards and around, as ranks of a ring
            begin at different ones.
        adds: add tiles to `out` by atomic adds, also where other ranks do so.
        block: rows, columns and depth of a tile.
        num_programs: how many persistent programs; None for one on each multiprocessor.

    Raises:
        ValueError: rows are no multiple of the number of regions.
    """
    (m, k), n, num_regions = a.shape, b.shape[1], counters.numel()
    if m % num_regions:
        raise ValueError(f"{m} rows are not a multiple of {num_regions} regions")
    region_rows = m // num_regions
    tiles = triton.cdiv(region_rows, block[0]) * triton.cdiv(n, block[1])
    if num_programs is None:
        num_programs = torch.cuda.get_device_properties(a.device).multi_processor_count
    num_programs = min(num_programs, tiles * num_regions)
    _tracked_product[(num_programs,)](
        a,
        b,
        out,
        counters,
        n,
        k,
        *a.stride(),
        *b.stride(),
        *out.stride(),
        region_rows,
        first,
        num_regions,
        num_programs,
        ADDS=adds,
        BLOCK_M=block[0],
        BLOCK_N=block[1],
        BLOCK_K=block[2],
    )
    return int(tiles)
