"""The Triton kernels of track and trigger: a product that counts its tiles, and an atomic addition.

In Triton's interpreter (TRITON_INTERPRET=1) kernels run on tensors of a CPU. Two things differ in Triton 3.9.
Its `tl.dot` multiplies the bits of bf16 operands as integers: they are widened to fp32 first, which is exact. It
has no atomic addition of bf16, which a GPU has from compute capability 9.0 on. Arguments of kernels have no types
but `tl.constexpr`: Triton up to 3.6 looks for the names of others on the device.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshweave.base.errors import UnsupportedError
from meshweave.execute.cuda.tiling import ADDING_PROGRAMS

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on a CPU: as it was when this module was imported."""

_ADDED = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64)
_ADD_ROWS, _ADD_COLUMNS = tl.constexpr(8), tl.constexpr(256)

_one_at_a_time: Any = threading.Lock() if INTERPRETED else nullcontext()  # the interpreter has global state


@triton.jit  # type: ignore[untyped-decorator]
def _operand(  # type: ignore[no-untyped-def]
    at, is_deep, is_wide, IS_INSIDE: tl.constexpr, IS_EVEN_K: tl.constexpr
):
    """Return a block of an operand, zero where k or the region ends within it."""
    if IS_INSIDE and IS_EVEN_K:
        block = tl.load(at)
    elif IS_INSIDE:
        block = tl.load(at, mask=is_deep, other=0.0)
    else:
        block = tl.load(at, mask=is_deep & is_wide, other=0.0)
    return block


@triton.jit  # type: ignore[untyped-decorator]
def _store_and_count(  # type: ignore[no-untyped-def]
    total, region, like, at, is_result, ADDS: tl.constexpr, COUNTS: tl.constexpr
):
    """Store a tile in its region, or add it to what is there, and then count it."""
    target = tl.load(region + 2).to(tl.pointer_type(like.dtype.element_ty)) + at
    value = total.to(like.dtype.element_ty)
    if ADDS:
        tl.atomic_add(target, value, mask=is_result, sem="relaxed", scope="sys")
    else:
        tl.store(target, value, mask=is_result)
    if COUNTS:
        tl.debug_barrier()  # all threads of the tile have stored before one of them counts it
        counter = tl.load(region + 3).to(tl.pointer_type(tl.int32))
        tl.atomic_add(counter, 1, sem="release", scope="sys")


