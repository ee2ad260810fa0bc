"""The functions of blocks as models compute them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from meshweave.algorithms.block.functions import (
    BlockFunctions,
    Values,
    array_module,
    as_numbers,
    like,
    over_rows,
)

EPSILON = 1e-5
"""What a norm adds to a variance before its root."""
ROTARY_BASE = 10_000.0
"""The base of rotary frequencies (Su et al., RoFormer, section 3.2.2)."""
_GELU = float(np.sqrt(2 / np.pi))


class RealFunctions(BlockFunctions):
    """Layer norm or root-mean-square norm, causal softmax attention, GELU (tanh form) or SwiGLU.

    Half-precision inputs are computed in single precision; results are rounded where they are stored.
    """

    def table(self) -> Mapping[str, Callable[..., Any]]:
        """Return the functions by name; each computes half-precision inputs in single precision."""

        def widened(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *ins: function(*map(_wide, ins))

        return {name: widened(function) for name, function in super().table().items()}

    def _centred(self, x: Values, statistics: Values) -> tuple[Values, Values]:
        """Return the features before gain and bias, and the reciprocal of their deviation."""
        means = statistics / self.problem.hidden
        if self.problem.family == "llama":
            scale = (means + EPSILON) ** -0.5
            return x * scale, scale
        mean = means[..., :1]
        scale = (means[..., 1:] - mean * mean + EPSILON) ** -0.5
        return (x - mean) * scale, scale

    def add_bias(self, x: Values, bias: Values) -> Values:
        """Return `x` (batch, sequence, features) plus `bias` (features)."""
        return x + bias

    def bias_grad(self, dy: Values, so_far: Values) -> Values:
        """Return `so_far` (features) plus the sums over rows of `dy` (batch, sequence, features)."""
        return so_far + over_rows(dy)

    def statistics(self, x: Values) -> Values:
        """Return sums of squares over features, for "gpt" after plain sums (batch, sequence, norm rows)."""
        squares = (x * x).sum(-1)[..., None]
        if self.problem.family == "llama":
            return squares
        return array_module(x).concatenate((x.sum(-1)[..., None], squares), -1)

    def normalize(self, x: Values, statistics: Values, gain: Values) -> Values:
        """Return (x - mean) / deviation x gain + bias, for "llama" x / root mean square x gain."""
        scaled = self._centred(x, statistics)[0] * gain[0]
        return scaled if self.problem.family == "llama" else scaled + gain[1]

    def norm_grad_sums(self, dy: Values, x: Values, statistics: Values, gain: Values) -> Values:
        """Return sums of dy x gain x normalised x, for "gpt" after those of dy x gain."""
        arriving = dy * gain[0]
        along = (arriving * self._centred(x, statistics)[0]).sum(-1)[..., None]
        if self.problem.family == "llama":
            return along
        return array_module(x).concatenate((arriving.sum(-1)[..., None], along), -1)

    def normalize_grad(self, dy: Values, x: Values, statistics: Values, sums: Values, gain: Values) -> Values:
        """Return the gradient by `x` of a layer norm or root-mean-square norm; shape of `x`."""
        centred, scale = self._centred(x, statistics)
        means = sums / self.problem.hidden
        change = dy * gain[0] - centred * means[..., -1:]
        return scale * (change if self.problem.family == "llama" else change - means[..., :1])

    def normalize_weight_grad(self, dy: Values, x: Values, statistics: Values, so_far: Values) -> Values:
        """Return `so_far` plus sums over rows of dy x normalised x, for "gpt" with those of dy."""
        of_gain = over_rows(dy * self._centred(x, statistics)[0])
        rows = (of_gain,) if self.problem.family == "llama" else (of_gain, over_rows(dy))
        return so_far + array_module(x).stack(rows)

    def _scores(self, qkv: Values) -> tuple[Values, Values, Values, Values]:
        """Return queries and keys as they are multiplied, values, and masked scores."""
        queries, keys, values = self._split(qkv)
        here = like(np.arange(queries.shape[-2]), queries)
        queries, keys = self._turned(queries, here), self._turned(keys, here)
        return queries, keys, values, self._masked(queries, keys, here, here)

    def _masked(self, queries: Values, keys: Values, here: Values, there: Values) -> Values:
        """Return scores, minus infinity for keys after the query."""
        scores = queries @ keys.swapaxes(-1, -2) * self.problem.head_dim**-0.5
        never = like(np.array(-np.inf), scores)
        return array_module(scores).where(here[:, None] >= there[None, :], scores, never)

    def _turned(self, x: Values, positions: Values, sign: int = 1) -> Values:
        """Return rows turned by their positions, or back: rotary embedding of both halves of each head."""
        if self.problem.family == "gpt":
            return x
        half = self.problem.head_dim // 2
        frequencies = ROTARY_BASE ** (-np.arange(half) / max(half, 1))
        angles = positions[:, None] * like(frequencies, positions)
        module = array_module(x)
        cos, sin = module.cos(angles), sign * module.sin(angles)
        first, second = x[..., :half], x[..., half : 2 * half]
        parts = (first * cos - second * sin, first * sin + second * cos, x[..., 2 * half :])
        return module.concatenate(parts, -1)

    def attention(self, qkv: Values) -> list[Values]:
        """Return heads of causal softmax attention, and the log-sum-exp of each row of scores."""
        module = array_module(qkv)
        _, _, values, scores = self._scores(qkv)
        greatest = module.amax(scores, -1)[..., None]
        weights = module.exp(scores - greatest)
        total = weights.sum(-1)[..., None]
        return [self._joined(weights / total @ values, qkv), self._joined(module.log(total) + greatest, qkv)]

    def attention_grad(self, dout: Values, qkv: Values, out: Values, log_sums: Values) -> Values:
        """Return the gradient of causal softmax attention by `qkv`, in its shape, from the log-sum-exp."""
        module = array_module(qkv)
        queries, keys, values, scores = self._scores(qkv)
        weights = module.exp(scores - self._heads(log_sums, 1))
        arriving = self._heads(dout, self.problem.head_dim)
        along = (arriving * self._heads(out, self.problem.head_dim)).sum(-1)[..., None]
        of_scores = weights * (arriving @ values.swapaxes(-1, -2) - along) * self.problem.head_dim**-0.5
        of_queries, of_keys = of_scores @ keys, of_scores.swapaxes(-1, -2) @ queries
        here = like(np.arange(queries.shape[-2]), queries)
        of_queries, of_keys = self._turned(of_queries, here, -1), self._turned(of_keys, here, -1)
        return self._merged(of_queries, of_keys, weights.swapaxes(-1, -2) @ arriving, qkv)

    def split_heads(self, qkv: Values, positions: Values) -> list[Values]:
        """Return queries, and keys beside values, both turned by their positions (rotary) for "llama"."""
        queries, keys, values = self._split(qkv)
        queries, keys = self._turned(queries, positions), self._turned(keys, positions)
        joined = array_module(qkv).concatenate((keys, values), -1)
        return [self._joined(queries, qkv), self._joined(joined, qkv)]

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
        """Return numerators, greatest scores and sums of weights with more keys, by online softmax."""
        if not there.shape[0]:
            return [so_far, greatest, weights]
        module, d = array_module(queries), self.problem.head_dim
        own_keys, values = self._keys(keys)
        scores = self._masked(self._heads(queries, d), own_keys, here, there)
        total, before = self._heads(weights, 1), self._heads(greatest, 1)
        before = module.where(total > 0, before, like(np.array(-np.inf), before))
        most = module.maximum(before, module.amax(scores, -1)[..., None])
        finite = module.where(most > -np.inf, most, like(np.array(0.0), most))
        shrunk, new = module.exp(before - finite), module.exp(scores - finite)
        out = self._heads(so_far, d) * shrunk + new @ values
        total = total * shrunk + new.sum(-1)[..., None]
        return [self._joined(part, queries) for part in (out, finite, total)]

    def finish_attention(self, so_far: Values, greatest: Values, weights: Values) -> list[Values]:
        """Return numerators over sums of weights, and the log-sum-exp of each row."""
        d = self.problem.head_dim
        out = self._heads(so_far, d) / self._heads(weights, 1)
        return [self._joined(out, so_far), greatest + array_module(weights).log(weights)]

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
        """Return what one part of the keys gives to the gradient by queries, and that by these keys and values."""
        module, d = array_module(queries), self.problem.head_dim
        own_keys, values = self._keys(keys)
        rows, arriving = self._heads(queries, d), self._heads(dout, d)
        weights = module.exp(self._masked(rows, own_keys, here, there) - self._heads(log_sums, 1))
        along = (arriving * self._heads(out, d)).sum(-1)[..., None]
        of_scores = weights * (arriving @ values.swapaxes(-1, -2) - along) * d**-0.5
        of_keys, of_values = of_scores.swapaxes(-1, -2) @ rows, weights.swapaxes(-1, -2) @ arriving
        return [self._joined(of_scores @ own_keys, queries), self._joined_keys(of_keys, of_values, keys)]

    def _before_turn(self, queries: Values, keys: Values, positions: Values) -> tuple[Values, Values]:
        return self._turned(queries, positions, -1), self._turned(keys, positions, -1)

    def softmax_sums(self, logits: Values, greatest: Values, targets: Values, vocabulary: Values) -> Values:
        """Return per token the sum of exp(logit - greatest) over the words given, and the logit of its target."""
        module = array_module(logits)
        is_target = targets[..., None] == vocabulary
        return module.stack(
            (module.exp(logits - greatest[..., None]).sum(-1), (logits * is_target).sum(-1)), -1
        )

    def loss(self, sums: Values, greatest: Values, so_far: Values) -> Values:
        """Return `so_far` plus the cross-entropy of these tokens."""
        return so_far + (array_module(sums).log(sums[..., 0]) + greatest - sums[..., 1]).sum()

    def loss_grad(
        self, logits: Values, greatest: Values, sums: Values, targets: Values, vocabulary: Values
    ) -> Values:
        """Return softmax less one-hot targets, for the words given."""
        weights = array_module(logits).exp(logits - greatest[..., None]) / sums[..., :1]
        return weights - as_numbers(targets[..., None] == vocabulary, logits)

    def activation(self, y: Values) -> Values:
        """Return GELU (tanh form), or for "llama" SiLU of the gate times the input."""
        if self.problem.family == "llama":
            gate, value = self._gate_and_input(y)
            return gate * self._sigmoid(gate) * value
        return 0.5 * y * (1 + array_module(y).tanh(_GELU * (y + 0.044715 * y**3)))

    def activation_grad(self, dout: Values, y: Values) -> Values:
        """Return the gradient by the activation's input; shape of the input."""
        if self.problem.family == "llama":
            gate, value = self._gate_and_input(y)
            sigmoid = self._sigmoid(gate)
            of_gate = dout * value * sigmoid * (1 + gate * (1 - sigmoid))
            return self._interleaved(of_gate, dout * gate * sigmoid)
        tanh = array_module(y).tanh(_GELU * (y + 0.044715 * y**3))
        return dout * (0.5 * (1 + tanh) + 0.5 * y * (1 - tanh * tanh) * _GELU * (1 + 3 * 0.044715 * y * y))

    @staticmethod
    def _sigmoid(x: Values) -> Values:
        return 0.5 * (1 + array_module(x).tanh(0.5 * x))


def _wide(x: Values) -> Values:
    """Return an array of halves in single precision, any other as it is."""
    if x.dtype.itemsize != 2:
        return x
    return x.float() if hasattr(x, "float") else x.astype(np.float32)
