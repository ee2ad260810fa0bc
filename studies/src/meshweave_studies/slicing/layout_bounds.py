"""Lower bounds of the time of a universal product by the layouts of its matrices, for all combinations at once.

Bounds are computed for pairs of layouts, of the stationary and of one moving matrix, and add up to bounds for
all three. A rank with a box of the stationary matrix needs all of a moving matrix that meets the box, and has at
most what its own part of it has in common with that. Which members of a team do what is left open: what they
miss is counted as if each index went to the member that misses least, and the total is divided evenly. So no
config computes, receives or sends less.
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
from meshweave.algorithms.universal.config import base_configs, group_of_ranks
from meshweave.algorithms.universal.owners import OwnerMap, common_runs, owners, split_among_replicas
from meshweave.algorithms.universal.problem import DIMS, LOOP, OPERANDS
from meshweave.algorithms.universal.slicing import split_counts
from meshweave.base.remembered import remembered
from meshweave.base.units import dtype_bytes
from meshweave.cost.rates import RankRates
from meshweave.describe.layout import Intervals, Layout
from meshweave.describe.layout.intervals import num_common, num_indices
from meshweave.tune.universal import SLICES

Vector = NDArray[np.float64]
Groups = tuple[int, ...]
"""For each rank the number of its group."""


@dataclass(frozen=True)
class BoxWork:
    """What ranks compute, one entry per rank. The ranks of a group that share a box are a team.

    Attributes:
        flops: FLOPs.
        is_alone: whether the rank does all products of its box.
        share: its share of the products of its box.
    """

    flops: Vector
    is_alone: NDArray[np.bool_]
    share: Vector


@dataclass(frozen=True)
class TrafficBounds:
    """The least that ranks move, one entry per rank, each the mean of its team.

    Attributes:
        received, sent: bytes.
        added: bytes added in the rank's own memory.
        remote_fraction: the fraction of the loop for which something is fetched or sent.
    """

    received: Vector
    sent: Vector
    added: Vector
    remote_fraction: Vector

    @property
    def parts(self) -> tuple[Vector, Vector, Vector, Vector]:
        """All four attributes in order."""
        return self.received, self.sent, self.added, self.remote_fraction


@dataclass
class LayoutBounds:
    """The bounds of a product.

    Attributes:
        sizes: M, N, K.
        options: the layouts that each matrix may have, all over the same ranks.
        rates: rates of the ranks.
    """

    sizes: tuple[int, int, int]
    options: dict[Operand, Sequence[Layout]]
    rates: RankRates
    dtype: str = "float32"
    _known_num_steps: dict[Hashable, tuple[float, ...]] = field(default_factory=dict)

    def least(self) -> tuple[Vector, Vector]:
        """Return bounds of the seconds, and of the bytes that all ranks together receive.

        Both are indexed by the numbers of the layouts of A, B and C in `options`.
        """
        counts = tuple(len(self.options[operand]) for operand in OPERANDS)
        seconds, received = np.full(counts, np.inf), np.full(counts, np.inf)
        for c in range(counts[2]):
            for group_of in self._groupings[c]:
                for stationary in OPERANDS:
                    self._lower_bounds_by(stationary, c, group_of, seconds[:, :, c], received[:, :, c])
        return seconds, received

    def _lower_bounds_by(
        self, stationary: Operand, c: int, group_of: Groups, seconds: Vector, received: Vector
    ) -> None:
        """Lower the bounds for the c-th layout of C, and all of A and B, to those of one stationary matrix."""
        after_s, after_bytes = self._merge_bounds(stationary, c, group_of)
        inputs: list[Operand] = [operand for operand in OPERANDS[:2] if operand != stationary]
        for fixed in [c] if stationary == "c" else range(len(self.options[stationary])):
            if stationary != "c" and not self._is_complete(stationary, fixed, group_of):
                continue
            work = self._box_work(stationary, fixed, group_of)
            pairs = [
                [
                    self._traffic(stationary, fixed, moving, index, group_of)
                    for index in range(len(self.options[moving]))
                ]
                for moving in inputs
            ]
            if stationary == "c":
                where: tuple[int | slice, ...] = (slice(None), slice(None))
                moved = _sums_of_pairs(pairs[0], pairs[1])
                indices = np.ndindex(len(pairs[0]), len(pairs[1]))
                runs = [self._num_steps("c", ("a", left), ("b", right), group_of) for left, right in indices]
            else:
                where = (fixed, slice(None)) if stationary == "a" else (slice(None), fixed)
                moved = _sums_of_pairs(pairs[0], [self._traffic(stationary, fixed, "c", c, group_of)])
                moved = TrafficBounds(*(part[:, 0] for part in moved.parts))
                runs = [
                    self._num_steps(stationary, (inputs[0], index), ("c", c), group_of)
                    for index in range(len(pairs[0]))
                ]
            steps = np.array(runs).reshape(*moved.received.shape[:-1], len(SLICES))
            products_s = self._products_s(stationary, work, moved, steps)
            seconds[where] = np.minimum(seconds[where], products_s + after_s)
            received[where] = np.minimum(received[where], moved.received.sum(-1) + after_bytes)

    def _products_s(self, stationary: Operand, work: BoxWork, moved: TrafficBounds, runs: Vector) -> Vector:
        """Return bounds of the phase of products: for the best number of slices, of the slowest rank.

        The closed form is max + min / steps. A rank alone in its team has as many steps as its loop is cut into.
        How a larger team shares the loop is left open, but the number of steps is limited. Since max + min /
        steps is convex, the mean over a team does not exceed its slowest member.
        """
        rates, length = self.rates, max(self.sizes[LOOP[stationary]], 1)
        zero = np.zeros_like(moved.received)
        moved_s = rates.link_s(np.maximum(moved.received, moved.sent), zero) + rates.add_s(moved.added)
        least = np.full(moved_s.shape[:-1], np.inf)
        for number, slices in enumerate(SLICES):
            steps = runs[..., number, None]
            launches = np.where(work.is_alone & np.isfinite(steps), steps, 0) * (work.flops > 0)
            messages = moved.remote_fraction * (length / -(-length // slices)) * work.share
            compute_s = rates.compute_s(work.flops, launches)
            transfer_s = moved_s + rates.link_s(zero, messages)
            max_steps = np.where(work.is_alone, steps, slices + 2 * runs[..., 0, None] + 1)
            rank_s = np.maximum(compute_s, transfer_s) + np.minimum(compute_s, transfer_s) / max_steps
            rank_s = np.maximum(rank_s, rates.compute_s(work.flops, (work.flops > 0).astype(float)))
            least = np.minimum(least, rank_s.max(-1))
        return least

    def _num_steps(
        self, stationary: Operand, left: tuple[Operand, int], right: tuple[Operand, int], group_of: Groups
    ) -> tuple[float, ...]:
        """Return into how many steps a whole loop is cut, by `SLICES`; infinity where terms make it longer."""
        loop = LOOP[stationary]
        maps = [self._moving_owners(*moving, group_of) for moving in (left, right)]
        if any(owner_map.num_terms > 1 for owner_map in maps):
            return (np.inf,) * len(SLICES)
        first, second = (
            owner_map.dims[DIMS[operand].index(loop)]
            for owner_map, (operand, _) in zip(maps, (left, right), strict=True)
        )
        key = first.classes, second.classes, self.sizes[loop]
        if key not in self._known_num_steps:
            runs_of = common_runs(first, second, self.sizes[loop])
            runs = [run for class_runs in runs_of.values() for run in class_runs]
            self._known_num_steps[key] = tuple(float(sum(split_counts(runs, slices))) for slices in SLICES)
        return self._known_num_steps[key]

    # --- owners and groups ---------------------------------------------------------------

    @cached_property
    def _groupings(self) -> list[list[Groups]]:
        """For each layout of C the groupings of ranks that compute its replicas."""
        groupings = []
        for c in self.options["c"]:
            problem = UniversalProblem(*self.sizes, self.options["a"][0], self.options["b"][0], c, self.dtype)
            groups = [
                group_of_ranks(problem, variant.redundant_axes)
                for variant in base_configs(problem, stationary="c")
            ]
            distinct = dict.fromkeys(tuple(group_of[rank] for rank in problem.ranks) for group_of in groups)
            groupings.append(list(distinct))
        return groupings

    @cached_property
    def _ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.options["a"][0].mesh.ranks))

    def _shape(self, operand: Operand) -> tuple[int, int]:
        rows, columns = DIMS[operand]
        return self.sizes[rows], self.sizes[columns]

    def _owners(self, operand: Operand, index: int) -> OwnerMap:
        return owners(self.options[operand][index], self._shape(operand))

    @remembered
    def _moving_owners(self, operand: Operand, index: int, group_of: Groups) -> OwnerMap:
        """Return the owners of a moving matrix; of C with one owner per element and group."""
        whole = self._owners(operand, index)
        if operand != "c":
            return whole
        dim = 0 if self.sizes[0] >= self.sizes[1] else 1
        return split_among_replicas(whole, dim, dict(zip(self._ranks, group_of, strict=True)))

    def _is_complete(self, operand: Operand, index: int, group_of: Groups) -> bool:
        """Return whether each group has the whole of a matrix; the sum of a partial one it may have."""
        if self._owners(operand, index).num_terms > 1:
            return True
        place = dict(zip(self._ranks, group_of, strict=True))
        everyone = set(group_of)
        holders = self._owners(operand, index).holders.values()
        return all({place[rank] for rank in ranks} == everyone for ranks in holders)

    def _teams(self, operand: Operand, index: int, group_of: Groups) -> list[list[int]]:
        """Return the teams, as positions in `_ranks`."""
        teams: dict[tuple[int, ...], list[int]] = defaultdict(list)
        of = self._owners(operand, index).block_of
        for at, rank in enumerate(self._ranks):
            row, column, term = of[rank]
            teams[row, column, 0 if operand == "c" else term, group_of[at]].append(at)
        return list(teams.values())

    def _box_work(self, operand: Operand, index: int, group_of: Groups) -> BoxWork:
        of, ranks = self._owners(operand, index), self._ranks
        flops, alone, share = np.zeros(len(ranks)), np.zeros(len(ranks), dtype=bool), np.ones(len(ranks))
        for team in self._teams(operand, index, group_of):
            rows, columns = of.shape(ranks[team[0]])
            flops[team] = 2 * rows * columns * self.sizes[LOOP[operand]] / len(team)
            if operand != "c" and of.num_terms > 1:  # its sum may be sharded over all ranks
                flops[team] = 2 * math.prod(self.sizes) / len(ranks)
            alone[team], share[team] = len(team) == 1, 1 / len(team)
        return BoxWork(flops, alone & (of.num_terms == 1), share)

    def _merge_bounds(self, stationary: Operand, c: int, group_of: Groups) -> tuple[float, float]:
        """Return the least seconds and bytes to put the replicas of C together."""
        of, element = self._owners("c", c), dtype_bytes(self.dtype)
        place = dict(zip(self._ranks, group_of, strict=True))
        least_s = total = 0.0
        for ranks in of.holders.values():
            rows, columns = of.shape(ranks[0])
            for group in {place[rank] for rank in ranks}:
                count = sum(place[rank] == group for rank in ranks)
                moved = element * rows * columns * (count - 1) / count
                added = moved if stationary == "c" else 0.0
                received = moved + added
                seconds = self.rates.link_s(received, 0.0) + self.rates.add_s(added)
                least_s, total = max(least_s, seconds), total + count * received
        return least_s, total

    # --- pairs -------------------------------------------------------------------------------------------------

    @remembered
    def _traffic(
        self, stationary: Operand, fixed_index: int, moving: Operand, index: int, group_of: Groups
    ) -> TrafficBounds:
        """Return the bounds of one pair of layouts: 0 where one of the two is partial."""
        box_of, part_of, ranks = (
            self._owners(stationary, fixed_index),
            self._moving_owners(moving, index, group_of),
            self._ranks,
        )
        bounds = TrafficBounds(*(np.zeros(len(ranks)) for _ in range(4)))
        if box_of.num_terms > 1 or part_of.num_terms > 1:
            return bounds
        loop = LOOP[stationary]
        (fixed,) = set(DIMS[stationary]) & set(DIMS[moving])
        boxes = [_indices(box_of, rank, DIMS[stationary].index(fixed)) for rank in ranks]
        sides = [_indices(part_of, rank, DIMS[moving].index(fixed)) for rank in ranks]
        spans = [_indices(part_of, rank, DIMS[moving].index(loop)) for rank in ranks]
        common = [num_common(box, side) for box, side in zip(boxes, sides, strict=True)]
        element, length = dtype_bytes(self.dtype), self.sizes[loop]
        teams = self._teams(stationary, fixed_index, group_of)
        for team in teams:
            if 0 in box_of.shape(ranks[team[0]]):
                continue
            whole = num_indices(boxes[team[0]]) * length
            lacking = whole - _covered_size([(common[at], spans[at]) for at in team])
            (bounds.sent if moving == "c" else bounds.received)[team] = element * lacking / len(team)
            bounds.remote_fraction[team] = lacking / max(whole, 1)
            if moving == "c":
                for at, side in enumerate(sides):
                    if group_of[at] == group_of[team[0]]:
                        landing = element * num_common(boxes[team[0]], side) * num_indices(spans[at])
                        bounds.added[at] += landing
                        bounds.received[at] += landing if at not in team else 0.0
        for team in teams:
            for each in (bounds.added, bounds.received):
                each[team] = each[team].mean()
        return bounds


def _sums_of_pairs(left: Sequence[TrafficBounds], right: Sequence[TrafficBounds]) -> TrafficBounds:
    """Return the sums of all pairs of a layout of one moving matrix and a layout of the other."""
    stacks = [
        [np.array(part) for part in zip(*(bounds.parts for bounds in side), strict=True)]
        for side in (left, right)
    ]
    return TrafficBounds(*(a[:, None] + b[None, :] for a, b in zip(*stacks, strict=True)))


def _indices(of: OwnerMap, rank: int, dim: int) -> Intervals:
    return of.dims[dim].classes[of.block_of[rank][dim]]


def _covered_size(members: Sequence[tuple[int, Intervals]]) -> int:
    """Return the sum over all indices of the most that any member has there.

    A member is given by what it has wherever its list contains the index, and by that list.
    """
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
            total += (at - last) * max(members[member][0] for member in active)
        last = at
        if begins:
            active.add(number)
        else:
            active.discard(number)
    return total
