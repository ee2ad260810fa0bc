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

from meshweave.algorithms.universal.config import UniversalConfig, replica_groups
from meshweave.algorithms.universal.owners import (
    OwnerMap,
    ClassPair,
    ClassSegment,
    CommonRun,
    common_runs,
    owners,
    nearest_holder,
    split_among_replicas,
)
from meshweave.algorithms.universal.problem import DIMS, LOOP, OPERANDS, Operand, UniversalProblem
from meshweave.algorithms.universal.loop_split import LoopPart, split_loop
from meshweave.describe.layout import Layout, Partial

Span = tuple[int, int]
"""[start, stop) in some memory."""


@dataclass(frozen=True, slots=True)
class OwnedBlock:
    """Rows and columns of what `owner` holds; `at` is where it lies in a panel, or where it comes from."""

    owner: int
    rows: Span
    columns: Span
    panel_offset: tuple[int, int] = (0, 0)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @property
    def num_elements(self) -> int:
        rows, columns = self.shape
        return rows * columns


@dataclass(frozen=True, slots=True)
class OperandPanel:
    """The part of a matrix that takes part in one local product, made of blocks of its holders."""

    operand: Operand
    shape: tuple[int, int]
    blocks: tuple[OwnedBlock, ...]

    def is_local_to(self, rank: int) -> bool:
        """Whether it is one block of a rank's own memory."""
        return len(self.blocks) == 1 and self.blocks[0].owner == rank


@dataclass(frozen=True, slots=True)
class ProductStep:
    """One local product: C panel = or += A panel x B panel, in that order in `panels`; `sizes` are its m, n, k."""

    sizes: tuple[int, int, int]
    panels: Mapping[Operand, OperandPanel]


