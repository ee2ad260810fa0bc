"""The equations of attention whose keys and values go round a ring of ranks that share sequences.

Queries Q and keys with values KV of a rank's tokens are split from their product, and turned by positions where a
model does. Then softmax is kept so far over the keys that have passed (Liu et al., Ring Attention, section 3):

    (R, M, L)[s] = attend over t of Q[s], KV[t]        numerators, greatest score and sum of weights so far
    A[s] = finish(R, M, L)[s]

Backward, the gradients of queries sum over the keys that pass, and those of keys travel with the keys and sum over
the queries that they pass. `POSITIONS` are those of tokens in their sequence; the causal mask follows from them.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshweave.algorithms.block.halves import Half
from meshweave.ir.program import Tensor
from meshweave.ir.program.meanings import Function, Meaning, PositionNames, Same, TensorPart

POSITIONS = "POSITIONS"

_QUERY: PositionNames = ("b", "s", "g", None)
_KEY: PositionNames = ("b", "t", "g", None)
_REDUCED = "softmax"


def ring_names(half: Half) -> dict[str, str]:
    """Return the names of the tensors of a layer's ring attention by what they are."""
    keys = ("queries", "keys", "so_far", "greatest", "weights")
    return {key: f"{name}{half.layer}" for key, name in zip(keys, ("Q", "KV", "RA", "RM", "RL"), strict=True)}


def ring_tensors(half: Half) -> Iterator[Tensor]:
    """Yield the tensors of the forward part."""
    p, names = half.problem, ring_names(half)
    r, d = p.queries_per_group, p.head_dim
    widths = {"queries": r * d, "keys": 2 * d, "so_far": r * d, "greatest": r, "weights": r}
    for key, width in widths.items():
        dtype = p.dtype if key in ("queries", "keys") else p.statistics_dtype
        yield Tensor(names[key], (p.batch, p.sequence, p.kv_heads, width), dtype)


def ring_gradient_tensors(half: Half) -> Iterator[Tensor]:
    """Yield the tensors of the backward part."""
    queries, keys, *_ = ring_tensors(half)
    for tensor in (queries, keys):
        yield Tensor(f"D{tensor.name}", tensor.shape, tensor.dtype)


def ring_meanings(half: Half) -> Iterator[Meaning]:
    """Yield the equations from the product of W_qkv to what W_o multiplies."""
    names = ring_names(half)
    unit, here = TensorPart(f"{half.inner}_units", _QUERY), TensorPart(POSITIONS, ("s",))
    for number, key in enumerate(("queries", "keys")):
        yield Function(TensorPart(names[key], _QUERY), "split_heads", (unit, here), output=number)
    running = tuple(TensorPart(names[key], _QUERY) for key in ("so_far", "greatest", "weights"))
    ins = (
        TensorPart(names["queries"], _QUERY),
        TensorPart(names["keys"], _KEY),
        here,
        TensorPart(POSITIONS, ("t",)),
        *running,
    )
    for number, part in enumerate(running):
        yield Function(part, "attend", ins, reduce=_REDUCED, output=number)
    for number, name in enumerate((half.core, half.log_sums)):
        yield Function(TensorPart(f"{name}_units", _QUERY), "finish_attention", running, output=number)
        yield Same(name, f"{name}_units")


def ring_gradient_meanings(half: Half) -> Iterator[Meaning]:
    """Yield the equations from the gradient of what W_o multiplies to that of the product of W_qkv."""
    names = ring_names(half)
    yield Same(f"D{half.core}_units", f"D{half.core}")
    of_queries = (f"D{half.core}_units", names["queries"], f"{half.core}_units", f"{half.log_sums}_units")
    here, there = TensorPart(POSITIONS, ("s",)), TensorPart(POSITIONS, ("t",))
    ins = (*(TensorPart(name, _QUERY) for name in of_queries), TensorPart(names["keys"], _KEY), here, there)
    parts = TensorPart(f"D{names['queries']}", _QUERY), TensorPart(f"D{names['keys']}", _KEY)
    for number, part in enumerate(parts):
        yield Function(part, "attend_grad", ins, reduce="sum", output=number)
    merged = (TensorPart(part.tensor, _QUERY) for part in parts)
    yield Function(TensorPart(f"D{half.inner}_units", _QUERY), "merge_heads", (*merged, here))
    yield Same(f"D{half.inner}", f"D{half.inner}_units")
