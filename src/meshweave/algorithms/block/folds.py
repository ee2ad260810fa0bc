"""Folds over the nodes of a layer: equations, tensors, functions, and a dense run; for nodes of any type."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from meshweave.algorithms.block.end_functions import end_functions
from meshweave.algorithms.block.functions import Functions
from meshweave.algorithms.block.nodes import record_of
from meshweave.algorithms.block.place import LayerPlace, NodePlace, head_of, layers_of
from meshweave.algorithms.block.problem import BlockProblem
from meshweave.algorithms.block.roles import Roles
from meshweave.algorithms.block.writer import NEXT_SITE
from meshweave.algorithms.contract import Array
from meshweave.describe.model.nodes import LayerNode
from meshweave.ir.program import Tensor
from meshweave.ir.program.meanings import Meaning, Same, Sum


def _gradients(at: NodePlace[LayerNode]) -> Iterator[tuple[str, list[str]]]:
    """Yield the gradients that are whole after a node's backward part, with what they are sums of."""
    for edge in at.node.ins:
        whole, terms = at.layer.gradient(edge), at.layer.contributions(edge)
        if at.is_first_reader(edge) and terms != [whole]:
            yield whole, terms


def layer_tensors(layer: LayerPlace, roles: Roles) -> Iterator[Tensor]:
    """Yield the tensors that the equations of a layer name, gradients among them, in global shapes.

    A name may come more than once.
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
    """Yield the equations of the gradients of a layer's parameters and edges, last node first.

    The gradient of an edge is the sum of what the nodes that read it contribute.
    """
    for at in reversed(layer.nodes):
        yield from record_of(at.node).gradient_meanings(at, roles)
        for whole, terms in _gradients(at):
            yield Same(whole, terms[0]) if len(terms) == 1 else Sum(whole, tuple(terms))


@lru_cache(maxsize=64)
def functions_of(problem: BlockProblem) -> Functions:
    """Return the functions that programs of a problem call, by name; of small integers if it is `exact`.

    Raises:
        UnsupportedError: a node is attention with sinks or a norm over all heads together, whose functions are
            not written, or there is no record of its type.
    """
    layer = layers_of(problem)[0]
    table = {**end_functions(problem), NEXT_SITE: lambda *_: None}
    for at in layer.nodes:
        functions = record_of(at.node).functions(at.node, problem)
        table |= {at.fn(name): function for name, function in functions.items()}
    if problem.vocabulary:
        for at in head_of(problem).nodes:
            table = {**record_of(at.node).functions(at.node, problem), **table}
    return table


def compute(layer: LayerPlace, known: dict[str, Array], functions: Functions) -> None:
    """Compute every edge of a layer on whole arrays, without sharding, and store it in `known`, by tensor name.

    `known` must have the layer's input and parameters, `functions` what `functions_of` returns.

    Raises:
        UnsupportedError: a node has costs only, as experts and latent attention have.
    """
    for at in layer.nodes:
        record_of(at.node).compute(at, known, functions)


def compute_gradients(layer: LayerPlace, known: dict[str, Array], functions: Functions) -> None:
    """Compute every gradient of a layer on whole arrays and store it in `known`, by tensor name.

    `known` must have what `compute` has stored, and the gradient with respect to the layer's output; `functions`
    is what `functions_of` returns.
    """
    for at in reversed(layer.nodes):
        record_of(at.node).compute_gradient(at, known, functions)
        for whole, terms in _gradients(at):
            known[whole] = np.sum([known[name] for name in terms], 0)
