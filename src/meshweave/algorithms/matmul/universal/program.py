"""The universal product as a program of one-sided ops, by direct execution (Slicing Is All You Need, section 4.2).

Before: partial operands that are not multiplied as they are, are summed up. Then, step by step, each rank gets the
panels of the step, `prefetch` steps ahead, multiplies, and accumulates what belongs to others. After: copies of C
that were computed in parts are put together. Statements stand in the order of steps, not of ranks, for that is the
order in which matched messages meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from meshweave.algorithms.matmul.universal.choice import Choice
from meshweave.algorithms.matmul.universal.problem import OPERANDS, Operand, UniversalProblem
from meshweave.algorithms.matmul.universal.slicing import Block, Slicing, Span, Step
from meshweave.describe.layout import Layout
from meshweave.describe.mesh import Mesh
from meshweave.ir.ops import Accumulate, Add, Copy, Fence, Get, Matmul, Op, Put, Zero
from meshweave.ir.program import Buffer, Lane, On, Product, Program, Statement, Tensor
from meshweave.ir.views import Range, View

COMPUTE, GET, GIVE = "compute", "get", "give"


def universal_program(problem: UniversalProblem, choice: Choice) -> Program:
    """C = A B as a program of get, put and accumulate; buffers "a", "b" and "c" hold the matrices.

    Raises LayoutError where the choice does not fit the problem.
    """
    return _Writer(problem, choice, Slicing(problem, choice)).write()


@dataclass
class _Writer:
    problem: UniversalProblem
    choice: Choice
    slicing: Slicing
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The largest panel that each scratch buffer holds."""

    def write(self) -> Program:
        problem, meshes = self.problem, _Meshes()
        for operand in OPERANDS:
            meshes.add(problem.layout(operand).mesh)
        self.everyone = f"{meshes.of(problem.c).mesh.name}"
        body = tuple(self._body())
        buffers = [
            Buffer(
                operand,
                "output" if operand == "c" else "input",
                meshes.of(problem.layout(operand)).mesh.name,
                problem.dtype,
                operand.upper(),
                meshes.of(problem.layout(operand)),
                order=self._order(operand),
            )
            for operand in OPERANDS
        ]
        for operand in OPERANDS[:2]:
            layout = self.slicing.summed(operand)
            if layout is not None:
                placed = meshes.of(layout)
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
                    slots=2 if name.endswith("_term") else self.choice.prefetch + 1,
                    order=self._order("abc"["abc".index(name[0])]),
                )
            )
        tensors = tuple(Tensor(name.upper(), problem.shape(name), problem.dtype) for name in OPERANDS)
        lanes = tuple(Lane(name) for name in (COMPUTE, GET, GIVE))
        name = f"universal, {self.choice}"
        meaning = (Product("C", "A", "B"),)
        return Program(name, meshes.listed, tensors, tuple(buffers), lanes, body, meaning)

    def _order(self, operand: str) -> tuple[int, int] | None:
        return self.problem.orders["abc".index(operand)]

    # --- phases ---------------------------------------------------------------------------------------------

    def _body(self) -> Iterator[Statement]:
        slicing, ranks = self.slicing, self.problem.ranks
        if 0 in self.problem.sizes:
            yield On(self.everyone, (Zero(out=self._whole("c"), lane=COMPUTE),))
            return
        summed = [operand for operand in OPERANDS[:2] if slicing.summed(operand) is not None]
        for operand in summed:
            yield from _by_turns(ranks, {rank: list(self._sum(operand, rank)) for rank in ranks})
        starts = not self._stays and not self._single
        if starts:
            yield On(self.everyone, (Zero(out=self._whole("c"), lane=COMPUTE),))
        if summed or starts:
            yield self._fence()
        yield from _by_turns(ranks, {rank: list(self._turns(rank)) for rank in ranks})
        if slicing.shares_copies:
            yield from self._put_together()

    @property
    def _stays(self) -> bool:
        return self.choice.stationary == "c"

    @property
    def _single(self) -> bool:
        """Whether every element of C is the result of one product of one rank, so that nothing is to be added."""
        still = self.slicing.matrices[self.choice.stationary]
        inner = still.dims[1 if self.choice.stationary == "a" else 0]
        filled = sum(inner.size(number) > 0 for number in range(len(inner.classes)))
        terms = still.num_terms * self.slicing.matrices["c"].num_terms
        return filled == 1 and terms == 1

    def _fence(self) -> Statement:
        return On(self.everyone, (Fence(over=self.everyone, lane=GET),))

    def _sum(self, operand: Operand, rank: int) -> Iterator[list[Op]]:
        name, scratch = f"{operand}_sum", f"{operand}_term"
        turn = 0
        for (row, column), blocks in self.slicing.sums(operand, rank):
            rows, columns = blocks[0].shape
            out = _view(name, (row, row + rows), (column, column + columns))
            for number, block in enumerate(blocks):
                src = _of(operand, block)
                if number == 0:
                    yield [self._fetch(rank, out, src, block.owner)]
                elif block.owner == rank:
                    yield [Add(out=out, src=src, lane=COMPUTE)]
                else:
                    into = self._scratch(scratch, (rows, columns), turn % 2)
                    turn += 1
                    yield [
                        Get(out=into, src=replace(src, rank=block.owner), lane=GET),
                        Add(out=out, src=into, lane=COMPUTE),
                    ]

    def _turns(self, rank: int) -> Iterator[list[Op]]:
        steps = self.slicing.steps(rank)
        if self._stays and not steps:
            yield [Zero(out=self._whole("c"), lane=COMPUTE)]
        used = {"a": 0, "b": 0, "c": 0}
        for number, step in enumerate(steps):
            yield self._turn(rank, number, step, used)

    def _turn(self, rank: int, number: int, step: Step, used: dict[str, int]) -> list[Op]:
        ops: list[Op] = []
        views: dict[str, View] = {}
        for operand in OPERANDS[:2]:
            panel = step.panels[operand]
            base = f"{operand}_sum" if self.slicing.summed(operand) is not None else operand
            if panel.lies_with(rank):
                views[operand] = _of(base, panel.blocks[0])
                continue
            slot = used[operand] % (self.choice.prefetch + 1)
            used[operand] += 1
            views[operand] = self._scratch(f"{operand}_in", panel.shape, slot)
            for block in panel.blocks:
                out = self._part(f"{operand}_in", block, slot)
                ops.append(self._fetch(rank, out, _of(base, block), block.owner))
        out_panel = step.panels["c"]
        if self._stays:
            product = _of("c", out_panel.blocks[0])
            ops.append(self._matmul(product, views, accumulate=int(number > 0)))
        elif self._single and out_panel.lies_with(rank):
            ops.append(self._matmul(_of("c", out_panel.blocks[0]), views))
        else:
            slot = used["c"] % (self.choice.prefetch + 1)
            used["c"] += 1
            ops.append(self._matmul(self._scratch("c_part", out_panel.shape, slot), views))
            ops += [self._give(rank, block, slot) for block in out_panel.blocks]
        return ops

    def _matmul(self, out: View, views: dict[str, View], accumulate: int = 0) -> Op:
        return Matmul(out=out, a=views["a"], b=views["b"], accumulate=accumulate, lane=COMPUTE)

    def _fetch(self, rank: int, out: View, src: View, owner: int) -> Op:
        if owner == rank:
            return Copy(out=out, src=src, lane=COMPUTE)
        return Get(out=out, src=replace(src, rank=owner), lane=GET)

    def _give(self, rank: int, block: Block, slot: int) -> Op:
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
                share = slicing.share_of(rank)
                mine, (rows, columns) = _view("c", *share), share
                shape = rows[1] - rows[0], columns[1] - columns[0]
                turns[rank] = []
                for number, other in enumerate(self._others(rank) if 0 not in shape else ()):
                    into = self._scratch("c_term", shape, number % 2)
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
            shares = [(other, _view("c", *slicing.share_of(other))) for other in self._others(rank)]
            spread[rank] = [
                [Get(out=view, src=replace(view, rank=other), lane=GET)]
                for other, view in shares
                if view.num_elements
            ]
        yield from _by_turns(ranks, spread)

    def _others(self, rank: int) -> list[int]:
        """The other holders of a rank's copy, the next one first."""
        copies = self.slicing.copies_of(rank)
        at = copies.index(rank)
        return [*copies[at + 1 :], *copies[:at]]

    # --- views ----------------------------------------------------------------------------------------------

    def _scratch(self, name: str, shape: tuple[int, int], slot: int) -> View:
        known = self.sizes.get(name, (0, 0))
        self.sizes[name] = max(known[0], shape[0]), max(known[1], shape[1])
        return _view(name, (0, shape[0]), (0, shape[1]), slot)

    def _part(self, name: str, block: Block, slot: int) -> View:
        (row, column), (rows, columns) = block.at, block.shape
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


def _of(name: str, block: Block) -> View:
    return _view(name, block.rows, block.columns)


class _Meshes:
    """Equal meshes under one name; different ones under different names."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Mesh] = {}

    def add(self, mesh: Mesh) -> Mesh:
        key = mesh.shape, mesh.axes, mesh.ranks
        if key not in self._known:
            number = len(self._known) + 1
            self._known[key] = replace(mesh, name="mesh" if number == 1 else f"mesh_{number}")
        return self._known[key]

    def of(self, layout: Layout) -> Layout:
        return replace(layout, mesh=self.add(layout.mesh))

    @property
    def listed(self) -> tuple[Mesh, ...]:
        return tuple(self._known.values())
