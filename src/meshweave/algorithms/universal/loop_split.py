"""How the ranks of a team, which have the same box of the stationary matrix, share the loop over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshweave.algorithms.universal.owners import ClassPair, CommonRun


@dataclass(frozen=True)
class LoopPart:
    """A part of the loop dim: indices of one class and one term in each of the two moving matrices.

    Indices of one class are held by the same ranks (`owners.DimTable`).

    Attributes:
        classes: the classes of the indices in the first and the second moving matrix.
        terms: the numbers of the terms of the first and second matrix; 0 for C and for one that is not partial.
        runs: the indices, as runs.
    """

    classes: ClassPair
    terms: tuple[int, int]
    runs: tuple[CommonRun, ...]

    @property
    def size(self) -> int:
        """Return the number of indices in all runs."""
        return sum(run.size for run in self.runs)

    def split(self, size: int) -> tuple[LoopPart, LoopPart]:
        """Return two parts: one of the first `size` indices, and one of the rest."""
        first: list[CommonRun] = []
        rest: list[CommonRun] = []
        for run in self.runs:
            taken = min(run.size, size)
            size -= taken
            if taken == run.size:
                first.append(run)
            elif taken == 0:
                rest.append(run)
            else:
                head, tail = run.split(taken)
                first.append(head)
                rest.append(tail)
        return (
            LoopPart(self.classes, self.terms, tuple(first)),
            LoopPart(self.classes, self.terms, tuple(rest)),
        )


def split_loop(
    parts: Sequence[LoopPart], members: int, missing: Sequence[Sequence[int]], *, even: bool
) -> list[tuple[LoopPart, ...]]:
    """Return for each of `members` ranks which parts of a loop, or pieces of parts, it computes.

    A part goes to the members that must move the fewest elements for it.

    Args:
        parts: the whole loop.
        members: the number of ranks that share it.
        missing: `missing[i][j]` is how many elements member j must move per index of part i; not read for a single
            member.
        even: whether no member may get more than ceil(all indices / `members`) indices. If not, a part is divided,
            evenly, only among the members that must move the fewest elements for it.
    """
    if members == 1:
        return [tuple(parts)]
    total = sum(part.size for part in parts)
    limit = -(-total // members) if even else total
    room = [limit] * members
    taken: list[list[tuple[int, LoopPart]]] = [[] for _ in range(members)]

    def take(member: int, index: int, rest: LoopPart, size: int) -> LoopPart:
        head, rest = rest.split(size)
        taken[member].append((index, head))
        room[member] -= head.size
        return rest

    leftover: list[tuple[int, LoopPart]] = []
    # Parts for which one member alone misses least come first: the others may take anything else.
    for index in sorted(range(len(parts)), key=lambda index: (_num_least(missing[index]), index)):
        rest = parts[index]
        least = min(missing[index])
        best = [member for member in range(members) if missing[index][member] == least]
        while rest.size and best:
            if even:
                member = max(best, key=lambda candidate: (room[candidate], -candidate))
                size = min(room[member], -(-rest.size // len(best)))
            else:
                member = best[0]
                size = -(-rest.size // len(best))
            best.remove(member)
            if size:
                rest = take(member, index, rest, min(size, rest.size))
        if rest.size:
            leftover.append((index, rest))
    for index, rest in leftover:
        while rest.size:
            costs = missing[index]
            member = min(
                (member for member in range(members) if room[member] > 0),
                key=lambda candidate: (costs[candidate], -room[candidate], candidate),
            )
            rest = take(member, index, rest, min(room[member], rest.size))
    return [tuple(part for _, part in sorted(listed, key=lambda entry: entry[0])) for listed in taken]


def _num_least(costs: Sequence[int]) -> int:
    """Return how many costs equal the least one."""
    least = min(costs)
    return sum(cost == least for cost in costs)
