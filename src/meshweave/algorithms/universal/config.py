"""The configs of a universal product: how it may be computed, given its layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Literal, get_args

from meshweave.algorithms.universal.owners import owners
from meshweave.algorithms.universal.problem import OPERANDS, Operand, UniversalProblem
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.cost.rates import RankRates
from meshweave.describe.layout import Layout, Partial, Placement, Replicate, Shard
from meshweave.describe.layout.mesh import Mesh

SplitRule = Literal["even", "local"]
ScheduleKind = Literal["direct", "greedy", "cost-greedy", "exhaustive"]
SCHEDULE_KINDS: tuple[ScheduleKind, ...] = get_args(ScheduleKind)
"""All schedule kinds; "direct" is the first. The others are of `meshweave-studies`."""


@dataclass(frozen=True)
class StageLimits:
    """The most products, fetches and accumulates of one stage. The default fetches both operands of a product.

    An accumulate adds the result of a product to a remote tile of C.

    Raises:
        UnsupportedError: one of them is less than 1.
    """

    products: int = 1
    fetches: int = 2
    accumulates: int = 1

    def __post_init__(self) -> None:
        if min(self.products, self.fetches, self.accumulates) < 1:
            raise UnsupportedError(f"limits of {self}: give 1 or more of each")

    def __str__(self) -> str:
        return f"{self.products} products, {self.fetches} fetches, {self.accumulates} accumulates"


STAGE_LIMITS = StageLimits()
"""Those of a schedule unless told otherwise."""


@dataclass(frozen=True)
class UniversalConfig:
    """How a universal product C = A B is computed.

    A rank computes its part as a number of steps: local products of a panel of A and a panel of B.

    Attributes:
        stationary: the matrix that does not move. A rank computes the products that its shard of it takes part in.
        redundant_axes: indices of axes of C's mesh along which C is replicated, and the ranks at each coordinate
            compute their own replica of C. Along other axes the replicas share the work, and C is reduced and
            copied at the end.
        summed_a, summed_b: the layout to which a partial A or B is reduced first, over some or all of its partial
            axes. None skips that: each rank multiplies its own term of the sum, and C gets the sum.
        split: how ranks with the same shard of the stationary matrix share its work: "even" gives each the same
            amount, "local" gives each what it has in its own memory.
        num_slices: about how many steps a rank has, as even as the shards allow: no step is longer than the rank's
            share of the dim that it loops over, divided by `num_slices` and rounded up (`slicing.split_counts`).
            More steps hide more communication and cost more launches.
        prefetch: how many panels of each matrix may be fetched early: scratch slots beyond those that are needed.
        schedule: the order of a rank's steps: "direct" is the order in which they are listed, others are those
            of stages (section 4.3), which `meshweave-studies` has (`issue_order.IssueRule`).
        limits: the most products, fetches and accumulates of a stage of a schedule. A rank also runs at most that
            many products at once, and accumulates at once, whatever the schedule (section 4.2).
        rates: rates of the machine, which every schedule but "direct" needs.
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
    limits: StageLimits = STAGE_LIMITS

    def __str__(self) -> str:
        parts = [f"stationary {self.stationary.upper()}"]
        if self.redundant_axes:
            parts.append(f"copies of C along axes {', '.join(map(str, self.redundant_axes))} on their own")
        summed = (("a", self.summed_a), ("b", self.summed_b))
        parts += [f"{name.upper()} summed to {layout}" for name, layout in summed if layout]
        if self.split == "local":
            parts.append("split by what is at hand")
        if self.schedule != "direct":
            parts.append(f"{self.schedule} schedule")
        if self.limits != STAGE_LIMITS:
            parts.append(f"at once at most {self.limits}")
        return ", ".join([*parts, f"{self.num_slices} slices"])


def group_of_ranks(problem: UniversalProblem, redundant_axes: tuple[int, ...]) -> dict[int, int]:
    """Return {global rank: number of its group, from 0}; the ranks of a group together compute one replica of C.

    `redundant_axes` are indices of axes of C's mesh: ranks of a group have equal coordinates along them.
    """
    mesh = problem.c.mesh
    numbers: dict[tuple[int, ...], int] = {}
    group_of = {}
    for rank in problem.ranks:
        coords = mesh.coords(rank)
        group_of[rank] = numbers.setdefault(tuple(coords[axis] for axis in redundant_axes), len(numbers))
    return group_of


def check_config(problem: UniversalProblem, config: UniversalConfig) -> None:
    """Raise LayoutError if a field of a config has an invalid value or does not fit the problem."""
    for name, kinds in (
        ("stationary", OPERANDS),
        ("split", get_args(SplitRule)),
        ("schedule", SCHEDULE_KINDS),
    ):
        if (given := getattr(config, name)) not in kinds:
            raise LayoutError(f"{name} is {given!r}; it must be one of {', '.join(kinds)}")
    for name, least in (("num_slices", 1), ("prefetch", 0)):
        if (number := getattr(config, name)) < least:
            raise LayoutError(f"{name} is {number}; it must be at least {least}")
    if config.redundant_axes not in _redundant_axes(problem):
        raise LayoutError(
            f"redundant axes are {config.redundant_axes}; they must be ascending axes of C's mesh, of more than "
            f"one rank, along which C is replicated; C is {problem.c}"
        )
    for operand, summed in zip(OPERANDS, (config.summed_a, config.summed_b), strict=False):
        if summed not in summed_layouts(problem, config, operand):
            raise LayoutError(
                f"{operand.upper()} in {problem.layout(operand)} cannot be summed to {summed} before it is "
                f"multiplied, with {config.stationary.upper()} stationary"
            )


