"""The parts of a stage and kinds of work that a `call` may name, and the sizes that each kind is counted by."""

from __future__ import annotations

from typing import Literal, get_args

CallPart = Literal["", "forward", "input_grad", "weight_grad", "recompute", "free", "in_place"]
CALL_PARTS: tuple[CallPart, ...] = get_args(CallPart)

CALL_DIMS: dict[str, tuple[str, ...]] = {
    "attention": ("batch", "heads", "queries", "keys", "width"),
    "causal_attention": ("batch", "heads", "queries", "keys", "width"),
    "matmul": ("m", "n", "k"),
    "matmul_batch": ("m", "n", "k", "products"),
    "experts": ("rows", "hidden", "inner", "experts", "columns"),
    "norm": ("rows", "features"),
    "softmax": ("rows", "features"),
    "loss": ("rows", "classes"),
    "elementwise": ("elements",),
    "reduction": ("elements",),
}
"""What a call may be for its price: the kinds of work, and the sizes that each is counted by."""
ATTENTION_CALLS = ("attention", "causal_attention")
"""Calls that multiply their inputs, and compute in the dtype of the first of them."""
