"""Functions of small integers that depend on the same elements as norms, attention and activations."""

from __future__ import annotations

import numpy as np

from meshweave.algorithms.block.functions import (
    BlockFunctions,
    Values,
    array_module,
    as_numbers,
    like,
    over_rows,
)


class IntegerFunctions(BlockFunctions):
    """Functions of integers that never exceed 3, for comparisons with `==`."""

    def add_bias(self, x: Values, bias: Values) -> Values:
        """Return small integers in place of `x` plus `bias`."""
        return _small(x + bias)

    def bias_grad(self, dy: Values, so_far: Values) -> Values:
        """Return small integers in place of the gradient of a bias, added to `so_far`."""
        return so_far + over_rows(_small(dy))

    def statistics(self, x: Values) -> Values:
        """Return small integers in place of the sums of a norm."""
        small = _small(x)
        rows = (small, small * small)[: self.problem.norm_rows]
        return array_module(x).stack([row.sum(-1) for row in rows], -1)

    def normalize(self, x: Values, statistics: Values, gain: Values) -> Values:
        """Return small integers in place of the normalised features."""
        scaled = _small(x + statistics.sum(-1)[..., None]) * gain[0]
        return _small(scaled if self.problem.family == "llama" else scaled + gain[1])

    def norm_grad_sums(self, dy: Values, x: Values, statistics: Values, gain: Values) -> Values:
        """Return small integers in place of the sums that the gradient of a norm needs."""
        sums = _small(dy * gain[0] + x), _small(dy - x + statistics[..., :1])
        return array_module(x).stack([row.sum(-1) for row in sums[: self.problem.norm_rows]], -1)

    def normalize_grad(self, dy: Values, x: Values, statistics: Values, sums: Values, gain: Values) -> Values:
        """Return small integers in place of the gradient of a norm."""
        of_row = statistics.sum(-1)[..., None] + sums.sum(-1)[..., None]
        return _small(dy * gain[0] + x * of_row)

    def normalize_weight_grad(self, dy: Values, x: Values, statistics: Values, so_far: Values) -> Values:
        """Return small integers in place of the gradient by the parameters of a norm, added to `so_far`."""
        of_gain = over_rows(_small(dy * _small(x + statistics[..., :1])))
        rows = (of_gain, over_rows(_small(dy)))[: self.problem.norm_rows]
        return so_far + array_module(x).stack(rows)

    def _scores(self, qkv: Values) -> tuple[Values, Values, Values, Values]:
        queries, keys, values = self._split(_small(qkv))
        scores = _small(queries @ keys.swapaxes(-1, -2))
        return queries, keys, values, scores * like(np.tri(scores.shape[-2]), scores)

    def attention(self, qkv: Values) -> list[Values]:
        """Return small integers in place of the heads, and of what their gradient needs."""
        _, _, values, scores = self._scores(qkv)
        return [self._joined(_small(scores @ values), qkv), self._joined(scores.sum(-1)[..., None], qkv)]

    def attention_grad(self, dout: Values, qkv: Values, out: Values, log_sums: Values) -> Values:
        """Return small integers in place of the gradient of attention."""
        queries, keys, values, scores = self._scores(qkv)
        arriving = self._heads(_small(dout), self.problem.head_dim)
        along = (arriving * self._heads(out, self.problem.head_dim)).sum(-1)[..., None]
        of_scores = _small(arriving @ values.swapaxes(-1, -2) - along + self._heads(log_sums, 1) + scores)
        of_keys, of_values = (
            of_scores.swapaxes(-1, -2) @ queries,
            _small(scores).swapaxes(-1, -2) @ arriving,
        )
        return _small(self._merged(of_scores @ keys, of_keys, of_values, qkv))

    def split_heads(self, qkv: Values, positions: Values) -> list[Values]:
        """Return small integers in place of the queries, and of keys with values."""
        queries, keys, values = self._split(_small(qkv))
        joined = array_module(qkv).concatenate((keys, values), -1)
        return [self._joined(queries, qkv), self._joined(joined, qkv)]

    def _seen(self, queries: Values, keys: Values, here: Values, there: Values) -> tuple[Values, Values]:
        """Return scores of keys up to each query, and which those are."""
        mask = as_numbers((here[:, None] >= there[None, :]), queries)
        return _small(queries @ keys.swapaxes(-1, -2)) * mask, mask

    def attend(
        self,
        queries: Values,
        keys: Values,
        here: Values,
        there: Values,
        so_far: Values,
        greatest: Values,
        weights: Values,
    ) -> list[Values]:
        """Return small integers in place of what more keys give."""
        own_keys, values = self._keys(keys)
        scores, mask = self._seen(self._heads(queries, self.problem.head_dim), own_keys, here, there)
        count = mask.sum(-1)[None, :, None]
        more = self._joined(scores @ values, queries), self._joined(scores.sum(-1)[..., None], queries)
        return [so_far + more[0], greatest + more[1], weights + count]

    def finish_attention(self, so_far: Values, greatest: Values, weights: Values) -> list[Values]:
        """Return small integers in place of what `attention` gives, from what all keys gave."""
        return [_small(so_far), greatest]

    def attend_grad(
        self,
        dout: Values,
        queries: Values,
        out: Values,
        log_sums: Values,
        keys: Values,
        here: Values,
        there: Values,
    ) -> list[Values]:
        """Return small integers in place of the gradients by queries, and by keys and values."""
        d = self.problem.head_dim
        own_keys, values = self._keys(keys)
        rows, arriving = self._heads(queries, d), self._heads(_small(dout), d)
        scores, _ = self._seen(rows, own_keys, here, there)
        along = (arriving * self._heads(out, d)).sum(-1)[..., None]
        of_scores = _small(arriving @ values.swapaxes(-1, -2) - along + self._heads(log_sums, 1) + scores)
        of_keys = of_scores.swapaxes(-1, -2) @ rows
        of_values = _small(scores).swapaxes(-1, -2) @ arriving
        return [self._joined(of_scores @ own_keys, queries), self._joined_keys(of_keys, of_values, keys)]

    def merge_heads(self, of_queries: Values, of_keys: Values, positions: Values) -> Values:
        """Return small integers in place of the gradient by what `split_heads` takes."""
        return _small(super().merge_heads(of_queries, of_keys, positions))

    def _before_turn(self, queries: Values, keys: Values, positions: Values) -> tuple[Values, Values]:
        return queries, keys

    def softmax_sums(self, logits: Values, greatest: Values, targets: Values, vocabulary: Values) -> Values:
        """Return small integers in place of the two sums over part of the logits of each token."""
        is_target = targets[..., None] == vocabulary
        sums = _small(logits + greatest[..., None]).sum(-1), (_small(logits) * is_target).sum(-1)
        return array_module(logits).stack(sums, -1)

    def loss(self, sums: Values, greatest: Values, so_far: Values) -> Values:
        """Return small integers in place of the loss, added to that of earlier tokens."""
        return so_far + (_small(sums[..., 0] + greatest) + sums[..., 1]).sum()

    def loss_grad(
        self, logits: Values, greatest: Values, sums: Values, targets: Values, vocabulary: Values
    ) -> Values:
        """Return small integers in place of the gradient by part of the logits."""
        of_row = greatest[..., None] + sums.sum(-1)[..., None]
        return _small(logits + of_row - as_numbers(targets[..., None] == vocabulary, logits))

    def activation(self, y: Values) -> Values:
        """Return small integers in place of the activation of each feature."""
        if self.problem.family == "llama":
            gate, value = self._gate_and_input(_small(y))
            return _small(gate * value)
        return _small(_small(y) ** 2)

    def activation_grad(self, dout: Values, y: Values) -> Values:
        """Return small integers in place of the gradient by the columns of each feature."""
        if self.problem.family == "llama":
            gate, value = self._gate_and_input(_small(y))
            return _small(self._interleaved(_small(dout) * value, _small(dout) * gate))
        return _small(2 * _small(dout) * _small(y))


def _small(x: Values) -> Values:
    """Return integers in -3 .. 3 that are equal to `x` modulo 7."""
    return (x + 3) % 7 - 3
