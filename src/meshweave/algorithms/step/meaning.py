"""What a step computes: a dense step of the whole model on integers, and how weights lie in a program's buckets.

The functions are those of integers (`block.functions`), so that results are the same in any order of sums. Tokens
and targets of a step are fixed by its sizes. The optimizer subtracts the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from meshweave.algorithms.block import BlockProblem
from meshweave.algorithms.block.end_equations import IDS_IN, IDS_OUT, TARGETS, TOKENS_IN
from meshweave.algorithms.block.folds import functions_of
from meshweave.algorithms.block.place import head_of, layers_of
from meshweave.algorithms.block.reference import reference
from meshweave.algorithms.contract import Array, Arrays
from meshweave.algorithms.step.block_program import _StepWriter
from meshweave.algorithms.step.problem import StepProblem
from meshweave.algorithms.step.result import Step
from meshweave.algorithms.step.units import Unit, Weight
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.calls import of_rank
from meshweave.ir.program import Buffer

NEW = "NEW_"
"""What the names of updated weights begin with."""


def whole_block(problem: StepProblem) -> BlockProblem:
    """Return all layers of a step's model with both ends, on the whole batch and one rank, on integers."""
    model = problem.model
    block = BlockProblem.of(model, problem.workload, (1, 1), layers=model.num_layers)
    return replace(block, vocabulary=model.vocab_size or 0, exact=True)


def random_weights(problem: StepProblem, seed: int) -> dict[str, Array]:
    """Return small integers for the weights of a model, by name."""
    block, draw = whole_block(problem), np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {}
    if block.vocabulary:
        shapes["E"] = block.vocabulary, block.hidden
    for layer in (*layers_of(block), *([head_of(block)] if block.vocabulary else [])):
        shapes |= {tensor.name: tensor.shape for tensor in layer.parameters()}
    return {name: draw.integers(-4, 5, shape).astype(problem.dtype) for name, shape in shapes.items()}


def batch_of(problem: StepProblem) -> tuple[Array, Array]:
    """Return the tokens and the targets (batch, sequence) of a step."""
    draw = np.random.default_rng(problem.batch)
    sizes = 2, problem.batch, problem.sequence
    tokens, targets = draw.integers(0, problem.model.vocab_size or 1, sizes).astype(problem.dtype)
    return tokens, targets


def dense_step(problem: StepProblem, weights: Arrays) -> dict[str, Array]:
    """Return the gradients of all weights, and the weights after the step."""
    tokens, targets = batch_of(problem)
    ids = np.arange(problem.model.vocab_size or 0).astype(problem.dtype)
    given = {TOKENS_IN: tokens, TARGETS: targets, IDS_IN: ids, IDS_OUT: ids}
    out = reference(whole_block(problem), {**weights, **given})
    gradients = {f"D{name}": out[f"D{name}"] for name in weights}
    return gradients | {f"{NEW}{name}": weights[name] - out[f"D{name}"] for name in weights}


@dataclass(frozen=True)
class _Bucket:
    """The bucket of a unit on one rank: `layers` of them one after the other.

    Attributes:
        tensor: what the names of its tensors end in.
        mesh: the ranks of its stage, by which its block programs count theirs.
        layers: the numbers of its layers in the model.
    """

    tensor: str
    unit: Unit
    mesh: Mesh
    layers: tuple[int, ...]


