"""The data of AlpaComm's figures 5 to 9, computed again: seconds and their ratios, and throughput of training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshweave.report.bars import Bar, Group, bar_chart
from meshweave_studies.alpacomm.cases import CASES
from meshweave_studies.alpacomm.models import CASES as TRAINED
from meshweave_studies.alpacomm.study import (
    ALL_GATHER,
    BROADCAST,
    EXACT,
    GPUS,
    GPUS_PER_HOST,
    IN_ORDER,
    LOCAL,
    NAIVE,
    OWN_ORDER,
    RECEIVING_HOSTS,
    RIVAL_ORDER,
    SEND_RECV,
    STRATEGIES,
    AlpaCommStudy,
    orders,
)
from meshweave_studies.alpacomm.training import BOUND as BOUND_STEP
from meshweave_studies.alpacomm.training import BROADCAST as BROADCAST_STEP
from meshweave_studies.alpacomm.training import EAGER, OVERLAP, VARIANTS
from meshweave_studies.alpacomm.training_rows import FEW
from meshweave_studies.figures import Cell, Figure, FigurePanel, PaperFigures

TITLES = {
    SEND_RECV: "send/recv",
    ALL_GATHER: "all-gather",
    LOCAL: "local all-gather",
    BROADCAST: "broadcast",
}
ORDER_TITLES = {
    NAIVE: "naive",
    IN_ORDER: "in order",
    RIVAL_ORDER: "balance",
    OWN_ORDER: "best",
    EXACT: "optimum",
}
BOUND, FORMULA = "bound", "formula"
UNIT = "s, and ratios"
ORDER_NOTES = {
    NAIVE: "naive: the lowest sender, and one task after another, whoever takes part in it",
    IN_ORDER: "in order: the lowest sender, and every host takes its tasks in one order as soon as it is free",
    RIVAL_ORDER: "balance: senders balanced by the paper's greedy algorithm, whose order is the schedule's",
    OWN_ORDER: "best: the better of depth-first search and randomised greedy search, improved step by step",
    EXACT: "optimum: by constraint programming, for the planner's model of time, then simulated",
}


def _one_to_many(study: AlpaCommStudy) -> Figure:
    in_host = [(1, gpus) for gpus in GPUS]
    over_hosts = [(hosts, GPUS_PER_HOST) for hosts in RECEIVING_HOSTS]
    panels = (
        _receivers(study, "one-host", "GPUs", [(str(gpus), hosts, gpus) for hosts, gpus in in_host]),
        _receivers(study, "hosts", "hosts", [(str(hosts), hosts, gpus) for hosts, gpus in over_hosts]),
    )
    title = f"1 GB from one device to the GPUs of one host, and to {GPUS_PER_HOST} GPUs of each of some hosts"
    return Figure(5, title, "s", panels)


def _receivers(study: AlpaCommStudy, name: str, head: str, places: list[tuple[str, int, int]]) -> FigurePanel:
    columns = [head, *(TITLES[strategy] for strategy in STRATEGIES), BOUND]
    columns += [f"{TITLES[strategy]} {FORMULA}" for strategy in STRATEGIES]
    rows: list[tuple[Cell, ...]] = []
    for label, hosts, gpus in places:
        seconds = [study.one_to_many(strategy, hosts, gpus).seconds for strategy in STRATEGIES]
        formulas = [study.closed_form(strategy, hosts, gpus) for strategy in STRATEGIES]
        rows.append((label, *seconds, study.bound_s(hosts, gpus), *formulas))
    chunks = ", ".join(str(study.one_to_many(BROADCAST, hosts, gpus).chunks) for _, hosts, gpus in places)
    notes = (
        "formulas, with t the bytes over the rate of a NIC, A hosts and n receivers: n t; t + t (n - 1) / n, in "
        "one host t; A t; t (K + A - 1) / K; what happens inside a host takes no time in them",
        f"K: {chunks}",
    )
    return FigurePanel(name, tuple(columns), tuple(rows), notes=notes)


def _strategies(study: AlpaCommStudy) -> Figure:
    names = (SEND_RECV, ALL_GATHER, BROADCAST)
    seconds = {n: [study.case(n, strategy).seconds for strategy in names] for n in CASES}
    return _by_case(
        study,
        Figure(6, "the cases of table 2: broadcast, and two rivals with balanced senders", UNIT),
        [TITLES[strategy] for strategy in names],
        seconds,
        TITLES[BROADCAST],
        tuple(_spec(number) for number in CASES),
    )


def _orders(study: AlpaCommStudy) -> Figure:
    names = orders()
    seconds = {n: [study.case(n, BROADCAST, order).seconds for order in names] for n in CASES}
    left_out = () if EXACT in names else ("the optimum is left out: OR-tools is not installed",)
    return _by_case(
        study,
        Figure(8, "the cases of table 2: broadcast in different orders", UNIT),
        [ORDER_TITLES[order] for order in names],
        seconds,
        ORDER_TITLES[OWN_ORDER],
        (*(ORDER_NOTES[order] for order in names), *left_out),
    )


def _by_case(
    study: AlpaCommStudy,
    figure: Figure,
    columns: list[str],
    seconds: dict[int, list[float]],
    base: str,
    notes: tuple[str, ...],
) -> Figure:
    """Return a panel with the seconds, and one with the seconds relative to column `base`."""
    base_column = columns.index(base)
    bounds = {number: study.case(number).bound_s for number in CASES}
    rows: list[tuple[Cell, ...]] = []
    ratios: list[tuple[Cell, ...]] = []
    for number, values in seconds.items():
        with_bound = (*values, bounds[number])
        rows.append((f"case {number}", *with_bound))
        ratios.append((f"case {number}", *(value / values[base_column] for value in with_bound)))
    panels = (
        FigurePanel("seconds", ("case", *columns, BOUND), tuple(rows), notes=notes),
        FigurePanel("ratios", ("case", *columns, BOUND), tuple(ratios), notes=(f"relative to {base}",)),
    )
    return Figure(figure.number, figure.title, figure.unit, panels)


def _spec(number: int) -> str:
    case = CASES[number]
    meshes = " to ".join(f"{rows} x {columns}" for rows, columns in (case.src_mesh, case.dst_mesh))
    return f"case {number}: {case.src} to {case.dst}, {meshes}, tensor {' x '.join(map(str, case.shape))}"


def _training(study: AlpaCommStudy) -> Figure:
    columns = ("case", *VARIANTS)
    rows: list[tuple[Cell, ...]] = [
        (case, *(study.training.tflops_per_s(case, name) for name in VARIANTS)) for case in TRAINED
    ]
    notes = (
        "TFLOP/s of the eight GPUs together, recomputation not counted; one rate for all work of a dtype",
        "all-gather and broadcast: 1F1B, whose stages wait for transfers; overlap: 1F1B with transfers beside "
        "them; eager: eager-1F1B; delayed: with delayed weight gradients; bound: messages of one byte",
    )
    panel = FigurePanel("throughput", columns, tuple(rows), notes=notes)
    return Figure(7, "training of table 3 on two hosts of four GPUs", "TFLOP/s", (panel,))


def _overlap(study: AlpaCommStudy) -> Figure:
    names = (BROADCAST_STEP, OVERLAP, EAGER)
    rows: list[tuple[Cell, ...]] = []
    for case in (name for name in TRAINED if name.startswith("U-")):
        for count in (FEW, TRAINED[case].micro_batches):
            values = [study.training.tflops_per_s(case, name, count) for name in (*names, BOUND_STEP)]
            rows.append((f"{case}, {count} micro-batches", *values))
    panel = FigurePanel("overlap", ("case", *names, BOUND), tuple(rows))
    return Figure(9, "overlap of transfers, with few and with many micro-batches", "TFLOP/s", (panel,))


FIGURES: dict[int, Callable[[AlpaCommStudy], Figure]] = {
    5: _one_to_many,
    6: _strategies,
    7: _training,
    8: _orders,
    9: _overlap,
}


def _drawn(make: Callable[[AlpaCommStudy], Figure]) -> Callable[[AlpaCommStudy], Figure]:
    return lambda study: replace(make(study), draws=picture)


figures = PaperFigures({number: _drawn(make) for number, make in FIGURES.items()})

# --- pictures -------------------------------------------------------------------------------------


_UNITS = {
    "ratios": ("x", "times as long", ".3f"),
    "throughput": ("TFLOP/s", "TFLOP/s of all GPUs", ".1f"),
    "overlap": ("TFLOP/s", "TFLOP/s of all GPUs", ".1f"),
}
"""Unit, axis label and format by panel."""


def picture(figure: Figure, panel: FigurePanel) -> str:
    """Return an SVG with a bar for each strategy or order, marked where its formula, or else the bound, has it.

    Where there are formulas, the bound is the same for all bars and drawn as a line.
    """
    at_bound = panel.columns.index(BOUND)
    bars, formulas = panel.columns[1:at_bound], panel.columns[at_bound + 1 :]
    unit = _UNITS.get(panel.model, ("s", "seconds", ".3f"))
    groups = []
    for row in panel.rows:
        values = [_number(cell) for cell in row[1:]]
        marks = values[len(bars) + 1 :] or [values[len(bars)]] * len(bars)
        drawn = [
            Bar(name, value, value, value, f"{value:{unit[2]}} {unit[0]}", (mark,))
            for name, value, mark in zip(bars, values, marks, strict=False)
        ]
        label = str(row[0]) if panel.columns[0] == "case" else f"{panel.columns[0]}: {row[0]}"
        groups.append(Group(label, tuple(drawn)))
    return bar_chart(
        f"{panel.model}: {figure.title}",
        groups,
        unit[1],
        mark_names=("by the formula",) if formulas else (BOUND,),
        bar_name="simulated",
        spread_name="",
        line_at=_number(panel.rows[0][at_bound]) if formulas else None,
        line_name=BOUND if formulas else "",
    )


def _number(cell: Cell) -> float:
    assert isinstance(cell, float)
    return cell
