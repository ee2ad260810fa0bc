"""Folds over the nodes of a layer: equations, tensors, functions, and a dense run; for nodes of any type."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from meshweave.algorithms.block.functions import (
    Functions,
    Values,
    array_module,
    as_numbers,
    like,
    small,
    widened,
)
from meshweave.algorithms.block.nodes import record_of
from meshweave.algorithms.block.place import LayerPlace, NodePlace, head_of, layers_of
from meshweave.algorithms.block.problem import BlockProblem
from meshweave.algorithms.block.roles import Roles
from meshweave.algorithms.block.writer import NEXT_SITE
from meshweave.algorithms.contract import Array
from meshweave.base.errors import UnsupportedError
from meshweave.describe.model.nodes import LayerNode
from meshweave.ir.program import Tensor
from meshweave.ir.program.meanings import Meaning, Same, Sum

# --- functions of the ends --------------------------------------------------------------------------------

# The functions of both ends of a model: embedding, and loss over parts of the vocabulary.


class EndFunctions:
    """The functions of embedding and loss, on the part of the vocabulary that one rank has.

    Arrays are numpy's or torch's. `tokens` and `targets` are numbers of vocabulary entries, in any shape (...,);
    `vocabulary` (part,) has the consecutive numbers of the entries that the rank has. Arguments `greatest` (...,),
    a token's greatest logit, and `sums` (..., 2) are already reduced over the whole vocabulary.
    """

    def table(self) -> dict[str, Callable[..., Any]]:
        """Return the functions by name: "embed", "embed_grad", "row_max", "softmax_sums", "loss", "loss_grad"."""
        names = ("embed", "embed_grad", "row_max", "softmax_sums", "loss", "loss_grad")
        return {name: getattr(self, name) for name in names}

    def embed(self, tokens: Values, vocabulary: Values, table: Values) -> Values:
        """Return each token's row of an embedding table, (..., hidden); zeros if another rank has the row.

        `tokens` (...,) are token numbers; `vocabulary` (part,) has the consecutive token numbers of the rows of
        `table` (part, hidden).
        """
        rows, is_here = _rows_of(tokens, vocabulary)
        if not vocabulary.shape[0]:
            return like(np.zeros((*tokens.shape, table.shape[-1])), table)
        return table[rows] * is_here[..., None]

    def embed_grad(self, tokens: Values, vocabulary: Values, dx: Values, so_far: Values) -> Values:
        """Return `so_far`, the gradient of a part of an embedding table, plus each token's `dx` in its row.

        `tokens` (...,) are token numbers, `dx` is (..., hidden); `vocabulary` (part,) has the consecutive token
        numbers of the rows of `so_far` (part, hidden). Tokens of other parts add nothing.
        """
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
        """Return each token's greatest logit, (...,), among `logits` (..., part of the vocabulary).

        It is minus infinity if the part is empty.
        """
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
    """Cross entropy as models compute it.

    `targets` (...,) are numbers of vocabulary entries, `vocabulary` (part,) the consecutive numbers of the entries
    that the rank has, and `greatest` (...,) each token's greatest logit over the whole vocabulary.
    """

    def softmax_sums(self, logits: Values, greatest: Values, targets: Values, vocabulary: Values) -> Values:
        """Return (..., 2): per token the sum of exp(logit - greatest) over this part, and its target's logit.

        The target's logit is 0 if another rank has it, so that the results of all ranks add up. `logits` is (...,
        part), with the entries of `vocabulary` along its last dim.
        """
        module = array_module(logits)
        is_target = targets[..., None] == vocabulary
        return module.stack(
            (module.exp(logits - greatest[..., None]).sum(-1), (logits * is_target).sum(-1)), -1
        )

    def loss(self, sums: Values, greatest: Values, so_far: Values) -> Values:
        """Return `so_far` (1,) plus the cross entropy, in nats, summed over these tokens.

        `sums` (..., 2) are the results of `softmax_sums` added up over all ranks.
        """
        return so_far + (array_module(sums).log(sums[..., 0]) + greatest - sums[..., 1]).sum()

    def loss_grad(
        self, logits: Values, greatest: Values, sums: Values, targets: Values, vocabulary: Values
    ) -> Values:
        """Return the gradient of the summed loss with respect to `logits` (..., part): softmax - one-hot targets.

        `sums` (..., 2) are the results of `softmax_sums` added up over all ranks.
        """
        weights = array_module(logits).exp(logits - greatest[..., None]) / sums[..., :1]
        return weights - as_numbers(targets[..., None] == vocabulary, logits)


class IntegerEnds(EndFunctions):
    """Functions that give small integers in place of the loss, so that results compare with `==`.

    Arguments and shapes are those of `RealEnds`. Their "gradients" are no derivatives.
    """

    def softmax_sums(self, logits: Values, greatest: Values, targets: Values, vocabulary: Values) -> Values:
        """Return two sums of small integers per token, (..., 2), in place of those of `RealEnds.softmax_sums`.

        The first is over this part of the vocabulary, of numbers made from logit and `greatest`; the second is 0
        if another rank has the target. Arguments have the shapes of `RealEnds.softmax_sums`.
        """
        is_target = targets[..., None] == vocabulary
        sums = small(logits + greatest[..., None]).sum(-1), (small(logits) * is_target).sum(-1)
        return array_module(logits).stack(sums, -1)

    def loss(self, sums: Values, greatest: Values, so_far: Values) -> Values:
        """Return `so_far` (1,) plus a sum of small integers in place of the loss of these tokens."""
        return so_far + (small(sums[..., 0] + greatest) + sums[..., 1]).sum()

    def loss_grad(
        self, logits: Values, greatest: Values, sums: Values, targets: Values, vocabulary: Values
    ) -> Values:
        """Return small integers in place of the gradient of the loss, in the shape of `logits` (..., part)."""
        of_row = greatest[..., None] + sums.sum(-1)[..., None]
        return small(logits + of_row - as_numbers(targets[..., None] == vocabulary, logits))


def end_functions(problem: BlockProblem) -> dict[str, Callable[..., Any]]:
    """Return the functions of embedding and loss by name.

    For an `exact` problem they return small integers; for others they compute the real functions, and convert
    16-bit inputs to single precision.
    """
    return IntegerEnds().table() if problem.exact else widened(RealEnds().table())


# --- folds ------------------------------------------------------------------------------------------------


def _gradients(at: NodePlace[LayerNode]) -> Iterator[tuple[str, list[str]]]:
    """Yield the gradients that are whole after a node's backward part, with what they are sums of."""
    for edge in at.node.ins:
        whole, terms = at.layer.gradient(edge), at.layer.contributions(edge)
        if at.is_first_reader(edge) and terms != [whole]:
            yield whole, terms


