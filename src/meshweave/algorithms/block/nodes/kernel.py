"""The kernels of nodes on a rank, by the roles of a strategy alone: no program is written.

They are products, attention, norms, activations and sums with the residual. A program computes them one after the
other, so that a layer takes at least their sum: searches rule layers out by that. What else computes is small:
gains and statistics of norms, sums over ring steps, copies. Strategies that include 2D products cut each product
along the features of its operand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from meshweave.algorithms.block.place import side_of
from meshweave.algorithms.block.problem import BlockProblem
from meshweave.algorithms.block.roles import AxisDims, Roles, Side
from meshweave.algorithms.block.sides import largest_extent
from meshweave.base.units import dtype_bytes
from meshweave.describe.model.nodes import Features
from meshweave.ir.work import Compute

PassPart = Literal["forward", "backward"]

PARTS: tuple[tuple[PassPart, str], ...] = (("forward", ""), ("backward", "input_grad"))
"""The parts of a layer, and what `Compute.part` is called in them."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A computation of the first rank, which has the largest shards.

    Attributes:
        work: its FLOPs, bytes and sizes.
        part: the part of the layer that it belongs to, "forward" or "backward".
        times: how often it runs.
        sliced: for a product, the index in (m, n, k) of the dim that has the features of the forward operand;
            0 for other kernels.
    """

    work: Compute
    part: PassPart
    times: int = 1
    sliced: int = 0


class RankSizes:
    """Sizes of tensors on the first rank, which has the largest shards.

    A layout, `dims`, has for each mesh axis the dim that it shards, "" or "partial".
    """

    def __init__(self, problem: BlockProblem) -> None:
        self.problem, self._mesh = problem, problem.mesh
        self._batch, self._sequence = Side("batch", problem.batch), Side("sequence", problem.sequence)

    def batch(self, dims: AxisDims) -> int:
        """Return how many sequences the first rank has in layout `dims`."""
        return largest_extent(self._mesh, self._batch, dims)

    def sequence(self, dims: AxisDims) -> int:
        """Return how many positions of each sequence the first rank has in layout `dims`."""
        return largest_extent(self._mesh, self._sequence, dims)

    def tokens(self, dims: AxisDims) -> int:
        """Return how many tokens the first rank has in layout `dims`: sequences times positions of each."""
        return self.batch(dims) * self.sequence(dims)

    def features(self, features: Features, dims: AxisDims) -> int:
        """Return how many of these features the first rank has in layout `dims`; units are never split."""
        return largest_extent(self._mesh, side_of(features), dims)

    def ring(self, roles: Roles) -> int:
        """Return the number of ranks around which ring attention sends keys and values; 1 without a ring."""
        return 1 if roles.ring_axis is None else self._mesh.shape[roles.ring_axis]

    def streamed(
        self, call: str, shape: tuple[int, ...], passes: int, part: PassPart, name: str = ""
    ) -> Kernel:
        """Return a kernel that is priced by memory alone: `passes` times the bytes of an array, no FLOPs.

        Args:
            call: the kind of work, a key of `CALL_DIMS` whose sizes are the dims of one array, such as "norm".
            shape: the array's sizes on the first rank, those that `CALL_DIMS` names for `call`; its elements
                have the problem's dtype.
            passes: reads of the array plus writes of it.
            part: the part of the layer that it belongs to, "forward" or "backward".
            name: the gradient that it computes, "input_grad" or "weight_grad"; "" forward, or where it is a sum.
        """
        dtype = self.problem.dtype
        moved = passes * math.prod(shape) * dtype_bytes(dtype)
        return Kernel(Compute("call", 0, moved, dtype=dtype, call=call, shape=shape, part=name), part)
