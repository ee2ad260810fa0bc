"""The functions that blocks call: norms, attention, activations and their gradients, on numpy or torch arrays.

`RealFunctions` is what models compute. `IntegerFunctions` depends on the same elements, and has the same sums, but
is made of small integers: results are the same in any order of sums, in every dtype. Its "gradients" are no
derivatives. A program that gives the right integers has moved the right elements to the right places.

Shapes: a residual or its gradient (batch, sequence, features); parameters of a norm (rows, features); statistics
(batch, sequence, rows); inner tensors (batch, sequence, units x columns per unit), of any number of whole units.
Batch and sequence may be one dim.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from meshweave.algorithms.block.problem import BlockProblem

Values = Any
"""A numpy array or a torch tensor."""

EPSILON = 1e-5
"""What a norm adds to a variance before its root."""
ROTARY_BASE = 10_000.0
"""The base of rotary frequencies (Su et al., RoFormer, section 3.2.2)."""


def array_module(x: Any) -> Any:
    """Return the module whose functions take `x`: numpy or torch."""
    return sys.modules[type(x).__module__.partition(".")[0]]


class BlockFunctions(ABC):
    """The functions of a problem. The names in `table` are those of `halves.Half.meanings`."""

    def __init__(self, problem: BlockProblem) -> None:
        self.problem = problem

    def table(self) -> Mapping[str, Callable[..., Any]]:
        """Return the functions by name."""
        return {
            "statistics": self.statistics,
            "normalize": self.normalize,
            "norm": self.norm,
            "norm_grad_sums": self.norm_grad_sums,
            "normalize_grad": self.normalize_grad,
            "normalize_weight_grad": self.normalize_weight_grad,
            "norm_grad": self.norm_grad,
            "norm_weight_grad": self.norm_weight_grad,
            "attention": self.attention,
            "attention_grad": self.attention_grad,
            "split_heads": self.split_heads,
            "attend": self.attend,
            "finish_attention": self.finish_attention,
            "attend_grad": self.attend_grad,
            "merge_heads": self.merge_heads,
            "activation": self.activation,
            "activation_grad": self.activation_grad,
        }

    # --- norms --------------------------------------------------------------------------------------------------

    @abstractmethod
    def statistics(self, x: Values) -> Values:
        """Return sums over the features given, which add up over all features."""

    @abstractmethod
    def normalize(self, x: Values, statistics: Values, gain: Values) -> Values:
        """Return the normalised features, by statistics of whole rows."""

    @abstractmethod
    def norm_grad_sums(self, dy: Values, x: Values, statistics: Values, gain: Values) -> Values:
        """Return the sums over features that the gradient of a norm needs, over the features given."""

    @abstractmethod
    def normalize_grad(self, dy: Values, x: Values, statistics: Values, sums: Values, gain: Values) -> Values:
        """Return the gradient by `x`, by statistics and sums of whole rows."""

    @abstractmethod
    def normalize_weight_grad(self, dy: Values, x: Values, statistics: Values, so_far: Values) -> Values:
        """Return the gradient by the parameters, added to what earlier rows gave."""

    def norm(self, x: Values, gain: Values) -> Values:
        """Return the normalised rows."""
        return self.normalize(x, self.statistics(x), gain)

    def norm_grad(self, dy: Values, x: Values, gain: Values) -> Values:
        """Return the gradient by whole rows `x`."""
        statistics = self.statistics(x)
        return self.normalize_grad(dy, x, statistics, self.norm_grad_sums(dy, x, statistics, gain), gain)

    def norm_weight_grad(self, dy: Values, x: Values, so_far: Values) -> Values:
        """Return the gradient by the parameters, of whole rows."""
        return self.normalize_weight_grad(dy, x, self.statistics(x), so_far)

    # --- attention ----------------------------------------------------------------------------------------------

    def _units(self, x: Values, width: int) -> Values:
        """Return (batch, sequence, units, width); tokens in one dim are whole sequences."""
        *tokens, columns = x.shape
        if len(tokens) == 1:
            tokens = [tokens[0] // self.problem.sequence, self.problem.sequence]
        return x.reshape(*tokens, columns // width, width)

    def _heads(self, x: Values, width: int) -> Values:
        """Return (batch, groups, heads of a group, sequence, width)."""
        r = self.problem.queries_per_group
        units = self._units(x, r * width)
        return array_module(x).moveaxis(units.reshape(*units.shape[:-1], r, width), 1, 3)

    def _split(self, qkv: Values) -> tuple[Values, Values, Values]:
        """Return queries (batch, groups, heads, sequence, width), keys and values (batch, groups, 1, ...)."""
        d, r = self.problem.head_dim, self.problem.queries_per_group
        groups = self._units(qkv, self.problem.group_width).swapaxes(1, 2)
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

    @abstractmethod
    def attention(self, qkv: Values) -> list[Values]:
        """Return the heads of some groups, and what their gradient needs of each row of scores."""

    @abstractmethod
    def attention_grad(self, dout: Values, qkv: Values, out: Values, log_sums: Values) -> Values:
        """Return the gradient by queries, keys and values of some groups."""

    # --- ring attention -----------------------------------------------------------------------------------------

    def _keys(self, keys: Values) -> tuple[Values, Values]:
        """Return keys and values (batch, groups, 1, positions, width) of what goes round."""
        d = self.problem.head_dim
        units = self._units(keys, 2 * d).swapaxes(1, 2)[:, :, None]
        return units[..., :d], units[..., d:]

    def _joined_keys(self, keys: Values, values: Values, like: Values) -> Values:
        """Return what `_keys` splits, summed over the heads of a group."""
        joined = array_module(keys).concatenate((keys.sum(2), values.sum(2)), -1)
        return joined.swapaxes(1, 2).reshape(like.shape)

    @abstractmethod
    def split_heads(self, qkv: Values, positions: Values) -> list[Values]:
        """Return queries, and keys with values, of tokens at some positions."""

    @abstractmethod
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
        """Return numerators, greatest scores and sums of weights with more keys; all are 0 before the first."""

    @abstractmethod
    def finish_attention(self, so_far: Values, greatest: Values, weights: Values) -> list[Values]:
        """Return what `attention` does, from what all keys gave."""

    @abstractmethod
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
        """Return what some keys add to the gradient of queries, and some queries to that of keys and values."""

    def merge_heads(self, of_queries: Values, of_keys: Values, positions: Values) -> Values:
        """Return the gradient by what `split_heads` takes."""
        d, r = self.problem.head_dim, self.problem.queries_per_group
        queries, (keys, values) = self._heads(of_queries, d), self._keys(of_keys)
        like = array_module(of_queries).concatenate((of_queries, of_keys), -1)
        assert like.shape[-1] == queries.shape[1] * (r + 2) * d
        return self._merged(*self._before_turn(queries, keys, positions), values, like)

    @abstractmethod
    def _before_turn(self, queries: Values, keys: Values, positions: Values) -> tuple[Values, Values]:
        """Return gradients by queries and keys before they were turned by their positions."""

    # --- activations --------------------------------------------------------------------------------------------

    @abstractmethod
    def activation(self, y: Values) -> Values:
        """Return the activation of each feature, which has one column or a gate and an input."""

    @abstractmethod
    def activation_grad(self, dout: Values, y: Values) -> Values:
        """Return the gradient by the columns."""

    def _gate_and_input(self, y: Values) -> tuple[Values, Values]:
        return y[..., 0::2], y[..., 1::2]

    @staticmethod
    def _interleaved(gate: Values, value: Values) -> Values:
        *leading, columns = gate.shape
        return array_module(gate).stack((gate, value), -1).reshape(*leading, 2 * columns)


class RealFunctions(BlockFunctions):
    """Layer norm or root-mean-square norm, causal softmax attention, GELU (tanh form) or SwiGLU."""

    def _centred(self, x: Values, statistics: Values) -> tuple[Values, Values]:
        """Return the features before gain and bias, and the reciprocal of their deviation."""
        means = statistics / self.problem.hidden
        if self.problem.family == "llama":
            scale = (means + EPSILON) ** -0.5
            return x * scale, scale
        mean = means[..., :1]
        scale = (means[..., 1:] - mean * mean + EPSILON) ** -0.5
        return (x - mean) * scale, scale

    def statistics(self, x: Values) -> Values:
        squares = (x * x).sum(-1)[..., None]
        if self.problem.family == "llama":
            return squares
        return array_module(x).concatenate((x.sum(-1)[..., None], squares), -1)

    def normalize(self, x: Values, statistics: Values, gain: Values) -> Values:
        scaled = self._centred(x, statistics)[0] * gain[0]
        return scaled if self.problem.family == "llama" else scaled + gain[1]

    def norm_grad_sums(self, dy: Values, x: Values, statistics: Values, gain: Values) -> Values:
        arriving = dy * gain[0]
        along = (arriving * self._centred(x, statistics)[0]).sum(-1)[..., None]
        if self.problem.family == "llama":
            return along
        return array_module(x).concatenate((arriving.sum(-1)[..., None], along), -1)

    def normalize_grad(self, dy: Values, x: Values, statistics: Values, sums: Values, gain: Values) -> Values:
        centred, scale = self._centred(x, statistics)
        means = sums / self.problem.hidden
        change = dy * gain[0] - centred * means[..., -1:]
        return scale * (change if self.problem.family == "llama" else change - means[..., :1])

    def normalize_weight_grad(self, dy: Values, x: Values, statistics: Values, so_far: Values) -> Values:
        of_gain = _over_rows(dy * self._centred(x, statistics)[0])
        rows = (of_gain,) if self.problem.family == "llama" else (of_gain, _over_rows(dy))
        return so_far + array_module(x).stack(rows)

    def _scores(self, qkv: Values) -> tuple[Values, Values, Values, Values]:
        """Return queries and keys as they are multiplied, values, and masked scores."""
        queries, keys, values = self._split(qkv)
        here = _like(np.arange(queries.shape[-2]), queries)
        queries, keys = self._turned(queries, here), self._turned(keys, here)
        return queries, keys, values, self._masked(queries, keys, here, here)

    def _masked(self, queries: Values, keys: Values, here: Values, there: Values) -> Values:
        """Return scores, minus infinity for keys after the query."""
        scores = queries @ keys.swapaxes(-1, -2) * self.problem.head_dim**-0.5
        never = _like(np.array(-np.inf), scores)
        return array_module(scores).where(here[:, None] >= there[None, :], scores, never)

    def _turned(self, x: Values, positions: Values, sign: int = 1) -> Values:
        """Return rows turned by their positions, or back: rotary embedding of both halves of each head."""
        if self.problem.family == "gpt":
            return x
        half = self.problem.head_dim // 2
        frequencies = ROTARY_BASE ** (-np.arange(half) / max(half, 1))
        angles = positions[:, None] * _like(frequencies, positions)
        module = array_module(x)
        cos, sin = module.cos(angles), sign * module.sin(angles)
        first, second = x[..., :half], x[..., half : 2 * half]
        parts = (first * cos - second * sin, first * sin + second * cos, x[..., 2 * half :])
        return module.concatenate(parts, -1)

    def attention(self, qkv: Values) -> list[Values]:
        module = array_module(qkv)
        _, _, values, scores = self._scores(qkv)
        greatest = module.amax(scores, -1)[..., None]
        weights = module.exp(scores - greatest)
        total = weights.sum(-1)[..., None]
        return [self._joined(weights / total @ values, qkv), self._joined(module.log(total) + greatest, qkv)]

    def attention_grad(self, dout: Values, qkv: Values, out: Values, log_sums: Values) -> Values:
        module = array_module(qkv)
        queries, keys, values, scores = self._scores(qkv)
        weights = module.exp(scores - self._heads(log_sums, 1))
        arriving = self._heads(dout, self.problem.head_dim)
        along = (arriving * self._heads(out, self.problem.head_dim)).sum(-1)[..., None]
        of_scores = weights * (arriving @ values.swapaxes(-1, -2) - along) * self.problem.head_dim**-0.5
        of_queries, of_keys = of_scores @ keys, of_scores.swapaxes(-1, -2) @ queries
        here = _like(np.arange(queries.shape[-2]), queries)
        of_queries, of_keys = self._turned(of_queries, here, -1), self._turned(of_keys, here, -1)
        return self._merged(of_queries, of_keys, weights.swapaxes(-1, -2) @ arriving, qkv)

    def split_heads(self, qkv: Values, positions: Values) -> list[Values]:
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
        if not there.shape[0]:
            return [so_far, greatest, weights]
        module, d = array_module(queries), self.problem.head_dim
        own_keys, values = self._keys(keys)
        scores = self._masked(self._heads(queries, d), own_keys, here, there)
        total, before = self._heads(weights, 1), self._heads(greatest, 1)
        before = module.where(total > 0, before, _like(np.array(-np.inf), before))
        most = module.maximum(before, module.amax(scores, -1)[..., None])
        finite = module.where(most > -np.inf, most, _like(np.array(0.0), most))
        shrunk, new = module.exp(before - finite), module.exp(scores - finite)
        out = self._heads(so_far, d) * shrunk + new @ values
        total = total * shrunk + new.sum(-1)[..., None]
        return [self._joined(part, queries) for part in (out, finite, total)]

    def finish_attention(self, so_far: Values, greatest: Values, weights: Values) -> list[Values]:
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

    def activation(self, y: Values) -> Values:
        if self.problem.family == "llama":
            gate, value = self._gate_and_input(y)
            return gate * self._sigmoid(gate) * value
        return 0.5 * y * (1 + array_module(y).tanh(_GELU * (y + 0.044715 * y**3)))

    def activation_grad(self, dout: Values, y: Values) -> Values:
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


_GELU = float(np.sqrt(2 / np.pi))


class IntegerFunctions(BlockFunctions):
    """Functions of integers that never exceed 3, for comparisons with `==`."""

    def statistics(self, x: Values) -> Values:
        small = _small(x)
        rows = (small, small * small)[: self.problem.norm_rows]
        return array_module(x).stack([row.sum(-1) for row in rows], -1)

    def normalize(self, x: Values, statistics: Values, gain: Values) -> Values:
        scaled = _small(x + statistics.sum(-1)[..., None]) * gain[0]
        return _small(scaled if self.problem.family == "llama" else scaled + gain[1])

    def norm_grad_sums(self, dy: Values, x: Values, statistics: Values, gain: Values) -> Values:
        sums = _small(dy * gain[0] + x), _small(dy - x + statistics[..., :1])
        return array_module(x).stack([row.sum(-1) for row in sums[: self.problem.norm_rows]], -1)

    def normalize_grad(self, dy: Values, x: Values, statistics: Values, sums: Values, gain: Values) -> Values:
        of_row = statistics.sum(-1)[..., None] + sums.sum(-1)[..., None]
        return _small(dy * gain[0] + x * of_row)

    def normalize_weight_grad(self, dy: Values, x: Values, statistics: Values, so_far: Values) -> Values:
        of_gain = _over_rows(_small(dy * _small(x + statistics[..., :1])))
        rows = (of_gain, _over_rows(_small(dy)))[: self.problem.norm_rows]
        return so_far + array_module(x).stack(rows)

    def _scores(self, qkv: Values) -> tuple[Values, Values, Values, Values]:
        queries, keys, values = self._split(_small(qkv))
        scores = _small(queries @ keys.swapaxes(-1, -2))
        return queries, keys, values, scores * _like(np.tri(scores.shape[-2]), scores)

    def attention(self, qkv: Values) -> list[Values]:
        _, _, values, scores = self._scores(qkv)
        return [self._joined(_small(scores @ values), qkv), self._joined(scores.sum(-1)[..., None], qkv)]

    def attention_grad(self, dout: Values, qkv: Values, out: Values, log_sums: Values) -> Values:
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
        queries, keys, values = self._split(_small(qkv))
        joined = array_module(qkv).concatenate((keys, values), -1)
        return [self._joined(queries, qkv), self._joined(joined, qkv)]

    def _seen(self, queries: Values, keys: Values, here: Values, there: Values) -> tuple[Values, Values]:
        """Return scores of keys up to each query, and which those are."""
        mask = _as((here[:, None] >= there[None, :]), queries)
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
        own_keys, values = self._keys(keys)
        scores, mask = self._seen(self._heads(queries, self.problem.head_dim), own_keys, here, there)
        count = mask.sum(-1)[None, :, None]
        more = self._joined(scores @ values, queries), self._joined(scores.sum(-1)[..., None], queries)
        return [so_far + more[0], greatest + more[1], weights + count]

    def finish_attention(self, so_far: Values, greatest: Values, weights: Values) -> list[Values]:
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
        return _small(super().merge_heads(of_queries, of_keys, positions))

    def _before_turn(self, queries: Values, keys: Values, positions: Values) -> tuple[Values, Values]:
        return queries, keys

    def activation(self, y: Values) -> Values:
        if self.problem.family == "llama":
            gate, value = self._gate_and_input(_small(y))
            return _small(gate * value)
        return _small(_small(y) ** 2)

    def activation_grad(self, dout: Values, y: Values) -> Values:
        if self.problem.family == "llama":
            gate, value = self._gate_and_input(_small(y))
            return _small(self._interleaved(_small(dout) * value, _small(dout) * gate))
        return _small(2 * _small(dout) * _small(y))


def _over_rows(x: Values) -> Values:
    """Return the sum over all dims but the last."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).sum(0)


def _small(x: Values) -> Values:
    """Return integers in -3 .. 3 that are equal to `x` modulo 7."""
    return (x + 3) % 7 - 3


def _like(values: Any, x: Values) -> Values:
    """Return a numpy array as an array of the kind, dtype and device of `x`."""
    if array_module(x) is np:
        return np.asarray(values, dtype=x.dtype)
    return x.new_tensor(values)


def _as(truth: Values, x: Values) -> Values:
    """Return truth values as 0 and 1 in the dtype of `x`."""
    return truth * _like(np.array(1), x)


def functions_of(problem: BlockProblem) -> BlockFunctions:
    """Return the functions of a problem: real ones, or those of integers."""
    return IntegerFunctions(problem) if problem.exact else RealFunctions(problem)