@triton.jit  # type: ignore[untyped-decorator]
def _tracked_product(  # type: ignore[no-untyped-def]
    a,
    b,
    like,
    regions,
    tiles,
    num_tiles,
    num_programs,
    k,
    a_row,
    a_column,
    b_row,
    b_column,
    out_row,
    out_column,
    ADDS: tl.constexpr,
    COUNTS: tl.constexpr,
    WIDENS: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    IS_INSIDE: tl.constexpr,
    IS_EVEN_K: tl.constexpr,
    IS_FAR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute the tiles of a table, every so many of them in one program.

    Args:
        like: a pointer to the dtype of the results.
        regions: int64 (regions, 4): offsets of the operands from `a` and `b` in elements, addresses of the result
            and of the counter.
        tiles: int32 (tiles, 7): region, first row and column of a block in it, first row and column of the tile
            in that block, and the row and column after the tile's last.
        IS_ALIGNED: offsets and first rows and columns of blocks are multiples of 16.
        IS_INSIDE: no block goes beyond its region.
        IS_EVEN_K: k is a multiple of BLOCK_K.
        IS_FAR: along k an operand reaches beyond 2**31 elements, which needs offsets of 64 bits.
    """
    for number in range(tl.program_id(0), num_tiles, num_programs):
        tile = tiles + 7 * number
        region = regions + 4 * tl.load(tile).to(tl.int64)
        first_row, first_column = tl.load(tile + 1), tl.load(tile + 2)
        a_first, b_first = tl.load(region), tl.load(region + 1)
        if IS_ALIGNED:
            first_row, first_column = tl.multiple_of(first_row, 16), tl.multiple_of(first_column, 16)
            a_first, b_first = tl.multiple_of(a_first, 16), tl.multiple_of(b_first, 16)
        row = first_row + tl.arange(0, BLOCK_M)
        column = first_column + tl.arange(0, BLOCK_N)
        is_row = (row >= tl.load(tile + 3)) & (row < tl.load(tile + 5))
        is_column = (column >= tl.load(tile + 4)) & (column < tl.load(tile + 6))
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        left_at = a + a_first + row[:, None].to(tl.int64) * a_row
        right_at = b + b_first + column[None, :].to(tl.int64) * b_column
        for start in range(0, k, BLOCK_K):
            depth = start + tl.arange(0, BLOCK_K)
            if IS_FAR:
                depth = depth.to(tl.int64)
            is_deep = depth < k
            at_a, at_b = left_at + depth[None, :] * a_column, right_at + depth[:, None] * b_row
            left = _operand(at_a, is_deep[None, :], is_row[:, None], IS_INSIDE, IS_EVEN_K)
            right = _operand(at_b, is_deep[:, None], is_column[None, :], IS_INSIDE, IS_EVEN_K)
            if WIDENS:
                left, right = left.to(tl.float32), right.to(tl.float32)
            total = tl.dot(left, right, total, input_precision=PRECISION)
        at = row[:, None].to(tl.int64) * out_row + column[None, :].to(tl.int64) * out_column
        _store_and_count(total, region, like, at, is_row[:, None] & is_column[None, :], ADDS, COUNTS)


@triton.jit
def _accumulate(  # type: ignore[no-untyped-def]
    out, value, rows, columns, out_row, out_column, value_row, value_column
):
    """Add a matrix to another by atomic additions, every so many blocks in one program."""
    blocks_across = tl.cdiv(columns, _ADD_COLUMNS)
    num_blocks = tl.cdiv(rows, _ADD_ROWS) * blocks_across
    for number in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        row = (number // blocks_across) * _ADD_ROWS + tl.arange(0, _ADD_ROWS).to(tl.int64)
        column = (number % blocks_across) * _ADD_COLUMNS + tl.arange(0, _ADD_COLUMNS).to(tl.int64)
        is_inside = (row[:, None] < rows) & (column[None, :] < columns)
        term = tl.load(value + row[:, None] * value_row + column[None, :] * value_column, mask=is_inside)
        target = out + row[:, None] * out_row + column[None, :] * out_column
        tl.atomic_add(target, term, mask=is_inside, sem="relaxed", scope="sys")


def lacks_atomic_add(dtype: torch.dtype, device: torch.device) -> str:
    """Return why kernels on `device` cannot add atomically to memory of `dtype`; "" where they can."""
    if dtype not in _ADDED:
        return f"kernels add no {dtype} to memory atomically"
    if dtype != torch.bfloat16:
        return ""
    if INTERPRETED:
        return "Triton's interpreter adds no bfloat16 to memory atomically"
    is_old = torch.cuda.get_device_capability(device) < (9, 0)
    return "bfloat16 is added to memory atomically from compute capability 9.0 on" if is_old else ""


def check_atomic_add(dtype: torch.dtype, device: torch.device) -> None:
    """Raise UnsupportedError where kernels on `device` cannot add atomically to memory of `dtype`."""
    if reason := lacks_atomic_add(dtype, device):
        raise UnsupportedError(reason)


def accumulate(out: Tensor, value: Tensor, num_programs: int = ADDING_PROGRAMS) -> None:
    """Queue out += value on the current stream, each element by one atomic addition of system scope.

    Other kernels, streams, processes and GPUs may add to the same elements at the same time.

    Args:
        out, value: of one shape, up to two dims, and one dtype, of any strides.
        num_programs: the most thread blocks that the kernel is launched with.

    Raises UnsupportedError where the device cannot add this dtype atomically (`lacks_atomic_add`).
    """
    check_atomic_add(out.dtype, out.device)
    assert out.shape == value.shape and out.dtype == value.dtype and out.ndim <= 2, (out.shape, value.shape)
    if not out.numel():
        return
    matrix, term = (
        one.reshape(1, 1) if one.ndim == 0 else one.unsqueeze(0) if one.ndim == 1 else one
        for one in (out, value)
    )
    blocks = triton.cdiv(matrix.shape[0], _ADD_ROWS.value) * triton.cdiv(matrix.shape[1], _ADD_COLUMNS.value)
    with _one_at_a_time:
        _accumulate[(min(num_programs, blocks),)](
            matrix, term, *matrix.shape, *matrix.stride(), *term.stride()
        )


def launch_product(grid: int, *arguments: Any, **constants: Any) -> None:
    """Queue the kernel `_tracked_product`, a matmul that counts its output tiles, on the current stream.

    Args:
        grid: the number of thread blocks to launch.
        arguments: the arguments of `_tracked_product` before the first `tl.constexpr`, in order.
        constants: its `tl.constexpr` arguments by name, and `num_warps` and `num_stages`.
    """
    with _one_at_a_time:
        _tracked_product[(grid,)](*arguments, **constants)
