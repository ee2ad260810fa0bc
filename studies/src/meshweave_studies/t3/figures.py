"""The data of figures 4, 6 and 14 to 20 of T3, computed again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import geometric_mean

from meshweave.report.chart import Series, line_chart
from meshweave_studies.figures import Cell, Figure, FigurePanel, PaperFigures, bars_by_row
from meshweave_studies.gpu.kernels import Source
from meshweave_studies.stacks import Stack, stacked_chart
from meshweave_studies.t3.end_to_end import BASES, Phase
from meshweave_studies.t3.groups import (
    BIG,
    DOUBLED,
    GENERATED,
    SCALED,
    SHARED,
    SMALL,
    all_times,
    geomean_gain,
    iterations,
    twice_gain,
    twice_jobs,
)
from meshweave_studies.t3.models import FUTURE, LARGE, STUDIED, SubLayer
from meshweave_studies.t3.study import (
    GPU,
    GPU_2X,
    SEQUENTIAL,
    SIZES_MB,
    SPLITS,
    T3,
    T3_MCA,
    GpuJob,
    T3Study,
    last_sum_s,
    ring_job,
    ring_times,
    shared_times,
    split_job,
    traffic_curve,
)

_PANELS = {"table 2": SMALL, "larger": BIG, "larger TP 64": SCALED, "generation": tuple(GENERATED.values())}
"""Sub-layers by panel of figures 15 and 16."""
_LAYER = "sub-layer"
_SOURCES = {
    "product reads": Source.PRODUCT_READ,
    "product writes": Source.PRODUCT_WRITE,
    "RS reads": Source.REDUCE_SCATTER_READ,
    "RS writes": Source.REDUCE_SCATTER_WRITE,
    "AG reads": Source.ALL_GATHER_READ,
    "AG writes": Source.ALL_GATHER_WRITE,
}
_OVER_TIME = SubLayer("T-NLG", 8, "FC-2")
"""The sub-layer of figure 17."""
_BIN_US = 10


_ALL = (*STUDIED, *LARGE, *FUTURE)
_PHASES: tuple[Phase, ...] = ("training", "prompt")


def _breakdown(study: T3Study) -> Figure:
    panels = []
    for phase in _PHASES:
        for basis in BASES:
            rows: list[tuple[Cell, ...]] = []
            for name, one in iterations(study, _ALL, phase, basis).items():
                parts = one.product, one.reduce_scatter, one.all_gather, one.others
                rows.append((name, *(100 * part / one.seconds for part in parts)))
            columns = ("model", "sliced products", "reduce-scatter", "all-gather", "other operations")
            panels.append(FigurePanel(f"{phase} {basis}", columns, tuple(rows)))
    return Figure(4, "where the time of an iteration goes", "% of time", tuple(panels), _stacks)


def _splits(study: T3Study) -> Figure:
    study.prefetch(split_job(layer, split) for layer in SHARED for split in ("ideal", *SPLITS))
    rows: list[tuple[Cell, ...]] = []
    for layer in SHARED:
        for split in ("ideal", *SPLITS):
            one = shared_times(study, layer, split)
            slowed = one.split_product / one.product, one.split_all_reduce / one.all_reduce
            rows.append((f"{layer}, {split}", *slowed, one.potential))
    columns = (_LAYER, "product", "all-reduce", "potential speed-up")
    notes = ("times over those with all 80 compute units; A-B: A for the product, B for the all-reduce",)
    panel = FigurePanel("compute units shared", columns, tuple(rows), notes=notes)
    return Figure(6, "product and all-reduce on a share of the compute units", "x", (panel,), _bars)


def _reduce_scatter(study: T3Study) -> Figure:
    study.prefetch(map(ring_job, SIZES_MB))
    rows: list[tuple[Cell, ...]] = []
    for size in SIZES_MB:
        theory, simulated = ring_times(study, size)
        rows.append((str(size), 1e3 * theory, 1e3 * (theory + last_sum_s(study, size)), 1e3 * simulated))
    columns = ("MB", "bandwidth theory", "and the last sum", "simulated")
    notes = ("the last sum: two reads and a write of the last part by memory, while no link is busy",)
    panel = FigurePanel("4 GPUs", columns, tuple(rows), notes=notes)
    return Figure(14, "ring reduce-scatter by size", "ms", (panel,), _lines_by_size)


def _distribution(study: T3Study) -> Figure:
    panels = []
    for name, layers in _PANELS.items():
        times = all_times(study, layers)
        rows = tuple(
            (str(layer), 1e3 * one.product, 1e3 * one.reduce_scatter, 1e3 * one.all_gather)
            for layer, one in times.items()
        )
        panels.append(FigurePanel(name, (_LAYER, "product", "reduce-scatter", "all-gather"), rows))
    return Figure(15, "where the time of a sequential sub-layer goes", "ms", tuple(panels), _stacks)


def _speedups(study: T3Study) -> Figure:
    panels = []
    configurations = {
        "ideal overlap": "ideal",
        "ideal, near memory": "ideal_near_memory",
        "T3": "t3",
        "T3-MCA": "mca",
    }
    for name, layers in _PANELS.items():
        times = all_times(study, layers)
        rows: list[tuple[Cell, ...]] = [
            (str(layer), *(one.gain(of) for of in configurations.values())) for layer, one in times.items()
        ]
        means = [geomean_gain(one.gain(of) for one in times.values()) for of in configurations.values()]
        rows.append(("geomean", *means))
        panels.append(FigurePanel(name, (_LAYER, *configurations), tuple(rows)))
    return Figure(16, "speed-ups over the sequential sub-layer", "% faster", tuple(panels), _bars)


def _over_time(study: T3Study) -> Figure:
    panels = []
    jobs = {what: GpuJob(_OVER_TIME.product, what) for what in (SEQUENTIAL, T3, T3_MCA)}
    study.prefetch(jobs.values())
    names = [name for name in _SOURCES if not name.startswith("AG")]
    for what, job in jobs.items():
        one = study.run(job)
        end = one.spans[0][2] / 1e9
        curves = [traffic_curve(one, _SOURCES[name], _BIN_US) for name in names]
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (f"{points[0][0]:g}", *(gb_per_s for _, gb_per_s in points))
            for points in zip(*curves, strict=True)
            if points[0][0] <= end
        )
        note = f"the product ends after {end:.3f} ms; means of {_BIN_US} us"
        panels.append(FigurePanel(what, ("ms", *names), rows, notes=(note,)))
    title = f"DRAM traffic over time, {_OVER_TIME}"
    return Figure(17, title, "GB/s", tuple(panels), _lines_over_time)


def _accesses(study: T3Study) -> Figure:
    all_times(study, SMALL)
    rows: list[tuple[Cell, ...]] = []
    causes: list[tuple[Cell, ...]] = []
    for layer in SMALL:
        before, after = (study.traffic(layer, what) for what in (SEQUENTIAL, T3_MCA))
        for name, of in (("sequential", before), ("T3-MCA", after)):
            rows.append((f"{layer}, {name}", *(of[source] / 1e6 for source in _SOURCES.values())))
        causes.append((str(layer), *(part / 1e6 for part in _causes(layer, before, after))))
    notes = (
        "fusion: the first part is not written and not read back, one part of C each; near memory: all else that "
        "reduce-scatters read and write less; cache: what products read less",
    )
    panels = (
        FigurePanel("accesses", (_LAYER, *_SOURCES), tuple(rows)),
        FigurePanel("causes", (_LAYER, "fusion", "near memory", "cache"), tuple(causes), notes=notes),
    )
    return Figure(
        18, "DRAM accesses of a sub-layer by source, and why T3 has fewer", "MB", panels, _accesses_drawn
    )


def _causes(
    layer: SubLayer, before: dict[Source, int], after: dict[Source, int]
) -> tuple[float, float, float]:
    """Return the bytes that fusion, near-memory reduction and caching save (section 6.2, a to c)."""
    product = layer.product
    part = 2 * product.rows * product.columns // product.ranks
    cached = before[Source.PRODUCT_READ] - after[Source.PRODUCT_READ]
    rest = (Source.PRODUCT_WRITE, Source.REDUCE_SCATTER_READ, Source.REDUCE_SCATTER_WRITE)
    saved = sum(before[source] - after[source] for source in rest)
    return 2 * part, saved - 2 * part, cached


def _end_to_end(study: T3Study) -> Figure:
    panels = []
    for phase in _PHASES:
        for basis in BASES:
            of_model = iterations(study, _ALL, phase, basis)
            rows: list[tuple[Cell, ...]] = [
                (name, one.gain("t3"), one.gain("mca"), one.communication_share)
                for name, one in of_model.items()
            ]
            panels.append(
                FigurePanel(
                    f"{phase} {basis}", ("model", "T3", "T3-MCA", "communication, % of time"), tuple(rows)
                )
            )
    return Figure(19, "iterations of training and prompts", "% faster", tuple(panels), _bars)


def _twice(study: T3Study) -> Figure:
    study.prefetch(twice_jobs())
    panels = []
    for name, layers in DOUBLED.items():
        rows: list[tuple[Cell, ...]] = [
            (str(layer), twice_gain(study, layer, GPU), twice_gain(study, layer, GPU_2X)) for layer in layers
        ]
        means = [
            100 * (geometric_mean([1 + twice_gain(study, x, gpu) / 100 for x in layers]) - 1)
            for gpu in (GPU, GPU_2X)
        ]
        rows.append(("geomean", *means))
        panels.append(FigurePanel(name, (_LAYER, "80 compute units", "160 compute units"), tuple(rows)))
    return Figure(20, "T3-MCA with twice the compute", "% faster", tuple(panels), _bars)


FIGURES: dict[int, Callable[[T3Study], Figure]] = {
    4: _breakdown,
    6: _splits,
    14: _reduce_scatter,
    15: _distribution,
    16: _speedups,
    17: _over_time,
    18: _accesses,
    19: _end_to_end,
    20: _twice,
}


figures = PaperFigures(FIGURES)

# --- pictures ----------------------------------------------------------------------------------------------------


_bars = partial(bars_by_row, families=True)


def _stacks(figure: Figure, panel: FigurePanel) -> str:
    stacks = [Stack(str(row[0]), tuple(float(cell or 0) for cell in row[1:])) for row in panel.rows]
    return stacked_chart(f"{panel.model}: {figure.title}", stacks, panel.columns[1:], figure.unit)


def _accesses_drawn(figure: Figure, panel: FigurePanel) -> str:
    return _stacks(figure, panel) if panel.model == "accesses" else _bars(figure, panel)


def _series(panel: FigurePanel) -> list[Series]:
    return [
        Series(name, tuple((float(row[0] or 0), float(row[column] or 0)) for row in panel.rows))
        for column, name in enumerate(panel.columns[1:], start=1)
    ]


def _lines_by_size(figure: Figure, panel: FigurePanel) -> str:
    ticks = [(float(size), str(size)) for size in SIZES_MB]
    return line_chart(figure.title, _series(panel), "MB", figure.unit, x_ticks=ticks, x_log=True, y_log=True)


def _lines_over_time(figure: Figure, panel: FigurePanel) -> str:
    end = max(float(row[0] or 0) for row in panel.rows)
    step = max(round(end / 8, 1), 0.1)
    ticks = [(number * step, f"{number * step:.1f}") for number in range(int(end / step) + 2)]
    title = f"{panel.model}: {figure.title}"
    return line_chart(title, _series(panel), "ms", figure.unit, x_ticks=ticks, y_log=False)
