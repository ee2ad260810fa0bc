"""Write one stage of a step: includes of its layers' block programs, its gradients, and the optimizer.

A forward action is an include of the forward program of each layer, a loop over layers; a backward action
likewise, from the last layer to the first. What a layer keeps lies in slots, one for each layer and micro-batch in
flight. Weights and gradients lie in buckets (`algorithms.step.buckets`). Calls named "software" take what the
software stack adds to a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from meshweave.algorithms.block.problem import MESH
from meshweave.algorithms.pipeline.actions import ActionKind
from meshweave.algorithms.pipeline.boundary import Boundary
from meshweave.algorithms.pipeline.program import COMPUTE
from meshweave.algorithms.step.buckets import StageBuckets, StageSettings
from meshweave.algorithms.step.layer_runs import LAYER, LayerAt, layer_runs
from meshweave.algorithms.step.units import CONSTANTS, PER_MICRO_BATCH, RESIDUALS, Unit, local_shape
from meshweave.base.errors import UnsupportedError
from meshweave.describe.layout import Layout
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program import Buffer, Include, Program, Repeat, Statement, Submesh, Tensor
from meshweave.ir.program.expressions import Index
from meshweave.ir.program.ops import Call, Op
from meshweave.ir.program.views import FULL, View


class BlockStage:
    """Writes one stage on its mesh.

    Args:
        number: of the stage.
        mesh: its ranks, with the axes of the block programs.
        replicas: the same ranks, with axes for groups of replicas and one for tensor-parallel ranks.
        units: pieces by name, and how many of each there are here.
        layers: the names of the units of its layers, in order.
        boundaries: those of its edges, by (source, target, "h" or "g").
        stashes: the most micro-batches of which something is kept.
        last: the micro-batch whose backward part is the last here.
    """

    def __init__(
        self,
        number: int,
        mesh: Mesh,
        replicas: Mesh,
        units: tuple[tuple[Unit, int], ...],
        layers: tuple[str, ...],
        settings: StageSettings,
        boundaries: Mapping[tuple[int, int, str], Boundary],
        stashes: int,
        last: int,
    ) -> None:
        self.number, self.mesh, self.replicas, self.settings = number, mesh, replicas, settings
        self.units = {unit.name: (unit, count) for unit, count in units}
        self.boundaries, self.stashes = boundaries, stashes
        self.kinds, self.layers, self.runs = layers, len(layers), layer_runs(layers)
        if not self.units:
            raise UnsupportedError(f"stage {number} has no layer; give fewer stages")
        self.buckets = StageBuckets(number, mesh, replicas, self.units, settings, last)

    # --- declarations -----------------------------------------------------------------------------------

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """Return the mesh of replicas."""
        return (self.replicas,)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of its buckets."""
        yield from self.buckets.tensors()

    def buffers(self, layouts: Mapping[str, Layout]) -> Iterator[Buffer]:
        """Yield buckets, matrices, what is kept, and gradients of matrices. `layouts` are not read."""
        del layouts
        residual, scratch = self._residual_shape(), self.buckets.scratch
        if residual is not None:
            dtype, slots = self.settings.dtype, self.stashes * (self.layers + 1)
            yield scratch("x", residual, dtype, slots)
            yield scratch("g", residual, dtype, 2)
        for unit, count in self.units.values():
            yield from self.buckets.buffers(unit, count)
            slots = self.buckets.matrix_slots(unit)
            for weight in unit.weights:
                yield scratch(f"{unit.name}_{weight.name}", weight.shape, weight.dtype, slots)
                yield scratch(f"{unit.name}_d{weight.name}", weight.shape, weight.dtype)
            for buffer in unit.kept:
                shape = local_shape(unit.parts.forward, buffer)
                yield scratch(f"{unit.name}_{buffer.name}", shape, buffer.dtype, self.stashes * count)
            for names, slots in ((PER_MICRO_BATCH, self.stashes), (CONSTANTS, 1), (("loss",), 1)):
                for program, buffer in unit.buffers_of(names):
                    shape = local_shape(program, buffer)
                    yield scratch(f"{unit.name}_{buffer.name}", shape, buffer.dtype, slots)

    def _residual_shape(self) -> tuple[int, ...] | None:
        for unit, _ in self.units.values():
            for program, buffer in unit.buffers_of(RESIDUALS):
                return local_shape(program, buffer)
        return None

    # --- views ------------------------------------------------------------------------------------------

    def _at_layer(self, micro_batch: Index, layer: Index, count: int) -> Index:
        return (micro_batch % self.stashes) * count + layer

    def _stream(self, place: Index, micro_batch: Index) -> View:
        """Return the residual before layer `place`, or after the last."""
        shape = self._residual_shape() or ()
        if place == 0 and "embedding" not in self.units and self.number:
            return self.boundaries[self.number - 1, self.number, "h"].in_view(micro_batch)
        ends = (self.number, self.number + 1, "h")
        if place == self.layers and ends in self.boundaries:
            return self.boundaries[ends].out_view(micro_batch)
        return self.buckets.whole("x", len(shape), self._at_layer(micro_batch, place, self.layers + 1))

    def _gradient(self, place: Index, micro_batch: Index) -> View:
        """Return the gradient of the residual before layer `place`, or after the last."""
        shape = self._residual_shape() or ()
        ends = (self.number, self.number + 1, "g")
        if place == self.layers and ends in self.boundaries:
            return self.boundaries[ends].in_view(micro_batch)
        if place == 0 and self.number:
            return self.boundaries[self.number - 1, self.number, "g"].out_view(micro_batch)
        return self.buckets.whole("g", len(shape), place % 2)

    # --- actions ----------------------------------------------------------------------------------------

    def begin(self, *, gathers: bool) -> Iterator[Statement]:
        """Yield zeros of gradients, gathers of sharded weights, and the matrices of all layers."""
        del gathers
        yield from self.buckets.begin()

    def end(self, *, reduces: bool) -> Iterator[Statement]:
        """Yield reductions that nothing is beside, and the update of the weights."""
        del reduces
        yield from self.buckets.end()

    def action(self, kind: ActionKind, micro_batch: Index, label: str) -> Iterator[Statement]:
        """Yield the statements of a forward or a backward action. Raises UnsupportedError for others."""
        if kind is ActionKind.FORWARD:
            yield from self._forward(micro_batch, label)
        elif kind is ActionKind.BACKWARD:
            yield from self._backward(micro_batch, label)
        else:
            raise UnsupportedError(
                f"a block program computes both gradients at once; {label} is for one of them; give a schedule "
                "with whole backward parts, such as 1f1b"
            )

    def _forward(self, at: Index, label: str) -> Iterator[Statement]:
        for name in ("embedding", "head"):
            if name in self.units:
                yield from self._batch(self.units[name][0], at)
        yield from self._waits_to_gather(at, is_forward=True)
        if "embedding" in self.units:
            unit = self.units["embedding"][0]
            yield from self._include(unit, True, {"x": self._stream(0, at)}, at, 0, label)
        elif not self.number:
            yield Call(
                fn="batch", outs=(self._stream(0, at),), ins=(), args=(at,), lane=COMPUTE, name="batch"
            )
        yield from self._over_layers(lambda layer: self._layer(layer, at, label))
        if "head" in self.units:
            unit = self.units["head"][0]
            yield from self._include(unit, True, {"z": self._stream(self.layers, at)}, at, 0, label)

    def _waits_to_gather(self, at: Index, *, is_forward: bool) -> Iterator[Op]:
        """Yield what the first gather of an action waits for, if each gathers weights."""
        if is_forward:
            ins = (self._stream(0, at),) if self.number else ()
            yield from self.buckets.waits_to_gather(self._first_unit, 0, ins, is_forward=True)
        elif self.layers:
            arrives = (self.number, self.number + 1, "g") in self.boundaries
            ins = (self._gradient(self.layers, at),) if arrives else ()
            unit, count = self.units[self.kinds[-1]]
            yield from self.buckets.waits_to_gather(unit, count - 1, ins, is_forward=False)

    @property
    def _first_unit(self) -> Unit:
        """Return the unit with which the stage begins."""
        names = ("embedding", *self.kinds[:1], "head")
        return next(self.units[name][0] for name in names if name in self.units)

    def _batch(self, unit: Unit, at: Index) -> Iterator[Statement]:
        """Yield the call that reads the tokens of a micro-batch."""
        for program, buffer in unit.buffers_of(PER_MICRO_BATCH):
            dims = len(local_shape(program, buffer))
            out = self.buckets.whole(f"{unit.name}_{buffer.name}", dims, at % self.stashes)
            yield Call(fn=buffer.name, outs=(out,), ins=(), args=(at,), lane=COMPUTE, name=buffer.name)

    def _layer(self, layer: LayerAt, at: Index, label: str) -> Iterator[Statement]:
        streams = {"x": self._stream(layer.place, at), "z": self._stream(layer.place + 1, at)}
        yield from self._include(self.units[layer.kind][0], True, streams, at, layer.number, label)

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

    def _backward(self, at: Index, label: str) -> Iterator[Statement]:
        yield from self._waits_to_gather(at, is_forward=False)
        if "head" in self.units:
            gradients = {"z": self._stream(self.layers, at), "dz": self._gradient(self.layers, at)}
            yield from self._unit_backward(self.units["head"][0], gradients, at, 0, label)
        elif (self.number, self.number + 1, "g") not in self.boundaries:
            out = self._gradient(self.layers, at)
            yield Call(fn="gradient", outs=(out,), ins=(), args=(at,), lane=COMPUTE, name="gradient of loss")
        else:  # what is computed again is so once the gradient is there, as by autograd
            ins = (self._gradient(self.layers, at),)
            yield Call(fn="arrived", outs=(), ins=ins, lane=COMPUTE, name="gradient is here")
        yield from self._over_layers(lambda layer: self._layer_back(layer, at, label), backwards=True)
        after: tuple[Unit, Index] | None = self._of_layer(self.kinds[0], 0) if self.layers else self._head
        if "embedding" in self.units:
            gradients = {"dx": self._gradient(0, at)}
            unit = self.units["embedding"][0]
            yield from self._unit_backward(unit, gradients, at, 0, label, after)
            after = unit, 0
        assert after is not None
        yield from self.buckets.reductions_beside(*after)
        yield from self.buckets.waits_for_reductions(after[0])

    def _of_layer(self, kind: str, number: Index) -> tuple[Unit, Index]:
        return self.units[kind][0], number

    @property
    def _head(self) -> tuple[Unit, Index] | None:
        return self._of_layer("head", 0) if "head" in self.units else None

    def _layer_back(self, layer: LayerAt, at: Index, label: str) -> Iterator[Statement]:
        streams = {
            "x": self._stream(layer.place, at),
            "dz": self._gradient(layer.place + 1, at),
            "dx": self._gradient(layer.place, at),
        }
        after = self._head if layer.after is None else self._of_layer(layer.after.kind, layer.after.number)
        yield from self._unit_backward(self.units[layer.kind][0], streams, at, layer.number, label, after)

    def _unit_backward(
        self,
        unit: Unit,
        streams: Mapping[str, View],
        at: Index,
        layer: Index,
        label: str,
        after: tuple[Unit, Index] | None = None,
    ) -> Iterator[Statement]:
        """Yield the backward part of a layer; `after` is what comes after it in the model."""
        yield from self._include(unit, False, streams, at, layer, label, after)
        yield from self.buckets.gradients(unit, layer, at)

    def _include(
        self,
        unit: Unit,
        is_forward: bool,
        streams: Mapping[str, View],
        at: Index,
        layer: Index,
        label: str,
        after: tuple[Unit, Index] | None = None,
    ) -> Iterator[Statement]:
        program = unit.parts.forward if is_forward else unit.parts.backward
        then = () if after is None else self.buckets.reductions_beside(*after)
        yield from self.buckets.weights(unit, layer, at, is_forward=is_forward, then=then)
        extra = unit.extra_flops[0 if is_forward else 1]
        if extra:
            ins = (streams["x" if "x" in streams else "z"],) if is_forward else ()
            yield Call(fn="software", outs=(), ins=ins, flops=extra, lane=COMPUTE, name="software")
        yield Include(
            name=label,
            part=f"{unit.name}_{'forward' if is_forward else 'backward'}",
            program=program,
            meshes=((MESH, Submesh(self.mesh.name, (FULL,) * len(self.mesh.axes))),),
            buffers=tuple(self._arguments(unit, program, streams, at, layer)),
            lanes=tuple(
                (lane.name, COMPUTE if self.settings.waits_for_tensor else lane.name)
                for lane in program.lanes
            ),
        )

    def _arguments(
        self, unit: Unit, program: Program, streams: Mapping[str, View], at: Index, layer: Index
    ) -> Iterator[tuple[str, View]]:
        """Yield what the inputs and outputs of a part of a layer are here."""
        count = self.units[unit.name][1]
        weights = {weight.name for weight in unit.weights}
        for buffer in program.buffers:
            if buffer.kind not in ("input", "output"):
                continue
            assert buffer.tensor is not None
            dims = len(program.tensor_of[buffer.tensor].shape)
            slot: Index = 0
            if buffer.name in streams:
                yield buffer.name, streams[buffer.name]
                continue
            if buffer.name in weights:
                yield buffer.name, self.buckets.matrix(unit, buffer.name, dims, layer)
                continue
            if buffer.name in unit.parts.kept:
                slot = self._at_layer(at, layer, count)
            elif buffer.name in PER_MICRO_BATCH:
                slot = at % self.stashes
            yield buffer.name, self.buckets.whole(f"{unit.name}_{buffer.name}", dims, slot)
