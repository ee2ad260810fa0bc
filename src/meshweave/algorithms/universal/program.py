"""The universal product as a program of one-sided ops (Slicing Is All You Need, sections 4.2 and 4.3).

Three phases: partial operands that are summed first; the local products, step by step in the order of the
schedule, where a rank gets the panels of a step `prefetch` steps ahead, multiplies, and accumulates what belongs
to others; replicas of C that were computed in parts are put together. Statements stand in the order of steps, not
of ranks, so that messages match in the order in which they are issued.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import Literal

from meshweave.algorithms.universal.config import UniversalConfig, check_config
from meshweave.algorithms.universal.issue_order import (
    IssueOrder,
    IssueStep,
    issue_orders,
    issue_steps,
    needs_no_accumulate,
)
from meshweave.algorithms.universal.panels import OwnedBlock, ProductStep, Span
from meshweave.algorithms.universal.problem import OPERANDS, Operand, UniversalProblem
from meshweave.algorithms.universal.reduction import merges_replicas, partial_sums, replicas_of, share_to_sum
from meshweave.algorithms.universal.slicing import Slicing
from meshweave.describe.layout.meshes import ProgramMeshes
from meshweave.ir.program import Buffer, Lane, On, Product, Program, Statement, Tensor
from meshweave.ir.program.ops import Accumulate, Add, Copy, Fence, Get, Matmul, Op, Put, Zero
from meshweave.ir.program.views import Range, View

COMPUTE, GET, GIVE = "compute", "get", "give"


def universal_program(
    problem: UniversalProblem, config: UniversalConfig, *, orders: Mapping[int, IssueOrder] | None = None
) -> Program:
    """Return C = A B as a program of get, put and accumulate; buffers "a", "b" and "c" hold the matrices.

    Args:
        config: one that fits the problem, as `universal_configs` yields them.
        orders: for each global rank the order of its fetches, products and accumulates, numbered as by
            `issue_order.issue_orders`. None for the order of the config's schedule.

    Raises:
        LayoutError: the config does not fit the problem (`check_config`).
        UnsupportedError: the schedule is not "direct", the config has no rates, and no `orders` are given.
    """
    check_config(problem, config)
    return _UniversalProgramBuilder(problem, config, Slicing(problem, config), orders).build()


@dataclass
class _UniversalProgramBuilder:
    problem: UniversalProblem
    config: UniversalConfig
    slicing: Slicing
    orders: Mapping[int, IssueOrder] | None = None
    scratch_shapes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The largest panel that each scratch buffer holds."""
    scratch_slots: dict[str, int] = field(default_factory=dict)

    def build(self) -> Program:
        """Return the program of all ranks."""
        problem, meshes = self.problem, ProgramMeshes()
        for operand in OPERANDS:
            meshes.add(problem.layout(operand).mesh)
        self.all_ranks = f"{meshes.add_layout(problem.c).mesh.name}"
        body = tuple(self._body())
        buffers = tuple(self._buffers(meshes))
        tensors = tuple(Tensor(name.upper(), problem.shape(name), problem.dtype) for name in OPERANDS)
        limits = self.config.limits
        widths = {COMPUTE: limits.products, GET: 1, GIVE: limits.accumulates}
        lanes = tuple(Lane(name, width=width) for name, width in widths.items())
        name = f"universal, {self.config}"
        meaning = (Product("C", "A", "B"),)
        return Program(name, meshes.meshes, tensors, buffers, lanes, body, meaning)

    def _buffers(self, meshes: ProgramMeshes) -> Iterator[Buffer]:
        problem = self.problem
        for operand in OPERANDS:
            layout = meshes.add_layout(problem.layout(operand))
            kind: Literal["input", "output"] = "output" if operand == "c" else "input"
            order = self._memory_order(operand)
            yield Buffer(operand, kind, layout.mesh.name, problem.dtype, operand.upper(), layout, order=order)
        for operand in OPERANDS[:2]:
            summed = self.slicing.summed_layout(operand)
            if summed is not None:
                layout, order = meshes.add_layout(summed), self._memory_order(operand)
                name = f"{operand}_sum"
                yield Buffer(
                    name, "temp", layout.mesh.name, problem.dtype, operand.upper(), layout, order=order
                )
        for name, shape in self.scratch_shapes.items():
            slots, order = self.scratch_slots[name], self._memory_order(name[0])
            yield Buffer(
                name, "scratch", self.all_ranks, problem.dtype, shape=shape, slots=slots, order=order
            )

    def _memory_order(self, operand: str) -> tuple[int, int] | None:
        return self.problem.orders["abc".index(operand)]

    # --- phases ---------------------------------------------------------------------------------------------

    def _body(self) -> Iterator[Statement]:
        slicing, ranks = self.slicing, self.problem.ranks
        if 0 in self.problem.sizes:
            yield self._zero_c()
            return
        summed = [operand for operand in OPERANDS[:2] if slicing.summed_layout(operand) is not None]
        for operand in summed:
            yield from _interleaved({rank: list(self._sum(operand, rank)) for rank in ranks})
        accumulates = not self._is_c_stationary and not self._is_written_once
        if accumulates:
            yield self._zero_c()
        if summed or accumulates:
            yield self._fence()
        yield from _interleaved({rank: list(self._products(rank)) for rank in ranks})
        if merges_replicas(slicing):
            yield self._fence()
            if self._is_c_stationary:
                yield from _interleaved({rank: list(self._sum_share(rank)) for rank in ranks})
                yield self._fence()
            yield from _interleaved({rank: list(self._fetch_shares(rank)) for rank in ranks})

    @property
    def _is_c_stationary(self) -> bool:
        return self.config.stationary == "c"

    @cached_property
    def _is_written_once(self) -> bool:
        return needs_no_accumulate(self.slicing)

    @cached_property
    def _orders(self) -> Mapping[int, IssueOrder]:
        return issue_orders(self.slicing) if self.orders is None else self.orders

    def _fence(self) -> Statement:
        return On(self.all_ranks, (Fence(over=self.all_ranks, lane=GET),))

    def _zero_c(self) -> Statement:
        return On(self.all_ranks, (Zero(out=View("c", (Range(), Range())), lane=COMPUTE),))

    def _sum(self, operand: Operand, rank: int) -> Iterator[list[Op]]:
        """Sum a partial operand one term after the other, so that a rank never asks for all of them at once."""
        for (row, column), blocks in partial_sums(self.slicing, operand, rank):
            rows, columns = blocks[0].shape
            out = _view(f"{operand}_sum", (row, row + rows), (column, column + columns))
            for number, block in enumerate(blocks):
                src = _shard_view(operand, block)
                if number == 0:
                    yield [self._fetch(rank, out, src, block.owner)]
                elif block.owner == rank:
                    yield [Add(out=out, src=src, lane=COMPUTE)]
                else:
                    term = self._scratch(f"{operand}_term", (rows, columns), 0)
                    yield _get_and_add(out, src, term, block.owner)

    def _products(self, rank: int) -> Iterator[list[Op]]:
        steps = self.slicing.steps(rank)
        if self._is_c_stationary and not steps:
            yield [Zero(out=View("c", (Range(), Range())), lane=COMPUTE)]
        order = self._orders[rank]
        in_scratch = [
            not self._is_c_stationary and not (self._is_written_once and step.panels["c"].is_local_to(rank))
            for step in steps
        ]
        for number, issue in enumerate(issue_steps(steps, rank, order, in_scratch, self.config.prefetch)):
            yield self._issue(rank, steps, issue, in_scratch[issue.step], is_first=number == 0)

    def _issue(
        self, rank: int, steps: Sequence[ProductStep], issue: IssueStep, in_scratch: bool, *, is_first: bool
    ) -> list[Op]:
        """Return the fetches before a product, the product, and the accumulates after it."""
        ops: list[Op] = []
        for number, operand in issue.fetches:
            panel, slot = steps[number].panels[operand], issue.slots[number, operand]
            self._scratch(f"{operand}_in", panel.shape, slot)
            for block in panel.blocks:
                out = _panel_view(f"{operand}_in", block, slot)
                ops.append(self._fetch(rank, out, _shard_view(self._source(operand), block), block.owner))
        step = steps[issue.step]
        views = [self._operand_view(step, operand, issue) for operand in OPERANDS[:2]]
        if in_scratch:
            out = self._scratch("c_part", step.panels["c"].shape, issue.slots[issue.step, "c"])
        else:
            out = _shard_view("c", step.panels["c"].blocks[0])
        accumulate = int(self._is_c_stationary and not is_first)
        ops.append(Matmul(out=out, a=views[0], b=views[1], accumulate=accumulate, lane=COMPUTE))
        for number in issue.accumulates:
            slot = issue.slots[number, "c"]
            ops += [self._accumulate(rank, block, slot) for block in steps[number].panels["c"].blocks]
        return ops

    def _operand_view(self, step: ProductStep, operand: Operand, issue: IssueStep) -> View:
        """Return from where a product reads an operand: scratch, or the rank's own shard."""
        panel, slot = step.panels[operand], issue.slots.get((issue.step, operand))
        if slot is None:
            return _shard_view(self._source(operand), panel.blocks[0])
        return self._scratch(f"{operand}_in", panel.shape, slot)

    def _source(self, operand: Operand) -> str:
        return f"{operand}_sum" if self.slicing.summed_layout(operand) is not None else operand

    def _fetch(self, rank: int, out: View, src: View, owner: int) -> Op:
        if owner == rank:
            return Copy(out=out, src=src, lane=COMPUTE)
        return Get(out=out, src=replace(src, rank=owner), lane=GET)

    def _accumulate(self, rank: int, block: OwnedBlock, slot: int) -> Op:
        src, out = _panel_view("c_part", block, slot), replace(_shard_view("c", block), rank=block.owner)
        if not self._is_written_once:
            return Accumulate(out=out, src=src, lane=GIVE)
        if block.owner == rank:
            return Copy(out=replace(out, rank=None), src=src, lane=GIVE)
        return Put(out=out, src=src, lane=GIVE)

    def _sum_share(self, rank: int) -> Iterator[list[Op]]:
        """Sum a rank's share of its block of C over all replicas, each of which has computed a term of it (the
        paper's reduce_replicas)."""
        rows, columns = share_to_sum(self.slicing, rank)
        shape = rows[1] - rows[0], columns[1] - columns[0]
        if 0 in shape:
            return
        share = _view("c", rows, columns)
        for replica in self._other_replicas(rank):
            yield _get_and_add(share, share, self._scratch("c_term", shape, 0), replica)

    def _fetch_shares(self, rank: int) -> Iterator[list[Op]]:
        """Fetch from each replica of C the share that it owns (the paper's broadcast_replica)."""
        for replica in self._other_replicas(rank):
            share = _view("c", *share_to_sum(self.slicing, replica))
            if share.num_elements:
                yield [Get(out=share, src=replace(share, rank=replica), lane=GET)]

    def _other_replicas(self, rank: int) -> list[int]:
        """Return the other ranks that hold the same block of C, the next one first."""
        replicas = replicas_of(self.slicing, rank)
        position = replicas.index(rank)
        return [*replicas[position + 1 :], *replicas[:position]]

    def _scratch(self, name: str, shape: tuple[int, int], slot: int) -> View:
        """Return a view of a slot of a scratch buffer, which is made as large as it needs to be."""
        rows, columns = self.scratch_shapes.get(name, (0, 0))
        self.scratch_shapes[name] = max(rows, shape[0]), max(columns, shape[1])
        self.scratch_slots[name] = max(self.scratch_slots.get(name, 1), slot + 1)
        return _view(name, (0, shape[0]), (0, shape[1]), slot)


def _interleaved(ops_of: Mapping[int, list[list[Op]]]) -> Iterator[Statement]:
    """Yield the first entry of every rank, then the second of every rank, and so on."""
    for row in zip_longest(*ops_of.values()):
        for rank, ops in zip(ops_of, row, strict=True):
            if ops:
                yield On((rank,), tuple(ops))


def _get_and_add(out: View, src: View, scratch: View, owner: int) -> list[Op]:
    return [
        Get(out=scratch, src=replace(src, rank=owner), lane=GET),
        Add(out=out, src=scratch, lane=COMPUTE),
    ]


def _view(name: str, rows: Span, columns: Span, slot: int = 0) -> View:
    return View(name, (Range(*rows), Range(*columns)), slot)


def _shard_view(name: str, block: OwnedBlock) -> View:
    """Return where a block lies in its owner's shard."""
    return _view(name, block.rows, block.columns)


def _panel_view(name: str, block: OwnedBlock, slot: int) -> View:
    """Return where a block lies in a panel."""
    (row, column), (rows, columns) = block.panel_offset, block.shape
    return _view(name, (row, row + rows), (column, column + columns), slot)
