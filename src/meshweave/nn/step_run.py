"""Run a training step of a transformer as its Program: on this rank's weights, over `torch.distributed`.

The program is that of a step: a pipeline of layers on all replicas, with its messages, its reductions of
gradients and, under ZeRO-1, its gathers of weights. At its end an optimizer (Adam: Kingma and Ba, 2015,
algorithm 1) updates the weights of each layer, or the shard of them that a rank has. A layer is a call. Its
function runs the forward or the backward part of the block program of its strategy on the tensor-parallel ranks.

Weights of a layer are one vector: those of its block program in the order of their buffers, then zeros up to a
multiple of the replicas. Gradients of weights that all ranks of a tensor-parallel axis have, from tokens that they
share, are summed over that axis once a step, after the last micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor as Values

from meshweave.algorithms.block import BlockProblem
from meshweave.algorithms.block.end_equations import IDS_IN, IDS_OUT, TARGETS, TOKENS_IN
from meshweave.algorithms.block.folds import functions_of
from meshweave.algorithms.block.functions import Functions
from meshweave.algorithms.block.pieces import Piece
from meshweave.algorithms.contract import Array, Arrays
from meshweave.algorithms.pipeline.actions import Schedule
from meshweave.algorithms.pipeline.problem import PartCost, PipelineProblem
from meshweave.algorithms.pipeline.program import COMPUTE, pipeline_program
from meshweave.algorithms.pipeline.stage_ops import MARKER
from meshweave.algorithms.step import Step
from meshweave.algorithms.step.call_program import step_pipeline
from meshweave.algorithms.step.compose import ADAM_STEP_BYTES
from meshweave.base.errors import UnsupportedError
from meshweave.execute.torch import compat
from meshweave.execute.torch.bind import bind
from meshweave.execute.torch.context import TorchContext
from meshweave.ir.program import FULL, Buffer, Call, On, Program, Statement, Tensor, View
from meshweave.lower import lower_rings
from meshweave.nn.step_pieces import BoundPiece, local_size, pieces_of, rank_of

ADAM = "adam"
"""The name of the call that updates weights."""
_MOMENTS = ("m", "v")


@dataclass(frozen=True)
class Adam:
    """Adam without weight decay. `step` counts from 1."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def update(self, w: Array, m: Array, v: Array, dw: Array, step: int) -> tuple[Array, Array, Array]:
        """Return weights and both moments after a step: what torch's fused kernel computes in a run."""
        first, second = self.betas
        m = first * m + (1 - first) * dw
        v = second * v + (1 - second) * dw * dw
        scale = math.sqrt(1 - second**step)
        w = w - (self.lr / (1 - first**step)) * m / (v**0.5 / scale + self.eps)
        return w, m, v


# --- the program --------------------------------------------------------------------------------------------


