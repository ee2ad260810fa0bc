"""The functions that blocks call: norms, attention, activations and their gradients, on numpy or torch arrays.

Models compute `real_functions`. Those of `integer_functions` depend on the same elements, and have the same sums,
but are made of small integers: results are the same in any order of sums, in every dtype. Their "gradients" are no
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
"""A numpy array, a torch tensor or a jax array."""


def array_module(x: Any) -> Any:
    """Return the module whose functions take `x`: numpy, torch or jax.numpy."""
    package = type(x).__module__.partition(".")[0]
    return sys.modules["jax.numpy" if package in ("jax", "jaxlib") else package]


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
            "add_bias": self.add_bias,
            "bias_grad": self.bias_grad,
            "attention": self.attention,
            "attention_grad": self.attention_grad,
            "split_heads": self.split_heads,
            "attend": self.attend,
            "finish_attention": self.finish_attention,
            "attend_grad": self.attend_grad,
            "merge_heads": self.merge_heads,
            "embed": self.embed,
            "embed_grad": self.embed_grad,
            "row_max": self.row_max,
            "softmax_sums": self.softmax_sums,
            "loss": self.loss,
            "loss_grad": self.loss_grad,
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

    # --- biases -------------------------------------------------------------------------------------------------

    @abstractmethod
    def add_bias(self, x: Values, bias: Values) -> Values:
        """Return `x` (batch, sequence, features) plus `bias` (features)."""

    @abstractmethod
    def bias_grad(self, dy: Values, so_far: Values) -> Values:
        """Return `so_far` (features) plus the sums over rows of `dy` (batch, sequence, features)."""

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

    # --- embedding and loss -------------------------------------------------------------------------------------

    def embed(self, tokens: Values, vocabulary: Values, table: Values) -> Values:
        """Return the rows of part of a table for tokens, zeros for tokens of other parts.

        `vocabulary` has the consecutive tokens that the rows are of.
        """
        rows, is_here = _rows_of(tokens, vocabulary)
        if not vocabulary.shape[0]:
            return like(np.zeros((*tokens.shape, table.shape[-1])), table)
        return table[rows] * is_here[..., None]

    def embed_grad(self, tokens: Values, vocabulary: Values, dx: Values, so_far: Values) -> Values:
        """Return the gradient by part of a table, added to what earlier tokens gave."""
        rows, is_here = _rows_of(tokens, vocabulary)
        if not vocabulary.shape[0]:
            return so_far
        terms = (dx * is_here[..., None]).reshape(math.prod(tokens.shape), dx.shape[-1])
        rows = rows.reshape(math.prod(tokens.shape))
        if hasattr(so_far, "index_add"):
            return so_far.index_add(0, rows, terms)
        if hasattr(so_far, "at"):
            return so_far.at[rows].add(terms)
        total = so_far.copy()
        np.add.at(total, rows, terms)
        return total

    def row_max(self, logits: Values) -> Values:
        """Return the greatest of part of the logits of each token; minus infinity of none."""
        if not logits.shape[-1]:
            return like(np.full(logits.shape[:-1], -np.inf), logits)
        return array_module(logits).amax(logits, -1)

    @abstractmethod
    def softmax_sums(self, logits: Values, greatest: Values, targets: Values, vocabulary: Values) -> Values:
        """Return two sums over part of the logits of each token: of exponentials, and of the target's logit."""

    @abstractmethod
    def loss(self, sums: Values, greatest: Values, so_far: Values) -> Values:
        """Return the loss of tokens, added to that of earlier ones."""

    @abstractmethod
    def loss_grad(
        self, logits: Values, greatest: Values, sums: Values, targets: Values, vocabulary: Values
    ) -> Values:
        """Return the gradient by part of the logits."""

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


def _rows_of(tokens: Values, vocabulary: Values) -> tuple[Values, Values]:
    """Return the number of each token in part of a vocabulary, 0 for others, and whether it is in it."""
    first = vocabulary[0] if vocabulary.shape[0] else 0
    rows = tokens - first
    is_here = (rows >= 0) & (rows < vocabulary.shape[0])
    rows = rows * is_here
    return (rows.long() if hasattr(rows, "long") else rows.astype(int)), is_here


def over_rows(x: Values) -> Values:
    """Return the sum over all dims but the last."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).sum(0)


def like(values: Any, x: Values) -> Values:
    """Return a numpy array as an array of the kind, dtype and device of `x`."""
    if hasattr(x, "new_tensor"):
        return x.new_tensor(values)
    return array_module(x).asarray(values, dtype=x.dtype)


def as_numbers(truth: Values, x: Values) -> Values:
    """Return truth values as 0 and 1 in the dtype of `x`."""
    return truth * like(np.array(1), x)
