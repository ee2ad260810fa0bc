"""The slicing itself: which local products a rank does, from where their operands come, where results go.

Slicing Is All You Need, section 4.1. The stationary matrix gives each rank a box of two of the dims m, n, k; the
rank runs over the third, the *loop* dim. Ranks with the same box (copies of the stationary matrix, or terms of a
partial C) are a *team* and share the loop. Cutting the loop where the holders of one of the two moving matrices
change gives runs; of each run one panel of each moving matrix takes part, which is fetched from its holders, or,
where it is of C, accumulated into its owners. So every element that a rank needs and does not have
reaches it exactly once: no way to compute the same box can move less.

A partial matrix that is not summed up first lengthens the loop: sum over k and r of A_r[m, k] B[k, n].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from meshweave.algorithms.universal.choice import Choice, groups
from meshweave.algorithms.universal.held import (
    Held,
    Pair,
    Piece,
    Run,
    common_runs,
    held,
    nearest,
    shared_out,
)
from meshweave.algorithms.universal.problem import DIMS, LOOP, OPERANDS, Operand, UniversalProblem
from meshweave.algorithms.universal.teams import Item, share
from meshweave.describe.layout import Layout, Partial

Span = tuple[int, int]
"""[start, stop) in some memory."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows and columns of what `owner` holds; `at` is where it lies in a panel, or where it comes from."""

    owner: int
    rows: Span
    columns: Span
    at: tuple[int, int] = (0, 0)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @property
    def num_elements(self) -> int:
        rows, columns = self.shape
        return rows * columns


@dataclass(frozen=True, slots=True)
class Panel:
    """The part of a matrix that takes part in one local product, made of blocks of its holders."""

    operand: Operand
    shape: tuple[int, int]
    blocks: tuple[Block, ...]

    def lies_with(self, rank: int) -> bool:
        """Whether it is one block of a rank's own memory."""
        return len(self.blocks) == 1 and self.blocks[0].owner == rank


@dataclass(frozen=True, slots=True)
class Step:
    """One local product: C panel = or += A panel x B panel, in that order in `panels`; `sizes` are its m, n, k."""

    sizes: tuple[int, int, int]
    panels: Mapping[Operand, Panel]