def training_program(step: Step, layers: Sequence[int]) -> tuple[Program, PipelineProblem, Schedule]:
    """Return the program of a step with its optimizer, whose layers cost nothing by themselves.

    Args:
        layers: the elements of each layer's weights on a rank.
    """
    problem, schedule = step_pipeline(step)
    p, free = step.parallelism, PartCost()
    stages = tuple(
        replace(
            stage,
            forward=free,
            input_grad=free,
            weight_grad=free,
            parameters=-(-count // p.replicas) * p.replicas,
        )
        for stage, count in zip(problem.stages, layers, strict=True)
    )
    tokens = p.micro_batch * step.problem.sequence
    problem = replace(problem, stages=stages, input_shape=(tokens,))
    return with_optimizer(pipeline_program(problem, schedule, title="step"), problem), problem, schedule


def with_optimizer(program: Program, problem: PipelineProblem) -> Program:
    """Return the program of a pipeline that ends with an update of each stage's weights by its gradients.

    Stage i gets inputs M{i} and V{i}, the moments, and outputs NW{i}, NM{i} and NV{i}, laid out as its weights.
    """
    tensors, buffers = list(program.tensors), list(program.buffers)
    added: dict[str, list[Statement]] = {}
    for number, stage in enumerate(problem.stages):
        weights = program.buffer_of[f"w{number}"]
        assert weights.layout is not None
        names = [f"m{number}", f"v{number}", f"nw{number}", f"nm{number}", f"nv{number}"]
        for name in names:
            tensors.append(Tensor(name.upper(), (stage.parameters,), "float32"))
            kind = "output" if name[0] == "n" else "input"
            buffers.append(Buffer(name, kind, weights.mesh, "float32", name.upper(), weights.layout))  # type: ignore[arg-type]
        moments, out = names[:2], names[2:]
        own = math.prod(weights.layout.local_shape((stage.parameters,), weights.layout.mesh.ranks[0]))
        whole = [View(name, (FULL,), 0) for name in (f"w{number}", *moments, f"dw{number}")]
        update = Call(
            fn=ADAM,
            outs=tuple(View(name, (FULL,), 0) for name in out),
            ins=tuple(whole),
            flops=own,
            bytes=ADAM_STEP_BYTES * own,
            work="elementwise",
            dtype="float32",
            lane=COMPUTE,
            name=f"update weights of stage {number}",
        )
        added.setdefault(weights.mesh, []).append(update)
    body = []
    for statement in program.body:
        assert isinstance(statement, On) and isinstance(statement.where, str)
        body.append(replace(statement, body=(*statement.body, *added.get(statement.where, ()))))
    return replace(program, tensors=tuple(tensors), buffers=tuple(buffers), body=tuple(body))


# --- a step on this rank ------------------------------------------------------------------------------------


class StepRun:
    """A step bound to this rank; all ranks of its cluster make it together, and run it together.

    Args:
        step: a step on as many chips as there are ranks, with weights in float32.
        weights: the weights of the whole model by name, as those of a block of all its layers.
        optimizer: how weights are updated.
        functions: what the calls of blocks compute.
        liveness, deadline_s: as of `TorchContext`.

    Raises:
        UnsupportedError: the step has context parallelism, recomputation, ZeRO-2 or 3, dtypes other than float32,
            or a model without a vocabulary or with one table for both ends.

    Attributes:
        program: the program of the step.
    """

    def __init__(
        self,
        step: Step,
        weights: Arrays,
        *,
        optimizer: Adam | None = None,
        functions: Callable[[BlockProblem], Functions] = functions_of,
        liveness: Any = None,
        deadline_s: float = 60.0,
    ) -> None:
        _check(step)
        self.step = step
        self._optimizer, self._count = optimizer or Adam(), 0
        self._outer = TorchContext(liveness=liveness, deadline_s=deadline_s)
        self._inner = TorchContext(liveness=liveness, deadline_s=deadline_s)
        self.rank = rank = rank_of(self._outer)
        problem, _ = step_pipeline(step)
        mesh = next(mesh for mesh in problem.meshes if rank in mesh)
        ranks = mesh.group(rank, "tensor")
        own = [number for number, stage in enumerate(problem.stages) if rank in stage.mesh]
        bound: dict[Piece, BoundPiece] = {}
        self._layers: dict[int, list[BoundPiece]] = {}
        for number in own:
            for piece, block in pieces_of(step, number):
                if piece not in bound:
                    bound[piece] = BoundPiece(step, piece, block, ranks, self._inner, functions)
                self._layers.setdefault(number, []).append(bound[piece])
        sizes = [local_size(step, number) for number in range(len(problem.stages))]
        program, self.problem, schedule = training_program(step, sizes)
        self.program = lower_rings(program)
        self._last = _last_micro_batches(schedule)
        self._targets = torch.zeros(0)
        self._bound = bind(
            self.program, rank, self._tensors(weights), context=self._outer, calls=self._functions()
        )

    def _tensors(self, weights: Arrays) -> dict[str, Values]:
        """Return weights and moments of this rank: what is updated is where it was."""
        tensors: dict[str, Values] = {}
        for number in self._layers:
            own = self._own_weights(weights, number)
            tensors |= {f"w{number}": own, f"nw{number}": own}
            for moment in _MOMENTS:
                kept = torch.zeros_like(own)
                tensors |= {f"{moment}{number}": kept, f"n{moment}{number}": kept}
        return tensors

    def _own_weights(self, weights: Arrays, number: int) -> Values:
        """Return what this rank has of a layer's weights: all that its tensor-parallel part has, or a shard."""
        buffer, count = self.program.buffer_of[f"w{number}"], self.problem.stages[number].parameters
        known = torch.cat([piece.local_weights(weights, number) for piece in self._layers[number]])
        vector = torch.zeros(count)
        vector[: known.numel()] = known
        assert buffer.layout is not None
        (mine,) = buffer.layout.indices((count,), self.rank)
        return vector[torch.from_numpy(mine)]

    def run(self, tokens: Array, targets: Array) -> float:
        """Run one step, and return this rank's share of the loss: over all ranks it adds up to that of all tokens.

        Args:
            tokens, targets: (batch, sequence) of the whole step.
        """
        self._count += 1
        p = self.step.parallelism
        rows = self.step.num_micro_batches * p.replicas
        self._targets = torch.from_numpy(np.asarray(targets, np.float32).reshape(rows, -1))
        whole = {"X0": np.asarray(tokens, np.float32).reshape(rows, -1)}
        last = self.problem.num_stages - 1
        whole[f"T{last}"] = np.ones((rows, 1), np.float32)
        given: dict[str, Values] = {}
        for name in ("x0", f"t{last}"):
            if name in self._bound.inputs:
                buffer = self.program.buffer_of[name]
                assert buffer.layout is not None
                indices = buffer.layout.indices(whole[name.upper()].shape, self.rank)
                given[name] = torch.from_numpy(whole[name.upper()][np.ix_(*indices)])
        self._bound.run(given)
        losses = self._bound.outputs.get(f"y{last}")
        return 0.0 if losses is None else float(losses.sum()) / self._layers[last][-1].loss_copies

    def worst_difference(self, weights: Arrays) -> float:
        """Return the largest difference of this rank's weights from those of a whole model, given by name."""
        worst = 0.0
        for number in self._layers:
            own, expected = self._bound.inputs[f"w{number}"], self._own_weights(weights, number)
            worst = max(worst, float((own - expected).abs().max()))
        return worst

    def close(self) -> None:
        """End threads and groups."""
        self._inner.close()
        self._outer.close()

    # --- functions of the calls -----------------------------------------------------------------------------

    def _functions(self) -> dict[str, Callable[..., Any]]:
        table: dict[str, Callable[..., Any]] = {MARKER: lambda *_: None, ADAM: self._update}
        for number in self._layers:
            table[f"stage{number}"] = self._forward_of(number)
            table[f"stage{number}_backward"] = self._backward_of(number)
        return table

    def _update(self, w: Values, m: Values, v: Values, dw: Values) -> tuple[Values, Values, Values]:
        of, w, m, v = self._optimizer, w.clone(), m.clone(), v.clone()
        compat.adam_step(w, m, v, dw, self._count, lr=of.lr, betas=of.betas, eps=of.eps)
        return w, m, v

    def _forward_of(self, number: int) -> Callable[..., Any]:
        pieces = self._layers[number]

        def forward(stash: dict[str, Any], x: Values, parameters: Values, micro_batch: int) -> Values:
            for piece, weights in _cut(pieces, parameters):
                x, stash[piece.piece] = piece.forward(weights, self._given(piece, x, micro_batch))
            return x.reshape(1, -1)

        return forward

    def _backward_of(self, number: int) -> Callable[..., Any]:
        pieces, last = self._layers[number], self._last[number]

        def backward(
            stash: dict[str, Any], arriving: Values, parameters: Values, total: Values, micro_batch: int
        ) -> list[Values]:
            sums = total.clone()
            # The loss is what is summed up: its own gradient is 1.
            left = None if pieces[-1].piece == "head" else arriving
            cut = zip(_cut(pieces, parameters), _cut(pieces, sums), strict=True)
            for (piece, weights), (_, own) in reversed(list(cut)):
                left = piece.backward(weights, stash[piece.piece], left)
                own += piece.gradients
                if micro_batch == last:
                    piece.sum_terms(own)
            return [sums] if left is None else [left.reshape(1, -1), sums]

        return backward

    def _given(self, piece: BoundPiece, x: Values, micro_batch: int) -> dict[str, Values]:
        """Return the inputs of a forward part, besides weights."""
        program, given = piece.forward_program, dict[str, Values]()
        for buffer in program.buffers:
            if buffer.kind != "input" or buffer.name in piece.slices:
                continue
            assert buffer.tensor is not None and buffer.layout is not None
            shape = program.tensor_of[buffer.tensor].shape
            if buffer.tensor in (IDS_IN, IDS_OUT):
                whole = torch.arange(piece.block.vocabulary, dtype=torch.float32)
            elif buffer.tensor == TOKENS_IN:
                whole = x.reshape(shape)
            elif buffer.tensor == TARGETS:
                whole = self._targets[self._row(micro_batch)].reshape(shape)
            else:
                given[buffer.name] = x.reshape(buffer.layout.local_shape(shape, self.rank))
                continue
            indices = buffer.layout.indices(shape, self.rank)
            given[buffer.name] = whole[tuple(np.ix_(*indices))]
        return given

    def _row(self, micro_batch: int) -> int:
        """Return the row of the batch, in micro-batches of a replica, that this rank works on."""
        last = self.problem.num_stages - 1
        buffer = self.program.buffer_of[f"t{last}"]
        assert buffer.layout is not None
        rows = self.step.num_micro_batches * self.step.parallelism.replicas
        indices = buffer.layout.indices((rows, 1), self.rank)[0]
        return int(indices[micro_batch])


def _check(step: Step) -> None:
    """Raise UnsupportedError for what a run does not do."""
    p, problem = step.parallelism, step.problem
    refused = {
        "context parallelism": p.context > 1,
        "recomputation": p.recompute != "none",
        "other dtypes than float32": {problem.dtype, problem.gradient_dtype} != {"float32"},
        "a model without a vocabulary": not problem.model.vocab_size,
        "one table for embedding and head": problem.model.tied_embeddings,
    }
    for what, is_there in refused.items():
        if is_there:
            raise UnsupportedError(
                f"a step cannot be run with {what} here; it can be estimated and simulated"
            )


def _cut(pieces: Iterable[BoundPiece], vector: Values) -> Iterator[tuple[BoundPiece, Values]]:
    """Yield each piece with its part of a layer's vector."""
    at = 0
    for piece in pieces:
        yield piece, vector[at : at + piece.size]
        at += piece.size


def _last_micro_batches(schedule: Schedule) -> dict[int, int]:
    """Return the micro-batch of the last backward part of each stage."""
    last: dict[int, int] = {}
    for order in schedule.actions:
        for action in order:
            if action.micro_batch is not None:
                last[action.stage] = action.micro_batch
    return last
