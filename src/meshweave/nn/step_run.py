"""Run a training step of a transformer as its Program: on this rank's weights, over `torch.distributed`.

The program is that of `tune.step`: a pipeline of layers on all replicas, with its messages, its reductions of
gradients and, under ZeRO-1, its gathers of weights. At its end an optimizer (Adam: Kingma and Ba, 2015,
algorithm 1) updates the weights of each layer, or the shard of them that a rank has. A layer is a call. Its
function runs the forward or the backward part of the block program of its strategy on the tensor-parallel ranks.

Weights of a layer are one vector: those of its block program in the order of their buffers, then zeros up to a
multiple of the replicas. Gradients of weights that all ranks of a tensor-parallel axis have, from tokens that they
share, are summed over that axis once a step, after the last micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor as Values

from meshweave.algorithms.block import BlockProblem
from meshweave.algorithms.block.assembly import BlockParts
from meshweave.algorithms.block.end_equations import IDS_IN, IDS_OUT, LOSS, TARGETS, TOKENS_IN
from meshweave.algorithms.block.functions import BlockFunctions
from meshweave.algorithms.block.layer import GRADIENTS
from meshweave.algorithms.block.real_functions import RealFunctions
from meshweave.algorithms.block.roles import TOKENS
from meshweave.algorithms.contract import Array, Arrays
from meshweave.algorithms.pipeline.actions import Schedule
from meshweave.algorithms.pipeline.problem import PartCost, PipelineProblem
from meshweave.algorithms.pipeline.program import COMPUTE, pipeline_program
from meshweave.algorithms.pipeline.stage_ops import MARKER
from meshweave.describe.layout import Layout, Partial, Replicate
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.numpy import local_inputs
from meshweave.execute.torch.bind import BoundProgram, bind
from meshweave.execute.torch.context import TorchContext
from meshweave.ir.program import FULL, Buffer, Call, Lane, On, Program, Statement, Tensor, View
from meshweave.ir.program.ops import AllReduce, Op
from meshweave.ir.program.statements import rewrite
from meshweave.lower import lower_rings
from meshweave.tune.step import Step
from meshweave.tune.step.compose import ADAM_STEP_BYTES
from meshweave.tune.step.layers import block_config, strategy_of
from meshweave.tune.step.program import step_pipeline

ADAM = "adam"
"""The name of the call that updates weights."""
_MOMENTS = ("m", "v")
_NO_WEIGHTS = ("X", TOKENS_IN, TARGETS, IDS_IN, IDS_OUT)


@dataclass(frozen=True)
class Adam:
    """Adam without weight decay. `step` counts from 1."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def update(self, w: Any, m: Any, v: Any, dw: Any, step: int) -> tuple[Any, Any, Any]:
        """Return weights and both moments after a step, of numpy arrays or torch tensors."""
        first, second = self.betas
        m = first * m + (1 - first) * dw
        v = second * v + (1 - second) * dw * dw
        scale = math.sqrt(1 - second**step)
        w = w - (self.lr / (1 - first**step)) * m / (v**0.5 / scale + self.eps)
        return w, m, v


# --- the program --------------------------------------------------------------------------------------------


def block_of(step: Step, layer: int) -> BlockProblem:
    """Return the block of a layer for one micro-batch, with the ends of the model that the layer has."""
    model, p = step.problem.model, step.parallelism
    block = BlockProblem(
        p.micro_batch, step.problem.seq, model.hidden, model.num_heads, model.num_kv_heads, model.head_dim,
        model.ffn_hidden, p.tensor_mesh, family="llama" if model.gated_ffn else "gpt", dtype=step.problem.dtype,
    )  # fmt: skip
    is_first, is_last = layer == 0, layer == model.num_layers - 1
    if not model.vocab_size or not (is_first or is_last):
        return block
    ends = "both" if is_first and is_last else "first" if is_first else "last"
    return replace(block, vocabulary=model.vocab_size, ends=ends)  # type: ignore[arg-type]


def _parts_of(step: Step, layer: int) -> BlockParts:
    """Return the programs of a layer."""
    entry = strategy_of(step.problem, step.parallelism)
    return entry.parts(block_of(step, layer), block_config(step.problem, step.parallelism))


