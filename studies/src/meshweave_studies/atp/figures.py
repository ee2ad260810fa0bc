"""The data of figures 10 to 12 of ATP, computed again."""

from __future__ import annotations

from collections.abc import Callable

from meshweave.report.chart import Series, line_chart
from meshweave_studies.atp.framework import COLLECTIVE, DEPTH
from meshweave_studies.atp.rows import SIZES, figure_12_times
from meshweave_studies.atp.study import (
    MODELS,
    NUM_GPUS,
    SIMULATED_SIZES,
    AtpStudy,
    Case,
    depth_meshes,
    paper_mesh,
    simulated_communication_s,
)
from meshweave_studies.figures import Cell, Figure, FigurePanel, PaperFigures, bars_by_row

MACHINES = ("ic1", "ic2", "ic3", "ic4", "ic4-flat")
THEORY = ("ic5", "ic6")
UNIT = "2^40 FLOP/s per GPU"
_ATP_COLUMNS = ("ATP, the paper's mesh", "ATP, our mesh")


def _compared(study: AtpStudy) -> Figure:
    panels = []
    for machine in MACHINES:
        rows: list[tuple[Cell, ...]] = []
        for model in MODELS:
            case = Case.of(f"{machine}-{model}")
            seconds = (
                study.serial_seconds(case),
                study.seconds(case, (case.num_gpus, 1)),
                study.rival_2d_seconds(case),
                study.rival_2d_seconds(case, DEPTH) if depth_meshes(case.num_gpus) else None,
                study.rival_2d_seconds(case, COLLECTIVE),
                study.chunked_seconds(case, paper_mesh(case)),
                study.chunked_seconds(case, study.best_mesh(case)),
            )
            rates = (None if value is None else study.tflops(case, value) for value in seconds)
            rows.append((model.upper(), *rates))
        columns = ("model", "Megatron serial", "Megatron", "SUMMA", "2.5D", "collective 2D", *_ATP_COLUMNS)
        chosen = paper_mesh(Case.of(f"{machine}-m4"))
        notes = (
            f"ATP in its best of 1, 2 and 4 chunks, on the paper's mesh {chosen[0]} x {chosen[1]} and on our best",
            "Megatron hides sums of gradients of inputs beside products of weights, and serial hides nothing",
            "SUMMA and collective 2D on their best mesh with two sides; 2.5D, the rival on 8 GPUs, on 2 x 2 x 2",
        )
        panels.append(FigurePanel(machine, columns, tuple(rows), notes=notes))
    return Figure(10, "ATP beside Megatron-LM and 2D products", UNIT, tuple(panels), bars_by_row)


def _meshes(study: AtpStudy) -> Figure:
    panels = []
    for machine in MACHINES:
        meshes = study.meshes(Case.of(f"{machine}-m1"))
        rows: list[tuple[Cell, ...]] = []
        for model in MODELS:
            case = Case.of(f"{machine}-{model}")
            rows.append((model.upper(), *(study.tflops(case, study.seconds(case, mesh)) for mesh in meshes)))
        columns = ("model", *(f"ATP-{mesh[1]}" for mesh in meshes))
        panels.append(FigurePanel(machine, columns, tuple(rows)))
    title = f"ATP on every device mesh, without chunks; {NUM_GPUS['ic4']} GPUs of IC4, else 8"
    return Figure(11, title, UNIT, tuple(panels), bars_by_row)


def _theory(study: AtpStudy) -> Figure:
    panels = []
    for machine in THEORY:
        rows: list[tuple[Cell, ...]] = []
        for size, times in figure_12_times(machine).items():
            least = min(times, key=times.__getitem__)
            equation = [float(times[i]) if i in times else None for i in (1, 2, 4)]
            simulated = _simulated_ms(machine, size) if size in SIMULATED_SIZES else (None,) * 4
            rows.append((str(size), *equation, float(times[least]), f"ATP-{least}", *simulated))
        columns = ("devices", "ATP-1", "ATP-2", "ATP-4", "ATP-OPT", "optimum", *_SIMULATED_COLUMNS)
        notes = (
            "Equation 2 over 2 L b s h e / GroupBW, e bytes an element; simulated: communication of rank 0 in one "
            "layer of M4, in ms",
        )
        panels.append(FigurePanel(machine, columns, tuple(rows), notes=notes))
    return Figure(12, "communication of a layer by number of devices", "equation 2", tuple(panels), _lines)


_SIMULATED_COLUMNS = ("ATP-1 simulated", "ATP-2 simulated", "ATP-4 simulated", "optimum simulated")


def _simulated_ms(machine: str, size: int) -> tuple[Cell, ...]:
    """Return the milliseconds of communication on ATP-1, 2 and 4, and the best of all meshes."""
    out = simulated_communication_s(machine, size)
    return (*(1e3 * out[i] if i in out else None for i in (1, 2, 4)), f"ATP-{min(out, key=lambda i: out[i])}")


FIGURES: dict[int, Callable[[AtpStudy], Figure]] = {10: _compared, 11: _meshes, 12: _theory}


figures = PaperFigures(FIGURES)

# --- pictures ----------------------------------------------------------------------------------------------------


def _lines(figure: Figure, panel: FigurePanel) -> str:
    sizes = [float(str(row[0])) for row in panel.rows]
    series = []
    for name in ("ATP-1", "ATP-2", "ATP-4", "ATP-OPT"):
        column = panel.columns.index(name)
        points = [(size, row[column]) for size, row in zip(sizes, panel.rows, strict=True)]
        series.append(
            Series(name, tuple((size, value) for size, value in points if isinstance(value, float)))
        )
    return line_chart(
        f"{panel.model}: {figure.title}",
        series,
        "devices",
        "T over 2 L b s h e / GroupBW",
        x_ticks=[(float(size), str(size)) for size in SIZES],
        x_log=True,
        y_log=False,
        y_text=lambda value: f"{value:.3g}",
    )
