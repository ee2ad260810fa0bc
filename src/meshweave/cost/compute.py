"""What a product or a call takes of a chip: the engine's time as FLOPs, and the memory traffic of a product.

`engine_amount` is the one place where work on a chip becomes time: closed forms, both simulators and the
lab's pace ask it. A chip whose `kernels` have constants is priced by shape (`cost.products`,
`cost.product_table`, `cost.attention`), any other by its one rate for the kind and dtype (`cost.calls`). A
chip has one engine, so a time by shape counts as that many FLOPs at the engine's rate, rounded up.

A chip without such constants multiplies out of on-chip memory, tile by tile: while one pair of tiles of A and
B is multiplied, the next pair is fetched, and an output tile that is complete is written back (MeshSlice,
section 4.1). So the first pair (`fill`) and the last write-back (`drain`) are exposed, and between them the
product takes as long as its FLOPs or its traffic, whichever is longer: a roofline. With tiles of tm x tk and
tk x tn, all of A is read once per column of output tiles, all of B once per row of them, and C is read and
written once, as products that accumulate do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from meshweave.cost.attention import attention_s
from meshweave.cost.calls import engine_flops, with_counts
from meshweave.cost.grouped import grouped_constants, grouped_s
from meshweave.cost.product_table import item_bytes, table_s
from meshweave.cost.products import product_s
from meshweave.describe.machine.chip import Chip
from meshweave.describe.machine.kernels import AttentionConstants, ChipKernels
from meshweave.ir.program.call_dims import ATTENTION_CALLS, CALL_DIMS
from meshweave.ir.work import Compute

GRADIENT_FACTOR = 2.5
"""The gradient of attention has five products where the forward has two, at the same rate."""
_STREAMING = ("norm", "softmax", "loss", "elementwise", "reduction")


@dataclass(frozen=True, slots=True)
class TileTraffic:
    """The memory traffic of a product in bytes: before its first, during, and after its last multiplication."""

    fill_bytes: int = 0
    stream_bytes: int = 0
    drain_bytes: int = 0


NO_TRAFFIC = TileTraffic()


def tile_traffic(work: Compute, chip: Chip) -> TileTraffic:
    """Return the memory traffic of a product or call that has FLOPs; none for work without FLOPs.

    A product has none where the chip names no `gemm_tile`. A call has the bytes that it declares, all of them
    beside its FLOPs (`stream_bytes`).
    """
    if not work.flops:
        return NO_TRAFFIC
    if work.bytes:
        return TileTraffic(0, work.bytes, 0)
    m, n, k = work.dims
    if chip.gemm_tile is None or not m * n * k:
        return NO_TRAFFIC
    tile_m, tile_n, tile_k = (min(size, tile) for size, tile in zip(work.dims, chip.gemm_tile, strict=True))
    fill = tile_m * tile_k + tile_k * tile_n
    drain = tile_m * tile_n
    total = work.num_products * (m * k * -(-n // tile_n) + k * n * -(-m // tile_m) + 2 * m * n)
    return TileTraffic(
        fill * work.item_bytes, max(total - fill - drain, 0) * work.item_bytes, drain * work.item_bytes
    )


def shape_s(work: Compute, chip: Chip) -> float | None:
    """Return the seconds of a product or call by its sizes, from the constants of the chip's kernels.

    None where the chip has no constants for it, or it has no FLOPs. The kernel's launch is included, except of a
    product that is fused into the kernel before it.

    Raises:
        UnsupportedError: a product is outside the ranges of the chip's table of products, and no constants may
            price it (`cost.product_table`).
    """
    kernels = chip.kernels
    if kernels is None or not work.flops:
        return None
    has_sizes = len(work.shape) == len(CALL_DIMS.get(work.call, ()))
    if work.kind == "matmul" or (work.call in ("matmul", "matmul_batch") and has_sizes):
        m, n, k = work.dims if work.kind == "matmul" else work.shape[:3]
        count = work.shape[3] if work.call == "matmul_batch" else work.num_products
        seconds = _product_s(kernels, work.dtype, (m, n, k), count) if m * n * k else None
        of = kernels.product(work.dtype)
        return (
            max(seconds - of.launch_s, 0.0)
            if seconds is not None and of is not None and work.joins
            else seconds
        )
    constants = kernels.attention_of(work.dtype)
    if work.call in ATTENTION_CALLS and constants is not None and has_sizes:
        return _attention_s(constants, work)
    if work.call == "experts" and has_sizes and work.shape[3]:
        return _experts_s(kernels, work)
    if work.call in _STREAMING and kernels.elementwise is not None:
        launch_s, bytes_per_s = kernels.elementwise
        return launch_s + work.bytes / bytes_per_s
    return None


def _experts_s(kernels: ChipKernels, work: Compute) -> float | None:
    """Return the seconds of a part of experts: each of the three has two products a row of the same sizes."""
    rows, hidden, inner, experts, columns = work.shape
    grouped = grouped_constants(kernels.name, work.dtype)
    if grouped is not None:
        share = kernels.grouped_share
        if share != 1:
            rates = share * grouped.flops_per_s, share * grouped.unit_bytes_per_s
            grouped = replace(grouped, flops_per_s=rates[0], unit_bytes_per_s=rates[1])
        return grouped_s(grouped, (rows, hidden, inner, experts, columns))
    constants = kernels.product(work.dtype)
    if constants is None:
        return None
    active, item = min(experts, max(rows, 1)), item_bytes(work.dtype)
    sizes = ((columns * inner, hidden), (hidden, inner))
    return sum(product_s(constants, -(-rows // active), n, k, item, active) for n, k in sizes)


def _product_s(
    kernels: ChipKernels, dtype: str, dims: tuple[int, int, int], num_products: int
) -> float | None:
    constants, table = kernels.product(dtype), kernels.table(dtype)
    if table is not None and num_products == 1:
        known = table_s(table, constants, dtype, *dims, kernels.outside)
        if known is not None:
            return known
    return product_s(constants, *dims, item_bytes(dtype), num_products) if constants else None


def _attention_s(constants: AttentionConstants, work: Compute) -> float:
    batch, heads, queries, keys, width = work.shape
    operands = 2 * item_bytes(work.dtype) * batch * heads * width * (queries + keys)
    is_gradient = work.part in ("input_grad", "weight_grad")
    factor = GRADIENT_FACTOR if is_gradient else 1.0
    num_bytes = round((work.bytes or operands) / factor)
    causal = work.call == "causal_attention"
    return factor * attention_s(constants, batch * heads, queries, keys, width, num_bytes, causal)


def engine_amount(work: Compute, chip: Chip) -> int:
    """Return the FLOPs at `chip.effective_flops_per_s` that take as long as `work`, rounded up.

    `work` has its FLOPs (see `with_counts`).

    Raises:
        UnsupportedError: a product is outside the ranges of the chip's table of products.
    """
    seconds = shape_s(work, chip)
    if seconds is None:
        return engine_flops(work.flops, chip, work.call, work.dtype)
    return max(math.ceil(seconds * int(chip.effective_flops_per_s)), 1)


def call_s(work: Compute, chip: Chip) -> float:
    """Return the seconds of a call on an idle chip: FLOPs or bytes, whichever takes longer.

    `Chip.launch_s` is left out; the launch in the constants of a kernel is not.

    Raises:
        UnsupportedError: a call without FLOPs is of no known kind of work or has another number of sizes, or a
            product is outside the ranges of the chip's table of products.
    """
    work = with_counts(work)
    if not work.flops:
        return work.bytes / chip.memory_bytes_per_s
    return max(engine_amount(work, chip) / chip.effective_flops_per_s, work.bytes / chip.memory_bytes_per_s)
