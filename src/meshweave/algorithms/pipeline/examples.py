"""Small pipelines that every schedule is tried on: chains, skips, uneven stages, different meshes and
layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshweave.algorithms.pipeline.functions import STASH_BYTES_PER_ROW
from meshweave.algorithms.pipeline.problem import (
    Edge,
    PartCost,
    PipelineProblem,
    Recompute,
    Stage,
    Stash,
)
from meshweave.describe.layout import Shard
from meshweave.describe.layout.mesh import Mesh


def small_stage(
    mesh: Mesh,
    rows: int,
    *,
    work: int = 1,
    data_axes: tuple[str, ...] = (),
    is_sharded: bool = False,
    recomputes: bool = False,
    parameters: int = 4,
) -> Stage:
    """Return a stage with small costs, whose stash has the bytes that `pipeline.functions` keep of a micro-batch.

    Args:
        mesh: its ranks.
        rows: rows of a micro-batch, over all data-parallel ranks.
        work: MFLOPs of the forward and of each gradient, of one micro-batch and rank; each moves 10^4 bytes per
            MFLOP.
        data_axes, is_sharded, parameters: as in `Stage`.
        recomputes: whether the stash's share that is freed by the input gradient is recomputed, at the cost of a
            forward.
    """
    share = rows
    for axis in data_axes:
        share //= mesh.size(axis)
    each = STASH_BYTES_PER_ROW
    stash = Stash(
        *(share * size for size in (each.until_input_grad, each.until_weight_grad, each.from_input_grad))
    )
    cost = PartCost(work * 10**6, work * 10**4)
    recompute = Recompute(cost, stash.until_weight_grad) if recomputes else None
    return Stage(mesh, cost, cost, cost, parameters, stash, recompute, data_axes, is_sharded)


def chain_of_ranks(
    stage_ranks: Sequence[int],
    micro_batches: int,
    rows: int = 1,
    *,
    work: Sequence[int] = (1,),
    skips: Sequence[tuple[int, int]] = (),
    recomputes: Sequence[int] = (),
) -> PipelineProblem:
    """Return a problem of stages in a row, stage i on the single chip with rank `stage_ranks[i]`.

    Args:
        stage_ranks: for each stage its rank.
        micro_batches, rows: micro-batches of a step, and rows of each.
        work: MFLOPs of each part of a stage; stages take them in turn, cyclically.
        skips: (source stage, target stage) of each further edge.
        recomputes: the stages that recompute.
    """
    stages = [
        small_stage(
            Mesh.of(f"p{rank}", (1,), ("x",), rank),
            rows,
            work=work[number % len(work)],
            recomputes=number in recomputes,
        )
        for number, rank in enumerate(stage_ranks)
    ]
    return PipelineProblem.chain(stages, micro_batches, rows, (2,), skips)


def two_meshes(micro_batches: int = 2) -> PipelineProblem:
    """Return a pipeline of two stages, each on two ranks, with a reshard between them.

    The first stage is data-parallel with sharded parameters (FSDP), the second tensor-parallel.
    """
    stages = (
        small_stage(Mesh.of("p0", (2,), ("dp",)), 2, data_axes=("dp",), is_sharded=True),
        small_stage(Mesh.of("p1", (2,), ("tp",), 2), 2, work=2),
    )
    edge = Edge(0, 1, (2,), target_placements=(Shard(1),))
    return PipelineProblem(stages, (edge,), micro_batches, 2)


def example_problems() -> Iterator[PipelineProblem]:
    """Yield small problems, the simplest first: chains, skip connections, resharding, several stages per rank."""
    yield chain_of_ranks((0, 1), 4, 2)
    yield chain_of_ranks((0, 1, 2), 2, work=(1, 3, 2), skips=((0, 2),), recomputes=(1,))
    yield two_meshes()
    yield chain_of_ranks((0, 1, 0, 1), 3)
    yield chain_of_ranks((0, 1, 1, 0), 2, skips=((0, 3),))