def split_counts(runs: Sequence[CommonRun], slices: int) -> list[int]:
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
    config: UniversalConfig

    @cached_property
    def group_of(self) -> dict[int, int]:
        return replica_groups(self.problem, self.config.redundant_axes)

    @cached_property
    def matrices(self) -> dict[Operand, OwnerMap]:
        found: dict[Operand, OwnerMap] = {}
        for operand in DIMS:
            layout = self.summed_layout(operand) or self.problem.layout(operand)
            found[operand] = owners(layout, self.problem.shape(operand))
        return found

    def summed_layout(self, operand: Operand) -> Layout | None:
        """The layout in which a partial operand is summed up first, or None."""
        return {"a": self.config.summed_a, "b": self.config.summed_b, "c": None}[operand]

    @cached_property
    def c_owners(self) -> OwnerMap:
        dim = 0 if self.problem.m >= self.problem.n else 1
        return split_among_replicas(self.matrices["c"], dim, self.group_of)

    @cached_property
    def moving(self) -> tuple[Operand, Operand]:
        """The two matrices that are not stationary, in the order a, b, c."""
        first, second = (operand for operand in DIMS if operand != self.config.stationary)
        return first, second

    @cached_property
    def position(self) -> dict[int, int]:
        return {rank: index for index, rank in enumerate(self.problem.ranks)}

    @cached_property
    def _moving_owners(self) -> tuple[OwnerMap, OwnerMap]:
        """Of the moving matrices; of C the owners, for results go to these alone."""
        first, second = (
            self.c_owners if operand == "c" and self.config.stationary != "c" else self.matrices[operand]
            for operand in self.moving
        )
        return first, second

    def _axis_of(self, operand: Operand, dim: int) -> int:
        return DIMS[operand].index(dim)

    @cached_property
    def loop_runs(self) -> dict[ClassPair, tuple[CommonRun, ...]]:
        """The loop dim by classes of the moving matrices."""
        dim = LOOP[self.config.stationary]
        left, right = (
            table.dims[self._axis_of(operand, dim)]
            for operand, table in zip(self.moving, self._moving_owners, strict=True)
        )
        return common_runs(left, right, self.problem.sizes[dim])

    @cached_property
    def loop_parts(self) -> tuple[LoopPart, ...]:
        """The loop of a whole team: with one item per class pair and pair of terms."""
        terms = [
            range(table.num_terms) if operand != "c" else range(1)
            for operand, table in zip(self.moving, self._moving_owners, strict=True)
        ]
        return tuple(
            LoopPart(pair, (left, right), runs)
            for left in terms[0]
            for right in terms[1]
            for pair, runs in self.loop_runs.items()
        )

    @cached_property
    def teams(self) -> dict[int, tuple[int, ...]]:
        """For each rank its team. A team has its box in common, and a group; of a partial stationary operand the
        term too, of a partial C not: each of its terms is a part of the loop."""
        still = self.matrices[self.config.stationary]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in self.problem.ranks:
            row, column, term = still.block_of[rank]
            key = (row, column, 0 if self.config.stationary == "c" else term, self.group_of[rank])
            found.setdefault(key, []).append(rank)
        return {rank: tuple(team) for team in found.values() for rank in team}

    @cached_property
    def work(self) -> dict[int, tuple[LoopPart, ...]]:
        """What each rank does of its team's loop."""
        done: dict[int, tuple[LoopPart, ...]] = {}
        for rank, team in self.teams.items():
            if rank == team[0]:
                shares = split_loop(self.loop_parts, len(team), self._missing_elements(team), even=self.config.split == "even")
                done.update(zip(team, shares, strict=True))
        return done

    def _missing_elements(self, team: Sequence[int]) -> list[list[int]]:
        """For each item and member: how many elements must move per index of the loop."""
        return [[self._num_missing(item, rank, OPERANDS) for rank in team] for item in self.loop_parts]

    def _num_missing(self, item: LoopPart, rank: int, operands: Sequence[Operand]) -> int:
        """How many elements of these matrices a rank does not have, per index of an item."""
        count = 0
        for operand, table, of, term in zip(self.moving, self._moving_owners, item.classes, item.terms, strict=True):
            if operand not in operands:
                continue
            dim = self._axis_of(operand, self._shared_dim(operand))
            mine = table.block_of[rank]
            here = mine[1 - dim] == of and (operand == "c" or mine[2] == term)
            count += sum(
                piece.size
                for piece in self.shared_dim_segments(operand, rank)
                if not (here and piece.index_class == mine[dim])
            )
        return count

    def _shared_dim(self, operand: Operand) -> int:
        """The dim of (m, n, k) that a moving matrix shares with the stationary one."""
        first, second = DIMS[operand]
        return second if first == LOOP[self.config.stationary] else first

    def shared_dim_segments(self, operand: Operand, rank: int) -> tuple[ClassSegment, ...]:
        """The box of a rank along the dim that it shares with a moving matrix, cut by that matrix's holders."""
        still = self.config.stationary
        fixed = self._shared_dim(operand)
        matrix = self.matrices[still]
        block = matrix.block_of[rank]
        dim = DIMS[still].index(fixed)
        table = self._moving_owners[self.moving.index(operand)].dims[DIMS[operand].index(fixed)]
        key = operand, block[dim], dim
        known = self._segments.get(key)
        if known is None:
            known = self._segments[key] = tuple(table.split(matrix.dims[dim].classes[block[dim]]))
        return known

    @cached_property
    def _segments(self) -> dict[tuple[Operand, int, int], tuple[ClassSegment, ...]]:
        return {}

    @cached_property
    def replicas_agree(self) -> bool:
        """Whether each group gives a term of a partial C the same products.

        Where not, copies of a term differ, and whoever takes parts of it from several of them gets another sum.
        """
        c, still = self.matrices["c"], self.matrices[self.config.stationary]
        done: dict[int, set[object]] = {group: set() for group in self.group_of.values()}
        if len(done) == 1 or c.num_terms == 1:
            return True
        for rank in self.problem.ranks:
            for (item, run), step in zip(self.runs(rank), self.whole_steps[rank], strict=True):
                given = tuple(c.block_of[block.owner] for block in step.panels["c"].blocks)
                done[self.group_of[rank]].add((still.block_of[rank], item.classes, item.terms, run, given))
        first, *others = done.values()
        return all(other == first for other in others)

    # --- steps ----------------------------------------------------------------------------------------------

    def runs(self, rank: int) -> list[tuple[LoopPart, CommonRun]]:
        """What a rank runs over, in the order of direct execution (section 4.2): each begins at another place, so
        that no holder is asked by all at once. But first comes what needs least from others, for nothing hides
        that; the offset alone sends ranks that have a whole step at hand for another one."""
        if 0 in self.matrices[self.config.stationary].shape(rank):
            return []
        found = [(item, run) for item in self._rotated(self.work[rank], rank) for run in item.runs]
        if not found:
            return found
        longest = max(-(-sum(run.size for _, run in found) // max(self.config.num_slices, 1)), 1)

        def waits(index: int) -> int:
            item, run = found[index]
            return self._num_missing(item, rank, OPERANDS[:2]) * min(run.size, longest)

        first = min(range(len(found)), key=waits)
        return [found[first], *found[:first], *found[first + 1 :]]

    def steps(self, rank: int) -> list[ProductStep]:
        """The local products of a rank: its runs, cut into `slices` or more."""
        runs = self.runs(rank)
        out = []
        for (item, run), count in zip(runs, split_counts([run for _, run in runs], self.config.num_slices), strict=True):
            for part in range(count):
                lo, hi = run.size * part // count, run.size * (part + 1) // count
                out.append(self._step(rank, item, CommonRun(run.left_start + lo, run.right_start + lo, hi - lo)))
        return out

    @cached_property
    def whole_steps(self) -> dict[int, tuple[ProductStep, ...]]:
        """For each rank the products of its runs as if these were not cut: they compute and move the same."""
        return {
            rank: tuple(self._step(rank, item, run) for item, run in self.runs(rank))
            for rank in self.problem.ranks
        }

    def _rotated(self, items: Sequence[LoopPart], rank: int) -> Sequence[LoopPart]:
        still = self.matrices[self.config.stationary]
        block, team = still.block_of[rank], self.teams[rank]
        turn = team.index(rank) * len(items) // len(team) if len(team) > 1 else 0
        for place, table in zip(block, still.dims, strict=False):
            turn += place * len(items) // len(table.classes)
        turn %= max(len(items), 1)
        return (*items[turn:], *items[:turn])

    def _step(self, rank: int, item: LoopPart, run: CommonRun) -> ProductStep:
        still = self.config.stationary
        sizes = [0, 0, 0]
        shape = self.matrices[still].shape(rank)
        for dim, size in zip(DIMS[still], shape, strict=True):
            sizes[dim] = size
        sizes[LOOP[still]] = run.size
        own = OwnedBlock(rank, (0, shape[0]), (0, shape[1]))
        panels = {still: OperandPanel(still, shape, (own,))}
        for index, operand in enumerate(self.moving):
            start = run.left_start if index == 0 else run.right_start
            panels[operand] = self._panel(
                rank, index, item.classes[index], item.terms[index], (start, start + run.size)
            )
        return ProductStep((sizes[0], sizes[1], sizes[2]), panels)

    def _panel(self, rank: int, index: int, of: int, term: int, span: Span) -> OperandPanel:
        operand, table = self.moving[index], self._moving_owners[index]
        dim = DIMS[operand].index(self._shared_dim(operand))
        blocks = []
        size = 0
        for piece in self.shared_dim_segments(operand, rank):
            owner = self._owner(rank, operand, table, piece.index_class, of, dim, term)
            spans = [(piece.local_start, piece.local_start + piece.size), span]
            at = [piece.list_start, 0]
            if dim == 1:
                spans.reverse()
                at.reverse()
            blocks.append(OwnedBlock(owner, spans[0], spans[1], (at[0], at[1])))
            size += piece.size
        shape = (size, span[1] - span[0]) if dim == 0 else (span[1] - span[0], size)
        return OperandPanel(operand, shape, tuple(blocks))

    def _owner(
        self, rank: int, operand: Operand, table: OwnerMap, fixed: int, moving: int, dim: int, term: int
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
        return self.nearest_holder(ranks, rank)

    def nearest_holder(self, ranks: Sequence[int], rank: int) -> int:
        return nearest_holder(ranks, rank, self.position.__getitem__, len(self.position))

    # --- before and after -----------------------------------------------------------------------------------

    def partial_sums(self, operand: Operand, rank: int) -> list[tuple[tuple[int, int], tuple[OwnedBlock, ...]]]:
        """Of a partial operand that is summed up first: for each block of the sum that a rank keeps, where it
        begins there and the terms of it, the rank's own first where it has one."""
        layout = self.summed_layout(operand)
        if layout is None:
            return []
        source = owners(self.problem.layout(operand), self.problem.shape(operand))
        target = self.matrices[operand]
        row, column, _ = target.block_of[rank]
        terms = _summed_terms(self.problem.layout(operand), layout, rank)
        out = []
        for rows in source.rows.split(target.rows.classes[row]):
            for columns in source.columns.split(target.columns.classes[column]):
                owners = [self.nearest_holder(source.holders[rows.index_class, columns.index_class, term], rank) for term in terms]
                owners.sort(
                    key=lambda owner: (self.position[owner] - self.position[rank]) % len(self.position)
                )
                spans = (rows.local_start, rows.local_start + rows.size), (columns.local_start, columns.local_start + columns.size)
                blocks = tuple(OwnedBlock(owner, *spans, (rows.list_start, columns.list_start)) for owner in owners)
                out.append(((rows.list_start, columns.list_start), blocks))
        return out

    @property
    def merges_replicas(self) -> bool:
        """Whether copies of C are put together at the end, from what each of their holders has."""
        return bool(self.replicas_of(self.problem.ranks[0])[1:]) or any(
            len(self.replicas_of(rank)) > 1 for rank in self.problem.ranks
        )

    def replicas_of(self, rank: int) -> tuple[int, ...]:
        """The ranks of a rank's group that hold the same term of the same block of C."""
        ranks = self.matrices["c"].holders[self.matrices["c"].block_of[rank]]
        return tuple(other for other in ranks if self.group_of[other] == self.group_of[rank])

    def owned_share(self, rank: int) -> tuple[Span, Span]:
        """The part of its block of C that a rank owns among its copies: rows and columns in its memory."""
        rows, columns = self.matrices["c"].shape(rank)
        spans = [(0, rows), (0, columns)]
        mine = self.c_owners.block_of[rank]
        for dim in (0, 1):
            table = self.c_owners.dims[dim]
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
