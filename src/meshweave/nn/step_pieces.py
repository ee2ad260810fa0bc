"""A piece of a model on one rank: the forward and backward programs of its blocks, bound to a vector of weights.

Gradients of weights that all ranks of a tensor-parallel axis have, from tokens that they share, stay terms until
`sum_terms` sums them over that axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor as Values

from meshweave.algorithms.block import BlockProblem
from meshweave.algorithms.block.end_equations import IDS_IN, IDS_OUT, LOSS, TARGETS, TOKENS_IN
from meshweave.algorithms.block.functions import Functions
from meshweave.algorithms.block.parts import BlockParts
from meshweave.algorithms.block.pieces import Piece
from meshweave.algorithms.contract import Arrays
from meshweave.algorithms.step import Step
from meshweave.algorithms.step.layers import best_config
from meshweave.algorithms.step.strategies import strategy_of
from meshweave.describe.layout import Layout, Partial, Replicate
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.model.workload import Workload
from meshweave.execute.numpy import local_inputs
from meshweave.execute.torch.bind import BoundProgram, bind
from meshweave.execute.torch.context import TorchContext
from meshweave.ir.program import FULL, Buffer, Lane, On, Program, Tensor, View
from meshweave.ir.program.ops import AllReduce
from meshweave.lower import lower_rings

_NO_WEIGHTS = ("X", "Z", TOKENS_IN, TARGETS, IDS_IN, IDS_OUT)


def pieces_of(step: Step, layer: int) -> tuple[tuple[Piece, BlockProblem], ...]:
    """Return the pieces of the model that the calls of a layer run, in order, each with its block."""
    model, p = step.problem.model, step.parallelism
    work = Workload(p.micro_batch, step.problem.sequence, step.problem.dtype)
    block = BlockProblem.of(model, work, p.tensor_mesh)
    ends = replace(block, vocabulary=model.vocab_size or 0)
    first: tuple[tuple[Piece, BlockProblem], ...] = (("embedding", ends),) if layer == 0 else ()
    last: tuple[tuple[Piece, BlockProblem], ...] = (("head", ends),) if layer == model.num_layers - 1 else ()
    return *first, ("layers", block), *last


def parts_of(step: Step, piece: Piece, block: BlockProblem) -> BlockParts:
    """Return the programs of a piece."""
    entry = strategy_of(step.problem, step.parallelism)
    return entry.parts(block, best_config(step.problem, step.parallelism), piece=piece)


def _weight_buffers(forward: Program) -> Iterator[Buffer]:
    """Yield the buffers of weights of a forward part, in order."""
    for buffer in forward.buffers:
        if buffer.kind == "input" and buffer.tensor not in _NO_WEIGHTS:
            yield buffer


def placed(program: Program, ranks: tuple[int, ...]) -> Program:
    """Return the same program with its one mesh on these ranks."""
    (mesh,) = program.meshes
    own = Mesh(mesh.name, mesh.shape, mesh.axes, ranks)
    buffers = (
        buffer if buffer.layout is None else replace(buffer, layout=Layout(own, buffer.layout.placements))
        for buffer in program.buffers
    )
    return replace(program, meshes=(own,), buffers=tuple(buffers))


class BoundPiece:
    """The forward and backward part of pieces that are alike, bound once on this rank.

    Attributes:
        slices: by buffer of a weight its slice of the vector of all of them, and its shape.
        tensors: by buffer of a weight the name of its tensor.
        size: the elements of all weights of this rank.
        loss_copies: how many ranks of the tensor-parallel group have the same loss.
    """

    def __init__(
        self,
        step: Step,
        piece: Piece,
        block: BlockProblem,
        ranks: tuple[int, ...],
        context: TorchContext,
        functions: Callable[[BlockProblem], Functions],
    ) -> None:
        self.piece, self.block, self.rank = piece, block, rank_of(context)
        parts = parts_of(step, piece, block)
        self._kept = parts.kept
        forward, backward = (lower_rings(placed(part, ranks)) for part in (parts.forward, parts.backward))
        self.forward_program = forward
        self.slices: dict[str, tuple[slice, tuple[int, ...]]] = {}
        self.tensors: dict[str, str] = {}
        at = 0
        for buffer in _weight_buffers(forward):
            assert buffer.tensor is not None and buffer.layout is not None
            shape = buffer.layout.local_shape(forward.tensor_of[buffer.tensor].shape, self.rank)
            self.slices[buffer.name] = slice(at, at + math.prod(shape)), shape
            self.tensors[buffer.name] = buffer.tensor
            at += math.prod(shape)
        self.size = at
        self._weights, self.gradients = torch.zeros(at), torch.zeros(at)
        views = {name: self._weights[where].view(shape) for name, (where, shape) in self.slices.items()}
        grads = {
            f"d{name}": self.gradients[where].view(shape) for name, (where, shape) in self.slices.items()
        }
        table = functions(block)
        self._forward = bind(forward, self.rank, views, context=context, calls=table)
        read = {name: value for name, value in views.items() if name in backward.buffer_of}
        self._backward = bind(backward, self.rank, {**read, **grads}, context=context, calls=table)
        sums = {name: axes for name, axes in parts.sums.items() if _sizes(block, axes) > 1}
        self._summed: dict[tuple[str, ...], list[slice]] = {}
        for name in self.slices:
            if f"d{name}" in sums:
                self._summed.setdefault(sums[f"d{name}"], []).append(self.slices[name][0])
        self._sums = {
            axes: _bind_sum(axes, sum(each.stop - each.start for each in where), ranks, block, context)
            for axes, where in self._summed.items()
        }
        self.loss_copies = math.prod(block.mesh_shape) // _sizes(block, sums.get(LOSS.lower(), ()))

    def local_weights(self, weights: Arrays, layer: int) -> Values:
        """Return this rank's weights of the piece as one vector, of a model's weights by name."""
        named = {tensor: weights[_model_name(tensor, layer)] for tensor in self.tensors.values()}
        only = replace(self.forward_program, buffers=tuple(_weight_buffers(self.forward_program)), body=())
        shards = local_inputs(only, named, self.rank)
        return torch.from_numpy(np.concatenate([shards[name].reshape(-1) for name in self.slices]))

    def forward(self, weights: Values, given: Mapping[str, Values]) -> tuple[Values, dict[str, Values]]:
        """Return the residual or the loss that the piece makes, and what its backward part reads."""
        self._weights.copy_(weights)
        self._forward.run(given)
        outputs = self._forward.outputs
        kept = {name: outputs[name].clone() for name in self._kept}
        kept |= {name: value.clone() for name, value in given.items() if name in self._backward.inputs}
        (made,) = (value for name, value in outputs.items() if name not in self._kept)
        return made, kept

    def backward(self, weights: Values, kept: Mapping[str, Values], arriving: Values | None) -> Values | None:
        """Return the gradient of the residual before, if any; those of weights are in `gradients`."""
        self._weights.copy_(weights)
        given = dict(kept)
        if arriving is not None:
            (name,) = (name for name in ("dz", "dx") if name in self._backward.inputs)
            given[name] = arriving.reshape(self._backward.inputs[name].shape)
        self._backward.run(given)
        left = [value for name, value in self._backward.outputs.items() if name in ("dx", "dz")]
        return left[0] if left else None

    def sum_terms(self, total: Values) -> None:
        """Sum the terms of gradients of weights over tensor-parallel ranks that have equal ones, in place."""
        for axes, places in self._summed.items():
            bound, at = self._sums[axes], 0
            bound.run({"x": torch.cat([total[place] for place in places])})
            for place in places:
                size = place.stop - place.start
                total[place] = bound.outputs["y"][at : at + size]
                at += size


def _sizes(block: BlockProblem, axes: Iterable[str]) -> int:
    """Return the number of ranks along mesh axes."""
    return math.prod(block.mesh.size(axis) for axis in axes)


def _model_name(tensor: str, layer: int) -> str:
    """Return the name in a model of many layers of a tensor of the first layer of a block."""
    return f"{tensor[:-1]}{layer}" if tensor.endswith("0") else tensor


def rank_of(context: TorchContext) -> int:
    """Return the rank of this process."""
    assert context.rank is not None
    return context.rank


def _bind_sum(
    axes: tuple[str, ...], size: int, ranks: tuple[int, ...], block: BlockProblem, context: TorchContext
) -> BoundProgram:
    """Return a program that sums a vector "x" over mesh axes to "y"."""
    mesh = Mesh(block.mesh.name, block.mesh_shape, block.mesh.axes, ranks)
    axes = tuple(axis for axis in axes if mesh.size(axis) > 1)
    terms = tuple(Partial() if axis in axes else Replicate() for axis in mesh.axes)
    buffers = (
        Buffer("x", "input", mesh.name, "float32", "X", Layout(mesh, terms)),
        Buffer(
            "y", "output", mesh.name, "float32", "Y", Layout(mesh, tuple(Replicate() for _ in mesh.shape))
        ),
    )
    x, y = (View(name, (FULL,)) for name in "xy")
    ops = [
        AllReduce(out=y, src=y if number else x, over=f"{mesh.name}.{axis}", lane="sums")
        for number, axis in enumerate(axes)
    ]
    tensors = Tensor("X", (size,), "float32"), Tensor("Y", (size,), "float32")
    program = Program("sums", (mesh,), tensors, buffers, (Lane("sums"),), (On(mesh.name, tuple(ops)),))
    return bind(program, rank_of(context), {}, context=context)


def local_size(step: Step, layer: int) -> int:
    """Return the elements of a layer's weights on each rank."""
    total = 0
    for piece, block in pieces_of(step, layer):
        program = parts_of(step, piece, block).forward
        for buffer in _weight_buffers(program):
            assert buffer.tensor is not None and buffer.layout is not None
            total += math.prod(buffer.layout.local_shape(program.tensor_of[buffer.tensor].shape, 0))
    return total
