"""How ranks with the same box share the loop over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshweave.algorithms.universal.owners import ClassPair, CommonRun


@dataclass(frozen=True)
class LoopPart:
    """A part of the loop: runs of one class each in the two moving matrices, of one term each."""

    classes: ClassPair
    terms: tuple[int, int]
    runs: tuple[CommonRun, ...]

    @property
    def size(self) -> int:
        return sum(run.size for run in self.runs)

    def split(self, size: int) -> tuple[LoopPart, LoopPart]:
        """Its first `size` indices, and the rest."""
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
        return replace(self, runs=tuple(first)), replace(self, runs=tuple(rest))


def split_loop(
    items: Sequence[LoopPart], members: int, lacking: Sequence[Sequence[int]], *, even: bool
) -> list[tuple[LoopPart, ...]]:
    """What each member of a team does: items that it lacks least of, up to its even share.

    `lacking[i][j]` is what must move per index where member j does item i. With `even` nobody does more than
    1 / members of all indices, rounded up, as a chunk by torch's rule; else everybody does all that it lacks least
    of, and only ties are balanced.
    """
    if members == 1:
        return [tuple(items)]
    total = sum(item.size for item in items)
    limit = -(-total // members) if even else total
    room = [limit] * members
    taken: list[list[tuple[int, LoopPart]]] = [[] for _ in range(members)]
    later: list[tuple[int, LoopPart]] = []
    # What one member alone lacks least of comes first: others may take anything else.
    order = sorted(range(len(items)), key=lambda index: (_ties(lacking[index]), index))
    for index in order:
        rest = items[index]
        least = min(lacking[index])
        best = [member for member in range(members) if lacking[index][member] == least]
        while rest.size:
            if not even:
                part = -(-rest.size // len(best))
                member = best.pop(0)
            else:
                member = max(best, key=lambda one: (room[one], -one))
                part = min(room[member], -(-rest.size // len(best)))
                best.remove(member)
            if part:
                head, rest = rest.split(min(part, rest.size))
                taken[member].append((index, head))
                room[member] -= head.size
            if not best:
                break
        if rest.size:
            later.append((index, rest))
    for index, rest in later:
        while rest.size:
            open_to = [member for member in range(members) if room[member] > 0]
            member = min(open_to, key=lambda one: (lacking[index][one], -room[one], one))
            head, rest = rest.split(min(room[member], rest.size))
            taken[member].append((index, head))
            room[member] -= head.size
    return [tuple(item for _, item in sorted(mine, key=lambda entry: entry[0])) for mine in taken]


def _ties(costs: Sequence[int]) -> int:
    least = min(costs)
    return sum(cost == least for cost in costs)