def layer_tensors(layer: LayerPlace, roles: Roles) -> Iterator[Tensor]:
    """Yield the tensors that the equations of a layer name, gradients among them, in global shapes.

    A tensor may be yielded more than once.
    """
    dtype, tokens = layer.problem.dtype, layer.tokens
    for parameter in layer.parameters():
        yield parameter
        yield Tensor(f"D{parameter.name}", parameter.shape, dtype)
    for edge, features in layer.graph.features.items():
        names = layer.edge(edge), layer.gradient(edge), *layer.contributions(edge)
        for name in dict.fromkeys(names):
            yield Tensor(name, (*tokens, features.size), dtype)
    for at in layer.nodes:
        yield from record_of(at.node).tensors(at, roles)


def layer_meanings(layer: LayerPlace, roles: Roles) -> Iterator[Meaning]:
    """Yield the equations of the forward part of a layer."""
    for at in layer.nodes:
        yield from record_of(at.node).meanings(at, roles)


def layer_gradient_meanings(layer: LayerPlace, roles: Roles) -> Iterator[Meaning]:
    """Yield the equations of the gradients of a layer's parameters and edges (activations), last node first.

    The gradient of an edge is the sum of the contributions of all nodes that read it.
    """
    for at in reversed(layer.nodes):
        yield from record_of(at.node).gradient_meanings(at, roles)
        for whole, terms in _gradients(at):
            yield Same(whole, terms[0]) if len(terms) == 1 else Sum(whole, tuple(terms))


@lru_cache(maxsize=64)
def functions_of(problem: BlockProblem) -> Functions:
    """Return the functions that programs of a problem call, by name.

    They return small integers if the problem is `exact`.

    Raises:
        UnsupportedError: a node is attention with sinks or a norm over all heads together, whose functions are
            not written; there is no `NodeRecord` of its type; or two types of nodes, or one and the ends of a
            model, have different functions of one name.
    """
    layer = layers_of(problem)[0]
    table = {**end_functions(problem), NEXT_SITE: lambda *_: None}
    owners: dict[str, type[LayerNode] | None] = dict.fromkeys(table)
    for at in layer.nodes:
        for name, function in record_of(at.node).functions(at.node, problem).items():
            if owners.setdefault(at.fn(name), type(at.node)) is not type(at.node):
                raise UnsupportedError(
                    f"{type(at.node).__name__}, which makes {at.node.out}, calls a function '{at.fn(name)}', as "
                    "another node or an end of the model does; give it another name in the record"
                )
            table[at.fn(name)] = function
    if problem.vocabulary:
        for at in head_of(problem).nodes:
            table = {**record_of(at.node).functions(at.node, problem), **table}
    return table


def compute(layer: LayerPlace, known: dict[str, Array], functions: Functions) -> None:
    """Compute every activation of a layer on whole arrays, in one process, and add them to `known`.

    Args:
        known: whole arrays by tensor name; the layer's input and parameters must be among them.
        functions: what `functions_of` returns.

    Raises:
        UnsupportedError: a node has costs only, as experts and latent attention have.
    """
    for at in layer.nodes:
        record_of(at.node).compute(at, known, functions)


def compute_gradients(layer: LayerPlace, known: dict[str, Array], functions: Functions) -> None:
    """Compute every gradient of a layer on whole arrays, in one process, and add them to `known`.

    Args:
        known: whole arrays by tensor name; what `compute` adds, and the gradient with respect to the layer's
            output, must be among them.
        functions: what `functions_of` returns.
    """
    for at in reversed(layer.nodes):
        record_of(at.node).compute_gradient(at, known, functions)
        for whole, terms in _gradients(at):
            known[whole] = np.sum([known[name] for name in terms], 0)
