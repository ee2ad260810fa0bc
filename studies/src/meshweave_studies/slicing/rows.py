"""What Slicing Is All You Need says of its experiments, computed here, row by row.

Brock, Golin: Slicing Is All You Need: Towards A Universal One-Sided Algorithm for Distributed Matrix
Multiplication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import mean

from meshweave.base.errors import UnsupportedError
from meshweave_studies.published import PaperRows
from meshweave_studies.slicing.partitionings import NAMED, OUTER, Partitioning
from meshweave_studies.slicing.study import (
    LAYERS_ON_MACHINES,
    STATIONARY,
    BatchTime,
    LayerOnMachine,
    SlicingStudy,
    Stationary,
)
from meshweave_studies.verdict import OurValue, percent_faster

PAPER = "slicing"
LEADERS = {"mlp1": ("column block", "inner product"), "mlp2": ("outer product", "2D block")}
Seconds = Sequence[float]


def mean_lead(study: SlicingStudy, ours: Seconds, theirs: Seconds) -> OurValue:
    """Return by how many percent `ours` is faster: the mean over the batch sizes, and each lead in words."""
    leads = [percent_faster(their_s, our_s) for our_s, their_s in zip(ours, theirs, strict=True)]
    by_batch = ", ".join(f"{batch}: {lead:+.1f}" for batch, lead in zip(study.batches, leads, strict=True))
    return OurValue(round(mean(leads), 6), f"by batch {by_batch}")


def fastest(study: SlicingStudy, case: LayerOnMachine, names: Sequence[str]) -> list[float]:
    """Return the seconds of the fastest of some partitionings, by batch."""
    curves = [study.curve(case, name).points for name in names]
    return [min(points[at].seconds for points in curves) for at in range(len(study.batches))]


def slowest(study: SlicingStudy, case: LayerOnMachine, names: Sequence[str]) -> list[float]:
    """Return the seconds of the slowest of some partitionings, by batch."""
    curves = [study.curve(case, name).points for name in names]
    return [max(points[at].seconds for points in curves) for at in range(len(study.batches))]


def fastest_with_stationary(
    study: SlicingStudy, case: LayerOnMachine, partitionings: Sequence[Partitioning], stays: Stationary
) -> list[float]:
    """Return the seconds of the fastest partitioning with a given stationary matrix, by batch."""
    out = []
    for batch in study.batches:
        out.append(_least(case, (study.best(case, one, batch, stays) for one in partitionings)))
    return out


def _least(case: LayerOnMachine, points: Iterable[BatchTime | None]) -> float:
    """Return the seconds of the fastest of some points. Raises UnsupportedError where there are none."""
    seconds = [point.seconds for point in points if point is not None]
    if not seconds:
        raise UnsupportedError(
            f"{case.name}: no replication factor of this row can be computed; give a machine of more chips"
        )
    return min(seconds)


def _others(case: LayerOnMachine) -> list[str]:
    return [name for name in NAMED if name not in LEADERS[case.layer]]


def leaders(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    """Return by how many percent the fastest of the paper's `LEADERS` is faster than the fastest other one."""
    return mean_lead(study, fastest(study, case, LEADERS[case.layer]), fastest(study, case, _others(case)))


