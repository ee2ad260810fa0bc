"""1D baselines on a ring of P chips: tensor parallelism with sequence sharding, and FSDP.

Both cut every matrix along one dim and move one of the three around the ring, decomposed and overlapped with
the products as Wang et al. do (MeshSlice, section 4.3). They differ in what moves:

    tensor parallel   os  gathers A (tokens)      ls  scatters C (tokens)      rs  gathers A (tokens)
    FSDP              os  gathers B (weights)     ls  gathers B (weights)      rs  scatters C (weight gradient)

Tensor parallelism shards activations by tokens between layers (Korthikanti et al., MLSys '23) and each weight
by its in or out features, so activations travel; FSDP (Zhao et al., VLDB '23) shards tokens throughout and
weights by rows, so weights travel. A ring uses two of the four links that a chip has in a 2D torus.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshweave.algorithms.matmul2d.common.problem import (
    Algorithm,
    Config,
    Dataflow,
    MatmulProblem,
    Moving,
    Placements,
)
from meshweave.algorithms.matmul2d.common.ring import Ring, build
from meshweave.algorithms.matmul2d.common.ring_costs import build_skeleton, peak_bytes, traffic, turn_counts
from meshweave.describe.layout import Replicate, Shard
from meshweave.ir.program import Program
from meshweave.ir.skeleton import Skeleton

_TENSOR_DIMS: dict[Dataflow, tuple[int, int, int]] = {"os": (0, 1, 1), "ls": (1, 1, 0), "rs": (0, 1, 1)}
"""Sharded dim of A, B, C as stored."""
_TENSOR_MOVES: dict[Dataflow, str] = {"os": "a", "ls": "c", "rs": "a"}
_FSDP_MOVES: dict[Dataflow, str] = {"os": "b", "ls": "b", "rs": "c"}


def _ring_meshes(num_chips: int) -> tuple[tuple[int, ...], ...]:
    return ((1, num_chips),)


def _placements(dims: tuple[int, int, int]) -> Placements:
    return {operand: (Replicate(), Shard(dim)) for operand, dim in zip("abc", dims, strict=True)}


def tensor_placements(problem: MatmulProblem) -> Placements:
    """Activations by tokens or features, weights by features, as the dataflow demands."""
    return _placements(_TENSOR_DIMS[problem.dataflow])


def fsdp_placements(problem: MatmulProblem) -> Placements:
    """Rows of every stored matrix: tokens of activations, the first dim of weights."""
    return _placements((0, 0, 0))


def _ring(problem: MatmulProblem, config: Config, placements: Placements, operand: str) -> Ring:
    moving = Moving(operand, "col", 0, operand == "c")
    return Ring(problem, placements, moving, None, config.slice_count)


def _tensor_ring(problem: MatmulProblem, config: Config) -> Ring:
    return _ring(problem, config, tensor_placements(problem), _TENSOR_MOVES[problem.dataflow])


def _fsdp_ring(problem: MatmulProblem, config: Config) -> Ring:
    return _ring(problem, config, fsdp_placements(problem), _FSDP_MOVES[problem.dataflow])


def _configs(problem: MatmulProblem) -> Iterator[Config]:
    for count in turn_counts(problem.axis_size("col")):
        yield Config((1,) * count)


def tensor_program(problem: MatmulProblem, config: Config) -> Program:
    return build(_tensor_ring(problem, config), "tp1d")


def fsdp_program(problem: MatmulProblem, config: Config) -> Program:
    return build(_fsdp_ring(problem, config), "fsdp")


def tensor_skeleton(problem: MatmulProblem, config: Config) -> Skeleton:
    return build_skeleton(_tensor_ring(problem, config))


def fsdp_skeleton(problem: MatmulProblem, config: Config) -> Skeleton:
    return build_skeleton(_fsdp_ring(problem, config))


TENSOR_1D = Algorithm(
    name="tp1d",
    title="1D tensor parallel",
    source="Korthikanti et al., MLSys '23; MeshSlice, section 4.3",
    dataflows=("os", "ls", "rs"),
    program=tensor_program,
    skeleton=tensor_skeleton,
    configs=_configs,
    traffic=lambda problem, config, rank: traffic(_tensor_ring(problem, config), rank),
    peak=lambda problem, config: peak_bytes(_tensor_ring(problem, config)),
    meshes=_ring_meshes,
    placements=tensor_placements,
    uneven_exact=False,
)

FSDP = Algorithm(
    name="fsdp",
    title="FSDP",
    source="Zhao et al., VLDB '23; MeshSlice, section 4.3",
    dataflows=("os", "ls", "rs"),
    program=fsdp_program,
    skeleton=fsdp_skeleton,
    configs=_configs,
    traffic=lambda problem, config, rank: traffic(_fsdp_ring(problem, config), rank),
    peak=lambda problem, config: peak_bytes(_fsdp_ring(problem, config)),
    meshes=_ring_meshes,
    placements=fsdp_placements,
    uneven_exact=False,
)
