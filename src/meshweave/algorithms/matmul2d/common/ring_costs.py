"""What the ring products of `ring` cost: their skeleton, the bytes that they move and those that they hold.

A ring may have as many steps as the cluster has chips, so nothing here lists them one by one. Both directions run
in lanes of their own; a turn has one product for each, which waits for (or is waited for by) that direction only.
Where a product wraps around the end of a matrix, it counts as one although it is two: on a chip with tiles, that
leaves out what the second one fills and drains.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshweave.algorithms.matmul2d.common.extents import largest_extent
from meshweave.algorithms.matmul2d.common.problem import MESH, Moving
from meshweave.algorithms.matmul2d.common.ring import Ring, Way, turn_step
from meshweave.base.units import dtype_bytes
from meshweave.describe.layout import Layout, chunk_bounds
from meshweave.ir.skeleton import Phase, Skeleton, Task
from meshweave.ir.work import Transfer, matmul_work, move_work

After = tuple[tuple[str, int], ...]
Run = tuple[int, tuple[Task, ...]]
"""A number of equal turns, and the tasks of each."""

HOME = Way(0, 0, "")
"""What does not move."""

# --- skeleton -------------------------------------------------------------------------------------------


def build_skeleton(ring: Ring) -> Skeleton:
    """The skeleton of `build` at the largest part everywhere; exact where all parts are equal."""
    return Skeleton.of_runs(_runs(ring))


def _runs(ring: Ring) -> list[Run]:
    """All turns, equal neighbours together: there may be as many as the ring has chips."""
    other = _other_task(ring)
    before, after = (None, other) if other is not None and other.after else (other, None)
    runs = _scatter_runs(ring) if ring.moving.scattered else _gather_runs(ring)
    if before is not None:
        (count, first), *others = runs
        product = next(i for i, task in enumerate(first) if task.name == "matmul")
        waiting = replace(first[product], after=(*first[product].after, (before.name, 0)))
        runs = [(1, (before, *first[:product], waiting, *first[product + 1 :])), *others]
        if count > 1:
            runs.insert(1, (count - 1, first))
    if after is not None:
        count, last = runs.pop()
        runs += [(count - 1, last)] if count > 1 else []
        awaited = next(task.name for task in reversed(last) if task.lane == "compute")
        runs.append((1, (*last, replace(after, after=((awaited, 0),)))))
    return runs


def least(ring: Ring) -> Skeleton:
    """What is left however the ring is unrolled: one product of all parts, all steps and all additions."""
    tasks = _Tasks(ring)
    listed = [tasks.matmul(ring.parts)]
    for way in ring.ways:
        listed += tasks.steps(way.steps, way)
        if ring.moving.scattered:
            listed.append(replace(tasks.adds(way.steps, way), after=()))
    other = _other_task(ring)
    if other is not None and other.after:
        listed.append(other)
    elif other is not None:
        listed = [other, replace(listed[0], after=((other.name, 0),)), *listed[1:]]
    return Skeleton((Phase(1, tuple(listed)),))


def _other_task(ring: Ring) -> Task | None:
    """The collective of the matrix that does not go round: a gather before all else, or a scatter, which waits."""
    problem, other = ring.problem, ring.other
    if other is None or problem.axis_size(other.axis) == 1:
        return None
    kind = "reduce_scatter" if other.scattered else "all_gather"
    work = Transfer(kind, f"{MESH}.{other.axis}", problem.axis_size(other.axis), _part_bytes(ring, other))
    return Task(kind, other.axis, work, (("matmul", 0),) if other.scattered else ())


def _gather_runs(ring: Ring) -> list[Run]:
    tasks = _Tasks(ring)
    runs: list[Run] = [(1, (tasks.matmul(1),))]
    for count, *steps in ring.group_sizes:
        turn = [(way, number) for way, number in zip(ring.ways, steps, strict=False) if number]
        moves = [task for way, number in turn for task in tasks.steps(number, way)]
        products = [tasks.matmul(number, way, ((f"steps{way.suffix}", 0),)) for way, number in turn]
        runs.append((count, (*moves, *products)))
    return runs


def _scatter_runs(ring: Ring) -> list[Run]:
    tasks = _Tasks(ring)
    runs: list[Run] = []
    for position, (count, *steps) in enumerate(ring.group_sizes):
        turn = [(way, number) for way, number in zip(ring.ways, steps, strict=False) if number]
        products = [tasks.matmul(number, way) for way, number in turn]

        def listed(fewer: int, turn: list[tuple[Way, int]] = turn) -> Iterator[Task]:
            for way, number in turn:
                if number > fewer:
                    yield tasks.adds(number - fewer, way)
                yield from tasks.steps(number, way, ((f"matmul{way.suffix}", 0),))

        if position == 0:  # what step 0 sends has nothing to be added to
            runs.append((1, (*products, *listed(1))))
            count -= 1
        if count:
            runs.append((count, (*products, *listed(0))))
    return [*runs, (1, (tasks.matmul(1), *tasks.last_adds()))]


class _Tasks:
    """The tasks of a ring, which differ only in how many parts they are about."""

    def __init__(self, ring: Ring) -> None:
        self.ring, self.sizes = ring, ring.local_extents()
        dtype, axis = ring.problem.dtype, ring.moving.axis
        part_bytes = _part_bytes(ring, ring.moving)
        self.move = Transfer("permute", f"{MESH}.{axis}", ring.parts, part_bytes)
        self.add = move_work(part_bytes // dtype_bytes(dtype), dtype, "add")

    def matmul(self, num_parts: int, way: Way = HOME, after: After = ()) -> Task:
        size = min(num_parts * self.ring.each, self.ring.size)
        work = matmul_work(**{**self.sizes, self.ring.cut: size}, dtype=self.ring.problem.dtype)
        return Task(f"matmul{way.suffix}", "compute", work, after)

    def steps(self, count: int, way: Way, after: After = ()) -> tuple[Task, ...]:
        """The ring steps of a turn in a direction, of which "steps" is the last. The first one pays the launch."""
        lane, name = self.ring.moving.axis + way.suffix, f"steps{way.suffix}"
        first = replace(self.move, step=turn_step(self.ring, 0, count))
        if count == 1:
            return (Task(name, lane, first, after),)
        other = replace(self.move, step=turn_step(self.ring, 1, count))
        return Task(f"first_{name}", lane, first, after), Task(name, lane, other, (), count - 1)

    def adds(self, count: int, way: Way) -> Task:
        """Additions of what arrived from a direction to products of the same turn."""
        lane, after = self.ring.moving.axis + way.suffix, ((f"matmul{way.suffix}", 0),)
        return Task(f"adds{way.suffix}", lane, self.add, after, count)

    def last_adds(self) -> Iterator[Task]:
        """The part at home takes up one sum after the other."""
        after: After = (("matmul", 0),)
        for way in self.ring.ways:
            yield replace(self.adds(1, way), after=after)
            after = ((f"adds{way.suffix}", 0),)


def _part_bytes(ring: Ring, moving: Moving) -> int:
    """Bytes of the largest part of a moving matrix on one rank."""
    problem = ring.problem
    along = -(-problem.stored_shape(moving.operand)[moving.dim] // problem.axis_size(moving.axis))
    across = largest_extent(problem, ring.placements, moving.operand, 1 - moving.dim)
    return along * across * dtype_bytes(problem.dtype)


# --- bytes ----------------------------------------------------------------------------------------------


def traffic(ring: Ring, rank: int) -> dict[str, int]:
    """Bytes that a rank moves per axis: every part but its own arrives in a gather; in a scatter every part but
    those that it sends off first, its own from both directions."""
    problem = ring.problem
    mesh, out = problem.mesh, {}
    for moving in (ring.moving, ring.other):
        if moving is None:
            continue
        shape = problem.stored_shape(moving.operand)
        local = Layout(mesh, ring.placements[moving.operand]).local_shape(shape, rank)
        parts = problem.axis_size(moving.axis)
        at = mesh.coords(rank)[mesh.axis(moving.axis)]
        size = shape[moving.dim] - _extent(shape[moving.dim], parts, at)
        if moving is ring.moving and moving.scattered:
            size = shape[moving.dim] + (len(ring.ways) - 1) * _extent(shape[moving.dim], parts, at)
            for way in ring.ways:
                size -= _extent(shape[moving.dim], parts, (at + way.sign * way.steps) % parts)
        moved = size * local[1 - moving.dim] * dtype_bytes(problem.dtype)
        if moved and parts > 1:
            out[f"{MESH}.{moving.axis}"] = moved
    return out


def _extent(size: int, parts: int, at: int) -> int:
    begin, end = chunk_bounds(size, parts, at)
    return end - begin


def peak_bytes(ring: Ring) -> int:
    """Most bytes that rank 0 holds at once: shards of all operands, matrices brought together, and, where sums
    go round, two boxes per direction for what arrives. On few chips only the last sum takes a second box, and the
    whole matrix is not read any more by then."""
    problem, held = ring.problem, 0
    for operand in "abc":
        held += _local_bytes(ring, operand, None)
    if ring.other is not None and problem.axis_size(ring.other.axis) > 1:
        held += _local_bytes(ring, ring.other.operand, ring.other)
    if ring.parts == 1:
        return held
    whole = _local_bytes(ring, ring.moving.operand, ring.moving)
    if not ring.moving.scattered:
        return held + whole
    boxes = {2: 1, 3: 2, 4: 2, 5: 3}.get(ring.parts, 4)
    return held + whole + boxes * _part_bytes(ring, ring.moving)


def _local_bytes(ring: Ring, operand: str, whole: Moving | None) -> int:
    """Bytes of rank 0's shard of an operand, or of a moving one with the dim that moves at its full size."""
    problem = ring.problem
    shape = problem.stored_shape(operand)
    mesh = problem.mesh
    local = list(Layout(mesh, ring.placements[operand]).local_shape(shape, mesh.ranks[0]))
    if whole is not None:
        local[whole.dim] = shape[whole.dim]
    return local[0] * local[1] * dtype_bytes(problem.dtype)


def turn_counts(parts: int) -> list[int]:
    """Turn counts worth trying on a ring: all small ones, then steps of 4/3 and 3/2, and one step a turn."""
    most = parts // 2 + 1
    wanted = [2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    return sorted({count for count in wanted if count < most} | {most})
