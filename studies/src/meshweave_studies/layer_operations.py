"""Attention and element-wise operations of a transformer block: FLOPs, and bytes through memory.

They follow the sharding of the fully connected layers and need no communication (Korthikanti et al.,
Reducing Activation Recomputation in Large Transformer Models, MLSys '23, section 4), so that each chip
does its share. The counts follow from the operations alone, and were written down before any time was compared:

- Attention is full, not causal: scores over all pairs of tokens are computed and masked, as in the FLOP count of
  Narayanan et al. (SC '21, appendix): 4 b s s H forward, twice that backward. They are kept in memory (no fused
  attention), as the 5 a s / h of Korthikanti's equation 1 has it, and dropout is applied to them.
- An element-wise operation reads and writes each of its matrices once. Scaling and masking are part of softmax;
  bias and activation are one pass, and so are bias, dropout and residual add, as compilers fuse them; gradients
  of biases are summed in the pass that makes their operand. Masks of dropout are one byte per element.

Elements are of e bytes. Per token: h hidden, q = heads x head size (h for the models of the papers), g the same
for keys and for values, f the inner size of the FFN (a gate counts another f), p = heads x sequence scores. In
elements, or bytes where it says so:

    pass                            forward                    backward
    layer norm, twice               h in, h out                h in three times (dy, x, residual's), h out
    split into heads, bias          q + 2 g in and out         the same
    softmax                         p in, p out                p in twice (dp, p), p out
    dropout of scores               p in, p out, p bytes       the same
    merge heads                     q in, q out                the same
    bias, dropout, residual, twice  2 h in, h out, h bytes     h in, h out, h bytes
    bias and activation             f in, f out (gated: 2 f)   dy and inputs in, as many as inputs out

    product                         operands
    scores = Q K^T                  q + g in, p out            dQ: p + g in, q out; dK: p + q in, g out
    P V                             p + g in, q out            dP: q + g in, p out; dV: p + q in, g out
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshweave.base.units import dtype_bytes
from meshweave.describe.model.transformer import Transformer
from meshweave.describe.model.workload import Workload

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class BlockOp:
    """One operation of a block besides its fully connected layers, over all chips together.

    `flops` is 0 for an element-wise operation; `bytes` counts what it reads and writes in memory.
    """

    name: str
    direction: Direction
    flops: int
    bytes: int


def ops_besides_fc_layers(model: Transformer, workload: Workload) -> tuple[BlockOp, ...]:
    """Return every operation of one block except the GEMMs of its fully connected layers, forward and backward."""
    e, tokens, s = dtype_bytes(workload.dtype), workload.tokens, workload.sequence
    counts = model.layer.counts
    h, q, g, f = (counts[name] for name in ("residual", "heads", "keys", "ffn"))
    p = sum(node.heads for node in model.layer.attentions) * s
    heads, halves = 2 * (q + 2 * g), 2 if model.gated_ffn else 1
    # (name, (elements, mask bytes) per token forward, and backward)
    linear: tuple[tuple[str, tuple[int, int], tuple[int, int]], ...] = (
        ("layer norms", (4 * h, 0), (8 * h, 0)),
        ("split into heads", (heads, 0), (heads, 0)),
        ("softmax", (2 * p, 0), (3 * p, 0)),
        ("dropout of scores", (2 * p, p), (2 * p, p)),
        ("merge heads", (2 * q, 0), (2 * q, 0)),
        ("bias, dropout, residual", (6 * h, 2 * h), (4 * h, 2 * h)),
        ("bias and activation", ((halves + 1) * f, 0), ((2 * halves + 1) * f, 0)),
    )
    out = []
    for name, forward, backward in linear:
        directions: tuple[tuple[Direction, tuple[int, int]], ...] = (
            ("forward", forward),
            ("backward", backward),
        )
        for direction, (elements, mask) in directions:
            out.append(BlockOp(name, direction, 0, tokens * (e * elements + mask)))
    flops = 2 * tokens * s * q
    products: tuple[tuple[str, Direction], ...] = (
        ("Q K^T", "forward"),
        ("P V", "forward"),
        ("dQ", "backward"),
        ("dK", "backward"),
        ("dP", "backward"),
        ("dV", "backward"),
    )
    for name, direction in products:
        out.append(BlockOp(name, direction, flops, tokens * e * (p + q + g)))
    return tuple(out)
