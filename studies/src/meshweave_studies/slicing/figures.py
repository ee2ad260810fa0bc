"""The data of figures 2 and 3 of Slicing Is All You Need, computed again: percent of peak by batch size."""

from __future__ import annotations

from functools import partial

from meshweave_studies.figures import Cell, Figure, FigurePanel, PaperFigures
from meshweave_studies.slicing.rows import copies_text
from meshweave_studies.slicing.study import LAYERS, LayerOnMachine, SlicingStudy

MACHINES = {2: "pvc", 3: "h100"}
TITLES = {"mlp1": "MLP-1", "mlp2": "MLP-2"}


def figure(study: SlicingStudy, number: int) -> Figure:
    """Return figure 2 (PVC) or 3 (H100): percent of peak by batch size, a panel per layer."""
    machine = MACHINES[number]
    panels = tuple(_panel(study, LayerOnMachine(machine, layer)) for layer in LAYERS)
    rivals = "DTensor and COSMA" if machine == "h100" else "DTensor"
    title = f"universal product beside {rivals} on {study.machines[machine].name}, by batch size"
    return Figure(number, title, "% of peak", panels)


figures = PaperFigures({number: partial(figure, number=number) for number in MACHINES})


def _panel(study: SlicingStudy, case: LayerOnMachine) -> FigurePanel:
    curves = list(study.curves(case).values())
    columns = [curve.label for curve in curves]
    values: list[list[float]] = [[point.seconds for point in curve.points] for curve in curves]
    notes = [
        f"{curve.label}: copies {', '.join(copies_text(point.copies) for point in curve.points)}"
        + (f"; C by {curve.partitioning.c}" if curve.partitioning.name == "outer product" else "")
        for curve in curves
    ]
    for cut in ("row", "column"):
        times = [study.dtensor(case, cut, batch) for batch in study.batches]
        columns.append(f"DTensor {cut}")
        values.append([seconds for seconds, _ in times])
        strategies = "; ".join(dict.fromkeys(strategy for _, strategy in times))
        notes.append(f"DTensor {cut}: {strategies}")
    if case.machine == "h100":
        columns.append("COSMA")
        values.append([study.cosma(case, batch)[0] for batch in study.batches])
        grids = ["x".join(map(str, study.cosma(case, batch)[1])) for batch in study.batches]
        notes.append(f"COSMA: m x n x k cut into {', '.join(grids)}")
    rows: list[tuple[Cell, ...]] = []
    for position, batch in enumerate(study.batches):
        shares = [study.percent_of_peak(case, batch, seconds[position]) for seconds in values]
        rows.append((str(batch), *shares))
    return FigurePanel(TITLES[case.layer], ("batch", *columns), tuple(rows), notes=tuple(notes))
