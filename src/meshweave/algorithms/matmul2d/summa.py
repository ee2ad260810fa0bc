"""SUMMA: 2D products panel by panel (van de Geijn & Watts, Concurrency 9(4), 1997; MeshSlice, section 2.3.3).

The sliced dim is cut into panels, so thin that each lies in one shard of either moving matrix. Then every panel
has one owner in each mesh row or column. In one step the owners broadcast a panel along their axis and all chips
multiply; a panel of a moving output is reduced to its owners instead. Over all steps the products add up to C
(os) or are its parts (ls, rs). There is no skew, any mesh and any sizes will do, and while one panel is
multiplied the next ones are on their way.

A broadcast keeps a ring busy only if it is pipelined: D packets pass P - 1 hops in P + D - 2 hop times, each
with its own synchronisation. Roots take turns along the ring, so that the broadcast of the next panel begins while
the last packets of this one are on their way to others: each takes D + 2 hop times of a member, and the P - 2 that
the last packet needs are paid once (`estimate.chains`). In an all-gather a panel takes one.
`Matmul2dConfig.packets` is D. `Matmul2dConfig.slices` counts steps. Fewer steps than panels are the unrolled loop
(MeshSlice, section 4.2): neighbouring panels, each broadcast by its owner, make one larger product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from meshweave.algorithms.matmul2d.common.algorithm import Matmul2d
from meshweave.algorithms.matmul2d.common.extents import largest_extent, product_task
from meshweave.algorithms.matmul2d.common.ops import local_product, moving_scratch, with_ops
from meshweave.algorithms.matmul2d.common.problem import (
    MESH,
    Matmul2dConfig,
    Matmul2dProblem,
    MovingMatrix,
    two_d_placements,
)
from meshweave.algorithms.matmul2d.summa_steps import SliceStep, are_alike, slice_steps
from meshweave.algorithms.matrix_views import full_matrix, matrix_slice
from meshweave.base.units import dtype_bytes
from meshweave.describe.machine.cluster import Cluster
from meshweave.ir.program import Buffer, Program, Repeat
from meshweave.ir.program.expressions import Index, Var, binary, equal
from meshweave.ir.program.ops import Broadcast, Op, Reduce
from meshweave.ir.program.views import Range
from meshweave.ir.skeleton import Phase, Skeleton, Task
from meshweave.ir.work import Transfer, matmul_work

SLOTS = 2
"""Double buffering: panels arrive in one slot while the product reads the other."""

PACKETS = (1, 4, 16, 64)
"""The packet counts that a tuner is offered."""
MAX_STEP_COUNTS = 10
"""The most step counts that a tuner is offered."""


# --- program --------------------------------------------------------------------------------------------


class _SummaProgramBuilder:
    def __init__(self, problem: Matmul2dProblem, steps: tuple[SliceStep, ...], packets: int) -> None:
        self.problem, self.steps, self.packets = problem, steps, packets
        self.num_slots = SLOTS if len(steps) > 1 else 1
        self.moving = (problem.horizontal, problem.vertical)

    def buffers(self) -> tuple[Buffer, ...]:
        """Return scratch for the panels of a step, side by side, per matrix that crosses its axis."""
        problem, placed = self.problem, two_d_placements(self.problem)
        widest = max(step.width for step in self.steps)
        return tuple(
            moving_scratch(problem, placed, moving, _panels_of(moving), widest, self.num_slots)
            for moving in self.moving
            if problem.axis_size(moving.axis) > 1
        )

    def step_ops(self, number: Index, step: SliceStep) -> list[Op]:
        """Return the ops of one step. Where `number` is an expression, these are the ops of any equal step."""
        slot = number % self.num_slots if self.num_slots > 1 else 0
        operand = {name: full_matrix(name) for name in "abc"}
        before: list[Op] = []
        after: list[Op] = []
        for moving in self.moving:
            if self.problem.axis_size(moving.axis) == 1:  # the shard is whole, and is used where it lies
                start = step.start if isinstance(number, int) else number * step.width
                operand[moving.operand] = matrix_slice(
                    moving.operand, moving.dim, Range(start, start + step.width)
                )
                continue
            operand[moving.operand] = matrix_slice(_panels_of(moving), moving.dim, Range(0, step.width), slot)
            panels = step.panels(self.problem, moving)
            ops = [self._move(moving, number, step, slot, *panel) for panel in panels]
            (after if moving.scattered else before).extend(ops)
        accumulate = binary(">", number, 0) if self.problem.dataflow == "os" else 0
        return [*before, local_product(self.problem.dataflow, operand, accumulate), *after]

    def _move(
        self, moving: MovingMatrix, number: Index, step: SliceStep, slot: Index, offset: int, width: int
    ) -> Op:
        """Return the broadcast of a panel from its owner to all, or its reduction from all to its owner.

        On other ranks the view of the shard is empty: they neither read nor write it, and no edge should say so.
        """
        owner, local = self._owner(moving, number, step, offset)
        over = f"{MESH}.{moving.axis}"
        is_owner = equal(Var(over), owner)
        shard = matrix_slice(moving.operand, moving.dim, Range(local * is_owner, (local + width) * is_owner))
        panel = matrix_slice(_panels_of(moving), moving.dim, Range(offset, offset + width), slot)
        out, src = (shard, panel) if moving.scattered else (panel, shard)
        kind = Reduce if moving.scattered else Broadcast
        name, lane = _op_name(moving), moving.axis
        return kind(over=over, out=out, src=src, root=owner, packets=self.packets, lane=lane, name=name)

    def _owner(
        self, moving: MovingMatrix, number: Index, step: SliceStep, offset: int
    ) -> tuple[Index, Index]:
        """Return the coordinate of the shard that holds element `offset` of a step, and its index there."""
        shard_size = self.problem.largest_part(self.problem.sliced_size, moving.axis)
        if isinstance(number, int):
            return divmod(step.start + offset, shard_size)
        if step.width % shard_size == 0:
            return number * (step.width // shard_size) + offset // shard_size, offset % shard_size
        if shard_size % step.width == 0:
            per_shard = shard_size // step.width
            return number // per_shard, number % per_shard * step.width + offset
        start = number * step.width + offset
        return start // shard_size, start % shard_size


def _panels_of(moving: MovingMatrix) -> str:
    return f"{moving.operand}_panel"


def _op_name(moving: MovingMatrix) -> str:
    return f"{'reduce' if moving.scattered else 'broadcast'}_{moving.operand}"


# --- skeleton -------------------------------------------------------------------------------------------


_Wait = tuple[str, int]


class _PanelGroup(NamedTuple):
    """Neighbouring panels of a step that have one width and wait for the same.

    Attributes:
        is_overwritten: whether the product of a later step writes to where these panels are.
    """

    width: int
    waits: tuple[_Wait, ...]
    is_overwritten: bool
    offsets: list[int]


class _SkeletonBuilder:
    """The tasks of the steps of a product on rank (0, 0)."""

    def __init__(self, problem: Matmul2dProblem, steps: tuple[SliceStep, ...], packets: int) -> None:
        self.problem, self.steps, self.packets = problem, steps, packets
        placed = two_d_placements(problem)
        item = dtype_bytes(problem.dtype)
        self.moving = [m for m in (problem.horizontal, problem.vertical) if problem.axis_size(m.axis) > 1]
        self.line_bytes = [largest_extent(problem, placed, m.operand, 1 - m.dim) * item for m in self.moving]
        self.shard_sizes = [problem.largest_part(problem.sliced_size, m.axis) for m in self.moving]
        self.known_groups: dict[tuple[int, int], list[_PanelGroup]] = {}
        self.sizes = {
            "m": problem.largest_part(problem.m, "row"),
            "n": problem.largest_part(problem.n, "col"),
            "k": problem.largest_part(problem.k, "row" if problem.dataflow == "rs" else "col"),
        }

    def tasks(self, number: int, turns: int = 1) -> tuple[Task, ...]:
        """Return the tasks of step `number`; their roots are those of `turns` equal steps from it on."""
        before: list[Task] = []
        after: list[Task] = []
        waits: list[_Wait] = []
        for which, moving in enumerate(self.moving):
            chains = self._chains(which, number, turns)
            if not moving.scattered:
                before += chains
                waits.append((chains[-1].name, 0))
                continue
            after += chains
            if number >= SLOTS:  # the product overwrites panels that must be on their way
                earlier = self._groups(which, number - SLOTS)
                last = max(at for at, group in enumerate(earlier) if group.is_overwritten)
                waits.append((f"{_op_name(moving)}{last}", SLOTS))
        sliced = {"os": "k", "ls": "n", "rs": "m"}[self.problem.dataflow]
        work = matmul_work(**self.sizes | {sliced: self.steps[number].width}, dtype=self.problem.dtype)
        return (*before, Task("matmul", "compute", work, tuple(waits)), *after)

    def _chains(self, which: int, number: int, turns: int) -> list[Task]:
        """Return the chains of the panels of a step, a task per group."""
        moving, shard_size = self.moving[which], self.shard_sizes[which]
        kind, over = "reduce" if moving.scattered else "broadcast", f"{MESH}.{moving.axis}"
        count, line_bytes = self.problem.axis_size(moving.axis), self.line_bytes[which]
        starts = [step.start for step in self.steps[number : number + turns]]
        return [
            Task(
                f"{_op_name(moving)}{at}",
                moving.axis,
                Transfer(kind, over, count, group.width * line_bytes, self.packets),
                group.waits,
                len(group.offsets),
                tuple((start + offset) // shard_size for start in starts for offset in group.offsets),
            )
            for at, group in enumerate(self._groups(which, number))
        ]

    def _groups(self, which: int, number: int) -> list[_PanelGroup]:
        known = self.known_groups.get((which, number))
        if known is not None:
            return known
        groups: list[_PanelGroup] = []
        step, moving = self.steps[number], self.moving[which]
        later = self.steps[number + SLOTS].width if number + SLOTS < len(self.steps) else step.width
        for offset, width in step.panels(self.problem, moving):
            waits = (("matmul", 0),) if moving.scattered else _last_reader(self.steps, number, offset)
            key = width, waits, offset < later
            if not groups or groups[-1][:3] != key:
                groups.append(_PanelGroup(*key, []))
            groups[-1].offsets.append(offset)
        self.known_groups[which, number] = groups
        return groups


def _last_reader(steps: tuple[SliceStep, ...], number: int, offset: int) -> tuple[tuple[str, int], ...]:
    """Return the wait of a panel at `offset` of a slot for the last product that read that part of the slot."""
    for past in range(number - SLOTS, -1, -SLOTS):
        if steps[past].width > offset:
            return (("matmul", number - past),)
    return ()


def _pipelined_chains(
    problem: Matmul2dProblem, moving: MovingMatrix, config: Matmul2dConfig
) -> tuple[Task, Task]:
    """Return two tasks that together take no longer than all chains of a moving matrix.

    A chain ends at its root a launch and D packets after the root began, and nowhere sooner. The next one needs
    two members. Where there are more than two, one of them is no root of this chain and ends a packet later. So
    D + 1 packets pass, as in a chain of three members alone. The first task is the latency of all chains but one;
    there are at least as many as steps and as shards. The second task carries all bytes in one chain.
    """
    shard_size = problem.largest_part(problem.sliced_size, moving.axis)
    count = max(config.slice_count, -(-problem.sliced_size // shard_size))
    kind, over = "reduce" if moving.scattered else "broadcast", f"{MESH}.{moving.axis}"
    across = largest_extent(problem, two_d_placements(problem), moving.operand, 1 - moving.dim)
    size = problem.sliced_size * across * dtype_bytes(problem.dtype) // config.packets * config.packets
    members = min(problem.axis_size(moving.axis), 3)
    return (
        Task("begin", moving.axis, Transfer(kind, over, members, 0, config.packets), (), count - 1),
        Task("flow", moving.axis, Transfer(kind, over, members, size, config.packets)),
    )


# --- table entry ----------------------------------------------------------------------------------------


class Summa(Matmul2d):
    """SUMMA: the owners of each panel broadcast it along their mesh axis, then all chips multiply.

    A config chooses the number of steps (`slices`) and the packets of a broadcast (`packets`). Programs exist for
    all sizes, meshes and dataflows. The next panels are on their way while one is multiplied.
    """

    estimate_accuracy = "upper_bound"
    name = "summa"
    title = "SUMMA"
    source = "van de Geijn and Watts 1997; MeshSlice, sections 2.3.3 and 4.2"
    config_fields = ("slices", "packets")

    def candidates(
        self, problem: Matmul2dProblem, cluster: Cluster | None = None
    ) -> Iterator[Matmul2dConfig]:
        """Yield configs by number of steps, ascending, and for each by number of packets (`PACKETS`).

        With L the least common multiple of mesh rows and columns, the numbers of steps are 1, 4 L, 2 L, L, and
        L / 2, L / 4, ... as long as these are whole. Numbers above the size of the sliced dim are left out, and at
        most `MAX_STEP_COUNTS` are kept: 1 and the largest. If both axes have at most 2 chips, there is one number
        of packets. One chip has one config. `cluster` is ignored.
        """
        common = math.lcm(*problem.mesh_shape[:2])
        if problem.num_chips == 1:
            yield Matmul2dConfig()
            return
        counts = {4 * common, 2 * common, common}
        while common % 2 == 0:
            common //= 2
            counts.add(common)
        fitting = sorted(count for count in counts if count <= problem.sliced_size)
        packet_counts = PACKETS if max(problem.mesh_shape[:2]) > 2 else PACKETS[:1]
        for count in sorted({1, *fitting[-MAX_STEP_COUNTS + 1 :]}):
            for packets in packet_counts:
                yield Matmul2dConfig((1,) * count, packets=packets)

    def program(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Program:
        """Return the program: panels that are broadcast, or reduced, along mesh rows and columns.

        Raises:
            LayoutError: a config has no steps, or more steps than the sliced dim has elements.
        """
        steps = slice_steps(problem, config.slice_count)
        builder = _SummaProgramBuilder(problem, steps, config.packets)
        body: tuple[Op | Repeat, ...]
        if len(steps) > 1 and are_alike(problem, steps):
            body = (Repeat("p", len(steps), tuple(builder.step_ops(Var("p"), steps[0]))),)
        else:
            body = tuple(op for number, step in enumerate(steps) for op in builder.step_ops(number, step))
        return with_ops(problem.declarations("summa"), builder.buffers(), ("compute", "row", "col"), body)

    def skeleton(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Skeleton:
        """Return the skeleton of the chip at (0, 0), which has the largest shards; packets go along chains.

        Raises:
            LayoutError: a config has no steps, or more steps than the sliced dim has elements.
        """
        steps = slice_steps(problem, config.slice_count)
        # If steps are alike, the first ones wait for no slot and all others are the same.
        num_different = min(SLOTS if are_alike(problem, steps) else len(steps), len(steps))
        builder = _SkeletonBuilder(problem, steps, config.packets)
        runs = [(1, builder.tasks(number)) for number in range(num_different)]
        if (left := len(steps) - num_different) > 0:
            runs.append((left, builder.tasks(num_different, left)))
        return Skeleton.of_runs(runs)

    def config_lower_bound(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Skeleton:
        """Return a skeleton no slower than the config's, with a few tasks that do not wait for each other.

        One task has all products. Two tasks per mesh axis stand for all broadcasts (or reduces) of panels: one has
        the latency of all of them but one, the other has all bytes in a single one.
        """
        tasks = [product_task(problem, two_d_placements(problem), problem.sliced_size)]
        for moving in (problem.horizontal, problem.vertical):
            if problem.axis_size(moving.axis) > 1:
                tasks += _pipelined_chains(problem, moving, config)
        return Skeleton((Phase(1, tuple(tasks)),))

    def lower_bounds(self, problem: Matmul2dProblem) -> Iterator[Skeleton]:
        """Yield rank 0's tasks for each number of packets; the fastest bounds all candidates' times from below."""
        return (self.config_lower_bound(problem, Matmul2dConfig(packets=packets)) for packets in PACKETS)

    def traffic(self, problem: Matmul2dProblem, config: Matmul2dConfig, rank: int) -> dict[str, int]:
        """Return a global rank's bytes of communication, by "mesh.axis"; equal for all configs.

        Each moving matrix crosses its axis once: the panels that a rank does not own are what its shard lacks.
        """
        return problem.traffic_bytes(rank)


SUMMA = Summa()
