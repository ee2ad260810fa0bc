"""2.5D products: Cannon on c meshes of P x P at once (Solomonik and Demmel, Euro-Par 2011; MeshSlice, section 7).

With both inputs replicated over c meshes there is less traffic: each mesh does P / c of Cannon's P steps, from
another start, and shifts only P / c - 1 times after the skew. Its sums are a term of C. The terms are reduced
over `depth`, and each mesh keeps its share of the rows. With c = 1 this would be Cannon's product, with c = P a
3D product, in which nothing is shifted at all.

Any mesh may take any of the c ranges of steps. Here mesh l begins at step (l + 1) P / c, modulo P, so that rank 0,
whose bytes are reported for all, is not the one that needs no skew.
"""

from __future__ import annotations

import math

from meshweave.algorithms.matmul2d.cannon import Cannon, CannonSteps, traffic
from meshweave.algorithms.matmul2d.common.problem import (
    MESH,
    Matmul2dConfig,
    Matmul2dProblem,
    Placements,
    two_d_placements,
)
from meshweave.base.errors import LayoutError
from meshweave.base.units import dtype_bytes
from meshweave.describe.layout import Layout, Replicate, Shard
from meshweave.ir.program.expressions import Var


def _mesh_shapes(num_chips: int) -> tuple[tuple[int, ...], ...]:
    """Return every (P, P, c) of that many chips with 1 < c and c dividing P."""
    shapes = []
    for side in range(2, math.isqrt(num_chips) + 1):
        layers, remainder = divmod(num_chips, side * side)
        if not remainder and layers > 1 and side % layers == 0:
            shapes.append((side, side, layers))
    return tuple(shapes)


def depth_steps(problem: Matmul2dProblem) -> CannonSteps:
    """Return the P / c steps of Cannon's product that each of the c layers of a P x P x c mesh does.

    The first step is an expression in the coordinate along `depth`.

    Raises:
        LayoutError: the mesh is not P x P x c with 1 < c and c dividing P.
    """
    shape = problem.mesh_shape
    if shape not in _mesh_shapes(problem.num_chips):
        raise LayoutError(f"a 2.5D product needs a mesh P x P x c where c > 1 divides P, not {shape}")
    count = shape[0] // shape[2]
    return CannonSteps(shape[0], count, (Var(f"{MESH}.depth") + 1) * count)


class TwoHalfD(Cannon):
    """Cannon's product split by steps over `depth`, and one reduce-scatter of C over it.

    Inputs are replicated over `depth`; rows of C are sharded over `row` and then `depth`. There is one config.
    """

    name = "25d"
    title = "2.5D"
    source = "Solomonik and Demmel 2011; MeshSlice, section 7"

    def mesh_shapes(self, num_chips: int) -> tuple[tuple[int, ...], ...]:
        """Return every mesh shape (P, P, c) of `num_chips` chips with 1 < c and c dividing P."""
        return _mesh_shapes(num_chips)

    def operand_placements(self, problem: Matmul2dProblem) -> Placements:
        """Return the placements of "a", "b" and "c", for each one per mesh axis (`row`, `col`, `depth`).

        A and B are replicated over `depth`; rows of C are sharded over `row` and then `depth`.
        """
        replicated = (Shard(0), Shard(1), Replicate())
        return {"a": replicated, "b": replicated, "c": (Shard(0), Shard(1), Shard(0))}

    def steps(self, problem: Matmul2dProblem) -> CannonSteps:
        """Return the steps of each layer, as `depth_steps` does, which raises LayoutError."""
        return depth_steps(problem)

    def traffic(self, problem: Matmul2dProblem, config: Matmul2dConfig, rank: int) -> dict[str, int]:
        """Return a global rank's bytes of communication, by "mesh.axis": of its steps and of sums over `depth`."""
        side, _, layers = problem.mesh_shape
        num_steps = side // layers
        first_step = (problem.mesh.coords(rank)[2] + 1) * num_steps
        moved = traffic(problem, rank, num_steps, first_step)
        shape = (problem.m, problem.n)
        rows, columns = Layout(problem.mesh, two_d_placements(problem)["c"]).local_shape(shape, rank)
        own_rows, _ = self.placements(problem)["C"].local_shape(shape, rank)
        sum_bytes = (rows - own_rows) * columns * dtype_bytes(problem.dtype)
        return moved | ({f"{MESH}.depth": sum_bytes} if sum_bytes else {})


TWO_HALF_D = TwoHalfD()
