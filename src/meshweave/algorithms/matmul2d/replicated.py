"""MeshSlice with data parallelism on a 3D torus (MeshSlice, section 7).

Tokens are sharded over the third axis, `depth`, and the weight matrix is replicated over it, so that each layer
of the torus is a 2D mesh that runs MeshSlice on its own tokens. Unlike in a 2.5D product the base mesh need not
be square, and the inputs are not skewed. Layers communicate only where the result is the gradient of the weights:
its sum over tokens is then also one over `depth`.

Where Y or X is stationary, the dataflow says which dim counts tokens (`passes.TABLE`): M for os and ls, the
products of the forward pass and of the input's gradient, and K for rs, that of the weights' gradient. Where W is
stationary, tokens are another dim. Such products are computed correctly here, but another dim is sharded over
`depth`, which is no data parallelism then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from meshweave.algorithms.matmul2d.common.algorithm import Matmul2d
from meshweave.algorithms.matmul2d.common.extents import largest_extent
from meshweave.algorithms.matmul2d.common.problem import MESH, Matmul2dConfig, Matmul2dProblem, Placements
from meshweave.algorithms.matmul2d.common.slices import Slices, slices_of
from meshweave.algorithms.matmul2d.meshslice import build, least_tasks, runs, uniform_slices
from meshweave.base.errors import LayoutError
from meshweave.base.units import dtype_bytes
from meshweave.describe.layout import Layout, Replicate, Shard
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.network import factorisations
from meshweave.ir.program import Lane, On, Program
from meshweave.ir.program.ops import AllReduce
from meshweave.ir.program.views import FULL, View
from meshweave.ir.skeleton import Phase, Skeleton, Task
from meshweave.ir.work import Transfer, move_work


def placements(problem: Matmul2dProblem) -> Placements:
    """Return placements of tokens that are sharded over `row` and then `depth`, and of weights (or their gradient)
    that are replicated over `depth`."""
    sharded, replicated = (Shard(0), Shard(1), Shard(0)), (Shard(0), Shard(1), Replicate())
    weights = "c" if problem.dataflow == "rs" else "b"
    return {operand: replicated if operand == weights else sharded for operand in "abc"}


def _sums(problem: Matmul2dProblem) -> bool:
    return problem.dataflow == "rs" and problem.mesh_shape[2] > 1


def program(problem: Matmul2dProblem, config: Matmul2dConfig) -> Program:
    """Return the program. Raises LayoutError for a mesh without a third axis."""
    if len(problem.mesh_shape) != 3:
        raise LayoutError(
            f"data parallelism beside MeshSlice needs a third axis, not mesh {problem.mesh_shape}"
        )
    layers = build(problem, slices_of(problem, config), "meshslice_dp", placements(problem))
    if not _sums(problem):
        return layers
    gradient = View("c", (FULL, FULL))
    total = AllReduce(over=f"{MESH}.depth", out=gradient, src=gradient, lane="depth", name="sum_c")
    (on,) = layers.body
    assert isinstance(on, On)
    return replace(layers, lanes=(*layers.lanes, Lane("depth")), body=(replace(on, body=(*on.body, total)),))


# --- skeleton -------------------------------------------------------------------------------------------


def skeleton(problem: Matmul2dProblem, config: Matmul2dConfig) -> Skeleton:
    """Return the skeleton of MeshSlice on the largest layer, with the sum over layers."""
    slices, placed = slices_of(problem, config), placements(problem)
    listed = runs(problem, slices, placed)
    if not _sums(problem):
        return Skeleton.of_runs(listed)
    steps = [tasks for count, tasks in listed for _ in range(count)]
    for number, ending in enumerate(_endings(problem, slices)):
        steps[ending.step] += tuple(_ending_tasks(problem, slices, ending, number))
    return Skeleton.of_turns(steps)


class _Ending(NamedTuple):
    """The last slice of which a row of the mesh has elements: `part` in slice `step`, `rows` in all."""

    step: int
    part: int
    rows: int


def _endings(problem: Matmul2dProblem, slices: Slices) -> list[_Ending]:
    """Return the endings that may be the last: of the whole shards, and of the one that the end of M cuts short.

    The sum over layers waits for the last slice of which its row of the mesh has elements. On the shorter shard
    that may be a later slice, or more of it, but there is less to sum. Then either may end last.
    """
    count = problem.mesh_shape[0]
    each = -(-problem.m // count)
    endings: list[_Ending] = []
    for short, rows in enumerate((each, problem.m % each)):
        for step in reversed(range(len(slices.widths))):
            start, stop = slices.bounds(step)
            part = slices.largest_parts_of(count, start, stop - start)[short]
            if part:
                endings.append(_Ending(step, part, rows))
                break
    return endings[:1] if endings[-1][:2] <= endings[0][:2] else endings


def _ending_tasks(problem: Matmul2dProblem, slices: Slices, ending: _Ending, number: int) -> Iterator[Task]:
    """Yield the sum over layers of an ending.

    MeshSlice's own tasks copy the largest part of any row into place. A row with less does so in a lane of its
    own.
    """
    rows, before = problem.mesh_shape[0], "matmul" if problem.mesh_shape[0] == 1 else "scatter_c"
    columns = largest_extent(problem, placements(problem), "c", 1)
    if len(slices.widths) > 1:
        if ending.part < slices.largest_part(rows, ending.step):
            copy = move_work(ending.part * columns, problem.dtype)
            yield Task(f"place_c_{number}", f"row_{number}", copy, ((before, 0),))
            before = f"place_c_{number}"
        else:
            before = "place_c"
    yield replace(
        _sum(problem, ending.rows), name=f"sum_c_{number}", after=((before, 0),), lane=f"depth_{number}"
    )


def _sum(problem: Matmul2dProblem, rows: int) -> Task:
    columns = largest_extent(problem, placements(problem), "c", 1)
    size = rows * columns * dtype_bytes(problem.dtype)
    return Task("sum_c", "depth", Transfer("all_reduce", f"{MESH}.depth", problem.mesh_shape[2], size))


def least(problem: Matmul2dProblem) -> Iterator[Skeleton]:
    """Yield what any slicing needs, as for MeshSlice, with the sum over layers of the largest shard."""
    tasks = least_tasks(problem, placements(problem))
    if _sums(problem):
        tasks = (*tasks, _sum(problem, -(-problem.m // problem.mesh_shape[0])))
    yield Skeleton((Phase(1, tasks),))


# --- table entry ----------------------------------------------------------------------------------------


def traffic(problem: Matmul2dProblem, config: Matmul2dConfig, rank: int) -> dict[str, int]:
    """Return the bytes that a rank moves: each moving matrix crosses its axis once (MeshSlice, section 2.3.1), and
    the gradient of the weights crosses `depth` twice, to be reduced and gathered."""
    placed, out = placements(problem), {}
    for moving in (problem.horizontal, problem.vertical):
        shape = problem.stored_shape(moving.operand)
        local = Layout(problem.mesh, placed[moving.operand]).local_shape(shape, rank)
        others = shape[moving.dim] - local[moving.dim]
        moved = others * local[1 - moving.dim] * dtype_bytes(problem.dtype)
        if moved:
            out[f"{MESH}.{moving.axis}"] = moved
    if _sums(problem):
        local = Layout(problem.mesh, placed["c"]).local_shape((problem.m, problem.n), rank)
        layers = problem.mesh_shape[2]
        moved = 2 * (layers - 1) * local[0] * local[1] * dtype_bytes(problem.dtype) // layers
        out |= {f"{MESH}.depth": moved} if moved else {}
    return out


def meshes(num_chips: int) -> tuple[tuple[int, ...], ...]:
    """Return every (rows, columns, depth) of that many chips with a depth above 1."""
    return tuple(shape for shape in factorisations(num_chips, 3) if shape[2] > 1)


class MeshSliceDataParallel(Matmul2d):
    name = "meshslice_dp"
    title = "MeshSlice + DP"
    source = "Nam et al., ISCA '25, section 7"

    def mesh_shapes(self, num_chips: int) -> tuple[tuple[int, ...], ...]:
        return meshes(num_chips)

    def operand_placements(self, problem: Matmul2dProblem) -> Placements:
        return placements(problem)

    def candidates(
        self, problem: Matmul2dProblem, cluster: Cluster | None = None
    ) -> Iterator[Matmul2dConfig]:
        return uniform_slices(problem)

    def program(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Program:
        return program(problem, config)

    def skeleton(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Skeleton:
        return skeleton(problem, config)

    def traffic(self, problem: Matmul2dProblem, config: Matmul2dConfig, rank: int) -> dict[str, int]:
        return traffic(problem, config, rank)

    def least(self, problem: Matmul2dProblem) -> Iterator[Skeleton]:
        return least(problem)


MESHSLICE_DP = MeshSliceDataParallel()