def base_configs(
    problem: UniversalProblem, *, stationary: Operand | None = None
) -> Iterator[UniversalConfig]:
    """Yield one config per stationary matrix and choice of redundant axes; other fields have their defaults.

    Partial operands are summed first only where they must be, to the first layout of `summed_layouts`. Choices
    for which `summed_layouts` of A or B is empty are left out.

    Args:
        stationary: yield configs with this stationary matrix only; None for all three.
    """
    for operand in ("c", "a", "b") if stationary is None else (stationary,):
        for redundant_axes in _redundant_axes(problem):
            variant = UniversalConfig(operand, redundant_axes)
            layouts_a, layouts_b = (summed_layouts(problem, variant, name) for name in OPERANDS[:2])
            if layouts_a and layouts_b:
                yield replace(variant, summed_a=layouts_a[0], summed_b=layouts_b[0])


def summed_layouts(
    problem: UniversalProblem, variant: UniversalConfig, operand: Operand
) -> list[Layout | None]:
    """Return the layouts to which operand "a" or "b" may be reduced before it is multiplied.

    If the first entry is None, the operand may be used without that reduction: always if it is not partial, and
    for a partial operand if it or C is stationary. If the operand is stationary, each group of ranks that computes
    a replica of C must hold all of it (`group_of_ranks`): layouts without that are left out, so that the list may
    be empty.

    Args:
        variant: a config of which only `stationary` and `redundant_axes` are read.
    """
    layouts = _summed_layouts(problem.layout(operand), variant.stationary in ("c", operand))
    if variant.stationary != operand:
        return list(layouts)
    return [layout for layout in layouts if _is_complete(problem, operand, layout, variant.redundant_axes)]


def universal_configs(problem: UniversalProblem) -> Iterator[UniversalConfig]:
    """Yield all configs of a problem with the default `num_slices`, `prefetch` and `schedule`, simplest first."""
    for variant in base_configs(problem):
        for a, b in product(*(summed_layouts(problem, variant, name) for name in OPERANDS[:2])):
            config = replace(variant, summed_a=a, summed_b=b)
            yield config
            yield replace(config, split="local")


def _redundant_axes(problem: UniversalProblem) -> Iterator[tuple[int, ...]]:
    replicated = [
        axis
        for axis, placement in enumerate(problem.c.placements)
        if isinstance(placement, Replicate) and problem.c.mesh.shape[axis] > 1
    ]
    for count in range(len(replicated), -1, -1):
        yield from combinations(replicated, count)


def _is_complete(
    problem: UniversalProblem, operand: Operand, summed: Layout | None, redundant_axes: tuple[int, ...]
) -> bool:
    """Return whether each group has the whole of a matrix."""
    holders = owners(summed or problem.layout(operand), problem.shape(operand)).holders
    group_of = group_of_ranks(problem, redundant_axes)
    all_groups = set(group_of.values())
    return all({group_of[rank] for rank in ranks} == all_groups for ranks in holders.values())


def _summed_layouts(layout: Layout, may_keep: bool) -> Iterator[Layout | None]:
    """Yield the layouts in which a partial matrix may be summed.

    In each, some partial axes shard the matrix instead of holding terms, either after the other axes or in their
    own place. Unless the terms `may_keep` standing, all partial axes are summed.
    """
    partial = [axis for axis, placement in enumerate(layout.placements) if isinstance(placement, Partial)]
    if not partial:
        yield None
        return
    if may_keep:
        yield None
    replicated = [
        axis for axis, placement in enumerate(layout.placements) if isinstance(placement, Replicate)
    ]
    seen: set[Layout] = set()
    for count in range(len(partial), 0 if may_keep else len(partial) - 1, -1):
        for summed in combinations(partial, count):
            for candidate in _sharded_over(layout, summed, replicated):
                if candidate not in seen:
                    seen.add(candidate)
                    yield candidate


def _sharded_over(layout: Layout, summed: tuple[int, ...], replicated: list[int]) -> Iterator[Layout]:
    """Yield the layouts in which each summed axis shards one dim, and each replicated axis one dim or none.

    Replicas need not all sum the same: each may do a part, which whoever needs more of it fetches.
    """
    dims = _shardable_dims(layout)
    axes = (*summed, *replicated)
    for chosen in product(*([*dims] if axis in summed else [None, *dims] for axis in axes)):
        placements: list[Placement] = list(layout.placements)
        sharding = []
        for axis, dim in zip(axes, chosen, strict=True):
            if dim is not None:
                placements[axis] = Shard(dim)
                sharding.append(axis)
        rest = [axis for axis in range(len(placements)) if axis not in sharding]
        for order in ((*rest, *sharding), tuple(range(len(placements)))):
            yield permute_axes(replace(layout, placements=tuple(placements)), order)


def _shardable_dims(layout: Layout) -> tuple[int, ...]:
    """Return the dims that shard the rows and the columns: of folded dims the longest, none if there is none."""
    if layout.folds is None:
        return 0, 1
    rows, columns = layout.folds
    dims = [max(range(len(rows)), key=rows.__getitem__)] if rows else []
    if columns:
        dims.append(len(rows) + max(range(len(columns)), key=columns.__getitem__))
    return tuple(dims)


def permute_axes(layout: Layout, order: tuple[int, ...]) -> Layout:
    """Return the layout whose mesh axis i is axis `order[i]` of the old mesh, with that axis's placement.

    Placements apply in the order of the axes, so a dim that several axes shard is cut in another order. The mesh
    gets a new name, unless `order` is 0, 1, 2, ...
    """
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
    reordered = Mesh(name, shape, tuple(mesh.axes[axis] for axis in order), tuple(ranks))
    return replace(layout, mesh=reordered, placements=tuple(layout.placements[axis] for axis in order))
