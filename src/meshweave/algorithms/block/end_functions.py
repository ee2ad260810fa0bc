"""The functions of both ends of a model: embedding, and loss over parts of the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from meshweave.algorithms.block.functions import Values, array_module, as_numbers, like, small, widened
from meshweave.algorithms.block.problem import BlockProblem


class EndFunctions:
    """The functions of both ends."""

    def table(self) -> dict[str, Callable[..., Any]]:
        """Return the functions by name."""
        names = ("embed", "embed_grad", "row_max", "softmax_sums", "loss", "loss_grad")
        return {name: getattr(self, name) for name in names}

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


def _rows_of(tokens: Values, vocabulary: Values) -> tuple[Values, Values]:
    """Return the number of each token in part of a vocabulary, 0 for others, and whether it is in it."""
    first = vocabulary[0] if vocabulary.shape[0] else 0
    rows = tokens - first
    is_here = (rows >= 0) & (rows < vocabulary.shape[0])
    rows = rows * is_here
    return (rows.long() if hasattr(rows, "long") else rows.astype(int)), is_here


class RealEnds(EndFunctions):
    """Cross entropy as models compute it."""

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


class IntegerEnds(EndFunctions):
    """Small integers in place of the loss."""

    def softmax_sums(self, logits: Values, greatest: Values, targets: Values, vocabulary: Values) -> Values:
        """Return small integers in place of the two sums over part of the logits of each token."""
        is_target = targets[..., None] == vocabulary
        sums = small(logits + greatest[..., None]).sum(-1), (small(logits) * is_target).sum(-1)
        return array_module(logits).stack(sums, -1)

    def loss(self, sums: Values, greatest: Values, so_far: Values) -> Values:
        """Return small integers in place of the loss, added to that of earlier tokens."""
        return so_far + (small(sums[..., 0] + greatest) + sums[..., 1]).sum()

    def loss_grad(
        self, logits: Values, greatest: Values, sums: Values, targets: Values, vocabulary: Values
    ) -> Values:
        """Return small integers in place of the gradient by part of the logits."""
        of_row = greatest[..., None] + sums.sum(-1)[..., None]
        return small(logits + of_row - as_numbers(targets[..., None] == vocabulary, logits))


def end_functions(problem: BlockProblem) -> dict[str, Callable[..., Any]]:
    """Return the functions of embedding and loss by name.

    Of an exact problem they compute on small integers, of others on real numbers, those of 16 bits in single
    precision.
    """
    return IntegerEnds().table() if problem.exact else widened(RealEnds().table())
