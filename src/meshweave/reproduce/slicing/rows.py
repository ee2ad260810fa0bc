"""What Slicing Is All You Need says of its experiments, computed here, row by row.

Brock, Golin: Slicing Is All You Need: Towards A Universal One-Sided Algorithm for Distributed Matrix
Multiplication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean

from meshweave.reproduce.published import PublishedRow, judge_rows
from meshweave.reproduce.slicing.partitionings import NAMED, OUTER, Partitioning
from meshweave.reproduce.slicing.study import (
    LAYERS_ON_MACHINES,
    STATIONARY,
    BatchTime,
    LayerOnMachine,
    SlicingStudy,
    Stationary,
)
from meshweave.reproduce.verdict import JudgedRow, OurValue
from meshweave.tune.search import Progress

PAPER = "slicing"
LEADERS = {"mlp1": ("column block", "inner product"), "mlp2": ("outer product", "2D block")}
Seconds = Sequence[float]


def percent_faster(ours: float, theirs: float) -> float:
    """Return by how many percent what takes `ours` seconds is faster than what takes `theirs`."""
    return 100 * (theirs / ours - 1)


def mean_lead(study: SlicingStudy, ours: Seconds, theirs: Seconds) -> OurValue:
    """Return the mean lead over the batch sizes in percent, and the lead at each."""
    each = [percent_faster(one, other) for one, other in zip(ours, theirs, strict=True)]
    told = ", ".join(f"{batch}: {one:+.1f}" for batch, one in zip(study.batches, each, strict=True))
    return OurValue(round(mean(each), 6), f"by batch {told}")


def fastest(study: SlicingStudy, case: LayerOnMachine, names: Sequence[str]) -> list[float]:
    """Return the seconds of the fastest of some partitionings, by batch."""
    curves = [study.curve(case, name).points for name in names]
    return [min(points[at].seconds for points in curves) for at in range(len(study.batches))]


def slowest(study: SlicingStudy, case: LayerOnMachine, names: Sequence[str]) -> list[float]:
    curves = [study.curve(case, name).points for name in names]
    return [max(points[at].seconds for points in curves) for at in range(len(study.batches))]


def fastest_with_stationary(
    study: SlicingStudy, case: LayerOnMachine, ways: Sequence[Partitioning], stays: Stationary
) -> list[float]:
    """Return the seconds of the fastest partitioning with a given stationary matrix, by batch."""
    out = []
    for batch in study.batches:
        points = [point for how in ways if (point := study.best(case, how, batch, stays)) is not None]
        out.append(min(point.seconds for point in points))
    return out


def _others(case: LayerOnMachine) -> list[str]:
    return [name for name in NAMED if name not in LEADERS[case.layer]]


def leaders(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    return mean_lead(study, fastest(study, case, LEADERS[case.layer]), fastest(study, case, _others(case)))


def lead_shrinks(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    pairs = zip(fastest(study, case, LEADERS[case.layer]), fastest(study, case, _others(case)), strict=True)
    each = [percent_faster(one, other) for one, other in pairs]
    return OurValue(each[0] - each[-1], f"{each[0]:.1f} % and {each[-1]:.1f} %")


def column_over_inner(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    column, inner = (fastest(study, case, [name]) for name in ("column block", "inner product"))
    return mean_lead(study, column, inner)


def leaders_stay_with_c(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    each = {name: _over_others(study, case, NAMED[name], "c") for name in LEADERS["mlp1"]}
    return OurValue(min(each.values()), ", ".join(f"{name} {value:+.1f}" for name, value in each.items()))


def _over_others(
    study: SlicingStudy, case: LayerOnMachine, ways: Sequence[Partitioning], stays: Stationary
) -> float:
    last = study.batches[-1]

    def seconds(stationary: Stationary) -> float:
        points = [point for how in ways if (point := study.best(case, how, last, stationary)) is not None]
        return min(point.seconds for point in points)

    return percent_faster(seconds(stays), min(seconds(other) for other in STATIONARY if other != stays))


def copies_of_column(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    found = [point.copies[0] for point in study.curve(case, "column block").points]
    return OurValue(max(found), ", ".join(map(str, found)))


def copies_of_slow(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    each = {name: [point.copies[0] for point in study.curve(case, name).points] for name in _others(case)}
    told = "; ".join(f"{name} {', '.join(map(str, counts))}" for name, counts in each.items())
    return OurValue(sum(max(counts) > 1 for counts in each.values()), told)


def copies_of_leaders(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    each = {name: study.curve(case, name).points[-1].copies for name in LEADERS["mlp2"]}
    told = ", ".join(f"{name} {copies_text(copies)}" for name, copies in each.items())
    return OurValue(min(copies[0] for copies in each.values()), told)


def copies_text(copies: tuple[int, int]) -> str:
    """Return the replication as the figures have it: one number, or those of A and B and of C."""
    return str(copies[0]) if copies[0] == copies[1] else f"{copies[0]}-{copies[1]}"


def mixed_copies(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    curve = study.curve(case, "outer product")
    pairs = list(study.copies(case, curve.partitioning))

    def seconds(are_mixed: bool) -> list[float]:
        wanted = [pair for pair in pairs if (pair[0] != pair[1]) == are_mixed]
        return [
            _least(study.best(case, curve.partitioning, batch, curve.stationary, wanted))
            for batch in study.batches
        ]

    return mean_lead(study, seconds(True), seconds(False))


def _least(point: BatchTime | None) -> float:
    assert point is not None, "no replication factor can be computed"
    return point.seconds


def outer_adds(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    best = study.curve(case, "outer product")
    return OurValue(_over_others(study, case, OUTER, "b"), f"fastest: {best.label}")


def ahead_of_dtensor(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    return mean_lead(study, fastest(study, case, list(NAMED)), _dtensor(study, case))


def behind_dtensor(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    return mean_lead(study, _dtensor(study, case), fastest(study, case, list(NAMED)))


def within_of_dtensor(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    found = behind_dtensor(study, case)
    assert found.value is not None
    return OurValue(abs(found.value), found.detail)


def _dtensor(study: SlicingStudy, case: LayerOnMachine) -> list[float]:
    return [study.fastest_dtensor(case, batch) for batch in study.batches]


def closer_on_h100(study: SlicingStudy, layer: str) -> OurValue:
    def spread(machine: str) -> float:
        case, names = LayerOnMachine(machine, layer), list(NAMED)
        pairs = zip(slowest(study, case, names), fastest(study, case, names), strict=True)
        return mean(slow / fast for slow, fast in pairs)

    pvc, h100 = spread("pvc"), spread("h100")
    return OurValue(pvc / h100, f"{pvc:.2f} and {h100:.2f}")


def cosma_poor(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    cosma = [study.cosma(case, batch)[0] for batch in study.batches]
    found = mean_lead(study, slowest(study, case, list(NAMED)), cosma)
    ahead = mean(map(percent_faster, fastest(study, case, list(NAMED)), cosma))
    grids = ", ".join("x".join(map(str, study.cosma(case, batch)[1])) for batch in study.batches)
    return OurValue(found.value, f"{found.detail}; the fastest: {ahead:+.1f}; grids {grids}")


def c_stays_on_h100(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    ways = [how for listed in NAMED.values() for how in listed]
    return mean_lead(
        study,
        fastest_with_stationary(study, case, ways, "c"),
        fastest_with_stationary(study, case, ways, "b"),
    )


def outer_poor_on_h100(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    rest = [name for name in NAMED if name != "outer product"]
    outer = fastest_with_stationary(study, case, OUTER, "b")
    found = mean_lead(study, slowest(study, case, rest), outer)
    behind = mean(map(percent_faster, fastest(study, case, rest), outer))
    return OurValue(found.value, f"{found.detail}; the fastest: {behind:+.1f}")


OURS: dict[str, Callable[[SlicingStudy, LayerOnMachine], OurValue]] = {
    "leaders": leaders,
    "column_over_inner": column_over_inner,
    "leaders_stay_with_c": leaders_stay_with_c,
    "lead_shrinks": lead_shrinks,
    "copies_of_column": copies_of_column,
    "copies_of_slow": copies_of_slow,
    "copies_of_leaders": copies_of_leaders,
    "mixed_copies": mixed_copies,
    "outer_adds": outer_adds,
    "ahead_of_dtensor": ahead_of_dtensor,
    "competitive": ahead_of_dtensor,
    "behind_dtensor": behind_dtensor,
    "within_of_dtensor": within_of_dtensor,
    "cosma_poor": cosma_poor,
    "c_stays_on_h100": c_stays_on_h100,
    "outer_poor_on_h100": outer_poor_on_h100,
}
BY_LAYER: dict[str, Callable[[SlicingStudy, str], OurValue]] = {"closer_on_h100": closer_on_h100}


def row(study: SlicingStudy, entry: PublishedRow, what: str) -> JudgedRow:
    """One row, computed for a machine and layer, or a layer on both machines."""
    found = (
        BY_LAYER[entry.id](study, what)
        if entry.id in BY_LAYER
        else OURS[entry.id](study, LAYERS_ON_MACHINES[what])
    )
    return entry.beside(what, found)


def rows(
    study: SlicingStudy, ids: Sequence[str] = (), progress: Progress = lambda done, total: None
) -> list[JudgedRow]:
    """All rows, or those with these ids, computed. Raises UnsupportedError for an unknown id."""
    return judge_rows(PAPER, lambda entry, what: row(study, entry, what), ids, progress)
