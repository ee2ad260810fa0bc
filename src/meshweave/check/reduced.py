"""Products of a plan at a size that a laptop can multiply: what stays, and what shrinks.

Dataflow, slices and lanes are the plan's, and so is the mesh shape as near as the number of processes allows;
sizes shrink in proportion.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.matmul2d.common.passes import pass_problem
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.base.errors import LayoutError
from meshweave.describe.layout.shapes import nearest_mesh_shape
from meshweave.ir.program import Program
from meshweave.tune.selection import PlannedProduct

SLICED_DIM_STEP = 8
"""Reduced sizes are multiples of this times the mesh's sides, so that shards stay equal and can be sliced."""


@dataclass(frozen=True)
class ReducedLayer:
    """Sizes of a layer, its tokens and features over all ranks, and the shape of the mesh to run it on."""

    tokens: int
    in_features: int
    out_features: int
    mesh_shape: tuple[int, ...]


@dataclass(frozen=True)
class ReducedProduct:
    """A product of a plan at reduced size.

    Attributes:
        planned: the product in the plan, at full size.
        config: the planned config, possibly with fewer slices.
        problem: the product at reduced size; None where there is no mesh to run it on.
        program: its program; None where there is none.
        skipped: why there is no program; "" where there is one.
    """

    planned: PlannedProduct
    config: Matmul2dConfig
    problem: Matmul2dProblem | None = None
    program: Program | None = None
    skipped: str = ""

    @property
    def algorithm(self) -> str:
        """Return the name of the algorithm in the plan."""
        return self.planned.candidate.algorithm

    @property
    def title(self) -> str:
        """Return the algorithm, layer and pass: `meshslice, ff1 backward data`."""
        return f"{self.algorithm}, {self.planned.layer.name} {self.planned.pass_plan.name.replace('_', ' ')}"


def reduce_layer(
    sizes: tuple[int, int, int],
    planned_mesh: Sequence[int],
    mesh_shapes: Sequence[tuple[int, ...]],
    max_dim: int,
) -> ReducedLayer:
    """Return the sizes at which to run a layer here, on the mesh of `mesh_shapes` nearest to the planned one.

    First the shards keep their size (tokens follow the rows of the mesh, features its columns), unless the mesh
    has more rows or columns than planned. Then all sizes shrink by one factor until none is over `max_dim`. Each
    is rounded down to a multiple of `SLICED_DIM_STEP` times the least common multiple of the mesh's sides, and
    is that multiple at least, the planned size at most. Raises LayoutError where `mesh_shapes` is empty.

    Args:
        sizes: (tokens over all ranks, in features, out features) of the planned layer.
        planned_mesh: (rows, columns) of the planned mesh.
    """
    shape = nearest_mesh_shape(planned_mesh, mesh_shapes)
    ratio = (shape[0] / planned_mesh[0], shape[1] / planned_mesh[1], shape[1] / planned_mesh[1])
    kept = [size * min(factor, 1.0) for size, factor in zip(sizes, ratio, strict=True)]
    scale = min(1.0, max_dim / max(kept))
    step = SLICED_DIM_STEP * math.lcm(*shape)
    tokens, ins, outs = (
        min(size, max(round(part * scale) // step * step, step))
        for size, part in zip(sizes, kept, strict=True)
    )
    return ReducedLayer(tokens, ins, outs, shape)


def reduce_products(
    products: Iterable[PlannedProduct],
    num_ranks: int,
    max_dim: int,
    *,
    where_too_small: Literal["grow", "drop slices"] = "grow",
) -> Iterator[ReducedProduct]:
    """Yield each product at reduced size on a mesh of `num_ranks` ranks, in order, in float32.

    One that has no such mesh, or does not fit at this size, is yielded without a program and with `skipped`.

    Args:
        max_dim: sizes are reduced by one factor until none is larger, as `reduce_layer` says.
        where_too_small: what happens to a dim that became smaller than the planned slices of it. "grow": all
            dims grow, up to `max_dim` and their planned sizes, until the slices fit. "drop slices": the last
            slices are left out.
    """
    for planned in products:
        config, entry = planned.pass_plan.config, PRODUCTS_2D.named(planned.candidate.entry_name)
        shapes = entry.mesh_shapes(num_ranks)
        if not shapes:
            yield ReducedProduct(planned, config, skipped=f"{entry.name} has no mesh of {num_ranks} ranks")
            continue
        layer = planned.layer
        whole = layer.tokens, layer.in_features, layer.out_features
        small = reduce_layer(whole, planned.candidate.mesh_shape, shapes, max_dim)
        sizes = small.tokens, small.in_features, small.out_features
        if where_too_small == "grow":
            step = SLICED_DIM_STEP * max(small.mesh_shape)
            needed = min(-(-config.slice_count * config.block // step) * step, max_dim)
            tokens, ins, outs = (
                max(size, min(needed, most)) for size, most in zip(sizes, whole, strict=True)
            )
            sizes = tokens, ins, outs
        pass_plan = planned.pass_plan
        problem = pass_problem(
            layer.stationary,
            pass_plan.name,
            *sizes,
            small.mesh_shape,
            "float32",
            transposed=layer.transposed,
        )
        problem = replace(problem, dataflow=pass_plan.dataflow)
        if where_too_small == "drop slices":
            config = replace(config, slices=config.slices[: problem.sliced_size])
        try:
            yield ReducedProduct(planned, config, problem, entry.program(problem, config))
        except LayoutError as error:
            reason = f"{config} does not fit at this size ({error}); raise --max-dim"
            yield ReducedProduct(planned, config, problem, skipped=reason)
