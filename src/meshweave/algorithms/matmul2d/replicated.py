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

from meshweave.algorithms.matmul2d.common.extents import largest_extent
from meshweave.algorithms.matmul2d.common.problem import MESH, Matmul2dConfig, Matmul2dProblem, Placements
from meshweave.algorithms.matmul2d.common.slices import Slices, slices_of
from meshweave.algorithms.matmul2d.meshslice import MeshSlice, build, lower_bound_tasks, task_runs
from meshweave.algorithms.matrix_views import full_matrix
from meshweave.base.errors import LayoutError
from meshweave.base.units import dtype_bytes
from meshweave.describe.layout import Layout, Replicate, Shard
from meshweave.describe.layout.shapes import factorisations
from meshweave.ir.program import Lane, On, Program
from meshweave.ir.program.ops import AllReduce
from meshweave.ir.skeleton import Phase, Skeleton, Task
from meshweave.ir.work import Transfer, move_work


def _placements(problem: Matmul2dProblem) -> Placements:
    """Return placements of tokens over `row` and then `depth`, and of weights replicated over `depth`."""
    sharded, replicated = (Shard(0), Shard(1), Shard(0)), (Shard(0), Shard(1), Replicate())
    weights = "c" if problem.dataflow == "rs" else "b"
    return {operand: replicated if operand == weights else sharded for operand in "abc"}


def _placements_here(problem: Matmul2dProblem) -> Placements:
    """Return `_placements`. Raises LayoutError where the problem's mesh has no third axis."""
    if len(problem.mesh_shape) != 3:
        raise LayoutError(
            f"data parallelism beside MeshSlice needs a third axis, not mesh {problem.mesh_shape}"
        )
    return _placements(problem)


def _sums_over_depth(problem: Matmul2dProblem) -> bool:
    return problem.dataflow == "rs" and problem.mesh_shape[2] > 1


# --- skeleton -------------------------------------------------------------------------------------------


class _Ending(NamedTuple):
    """The last slice of which a row of the mesh holds elements.

    Attributes:
        step: number of the slice.
        part: elements of that slice in the mesh row.
        rows: elements of all slices in the mesh row, which are rows of C.
    """

    step: int
    part: int
    rows: int