def _weight_buffers(forward: Program) -> Iterator[Buffer]:
    """Yield the buffers of weights of a forward part, in order."""
    for buffer in forward.buffers:
        if buffer.kind == "input" and buffer.tensor not in _NO_WEIGHTS:
            yield buffer


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
    tokens = p.micro_batch * step.problem.seq
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


# --- a layer on this rank -----------------------------------------------------------------------------------


def placed(program: Program, ranks: tuple[int, ...]) -> Program:
    """Return a program of one mesh on other ranks."""
    (mesh,) = program.meshes
    own = Mesh(mesh.name, mesh.shape, mesh.axes, ranks)
    buffers = (
        buffer if buffer.layout is None else replace(buffer, layout=Layout(own, buffer.layout.placements))
        for buffer in program.buffers
    )
    return replace(program, meshes=(own,), buffers=tuple(buffers))


class _Layer:
    """The forward and backward part of layers that are alike, bound once on this rank.

    Attributes:
        names: the weights, in the order of their vector, with their slices of it and their shapes.
        size: the elements of all weights of this rank.
    """

    def __init__(
        self,
        step: Step,
        layer: int,
        ranks: tuple[int, ...],
        context: TorchContext,
        functions: Callable[[BlockProblem], BlockFunctions],
    ) -> None:
        self.problem = block_of(step, layer)
        rank = _rank(context)
        parts = _parts_of(step, layer)
        self.kept = parts.kept
        backward, self.summed = _without_sums(parts.backward)
        forward, backward = (lower_rings(placed(part, ranks)) for part in (parts.forward, backward))
        self.slices: dict[str, tuple[slice, tuple[int, ...]]] = {}
        self.tensors: dict[str, str] = {}
        at = 0
        for buffer in _weight_buffers(forward):
            assert buffer.tensor is not None and buffer.layout is not None
            shape = buffer.layout.local_shape(forward.tensor_of[buffer.tensor].shape, rank)
            self.slices[buffer.name] = slice(at, at + math.prod(shape)), shape
            self.tensors[buffer.name] = buffer.tensor
            at += math.prod(shape)
        self.size = at
        self.forward_program = forward
        self._weights, self._gradients = torch.zeros(at), torch.zeros(at)
        views = {name: self._weights[where].view(shape) for name, (where, shape) in self.slices.items()}
        grads = {
            f"d{name}": self._gradients[where].view(shape) for name, (where, shape) in self.slices.items()
        }
        table = functions(self.problem).table()
        self._forward = bind(forward, rank, views, context=context, calls=table)
        read = {name: value for name, value in views.items() if name in backward.buffer_of}
        self._backward = bind(backward, rank, {**read, **grads}, context=context, calls=table)
        roles = strategy_of(step.problem, step.parallelism).roles_of(self.problem).axes
        axes = [number for number, role in enumerate(roles) if role.residual in TOKENS]
        size = sum(math.prod(self.slices[name][1]) for name in self.summed)
        self._sums = _bind_sums(axes, size, ranks, self.problem, context)

    def local_weights(self, weights: Arrays, layer: int, rank: int) -> Values:
        """Return this rank's weights of a layer of the model as one vector."""
        named = {tensor: weights[_model_name(tensor, layer)] for tensor in self.tensors.values()}
        buffers = tuple(_weight_buffers(self.forward_program))
        only = replace(self.forward_program, buffers=buffers, body=())
        shards = local_inputs(only, named, rank)
        return torch.from_numpy(np.concatenate([shards[name].reshape(-1) for name in self.slices]))

    def run_forward(self, parameters: Values, given: Mapping[str, Values]) -> dict[str, Values]:
        """Return what the backward part needs, and Z or LOSS."""
        self._weights.copy_(parameters[: self.size])
        self._forward.run(given)
        kept = {name: self._forward.outputs[name].clone() for name in self.kept}
        inputs = self._backward.inputs
        kept |= {name: value.clone() for name, value in given.items() if name in inputs}
        return kept

    def outputs(self) -> Mapping[str, Values]:
        """Return the outputs of the last forward part."""
        return self._forward.outputs

    def run_backward(self, parameters: Values, given: Mapping[str, Values]) -> Mapping[str, Values]:
        """Return DX, where there is one; the gradients of weights are in `gradients`."""
        self._weights.copy_(parameters[: self.size])
        self._backward.run(given)
        return self._backward.outputs

    @property
    def gradients(self) -> Values:
        """Return the gradients of weights of the last backward part, as one vector."""
        return self._gradients

    def sum_over_tokens(self, total: Values) -> None:
        """Sum gradients over ranks that have the same weights and other tokens, in place."""
        if self._sums is None:
            return
        places = [self.slices[name][0] for name in self.summed]
        self._sums.run({"x": torch.cat([total[place] for place in places])})
        at = 0
        for place in places:
            size = place.stop - place.start
            total[place] = self._sums.outputs["y"][at : at + size]
            at += size


