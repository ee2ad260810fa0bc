"""The equations of attention whose keys and values go round a ring of ranks that share sequences.

Queries Q and keys with values KV of a rank's tokens are split from their product, and turned by positions where a
model does. Then softmax is accumulated over the keys that have passed (Liu et al., Ring Attention, section 3):

    (R, M, L)[s] = attend over t of Q[s], KV[t]        numerators, greatest score and sum of weights so far
    A[s] = finish(R, M, L)[s]

Backward, the gradients of queries sum over the keys that pass, and those of keys travel with the keys and sum over
the queries that they pass. `POSITIONS` are those of tokens in their sequence; the causal mask follows from them.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshweave.algorithms.block.place import NodePlace
from meshweave.describe.model.nodes import Attention
from meshweave.ir.program import Tensor
from meshweave.ir.program.meanings import Function, Meaning, PositionNames, Same, TensorPart

POSITIONS = "POSITIONS"

_QUERY: PositionNames = ("b", "s", "g", None)
_KEY: PositionNames = ("b", "t", "g", None)
_REDUCED = "softmax"


def ring_names(at: NodePlace[Attention]) -> dict[str, str]:
    """Return the names of the tensors of ring attention in a layer, by what they hold.

    The keys are "queries", "keys" (for keys and values), and for online softmax "so_far" (weighted sums of
    values), "greatest" (greatest scores) and "weights" (sums of weights).
    """
    keys = ("queries", "keys", "so_far", "greatest", "weights")
    return {key: at.own(name) for key, name in zip(keys, ("Q", "KV", "RA", "RM", "RL"), strict=True)}


def ring_tensors(at: NodePlace[Attention]) -> Iterator[Tensor]:
    """Yield the global tensors Q, KV, RA, RM and RL of the forward part, each (batch, sequence, groups, columns).

    With r query heads of width d per group, columns are r d for Q and RA, 2 d for KV, r for RM and RL. Q and KV
    have the problem's dtype, the others its `statistics_dtype`. The result of attention is not among them.
    """
    p, names = at.problem, ring_names(at)
    r, d = at.node.per_group, at.node.width
    widths = {"queries": r * d, "keys": 2 * d, "so_far": r * d, "greatest": r, "weights": r}
    for key, width in widths.items():
        dtype = p.dtype if key in ("queries", "keys") else p.statistics_dtype
        yield Tensor(names[key], (p.batch, p.sequence, at.node.groups, width), dtype)


def ring_gradient_tensors(at: NodePlace[Attention]) -> Iterator[Tensor]:
    """Yield the tensors of the gradients of queries Q and of keys with values KV, in their global shapes."""
    queries, keys, *_ = ring_tensors(at)
    for tensor in (queries, keys):
        yield Tensor(f"D{tensor.name}", tensor.shape, tensor.dtype)


def ring_meanings(at: NodePlace[Attention]) -> Iterator[Meaning]:
    """Yield the equations of ring attention, from queries, keys and values to the heads and their log-sum-exp."""
    names = ring_names(at)
    unit, here = TensorPart(f"{at.operand}_units", _QUERY), TensorPart(POSITIONS, ("s",))
    for number, key in enumerate(("queries", "keys")):
        yield Function(TensorPart(names[key], _QUERY), at.fn("split_heads"), (unit, here), output=number)
    running = tuple(TensorPart(names[key], _QUERY) for key in ("so_far", "greatest", "weights"))
    ins = (
        TensorPart(names["queries"], _QUERY),
        TensorPart(names["keys"], _KEY),
        here,
        TensorPart(POSITIONS, ("t",)),
        *running,
    )
    for number, part in enumerate(running):
        yield Function(part, at.fn("attend"), ins, reduce=_REDUCED, output=number)
    for number, name in enumerate((at.out, at.own(at.node.sums))):
        yield Function(TensorPart(f"{name}_units", _QUERY), at.fn("finish_attention"), running, output=number)
        yield Same(name, f"{name}_units")


def ring_gradient_meanings(at: NodePlace[Attention]) -> Iterator[Meaning]:
    """Yield the equations of ring attention backward.

    They lead from the gradient of the heads to the node's term of the gradient of joint queries, keys and values.
    """
    names = ring_names(at)
    yield Same(f"D{at.out}_units", at.arriving)
    of_queries = (f"D{at.out}_units", names["queries"], f"{at.out}_units", f"{at.own(at.node.sums)}_units")
    here, there = TensorPart(POSITIONS, ("s",)), TensorPart(POSITIONS, ("t",))
    ins = (*(TensorPart(name, _QUERY) for name in of_queries), TensorPart(names["keys"], _KEY), here, there)
    parts = TensorPart(f"D{names['queries']}", _QUERY), TensorPart(f"D{names['keys']}", _KEY)
    for number, part in enumerate(parts):
        yield Function(part, at.fn("attend_grad"), ins, reduce="sum", output=number)
    merged = (TensorPart(part.tensor, _QUERY) for part in parts)
    yield Function(TensorPart(f"D{at.operand}_units", _QUERY), at.fn("merge_heads"), (*merged, here))
    yield Same(at.contribution_name(at.node.ins[0]), f"D{at.operand}_units")
