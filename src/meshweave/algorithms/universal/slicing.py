"""The slicing: which local products a rank computes, where their operands come from, where results go.

Slicing Is All You Need, section 4.1. In each step of its loop a rank multiplies one panel of either moving matrix,
so all that it needs and lacks reaches it exactly once: no other computation of its box moves less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshweave.algorithms.universal.config import UniversalConfig, group_of_ranks
from meshweave.algorithms.universal.loop_split import LoopPart, split_loop
from meshweave.algorithms.universal.owners import (
    BlockKey,
    ClassPair,
    ClassSegment,
    CommonRun,
    OwnerMap,
    common_runs,
    nearest_holder,
    owners,
    split_among_replicas,
)
from meshweave.algorithms.universal.panels import OperandPanel, OwnedBlock, ProductStep, Span
from meshweave.algorithms.universal.problem import DIMS, LOOP, OPERANDS, Operand, UniversalProblem
from meshweave.base.remembered import remembered
from meshweave.describe.layout import Layout

ProductKey = tuple[BlockKey, ClassPair, tuple[int, int], CommonRun]
"""A box, the classes and terms of a part of the loop, and a run of it."""


def split_counts(runs: Sequence[CommonRun], num_slices: int) -> list[int]:
    """Return into how many parts to cut each run so that none has over ceil(total / `num_slices`) indices.

    `total` is the number of indices of all runs. Several runs may give more than `num_slices` parts in all; fewer
    come out where the length does not divide: one run of 9 and 6 slices -> [5]. An empty run has 0 parts.
    """
    total = sum(run.size for run in runs)
    longest = max(-(-total // max(num_slices, 1)), 1)
    return [-(-run.size // longest) for run in runs]


@dataclass(frozen=True)
class Slicing:
    """What each rank computes and moves, as it follows from a problem and a config.

    A rank's *box* is the block that it holds of the stationary matrix, along two of the dims m, n, k. The rank
    loops over the third, the *loop* dim. Ranks of a *group* together compute one replica of C. Those with the same
    box (replicas of the stationary matrix, or terms of a partial C) are a *team* and share the loop, which is cut
    into *runs* where the holders of one of the two moving matrices change. A partial matrix that is not summed
    first lengthens the loop: it runs over k and r of sum_kr A_r[m, k] B[k, n].
    """

    problem: UniversalProblem
    config: UniversalConfig

    # --- owners ---------------------------------------------------------------------------------------------

    @cached_property
    def group_of(self) -> dict[int, int]:
        """Return for each global rank the number of its group, from 0."""
        return group_of_ranks(self.problem, self.config.redundant_axes)

    @cached_property
    def is_recomputed(self) -> bool:
        """Return whether there are several groups: each replica of C is then computed by other ranks."""
        return len(set(self.group_of.values())) > 1

    @cached_property
    def matrices(self) -> dict[Operand, OwnerMap]:
        """Return which blocks ranks hold of "a", "b" and "c"; of an operand that is summed first, of the sum."""
        return {
            operand: owners(
                self.summed_layout(operand) or self.problem.layout(operand), self.problem.shape(operand)
            )
            for operand in DIMS
        }

    def summed_layout(self, operand: Operand) -> Layout | None:
        """Return the layout to which "a" or "b" is summed before the products; None if it is not, as for "c"."""
        return {"a": self.config.summed_a, "b": self.config.summed_b, "c": None}[operand]

    @cached_property
    def c_owners(self) -> OwnerMap:
        """Return which block of C each rank owns: in a group each element (of each term) has one owner."""
        dim = 0 if self.problem.m >= self.problem.n else 1
        return split_among_replicas(self.matrices["c"], dim, self.group_of)

    @cached_property
    def moving(self) -> tuple[Operand, Operand]:
        """Return the two matrices that are not stationary, in the order a, b, c."""
        first, second = (operand for operand in DIMS if operand != self.config.stationary)
        return first, second

    @cached_property
    def _moving_owners(self) -> tuple[OwnerMap, OwnerMap]:
        """The owners of the moving matrices; of C those that results go to, one per element and group."""
        first, second = (
            self.c_owners if operand == "c" else self.matrices[operand] for operand in self.moving
        )
        return first, second

    @cached_property
    def position(self) -> dict[int, int]:
        """Return the position, from 0, of each global rank among the problem's ranks in ascending order."""
        return {rank: index for index, rank in enumerate(self.problem.ranks)}

    def nearest_holder(self, ranks: Sequence[int], rank: int) -> int:
        """Return which of `ranks` a rank takes a block from: itself, or the next one after it, cyclically."""
        return nearest_holder(ranks, rank, self.position.__getitem__, len(self.position))

    # --- the loop -------------------------------------------------------------------------------------------

    @cached_property
    def loop_parts(self) -> tuple[LoopPart, ...]:
        """Return the loop of a whole team: one part per pair of classes and pair of terms of the moving matrices.

        A partial C counts as one term here: a product may be added to any of its terms.
        """
        dim = LOOP[self.config.stationary]
        left, right = (
            table.dims[DIMS[operand].index(dim)]
            for operand, table in zip(self.moving, self._moving_owners, strict=True)
        )
        runs_of = common_runs(left, right, self.problem.sizes[dim])
        left_terms, right_terms = (
            range(table.num_terms) if operand != "c" else range(1)
            for operand, table in zip(self.moving, self._moving_owners, strict=True)
        )
        return tuple(
            LoopPart(classes, (left_term, right_term), runs)
            for left_term in left_terms
            for right_term in right_terms
            for classes, runs in runs_of.items()
        )

    @cached_property
    def teams(self) -> dict[int, tuple[int, ...]]:
        """Return for each global rank its team, ascending: the ranks of its group with the same box.

        If A or B is stationary and partial, ranks with different terms have different boxes; ranks with different
        terms of a partial C share a box.
        """
        stationary = self.matrices[self.config.stationary]
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in self.problem.ranks:
            row, column, term = stationary.block_of[rank]
            box = (row, column, 0 if self.config.stationary == "c" else term, self.group_of[rank])
            members.setdefault(box, []).append(rank)
        return {rank: tuple(team) for team in members.values() for rank in team}

    @cached_property
    def work(self) -> dict[int, tuple[LoopPart, ...]]:
        """Return for each global rank the parts of its team's loop that it computes.

        Teams of different groups with the same box divide the loop alike, so that their replicas of C are sums
        of the same products.
        """
        alike: dict[tuple[BlockKey, int], list[tuple[int, ...]]] = {}
        stationary = self.matrices[self.config.stationary]
        for rank, team in self.teams.items():
            if rank == team[0]:
                row, column, term = stationary.block_of[rank]
                box = row, column, 0 if self.config.stationary == "c" else term
                alike.setdefault((box, len(team)), []).append(team)
        work: dict[int, tuple[LoopPart, ...]] = {}
        for (_, num_members), teams in alike.items():
            missing = (
                [
                    [
                        sum(self._num_missing(part, rank, OPERANDS) for rank in twins)
                        for twins in zip(*teams, strict=True)
                    ]
                    for part in self.loop_parts
                ]
                if num_members > 1
                else []
            )
            shares = split_loop(self.loop_parts, num_members, missing, even=self.config.split == "even")
            for team in teams:
                work.update(zip(team, shares, strict=True))
        return work

    def _num_missing(self, part: LoopPart, rank: int, operands: Sequence[Operand]) -> int:
        """Return how many elements of these matrices a rank does not have, per index of a loop part."""
        count = 0
        for operand, table, index_class, term in zip(
            self.moving, self._moving_owners, part.classes, part.terms, strict=True
        ):
            if operand not in operands:
                continue
            dim = DIMS[operand].index(self._shared_dim(operand))
            block = table.block_of[rank]
            has_class = block[1 - dim] == index_class and (operand == "c" or block[2] == term)
            count += self._needed_sizes(operand, rank, block[dim])[has_class]
        return count

    @remembered
    def _needed_sizes(self, operand: Operand, rank: int, own_class: int) -> tuple[int, int]:
        """Return how long a rank's box is along the dim that it shares with a matrix: all of it, and what is not
        of the rank's own class."""
        segments = self.shared_dim_segments(operand, rank)
        others = [segment.size for segment in segments if segment.index_class != own_class]
        return sum(segment.size for segment in segments), sum(others)

    def _shared_dim(self, operand: Operand) -> int:
        """Return the dim of (m, n, k) that a moving matrix shares with the stationary one."""
        first, second = DIMS[operand]
        return second if first == LOOP[self.config.stationary] else first

    def shared_dim_segments(self, operand: Operand, rank: int) -> tuple[ClassSegment, ...]:
        """Return the indices of a rank's box along the dim that the stationary matrix shares with `operand`.

        They are cut where the holders of the moving matrix `operand`, or the place in their memory, change.
        """
        stationary = self.config.stationary
        dim = DIMS[stationary].index(self._shared_dim(operand))
        return self._segments(operand, dim, self.matrices[stationary].block_of[rank][dim])

    @remembered
    def _segments(self, operand: Operand, dim: int, number: int) -> tuple[ClassSegment, ...]:
        """Return the pieces of class `number` of a dim of the stationary matrix, cut as `operand` lies."""
        shared = DIMS[operand].index(self._shared_dim(operand))
        table = self._moving_owners[self.moving.index(operand)].dims[shared]
        return tuple(table.split(self.matrices[self.config.stationary].dims[dim].classes[number]))

    # --- steps ----------------------------------------------------------------------------------------------

    @remembered
    def runs(self, rank: int) -> Sequence[tuple[LoopPart, CommonRun]]:
        """Return the runs of a rank as (loop part, run of it), in the order of direct execution (section 4.2).

        Loop parts begin at an offset that differs by rank, so that ranks do not all ask one holder at a time.
        Then the run whose first step fetches the fewest elements of A and B is moved to the front, since no
        product hides that fetch. With several groups it is not moved: all groups go through a box in the same
        order, so that replicas of C are the same sums.
        """
        if 0 in self.matrices[self.config.stationary].shape(rank):
            return []
        runs = [(part, run) for part in self._rotated(self.work[rank], rank) for run in part.runs]
        if not runs or self.is_recomputed:
            return runs
        longest = max(-(-sum(run.size for _, run in runs) // max(self.config.num_slices, 1)), 1)

        def fetched_first(index: int) -> int:
            part, run = runs[index]
            return self._num_missing(part, rank, OPERANDS[:2]) * min(run.size, longest)

        first = min(range(len(runs)), key=fetched_first)
        return [runs[first], *runs[:first], *runs[first + 1 :]]

    def _rotated(self, parts: Sequence[LoopPart], rank: int) -> Sequence[LoopPart]:
        stationary = self.matrices[self.config.stationary]
        block, team = stationary.block_of[rank], self.teams[rank]
        offset = team.index(rank) * len(parts) // len(team) if len(team) > 1 else 0
        for index_class, table in zip(block, stationary.dims, strict=False):
            offset += index_class * len(parts) // len(table.classes)
        offset %= max(len(parts), 1)
        return (*parts[offset:], *parts[:offset])

    def steps(self, rank: int) -> list[ProductStep]:
        """Return the local products of a rank in the order of `runs`, each run cut into about equal parts.

        No part is longer than ceil(indices of the runs / `num_slices`), so that there are about `num_slices`
        products. The list is empty if the rank holds nothing of the stationary matrix.
        """
        runs = self.runs(rank)
        counts = split_counts([run for _, run in runs], self.config.num_slices)
        steps = []
        for (part, run), count in zip(runs, counts, strict=True):
            for number in range(count):
                lo, hi = run.size * number // count, run.size * (number + 1) // count
                cut = CommonRun(run.left_start + lo, run.right_start + lo, hi - lo)
                steps.append(self._step(rank, part, cut, run))
        return steps

    @cached_property
    def whole_steps(self) -> dict[int, tuple[ProductStep, ...]]:
        """Return for each global rank one product per run, uncut; in all they do the same work as `steps`."""
        return {
            rank: tuple(self._step(rank, part, run, run) for part, run in self.runs(rank))
            for rank in self.problem.ranks
        }

    def _step(self, rank: int, part: LoopPart, run: CommonRun, whole: CommonRun) -> ProductStep:
        """Return the product over `run`, which is cut from the run `whole`."""
        stationary = self.config.stationary
        sizes = [0, 0, 0]
        shape = self.matrices[stationary].shape(rank)
        for dim, size in zip(DIMS[stationary], shape, strict=True):
            sizes[dim] = size
        sizes[LOOP[stationary]] = run.size
        box = OwnedBlock(rank, (0, shape[0]), (0, shape[1]))
        panels = {stationary: OperandPanel(stationary, shape, (box,))}
        for index, (operand, start) in enumerate(
            zip(self.moving, (run.left_start, run.right_start), strict=True)
        ):
            span = start, start + run.size
            panel = self._panel(rank, index, part.classes[index], part.terms[index], span)
            if self.is_recomputed and (self.product_key(rank, part, whole), operand) in self._copied_panels:
                panel = replace(panel, is_copied=True)
            panels[operand] = panel
        return ProductStep((sizes[0], sizes[1], sizes[2]), panels)

    def product_key(self, rank: int, part: LoopPart, run: CommonRun) -> ProductKey:
        """Return a key of the product that a rank computes in `run` of its loop part `part`.

        Keys are equal for ranks, of whatever group, that multiply the same parts of A and B.
        """
        row, column, term = self.matrices[self.config.stationary].block_of[rank]
        box = row, column, 0 if self.config.stationary == "c" else term
        return box, part.classes, part.terms, run

    @cached_property
    def _copied_panels(self) -> frozenset[tuple[ProductKey, Operand]]:
        """The panels that go through scratch also where a rank has them.

        A BLAS may round a product otherwise where an operand lies in memory with other strides. Of ranks that
        compute the same product, all multiply from scratch unless all have the panel at the same place of a shard
        of the same shape.
        """
        places: dict[tuple[ProductKey, Operand], set[object]] = {}
        for rank in self.problem.ranks if self.is_recomputed else ():
            for part, run in self.runs(rank):
                key = self.product_key(rank, part, run)
                starts = run.left_start, run.right_start
                for index, (operand, start) in enumerate(zip(self.moving, starts, strict=True)):
                    span = start, start + run.size
                    panel = self._panel(rank, index, part.classes[index], part.terms[index], span)
                    (block, *_), shape = panel.blocks, self.matrices[operand].shape(rank)
                    place = (block.rows, block.columns, shape) if panel.is_local_to(rank) else None
                    places.setdefault((key, operand), set()).add(place)
        return frozenset(panel for panel, known in places.items() if len(known) > 1)

    @remembered
    def _panel(self, rank: int, index: int, loop_class: int, term: int, span: Span) -> OperandPanel:
        """Return the panel of moving matrix `index` over `span` of a class of the loop dim, block by block."""
        operand = self.moving[index]
        dim = DIMS[operand].index(self._shared_dim(operand))
        blocks = []
        size = 0
        for segment in self.shared_dim_segments(operand, rank):
            segment_span = segment.local_start, segment.local_start + segment.size
            if dim == 0:
                owner = self._owner(rank, index, (segment.index_class, loop_class), term)
                blocks.append(OwnedBlock(owner, segment_span, span, (segment.list_start, 0)))
            else:
                owner = self._owner(rank, index, (loop_class, segment.index_class), term)
                blocks.append(OwnedBlock(owner, span, segment_span, (0, segment.list_start)))
            size += segment.size
        shape = (size, span[1] - span[0]) if dim == 0 else (span[1] - span[0], size)
        return OperandPanel(operand, shape, tuple(blocks))

    def _owner(self, rank: int, index: int, classes: ClassPair, term: int) -> int:
        """Return the rank from which a block of moving matrix `index` comes, or to which it goes."""
        table = self._moving_owners[index]
        if self.moving[index] != "c":
            return self.nearest_holder(table.holders[(*classes, term)], rank)
        # A product may be added to any term of a partial C: to the rank's own, where it has the element.
        group = self.group_of[rank]
        holders = [
            holder
            for number in range(table.num_terms)
            for holder in table.holders.get((*classes, number), ())
            if self.group_of[holder] == group
        ]
        return self.nearest_holder(holders, rank)