def cuts(runs: Sequence[Run], slices: int) -> list[int]:
    """Into how many parts each run is cut, so that there are `slices` parts or more, as even as runs allow."""
    total = sum(run.size for run in runs)
    longest = max(-(-total // max(slices, 1)), 1)
    return [-(-run.size // longest) for run in runs]


@dataclass(frozen=True)
class Slicing:
    """Everything that follows from a problem and a choice, rank by rank.

    `a`, `b`, `c` say who holds the matrices that are multiplied: of partial operands that are summed first, the
    sums. `owners` is C with one owner per element and group. Raises LayoutError as `groups` does.
    """

    problem: UniversalProblem
    choice: Choice

    @cached_property
    def group_of(self) -> dict[int, int]:
        return groups(self.problem, self.choice.redundant)

    @cached_property
    def matrices(self) -> dict[Operand, Held]:
        found: dict[Operand, Held] = {}
        for operand in DIMS:
            layout = self.summed(operand) or self.problem.layout(operand)
            found[operand] = held(layout, self.problem.shape(operand))
        return found

    def summed(self, operand: Operand) -> Layout | None:
        """The layout in which a partial operand is summed up first, or None."""
        return {"a": self.choice.a, "b": self.choice.b, "c": None}[operand]

    @cached_property
    def owners(self) -> Held:
        dim = 0 if self.problem.m >= self.problem.n else 1
        return shared_out(self.matrices["c"], dim, self.group_of)

    @cached_property
    def moving(self) -> tuple[Operand, Operand]:
        """The two matrices that are not stationary, in the order a, b, c."""
        first, second = (operand for operand in DIMS if operand != self.choice.stationary)
        return first, second

    @cached_property
    def position(self) -> dict[int, int]:
        return {rank: index for index, rank in enumerate(self.problem.ranks)}

    @cached_property
    def _tables(self) -> tuple[Held, Held]:
        """Of the moving matrices; of C the owners, for results go to these alone."""
        first, second = (
            self.owners if operand == "c" and self.choice.stationary != "c" else self.matrices[operand]
            for operand in self.moving
        )
        return first, second

    def _dim_in(self, operand: Operand, dim: int) -> int:
        return DIMS[operand].index(dim)

    @cached_property
    def loop(self) -> dict[Pair, tuple[Run, ...]]:
        """The loop dim by classes of the moving matrices."""
        dim = LOOP[self.choice.stationary]
        left, right = (
            table.dims[self._dim_in(operand, dim)]
            for operand, table in zip(self.moving, self._tables, strict=True)
        )
        return common_runs(left, right, self.problem.sizes[dim])

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """The loop of a whole team: with one item per class pair and pair of terms."""
        terms = [
            range(table.num_terms) if operand != "c" else range(1)
            for operand, table in zip(self.moving, self._tables, strict=True)
        ]
        return tuple(
            Item(pair, (left, right), runs)
            for left in terms[0]
            for right in terms[1]
            for pair, runs in self.loop.items()
        )

    @cached_property
    def teams(self) -> dict[int, tuple[int, ...]]:
        """For each rank its team. A team has its box in common, and a group; of a partial stationary operand the
        term too, of a partial C not: each of its terms is a part of the loop."""
        still = self.matrices[self.choice.stationary]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in self.problem.ranks:
            row, column, term = still.of[rank]
            key = (row, column, 0 if self.choice.stationary == "c" else term, self.group_of[rank])
            found.setdefault(key, []).append(rank)
        return {rank: tuple(team) for team in found.values() for rank in team}

    @cached_property
    def work(self) -> dict[int, tuple[Item, ...]]:
        """What each rank does of its team's loop."""
        done: dict[int, tuple[Item, ...]] = {}
        for rank, team in self.teams.items():
            if rank == team[0]:
                shares = share(self.items, len(team), self._lacking(team), even=self.choice.split == "even")
                done.update(zip(team, shares, strict=True))
        return done

    def _lacking(self, team: Sequence[int]) -> list[list[int]]:
        """For each item and member: how many elements must move per index of the loop."""
        return [[self._lacks(item, rank, OPERANDS) for rank in team] for item in self.items]

    def _lacks(self, item: Item, rank: int, operands: Sequence[Operand]) -> int:
        """How many elements of these matrices a rank does not have, per index of an item."""
        count = 0
        for operand, table, of, term in zip(self.moving, self._tables, item.pair, item.terms, strict=True):
            if operand not in operands:
                continue
            dim = self._dim_in(operand, self._fixed(operand))
            mine = table.of[rank]
            here = mine[1 - dim] == of and (operand == "c" or mine[2] == term)
            count += sum(
                piece.size
                for piece in self.fixed_pieces(operand, rank)
                if not (here and piece.of == mine[dim])
            )
        return count

    def _fixed(self, operand: Operand) -> int:
        """The dim of (m, n, k) that a moving matrix shares with the stationary one."""
        first, second = DIMS[operand]
        return second if first == LOOP[self.choice.stationary] else first

    def fixed_pieces(self, operand: Operand, rank: int) -> tuple[Piece, ...]:
        """The box of a rank along the dim that it shares with a moving matrix, cut by that matrix's holders."""
        still = self.choice.stationary
        fixed = self._fixed(operand)
        matrix = self.matrices[still]
        block = matrix.of[rank]
        dim = DIMS[still].index(fixed)
        table = self._tables[self.moving.index(operand)].dims[DIMS[operand].index(fixed)]
        key = operand, block[dim], dim
        known = self._cut.get(key)
        if known is None:
            known = self._cut[key] = tuple(table.cut(matrix.dims[dim].classes[block[dim]]))
        return known

    @cached_property
    def _cut(self) -> dict[tuple[Operand, int, int], tuple[Piece, ...]]:
        return {}

    @cached_property
    def copies_alike(self) -> bool:
        """Whether each group gives a term of a partial C the same products.

        Where not, copies of a term differ, and whoever takes parts of it from several of them gets another sum.
        """
        c, still = self.matrices["c"], self.matrices[self.choice.stationary]
        done: dict[int, set[object]] = {group: set() for group in self.group_of.values()}
        if len(done) == 1 or c.num_terms == 1:
            return True
        for rank in self.problem.ranks:
            for (item, run), step in zip(self.runs(rank), self.whole_steps[rank], strict=True):
                given = tuple(c.of[block.owner] for block in step.panels["c"].blocks)
                done[self.group_of[rank]].add((still.of[rank], item.pair, item.terms, run, given))
        first, *others = done.values()
        return all(other == first for other in others)

    # --- steps ----------------------------------------------------------------------------------------------

    def runs(self, rank: int) -> list[tuple[Item, Run]]:
        """What a rank runs over, in the order of direct execution (section 4.2): each begins at another place, so
        that no holder is asked by all at once. But first comes what needs least from others, for nothing hides
        that; the offset alone sends ranks that have a whole step at hand for another one."""
        if 0 in self.matrices[self.choice.stationary].shape(rank):
            return []
        found = [(item, run) for item in self._rotated(self.work[rank], rank) for run in item.runs]
        if not found:
            return found
        longest = max(-(-sum(run.size for _, run in found) // max(self.choice.slices, 1)), 1)

        def waits(index: int) -> int:
            item, run = found[index]
            return self._lacks(item, rank, OPERANDS[:2]) * min(run.size, longest)

        first = min(range(len(found)), key=waits)
        return [found[first], *found[:first], *found[first + 1 :]]

    def steps(self, rank: int) -> list[Step]:
        """The local products of a rank: its runs, cut into `slices` or more."""
        runs = self.runs(rank)
        out = []
        for (item, run), count in zip(runs, cuts([run for _, run in runs], self.choice.slices), strict=True):
            for part in range(count):
                lo, hi = run.size * part // count, run.size * (part + 1) // count
                out.append(self._step(rank, item, Run(run.left + lo, run.right + lo, hi - lo)))
        return out

    @cached_property
    def whole_steps(self) -> dict[int, tuple[Step, ...]]:
        """For each rank the products of its runs as if these were not cut: they compute and move the same."""
        return {
            rank: tuple(self._step(rank, item, run) for item, run in self.runs(rank))
            for rank in self.problem.ranks
        }

    def _rotated(self, items: Sequence[Item], rank: int) -> Sequence[Item]:
        still = self.matrices[self.choice.stationary]
        block, team = still.of[rank], self.teams[rank]
        turn = team.index(rank) * len(items) // len(team) if len(team) > 1 else 0
        for place, table in zip(block, still.dims, strict=False):
            turn += place * len(items) // len(table.classes)
        turn %= max(len(items), 1)
        return (*items[turn:], *items[:turn])

    def _step(self, rank: int, item: Item, run: Run) -> Step:
        still = self.choice.stationary
        sizes = [0, 0, 0]
        shape = self.matrices[still].shape(rank)
        for dim, size in zip(DIMS[still], shape, strict=True):
            sizes[dim] = size
        sizes[LOOP[still]] = run.size
        own = Block(rank, (0, shape[0]), (0, shape[1]))
        panels = {still: Panel(still, shape, (own,))}
        for index, operand in enumerate(self.moving):
            start = run.left if index == 0 else run.right
            panels[operand] = self._panel(
                rank, index, item.pair[index], item.terms[index], (start, start + run.size)
            )
        return Step((sizes[0], sizes[1], sizes[2]), panels)

    def _panel(self, rank: int, index: int, of: int, term: int, span: Span) -> Panel:
        operand, table = self.moving[index], self._tables[index]
        dim = DIMS[operand].index(self._fixed(operand))
        blocks = []
        size = 0
        for piece in self.fixed_pieces(operand, rank):
            owner = self._owner(rank, operand, table, piece.of, of, dim, term)
            spans = [(piece.local, piece.local + piece.size), span]
            at = [piece.at, 0]
            if dim == 1:
                spans.reverse()
                at.reverse()
            blocks.append(Block(owner, spans[0], spans[1], (at[0], at[1])))
            size += piece.size
        shape = (size, span[1] - span[0]) if dim == 0 else (span[1] - span[0], size)
        return Panel(operand, shape, tuple(blocks))

    def _owner(
        self, rank: int, operand: Operand, table: Held, fixed: int, moving: int, dim: int, term: int
    ) -> int:
        pair = (fixed, moving) if dim == 0 else (moving, fixed)
        if operand == "c":  # any term of a partial C will do; the rank's own, where it has the element
            group = self.group_of[rank]
            ranks = [
                other
                for number in range(table.num_terms)
                for other in table.holders.get((*pair, number), ())
                if self.group_of[other] == group
            ]
        else:
            ranks = list(table.holders[(*pair, term)])
        return self.nearest(ranks, rank)

    def nearest(self, ranks: Sequence[int], rank: int) -> int:
        return nearest(ranks, rank, self.position.__getitem__, len(self.position))

    # --- before and after -----------------------------------------------------------------------------------

    def sums(self, operand: Operand, rank: int) -> list[tuple[tuple[int, int], tuple[Block, ...]]]:
        """Of a partial operand that is summed up first: for each block of the sum that a rank keeps, where it
        begins there and the terms of it, the rank's own first where it has one."""
        layout = self.summed(operand)
        if layout is None:
            return []
        source = held(self.problem.layout(operand), self.problem.shape(operand))
        target = self.matrices[operand]
        row, column, _ = target.of[rank]
        terms = _summed_terms(self.problem.layout(operand), layout, rank)
        out = []
        for rows in source.rows.cut(target.rows.classes[row]):
            for columns in source.columns.cut(target.columns.classes[column]):
                owners = [self.nearest(source.holders[rows.of, columns.of, term], rank) for term in terms]
                owners.sort(
                    key=lambda owner: (self.position[owner] - self.position[rank]) % len(self.position)
                )
                spans = (rows.local, rows.local + rows.size), (columns.local, columns.local + columns.size)
                blocks = tuple(Block(owner, *spans, (rows.at, columns.at)) for owner in owners)
                out.append(((rows.at, columns.at), blocks))
        return out

    @property
    def shares_copies(self) -> bool:
        """Whether copies of C are put together at the end, from what each of their holders has."""
        return bool(self.copies_of(self.problem.ranks[0])[1:]) or any(
            len(self.copies_of(rank)) > 1 for rank in self.problem.ranks
        )

    def copies_of(self, rank: int) -> tuple[int, ...]:
        """The ranks of a rank's group that hold the same term of the same block of C."""
        ranks = self.matrices["c"].holders[self.matrices["c"].of[rank]]
        return tuple(other for other in ranks if self.group_of[other] == self.group_of[rank])

    def share_of(self, rank: int) -> tuple[Span, Span]:
        """The part of its block of C that a rank owns among its copies: rows and columns in its memory."""
        rows, columns = self.matrices["c"].shape(rank)
        spans = [(0, rows), (0, columns)]
        mine = self.owners.of[rank]
        for dim in (0, 1):
            table = self.owners.dims[dim]
            if table is not self.matrices["c"].dims[dim]:
                first = table.offsets[mine[dim]]
                spans[dim] = (first, first + table.size(mine[dim]))
        return spans[0], spans[1]


def _summed_terms(source: Layout, target: Layout, rank: int) -> list[int]:
    """The terms of a partial matrix that make up what a rank holds of a sum over some of their axes."""
    kept = dict(zip(target.mesh.axes, target.placements, strict=True))
    terms = [0]
    for axis, placement, at, count in zip(
        source.mesh.axes, source.placements, source.mesh.coords(rank), source.mesh.shape, strict=True
    ):
        if isinstance(placement, Partial):
            each = [at] if isinstance(kept[axis], Partial) else range(count)
            terms = [term * count + coordinate for term in terms for coordinate in each]
    return terms
