"""What is left to choose about a universal product, and what may be chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Literal

from meshweave.algorithms.universal.owners import owners
from meshweave.algorithms.universal.problem import OPERANDS, Operand, UniversalProblem
from meshweave.cost.rates import RankRates
from meshweave.describe.layout import Layout, Partial, Placement, Replicate, Shard
from meshweave.describe.layout.mesh import Mesh

SplitRule = Literal["even", "local"]
ScheduleKind = Literal["direct", "greedy", "cost-greedy", "exhaustive"]


@dataclass(frozen=True)
class UniversalConfig:
    """How a universal product is computed.

    Attributes:
        stationary: the matrix that stays where it is; a rank does the products that its tile of it takes part in.
        redundant: axes of C's mesh along which C is replicated and every copy is computed by its own holders.
            Along the others the copies share the work, and C is reduced and copied at the end.
        a, b: a layout in which a partial operand is summed up first, over some or all of its axes; None leaves it
            as it is: each rank then multiplies its own term, and the sum is left to C.
        split: how ranks with the same tile of the stationary matrix share its work: each the same amount, or each
            what it has at hand.
        slices: at least so many steps per rank, as even as tiles allow; more hide more, and cost more launches.
        prefetch: how many steps ahead tiles are fetched.
        schedule: the order of a rank's steps: as they are listed ("direct"), or as `schedule` finds it.
        rates: what a schedule by costs knows of the machine; none but "direct" goes without.
    """

    stationary: Operand = "c"
    redundant_axes: tuple[int, ...] = ()
    summed_a: Layout | None = None
    summed_b: Layout | None = None
    split: SplitRule = "even"
    num_slices: int = 4
    prefetch: int = 2
    schedule: ScheduleKind = "direct"
    rates: RankRates | None = None

    def __str__(self) -> str:
        parts = [f"stationary {self.stationary.upper()}"]
        if self.redundant_axes:
            parts.append(f"copies of C along axes {', '.join(map(str, self.redundant_axes))} on their own")
        parts += [
            f"{name.upper()} summed to {layout}" for name, layout in (("a", self.summed_a), ("b", self.summed_b)) if layout
        ]
        if self.split == "local":
            parts.append("split by what is at hand")
        if self.schedule != "direct":
            parts.append(f"{self.schedule} schedule")
        return ", ".join([*parts, f"{self.num_slices} slices"])


def replica_groups(problem: UniversalProblem, redundant: tuple[int, ...]) -> dict[int, int]:
    """For each rank the number of its group: those that together compute a copy of C of their own."""
    mesh = problem.c.mesh
    numbers: dict[tuple[int, ...], int] = {}
    found = {}
    for rank in problem.ranks:
        coords = mesh.coords(rank)
        found[rank] = numbers.setdefault(tuple(coords[axis] for axis in redundant), len(numbers))
    return found


def variants(problem: UniversalProblem, *, stationary: Operand | None = None) -> Iterator[UniversalConfig]:
    """Which matrix can stay, and which copies of C can be computed on their own; partial operands are summed where
    they must be, in the first of the layouts that `sums` gives."""
    for operand in ("c", "a", "b") if stationary is None else (stationary,):
        for redundant in _redundant_axes(problem):
            variant = UniversalConfig(operand, redundant)
            variants = [summed_layouts(problem, variant, name) for name in OPERANDS[:2]]
            if all(variants):
                yield replace(variant, summed_a=variants[0][0], summed_b=variants[1][0])


def summed_layouts(problem: UniversalProblem, variant: UniversalConfig, operand: Operand) -> list[Layout | None]:
    """What may be done about the terms of operand A or B: sum them up in a layout, or, None, leave them. Each
    group must have all of a matrix that stays."""
    found = _summed_layouts(problem.layout(operand), variant.stationary in ("c", operand))
    if variant.stationary != operand:
        return list(found)
    return [layout for layout in found if _complete(problem, operand, layout, variant.redundant_axes)]


def universal_configs(problem: UniversalProblem, *, stationary: Operand | None = None) -> Iterator[UniversalConfig]:
    """Everything that can be computed, less slices and prefetch; the simplest first."""
    for variant in variants(problem, stationary=stationary):
        for a, b in product(*(summed_layouts(problem, variant, name) for name in OPERANDS[:2])):
            config = replace(variant, summed_a=a, summed_b=b)
            yield config
            yield replace(config, split="local")


def _redundant_axes(problem: UniversalProblem) -> Iterator[tuple[int, ...]]:
    copied = [
        axis
        for axis, placement in enumerate(problem.c.placements)
        if isinstance(placement, Replicate) and problem.c.mesh.shape[axis] > 1
    ]
    for count in range(len(copied), -1, -1):
        yield from combinations(copied, count)


def _complete(
    problem: UniversalProblem, operand: Operand, summed: Layout | None, redundant: tuple[int, ...]
) -> bool:
    """Whether each group has the whole of a matrix."""
    holders = owners(summed or problem.layout(operand), problem.shape(operand)).holders
    group_of = replica_groups(problem, redundant)
    everyone = set(group_of.values())
    return all({group_of[rank] for rank in ranks} == everyone for ranks in holders.values())


def _summed_layouts(layout: Layout, keep: bool) -> Iterator[Layout | None]:
    """Where a partial matrix may be summed up: axes of its terms shard it instead, inside the others or in their
    place. Where terms may be kept, those of some axes can be, too."""
    axes = [axis for axis, placement in enumerate(layout.placements) if isinstance(placement, Partial)]
    if not axes:
        yield None
        return
    if keep:
        yield None
    copied = [axis for axis, placement in enumerate(layout.placements) if isinstance(placement, Replicate)]
    seen: set[Layout] = set()
    for count in range(len(axes), 0 if keep else len(axes) - 1, -1):
        for chosen in combinations(axes, count):
            # Copies need not all be summed: each may do a part, and whoever needs more gets it.
            cut = [(dim,) for dim in _longest(layout)]
            each = [cut if axis in chosen else [(), *cut] for axis in (*chosen, *copied)]
            for dims in product(*each):
                placements: list[Placement] = list(layout.placements)
                turned = []
                for axis, dim in zip((*chosen, *copied), dims, strict=True):
                    if dim:
                        placements[axis] = Shard(dim[0])
                        turned.append(axis)
                rest = [axis for axis in range(len(placements)) if axis not in turned]
                for order in ((*rest, *turned), tuple(range(len(placements)))):
                    found = permuted(replace(layout, placements=tuple(placements)), order)
                    if found not in seen:
                        seen.add(found)
                        yield found


def _longest(layout: Layout) -> tuple[int, ...]:
    """What a shard of the rows and of the columns is called; of folded dims the longest is cut, of none, none."""
    if layout.folds is None:
        return 0, 1
    rows, columns = layout.folds
    found = [max(range(len(rows)), key=rows.__getitem__)] if rows else []
    if columns:
        found.append(len(rows) + max(range(len(columns)), key=columns.__getitem__))
    return tuple(found)


def permuted(layout: Layout, order: tuple[int, ...]) -> Layout:
    """The layout that applies the placements of the mesh axes in another order."""
    mesh = layout.mesh
    if order == tuple(range(len(order))):
        return layout
    shape = tuple(mesh.shape[axis] for axis in order)
    ranks = []
    for place in product(*map(range, shape)):
        coords = [0] * len(shape)
        for axis, coordinate in zip(order, place, strict=True):
            coords[axis] = coordinate
        ranks.append(mesh.rank_at(tuple(coords)))
    name = f"{mesh.name}_{''.join(map(str, order))}"
    turned = Mesh(name, shape, tuple(mesh.axes[axis] for axis in order), tuple(ranks))
    return replace(layout, mesh=turned, placements=tuple(layout.placements[axis] for axis in order))
