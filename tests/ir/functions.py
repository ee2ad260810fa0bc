"""The functions that calls of the golden programs name: called as (stash, *ins), they return a list of outs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshweave.algorithms.pipeline.examples import chain_of_ranks
from meshweave.algorithms.pipeline.functions import stage_functions

Array = NDArray[Any]

DELAYED_WEIGHTS = chain_of_ranks((0, 1, 2), 4, skips=((0, 2),), recomputes=(1,))
"""What the golden program of that name computes, by the delay of one micro-batch."""


def stage(stash: dict[str, Array], x: Array, w: Array) -> list[Array]:
    stash.update(x=x.copy(), squared=x @ w)
    return [stash["squared"] ** 2]


def stage_input_grad(stash: dict[str, Array], grad: Array, w: Array) -> list[Array]:
    return [2 * grad * stash["squared"] @ w.T]


def stage_weight_grad(stash: dict[str, Array], grad: Array, total: Array) -> list[Array]:
    return [total + stash["x"].T @ (2 * grad * stash["squared"])]


def loss_grad(stash: dict[str, Array], y: Array, *targets: Array) -> list[Array]:
    return [y - (targets[0] if targets else 1)]


def softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def attention(stash: dict[str, Array], q: Array, k: Array, v: Array) -> list[Array]:
    """Groups of two query heads and one key head of width 2; heads side by side, or in dims of their own."""
    batch, length = q.shape[:2]
    queries = q.reshape(batch, length, -1, 2, 2)
    keys, values = (x.reshape(batch, length, -1, 2) for x in (k, v))
    weights = softmax(np.einsum("bsghd,btgd->bgshtd", queries, keys).sum(axis=-1))
    return [np.einsum("bgsht,btgd->bsghd", weights, values).reshape(q.shape)]


def attend(
    stash: dict[str, Array], q: Array, k: Array, v: Array, out: Array, high: Array, total: Array
) -> list[Array]:
    """Continue a softmax by a block of keys; it is (sum of weighted values, largest score, sum of weights)."""
    scores = q @ k.T
    fresh = np.maximum(np.where(total > 0, high, -np.inf), scores.max(axis=-1, initial=-np.inf))
    old = np.where(total > 0, np.exp(high - fresh), 0.0)
    weights = np.exp(scores - fresh[:, None])
    return [old[:, None] * out + weights @ v, fresh, old * total + weights.sum(axis=-1)]


FUNCTIONS = {
    "square": lambda stash, y: [y**2],
    "stage": stage,
    "stage_input_grad": stage_input_grad,
    "stage_weight_grad": stage_weight_grad,
    "loss_grad": loss_grad,
    "loss_sum": lambda stash, y: [(y**2).sum(keepdims=True).reshape(1)],
    "weight_grad": lambda stash, x, e: [x.T @ e],
    "square_sum": lambda stash, z: [(z**2).sum(axis=-1)],
    "scale": lambda stash, z, squares, g: [z * g / np.sqrt(1 + squares)[:, None]],
    "row_max": lambda stash, logits: [logits.max(axis=-1)],
    "exp_sum": lambda stash, logits, high: [np.exp(logits - high[:, None]).sum(axis=-1)],
    "pick": lambda stash, logits, t, v: [np.where(t[:, None] == v, logits, 0).sum(axis=-1)],
    "loss": lambda stash, total, high, picked: [(np.log(total) + high - picked).sum(keepdims=True)],
    "softmax": lambda stash, scores: [softmax(scores)],
    "attention": attention,
    "attend": attend,
    "finish": lambda stash, out, total: [out / total[:, None]],
    **stage_functions(DELAYED_WEIGHTS),
}
