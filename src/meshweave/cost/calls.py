"""What a `call` costs, by its kind of work: the place of models of attention, norms, losses, element-wise work.

A call that declares FLOPs and bytes is priced by these. One that declares none is counted here, from its sizes.
Each is then a roofline: FLOPs at the chip's rate for the kind and dtype beside bytes at the rate of its memory.

Forward counts, in operations per element or per pair of query and key:

    attention    4 width + 5: two products of 2 width, and a softmax (FlashAttention-2, Dao 2023, section 3)
    causal_attention  half of that: a query sees about half of the keys
    matmul       2 per multiply-add; matmul_batch likewise, of several products of equal sizes
    experts      2 per multiply-add of grouped products: a row meets one expert, up and down
    softmax      5: greatest, subtract, exponential, sum, divide
    loss         5: a softmax over classes
    norm         7: mean, centre, square, sum, scale, gain, bias
    elementwise  1, reduction 1

The gradient of attention has five products where the forward has two. That of a product is one product for the
input and one for the weight. That of the others is counted as two forwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshweave.base.errors import UnsupportedError
from meshweave.describe.machine.chip import Chip
from meshweave.ir.program.call_dims import ATTENTION_CALLS, CALL_DIMS
from meshweave.ir.program.expressions import Index
from meshweave.ir.work import Compute

_PER_ELEMENT = {"norm": 7, "softmax": 5, "loss": 5, "elementwise": 1, "reduction": 1}


def call_flops(work: str, part: str, shape: Sequence[Index]) -> Index:
    """Return the FLOPs of a call that declares none; 0 without work or shape.

    Args:
        work: the kind of work, a key of `CALL_DIMS`.
        part: "input_grad" or "weight_grad" for a gradient, else the forward part.
        shape: the sizes that `CALL_DIMS` names for the work; they may be expressions.

    Raises:
        UnsupportedError: `CALL_DIMS` has no such kind of work, or another number of sizes for it.
    """
    if not work or not shape:
        return 0
    dims = CALL_DIMS.get(work)
    if dims is None or len(shape) != len(dims):
        known = "; ".join(f"{name} ({', '.join(sizes)})" for name, sizes in CALL_DIMS.items())
        raise UnsupportedError(f"work '{work}' of {len(shape)} sizes has no price; known are {known}")
    total: Index = 1
    is_attention = work in ATTENTION_CALLS
    for size in shape[:4] if is_attention else shape:
        total = total * size
    is_gradient = part in ("input_grad", "weight_grad")
    if is_attention:
        width = shape[4]
        total = total * (10 * width + 10) if is_gradient else total * (4 * width + 5)
        return total // 2 if work == "causal_attention" else total
    if work in ("matmul", "matmul_batch"):
        return 2 * total
    if work == "experts":
        rows, hidden, inner, _, columns = shape
        return 2 * rows * hidden * inner * (columns + 1)
    return _PER_ELEMENT[work] * (2 if is_gradient else 1) * total


def with_counts(work: Compute) -> Compute:
    """Return the work with its FLOPs: those declared, or else those of `call_flops`; bytes stay as declared.

    Raises:
        UnsupportedError: a call without FLOPs is of no known kind of work, or has another number of sizes.
    """
    if work.flops or not work.call:
        return work
    flops = call_flops(work.call, work.part, work.shape)
    assert isinstance(flops, int)
    return replace(work, flops=flops)


def flops_per_s(chip: Chip, call: str, dtype: str) -> int:
    """Return the FLOP/s of a chip for a kind of call ("" or "matmul" for products) in a dtype ("" for any)."""
    return max(int(chip.flops_per_s(dtype, call)), 1)


def engine_flops(flops: int, chip: Chip, call: str, dtype: str) -> int:
    """Return `flops` of a kind and dtype as FLOPs at `chip.effective_flops_per_s` that take as long, rounded up.

    So one engine of one rate stands for all kinds of work. `call` and `dtype` are as for `flops_per_s`.
    """
    own, engine = flops_per_s(chip, call, dtype), int(chip.effective_flops_per_s)
    return flops if own == engine else -(-flops * engine // own)