def _model_name(tensor: str, layer: int) -> str:
    """Return the name in a model of many layers of a tensor of the first layer of a block."""
    return f"{tensor[:-1]}{layer}" if tensor.endswith("0") else tensor


def _rank(context: TorchContext) -> int:
    assert context.rank is not None
    return context.rank


def _without_sums(backward: Program) -> tuple[Program, tuple[str, ...]]:
    """Return a backward part without sums of gradients over ranks that have equal weights, and these weights."""
    summed: dict[str, None] = {}

    def kept(op: Op) -> tuple[Statement, ...]:
        if isinstance(op, AllReduce) and op.lane.endswith(f"_{GRADIENTS}"):
            summed[op.out.buffer.removeprefix("d")] = None
            return ()
        return (op,)

    body = rewrite(backward.body, kept)
    lanes = {op.lane for op in replace(backward, body=body).ops()}
    return replace(
        backward, body=body, lanes=tuple(lane for lane in backward.lanes if lane.name in lanes)
    ), tuple(summed)


def _bind_sums(
    axes: list[int], size: int, ranks: tuple[int, ...], problem: BlockProblem, context: TorchContext
) -> BoundProgram | None:
    """Return a program that sums a vector over mesh axes; None without any."""
    axes = [axis for axis in axes if problem.mesh_shape[axis] > 1]
    if not axes or not size:
        return None
    mesh = Mesh(problem.mesh.name, problem.mesh_shape, problem.mesh.axes, ranks)
    rank = _rank(context)
    terms = tuple(Partial() if axis in axes else Replicate() for axis in range(len(mesh.shape)))
    buffers = (
        Buffer("x", "input", mesh.name, "float32", "X", Layout(mesh, terms)),
        Buffer(
            "y", "output", mesh.name, "float32", "Y", Layout(mesh, tuple(Replicate() for _ in mesh.shape))
        ),
    )
    x, y = (View(name, (FULL,)) for name in "xy")
    ops = [
        AllReduce(out=y, src=y if number else x, over=f"{mesh.name}.{mesh.axes[axis]}", lane="sums")
        for number, axis in enumerate(axes)
    ]
    tensors = Tensor("X", (size,), "float32"), Tensor("Y", (size,), "float32")
    program = Program("sums", (mesh,), tensors, buffers, (Lane("sums"),), (On(mesh.name, tuple(ops)),))
    return bind(program, rank, {}, context=context)


# --- a step on this rank ------------------------------------------------------------------------------------