def lead_shrinks(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    """Return the lead of the leading partitionings at the smallest batch less that at the largest, in points."""
    pairs = zip(fastest(study, case, LEADERS[case.layer]), fastest(study, case, _others(case)), strict=True)
    leads = [percent_faster(rest_s, leader_s) for leader_s, rest_s in pairs]
    return OurValue(leads[0] - leads[-1], f"{leads[0]:.1f} % and {leads[-1]:.1f} %")


def column_over_inner(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    """Return by how many percent column block is faster than inner product."""
    column, inner = (fastest(study, case, [name]) for name in ("column block", "inner product"))
    return mean_lead(study, column, inner)


def leaders_stay_with_c(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    """Return by how many percent stationary C beats other data movement: the smaller value of column block and
    inner product, largest batch.
    """
    leads = {name: _over_others(study, case, NAMED[name], "c") for name in LEADERS["mlp1"]}
    return OurValue(min(leads.values()), ", ".join(f"{name} {lead:+.1f}" for name, lead in leads.items()))


def _over_others(
    study: SlicingStudy, case: LayerOnMachine, partitionings: Sequence[Partitioning], stays: Stationary
) -> float:
    last = study.batches[-1]

    def seconds(stationary: Stationary) -> float:
        return _least(case, (study.best(case, one, last, stationary) for one in partitionings))

    return percent_faster(min(seconds(name) for name in STATIONARY if name != stays), seconds(stays))


def copies_of_column(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    """Return the largest of the best replication factors of column block over the batch sizes."""
    copies = [point.copies[0] for point in study.curve(case, "column block").points]
    return OurValue(max(copies), ", ".join(map(str, copies)))


def copies_of_slow(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    """Return how many partitionings that are not `LEADERS` are fastest with copies, for some batch."""
    copies = {name: [point.copies[0] for point in study.curve(case, name).points] for name in _others(case)}
    detail = "; ".join(f"{name} {', '.join(map(str, counts))}" for name, counts in copies.items())
    return OurValue(sum(max(counts) > 1 for counts in copies.values()), detail)


def copies_of_leaders(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    """Return the best replication factor of A and B at the largest batch, the smaller of the leaders of MLP-2."""
    copies = {name: study.curve(case, name).points[-1].copies for name in LEADERS["mlp2"]}
    detail = ", ".join(f"{name} {copies_text(pair)}" for name, pair in copies.items())
    return OurValue(min(pair[0] for pair in copies.values()), detail)


def copies_text(copies: tuple[int, int]) -> str:
    """Return the replication as the figures have it: one number, or those of A and B and of C."""
    return str(copies[0]) if copies[0] == copies[1] else f"{copies[0]}-{copies[1]}"


def mixed_copies(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    """Return by how many percent the outer product is faster if C may have a replication factor of its own."""
    curve = study.curve(case, "outer product")
    pairs = list(study.copies(case, curve.partitioning))

    def seconds(are_mixed: bool) -> list[float]:
        wanted = [pair for pair in pairs if (pair[0] != pair[1]) == are_mixed]
        return [
            _least(case, [study.best(case, curve.partitioning, batch, curve.stationary, wanted)])
            for batch in study.batches
        ]

    return mean_lead(study, seconds(True), seconds(False))


def outer_adds(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    """Return by how many percent stationary B beats other data movement in the outer product, largest batch."""
    best = study.curve(case, "outer product")
    return OurValue(_over_others(study, case, OUTER, "b"), f"fastest: {best.label}")


def ahead_of_dtensor(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    """Return by how many percent the best partitioning is faster than the faster of DTensor's row and column."""
    return mean_lead(study, fastest(study, case, list(NAMED)), _dtensor(study, case))


def behind_dtensor(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    """Return by how many percent the faster of DTensor's row and column is faster than the best partitioning."""
    return mean_lead(study, _dtensor(study, case), fastest(study, case, list(NAMED)))


def within_of_dtensor(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    """Return how far apart DTensor and the best partitioning are, in percent."""
    behind = behind_dtensor(study, case)
    assert behind.value is not None
    return OurValue(abs(behind.value), behind.detail)


def _dtensor(study: SlicingStudy, case: LayerOnMachine) -> list[float]:
    return [study.fastest_dtensor(case, batch) for batch in study.batches]


def closer_on_h100(study: SlicingStudy, layer: str) -> OurValue:
    """Return slowest over fastest time of partitionings on PVC, divided by the same ratio on H100."""

    def spread(machine: str) -> float:
        case, names = LayerOnMachine(machine, layer), list(NAMED)
        pairs = zip(slowest(study, case, names), fastest(study, case, names), strict=True)
        return mean(slow / fast for slow, fast in pairs)

    pvc, h100 = spread("pvc"), spread("h100")
    return OurValue(pvc / h100, f"{pvc:.2f} and {h100:.2f}")


def cosma_poor(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    """Return by how many percent the slowest partitioning is faster than COSMA."""
    cosma = [study.cosma(case, batch)[0] for batch in study.batches]
    lead = mean_lead(study, slowest(study, case, list(NAMED)), cosma)
    ahead = mean(map(percent_faster, cosma, fastest(study, case, list(NAMED))))
    grids = ", ".join("x".join(map(str, study.cosma(case, batch)[1])) for batch in study.batches)
    return OurValue(lead.value, f"{lead.detail}; the fastest: {ahead:+.1f}; grids {grids}")


def c_stays_on_h100(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    """Return by how many percent the best partitioning with stationary C is faster than the best with stationary
    B.
    """
    partitionings = [partitioning for group in NAMED.values() for partitioning in group]
    return mean_lead(
        study,
        fastest_with_stationary(study, case, partitionings, "c"),
        fastest_with_stationary(study, case, partitionings, "b"),
    )


def outer_poor_on_h100(study: SlicingStudy, case: LayerOnMachine) -> OurValue:
    """Return by how many percent the slowest other partitioning is faster than the outer product with stationary
    B.
    """
    rest = [name for name in NAMED if name != "outer product"]
    outer = fastest_with_stationary(study, case, OUTER, "b")
    lead = mean_lead(study, slowest(study, case, rest), outer)
    behind = mean(map(percent_faster, outer, fastest(study, case, rest)))
    return OurValue(lead.value, f"{lead.detail}; the fastest: {behind:+.1f}")


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


def _of_case(
    value: Callable[[SlicingStudy, LayerOnMachine], OurValue],
) -> Callable[[SlicingStudy, str], OurValue]:
    return lambda study, subject: value(study, LAYERS_ON_MACHINES[subject])


rows = PaperRows(PAPER, {name: _of_case(value) for name, value in OURS.items()} | BY_LAYER)