def _endings(problem: Matmul2dProblem, slices: Slices) -> list[_Ending]:
    """Return the endings of the mesh rows whose sum over layers may finish last, one or two.

    The sum over layers waits for the last slice of which its mesh row has elements. The last mesh row may have a
    shorter shard. Its last slice may come later than that of the whole shards, but it has less to sum. Then either
    may finish last, and both are returned.
    """
    count = problem.mesh_shape[0]
    shard_rows = -(-problem.m // count)
    endings: list[_Ending] = []
    for short, rows in enumerate((shard_rows, problem.m % shard_rows)):
        for step in reversed(range(len(slices.widths))):
            start, stop = slices.bounds(step)
            part = slices.largest_parts_of(count, start, stop - start)[short]
            if part:
                endings.append(_Ending(step, part, rows))
                break
    return endings[:1] if endings[-1][:2] <= endings[0][:2] else endings


def _ending_tasks(problem: Matmul2dProblem, slices: Slices, ending: _Ending, number: int) -> Iterator[Task]:
    """Yield the sum over layers of the mesh rows with this ending, and the copy before it.

    MeshSlice's own tasks copy the largest part of any mesh row into place. A mesh row with a smaller part copies
    it on a lane that no other task uses.
    """
    rows, before = problem.mesh_shape[0], "matmul" if problem.mesh_shape[0] == 1 else "scatter_c"
    columns = largest_extent(problem, _placements(problem), "c", 1)
    if len(slices.widths) > 1:
        if ending.part < slices.largest_part(rows, ending.step):
            copy = move_work(ending.part * columns, problem.dtype)
            yield Task(f"place_c_{number}", f"row_{number}", copy, ((before, 0),))
            before = f"place_c_{number}"
        else:
            before = "place_c"
    yield replace(
        _sum_task(problem, ending.rows), name=f"sum_c_{number}", after=((before, 0),), lane=f"depth_{number}"
    )


def _sum_task(problem: Matmul2dProblem, rows: int) -> Task:
    columns = largest_extent(problem, _placements(problem), "c", 1)
    size = rows * columns * dtype_bytes(problem.dtype)
    return Task("sum_c", "depth", Transfer("all_reduce", f"{MESH}.depth", problem.mesh_shape[2], size))


# --- table entry ----------------------------------------------------------------------------------------


class MeshSliceDataParallel(MeshSlice):
    """MeshSlice on every 2D layer of a 3D mesh, with tokens sharded and weights replicated over `depth`.

    Only the gradient of the weights (dataflow rs) moves along `depth`: one all-reduce after the last slice.
    """

    name = "meshslice_dp"
    title = "MeshSlice + DP"
    source = "Nam et al., ISCA '25, section 7"

    def mesh_shapes(self, num_chips: int) -> tuple[tuple[int, ...], ...]:
        """Return every mesh shape (rows, columns, depth) of `num_chips` chips with a depth of 2 or more."""
        return tuple(shape for shape in factorisations(num_chips, 3) if shape[2] > 1)

    def operand_placements(self, problem: Matmul2dProblem) -> Placements:
        """Return the placements of "a", "b" and "c", for each one per mesh axis (`row`, `col`, `depth`).

        Rows are sharded over `row`, columns over `col`. Over `depth` weights (C for "rs", else B) are replicated,
        and rows of the other matrices, which are tokens, are sharded.
        """
        return _placements(problem)

    def program(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Program:
        """Return MeshSlice's program on every layer, and for a gradient of weights an all-reduce over `depth`.

        Raises:
            LayoutError: the mesh has no third axis, or the slices do not fit.
        """
        layers = build(problem, slices_of(problem, config), self.name, _placements_here(problem))
        if not _sums_over_depth(problem):
            return layers
        gradient = full_matrix("c")
        total = AllReduce(over=f"{MESH}.depth", out=gradient, src=gradient, lane="depth", name="sum_c")
        (on,) = layers.body
        assert isinstance(on, On)
        body = (replace(on, body=(*on.body, total)),)
        return replace(layers, lanes=(*layers.lanes, Lane("depth")), body=body)

    def skeleton(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Skeleton:
        """Return the skeleton: the tasks of the rank with the largest shards.

        A gradient of weights has its all-reduce over `depth` among them.
        """
        slices = slices_of(problem, config)
        counted_steps = task_runs(problem, slices, _placements_here(problem))
        if not _sums_over_depth(problem):
            return Skeleton.of_runs(counted_steps)
        steps = [tasks for count, tasks in counted_steps for _ in range(count)]
        for number, ending in enumerate(_endings(problem, slices)):
            steps[ending.step] += tuple(_ending_tasks(problem, slices, ending, number))
        return Skeleton.of_turns(steps)

    def lower_bounds(self, problem: Matmul2dProblem) -> Iterator[Skeleton]:
        """Yield one skeleton that takes no longer than any candidate, the all-reduce of a gradient included."""
        tasks = lower_bound_tasks(problem, _placements_here(problem))
        if _sums_over_depth(problem):
            tasks = (*tasks, _sum_task(problem, -(-problem.m // problem.mesh_shape[0])))
        yield Skeleton((Phase(1, tasks),))

    def traffic(self, problem: Matmul2dProblem, config: Matmul2dConfig, rank: int) -> dict[str, int]:
        """Return a global rank's bytes of communication, by "mesh.axis" (MeshSlice, section 2.3.1).

        Each moving matrix crosses its axis once: (P - 1) / P of the gathered or reduced block on P ranks. The
        gradient of the weights crosses `depth` twice, to be reduced and gathered.
        """
        placed = _placements_here(problem)
        traffic = problem.traffic_bytes(rank, placed)
        if _sums_over_depth(problem):
            rows, columns = Layout(problem.mesh, placed["c"]).local_shape((problem.m, problem.n), rank)
            layers = problem.mesh_shape[2]
            sum_bytes = 2 * (layers - 1) * rows * columns * dtype_bytes(problem.dtype) // layers
            traffic |= {f"{MESH}.depth": sum_bytes} if sum_bytes else {}
        return traffic


MESHSLICE_DP = MeshSliceDataParallel()