class StepRun:
    """A step bound to this rank; all ranks of its cluster make it together, and run it together.

    Args:
        step: a step on as many chips as there are ranks, with weights in float32.
        weights: the weights of the whole model by name, as those of a block of all its layers.
        optimizer: how weights are updated.
        functions: what the calls of blocks compute.
        liveness, deadline_s: as of `TorchContext`.

    Attributes:
        program: the program of the step.
    """

    def __init__(
        self,
        step: Step,
        weights: Arrays,
        *,
        optimizer: Adam | None = None,
        functions: Callable[[BlockProblem], BlockFunctions] = RealFunctions,
        liveness: Any = None,
        deadline_s: float = 60.0,
        lowers_rings: bool = True,
    ) -> None:
        self.step = step
        self._optimizer, self._count = optimizer or Adam(), 0
        self._outer = TorchContext(liveness=liveness, deadline_s=deadline_s)
        self._inner = TorchContext(liveness=liveness, deadline_s=deadline_s)
        self.rank = rank = _rank(self._outer)
        problem, _ = step_pipeline(step)
        mesh = next(mesh for mesh in problem.meshes if rank in mesh)
        ranks = mesh.group(rank, "tensor")
        own = [number for number, stage in enumerate(problem.stages) if rank in stage.mesh]
        kinds: dict[BlockProblem, _Layer] = {}
        self._layers: dict[int, _Layer] = {}
        for number in own:
            block = block_of(step, number)
            if block not in kinds:
                kinds[block] = _Layer(step, number, ranks, self._inner, functions)
            self._layers[number] = kinds[block]
        sizes = [_local_size(step, number) for number in range(len(problem.stages))]
        self.program, self.problem, schedule = training_program(step, sizes)
        if lowers_rings:
            self.program = lower_rings(self.program)
        self._last = _last_micro_batches(schedule)
        self._tokens = self._targets = torch.zeros(0)
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
        layer, buffer = self._layers[number], self.program.buffer_of[f"w{number}"]
        count = self.problem.stages[number].parameters
        vector = torch.zeros(count)
        vector[: layer.size] = layer.local_weights(weights, number, self.rank)
        assert buffer.layout is not None
        (mine,) = buffer.layout.indices((count,), self.rank)
        return vector[torch.from_numpy(mine)]

    def run(self, tokens: Array, targets: Array) -> float:
        """Run one step, and return the sum of the loss over the tokens of this rank's micro-batches.

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
        return 0.0 if losses is None else float(losses.sum())

    def worst_difference(self, weights: Arrays) -> float:
        """Return the largest difference of this rank's weights from those of a whole model, given by name."""
        worst = 0.0
        for number in self._layers:
            own, expected = self._bound.inputs[f"w{number}"], self._own_weights(weights, number)
            worst = max(worst, float((own - expected).abs().max()))
        return worst

    @property
    def has_loss(self) -> bool:
        """Return whether this rank has the last layer."""
        return any(layer.problem.has_loss for layer in self._layers.values())

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
        return self._optimizer.update(w, m, v, dw, self._count)

    def _forward_of(self, number: int) -> Callable[..., Any]:
        layer = self._layers[number]

        def forward(stash: dict[str, Any], x: Values, parameters: Values, micro_batch: int) -> Values:
            given = self._given(layer, x, micro_batch)
            stash |= layer.run_forward(parameters, given)
            out = layer.outputs()
            if layer.problem.has_loss:
                return out[LOSS.lower()].reshape(1, 1)
            return out["z"].reshape(1, -1)

        return forward

    def _backward_of(self, number: int) -> Callable[..., Any]:
        layer = self._layers[number]
        last = self._last[number]

        def backward(
            stash: dict[str, Any], arriving: Values, parameters: Values, total: Values, micro_batch: int
        ) -> list[Values]:
            given = dict(stash)
            if not layer.problem.has_loss:
                given["dz"] = arriving.reshape(layer.outputs()["z"].shape)
            outs = layer.run_backward(parameters, given)
            sums = total.clone()
            sums[: layer.size] += layer.gradients
            if micro_batch == last:
                layer.sum_over_tokens(sums)
            return [sums] if layer.problem.has_embedding else [outs["dx"].reshape(1, -1), sums]

        return backward

    def _given(self, layer: _Layer, x: Values, micro_batch: int) -> dict[str, Values]:
        """Return the inputs of a forward part, besides weights."""
        program, given = layer.forward_program, dict[str, Values]()
        vocabulary = layer.problem.vocabulary
        for buffer in program.buffers:
            if buffer.kind != "input" or buffer.name in layer.slices:
                continue
            assert buffer.tensor is not None and buffer.layout is not None
            shape = program.tensor_of[buffer.tensor].shape
            if buffer.tensor in (IDS_IN, IDS_OUT):
                whole = torch.arange(vocabulary, dtype=torch.float32)
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


def _local_size(step: Step, layer: int) -> int:
    """Return the elements of a layer's weights on each rank."""
    program = _parts_of(step, layer).forward
    shapes = (
        buffer.layout.local_shape(program.tensor_of[buffer.tensor].shape, 0)
        for buffer in _weight_buffers(program)
        if buffer.layout is not None and buffer.tensor is not None
    )
    return sum(map(math.prod, shapes))


def _last_micro_batches(schedule: Schedule) -> dict[int, int]:
    """Return the micro-batch of the last backward part of each stage."""
    last: dict[int, int] = {}
    for order in schedule.actions:
        for action in order:
            if action.micro_batch is not None:
                last[action.stage] = action.micro_batch
    return last
