"""The functions of attention, whole and in a ring of ranks that share sequences.

Arguments and results are (batch, sequence, columns), or (tokens, columns) without a ring, with the columns of one
group of heads after those of another. Of a group these are in `qkv` its queries, key and value; in `queries` its
queries, in `keys` its key and value; in statistics one column for each of its query heads. Inside the functions
queries, keys and values are (batch, groups, heads of a group, positions, width); keys and values have one head a
group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshweave.algorithms.block.functions import Values, array_module, as_numbers, like, small
from meshweave.describe.model.nodes import Attention

ROTARY_BASE = 10_000.0
"""The base of rotary frequencies (Su et al., RoFormer, section 3.2.2)."""


_NAMES = (
    "attention",
    "attention_grad",
    "split_heads",
    "attend",
    "finish_attention",
    "attend_grad",
    "merge_heads",
)


class AttentionFunctions(ABC):
    """The functions of attention over sequences of `sequence` tokens.

    Arrays (numpy, torch or jax) are (batch, sequence, columns), or (tokens, columns) without a ring. The columns
    of one group of heads, which share a key and a value, follow those of another: in `qkv` the queries, the key
    and the value of a group, in `queries` its queries, in `keys` its key and value, in log-sums one column per
    query head.
    """

    def __init__(self, node: Attention, sequence: int) -> None:
        self.node, self.sequence = node, sequence
        self.width, self.per_group = node.width, node.per_group

    def table(self) -> dict[str, Callable[..., Any]]:
        """Return the functions that programs call, by the names of the methods here."""
        return {name: getattr(self, name) for name in _NAMES}

    def mask(self, here: Values, there: Values) -> Values:
        """Return booleans (queries, keys): whether each query attends to each key.

        `here` are the positions of the queries, `there` those of the keys, both 1-D. A query attends to keys up to
        its own position, and only within the node's window if it has one.
        """
        distance = here[:, None] - there[None, :]
        if self.node.window is None:
            return distance >= 0
        return (distance >= 0) & (distance < self.node.window)

    def _units(self, x: Values, width: int) -> Values:
        """Return (batch, sequence, units, width); tokens in one dim are whole sequences."""
        *tokens, columns = x.shape
        if len(tokens) == 1:
            tokens = [tokens[0] // self.sequence, self.sequence]
        return x.reshape(*tokens, columns // width, width)

    def _heads(self, x: Values, width: int) -> Values:
        """Return (batch, groups, heads of a group, sequence, width)."""
        r = self.per_group
        units = self._units(x, r * width)
        return array_module(x).moveaxis(units.reshape(*units.shape[:-1], r, width), 1, 3)

    def _split(self, qkv: Values) -> tuple[Values, Values, Values]:
        """Return queries (batch, groups, heads, sequence, width), keys and values (batch, groups, 1, ...)."""
        d, r = self.width, self.per_group
        groups = self._units(qkv, (self.per_group + 2) * self.width).swapaxes(1, 2)
        batch, count, sequence, _ = groups.shape
        queries = groups[..., : r * d].reshape(batch, count, sequence, r, d).swapaxes(2, 3)
        return queries, groups[:, :, None, :, r * d : (r + 1) * d], groups[:, :, None, :, (r + 1) * d :]

    def _merged(self, queries: Values, keys: Values, values: Values, like: Values) -> Values:
        """Return what `_split` splits, shaped `like` it; keys and values are summed over the heads of a group."""
        batch, groups, r, sequence, d = queries.shape
        flat = queries.swapaxes(2, 3).reshape(batch, groups, sequence, r * d)
        joined = array_module(queries).concatenate((flat, keys.sum(2), values.sum(2)), -1)
        return joined.swapaxes(1, 2).reshape(like.shape)

    def _joined(self, heads: Values, like: Values) -> Values:
        """Return rows of columns of (batch, groups, heads, sequence, width), for the tokens of `like`."""
        _, groups, r, _, d = heads.shape
        return array_module(heads).moveaxis(heads, 3, 1).reshape(*like.shape[:-1], groups * r * d)

    def _keys(self, keys: Values) -> tuple[Values, Values]:
        """Return keys and values (batch, groups, 1, positions, width) of what goes round."""
        d = self.width
        units = self._units(keys, 2 * d).swapaxes(1, 2)[:, :, None]
        return units[..., :d], units[..., d:]

    def _joined_keys(self, keys: Values, values: Values, like: Values) -> Values:
        """Return what `_keys` splits, summed over the heads of a group."""
        joined = array_module(keys).concatenate((keys.sum(2), values.sum(2)), -1)
        return joined.swapaxes(1, 2).reshape(like.shape)

    def split_heads(self, qkv: Values, positions: Values) -> list[Values]:
        """Return [queries, keys with values] of `qkv`, each (batch, sequence, columns), group after group.

        Queries and keys get rotary embedding by `positions` (those of the rank's tokens, 1-D) if the node has it.
        """
        queries, keys, values = self._split(qkv)
        queries, keys = self._turned(queries, positions), self._turned(keys, positions)
        joined = array_module(qkv).concatenate((keys, values), -1)
        return [self._joined(queries, qkv), self._joined(joined, qkv)]

    def merge_heads(self, of_queries: Values, of_keys: Values, positions: Values) -> Values:
        """Return the gradient with respect to `qkv`, from the gradients of the results of `split_heads`.

        All are (batch, sequence, columns); `of_keys` is for keys with values. Rotary embedding is undone;
        `positions` are those of the rank's tokens, 1-D.
        """
        d, r = self.width, self.per_group
        queries, (keys, values) = self._heads(of_queries, d), self._keys(of_keys)
        like = array_module(of_queries).concatenate((of_queries, of_keys), -1)
        assert like.shape[-1] == queries.shape[1] * (r + 2) * d
        queries, keys = self._turned(queries, positions, -1), self._turned(keys, positions, -1)
        return self._merged(queries, keys, values, like)

    def attention_grad(self, dout: Values, qkv: Values, out: Values, log_sums: Values) -> Values:
        """Return the gradient with respect to `qkv`, in its shape.

        `out` (the heads) and `log_sums` (the log-sum-exp of scores) are the results of `attention`, and `dout` is
        the gradient with respect to `out`.
        """
        *operands, scores = self._scores(qkv)
        queries, keys, values = self._gradients(scores, operands, dout, out, log_sums)
        here = like(np.arange(queries.shape[-2]), queries)
        return self._merged(self._turned(queries, here, -1), self._turned(keys, here, -1), values, qkv)

    def attend_grad(
        self, dout: Values, queries: Values, out: Values, log_sums: Values, keys: Values, *positions: Values
    ) -> list[Values]:
        """Return [gradient of `queries`, gradient of `keys`] that come from attention to these keys and values.

        The gradients of `queries` for all parts of the keys add up.

        Args:
            dout: the gradient of the heads `out`.
            out, log_sums: heads and log-sum-exp of scores, over all keys.
            keys: some of the keys, with their values.
            positions: two arrays, 1-D: positions of the queries, then positions of these keys.
        """
        operands = self._heads(queries, self.width), *self._keys(keys)
        scores = self._masked(*operands[:2], *positions)
        of_queries, of_keys, of_values = self._gradients(scores, operands, dout, out, log_sums)
        return [self._joined(of_queries, queries), self._joined_keys(of_keys, of_values, keys)]

    @abstractmethod
    def _scores(self, qkv: Values) -> tuple[Values, Values, Values, Values]:
        """Return queries and keys as they are multiplied, values, and masked scores."""

    @abstractmethod
    def _masked(self, queries: Values, keys: Values, here: Values, there: Values) -> Values:
        """Return scores of queries at positions `here` by keys at `there`, of those attended to."""

    @abstractmethod
    def _turned(self, x: Values, positions: Values, sign: int = 1) -> Values:
        """Return rows turned by their positions, or back."""

    @abstractmethod
    def _gradients(
        self, scores: Values, operands: Sequence[Values], dout: Values, out: Values, log_sums: Values
    ) -> tuple[Values, Values, Values]:
        """Return the gradients by the operands: queries and keys as they were multiplied, and values."""


class RealAttention(AttentionFunctions):
    """Causal softmax attention as models compute it, with rotary positions if the node has them.

    Arrays are (batch, sequence, columns), or (tokens, columns) without a ring. Columns are group after group of
    heads that share a key and a value: in `qkv` a group has its queries, key and value, in `keys` its key and
    value.
    """

    def _scores(self, qkv: Values) -> tuple[Values, Values, Values, Values]:
        """Return queries and keys as they are multiplied, values, and masked scores."""
        queries, keys, values = self._split(qkv)
        here = like(np.arange(queries.shape[-2]), queries)
        queries, keys = self._turned(queries, here), self._turned(keys, here)
        return queries, keys, values, self._masked(queries, keys, here, here)

    def _masked(self, queries: Values, keys: Values, here: Values, there: Values) -> Values:
        """Return scores, minus infinity for keys after the query."""
        scores = queries @ keys.swapaxes(-1, -2) * self.width**-0.5
        never = like(np.array(-np.inf), scores)
        return array_module(scores).where(self.mask(here, there), scores, never)

    def _turned(self, x: Values, positions: Values, sign: int = 1) -> Values:
        """Return rows turned by their positions, or back: rotary embedding of both halves of each head."""
        half = int(self.width * self.node.rotary) // 2
        if not half:
            return x
        frequencies = ROTARY_BASE ** (-np.arange(half) / half)
        angles = positions[:, None] * like(frequencies, positions)
        module = array_module(x)
        cos, sin = module.cos(angles), sign * module.sin(angles)
        first, second = x[..., :half], x[..., half : 2 * half]
        parts = (first * cos - second * sin, first * sin + second * cos, x[..., 2 * half :])
        return module.concatenate(parts, -1)

    def attention(self, qkv: Values) -> list[Values]:
        """Return [heads (..., heads x width), log-sum-exp of scores (..., heads)] of causal softmax attention."""
        module = array_module(qkv)
        _, _, values, scores = self._scores(qkv)
        greatest = module.amax(scores, -1)[..., None]
        weights = module.exp(scores - greatest)
        total = weights.sum(-1)[..., None]
        return [self._joined(weights / total @ values, qkv), self._joined(module.log(total) + greatest, qkv)]

    def _gradients(
        self, scores: Values, operands: Sequence[Values], dout: Values, out: Values, log_sums: Values
    ) -> tuple[Values, Values, Values]:
        queries, keys, values = operands
        weights = array_module(scores).exp(scores - self._heads(log_sums, 1))
        arriving = self._heads(dout, self.width)
        along = (arriving * self._heads(out, self.width)).sum(-1)[..., None]
        of_scores = weights * (arriving @ values.swapaxes(-1, -2) - along) * self.width**-0.5
        of_keys = of_scores.swapaxes(-1, -2) @ queries
        return of_scores @ keys, of_keys, weights.swapaxes(-1, -2) @ arriving

    def attend(
        self, queries: Values, keys: Values, here: Values, there: Values, *before: Values
    ) -> list[Values]:
        """Return [sums of weighted values, greatest scores, sums of weights] after more keys, by online softmax.

        Args:
            queries: the queries of the rank's tokens.
            keys: the further keys, with their values.
            here, there: positions of the queries, and of these keys, 1-D.
            before: the same three arrays after the keys so far, all 0 at first. A greatest score is 0 until its
                query attends to a key.
        """
        if not there.shape[0]:
            return list(before)
        so_far, greatest, weights = before
        module, d = array_module(queries), self.width
        own_keys, values = self._keys(keys)
        scores = self._masked(self._heads(queries, d), own_keys, here, there)
        total, highest = self._heads(weights, 1), self._heads(greatest, 1)
        highest = module.where(total > 0, highest, like(np.array(-np.inf), highest))
        most = module.maximum(highest, module.amax(scores, -1)[..., None])
        finite = module.where(most > -np.inf, most, like(np.array(0.0), most))
        shrunk, new = module.exp(highest - finite), module.exp(scores - finite)
        out = self._heads(so_far, d) * shrunk + new @ values
        total = total * shrunk + new.sum(-1)[..., None]
        return [self._joined(part, queries) for part in (out, finite, total)]

    def finish_attention(self, so_far: Values, greatest: Values, weights: Values) -> list[Values]:
        """Return [heads, log-sum-exp of scores] from the three results of `attend` after all keys."""
        d = self.width
        out = self._heads(so_far, d) / self._heads(weights, 1)
        return [self._joined(out, so_far), greatest + array_module(weights).log(weights)]


class IntegerAttention(AttentionFunctions):
    """Functions that give small integers in place of attention, so that results compare with `==`.

    They depend on the same elements as attention, and have its shapes. Their "gradients" are no derivatives.
    """

    def _scores(self, qkv: Values) -> tuple[Values, Values, Values, Values]:
        queries, keys, values = self._split(small(qkv))
        scores = small(queries @ keys.swapaxes(-1, -2))
        here = np.arange(scores.shape[-2])
        return queries, keys, values, scores * like(1.0 * self.mask(here, here), scores)

    def attention(self, qkv: Values) -> list[Values]:
        """Return [(..., heads x width) in place of the heads, (..., heads) in place of the log-sum-exp].

        Both are small integers, made from `qkv` (batch, sequence, columns) in float.
        """
        _, _, values, scores = self._scores(qkv)
        return [self._joined(small(scores @ values), qkv), self._joined(scores.sum(-1)[..., None], qkv)]

    def attention_grad(self, dout: Values, qkv: Values, out: Values, log_sums: Values) -> Values:
        """Return small integers in place of the gradient with respect to `qkv`, in its shape."""
        return small(super().attention_grad(dout, qkv, out, log_sums))

    def split_heads(self, qkv: Values, positions: Values) -> list[Values]:
        """Return [small integers in place of the queries, small integers in place of keys with values]."""
        return super().split_heads(small(qkv), positions)

    def _masked(self, queries: Values, keys: Values, here: Values, there: Values) -> Values:
        return small(queries @ keys.swapaxes(-1, -2)) * as_numbers(self.mask(here, there), queries)

    def _turned(self, x: Values, positions: Values, sign: int = 1) -> Values:
        return x

    def _gradients(
        self, scores: Values, operands: Sequence[Values], dout: Values, out: Values, log_sums: Values
    ) -> tuple[Values, Values, Values]:
        queries, keys, values = operands
        arriving = self._heads(small(dout), self.width)
        along = (arriving * self._heads(out, self.width)).sum(-1)[..., None]
        of_scores = small(arriving @ values.swapaxes(-1, -2) - along + self._heads(log_sums, 1) + scores)
        of_keys = of_scores.swapaxes(-1, -2) @ queries
        return of_scores @ keys, of_keys, small(scores).swapaxes(-1, -2) @ arriving

    def attend(
        self, queries: Values, keys: Values, here: Values, there: Values, *before: Values
    ) -> list[Values]:
        """Return the three arrays `before`, with small integers added for more keys.

        They stand for the results of online softmax; arguments and shapes are those of `RealAttention.attend`.
        """
        own_keys, values = self._keys(keys)
        scores = self._masked(self._heads(queries, self.width), own_keys, here, there)
        count = as_numbers(self.mask(here, there), queries).sum(-1)[None, :, None]
        so_far, greatest, weights = before
        more = self._joined(scores @ values, queries), self._joined(scores.sum(-1)[..., None], queries)
        return [so_far + more[0], greatest + more[1], weights + count]

    def finish_attention(self, so_far: Values, greatest: Values, weights: Values) -> list[Values]:
        """Return small integers in place of [heads, log-sum-exp], from what `attend` returned after all keys."""
        return [small(so_far), greatest]

    def merge_heads(self, of_queries: Values, of_keys: Values, positions: Values) -> Values:
        """Return small integers in place of the gradient with respect to `qkv`."""
        return small(super().merge_heads(of_queries, of_keys, positions))
