"""The buckets of a stage as buffers, and the views of them that ops read and write.

Buckets of experts lie on a mesh of their own, since experts have other replicas than the rest of a layer
(`placement.expert_replica_groups`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from meshweave.algorithms.step.memory import GATHERED_LAYERS
from meshweave.algorithms.step.stage_settings import BucketRanks, Run, StageSettings
from meshweave.algorithms.step.units import Unit, Weight
from meshweave.describe.layout import Layout, Replicate, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program import Buffer, Tensor
from meshweave.ir.program.expressions import Index
from meshweave.ir.program.views import FULL, Range, View


class BucketViews:
    """The buckets of one stage as buffers, and views of their parts.

    A unit is a piece of the model: a kind of layer, the embedding or the head. A bucket is a vector of all
    weights, or gradients, of one layer on a rank. A buffer has the buckets of all layers of a unit in this stage,
    one after the other.

    Args:
        number: the stage's number, from 0.
        mesh: its ranks on the axes data, context and two of tensor parallelism.
        ranks: (ranks of the buckets of all weights but experts', ranks of those of experts or None).
        units: (unit, how many of it the stage has) by name.
        last: the micro-batch whose backward part is the last on this stage.

    Attributes:
        early: for each buffer of matrix gradients that the input gradient computes already (`Unit.split.early`)
            the number of micro-batches that it has slots for.
    """

    def __init__(
        self,
        number: int,
        mesh: Mesh,
        ranks: tuple[BucketRanks, BucketRanks | None],
        units: Mapping[str, tuple[Unit, int]],
        last: int,
    ) -> None:
        self.number, self.mesh, self._ranks, self.last = number, mesh, ranks, last
        self.early: dict[str, int] = {}
        self.units = {each.name: (each, count) for unit, count in units.values() for each in unit.buckets}

    def term(self, unit: Unit, weight: Weight, layer: Index, at: Index) -> View:
        """Return the view of a weight's gradient from one micro-batch, before it is added to the bucket.

        Args:
            layer: the layer's number, from 0, among the layers of the unit in this stage.
            at: the number of the micro-batch.
        """
        name = f"d{weight.name}"
        slots = self.early.get(f"{unit.name}_{name}", 0)
        slot = (at % slots) * self.units[unit.name][1] + layer if slots else 0
        return self.whole(f"{unit.name}_{name}", len(weight.shape), slot)

    def ranks_of(self, unit: Unit) -> BucketRanks:
        """Return on which ranks the bucket of a unit lies, and how it is kept there."""
        own = self._ranks[unit.is_of_experts]
        assert own is not None
        return own

    def settings_of(self, unit: Unit) -> StageSettings:
        """Return how the bucket of a unit is sharded over replicas, gathered and reduced."""
        return self.ranks_of(unit).settings

    # --- declarations -----------------------------------------------------------------------------------

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of buckets over all ranks of the stage: weights, gradients and updated weights."""
        settings = self._ranks[0].settings
        for unit, count in self.units.values():
            ranks = self.ranks_of(unit)
            parts = prod(ranks.mesh.size(axis) for axis in ranks.split)
            shape = (parts * count * unit.elements // unit.shards,)
            yield Tensor(self._tensor(unit, "W"), shape, settings.dtype)
            yield Tensor(self._tensor(unit, "DW"), shape, settings.gradient_dtype)
            yield Tensor(self._tensor(unit, "NEW"), shape, settings.dtype)

    def buffers(self, unit: Unit, count: int) -> Iterator[Buffer]:
        """Yield the buffers of the buckets of `count` layers of a unit.

        They are the weights, their gradients and the updated weights that a rank keeps, and scratch for buckets
        that are gathered or reduced.
        """
        ranks = self.ranks_of(unit)
        settings, mesh, split = ranks.settings, ranks.mesh, ranks.split
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
        """Return a scratch buffer of the stage, on its mesh.

        Args:
            name: the buffer's name without the stage's number, which is put before it.
            shape: the shape of one slot on one rank.
            slots: how many such arrays the buffer holds.
        """
        return Buffer(self.name(name), "scratch", self.mesh.name, dtype, shape=shape, slots=slots)

    def name(self, name: str) -> str:
        """Return the name of a buffer of the stage: its number before `name`, as in "s0_x"."""
        return f"s{self.number}_{name}"

    def whole(self, name: str, dims: int, slot: Index = 0) -> View:
        """Return the view of all of one slot of a buffer, which has `dims` dims.

        `name` is the buffer's name without the stage's number.
        """
        return View(self.name(name), (FULL,) * dims, slot)

    def matrix_slots(self, unit: Unit) -> int:
        """Return of how many layers of a unit the whole weight matrices are in memory at once."""
        count = self.units[unit.name][1]
        return min(count, GATHERED_LAYERS) if self.settings_of(unit).shards_weights else count

    def _slots(self, unit: Unit, prefix: str, level: int) -> int:
        """Return of how many layers scratch has a part of the bucket; 0 where an input or output has it.

        Args:
            prefix: "w" or "dw".
            level: over how many of the groups that shard it is scattered.
        """
        settings, count = self.settings_of(unit), self.units[unit.name][1]
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
        ranks = self.ranks_of(unit)
        if level == ranks.settings.num_sharding:
            return unit.shards
        return prod(ranks.mesh.size(axis) for axis in ranks.settings.groups[:level])

    def _tensor(self, unit: Unit, prefix: str) -> str:
        return f"{prefix}{self.number}_{unit.name}"

    def _part(self, unit: Unit, prefix: str, level: int) -> str:
        return f"{unit.name}_{prefix}_{f'part{level}' if level else 'whole'}"

    # --- views ------------------------------------------------------------------------------------------

    def _own(self, unit: Unit, prefix: str, layer: Index, run: Run | None = None) -> View:
        """Return what the rank keeps of a layer's weights ("w") or gradients ("dw"), or of a run of its bucket."""
        shards = unit.shards if self.settings_of(unit).is_sharded else 1
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
