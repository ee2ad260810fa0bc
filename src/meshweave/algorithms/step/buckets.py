"""The buckets of a stage: weights and gradients of each layer as one vector, gathered, reduced and updated.

    unpack        a call that makes the matrices of a layer of its bucket (they are views of it; it costs nothing)
    accumulate    a call that adds gradients to the bucket (products do that as they write; it costs nothing)
    pack          the same where each micro-batch has a bucket of its own
    add           a call that adds what is reduced of a micro-batch to the gradients of the ones before
    optimizer     the update of a bucket, or of a rank's shard of it

What ZeRO shards is scattered over the first groups of replicas, one after the other, and summed over the others:

    zero 0    gradients are summed after the last micro-batch
    zero 1    reduced into shards then; weights are gathered at the begin of the step, in the order of the layers
    zero 2    reduced into shards after each micro-batch; weights as in 1, or for each forward part
    zero 3    as 2; a layer's weights are gathered for each forward and each backward part, two layers at a time

Collectives run in a lane of their own beside the layers, one after the other; those of the share of each bucket
that the software waits for run beside nothing. Where each micro-batch has its own, an action begins to gather when
it begins, and ends when all is reduced. A backward part gathers the weights of a layer before it reduces the
gradients of the one after.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod

from meshweave.algorithms.pipeline.program import COMPUTE, PARAMETERS
from meshweave.algorithms.step.layer_runs import LAYER
from meshweave.algorithms.step.memory import ADAM_STEP_BYTES, GATHERED_LAYERS
from meshweave.algorithms.step.stage_settings import Run, StageSettings, runs_of
from meshweave.algorithms.step.units import Unit
from meshweave.describe.layout import Layout, Replicate, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program import Buffer, Repeat, Statement, Tensor, When
from meshweave.ir.program.expressions import Index, equal
from meshweave.ir.program.ops import AllGather, AllReduce, Call, Op, ReduceScatter, Zero
from meshweave.ir.program.views import FULL, Range, View


class StageBuckets:
    """The buckets of one stage.

    Args:
        number: of the stage.
        mesh: its ranks, with the axes of the block programs.
        replicas: the same ranks, with axes for groups of replicas and one for tensor-parallel ranks.
        units: pieces by name, and how many of each there are here.
        last: the micro-batch whose backward part is the last here.
    """

    def __init__(
        self,
        number: int,
        mesh: Mesh,
        replicas: Mesh,
        units: Mapping[str, tuple[Unit, int]],
        settings: StageSettings,
        last: int,
    ) -> None:
        self.number, self.mesh, self.replicas = number, mesh, replicas
        self.units, self.settings, self.last = units, settings, last

    # --- declarations -----------------------------------------------------------------------------------

    def tensors(self) -> Iterator[Tensor]:
        """Yield the buckets of weights, of gradients and of updated weights of all tensor-parallel ranks."""
        settings = self.settings
        split = ("tensor", *settings.groups[: settings.num_sharding])
        parts = prod(self.replicas.size(axis) for axis in split)
        for unit, count in self.units.values():
            shape = (parts * count * unit.elements // unit.shards,)
            yield Tensor(self._tensor(unit, "W"), shape, settings.dtype)
            yield Tensor(self._tensor(unit, "DW"), shape, settings.gradient_dtype)
            yield Tensor(self._tensor(unit, "NEW"), shape, settings.dtype)

    def buffers(self, unit: Unit, count: int) -> Iterator[Buffer]:
        """Yield the buffers of the buckets of a unit."""
        settings, mesh = self.settings, self.replicas
        split = ("tensor", *settings.groups[: settings.num_sharding])
        layout = Layout(mesh, tuple(Shard(0) if axis in split else Replicate() for axis in mesh.axes))
        for prefix, kind in (("W", "input"), ("DW", "output"), ("NEW", "output")):
            dtype = settings.gradient_dtype if prefix == "DW" else settings.dtype
            tensor = self._tensor(unit, prefix)
            yield Buffer(tensor.lower(), kind, mesh.name, dtype, tensor, layout)  # type: ignore[arg-type]
        dtypes = {"w": settings.dtype, "dw": settings.gradient_dtype}
        for prefix, dtype in dtypes.items():
            for level in range(settings.num_sharding + 1):
                if slots := self._slots(unit, prefix, level):
                    name = self._part(unit, prefix, level)
                    yield self.scratch(name, (slots * unit.elements // self._divisor(unit, level),), dtype)

    def scratch(self, name: str, shape: tuple[int, ...], dtype: str, slots: int = 1) -> Buffer:
        """Return scratch of the stage."""
        return Buffer(self.name(name), "scratch", self.mesh.name, dtype, shape=shape, slots=slots)

    def name(self, name: str) -> str:
        """Return what a buffer of the stage is called."""
        return f"s{self.number}_{name}"

    def whole(self, name: str, dims: int, slot: Index = 0) -> View:
        """Return a slot of a buffer of the stage."""
        return View(self.name(name), (FULL,) * dims, slot)

    def matrix_slots(self, unit: Unit) -> int:
        """Return of how many layers the matrices of weights are there at once."""
        count = self.units[unit.name][1]
        return min(count, GATHERED_LAYERS) if self.settings.shards_weights else count

    def _slots(self, unit: Unit, prefix: str, level: int) -> int:
        """Return of how many layers scratch has a part of the bucket; 0 where an input or output has it.

        Args:
            prefix: "w" or "dw".
            level: over how many of the groups that shard it is scattered.
        """
        settings, count = self.settings, self.units[unit.name][1]
        few = min(count, GATHERED_LAYERS)
        if not settings.is_sharded and not (prefix == "dw" and settings.reduces_each):
            return 0
        if prefix == "w":
            return 0 if level == settings.num_sharding else few if level else self.matrix_slots(unit)
        if settings.reduces_each:
            return few
        return 0 if level == settings.num_sharding else few if level else count

    def _divisor(self, unit: Unit, level: int) -> int:
        """Return over how many ranks a bucket is scattered at a level."""
        if level == self.settings.num_sharding:
            return unit.shards
        return prod(self.replicas.size(axis) for axis in self.settings.groups[:level])

    def _tensor(self, unit: Unit, prefix: str) -> str:
        return f"{prefix}{self.number}_{unit.name}"

    def _part(self, unit: Unit, prefix: str, level: int) -> str:
        return f"{unit.name}_{prefix}_{f'part{level}' if level else 'whole'}"

    # --- views ------------------------------------------------------------------------------------------

    def _own(self, unit: Unit, prefix: str, layer: Index, run: Run | None = None) -> View:
        """Return what the rank keeps of a layer's weights ("w") or gradients ("dw"), or of a run of its bucket."""
        shards = unit.shards if self.settings.is_sharded else 1
        part = self._range(unit, layer, shards, run)
        return View(self._tensor(unit, prefix.upper()).lower(), (part,), 0)

    def _at_level(self, unit: Unit, prefix: str, layer: Index, level: int, run: Run | None = None) -> View:
        """Return a layer's bucket, or a run of it, scattered over so many groups."""
        slots = self._slots(unit, prefix, level)
        if not slots:
            return self._own(unit, prefix, layer, run)
        if slots < self.units[unit.name][1]:
            layer = layer % slots
        part = self._range(unit, layer, self._divisor(unit, level), run)
        return View(self.name(self._part(unit, prefix, level)), (part,), 0)

    @staticmethod
    def _range(unit: Unit, layer: Index, parts: int, run: Run | None) -> Range:
        size = unit.elements // parts
        if run is None or run == (0, unit.elements):
            return Range(layer * size, layer * size + size)
        return Range(layer * size + run[0] // parts, layer * size + run[1] // parts)

    # --- weights ----------------------------------------------------------------------------------------

    def begin(self) -> Iterator[Statement]:
        """Yield zeros of gradients, gathers of sharded weights, and the matrices of all layers."""
        order = self._in_order()
        if self.settings.is_sharded and not self.settings.gathers_each:
            for is_waited in (True, False):
                for unit, count in reversed(order) if is_waited else order:
                    layer: Index = count - 1 - LAYER if is_waited else LAYER
                    if ops := tuple(self._gather(unit, layer, is_waited)):
                        yield Repeat(LAYER.name, count, ops)
        for unit, count in order:
            yield Zero(out=self._all_gradients(unit), lane=COMPUTE, name=f"zero gradients {self.number}")
            yield from self._constants(unit)
            if not self.settings.is_sharded:
                yield Repeat(LAYER.name, count, (self._unpack(unit, LAYER),))

    def _in_order(self) -> list[tuple[Unit, int]]:
        """Return the units in the order of the model."""
        ends = ["embedding"], ["head"]
        names = [*ends[0], *(name for name in self.units if [name] not in ends), *ends[1]]
        return [self.units[name] for name in names if name in self.units]

    def _constants(self, unit: Unit) -> Iterator[Op]:
        for name, dims in unit.constants:
            out = self.whole(f"{unit.name}_{name}", dims)
            yield Call(fn=name, outs=(out,), ins=(), lane=COMPUTE, name=name)

    def _all_gradients(self, unit: Unit) -> View:
        is_apart = self.settings.is_sharded and not self.settings.reduces_each
        name = self.name(self._part(unit, "dw", 0)) if is_apart else ""
        return View(name or self._tensor(unit, "DW").lower(), (FULL,), 0)

    def weights(
        self, unit: Unit, layer: Index, at: Index, *, is_forward: bool, then: Iterable[Op] = ()
    ) -> Iterator[Statement]:
        """Yield what makes the matrices of a layer before a part of it.

        Args:
            then: collectives that follow its gathers.
        """
        settings = self.settings
        yield from self._gathers_beside(unit, layer, is_forward=is_forward)
        if self._gathers_for(unit, is_forward):
            waited = list(self._gather(unit, layer, True))
            if settings.gathers_beside:
                yield from self._before_gather(waited, ())
            yield from waited
            yield from then
            yield self._unpack(unit, layer)
            return
        yield from then
        if is_forward and settings.is_sharded and not settings.gathers_each:
            yield When(equal(at, 0), (self._unpack(unit, layer),))

    def _gathers_beside(self, unit: Unit, layer: Index, *, is_forward: bool) -> Iterator[Op]:
        """Yield the gathers of a layer that run beside what is before it."""
        if self._gathers_for(unit, is_forward):
            yield from self._gather(unit, layer, False)

    def waits_to_gather(
        self, unit: Unit, layer: Index, ins: tuple[View, ...], *, is_forward: bool
    ) -> Iterator[Op]:
        """Yield a call that the first gather of an action waits for: it writes an element of what that makes."""
        yield from self._before_gather(self._gathers_beside(unit, layer, is_forward=is_forward), ins)

    def weights_used(self, unit: Unit, layer: Index) -> Iterator[Op]:
        """Yield a call after a part of a layer, for which what is gathered next where its weights were waits.

        Matrices are views of what is gathered, so that one layer and the next are whole, and no third one.
        """
        if self.settings.shards_weights and self.units[unit.name][1] > GATHERED_LAYERS:
            yield from self._before_gather(
                (*self._gather(unit, layer, False), *self._gather(unit, layer, True)), ()
            )

    @staticmethod
    def _before_gather(gathers: Iterable[Op], ins: tuple[View, ...]) -> Iterator[Op]:
        for op in gathers:
            (written,) = op.writes
            (run,) = written.selectors
            assert isinstance(run, Range)
            out = View(written.buffer, (Range(run.start, run.start + 1),), 0)
            yield Call(fn="begin", outs=(out,), ins=ins, lane=COMPUTE, name="begin to gather")
            return

    def _gathers_for(self, unit: Unit, is_forward: bool) -> bool:
        """Return whether each part of this direction gathers weights. Those of a table are gathered forward."""
        settings = self.settings
        return settings.gathers_each and (is_forward or (settings.shards_weights and unit.is_layer))

    def _gather(self, unit: Unit, layer: Index, is_waited: bool) -> Iterator[Op]:
        settings = self.settings
        for is_late, run in enumerate(runs_of(unit, settings)):
            if run is None or (settings.waits_for_gathers or bool(is_late)) != is_waited:
                continue
            for level in reversed(range(settings.num_sharding)):
                yield AllGather(
                    out=self._at_level(unit, "w", layer, level, run),
                    src=self._at_level(unit, "w", layer, level + 1, run),
                    over=f"{self.replicas.name}.{settings.groups[level]}",
                    dim=0,
                    lane=PARAMETERS if settings.gathers_beside else COMPUTE,
                    name=f"gather weights {self.number}",
                )

    def matrix(self, unit: Unit, name: str, dims: int, layer: Index) -> View:
        """Return a matrix of weights of a layer."""
        slots = self.matrix_slots(unit)
        slot = layer % slots if slots < self.units[unit.name][1] else layer
        return self.whole(f"{unit.name}_{name}", dims, slot)

    def _unpack(self, unit: Unit, layer: Index) -> Op:
        outs = tuple(self.matrix(unit, weight.name, len(weight.shape), layer) for weight in unit.weights)
        ins = (self._at_level(unit, "w", layer, 0),)
        return Call(
            fn=f"unpack_{unit.name}", outs=outs, ins=ins, part="in_place", lane=COMPUTE, name="unpack weights"
        )

    # --- gradients --------------------------------------------------------------------------------------

    def gradients(self, unit: Unit, layer: Index, at: Index) -> Iterator[Statement]:
        """Yield what follows the gradients of a layer's matrices: their sum, and reductions of it.

        Those of a micro-batch that run beside other work come later (`reductions_beside`).
        """
        settings = self.settings
        total = self._at_level(unit, "dw", layer, 0)
        terms = tuple(self.whole(f"{unit.name}_d{weight.name}", len(weight.shape)) for weight in unit.weights)
        fn, ins = (
            (f"pack_{unit.name}", terms)
            if settings.reduces_each
            else (f"accumulate_{unit.name}", (*terms, total))
        )
        yield Call(fn=fn, outs=(total,), ins=ins, lane=COMPUTE, name="accumulate gradients")
        if not settings.reduces_each:
            if ops := tuple(self._reductions(unit, layer, False)):
                yield When(equal(at, self.last), ops)
            return
        yield from self._reductions(unit, layer, True)
        beside, waited = runs_of(unit, settings)
        if beside and waited:
            yield self._reduced(self._own(unit, "dw", layer, waited))

    def reductions_beside(self, unit: Unit, layer: Index) -> Iterator[Op]:
        """Yield the reductions of a layer's gradients that run beside what follows, as nothing waits for them.

        There are none but where each micro-batch reduces its gradients (`reduces_each`).
        """
        if self.settings.reduces_each:
            yield from self._reductions(unit, layer, False)

    def waits_for_reductions(self, unit: Unit, sent: tuple[View, ...]) -> Iterator[Op]:
        """Yield a call that ends an action once the gradients of a unit's first layer are reduced.

        Args:
            sent: the gradient that goes to another stage then, if any.
        """
        if self.settings.reduces_each and (self.settings.overlap or sent):
            yield self._reduced(self._own(unit, "dw", 0), sent)

    @staticmethod
    def _reduced(gradients: View, sent: tuple[View, ...] = ()) -> Op:
        ins = (gradients, *sent)
        return Call(fn="reduced", outs=sent, ins=ins, lane=COMPUTE, name="gradients are reduced")

    def _reductions(self, unit: Unit, layer: Index, is_waited: bool) -> Iterator[Op]:
        """Yield the sums of the gradients of a layer, over tensor-parallel ranks and over replicas."""
        settings, label = self.settings, f"reduce gradients {self.number}"
        run = runs_of(unit, settings)[is_waited]
        if run is None:
            return
        lane = COMPUTE if settings.overlap == 0 else PARAMETERS
        whole = self._at_level(unit, "dw", layer, 0)
        (place,) = whole.selectors
        assert isinstance(place, Range)
        for axis, start, stop in unit.summed:
            first, end = max(start, run[0]), min(stop, run[1])
            if self.mesh.size(axis) > 1 and first < end:
                part = View(whole.buffer, (Range(place.start + first, place.start + end),), 0)
                over = f"{self.mesh.name}.{axis}"
                yield AllReduce(out=part, src=part, over=over, lane=lane, name=label)
        for level, group in enumerate(settings.groups):
            over = f"{self.replicas.name}.{group}"
            src = self._at_level(unit, "dw", layer, min(level, settings.num_sharding), run)
            if level < settings.num_sharding:
                out = self._at_level(unit, "dw", layer, level + 1, run)
                yield ReduceScatter(out=out, src=src, over=over, dim=0, lane=lane, name=label)
            else:
                yield AllReduce(out=src, src=src, over=over, lane=lane, name=label)
        if settings.reduces_each:
            src = self._at_level(unit, "dw", layer, settings.num_sharding, run)
            out = self._own(unit, "dw", layer, run)
            yield Call(fn="add", outs=(out,), ins=(src, out), lane=lane, name="add gradients")

    def end(self) -> Iterator[Statement]:
        """Yield reductions that nothing is beside, and the update of the weights."""
        order = self._in_order()[::-1]
        for unit, count in order if not self.settings.reduces_each else ():
            if ops := tuple(self._reductions(unit, count - 1 - LAYER, True)):
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
            fn=f"optimizer_{unit.name}",
            args=(self.number,),
            outs=(names["NEW"],),
            ins=(names["W"], names["DW"], *others),
            part="in_place",
            flops=own,
            bytes=ADAM_STEP_BYTES * own,
            work="elementwise",
            shape=(own,),
            dtype="float32",
            lane=COMPUTE,
            name=f"update {unit.name}s {self.number}",
        )
