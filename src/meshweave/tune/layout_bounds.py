"""How long a product takes at least, by the layouts of its matrices: from pairs of them, for all triples at once.

A rank that keeps a box of the stationary matrix needs of a moving one all that meets the box, and has at most what
its own part of it has in common with that. Which members of a team do what is left open: what they lack is counted
as if each index went to the member that lacks least, and shared out evenly. So no choice computes, receives or
sends less, and what two moving matrices take adds up, rank by rank.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshweave.algorithms.universal import Operand, UniversalProblem
from meshweave.algorithms.universal.config import replica_groups, variants
from meshweave.algorithms.universal.owners import OwnerMap, common_runs, owners, split_among_replicas
from meshweave.algorithms.universal.problem import DIMS, LOOP, OPERANDS
from meshweave.algorithms.universal.slicing import split_counts
from meshweave.base.units import dtype_bytes
from meshweave.cost.rates import RankRates
from meshweave.describe.layout import Intervals, Layout
from meshweave.describe.layout.intervals import num_common, num_indices
from meshweave.tune.universal import SLICES

Vector = NDArray[np.float64]
Groups = tuple[int, ...]
"""Of each rank the number of its group."""


@dataclass(frozen=True)
class Work:
    """FLOPs of ranks, whether each does all that there is to do with its box, and else its share."""

    flops: Vector
    alone: NDArray[np.bool_]
    share: Vector


@dataclass(frozen=True)
class Moved:
    """Bytes that ranks receive, send, and add in their own memory, and for which part of the loop something is
    lacking; of each rank what its team does on average."""

    received: Vector
    sent: Vector
    added: Vector
    lacking: Vector

    @property
    def parts(self) -> tuple[Vector, Vector, Vector, Vector]:
        return self.received, self.sent, self.added, self.lacking


@dataclass
class LayoutBounds:
    """Of an (m, n, k) product: `options` are the layouts that each matrix may have, on the same ranks."""

    sizes: tuple[int, int, int]
    options: dict[Operand, Sequence[Layout]]
    rates: RankRates
    dtype: str = "float32"
    _known: dict[tuple[Operand, int, Operand, int, Groups], Moved] = field(default_factory=dict)
    _known_runs: dict[Hashable, tuple[float, ...]] = field(default_factory=dict)
    _owners: dict[tuple[int, Groups], OwnerMap] = field(default_factory=dict)

    def least(self) -> tuple[Vector, Vector]:
        """Seconds, and bytes that all ranks together receive, by the numbers of the layouts of A, B, C."""
        counts = tuple(len(self.options[operand]) for operand in OPERANDS)
        seconds, received = np.full(counts, np.inf), np.full(counts, np.inf)
        for c in range(counts[2]):
            for group_of in self._groupings[c]:
                for stationary in OPERANDS:
                    self._lower(stationary, c, group_of, seconds[:, :, c], received[:, :, c])
        return seconds, received

    def _lower(
        self, stationary: Operand, c: int, group_of: Groups, seconds: Vector, received: Vector
    ) -> None:
        """Lowers the bounds of all A and B to those of this way to compute the c-th layout of C."""
        after_s, after_bytes = self._after(stationary, c, group_of)
        others: list[Operand] = [operand for operand in OPERANDS[:2] if operand != stationary]
        kept = [c] if stationary == "c" else range(len(self.options[stationary]))
        for still in kept:
            if stationary != "c" and not self._complete(stationary, still, group_of):
                continue
            work = self._work(stationary, still, group_of)
            pairs = [
                [
                    self._moved(stationary, still, one, index, group_of)
                    for index in range(len(self.options[one]))
                ]
                for one in others
            ]
            if stationary == "c":
                where: tuple[int | slice, ...] = (slice(None), slice(None))
                moved = _outer(pairs[0], pairs[1])
                indices = np.ndindex(len(pairs[0]), len(pairs[1]))
                runs = [self._runs("c", ("a", left), ("b", right), group_of) for left, right in indices]
            else:
                where = (still, slice(None)) if stationary == "a" else (slice(None), still)
                moved = _outer(pairs[0], [self._moved(stationary, still, "c", c, group_of)])
                moved = Moved(*(part[:, 0] for part in moved.parts))
                runs = [
                    self._runs(stationary, (others[0], index), ("c", c), group_of)
                    for index in range(len(pairs[0]))
                ]
            steps = np.array(runs).reshape(*moved.received.shape[:-1], len(SLICES))
            during = self._during(stationary, work, moved, steps)
            seconds[where] = np.minimum(seconds[where], during + after_s)
            received[where] = np.minimum(received[where], moved.received.sum(-1) + after_bytes)

    def _during(self, stationary: Operand, work: Work, moved: Moved, runs: Vector) -> Vector:
        """Seconds of the middle phase: of the numbers of slices the best, of the ranks the slowest.

        The closed form is max + min / steps. A rank that works alone has as many steps as its loop is cut into.
        How a team shares the loop is open, but not the most steps that come of it; and max + min / steps is
        convex, so that the mean over the team does not exceed its slowest member.
        """
        rates, length = self.rates, max(self.sizes[LOOP[stationary]], 1)
        compute = work.flops / rates.flops_per_s
        transfer = np.maximum(moved.received, moved.sent) / rates.link_bytes_per_s
        transfer = transfer + 3 * moved.added / rates.memory_bytes_per_s
        least = np.full(transfer.shape[:-1], np.inf)
        for number, slices in enumerate(SLICES):
            steps = runs[..., number, None]
            launches = np.where(work.alone & np.isfinite(steps), steps, 0) * (work.flops > 0)
            messages = moved.lacking * (length / -(-length // slices)) * work.share
            one = compute + launches * rates.launch_s
            other = transfer + messages * rates.link_latency_s
            most = np.where(work.alone, steps, slices + 2 * runs[..., 0, None] + 1)
            found = np.maximum(one, other) + np.minimum(one, other) / most
            found = np.maximum(found, compute + rates.launch_s * (work.flops > 0))
            least = np.minimum(least, found.max(-1))
        return least

    def _runs(
        self, stationary: Operand, left: tuple[Operand, int], right: tuple[Operand, int], group_of: Groups
    ) -> tuple[float, ...]:
        """Into how many steps a whole loop is cut, by `SLICES`; without end where terms make it longer."""
        loop = LOOP[stationary]
        whole = [self._part(*one, group_of) for one in (left, right)]
        if any(one.num_terms > 1 for one in whole):
            return (np.inf,) * len(SLICES)
        first, second = (
            one.dims[DIMS[name].index(loop)] for one, (name, _) in zip(whole, (left, right), strict=True)
        )
        key = first.classes, second.classes, self.sizes[loop]
        if key not in self._known_runs:
            runs = [run for found in common_runs(first, second, self.sizes[loop]).values() for run in found]
            self._known_runs[key] = tuple(float(sum(split_counts(runs, slices))) for slices in SLICES)
        return self._known_runs[key]

    # --- what a matrix has to do with the groups ---------------------------------------------------------------

    @cached_property
    def _groupings(self) -> list[list[Groups]]:
        """For each layout of C the ways in which its copies may be computed apart."""
        found = []
        for c in self.options["c"]:
            problem = UniversalProblem(*self.sizes, self.options["a"][0], self.options["b"][0], c, self.dtype)
            each = [replica_groups(problem, way.redundant_axes) for way in variants(problem, stationary="c")]
            found.append(list(dict.fromkeys(tuple(one[rank] for rank in problem.ranks) for one in each)))
        return found

    @cached_property
    def _ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.options["a"][0].mesh.ranks))

    def _shape(self, operand: Operand) -> tuple[int, int]:
        rows, columns = DIMS[operand]
        return self.sizes[rows], self.sizes[columns]

    def _held(self, operand: Operand, index: int) -> OwnerMap:
        return owners(self.options[operand][index], self._shape(operand))

    def _part(self, operand: Operand, index: int, group_of: Groups) -> OwnerMap:
        """A moving matrix: of C each element has one owner in a group."""
        whole = self._held(operand, index)
        if operand != "c":
            return whole
        key = index, group_of
        if key not in self._owners:
            dim = 0 if self.sizes[0] >= self.sizes[1] else 1
            self._owners[key] = split_among_replicas(
                whole, dim, dict(zip(self._ranks, group_of, strict=True))
            )
        return self._owners[key]

    def _complete(self, operand: Operand, index: int, group_of: Groups) -> bool:
        """Whether each group has the whole of a matrix, or of its sum may have."""
        if self._held(operand, index).num_terms > 1:
            return True
        place = dict(zip(self._ranks, group_of, strict=True))
        everyone = set(group_of)
        holders = self._held(operand, index).holders.values()
        return all({place[rank] for rank in ranks} == everyone for ranks in holders)

    def _teams(self, operand: Operand, index: int, group_of: Groups) -> list[list[int]]:
        """Places in `_ranks` of ranks that share the work of a box."""
        found: dict[tuple[int, ...], list[int]] = defaultdict(list)
        of = self._held(operand, index).block_of
        for at, rank in enumerate(self._ranks):
            row, column, term = of[rank]
            found[row, column, 0 if operand == "c" else term, group_of[at]].append(at)
        return list(found.values())

    def _work(self, operand: Operand, index: int, group_of: Groups) -> Work:
        of, ranks = self._held(operand, index), self._ranks
        flops, alone, share = np.zeros(len(ranks)), np.zeros(len(ranks), dtype=bool), np.ones(len(ranks))
        for team in self._teams(operand, index, group_of):
            rows, columns = of.shape(ranks[team[0]])
            flops[team] = 2 * rows * columns * self.sizes[LOOP[operand]] / len(team)
            if operand != "c" and of.num_terms > 1:  # the sum may lie on all ranks in equal parts
                flops[team] = 2 * math.prod(self.sizes) / len(ranks)
            alone[team], share[team] = len(team) == 1, 1 / len(team)
        return Work(flops, alone & (of.num_terms == 1), share)

    def _after(self, stationary: Operand, c: int, group_of: Groups) -> tuple[float, float]:
        """Seconds and bytes to put the copies of C together."""
        of, element = self._held("c", c), dtype_bytes(self.dtype)
        place = dict(zip(self._ranks, group_of, strict=True))
        least_s = total = 0.0
        for ranks in of.holders.values():
            rows, columns = of.shape(ranks[0])
            for group in {place[rank] for rank in ranks}:
                count = sum(place[rank] == group for rank in ranks)
                moved = element * rows * columns * (count - 1) / count
                added = moved if stationary == "c" else 0.0
                received = moved + added
                time = received / self.rates.link_bytes_per_s + 3 * added / self.rates.memory_bytes_per_s
                least_s, total = max(least_s, time), total + count * received
        return least_s, total

    # --- pairs -------------------------------------------------------------------------------------------------

    def _moved(self, stationary: Operand, still: int, moving: Operand, index: int, group_of: Groups) -> Moved:
        key = stationary, still, moving, index, group_of
        if key not in self._known:
            self._known[key] = self._counted(*key)
        return self._known[key]

    def _counted(
        self, stationary: Operand, still: int, moving: Operand, index: int, group_of: Groups
    ) -> Moved:
        """Nothing at least, where one of the two is a sum of partial ones."""
        box_of, part_of, ranks = (
            self._held(stationary, still),
            self._part(moving, index, group_of),
            self._ranks,
        )
        found = Moved(*(np.zeros(len(ranks)) for _ in range(4)))
        if box_of.num_terms > 1 or part_of.num_terms > 1:
            return found
        loop = LOOP[stationary]
        (fixed,) = set(DIMS[stationary]) & set(DIMS[moving])
        boxes = [_indices(box_of, rank, DIMS[stationary].index(fixed)) for rank in ranks]
        sides = [_indices(part_of, rank, DIMS[moving].index(fixed)) for rank in ranks]
        spans = [_indices(part_of, rank, DIMS[moving].index(loop)) for rank in ranks]
        common = [num_common(box, side) for box, side in zip(boxes, sides, strict=True)]
        element, length = dtype_bytes(self.dtype), self.sizes[loop]
        teams = self._teams(stationary, still, group_of)
        for team in teams:
            if 0 in box_of.shape(ranks[team[0]]):
                continue
            whole = num_indices(boxes[team[0]]) * length
            lacking = whole - _covered([(common[at], spans[at]) for at in team])
            (found.sent if moving == "c" else found.received)[team] = element * lacking / len(team)
            found.lacking[team] = lacking / max(whole, 1)
            if moving == "c":
                for at, side in enumerate(sides):
                    if group_of[at] == group_of[team[0]]:
                        landing = element * num_common(boxes[team[0]], side) * num_indices(spans[at])
                        found.added[at] += landing
                        found.received[at] += landing if at not in team else 0.0
        for team in teams:
            for each in (found.added, found.received):
                each[team] = each[team].mean()
        return found


def _outer(left: Sequence[Moved], right: Sequence[Moved]) -> Moved:
    """Every one of two moving matrices with every other."""
    stacks = [
        [np.array(part) for part in zip(*(one.parts for one in side), strict=True)] for side in (left, right)
    ]
    return Moved(*(a[:, None] + b[None, :] for a, b in zip(*stacks, strict=True)))


def _indices(of: OwnerMap, rank: int, dim: int) -> Intervals:
    return of.dims[dim].classes[of.block_of[rank][dim]]


def _covered(members: Sequence[tuple[int, Intervals]]) -> int:
    """Sum over all indices of the most that a member has at hand there; each has so many where its list has the
    index."""
    if len(members) == 1:
        return members[0][0] * num_indices(members[0][1])
    events: list[tuple[int, int, int]] = []
    for number, (_, intervals) in enumerate(members):
        for start, stop in intervals:
            events += [(start, 1, number), (stop, 0, number)]
    total = last = 0
    active: set[int] = set()
    for at, begins, number in sorted(events):
        if at > last and active:
            total += (at - last) * max(members[one][0] for one in active)
        last = at
        if begins:
            active.add(number)
        else:
            active.discard(number)
    return total
