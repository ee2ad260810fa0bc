"""Norms of the queries and keys of each head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshweave.algorithms.block.functions import Values, array_module, over_rows, small
from meshweave.algorithms.block.nodes.call import CallRecord
from meshweave.algorithms.block.nodes.norm import EPSILON
from meshweave.base.errors import UnsupportedError
from meshweave.describe.model.head_norm import HeadNorm, JointNorm


class HeadNormRecord(CallRecord[HeadNorm]):
    """A norm of queries and keys within each head."""

    node_type = HeadNorm
    fn = "head_norm"
    work = "norm"
    view = "heads_units"

    def calls(self, node: HeadNorm, is_exact: bool) -> tuple[Callable[..., Any], ...]:
        """Return norm(x, gain), its gradient(dy, x, gain) with respect to x, and gain_gradient(dy, x, so_far).

        `dy` is the gradient of the result; the last function returns `so_far` plus the gain's gradient. All give
        small integers if `is_exact`.
        """
        own = _HeadNorms(node, is_exact)
        return own.norm, own.gradient, own.weight_gradient


class JointNormRecord(HeadNormRecord):
    """A norm of queries and keys over all heads together, priced like a norm in each head.

    It has no functions, so its programs cannot run.
    """

    node_type = JointNorm

    def calls(self, node: HeadNorm, is_exact: bool) -> tuple[Callable[..., Any], ...]:
        """Raise UnsupportedError, always: norms over all heads together have no functions yet."""
        raise UnsupportedError("programs of norms of all heads together are not written yet")


class _HeadNorms:
    """The functions of a node: those of models, or of small integers that depend on the same elements."""

    def __init__(self, node: HeadNorm, is_exact: bool) -> None:
        self.queries, self.width, self.is_exact = node.per_group, node.width, is_exact

    def _heads(self, x: Values) -> Values:
        """Return (batch, sequence, groups, heads of queries and two more, width)."""
        heads = self.queries + 2
        return x.reshape(*x.shape[:-1], x.shape[-1] // (heads * self.width), heads, self.width)

    def _gains(self, gain: Values) -> Values:
        return array_module(gain).stack([gain[0]] * self.queries + [gain[1]])

    def _scaled(self, heads: Values) -> tuple[Values, Values]:
        """Return normalised queries and keys, and what they are multiplied by for that."""
        if self.is_exact:
            return small(heads + heads.sum(-1)[..., None]), 1
        scale = ((heads * heads).sum(-1)[..., None] / self.width + EPSILON) ** -0.5
        return heads * scale, scale

    def _joined(self, heads: Values, values: Values, like: Values) -> Values:
        return array_module(like).concatenate((heads, values), -2).reshape(like.shape)

    def norm(self, x: Values, gain: Values) -> Values:
        """Return `x` with queries and keys normalised head by head, times `gain`; values pass as they are.

        `x` is (..., groups x (queries of a group + 2) x width), `gain` (2, width): of queries, then of keys.
        """
        heads = self._heads(x)
        out = self._scaled(heads[..., :-1, :])[0] * self._gains(gain)
        return self._joined(small(out) if self.is_exact else out, heads[..., -1:, :], x)

    def gradient(self, dy: Values, x: Values, gain: Values) -> Values:
        """Return the gradient with respect to `x` from that of the result, `dy`; that of values is passed on."""
        arriving = self._heads(dy)
        scaled, scale = self._scaled(self._heads(x)[..., :-1, :])
        change = arriving[..., :-1, :] * self._gains(gain)
        along = (change * scaled).sum(-1)[..., None]
        out = (
            small(change + scaled * along)
            if self.is_exact
            else scale * (change - scaled * along / self.width)
        )
        return self._joined(out, arriving[..., -1:, :], dy)

    def weight_gradient(self, dy: Values, x: Values, so_far: Values) -> Values:
        """Return `so_far` plus the gradient of the gains (2, width of a head), of queries and of keys."""
        terms = self._heads(dy)[..., :-1, :] * self._scaled(self._heads(x)[..., :-1, :])[0]
        of_queries = over_rows(terms[..., :-1, :])
        return so_far + array_module(dy).stack((of_queries, over_rows(terms[..., -1, :])))
