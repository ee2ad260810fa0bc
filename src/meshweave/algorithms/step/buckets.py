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

Collectives run one after the other in a lane of their own, which overlaps with the layers. The share of each
bucket that the software waits for overlaps with nothing. Where each micro-batch has collectives of its own, the
first gather of an action starts with the action, and the action ends when all its gradients are reduced. A
backward part gathers the weights of a layer before it reduces the gradients of the one after, so that the share
of a gather that overlaps does so also where the software waits for a share of each reduction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshweave.algorithms.pipeline.program import COMPUTE, PARAMETERS
from meshweave.algorithms.step.bucket_views import BucketViews
from meshweave.algorithms.step.layer_runs import LAYER
from meshweave.algorithms.step.memory import GATHERED_LAYERS
from meshweave.algorithms.step.stage_settings import runs_of
from meshweave.algorithms.step.units import Unit
from meshweave.ir.program import Repeat, Statement, When
from meshweave.ir.program.expressions import Index, equal
from meshweave.ir.program.ops import AllGather, AllReduce, Call, Op, ReduceScatter, Zero
from meshweave.ir.program.views import FULL, Range, View


class StageBuckets(BucketViews):
    """Writes the gathers, sums and reductions of the buckets of one stage.

    A bucket is a vector of all weights, or gradients, of one layer. A unit is a kind of layer, the embedding or
    the head; `layer` is a number, from 0, among the layers of a unit in this stage. Of each collective an exposed
    share runs alone, and the rest overlaps with layers (`StageSettings.overlap`). Collectives of experts follow
    those of their layer.
    """

    # --- weights ----------------------------------------------------------------------------------------

    def begin(self) -> Iterator[Statement]:
        """Yield the statements before the first action.

        Weights that are gathered once a step are gathered, gradients are zeroed, constants are filled, and,
        without ZeRO, weights are unpacked into matrices.
        """
        order = self._in_order()
        for is_waited in (True, False):
            for unit, count in reversed(order) if is_waited else order:
                layer: Index = count - 1 - LAYER if is_waited else LAYER
                if ops := tuple(
                    op for each in unit.buckets for op in self._gather_once(each, layer, is_waited)
                ):
                    yield Repeat(LAYER.name, count, ops)
        for unit, count in order:
            for each in unit.buckets:
                yield Zero(out=self._all_gradients(each), lane=COMPUTE, name=f"zero gradients {self.number}")
                yield from self._constants(unit) if each is unit else ()
                if not self.settings_of(each).is_sharded:
                    yield Repeat(LAYER.name, count, (self._unpack(each, LAYER),))

    def _gather_once(self, unit: Unit, layer: Index, is_waited: bool) -> Iterator[Op]:
        """Yield the gathers of a layer at the begin of a step, where weights are gathered once."""
        settings = self.settings_of(unit)
        if settings.is_sharded and not settings.gathers_each:
            yield from self._gather(unit, layer, is_waited)

    def _in_order(self) -> list[tuple[Unit, int]]:
        """Return the units in the order of the model; those with the weights of experts are in `Unit.buckets`."""
        ends = ["embedding"], ["head"]
        names = [*ends[0], *(name for name in self.units if [name] not in ends), *ends[1]]
        return [
            self.units[name] for name in names if name in self.units and not self.units[name][0].is_of_experts
        ]

    def _constants(self, unit: Unit) -> Iterator[Op]:
        for name, dims in unit.constants:
            out = self.whole(f"{unit.name}_{name}", dims)
            yield Call(fn=name, outs=(out,), ins=(), lane=COMPUTE, name=name)

    def _all_gradients(self, unit: Unit) -> View:
        settings = self.settings_of(unit)
        is_apart = settings.is_sharded and not settings.reduces_each
        name = self.name(self._part(unit, "dw", 0)) if is_apart else ""
        return View(name or self._tensor(unit, "DW").lower(), (FULL,), 0)

    def weights(
        self, unit: Unit, layer: Index, at: Index, *, is_forward: bool, then: Iterable[Op] = ()
    ) -> Iterator[Statement]:
        """Yield the statements that bring a layer's weight matrices into memory before a part of it.

        Args:
            layer: its number among the layers of the unit in this stage.
            at: the number of the micro-batch.
            is_forward: whether the part is the forward one, not the backward one.
            then: collectives to yield between the gathers and the calls that unpack matrices.
        """
        yield from self._gathers_beside(unit, layer, is_forward=is_forward)
        gathered = [each for each in unit.buckets if self._gathers_for(each, is_forward)]
        for each in gathered:
            waited = list(self._gather(each, layer, True))
            if self.settings_of(each).gathers_beside:
                yield from self._before_gather(waited, ())
            yield from waited
        yield from then
        for each in unit.buckets:
            settings = self.settings_of(each)
            if each in gathered:
                yield self._unpack(each, layer)
            elif is_forward and settings.is_sharded and not settings.gathers_each:
                yield When(equal(at, 0), (self._unpack(each, layer),))

    def _gathers_beside(self, unit: Unit, layer: Index, *, is_forward: bool) -> Iterator[Op]:
        """Yield the gathers of a layer that run beside what is before it."""
        for each in unit.buckets:
            if self._gathers_for(each, is_forward):
                yield from self._gather(each, layer, False)

    def waits_to_gather(
        self, unit: Unit, layer: Index, ins: tuple[View, ...], *, is_forward: bool
    ) -> Iterator[Op]:
        """Yield a call to put before an action, so that its first gather begins only when this call has ended.

        The call reads `ins`, and writes an element that the gather overwrites. Yields nothing where no gather
        overlaps with layers.

        Args:
            unit, layer: the layer that the action gathers first: its unit, and its number in this stage.
            ins: views of what must be there before the gather begins; () for nothing.
            is_forward: whether the action is a forward one.
        """
        yield from self._before_gather(self._gathers_beside(unit, layer, is_forward=is_forward), ins)

    def release_weights(self, unit: Unit, layer: Index) -> Iterator[Op]:
        """Yield calls that free the gathered weights of a layer for reuse, once a part of the layer has run.

        One call per bucket, in the compute lane. It writes an element of the layer's slot, so that the next
        gather into this slot waits for it. There are two slots: that gather is for the layer two further on.
        Yields nothing without ZeRO-3, or where the stage has at most two layers of the unit.

        Args:
            layer: its number among the layers of the unit in this stage.
        """
        for each in unit.buckets:
            if self.settings_of(each).shards_weights and self.units[each.name][1] > GATHERED_LAYERS:
                yield from self._before_gather(
                    (*self._gather(each, layer, False), *self._gather(each, layer, True)), ()
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
        settings = self.settings_of(unit)
        return settings.gathers_each and (is_forward or (settings.shards_weights and unit.is_layer))

    def _gather(self, unit: Unit, layer: Index, is_waited: bool) -> Iterator[Op]:
        ranks = self.ranks_of(unit)
        settings = ranks.settings
        for is_late, run in enumerate(runs_of(unit, settings)):
            if run is None or (settings.waits_for_gathers or bool(is_late)) != is_waited:
                continue
            for level in reversed(range(settings.num_sharding)):
                yield AllGather(
                    out=self._at_level(unit, "w", layer, level, run),
                    src=self._at_level(unit, "w", layer, level + 1, run),
                    over=f"{ranks.mesh.name}.{settings.groups[level]}",
                    dim=0,
                    lane=PARAMETERS if settings.gathers_beside else COMPUTE,
                    name=f"gather weights {self.number}",
                )

    def matrix(self, unit: Unit, name: str, dims: int, layer: Index) -> View:
        """Return the view of weight matrix `name`, of `dims` dims, of layer number `layer` of a unit."""
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
        """Yield the call that adds a layer's gradients for micro-batch `at` to its bucket, and reductions.

        Reductions follow the last micro-batch alone, and only their share that overlaps with layers; `end` has the
        exposed share. Where each micro-batch reduces its gradients, there are none here (`reductions_each`).
        """
        for each in unit.buckets:
            yield from self._added(each, layer, at)

    def _added(self, unit: Unit, layer: Index, at: Index) -> Iterator[Statement]:
        settings = self.settings_of(unit)
        total = self._at_level(unit, "dw", layer, 0)
        terms = tuple(self.term(unit, weight, layer, at) for weight in unit.weights)
        fn, ins = (
            (f"pack_{unit.name}", terms)
            if settings.reduces_each
            else (f"accumulate_{unit.name}", (*terms, total))
        )
        yield Call(fn=fn, outs=(total,), ins=ins, lane=COMPUTE, name="accumulate gradients")
        if not settings.reduces_each and (ops := tuple(self._reductions(unit, layer, False))):
            yield When(equal(at, self.last), ops)

    def reductions_each(self, unit: Unit, layer: Index) -> Iterator[Op]:
        """Yield the ops that reduce a layer's gradients of one micro-batch, and add them to this rank's shard.

        Buckets whose gradients are reduced once a step (`reduces_each` is False) yield nothing. Of the others
        the exposed share of the elements is reduced first, then the share that overlaps with layers
        (`runs_of`). Where there are both, a last call in the compute lane waits for the exposed share.

        Args:
            unit: the kind of layer; the buckets of its experts are reduced too.
            layer: its number among the layers of the unit in this stage.
        """
        for each in unit.buckets:
            settings = self.settings_of(each)
            if not settings.reduces_each:
                continue
            yield from self._reductions(each, layer, True)
            yield from self._reductions(each, layer, False)
            beside, waited = runs_of(each, settings)
            if beside and waited:
                yield self._reduced((self._own(each, "dw", layer, waited),))

    def waits_for_reductions(self, unit: Unit, sent: tuple[View, ...]) -> Iterator[Op]:
        """Yield a call that ends an action once the gradients of layer 0 of a unit are reduced.

        Yields nothing where gradients are reduced once a step, or where no reduction overlaps and nothing is
        sent.

        Args:
            sent: the view of the residual's gradient that goes to another stage afterwards; () for none.
        """
        reduced = [each for each in unit.buckets if self.settings_of(each).reduces_each]
        if reduced and (self.settings_of(unit).overlap or sent):
            yield self._reduced(tuple(self._own(each, "dw", 0) for each in reduced), sent)

    @staticmethod
    def _reduced(gradients: tuple[View, ...], sent: tuple[View, ...] = ()) -> Op:
        ins = (*gradients, *sent)
        return Call(fn="reduced", outs=sent, ins=ins, lane=COMPUTE, name="gradients are reduced")

    def _reductions(self, unit: Unit, layer: Index, is_waited: bool) -> Iterator[Op]:
        """Yield the sums of the gradients of a layer, over tensor-parallel ranks and over replicas."""
        ranks = self.ranks_of(unit)
        settings, label = ranks.settings, f"reduce gradients {self.number}"
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
            over = f"{ranks.mesh.name}.{group}"
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
        """Yield the statements after the last action: exposed reductions, then the update of the weights."""
        order = self._in_order()[::-1]
        for unit, count in order:
            late = [each for each in unit.buckets if not self.settings_of(each).reduces_each]
            if ops := tuple(op for each in late for op in self._reductions(each, count - 1 - LAYER, True)):
                yield Repeat(LAYER.name, count, ops)
        for unit, count in order:
            for each in unit.buckets:
                yield self._update(each, count)

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
            bytes=self.settings_of(unit).update_bytes * own,
            work="elementwise",
            shape=(own,),
            dtype="float32",
            lane=COMPUTE,
            name=f"update {unit.name}s {self.number}",
        )