class LaidWeights:
    """Where the weights of a step lie in its program, and what the program calls."""

    def __init__(self, step: Step) -> None:
        self.step, self.problem = step, step.problem
        writer = _StepWriter(step, 1)
        self.program = writer.program().expanded
        self._buckets: list[_Bucket] = []
        begin = 0
        for number, count in enumerate(step.stage_layers):
            mesh = writer._mesh(step.stages.stage_ranks[number])
            for unit, times in writer._units_of(number):
                layers = tuple(range(begin, begin + times))
                self._buckets.append(_Bucket(f"{number}_{unit.name}", unit, mesh, layers))
            begin += count
        self._block = whole_block(step.problem)

    def buckets(self, weights: Arrays) -> dict[str, Array]:
        """Return the program's tensors of weights."""
        out = {}
        for bucket in self._buckets:
            name = f"W{bucket.tensor}"
            whole = np.zeros(self.program.tensor_of[name].shape, self.problem.dtype)
            for rank, part, layer, own in self._shards(bucket, "w"):
                flat = np.zeros(bucket.unit.elements, self.problem.dtype)
                for weight, tensor, indices in self._places(bucket, rank, layer):
                    flat[weight.start : weight.stop] = weights[tensor][np.ix_(*indices)].reshape(-1)
                whole[part] = flat[own]
            out[name] = whole
        return out

    def whole(self, outputs: Arrays) -> dict[str, Array]:
        """Return gradients and updated weights of the model from the program's tensors of them."""
        known: dict[str, Array] = {}
        for bucket in self._buckets:
            for buffer, before in (("dw", "D"), ("new", NEW)):
                of_ranks: dict[tuple[int, int], Array] = {}
                for rank, part, layer, own in self._shards(bucket, buffer):
                    for other in self._alike(bucket, rank):
                        flat = of_ranks.setdefault((other, layer), np.zeros(bucket.unit.elements))
                        flat[own] = outputs[f"{buffer.upper()}{bucket.tensor}"][part]
                for (rank, layer), flat in of_ranks.items():
                    for weight, tensor, indices in self._places(bucket, rank, layer):
                        shape = self._shape(bucket, weight, tensor)
                        value = known.setdefault(f"{before}{tensor}", np.full(shape, np.nan))
                        value[np.ix_(*indices)] = flat[weight.start : weight.stop].reshape(weight.shape)
        return known

    def _shape(self, bucket: _Bucket, weight: Weight, tensor: str) -> tuple[int, ...]:
        program = bucket.unit.parts.forward
        name = program.buffer_of[weight.name].tensor
        assert name is not None
        return program.tensor_of[name].shape

    def _alike(self, bucket: _Bucket, rank: int) -> Iterator[int]:
        """Yield the ranks whose buckets are equal: those of other replicas."""
        replicas = self.program.mesh_of[self.program.buffer_of[f"w{bucket.tensor}"].mesh]
        at = replicas.axes.index("tensor")
        own = replicas.coords(rank)[at]
        yield from (other for other in replicas.ranks if replicas.coords(other)[at] == own)

    def _shards(self, bucket: _Bucket, prefix: str) -> Iterator[tuple[int, Array, int, slice]]:
        """Yield (rank, where in the program's tensor, layer, where in its bucket) of what each rank has."""
        buffer = self.program.buffer_of[f"{prefix}{bucket.tensor}"]
        assert buffer.layout is not None and buffer.tensor is not None
        mesh, size = buffer.layout.mesh, bucket.unit.elements // bucket.unit.shards
        for rank in bucket.mesh.ranks:
            (indices,) = buffer.layout.indices(self.program.tensor_of[buffer.tensor].shape, rank)
            start = self._shard_start(bucket.unit, mesh, rank)
            for number, layer in enumerate(bucket.layers):
                part = indices[number * size : (number + 1) * size]
                yield rank, part, layer, slice(start, start + size)

    def _shard_start(self, unit: Unit, mesh: Mesh, rank: int) -> int:
        """Return where the shard of a rank begins in a bucket, which one group after the other scatters."""
        start, size, number = 0, unit.elements, 0
        while size > unit.elements // unit.shards:
            axis = mesh.axes.index(f"replica{number}")
            size //= mesh.shape[axis]
            start += mesh.coords(rank)[axis] * size
            number += 1
        return start

    def _places(
        self, bucket: _Bucket, rank: int, layer: int
    ) -> Iterator[tuple[Weight, str, tuple[Array, ...]]]:
        """Yield the weights of a layer with their names in the model, and the indices that a rank has of them."""
        program = bucket.unit.parts.forward
        for weight in bucket.unit.weights:
            buffer = program.buffer_of[weight.name]
            assert buffer.layout is not None and buffer.tensor is not None
            shape = program.tensor_of[buffer.tensor].shape
            indices = buffer.layout.indices(shape, bucket.mesh.ranks.index(rank))
            yield weight, _model_name(buffer.tensor, layer), indices

    # --- calls ------------------------------------------------------------------------------------------

    def calls(self) -> dict[str, Callable[..., Any]]:
        """Return what the calls of the program compute."""
        functions: dict[str, Callable[..., Any]] = dict(functions_of(self._block))
        functions |= dict.fromkeys(("arrived", "software", "reduced"), lambda *_: None)
        functions["begin"] = lambda *_: np.zeros(1, self.problem.dtype)
        functions["add"] = lambda one, other: one + other
        for bucket in self._buckets:
            unit = bucket.unit
            functions[f"optimizer_{unit.name}"] = lambda w, dw, *others: w - dw
            functions[f"unpack_{unit.name}"] = _unpack(unit.weights)
            functions[f"pack_{unit.name}"] = partial(_packed, unit.elements)
            functions[f"accumulate_{unit.name}"] = partial(_accumulated, unit.elements)
        tokens, targets = batch_of(self.problem)
        functions |= {"tokens": self._rows("tokens", tokens), "targets": self._rows("targets", targets)}
        ids = np.arange(self._block.vocabulary).astype(self.problem.dtype)
        functions |= {name: self._constant(name, ids) for name in ("ids_in", "ids_out")}
        positions = np.arange(self.problem.sequence).astype(self.problem.dtype)
        return functions | {"positions": self._constant("positions", positions)}

    def _given(self, name: str, rank: int) -> tuple[Buffer, tuple[int, ...], int]:
        """Return the buffer of an input of a unit, the shape of its tensor, and a rank's number there."""
        for bucket in self._buckets:
            for program, buffer in bucket.unit.buffers_of((name,)):
                if rank in bucket.mesh:
                    assert buffer.tensor is not None
                    return buffer, program.tensor_of[buffer.tensor].shape, bucket.mesh.ranks.index(rank)
        raise AssertionError(f"rank {rank} has no {name}")

    def _constant(self, name: str, values: Array) -> Callable[..., Array]:
        @of_rank
        def constant(rank: int) -> Array:
            buffer, shape, own = self._given(name, rank)
            assert buffer.layout is not None
            made: Array = values.reshape(shape)[np.ix_(*buffer.layout.indices(shape, own))]
            return made

        return constant

    def _rows(self, name: str, values: Array) -> Callable[..., Array]:
        """Return the tokens of a micro-batch that a rank has: micro-batches follow each other in the batch."""

        @of_rank
        def rows(rank: int, at: int) -> Array:
            buffer, shape, own = self._given(name, rank)
            assert buffer.layout is not None
            count = prod(shape) // self.problem.sequence
            of_micro_batch = values[at * count : (at + 1) * count].reshape(shape)
            made: Array = of_micro_batch[np.ix_(*buffer.layout.indices(shape, own))]
            return made

        return rows


def _model_name(tensor: str, layer: int) -> str:
    """Return the name in a model of many layers of a tensor of the first layer of a block."""
    return f"{tensor[:-1]}{layer}" if tensor.endswith("0") else tensor


def _unpack(weights: tuple[Weight, ...]) -> Callable[..., list[Array]]:
    return lambda bucket: [bucket[each.start : each.stop].reshape(each.shape) for each in weights]


def _packed(elements: int, *terms: Array) -> Array:
    flat = np.concatenate([term.reshape(-1) for term in terms])
    return np.concatenate((flat, np.zeros(elements - flat.size, flat.dtype)))


def _accumulated(elements: int, *given: Array) -> Array:
    *terms, total = given
    made: Array = total + _packed(elements, *terms)
    return made
