"""The universal product as a program of one-sided ops (Slicing Is All You Need, sections 4.2 and 4.3).

Before: partial operands that are not multiplied as they are, are summed up. Then, step by step in the order of the
schedule, each rank gets the panels of the step, `prefetch` steps ahead, multiplies, and accumulates what belongs
to others. After: copies of C that were computed in parts are put together. Statements stand in the order of steps,
not of ranks, for that is the order in which matched messages meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest

from meshweave.algorithms.universal.config import UniversalConfig
from meshweave.algorithms.universal.issue_order import IssueStep, needs_no_accumulate, issue_order, issue_steps
from meshweave.algorithms.universal.problem import OPERANDS, Operand, UniversalProblem
from meshweave.algorithms.universal.schedule import IssueOrder
from meshweave.algorithms.universal.slicing import OwnedBlock, Slicing, Span, ProductStep
from meshweave.describe.layout.meshes import ProgramMeshes
from meshweave.ir.program import Buffer, Lane, On, Product, Program, Statement, Tensor
from meshweave.ir.program.ops import Accumulate, Add, Copy, Fence, Get, Matmul, Op, Put, Zero
from meshweave.ir.program.views import Range, View

COMPUTE, GET, GIVE = "compute", "get", "give"


def universal_program(
    problem: UniversalProblem, config: UniversalConfig, *, orders: Mapping[int, IssueOrder] | None = None
) -> Program:
    """C = A B as a program of get, put and accumulate; buffers "a", "b" and "c" hold the matrices.

    `orders` says for each rank in which order it fetches, multiplies and accumulates, instead of the choice's
    schedule; tiles are numbered as in `lowering.tiles`. Raises LayoutError where the choice does not fit the
    problem, UnsupportedError for a schedule by costs without rates.
    """
    return _UniversalProgramBuilder(problem, config, Slicing(problem, config), orders).write()


@dataclass
class _UniversalProgramBuilder:
    problem: UniversalProblem
    config: UniversalConfig
    slicing: Slicing
    orders: Mapping[int, IssueOrder] | None = None
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The largest panel that each scratch buffer holds."""
    slots: dict[str, int] = field(default_factory=dict)

    def write(self) -> Program:
        problem, meshes = self.problem, ProgramMeshes()
        for operand in OPERANDS:
            meshes.add(problem.layout(operand).mesh)
        self.everyone = f"{meshes.add_layout(problem.c).mesh.name}"
        body = tuple(self._body())
        buffers = [
            Buffer(
                operand,
                "output" if operand == "c" else "input",
                meshes.add_layout(problem.layout(operand)).mesh.name,
                problem.dtype,
                operand.upper(),
                meshes.add_layout(problem.layout(operand)),
                order=self._order(operand),
            )
            for operand in OPERANDS
        ]
        for operand in OPERANDS[:2]:
            layout = self.slicing.summed_layout(operand)
            if layout is not None:
                placed = meshes.add_layout(layout)
                buffers.append(
                    Buffer(
                        f"{operand}_sum", "temp", placed.mesh.name, problem.dtype, operand.upper(), placed,
                        order=self._order(operand),
                    )
                )  # fmt: skip
        for name, shape in self.sizes.items():
            buffers.append(
                Buffer(
                    name,
                    "scratch",
                    self.everyone,
                    problem.dtype,
                    shape=shape,
                    slots=self.slots[name],
                    order=self._order("abc"["abc".index(name[0])]),
                )
            )
        tensors = tuple(Tensor(name.upper(), problem.shape(name), problem.dtype) for name in OPERANDS)
        lanes = tuple(Lane(name) for name in (COMPUTE, GET, GIVE))
        name = f"universal, {self.config}"
        meaning = (Product("C", "A", "B"),)
        return Program(name, meshes.meshes, tensors, tuple(buffers), lanes, body, meaning)

    def _order(self, operand: str) -> tuple[int, int] | None:
        return self.problem.orders["abc".index(operand)]

    # --- phases ---------------------------------------------------------------------------------------------

    def _body(self) -> Iterator[Statement]:
        slicing, ranks = self.slicing, self.problem.ranks
        if 0 in self.problem.sizes:
            yield On(self.everyone, (Zero(out=self._whole("c"), lane=COMPUTE),))
            return
        summed = [operand for operand in OPERANDS[:2] if slicing.summed_layout(operand) is not None]
        for operand in summed:
            yield from _by_turns(ranks, {rank: list(self._sum(operand, rank)) for rank in ranks})
        starts = not self._stays and not self._single
        if starts:
            yield On(self.everyone, (Zero(out=self._whole("c"), lane=COMPUTE),))
        if summed or starts:
            yield self._fence()
        yield from _by_turns(ranks, {rank: list(self._turns(rank)) for rank in ranks})
        if slicing.merges_replicas:
            yield from self._put_together()

    @property
    def _stays(self) -> bool:
        return self.config.stationary == "c"

    @cached_property
    def _single(self) -> bool:
        return needs_no_accumulate(self.slicing)

    def _fence(self) -> Statement:
        return On(self.everyone, (Fence(over=self.everyone, lane=GET),))

    def _sum(self, operand: Operand, rank: int) -> Iterator[list[Op]]:
        """One term after the other, so that a rank's links are not asked for all of them at once."""
        name, scratch = f"{operand}_sum", f"{operand}_term"
        for (row, column), blocks in self.slicing.partial_sums(operand, rank):
            rows, columns = blocks[0].shape
            out = _view(name, (row, row + rows), (column, column + columns))
            for number, block in enumerate(blocks):
                src = _of(operand, block)
                if number == 0:
                    yield [self._fetch(rank, out, src, block.owner)]
                elif block.owner == rank:
                    yield [Add(out=out, src=src, lane=COMPUTE)]
                else:
                    into = self._scratch(scratch, (rows, columns), 0)
                    yield [
                        Get(out=into, src=replace(src, rank=block.owner), lane=GET),
                        Add(out=out, src=into, lane=COMPUTE),
                    ]

    def _turns(self, rank: int) -> Iterator[list[Op]]:
        steps = self.slicing.steps(rank)
        if self._stays and not steps:
            yield [Zero(out=self._whole("c"), lane=COMPUTE)]
        issue = self.orders[rank] if self.orders is not None else issue_order(self.slicing, rank)
        away = [not self._stays and not (self._single and step.panels["c"].is_local_to(rank)) for step in steps]
        for number, turn in enumerate(issue_steps(steps, rank, issue, away, self.config.prefetch)):
            yield self._turn(rank, steps, turn, away[turn.step], is_first=number == 0)

    def _turn(
        self, rank: int, steps: Sequence[ProductStep], turn: IssueStep, is_away: bool, *, is_first: bool
    ) -> list[Op]:
        ops: list[Op] = []
        for tile in turn.fetches:
            panel, name = steps[tile[0]].panels[tile[1]], f"{tile[1]}_in"
            self._scratch(name, panel.shape, turn.slots[tile])
            for block in panel.blocks:
                out = self._part(name, block, turn.slots[tile])
                ops.append(self._fetch(rank, out, _of(self._base(tile[1]), block), block.owner))
        step = steps[turn.step]
        views: dict[str, View] = {}
        for operand in OPERANDS[:2]:
            panel, slot = step.panels[operand], turn.slots.get((turn.step, operand))
            if slot is None:
                views[operand] = _of(self._base(operand), panel.blocks[0])
            else:
                views[operand] = self._scratch(f"{operand}_in", panel.shape, slot)
        if is_away:
            product = self._scratch("c_part", step.panels["c"].shape, turn.slots[turn.step, "c"])
        else:
            product = _of("c", step.panels["c"].blocks[0])
        ops.append(self._matmul(product, views, accumulate=int(self._stays and not is_first)))
        for number in turn.accumulates:
            slot = turn.slots[number, "c"]
            ops += [self._give(rank, block, slot) for block in steps[number].panels["c"].blocks]
        return ops

    def _base(self, operand: Operand) -> str:
        return f"{operand}_sum" if self.slicing.summed_layout(operand) is not None else operand

    def _matmul(self, out: View, views: dict[str, View], accumulate: int = 0) -> Op:
        return Matmul(out=out, a=views["a"], b=views["b"], accumulate=accumulate, lane=COMPUTE)

    def _fetch(self, rank: int, out: View, src: View, owner: int) -> Op:
        if owner == rank:
            return Copy(out=out, src=src, lane=COMPUTE)
        return Get(out=out, src=replace(src, rank=owner), lane=GET)

    def _give(self, rank: int, block: OwnedBlock, slot: int) -> Op:
        src, out = self._part("c_part", block, slot), replace(_of("c", block), rank=block.owner)
        if not self._single:
            return Accumulate(out=out, src=src, lane=GIVE)
        if block.owner == rank:
            return Copy(out=replace(out, rank=None), src=src, lane=GIVE)
        return Put(out=out, src=src, lane=GIVE)

    def _put_together(self) -> Iterator[Statement]:
        """Copies of C: where each has terms of all of it, each owner first sums up its share (reduce_replicas);
        then everybody gets the shares of the others (broadcast_replica)."""
        slicing, ranks = self.slicing, self.problem.ranks
        yield self._fence()
        if self._stays:
            turns: dict[int, list[list[Op]]] = {}
            for rank in ranks:
                share = slicing.owned_share(rank)
                mine, (rows, columns) = _view("c", *share), share
                shape = rows[1] - rows[0], columns[1] - columns[0]
                turns[rank] = []
                for other in self._others(rank) if 0 not in shape else ():
                    into = self._scratch("c_term", shape, 0)
                    turns[rank].append(
                        [
                            Get(out=into, src=replace(mine, rank=other), lane=GET),
                            Add(out=mine, src=into, lane=COMPUTE),
                        ]
                    )
            yield from _by_turns(ranks, turns)
            yield self._fence()
        spread: dict[int, list[list[Op]]] = {}
        for rank in ranks:
            shares = [(other, _view("c", *slicing.owned_share(other))) for other in self._others(rank)]
            spread[rank] = [
                [Get(out=view, src=replace(view, rank=other), lane=GET)]
                for other, view in shares
                if view.num_elements
            ]
        yield from _by_turns(ranks, spread)

    def _others(self, rank: int) -> list[int]:
        """The other holders of a rank's copy, the next one first."""
        copies = self.slicing.replicas_of(rank)
        at = copies.index(rank)
        return [*copies[at + 1 :], *copies[:at]]

    # --- views ----------------------------------------------------------------------------------------------

    def _scratch(self, name: str, shape: tuple[int, int], slot: int) -> View:
        known = self.sizes.get(name, (0, 0))
        self.sizes[name] = max(known[0], shape[0]), max(known[1], shape[1])
        self.slots[name] = max(self.slots.get(name, 1), slot + 1)
        return _view(name, (0, shape[0]), (0, shape[1]), slot)

    def _part(self, name: str, block: OwnedBlock, slot: int) -> View:
        (row, column), (rows, columns) = block.panel_offset, block.shape
        return _view(name, (row, row + rows), (column, column + columns), slot)

    @staticmethod
    def _whole(name: str) -> View:
        return View(name, (Range(), Range()))


def _by_turns(ranks: tuple[int, ...], turns: dict[int, list[list[Op]]]) -> Iterator[Statement]:
    for number_of_all in zip_longest(*(turns[rank] for rank in ranks)):
        for rank, ops in zip(ranks, number_of_all, strict=True):
            if ops:
                yield On((rank,), tuple(ops))


def _view(name: str, rows: Span, columns: Span, slot: int = 0) -> View:
    return View(name, (Range(*rows), Range(*columns)), slot)


def _of(name: str, block: OwnedBlock) -> View:
    return _view(name, block.rows, block.columns)
