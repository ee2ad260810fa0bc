"""What the ring products of `ring` cost: their skeleton, the bytes that they move and the bytes that they hold.

A ring may have as many steps as the cluster has chips, so nothing here lists them one by one. Each direction has
a lane of its own. An iteration has one product per direction, which waits for that direction only, or which only
that direction waits for. A product that wraps around the end of a matrix counts as one, although it is two. On a
chip with GEMM tiles, this leaves out what the second one fills and drains.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshweave.algorithms.matmul2d.common.extents import largest_extent
from meshweave.algorithms.matmul2d.common.problem import MESH, MovingMatrix
from meshweave.algorithms.matmul2d.common.ring import RingDirection, RingProduct, step_mark
from meshweave.base.units import dtype_bytes
from meshweave.describe.layout import Layout, chunk_bounds
from meshweave.ir.skeleton import Phase, Skeleton, Task
from meshweave.ir.work import Transfer, matmul_work, move_work

Waits = tuple[tuple[str, int], ...]
EqualIterations = tuple[int, tuple[Task, ...]]
"""A number of equal iterations, and the tasks of each."""

HOME = RingDirection(0, 0, "")
"""The direction of the local part, which does not move."""

# --- skeleton -------------------------------------------------------------------------------------------


def build_skeleton(ring: RingProduct) -> Skeleton:
    """Return the skeleton of the program of `ring.build`, with every part as large as the largest.

    Its time is exact if all parts are equal, and an upper bound otherwise.
    """
    return Skeleton.of_runs(_runs(ring))


def _runs(ring: RingProduct) -> list[EqualIterations]:
    """Return all iterations, equal neighbours together: there may be as many as the ring has chips."""
    exposed = _exposed_task(ring)
    before, after = (None, exposed) if exposed is not None and exposed.after else (exposed, None)
    runs = _scatter_runs(ring) if ring.moving.scattered else _gather_runs(ring)
    if before is not None:
        (count, first), *rest = runs
        product = next(i for i, task in enumerate(first) if task.name == "matmul")
        waiting = replace(first[product], after=(*first[product].after, (before.name, 0)))
        runs = [(1, (before, *first[:product], waiting, *first[product + 1 :])), *rest]
        if count > 1:
            runs.insert(1, (count - 1, first))
    if after is not None:
        count, last = runs.pop()
        runs += [(count - 1, last)] if count > 1 else []
        awaited = next(task.name for task in reversed(last) if task.lane == "compute")
        runs.append((1, (*last, replace(after, after=((awaited, 0),)))))
    return runs


def lower_bound(ring: RingProduct) -> Skeleton:
    """Return a skeleton that takes no longer than the ring product with any number of iterations.

    It has one product, all ring steps and all additions, which do not wait for each other. The product waits for
    an exposed all-gather, or an exposed reduce-scatter for the product.
    """
    tasks = _RingTasks(ring)
    listed = [tasks.matmul(ring.num_parts)]
    for direction in ring.directions:
        listed += tasks.steps(direction.steps, direction)
        if ring.moving.scattered:
            listed.append(replace(tasks.adds(direction.steps, direction), after=()))
    exposed = _exposed_task(ring)
    if exposed is not None and exposed.after:
        listed.append(exposed)
    elif exposed is not None:
        listed = [exposed, replace(listed[0], after=((exposed.name, 0),)), *listed[1:]]
    return Skeleton((Phase(1, tuple(listed)),))


def _exposed_task(ring: RingProduct) -> Task | None:
    """Return the collective of the exposed matrix: a gather before all else, or a scatter, which waits."""
    problem, exposed = ring.problem, ring.exposed
    if exposed is None or problem.axis_size(exposed.axis) == 1:
        return None
    kind = "reduce_scatter" if exposed.scattered else "all_gather"
    work = Transfer(
        kind, f"{MESH}.{exposed.axis}", problem.axis_size(exposed.axis), _part_bytes(ring, exposed)
    )
    return Task(kind, exposed.axis, work, (("matmul", 0),) if exposed.scattered else ())


def _gather_runs(ring: RingProduct) -> list[EqualIterations]:
    tasks = _RingTasks(ring)
    runs: list[EqualIterations] = [(1, (tasks.matmul(1),))]
    for count, *steps in ring.iteration_sizes:
        moves_of = [
            (direction, number) for direction, number in zip(ring.directions, steps, strict=False) if number
        ]
        moves = [task for direction, number in moves_of for task in tasks.steps(number, direction)]
        products = [
            tasks.matmul(number, direction, ((f"steps{direction.suffix}", 0),))
            for direction, number in moves_of
        ]
        runs.append((count, (*moves, *products)))
    return runs


def _scatter_runs(ring: RingProduct) -> list[EqualIterations]:
    tasks = _RingTasks(ring)
    runs: list[EqualIterations] = []
    for position, (count, *steps) in enumerate(ring.iteration_sizes):
        moves_of = [
            (direction, number) for direction, number in zip(ring.directions, steps, strict=False) if number
        ]
        products = [tasks.matmul(number, direction) for direction, number in moves_of]

        def moves(without_add: int, moves_of: list[tuple[RingDirection, int]] = moves_of) -> Iterator[Task]:
            for direction, number in moves_of:
                if number > without_add:
                    yield tasks.adds(number - without_add, direction)
                yield from tasks.steps(number, direction, ((f"matmul{direction.suffix}", 0),))

        if position == 0:  # step 0 sends a product to which nothing has been added
            runs.append((1, (*products, *moves(1))))
            count -= 1
        if count:
            runs.append((count, (*products, *moves(0))))
    return [*runs, (1, (tasks.matmul(1), *tasks.last_adds()))]


class _RingTasks:
    """The tasks of a ring product, which differ only in their number of parts."""

    def __init__(self, ring: RingProduct) -> None:
        self.ring, self.sizes = ring, ring.local_extents()
        dtype, axis = ring.problem.dtype, ring.moving.axis
        part_bytes = _part_bytes(ring, ring.moving)
        self.move = Transfer("permute", f"{MESH}.{axis}", ring.num_parts, part_bytes)
        self.add = move_work(part_bytes // dtype_bytes(dtype), dtype, "add")

    def matmul(self, num_parts: int, direction: RingDirection = HOME, after: Waits = ()) -> Task:
        """Return the product of `num_parts` parts of the moving matrix that arrive in a direction."""
        size = min(num_parts * self.ring.part_size, self.ring.cut_size)
        work = matmul_work(**{**self.sizes, self.ring.cut_letter: size}, dtype=self.ring.problem.dtype)
        return Task(f"matmul{direction.suffix}", "compute", work, after)

    def steps(self, count: int, direction: RingDirection, after: Waits = ()) -> tuple[Task, ...]:
        """Return one or two tasks of `count` ring steps in a direction; only the first step pays the launch.

        The last task is called "steps", with the direction's suffix.
        """
        lane, name = self.ring.moving.axis + direction.suffix, f"steps{direction.suffix}"
        first = replace(self.move, step=step_mark(self.ring, 0, count))
        if count == 1:
            return (Task(name, lane, first, after),)
        later = replace(self.move, step=step_mark(self.ring, 1, count))
        return Task(f"first_{name}", lane, first, after), Task(name, lane, later, (), count - 1)

    def adds(self, count: int, direction: RingDirection) -> Task:
        """Return the task of `count` additions of arrived sums to the products of the same iteration."""
        lane, after = self.ring.moving.axis + direction.suffix, ((f"matmul{direction.suffix}", 0),)
        return Task(f"adds{direction.suffix}", lane, self.add, after, count)

    def last_adds(self) -> Iterator[Task]:
        """Yield the additions of the sums from both directions to the local product, one after the other."""
        after: Waits = (("matmul", 0),)
        for direction in self.ring.directions:
            yield replace(self.adds(1, direction), after=after)
            after = ((f"adds{direction.suffix}", 0),)


def _part_bytes(ring: RingProduct, moving: MovingMatrix) -> int:
    """Return the bytes of the largest part of a moving matrix on one rank."""
    problem = ring.problem
    along = -(-problem.stored_shape(moving.operand)[moving.dim] // problem.axis_size(moving.axis))
    across = largest_extent(problem, ring.placements, moving.operand, 1 - moving.dim)
    return along * across * dtype_bytes(problem.dtype)


# --- bytes ----------------------------------------------------------------------------------------------


def traffic(ring: RingProduct, rank: int) -> dict[str, int]:
    """Return the bytes that a global rank receives, by "mesh.axis", such as "tp.row".

    If the matrix is gathered, all parts arrive but the rank's own. If it is scattered, a partial sum of every part
    arrives, except of the part that the rank sends first in a direction; of its own part one arrives from each
    direction.
    """
    problem = ring.problem
    mesh, out = problem.mesh, {}
    for moving in (ring.moving, ring.exposed):
        if moving is None:
            continue
        shape = problem.stored_shape(moving.operand)
        local = Layout(mesh, ring.placements[moving.operand]).local_shape(shape, rank)
        parts = problem.axis_size(moving.axis)
        at = mesh.coords(rank)[mesh.axis(moving.axis)]
        size = shape[moving.dim] - _extent(shape[moving.dim], parts, at)
        if moving is ring.moving and moving.scattered:
            size = shape[moving.dim] + (len(ring.directions) - 1) * _extent(shape[moving.dim], parts, at)
            for direction in ring.directions:
                first = (at + direction.sign * direction.steps) % parts
                size -= _extent(shape[moving.dim], parts, first)
        moved = size * local[1 - moving.dim] * dtype_bytes(problem.dtype)
        if moved and parts > 1:
            out[f"{MESH}.{moving.axis}"] = moved
    return out


def _extent(size: int, parts: int, at: int) -> int:
    begin, end = chunk_bounds(size, parts, at)
    return end - begin


def peak_bytes(ring: RingProduct) -> int:
    """Return the most bytes that rank 0 of the mesh, which has the largest shards, holds at once.

    They are the bytes of its shards of A, B and C, of the gathered (or not yet reduced) matrices, and if the
    matrix of the ring is scattered, of receive buffers: of three, or of four in a ring of over five ranks whose
    parts are unequal, and of fewer in one of under five.
    """
    problem, num_bytes = ring.problem, 0
    for operand in "abc":
        num_bytes += _local_bytes(ring, operand, None)
    if ring.exposed is not None and problem.axis_size(ring.exposed.axis) > 1:
        num_bytes += _local_bytes(ring, ring.exposed.operand, ring.exposed)
    if ring.num_parts == 1:
        return num_bytes
    whole = _local_bytes(ring, ring.moving.operand, ring.moving)
    if not ring.moving.scattered:
        return num_bytes + whole
    is_even = problem.stored_shape(ring.moving.operand)[ring.moving.dim] % ring.num_parts == 0
    num_buffers = {2: 1, 3: 2, 4: 2, 5: 3}.get(ring.num_parts, 3 if is_even else 4)
    return num_bytes + whole + num_buffers * _part_bytes(ring, ring.moving)


def _local_bytes(ring: RingProduct, operand: str, whole: MovingMatrix | None) -> int:
    """Return the bytes of rank 0's shard of an operand; of the `whole` one gathered along the dim that moves."""
    problem = ring.problem
    shape = problem.stored_shape(operand)
    mesh = problem.mesh
    local = list(Layout(mesh, ring.placements[operand]).local_shape(shape, mesh.ranks[0]))
    if whole is not None:
        local[whole.dim] = shape[whole.dim]
    return local[0] * local[1] * dtype_bytes(problem.dtype)


def iteration_counts(parts: int) -> list[int]:
    """Return the numbers of iterations worth trying on a ring of `parts` ranks, ascending: 8 -> [2, 3, 4, 5].

    The last is the most that there can be, parts // 2 + 1: one ring step per iteration. The others are those of
    2 to 8, 12, 16, 24, 32, ..., 192, 256 that are less.
    """
    most = parts // 2 + 1
    wanted = [2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    return sorted({count for count in wanted if count < most} | {most})
