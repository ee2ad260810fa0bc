"""The pieces of a model that a step's program includes, with their weights in one flat vector each.

A piece is `count` equal layers, the embedding or the head. What a rank has of the weights of one layer is a vector
(its bucket): matrices one after the other, those first whose gradients tensor-parallel ranks sum. It is padded so
that it divides over the ranks that shard it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal

from meshweave.algorithms.block.parts import BlockParts
from meshweave.algorithms.block.split import SplitBackward, split_backward
from meshweave.base.errors import UnsupportedError
from meshweave.ir.program import Buffer, Program

RESIDUALS = ("x", "z", "dx", "dz")
"""What the residual and its gradient are called in the programs of a piece."""
PER_MICRO_BATCH = ("tokens", "targets")
CONSTANTS = ("ids_in", "ids_out", "positions")
PartKind = Literal["forward", "backward", "input_grad", "weight_grad"]
_GIVEN = (*RESIDUALS, *PER_MICRO_BATCH, *CONSTANTS, "loss")


@dataclass(frozen=True)
class Weight:
    """A weight (matrix or vector) of a unit, as a rank has it.

    Attributes:
        shape: its shape on one rank.
        start: the position of its first element in the unit's bucket, in elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int

    @property
    def stop(self) -> int:
        """Return the position in the bucket after the weight's last element, in elements."""
        return self.start + prod(self.shape)


@dataclass(frozen=True, eq=False)
class Unit:
    """A piece of a model: a kind of layer, the embedding or the head.

    Its bucket is a vector of all weights of one such piece on a rank. A part is its forward or backward program,
    or one of the two gradients ("input_grad", "weight_grad") into which the backward program can be split.

    Attributes:
        name: "layer", "embedding" or "head"; of layers of several kinds "layer0", "layer1", ...
        parts: its forward and its backward program.
        extra_flops: work that the software adds to its forward part, to its backward part, and of this to the
            gradients of weights, as FLOPs at the rate of the chip.
        shards: over how many ranks its bucket is sharded.
        expert_shards: over how many ranks the bucket of its experts is sharded.
        is_of_experts: whether its weights are those of experts alone; else all others.
    """

    name: str
    parts: BlockParts
    extra_flops: tuple[int, int, int]
    shards: int
    expert_shards: int = 1
    is_of_experts: bool = False

    @cached_property
    def experts(self) -> Unit | None:
        """Return the unit with the weights of its experts, which have a bucket of their own; None without any."""
        if self.is_of_experts or not self.parts.of_experts:
            return None
        return replace(
            self,
            name=f"{self.name}_experts",
            extra_flops=(0, 0, 0),
            shards=self.expert_shards,
            is_of_experts=True,
        )

    @property
    def buckets(self) -> tuple[Unit, ...]:
        """Return one unit per bucket: this one, and the one with the weights of its experts if it has some."""
        return (self,) if self.experts is None else (self, self.experts)

    @property
    def is_layer(self) -> bool:
        """Return whether the unit is a kind of layer, not embedding or head."""
        return self.name.startswith("layer")

    @property
    def constants(self) -> Iterator[tuple[str, int]]:
        """Yield (name, number of dims) of the program inputs that are the same for all micro-batches."""
        for name in CONSTANTS:
            for program, buffer in self.buffers_of((name,)):
                yield name, len(local_shape(program, buffer))

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """Return the weights on a rank in the order in which the bucket holds them."""
        program, sums = self.parts.forward, self.parts.sums
        inputs = [
            buffer
            for buffer in program.buffers
            if buffer.kind == "input"
            and buffer.name not in _GIVEN
            and (buffer.name in self.parts.of_experts) == self.is_of_experts
        ]
        inputs.sort(key=lambda buffer: self._own_sums(sums[f"d{buffer.name}"]), reverse=True)
        weights: list[Weight] = []
        for buffer in inputs:
            start = weights[-1].stop if weights else 0
            weights.append(Weight(buffer.name, local_shape(program, buffer), buffer.dtype, start))
        return tuple(weights)

    @property
    def elements(self) -> int:
        """Return the elements of one bucket on a tensor-parallel rank, padded so that ZeRO shards it evenly."""
        return -(-self.weights[-1].stop // self.shards) * self.shards

    @cached_property
    def summed(self) -> tuple[tuple[str, int, int], ...]:
        """Return (axis, start, stop) of each range of a bucket whose gradients tensor-parallel ranks sum.

        They sum along `axis`, "row" or "col" of the tensor mesh; `start` and `stop` are positions in elements.

        Raises:
            UnsupportedError: the weights that are summed over an axis do not adjoin.
        """
        ranges: dict[str, tuple[int, int]] = {}
        for weight in self.weights:
            for axis in self._own_sums(self.parts.sums[f"d{weight.name}"]):
                start, stop = ranges.get(axis, (weight.start, weight.start))
                if stop != weight.start:
                    raise UnsupportedError(
                        f"weights of a {self.name} that are summed over {axis} do not adjoin"
                    )
                ranges[axis] = start, weight.stop
        return tuple((axis, *ranges[axis]) for axis in ranges)

    @staticmethod
    def _own_sums(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis in ("row", "col"))

    def program(self, part: PartKind) -> Program | None:
        """Return the program of a part; None for "input_grad" of a unit with no residual before it."""
        if part in ("forward", "backward"):
            return self.parts.forward if part == "forward" else self.parts.backward
        return self.split.input_grad if part == "input_grad" else self.split.weight_grad

    def software_flops(self, part: PartKind) -> int:
        """Return the time that software adds to a part, as the FLOPs that the chip would do in that time."""
        forward, backward, weight_gradient_tasks = self.extra_flops
        whole = {"forward": forward, "backward": backward, "weight_grad": weight_gradient_tasks}
        return whole.get(part, backward - weight_gradient_tasks)

    @cached_property
    def split(self) -> SplitBackward:
        """Return the backward program as two: one for the residual's gradient, one for those of weights."""
        return split_backward(self.parts)

    @cached_property
    def read_for_weights(self) -> frozenset[str]:
        """Return the names of the buffers that the program of the weight gradients reads."""
        inputs = (buffer.name for buffer in self.split.weight_grad.buffers if buffer.kind == "input")
        return frozenset(inputs)

    @property
    def kept(self) -> Iterator[Buffer]:
        """Yield the buffers of the forward program that hold what the backward part reads later."""
        yield from (self.parts.forward.buffer_of[name] for name in self.parts.kept)

    def buffers_of(self, names: tuple[str, ...]) -> Iterator[tuple[Program, Buffer]]:
        """Yield (program, buffer) for the inputs and outputs with these names.

        Each name counts once: in the forward program, or, if that lacks it, in the backward one.
        """
        seen: set[str] = set()
        for program in (self.parts.forward, self.parts.backward):
            for buffer in program.buffers:
                if buffer.name in names and buffer.kind in ("input", "output") and buffer.name not in seen:
                    seen.add(buffer.name)
                    yield program, buffer


def local_shape(program: Program, buffer: Buffer) -> tuple[int, ...]:
    """Return the shape of a buffer on one rank. Raises UnsupportedError where ranks have different shapes."""
    assert buffer.layout is not None and buffer.tensor is not None
    whole = program.tensor_of[buffer.tensor].shape
    ranks = buffer.layout.mesh.ranks[: 1 if buffer.layout.has_equal_shards(whole) else None]
    shapes = {buffer.layout.local_shape(whole, rank) for rank in ranks}
    if len(shapes) > 1:
        raise UnsupportedError(f"ranks have different parts of {buffer.tensor} {whole}")
    return shapes.pop()
