"""MeshSlice with data parallelism on a 3D torus (MeshSlice, section 7).

Tokens are cut over the third axis, `depth`, and the weight matrix is copied along it, so that each layer of
the torus is a 2D mesh that runs MeshSlice on its own tokens. Against a 2.5D product the base mesh need not be
square, and the inputs are not skewed. Layers meet only where the result is the gradient of the weights: the
sum over tokens is then also one over `depth`.

Which dim counts tokens follows from the dataflow where Y or X stays put (`passes.TABLE`): M for os and ls,
the products of the forward pass and of the gradient of the input, and K for rs, that of the weights. Where W
stays put the tokens are N or M or K of other products; those are still computed correctly here, but with
another dim cut over `depth`, which is then no data parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from meshweave.algorithms.matmul2d.common.algorithm import Matmul2d
from meshweave.algorithms.matmul2d.common.extents import largest_extent
from meshweave.algorithms.matmul2d.common.problem import MESH, Config, MatmulProblem, Placements
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


def placements(problem: MatmulProblem) -> Placements:
    """Matrices with tokens as rows are cut over `depth` as well, behind the rows of the mesh; the third one,
    the weights or their gradient, is copied along it."""
    cut, copied = (Shard(0), Shard(1), Shard(0)), (Shard(0), Shard(1), Replicate())
    weights = "c" if problem.dataflow == "rs" else "b"
    return {operand: copied if operand == weights else cut for operand in "abc"}


def _sums(problem: MatmulProblem) -> bool:
    return problem.dataflow == "rs" and problem.mesh_shape[2] > 1


def program(problem: MatmulProblem, config: Config) -> Program:
    """Raises LayoutError for a mesh without a third axis."""
    if len(problem.mesh_shape) != 3:
        raise LayoutError(
            f"data parallelism beside MeshSlice needs a third axis, not mesh {problem.mesh_shape}"
        )
    made = build(problem, slices_of(problem, config), "meshslice_dp", placements(problem))
    if not _sums(problem):
        return made
    gradient = View("c", (FULL, FULL))
    total = AllReduce(over=f"{MESH}.depth", out=gradient, src=gradient, lane="depth", name="sum_c")
    (on,) = made.body
    assert isinstance(on, On)
    return replace(made, lanes=(*made.lanes, Lane("depth")), body=(replace(on, body=(*on.body, total)),))


# --- skeleton -------------------------------------------------------------------------------------------


def skeleton(problem: MatmulProblem, config: Config) -> Skeleton:
    """That of MeshSlice on the largest layer, and the sum over layers."""
    slices, placed = slices_of(problem, config), placements(problem)
    listed = runs(problem, slices, placed)
    if not _sums(problem):
        return Skeleton.of_runs(listed)
    turns = [tasks for count, tasks in listed for _ in range(count)]
    for number, ending in enumerate(_endings(problem, slices)):
        turns[ending.turn] += tuple(_ending_tasks(problem, slices, ending, number))
    return Skeleton.of_turns(turns)


class _Ending(NamedTuple):
    """Some row of the mesh has its last elements of C in slice `turn`, `part` of them; its shard has `rows`."""

    turn: int
    part: int
    rows: int


def _endings(problem: MatmulProblem, slices: Slices) -> list[_Ending]:
    """Those that may be the last to end: of the whole shards, and of the one that the end of M cuts short.

    The sum waits for the last slice of which its row of the mesh has something at all. That may be a later
    one, or more of it, on the shorter shard, which has less to sum; then either may end last.
    """
    count = problem.mesh_shape[0]
    each = -(-problem.m // count)
    found: list[_Ending] = []
    for short, rows in enumerate((each, problem.m % each)):
        for turn in reversed(range(len(slices.widths))):
            start, stop = slices.bounds(turn)
            part = slices.largest_of_each(count, start, stop - start)[short]
            if part:
                found.append(_Ending(turn, part, rows))
                break
    return found[:1] if found[-1][:2] <= found[0][:2] else found


def _ending_tasks(problem: MatmulProblem, slices: Slices, ending: _Ending, number: int) -> Iterator[Task]:
    """The sum of an ending. What MeshSlice's own tasks put in place in that turn is the largest part of any
    row; a row with less of it does so in a lane of its own."""
    rows, before = problem.mesh_shape[0], "matmul" if problem.mesh_shape[0] == 1 else "scatter_c"
    columns = largest_extent(problem, placements(problem), "c", 1)
    if len(slices.widths) > 1:
        if ending.part < slices.largest_part(rows, ending.turn):
            copy = move_work(ending.part * columns, problem.dtype)
            yield Task(f"place_c_{number}", f"row_{number}", copy, ((before, 0),))
            before = f"place_c_{number}"
        else:
            before = "place_c"
    yield replace(
        _sum(problem, ending.rows), name=f"sum_c_{number}", after=((before, 0),), lane=f"depth_{number}"
    )


def _sum(problem: MatmulProblem, rows: int) -> Task:
    columns = largest_extent(problem, placements(problem), "c", 1)
    size = rows * columns * dtype_bytes(problem.dtype)
    return Task("sum_c", "depth", Transfer("all_reduce", f"{MESH}.depth", problem.mesh_shape[2], size))


def least(problem: MatmulProblem) -> Iterator[Skeleton]:
    """What is left of any slicing, as for MeshSlice, and the sum of the largest shard."""
    tasks = least_tasks(problem, placements(problem))
    if _sums(problem):
        tasks = (*tasks, _sum(problem, -(-problem.m // problem.mesh_shape[0])))
    yield Skeleton((Phase(1, tasks),))


# --- table entry ----------------------------------------------------------------------------------------


def traffic(problem: MatmulProblem, config: Config, rank: int) -> dict[str, int]:
    """Each moving matrix crosses its axis of the layer once (MeshSlice, section 2.3.1); the gradient of the
    weights crosses `depth` twice, to be summed and to be spread."""
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
    """Every (rows, columns, depth) of that many chips with a depth; without one it is MeshSlice."""
    return tuple(shape for shape in factorisations(num_chips, 3) if shape[2] > 1)


class MeshSliceDataParallel(Matmul2d):
    name = "meshslice_dp"
    title = "MeshSlice + DP"
    source = "Nam et al., ISCA '25, section 7"

    def mesh_shapes(self, num_chips: int) -> tuple[tuple[int, ...], ...]:
        return meshes(num_chips)

    def operand_placements(self, problem: MatmulProblem) -> Placements:
        return placements(problem)

    def candidates(self, problem: MatmulProblem, cluster: Cluster | None = None) -> Iterator[Config]:
        return uniform_slices(problem)

    def program(self, problem: MatmulProblem, config: Config) -> Program:
        return program(problem, config)

    def skeleton(self, problem: MatmulProblem, config: Config) -> Skeleton:
        return skeleton(problem, config)

    def traffic(self, problem: MatmulProblem, config: Config, rank: int) -> dict[str, int]:
        return traffic(problem, config, rank)

    def least(self, problem: MatmulProblem) -> Iterator[Skeleton]:
        return least(problem)


MESHSLICE_DP = MeshSliceDataParallel()
