"""Write one stage of a step: includes of its layers' block programs, its gradients, and the optimizer.

A forward action is an include of the forward program of each layer, a loop over layers; a backward action
likewise, from the last layer to the first. What a layer keeps lies in slots, one for each layer and micro-batch in
flight. Weights and gradients lie in buckets (`algorithms.step.buckets`). Calls named "software" take what the
software stack adds to a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from meshweave.algorithms.block.problem import MESH
from meshweave.algorithms.pipeline.actions import ActionKind
from meshweave.algorithms.pipeline.boundary import Boundary
from meshweave.algorithms.pipeline.program import COMPUTE
from meshweave.algorithms.pipeline.slots import Stashes
from meshweave.algorithms.step.buckets import StageBuckets
from meshweave.algorithms.step.layer_runs import LAYER, LayerAt, layer_runs
from meshweave.algorithms.step.stage_settings import BucketRanks
from meshweave.algorithms.step.units import (
    CONSTANTS,
    PER_MICRO_BATCH,
    RESIDUALS,
    PartKind,
    Unit,
    local_shape,
)
from meshweave.base.errors import UnsupportedError
from meshweave.describe.layout import Layout
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program import Buffer, Include, Program, Repeat, Statement, Submesh, Tensor
from meshweave.ir.program.expressions import Index
from meshweave.ir.program.ops import Call, Op
from meshweave.ir.program.views import FULL, View

_Layer = tuple[Unit, Index]
"""A unit, and the number of a layer among those of its kind."""
PART_OF_ACTION: dict[ActionKind, PartKind] = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRAD: "input_grad",
    ActionKind.WEIGHT_GRAD: "weight_grad",
}


@dataclass(frozen=True)
class _StagePart:
    """A part of a stage, for micro-batch `at`."""

    part: PartKind
    at: Index
    label: str


class BlockStage:
    """Writes one stage on its mesh.

    Args:
        number: the stage's number, from 0.
        mesh: its ranks on the axes data, context and two of tensor parallelism.
        ranks: (ranks of the buckets of all weights but experts', ranks of those of experts or None).
        units: (unit, how many the stage has) of each piece: kinds of layers, embedding, head.
        layers: the names of the units of its layers, in order.
        boundaries: its boundaries, by (stage, next stage, "h" for the residual or "g" for its gradient).
        stashes: of how many micro-batches buffers are kept at once (`Stashes`).
        last: the micro-batch whose backward part is the last on this stage.
        is_split: whether gradients of weights are computed apart from those of the residual.

    Raises:
        UnsupportedError: the stage has no unit: no layer, embedding or head.
    """

    def __init__(
        self,
        number: int,
        mesh: Mesh,
        ranks: tuple[BucketRanks, BucketRanks | None],
        units: tuple[tuple[Unit, int], ...],
        layers: tuple[str, ...],
        boundaries: Mapping[tuple[int, int, str], Boundary],
        stashes: Stashes,
        last: int,
        *,
        is_split: bool,
    ) -> None:
        self.number, self.mesh, self.ranks = number, mesh, ranks
        self.settings = ranks[0].settings
        self.units = {unit.name: (unit, count) for unit, count in units}
        self.boundaries, self.stashes, self.is_split = boundaries, stashes, is_split
        self.kinds, self.layers, self.runs = layers, len(layers), layer_runs(layers)
        if not self.units:
            raise UnsupportedError(f"stage {number} has no layer; give fewer stages")
        self.buckets = StageBuckets(number, mesh, ranks, self.units, last)
        for unit, _ in units if is_split else ():
            names = (f"{each.name}_d{weight.name}" for each in unit.buckets for weight in each.weights)
            ends = tuple(f"_{name}" for name in unit.split.early)
            self.buckets.early |= {name: stashes.between for name in names if ends and name.endswith(ends)}

    # --- declarations -----------------------------------------------------------------------------------

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """Return the meshes on which the buckets of weights lie: all but experts', then experts' if any."""
        return tuple(each.mesh for each in self.ranks if each is not None)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of the stage's weights, gradients and updated weights, one vector per unit."""
        yield from self.buckets.tensors()

    def buffers(self, layouts: Mapping[str, Layout]) -> Iterator[Buffer]:
        """Yield the buffers of the stage; `layouts` are not read.

        They are buckets, weight matrices and their gradients, the residual and its gradient, what layers keep
        for their backward parts, constants, and losses.
        """
        del layouts
        residual, scratch = self._residual_shape(), self.buckets.scratch
        if residual is not None:
            dtype, places = self.settings.dtype, self.layers + 1
            yield scratch("x", residual, dtype, self._stashes("x") * places)
            yield scratch("g", residual, dtype, self.stashes.between * places if self.is_split else 2)
        for unit, count in self.units.values():
            for each in unit.buckets:
                yield from self.buckets.buffers(each, count)
                slots = self.buckets.matrix_slots(each)
                for weight in each.weights:
                    yield scratch(f"{each.name}_{weight.name}", weight.shape, weight.dtype, slots)
                    name = f"{each.name}_d{weight.name}"
                    slots_of = self.buckets.early.get(name, 0) * count or 1
                    yield scratch(name, weight.shape, weight.dtype, slots_of)
            for buffer in unit.kept:
                shape, slots = (
                    local_shape(unit.parts.forward, buffer),
                    self._stashes(buffer.name, unit) * count,
                )
                yield scratch(f"{unit.name}_{buffer.name}", shape, buffer.dtype, slots)
            for name in unit.split.passed if self.is_split else ():
                buffer = unit.split.weight_grad.buffer_of[name]
                shape, slots = local_shape(unit.split.weight_grad, buffer), self.stashes.between * count
                yield scratch(f"{unit.name}_{name}", shape, buffer.dtype, slots)
            for names in (PER_MICRO_BATCH, CONSTANTS, ("loss",)):
                for program, buffer in unit.buffers_of(names):
                    slots = self._stashes(buffer.name, unit) if names == PER_MICRO_BATCH else 1
                    shape = local_shape(program, buffer)
                    yield scratch(f"{unit.name}_{buffer.name}", shape, buffer.dtype, slots)

    def _stashes(self, name: str, unit: Unit | None = None) -> int:
        """Return of how many micro-batches what the forward part of a unit leaves, or the residual, is kept."""
        is_late = self.is_split and (unit is None or name in unit.read_for_weights)
        return self.stashes.until_weight_grad if is_late else self.stashes.until_input_grad

    def _residual_shape(self) -> tuple[int, ...] | None:
        for unit, _ in self.units.values():
            for program, buffer in unit.buffers_of(RESIDUALS):
                return local_shape(program, buffer)
        return None

    # --- views ------------------------------------------------------------------------------------------

    def _stream(self, place: Index, micro_batch: Index) -> View:
        """Return the residual before layer `place`, or after the last."""
        shape = self._residual_shape() or ()
        if place == 0 and "embedding" not in self.units and self.number:
            return self.boundaries[self.number - 1, self.number, "h"].in_view(micro_batch)
        ends = (self.number, self.number + 1, "h")
        if place == self.layers and ends in self.boundaries:
            return self.boundaries[ends].out_view(micro_batch)
        slot = (micro_batch % self._stashes("x")) * (self.layers + 1) + place
        return self.buckets.whole("x", len(shape), slot)

    def _gradient(self, place: Index, micro_batch: Index) -> View:
        """Return the gradient of the residual before layer `place`, or after the last."""
        shape = self._residual_shape() or ()
        ends = (self.number, self.number + 1, "g")
        if place == self.layers and ends in self.boundaries:
            return self.boundaries[ends].in_view(micro_batch)
        if place == 0 and self.number:
            return self.boundaries[self.number - 1, self.number, "g"].out_view(micro_batch)
        slot = (
            (micro_batch % self.stashes.between) * (self.layers + 1) + place if self.is_split else place % 2
        )
        return self.buckets.whole("g", len(shape), slot)

    # --- actions ----------------------------------------------------------------------------------------

    def begin(self, *, gathers: bool) -> Iterator[Statement]:
        """Yield the statements that run once before the first action of the stage.

        Weights that stay gathered for the whole step are gathered, gradients are zeroed, constants are filled,
        and, without ZeRO, weights are unpacked into matrices. `gathers` changes nothing: the stage's settings
        say which weights are gathered here.
        """
        del gathers
        yield from self.buckets.begin()

    def end(self, *, reduces: bool) -> Iterator[Statement]:
        """Yield the statements after the last action: exposed reductions, and the update of the weights.

        `reduces` changes nothing: the stage's settings say which gradients are reduced here.
        """
        del reduces
        yield from self.buckets.end()

    def action(self, kind: ActionKind, micro_batch: Index, label: str) -> Iterator[Statement]:
        """Yield the statements of a forward, backward, input gradient or weight gradient; none for others.

        Args:
            micro_batch: the micro-batch's number, or an expression for it.
            label: the name of the includes of layers; other ops have names of their own.
        """
        part = PART_OF_ACTION.get(kind)
        if part == "forward":
            yield from self._forward(_StagePart(part, micro_batch, label))
        elif part is not None:
            yield from self._backward(_StagePart(part, micro_batch, label))

    def _forward(self, action: _StagePart) -> Iterator[Statement]:
        at = action.at
        for name in ("embedding", "head"):
            if name in self.units:
                yield from self._batch(self.units[name][0], at)
        arrived = (self._stream(0, at),) if self.number else ()
        yield from self.buckets.waits_to_gather(self._first_unit, 0, arrived, is_forward=True)
        if "embedding" in self.units:
            yield from self._include(self._of_layer("embedding", 0), {"x": self._stream(0, at)}, action)
        elif not self.number:
            yield Call(
                fn="batch", outs=(self._stream(0, at),), ins=(), args=(at,), lane=COMPUTE, name="batch"
            )
        yield from self._over_layers(lambda layer: self._layer(layer, action))
        if "head" in self.units:
            yield from self._include(self._of_layer("head", 0), {"z": self._stream(self.layers, at)}, action)

    @property
    def _first_unit(self) -> Unit:
        """Return the unit with which the stage begins."""
        names = ("embedding", *self.kinds[:1], "head")
        return next(self.units[name][0] for name in names if name in self.units)

    def _batch(self, unit: Unit, at: Index) -> Iterator[Statement]:
        """Yield the call that reads the tokens of a micro-batch."""
        for program, buffer in unit.buffers_of(PER_MICRO_BATCH):
            dims = len(local_shape(program, buffer))
            slot = at % self._stashes(buffer.name, unit)
            out = self.buckets.whole(f"{unit.name}_{buffer.name}", dims, slot)
            yield Call(fn=buffer.name, outs=(out,), ins=(), args=(at,), lane=COMPUTE, name=buffer.name)

    def _layer(self, layer: LayerAt, action: _StagePart) -> Iterator[Statement]:
        streams = {"x": self._stream(layer.place, action.at), "z": self._stream(layer.place + 1, action.at)}
        yield from self._include(self._of_layer(layer.kind, layer.number), streams, action)

    def _over_layers(
        self, write: Callable[[LayerAt], Iterator[Statement]], *, backwards: bool = False
    ) -> Iterator[Statement]:
        """Yield what `write` yields for each layer, in loops where they repeat."""
        for run in reversed(self.runs) if backwards else self.runs:
            body = (statement for layer in run.layers(backwards=backwards) for statement in write(layer))
            if run.turns > 1:
                yield Repeat(LAYER.name, run.turns, tuple(body))
            else:
                yield from body

    def _backward(self, action: _StagePart) -> Iterator[Statement]:
        """Yield a backward action, or the part of it that is for one of both gradients."""
        at = action.at
        if action.part != "weight_grad":
            yield from self._begin_backward(at)
        if "head" in self.units:
            gradients = {"z": self._stream(self.layers, at), "dz": self._gradient(self.layers, at)}
            yield from self._unit_backward(self._of_layer("head", 0), gradients, action, None)
        elif action.part == "weight_grad":
            pass
        elif (self.number, self.number + 1, "g") not in self.boundaries:
            out = self._gradient(self.layers, at)
            yield Call(fn="gradient", outs=(out,), ins=(), args=(at,), lane=COMPUTE, name="gradient of loss")
        else:  # what is computed again is so once the gradient is there, as by autograd
            ins = (self._gradient(self.layers, at),)
            yield Call(fn="arrived", outs=(), ins=ins, lane=COMPUTE, name="gradient is here")
        yield from self._over_layers(lambda layer: self._layer_back(layer, action), backwards=True)
        after = self._of_layer(self.kinds[0], 0) if self.layers else self._head
        if "embedding" in self.units:
            unit = self._of_layer("embedding", 0)
            yield from self._unit_backward(unit, {"dx": self._gradient(0, at)}, action, after)
            after = unit
        if action.part != "input_grad":
            assert after is not None
            yield from self.buckets.reductions_each(*after)
            sent = (self._gradient(0, at),) if self.number and action.part == "backward" else ()
            yield from self.buckets.waits_for_reductions(after[0], sent)

    def _begin_backward(self, at: Index) -> Iterator[Op]:
        """Yield what the first gather of a backward action waits for, if it gathers weights."""
        if self.layers:
            arrives = (self.number, self.number + 1, "g") in self.boundaries
            ins = (self._gradient(self.layers, at),) if arrives else ()
            unit, count = self.units[self.kinds[-1]]
            yield from self.buckets.waits_to_gather(unit, count - 1, ins, is_forward=False)

    def _of_layer(self, kind: str, number: Index) -> _Layer:
        return self.units[kind][0], number

    @property
    def _head(self) -> _Layer | None:
        return self._of_layer("head", 0) if "head" in self.units else None

    def _layer_back(self, layer: LayerAt, action: _StagePart) -> Iterator[Statement]:
        streams = {
            "x": self._stream(layer.place, action.at),
            "dz": self._gradient(layer.place + 1, action.at),
            "dx": self._gradient(layer.place, action.at),
        }
        after = self._head if layer.after is None else self._of_layer(layer.after.kind, layer.after.number)
        yield from self._unit_backward(self._of_layer(layer.kind, layer.number), streams, action, after)

    def _unit_backward(
        self, layer: _Layer, streams: Mapping[str, View], action: _StagePart, after: _Layer | None
    ) -> Iterator[Statement]:
        """Yield the backward part of a layer; `after` is what comes after it in the model."""
        yield from self._include(layer, streams, action, after)
        if action.part != "input_grad":
            yield from self.buckets.gradients(*layer, action.at)

    def _include(
        self, layer: _Layer, streams: Mapping[str, View], action: _StagePart, after: _Layer | None = None
    ) -> Iterator[Statement]:
        """Yield the include of a part of a layer after what makes its weights, and what software adds."""
        (unit, number), part = layer, action.part
        program = unit.program(part)
        if part == "weight_grad":
            yield from () if after is None else self.buckets.reductions_each(*after)
        else:
            is_reducing = after is not None and part == "backward"
            then = self.buckets.reductions_each(*after) if after is not None and is_reducing else ()
            yield from self.buckets.weights(unit, number, action.at, is_forward=part == "forward", then=then)
        if extra := unit.software_flops(part):
            ins = (streams["x" if "x" in streams else "z"],) if part == "forward" else ()
            yield Call(fn="software", outs=(), ins=ins, flops=extra, lane=COMPUTE, name="software")
        if program is None:
            return
        yield Include(
            name=action.label,
            part=f"{unit.name}_{part}",
            program=program,
            meshes=tuple(self._submeshes(program)),
            buffers=tuple(self._arguments(layer, program, streams, action.at)),
            lanes=tuple(
                (lane.name, COMPUTE if self.settings.waits_for_tensor else lane.name)
                for lane in program.lanes
            ),
        )
        if unit.is_layer and part != "weight_grad":
            yield from self.buckets.release_weights(unit, number)

    def _submeshes(self, program: Program) -> Iterator[tuple[str, Submesh]]:
        """Yield what the meshes of a part of a layer are here: that of blocks, and that of experts."""
        for mesh in program.meshes:
            experts = self.ranks[1]
            own = self.mesh if mesh.name == MESH or experts is None else experts.mesh
            yield mesh.name, Submesh(own.name, (FULL,) * len(own.axes))

    def _arguments(
        self, layer: _Layer, program: Program, streams: Mapping[str, View], at: Index
    ) -> Iterator[tuple[str, View]]:
        """Yield what the inputs and outputs of a part of a layer are here."""
        unit, number = layer
        count = self.units[unit.name][1]
        owners = {weight.name: each for each in unit.buckets for weight in each.weights}
        terms = {
            f"d{weight.name}": self.buckets.term(each, weight, number, at)
            for each in unit.buckets
            for weight in each.weights
        }
        for buffer in program.buffers:
            if buffer.kind not in ("input", "output"):
                continue
            assert buffer.tensor is not None
            name, dims = buffer.name, len(program.tensor_of[buffer.tensor].shape)
            slot: Index = 0
            if name in streams:
                yield name, streams[name]
                continue
            if name in terms:
                yield name, terms[name]
                continue
            if name in owners:
                yield name, self.buckets.matrix(owners[name], name, dims, number)
                continue
            if name in unit.parts.kept:
                slot = (at % self._stashes(name, unit)) * count + number
            elif self.is_split and name in unit.split.passed:
                slot = (at % self.stashes.between) * count + number
            elif name in PER_MICRO_BATCH:
                slot = at % self._stashes(name, unit)
            yield name, self.buckets.whole(f"{unit.name}_{name}", dims, slot)
