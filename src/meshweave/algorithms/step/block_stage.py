"""Write one stage of a step: includes of its layers' block programs, its gradients, and the optimizer.

A forward action is an include of the forward program of each layer, a loop over layers; a backward action
likewise, from the last layer to the first. What a layer keeps lies in slots, one for each layer and micro-batch in
flight.

    unpack        a call that makes the matrices of a layer of its bucket (they are views of it; it costs nothing)
    accumulate    a call that adds gradients to the bucket (products do that as they write; it costs nothing)
    software      what the software stack adds to a layer
    optimizer     the update of a bucket, or of a rank's shard of it

In the last micro-batch each layer's bucket is summed over tensor-parallel ranks where these have terms, and
reduced over replicas, in a lane of its own. Under ZeRO-1 it is reduced into shards, and weights are gathered at
the beginning of the step, in the order of the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from meshweave.algorithms.block.problem import MESH
from meshweave.algorithms.pipeline.actions import ActionKind
from meshweave.algorithms.pipeline.boundary import Boundary
from meshweave.algorithms.pipeline.program import COMPUTE, PARAMETERS
from meshweave.algorithms.step.compose import ADAM_STEP_BYTES
from meshweave.algorithms.step.units import CONSTANTS, PER_MICRO_BATCH, RESIDUALS, Unit, local_shape
from meshweave.base.errors import UnsupportedError
from meshweave.describe.layout import Layout, Replicate, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program import Buffer, Include, Repeat, Statement, Submesh, Tensor, When
from meshweave.ir.program.expressions import Index, Var, equal
from meshweave.ir.program.ops import AllGather, AllReduce, Call, Op, ReduceScatter, Zero
from meshweave.ir.program.views import FULL, Range, View

LAYER = Var("l")
"""The number of the layer, in loops over layers."""


@dataclass(frozen=True)
class StageSettings:
    """What the stages of a step share.

    Attributes:
        dtype, gradient_dtype: of weights and activations, and of buckets of gradients.
        groups: the names of the axes of replicas on the mesh of replicas: the one that shards first.
        is_sharded: whether optimizer states are sharded over the first (ZeRO-1).
        overlaps: whether reductions and gathers run beside the layers.
    """

    dtype: str
    gradient_dtype: str
    groups: tuple[str, ...]
    is_sharded: bool
    overlaps: bool


class BlockStage:
    """Writes one stage on its mesh.

    Args:
        number: of the stage.
        mesh: its ranks, with the axes of the block programs.
        replicas: the same ranks, with axes for groups of replicas and one for tensor-parallel ranks.
        units: pieces by name, and how many of each there are here.
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
        settings: StageSettings,
        boundaries: Mapping[tuple[int, int, str], Boundary],
        stashes: int,
        last: int,
    ) -> None:
        self.number, self.mesh, self.replicas, self.settings = number, mesh, replicas, settings
        self.units = {unit.name: (unit, count) for unit, count in units}
        self.boundaries, self.stashes, self.last = boundaries, stashes, last
        self.layers = self.units["layer"][1] if "layer" in self.units else 0
        if not self.units:
            raise UnsupportedError(f"stage {number} has no layer; give fewer stages")
        self._lane = PARAMETERS if settings.overlaps else COMPUTE

    # --- declarations -----------------------------------------------------------------------------------

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """Return the mesh of replicas."""
        return (self.replicas,)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the buckets of weights, of gradients and of updated weights of all tensor-parallel ranks."""
        settings, parts = self.settings, self.replicas.size("tensor")
        parts *= self.replicas.size(settings.groups[0]) if settings.is_sharded else 1
        for unit, count in self.units.values():
            shape = (parts * count * unit.elements // unit.shards,)
            yield Tensor(self._tensor(unit, "W"), shape, settings.dtype)
            yield Tensor(self._tensor(unit, "DW"), shape, settings.gradient_dtype)
            yield Tensor(self._tensor(unit, "NEW"), shape, settings.dtype)

    def buffers(self, layouts: Mapping[str, Layout]) -> Iterator[Buffer]:
        """Yield buckets, matrices, what is kept, and gradients of matrices. `layouts` are not read."""
        del layouts
        residual = self._residual_shape()
        if residual is not None:
            dtype, slots = self.settings.dtype, self.stashes * (self.layers + 1)
            yield self._scratch("x", residual, dtype, slots)
            yield self._scratch("g", residual, dtype, 2)
        for unit, count in self.units.values():
            yield from self._bucket_buffers(unit, count)
            for weight in unit.weights:
                yield self._scratch(f"{unit.name}_{weight.name}", weight.shape, weight.dtype, count)
                yield self._scratch(f"{unit.name}_d{weight.name}", weight.shape, weight.dtype)
            for buffer in unit.kept:
                shape = local_shape(unit.parts.forward, buffer)
                yield self._scratch(f"{unit.name}_{buffer.name}", shape, buffer.dtype, self.stashes * count)
            for names, slots in ((PER_MICRO_BATCH, self.stashes), (CONSTANTS, 1), (("loss",), 1)):
                for program, buffer in unit.buffers_of(names):
                    shape = local_shape(program, buffer)
                    yield self._scratch(f"{unit.name}_{buffer.name}", shape, buffer.dtype, slots)

    def _bucket_buffers(self, unit: Unit, count: int) -> Iterator[Buffer]:
        settings, mesh = self.settings, self.replicas
        split = ("tensor", *(settings.groups[:1] if settings.is_sharded else ()))
        layout = Layout(mesh, tuple(Shard(0) if axis in split else Replicate() for axis in mesh.axes))
        for prefix, kind in (("W", "input"), ("DW", "output"), ("NEW", "output")):
            dtype = settings.gradient_dtype if prefix == "DW" else settings.dtype
            tensor = self._tensor(unit, prefix)
            yield Buffer(tensor.lower(), kind, mesh.name, dtype, tensor, layout)  # type: ignore[arg-type]
        if settings.is_sharded:
            for name, dtype in (("w_whole", settings.dtype), ("dw_whole", settings.gradient_dtype)):
                yield self._scratch(f"{unit.name}_{name}", (count * unit.elements,), dtype)

    def _residual_shape(self) -> tuple[int, ...] | None:
        for unit, _ in self.units.values():
            for program, buffer in unit.buffers_of(RESIDUALS):
                return local_shape(program, buffer)
        return None

    def _name(self, name: str) -> str:
        return f"s{self.number}_{name}"

    def _tensor(self, unit: Unit, prefix: str) -> str:
        return f"{prefix}{self.number}_{unit.name}"

    def _scratch(self, name: str, shape: tuple[int, ...], dtype: str, slots: int = 1) -> Buffer:
        return Buffer(self._name(name), "scratch", self.mesh.name, dtype, shape=shape, slots=slots)

    # --- views ------------------------------------------------------------------------------------------

    def _whole(self, name: str, dims: int, slot: Index = 0) -> View:
        return View(self._name(name), (FULL,) * dims, slot)

    def _bucket(self, unit: Unit, prefix: str, layer: Index, shards: int = 1) -> View:
        """Return the bucket of a layer: of weights ("w") or gradients ("dw"), or a rank's shard of it."""
        size = unit.elements // shards
        part = Range(layer * size, layer * size + size)
        if self.settings.is_sharded and shards == 1:
            return View(self._name(f"{unit.name}_{prefix}_whole"), (part,), 0)
        return View(self._tensor(unit, prefix.upper()).lower(), (part,), 0)

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
        return self._whole("x", len(shape), self._at_layer(micro_batch, place, self.layers + 1))

    def _gradient(self, place: Index, micro_batch: Index) -> View:
        """Return the gradient of the residual before layer `place`, or after the last."""
        shape = self._residual_shape() or ()
        ends = (self.number, self.number + 1, "g")
        if place == self.layers and ends in self.boundaries:
            return self.boundaries[ends].in_view(micro_batch)
        if place == 0 and self.number:
            return self.boundaries[self.number - 1, self.number, "g"].out_view(micro_batch)
        return self._whole("g", len(shape), place % 2)

    # --- actions ----------------------------------------------------------------------------------------

    def begin(self, *, gathers: bool) -> Iterator[Statement]:
        """Yield zeros of gradients, gathers of sharded weights, and the matrices of all layers."""
        del gathers
        order = [self.units[name] for name in ("embedding", "layer", "head") if name in self.units]
        if self.settings.is_sharded:
            for unit, count in order if self.settings.overlaps else reversed(order):
                layer: Index = LAYER if self.settings.overlaps else count - 1 - LAYER
                yield Repeat(LAYER.name, count, (self._gather(unit, layer),))
        for unit, count in order:
            yield Zero(out=self._all_gradients(unit), lane=COMPUTE, name=f"zero gradients {self.number}")
            for name in CONSTANTS:
                for program, buffer in unit.buffers_of((name,)):
                    out = self._whole(f"{unit.name}_{name}", len(local_shape(program, buffer)))
                    yield Call(fn=name, outs=(out,), ins=(), lane=COMPUTE, name=name)
            if not self.settings.is_sharded:
                yield Repeat(LAYER.name, count, (self._unpack(unit, LAYER),))

    def _all_gradients(self, unit: Unit) -> View:
        name = self._name(f"{unit.name}_dw_whole") if self.settings.is_sharded else ""
        return View(name or self._tensor(unit, "DW").lower(), (FULL,), 0)

    def _gather(self, unit: Unit, layer: Index) -> Op:
        return AllGather(
            out=self._bucket(unit, "w", layer),
            src=self._bucket(unit, "w", layer, unit.shards),
            over=f"{self.replicas.name}.{self.settings.groups[0]}",
            dim=0,
            lane=self._lane,
            name=f"gather weights {self.number}",
        )

    def _unpack(self, unit: Unit, layer: Index) -> Op:
        outs = tuple(
            self._whole(f"{unit.name}_{weight.name}", len(weight.shape), layer) for weight in unit.weights
        )
        ins = (self._bucket(unit, "w", layer),)
        return Call(fn=f"unpack_{unit.name}", outs=outs, ins=ins, lane=COMPUTE, name="unpack weights")

    def end(self, *, reduces: bool) -> Iterator[Statement]:
        """Yield reductions that nothing is beside, and the update of the weights."""
        del reduces
        order = [self.units[name] for name in ("head", "layer", "embedding") if name in self.units]
        if not self.settings.overlaps:
            for unit, count in order:
                layer = count - 1 - LAYER
                if ops := tuple(self._reductions(unit, layer)):
                    yield Repeat(LAYER.name, count, ops)
        for unit, count in order:
            yield self._update(unit, count)

    def _update(self, unit: Unit, count: int) -> Op:
        """Return the update of a unit's weights. It reads all gradients, whose norm clips them."""
        own = count * unit.elements // unit.shards
        names = {
            prefix: View(self._tensor(unit, prefix).lower(), (FULL,), 0) for prefix in ("W", "DW", "NEW")
        }
        others = [
            View(self._tensor(other, "DW").lower(), (FULL,), 0)
            for other, _ in self.units.values()
            if other is not unit
        ]
        return Call(
            fn="optimizer",
            outs=(names["NEW"],),
            ins=(names["W"], names["DW"], *others),
            flops=own,
            bytes=ADAM_STEP_BYTES * own,
            work="elementwise",
            shape=(own,),
            dtype="float32",
            lane=COMPUTE,
            name=f"update {unit.name}s {self.number}",
        )

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

    def _batch(self, unit: Unit, at: Index) -> Iterator[Statement]:
        """Yield the call that reads the tokens of a micro-batch."""
        for program, buffer in unit.buffers_of(PER_MICRO_BATCH):
            dims = len(local_shape(program, buffer))
            out = self._whole(f"{unit.name}_{buffer.name}", dims, at % self.stashes)
            yield Call(fn=buffer.name, outs=(out,), ins=(), args=(at,), lane=COMPUTE, name=buffer.name)

    def _layer(self, layer: Index, at: Index, label: str) -> Iterator[Statement]:
        streams = {"x": self._stream(layer, at), "z": self._stream(layer + 1, at)}
        yield from self._include(self.units["layer"][0], True, streams, at, layer, label)

    def _over_layers(
        self, write: Callable[[Index], Iterator[Statement]], *, backwards: bool = False
    ) -> Iterator[Statement]:
        """Yield what `write` yields for each layer: the first and the last alone, the others in a loop."""
        count = self.layers
        blocks: list[Iterator[Statement]] = []
        if count:
            blocks.append(write(0))
        if count > 2:
            layer: Index = count - 2 - LAYER if backwards else LAYER + 1
            blocks.append(iter((Repeat(LAYER.name, count - 2, tuple(write(layer))),)))
        if count > 1:
            blocks.append(write(count - 1))
        for block in reversed(blocks) if backwards else blocks:
            yield from block

    def _backward(self, at: Index, label: str) -> Iterator[Statement]:
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
        if "embedding" in self.units:
            gradients = {"dx": self._gradient(0, at)}
            yield from self._unit_backward(self.units["embedding"][0], gradients, at, 0, label)

    def _layer_back(self, layer: Index, at: Index, label: str) -> Iterator[Statement]:
        streams = {
            "x": self._stream(layer, at),
            "dz": self._gradient(layer + 1, at),
            "dx": self._gradient(layer, at),
        }
        yield from self._unit_backward(self.units["layer"][0], streams, at, layer, label)

    def _unit_backward(
        self, unit: Unit, streams: Mapping[str, View], at: Index, layer: Index, label: str
    ) -> Iterator[Statement]:
        yield from self._include(unit, False, streams, at, layer, label)
        total = self._bucket(unit, "dw", layer)
        terms = (self._whole(f"{unit.name}_d{weight.name}", len(weight.shape)) for weight in unit.weights)
        fn = f"accumulate_{unit.name}"
        yield Call(fn=fn, outs=(total,), ins=(*terms, total), lane=COMPUTE, name="accumulate gradients")
        if self.settings.overlaps and (ops := tuple(self._reductions(unit, layer))):
            yield When(equal(at, self.last), ops)

    def _include(
        self, unit: Unit, is_forward: bool, streams: Mapping[str, View], at: Index, layer: Index, label: str
    ) -> Iterator[Statement]:
        program = unit.parts.forward if is_forward else unit.parts.backward
        if is_forward and self.settings.is_sharded:
            yield When(equal(at, 0), (self._unpack(unit, layer),))
        extra = unit.extra_flops[0 if is_forward else 1]
        if extra:
            ins = (streams["x" if "x" in streams else "z"],) if is_forward else ()
            yield Call(fn="software", outs=(), ins=ins, flops=extra, lane=COMPUTE, name="software")
        count = self.units[unit.name][1]
        views = []
        for buffer in program.buffers:
            if buffer.kind not in ("input", "output"):
                continue
            assert buffer.tensor is not None
            dims = len(program.tensor_of[buffer.tensor].shape)
            slot: Index = 0
            if buffer.name in streams:
                views.append((buffer.name, streams[buffer.name]))
                continue
            if buffer.name in unit.parts.kept:
                slot = self._at_layer(at, layer, count)
            elif buffer.name in PER_MICRO_BATCH:
                slot = at % self.stashes
            elif any(weight.name == buffer.name for weight in unit.weights):
                slot = layer
            views.append((buffer.name, self._whole(f"{unit.name}_{buffer.name}", dims, slot)))
        yield Include(
            name=label,
            part=f"{unit.name}_{'forward' if is_forward else 'backward'}",
            program=program,
            meshes=((MESH, Submesh(self.mesh.name, (FULL,) * len(self.mesh.axes))),),
            buffers=tuple(views),
            lanes=tuple((lane.name, lane.name) for lane in program.lanes),
        )

    # --- gradients --------------------------------------------------------------------------------------

    def _reductions(self, unit: Unit, layer: Index) -> Iterator[Op]:
        """Yield the sums of the gradients of a layer, over tensor-parallel ranks and over replicas."""
        whole = self._bucket(unit, "dw", layer)
        (run,) = whole.selectors
        assert isinstance(run, Range)
        label = f"reduce gradients {self.number}"
        for axis, start, stop in unit.summed:
            if self.mesh.size(axis) > 1:
                part = View(whole.buffer, (Range(run.start + start, run.start + stop),), 0)
                over = f"{self.mesh.name}.{axis}"
                yield AllReduce(out=part, src=part, over=over, lane=self._lane, name=label)
        groups, result = self.settings.groups, whole
        if self.settings.is_sharded:
            result = self._bucket(unit, "dw", layer, unit.shards)
            over = f"{self.replicas.name}.{groups[0]}"
            yield ReduceScatter(out=result, src=whole, over=over, dim=0, lane=self._lane, name=label)
            groups = groups[1:]
        for group in groups:
            over = f"{self.replicas.name}.{group}"
            yield AllReduce(out=result, src=result, over=over, lane=self._lane, name=label)
