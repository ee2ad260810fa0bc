"""1D baselines on a ring of P chips: tensor parallelism with sequence sharding, and FSDP.

Both shard every matrix along one dim and move one of the three around the ring, in steps that overlap with the
products as in Wang et al. (MeshSlice, section 4.3). They differ in the matrix that moves:

    tensor parallel   os  gathers A (tokens)      ls  scatters C (tokens)      rs  gathers A (tokens)
    FSDP              os  gathers B (weights)     ls  gathers B (weights)      rs  scatters C (weight gradient)

Tensor parallelism shards activations by tokens between layers (Korthikanti et al., MLSys '23) and each weight
by its in or out features, so activations travel; FSDP (Zhao et al., VLDB '23) shards tokens throughout and
weights by rows, so weights travel. A ring uses two of the four links that a chip has in a 2D torus.

Which operand is a weight depends on the layer's dataflow (`passes`), so each chooses its dataflows as its authors
do, whatever the sizes (`own_stationary`). Tensor parallelism alternates Megatron's column-parallel layers (Y
stays: tokens are gathered) and row-parallel ones (X stays: tokens are reduced and scattered). In FSDP Y stays in
every layer: weights are gathered in the forward and the backward data pass, and their gradient is reduced and
scattered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from meshweave.algorithms.matmul2d.common.problem import (
    Dataflow,
    Matmul2dConfig,
    Matmul2dProblem,
    MovingMatrix,
    Placements,
)
from meshweave.algorithms.matmul2d.common.ring import RingProduct
from meshweave.algorithms.matmul2d.common.ring_algorithm import RingAlgorithm
from meshweave.algorithms.matmul2d.common.ring_costs import iteration_counts
from meshweave.base.errors import LayoutError
from meshweave.describe.layout import Replicate, Shard
from meshweave.describe.machine.cluster import Cluster

_TENSOR_DIMS: dict[Dataflow, tuple[int, int, int]] = {"os": (0, 1, 1), "ls": (1, 1, 0), "rs": (0, 1, 1)}
"""Sharded dim of A, B, C as stored."""
_TENSOR_MOVES: dict[Dataflow, str] = {"os": "a", "ls": "c", "rs": "a"}
"""The operand that travels."""
_FSDP_MOVES: dict[Dataflow, str] = {"os": "b", "ls": "b", "rs": "c"}


def _placements(dims: tuple[int, int, int]) -> Placements:
    return {operand: (Replicate(), Shard(dim)) for operand, dim in zip("abc", dims, strict=True)}


class _OneRing(RingAlgorithm):
    """A product on a ring of all chips, along which one matrix travels.

    A config chooses the number of iterations.
    """

    moves: ClassVar[dict[Dataflow, str]]
    """The operand that travels, by dataflow."""

    def mesh_shapes(self, num_chips: int) -> tuple[tuple[int, ...], ...]:
        """Return the one mesh shape (1, num_chips): all chips in a ring."""
        return ((1, num_chips),)

    def candidates(
        self, problem: Matmul2dProblem, cluster: Cluster | None = None
    ) -> Iterator[Matmul2dConfig]:
        """Yield a config for each number of iterations in `iteration_counts`, ascending; `cluster` is ignored."""
        for count in iteration_counts(problem.axis_size("col")):
            yield Matmul2dConfig((1,) * count)

    def ring(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> RingProduct:
        """Return the ring of all chips, around which the operand `self.moves[problem.dataflow]` travels.

        Raises LayoutError where the mesh has more than two axes.
        """
        if len(problem.mesh_shape) != 2:
            raise LayoutError(f"one ring needs a mesh of two axes, 1 x P, not {problem.mesh_shape}")
        operand = self.moves[problem.dataflow]
        moving = MovingMatrix(operand, "col", 0, operand == "c")
        return RingProduct(problem, self.operand_placements(problem), moving, None, config.slice_count)


class TensorParallel1d(_OneRing):
    """Tensor parallelism with sequence sharding: activations travel around the ring, weights stay."""

    name = "tp1d"
    title = "1D tensor parallel"
    source = "Korthikanti et al., MLSys '23; MeshSlice, section 4.3"
    moves = _TENSOR_MOVES
    own_stationary = ("y", "x")

    def operand_placements(self, problem: Matmul2dProblem) -> Placements:
        """Return the placements of "a", "b", "c": all are sharded over all chips, along one dim each.

        The dims of A, B and C as stored are 0, 1, 1 for dataflows "os" and "rs", and 1, 1, 0 for "ls". "os" is
        Megatron's column-parallel layer, "ls" its row-parallel one, "rs" the gradient of the weights of either.
        """
        return _placements(_TENSOR_DIMS[problem.dataflow])


class FullyShardedDataParallel(_OneRing):
    """FSDP: weights, or their gradient, travel around the ring; activations stay."""

    name = "fsdp"
    title = "FSDP"
    source = "Zhao et al., VLDB '23; MeshSlice, section 4.3"
    moves = _FSDP_MOVES
    own_stationary = ("y",)

    def operand_placements(self, problem: Matmul2dProblem) -> Placements:
        """Return the placements of "a", "b", "c": all are sharded over all chips along dim 0, their rows."""
        return _placements((0, 0, 0))


TENSOR_1D = TensorParallel1d()
FSDP = FullyShardedDataParallel()
