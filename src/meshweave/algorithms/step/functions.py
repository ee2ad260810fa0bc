"""What the calls of a step's program compute on a rank, besides those of its blocks.

Buckets are flat vectors: matrices one after the other in the order of `Unit.weights`, then zeros. A rank's shard
of a bucket is its part of each scatter, one group of replicas after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from meshweave.algorithms.block.functions import Functions, Values, array_module, like
from meshweave.algorithms.contract import Array, Arrays
from meshweave.algorithms.step.stage_settings import StageSettings, runs_of
from meshweave.algorithms.step.units import Unit
from meshweave.describe.layout import Layout
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program import Program

Update = Callable[[tuple[str, int], Values, Values], Values]
"""Returns new weights from a key (unit, stage), weights and gradients."""
_NAMES = {"ids_in": "IDS_IN", "ids_out": "IDS_OUT"}


class StepFunctions:
    """The functions of a step's program on one rank.

    Args:
        units: the pieces of the model by name.
        blocks: the functions of the programs of blocks.
        mesh: the ranks of the pipeline rank on the axes data, context and two of tensor parallelism.
        rank: the rank whose functions these are.
        update: the optimizer: returns new weights from ((unit, stage), weights, gradients), vectors of a rank's
            part.
        zeros: makes a vector of so many zeros, in the array library and dtype of all other values.

    Attributes:
        tokens, targets: token numbers of the whole batch, as floats (sequences, length); set before a step.
        loss: the sum of the losses of the tokens of this rank since it was set to 0.
    """

    def __init__(
        self,
        units: Mapping[str, Unit],
        blocks: Functions,
        mesh: Mesh,
        rank: int,
        update: Update,
        zeros: Callable[[int], Values],
    ) -> None:
        self.units, self.mesh, self.rank = units, mesh, rank
        self._blocks, self._update, self._zeros = blocks, update, zeros
        self.tokens = self.targets = np.zeros((0, 0), np.float32)
        self.loss = 0.0

    def table(self) -> dict[str, Callable[..., Any]]:
        """Return the functions that the program's calls run on this rank, by the names in the calls.

        They take and return this rank's shards of tensors, as arrays; one without a result returns None.
        """
        table: dict[str, Callable[..., Any]] = dict(self._blocks)
        loss = self._blocks.get("loss")
        if loss is not None:
            table["loss"] = self._counted(loss)
        table |= {
            "add": lambda part, total: total + part,
            "begin": lambda *_: self._zeros(1),
            "reduced": lambda _, *sent: sent or None,
            "arrived": lambda *_: None,
            "sent": lambda value: value,
            "software": lambda *_: None,
        }
        for name, unit in self.units.items():
            table |= {
                f"unpack_{name}": self._unpack(unit),
                f"pack_{name}": lambda *terms, unit=unit: self._packed(unit, terms),
                f"accumulate_{name}": lambda *ins, unit=unit: ins[-1] + self._packed(unit, ins[:-1]),
                f"optimizer_{name}": lambda w, dw, *rest, name=name: self._update((name, rest[-1]), w, dw),
            }
            for buffer in ("tokens", "targets", "ids_in", "ids_out", "positions"):
                for program, _ in unit.buffers_of((buffer,)):
                    table[buffer] = self._given(program, buffer)
        return table

    def _counted(self, loss: Callable[..., Values]) -> Callable[..., Values]:
        """Return the function of the loss, which adds what it returns more than it was given to `loss`."""

        def counted(sums: Values, greatest: Values, so_far: Values) -> Values:
            total = loss(sums, greatest, so_far)
            self.loss += float((total - so_far).sum())
            return total

        return counted

    @staticmethod
    def _unpack(unit: Unit) -> Callable[[Values], list[Values]]:
        def unpack(bucket: Values) -> list[Values]:
            return [bucket[each.start : each.stop].reshape(each.shape) for each in unit.weights]

        return unpack

    def _packed(self, unit: Unit, terms: Sequence[Values]) -> Values:
        """Return gradients of matrices as a bucket."""
        flat = [term.reshape(math.prod(term.shape)) for term in terms]
        return array_module(flat[0]).concatenate([*flat, self._zeros(unit.elements - unit.weights[-1].stop)])

    def _given(self, program: Program, buffer: str) -> Callable[..., Values]:
        """Return the function of an input of a piece: this rank's part of tokens, targets or numbers of words."""
        held = program.buffer_of[buffer]
        assert held.tensor is not None and held.layout is not None
        shape, layout = program.tensor_of[held.tensor].shape, Layout(self.mesh, held.layout.placements)
        indices = np.ix_(*layout.indices(shape, self.rank))
        if buffer in ("tokens", "targets"):

            def of_micro_batch(at: int) -> Values:
                whole = getattr(self, buffer)
                rows = math.prod(shape) // whole.shape[1]
                return like(whole[at * rows : (at + 1) * rows].reshape(shape)[indices], self._zeros(0))

            return of_micro_batch
        numbers = like(np.arange(shape[0], dtype=np.float32)[indices], self._zeros(0))
        return lambda *_: numbers


def local_bucket(
    unit: Unit,
    weights: Arrays,
    layers: Sequence[int],
    mesh: Mesh,
    replicas: Mesh,
    settings: StageSettings,
    rank: int,
) -> Array:
    """Return one rank's shard of the weights of some layers of a model, as one vector, layer after layer.

    A layer's bucket (its weights on the rank as one vector) is cut into at most two ranges of elements (runs). Of
    each layer the result has the rank's shard of each run, one run after the other.

    Args:
        unit: the unit of these layers.
        weights: those of the whole model by name, unsharded.
        layers: the numbers of the layers in the model; (0,) for embedding or head.
        mesh: the pipeline rank's ranks on the axes data, context and two of tensor parallelism.
        replicas: the same ranks on one axis per group of replicas and one of tensor-parallel ranks.
        settings: which groups of replicas shard a bucket, and into which runs it is cut (`runs_of`).
        rank: a global rank of these meshes.
    """
    program, kept = unit.parts.forward, []
    for layer in layers:
        bucket = np.zeros(unit.elements, np.float32)
        for weight in unit.weights:
            held = program.buffer_of[weight.name]
            assert held.tensor is not None and held.layout is not None
            name = f"{held.tensor[:-1]}{layer}" if unit.is_layer else held.tensor
            layout = Layout(mesh, held.layout.placements)
            part = weights[name][np.ix_(*layout.indices(weights[name].shape, rank))]
            bucket[weight.start : weight.stop] = part.reshape(-1)
        for run in runs_of(unit, settings):
            part = bucket[run[0] : run[1]] if run else bucket[:0]
            for axis in settings.groups[: settings.num_sharding]:
                size, at = len(part) // replicas.size(axis), replicas.coords(rank)[replicas.axis(axis)]
                part = part[at * size : (at + 1) * size]
            kept.append(part)
    return np.concatenate(kept)
