"""What a step computes: a dense step of the whole model on integers, and how weights lie in a program's buckets.

The functions are those of integers (`block.functions`), so that results are the same in any order of sums. Tokens
and targets of a step are fixed by its sizes. The optimizer subtracts the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from meshweave.algorithms.block import BlockProblem
from meshweave.algorithms.block.end_equations import IDS_IN, IDS_OUT, TARGETS, TOKENS_IN
from meshweave.algorithms.block.folds import functions_of
from meshweave.algorithms.block.place import head_of, layers_of
from meshweave.algorithms.block.reference import reference
from meshweave.algorithms.contract import Array, Arrays
from meshweave.algorithms.step.block_program import write_step
from meshweave.algorithms.step.functions import StepFunctions, local_bucket
from meshweave.algorithms.step.problem import StepProblem
from meshweave.algorithms.step.result import Step
from meshweave.base.errors import UnsupportedError
from meshweave.execute.calls import of_rank

NEW = "NEW_"
"""What the names of updated weights begin with."""
_MOST_NUMBERED = 1 << 24
"""Numbers of elements below this are exact in the single precision of buckets."""


def whole_block(problem: StepProblem) -> BlockProblem:
    """Return the whole model with the whole batch as one block on one rank, whose functions compute integers."""
    model = problem.model
    block = BlockProblem.of(model, problem.workload, (1, 1), layers=model.num_layers)
    return replace(block, vocabulary=model.vocab_size or 0, exact=True)


def _shapes(problem: StepProblem) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of a model, by name."""
    block = whole_block(problem)
    shapes: dict[str, tuple[int, ...]] = {}
    if block.vocabulary:
        shapes["E"] = block.vocabulary, block.hidden
    for layer in (*layers_of(block), *([head_of(block)] if block.vocabulary else [])):
        shapes |= {tensor.name: tensor.shape for tensor in layer.parameters()}
    return shapes


def random_weights(problem: StepProblem, seed: int) -> dict[str, Array]:
    """Return random integers from -4 to 4 for the weights of a model, by name, in the problem's dtype."""
    draw, shapes = np.random.default_rng(seed), _shapes(problem)
    return {name: draw.integers(-4, 5, shape).astype(problem.dtype) for name, shape in shapes.items()}


def batch_of(problem: StepProblem) -> tuple[Array, Array]:
    """Return the random tokens and targets of a step, each (batch, sequence); always the same.

    Token numbers are in the problem's dtype, as calls take them.
    """
    draw = np.random.default_rng(problem.batch)
    sizes = 2, problem.batch, problem.sequence
    tokens, targets = draw.integers(0, problem.model.vocab_size or 1, sizes).astype(problem.dtype)
    return tokens, targets


def dense_step(problem: StepProblem, weights: Arrays) -> dict[str, Array]:
    """Return for each weight W its gradient over the whole batch as "DW", and "NEW_W": W less that gradient.

    `weights` are those of the model, unsharded, by the names that they have in `whole_block`. Tokens and targets
    are those of `batch_of`.
    """
    tokens, targets = batch_of(problem)
    ids = np.arange(problem.model.vocab_size or 0).astype(problem.dtype)
    given = {TOKENS_IN: tokens, TARGETS: targets, IDS_IN: ids, IDS_OUT: ids}
    out = reference(whole_block(problem), {**weights, **given})
    gradients = {f"D{name}": out[f"D{name}"] for name in weights}
    return gradients | {f"{NEW}{name}": weights[name] - out[f"D{name}"] for name in weights}


class LaidWeights:
    """Converts weights between a model and its step's program, and has the functions that the program calls.

    Raises:
        UnsupportedError: no program is written that can be executed (`write_step`).
    """

    def __init__(self, step: Step) -> None:
        self.problem, self._written = step.problem, write_step(step.stages)
        self.program = self._written.program.expanded

    def buckets(self, weights: Arrays) -> dict[str, Array]:
        """Return the program's input tensors by name, filled from `weights`, the model's unsharded ones by name.

        Each is a vector: the buckets of all ranks of a stage for the stage's layers of one unit. "W0_layer" is
        that of the layers of stage 0.
        """
        out = {}
        for name, shape, shards in self._shards(weights, "w"):
            whole = np.zeros(shape, self.problem.dtype)
            for part, values in shards:
                whole[part] = values
            out[f"W{name}"] = whole
        return out

    def whole(self, outputs: Arrays) -> dict[str, Array]:
        """Return for each weight W of the model its gradient as "DW" and its updated value as "NEW_W".

        `outputs` are the program's output tensors by name. To know where each element lies in them, consecutive
        numbers are laid out in the same buckets as if they were weights.

        Raises:
            UnsupportedError: the model has too many weights to be numbered.
        """
        shapes = _shapes(self.problem)
        starts = np.cumsum([0, *map(prod, shapes.values())])
        total = int(starts[-1])
        if total >= _MOST_NUMBERED:
            raise UnsupportedError(f"a model of {total:,} weights is not put together from its buckets")
        spans = dict(zip(shapes, pairwise(starts), strict=True))
        numbers = {name: np.arange(*spans[name]).reshape(shapes[name]) + 1 for name in shapes}
        known: dict[str, Array] = {}
        for buffer, before in (("dw", "D"), ("new", NEW)):
            flat = np.full(total + 1, np.nan)
            for name, _, shards in self._shards(numbers, buffer):
                for part, at in shards:
                    flat[at.astype(np.int64)] = outputs[f"{buffer.upper()}{name}"][part]
            known |= {f"{before}{name}": flat[numbers[name]] for name in shapes}
        return known

    def _shards(
        self, weights: Arrays, prefix: str
    ) -> Iterator[tuple[str, tuple[int, ...], Iterator[tuple[Array, Array]]]]:
        """Yield for each bucket its name, its shape, and for each rank where its part lies and what it is."""
        written = self._written
        for stage, place in written.stages.items():
            for unit, layers in place.layers.items():
                buffer = self.program.buffer_of[f"{prefix}{stage}_{unit}"]
                assert buffer.layout is not None and buffer.tensor is not None
                shape, layout = self.program.tensor_of[buffer.tensor].shape, buffer.layout
                where = place.mesh, place.replicas, written.settings
                shards = (
                    (
                        layout.indices(shape, rank)[0],
                        local_bucket(written.units[unit], weights, layers, *where, rank),
                    )
                    for rank in place.mesh.ranks
                )
                yield f"{stage}_{unit}", shape, shards

    def calls(self) -> dict[str, Callable[..., Any]]:
        """Return by name the functions that the program calls; each takes the number of the calling rank first.

        They compute on integers. The optimizer subtracts the gradient from the weights.
        """
        tables: dict[int, dict[str, Callable[..., Any]]] = {}
        blocks, (tokens, targets) = functions_of(whole_block(self.problem)), batch_of(self.problem)

        def table(rank: int) -> dict[str, Callable[..., Any]]:
            if rank not in tables:
                mesh = self._written.mesh_of(rank)
                of = StepFunctions(self._written.units, blocks, mesh, rank, _descended, self._zeros)
                of.tokens, of.targets = tokens, targets
                tables[rank] = of.table()
            return tables[rank]

        def called(name: str) -> Callable[..., Any]:
            return of_rank(lambda rank, *given: table(rank)[name](*given))

        return {name: called(name) for name in table(0)}

    def _zeros(self, count: int) -> Array:
        return np.zeros(count, self.problem.dtype)


def _descended(bucket: tuple[str, int], w: Array, dw: Array) -> Array:
    return w - dw
