"""The data of MeshSlice's figures 9 to 14, computed again, and the points of them that its text states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.base.progress import Progress, no_progress
from meshweave.tune.unrolled import REFERENCE_ALGORITHM, UNROLLED
from meshweave_studies.figures import Cell, Figure, FigurePanel
from meshweave_studies.meshslice.agreement import COMPARED, mesh_times, slice_times
from meshweave_studies.meshslice.rows import PAPER
from meshweave_studies.meshslice.study import FcBlock, MeshSliceStudy, distinct_products
from meshweave_studies.published import MODELS, published_rows

TWO_D = tuple(name for name in COMPARED if name not in ("tp1d", "fsdp"))


def title_of(algorithm: str) -> str:
    """Return how a figure names an algorithm: "Wang" also where it takes MeshSlice's slice counts, as in the
    paper.
    """
    return PRODUCTS_2D[UNROLLED.get(algorithm, algorithm)].title


def _published(row: str, model: str) -> float:
    return next(entry.values[model] for entry in published_rows(PAPER) if entry.id == row)


Advance = Callable[[], None]
Maker = Callable[[MeshSliceStudy, Advance], Figure]


def weak_scaling(study: MeshSliceStudy, advance: Advance) -> Figure:
    """Return figure 9: FLOP utilisation in percent by number of chips, under weak scaling."""
    panels = []
    for model in MODELS:
        top = _published("utilisation", model)
        first, last = str(study.experiment.sizes[0]), str(study.experiment.sizes[-1])
        known = (
            (last, title_of(REFERENCE_ALGORITHM), top),
            (first, title_of(REFERENCE_ALGORITHM), top / (1 - _published("scaling_loss", model) / 100)),
            (last, "Wang", top / (1 + _published("over_wang", model) / 100)),
        )
        panels.append(_scaling(study, model, study.weak_scaling_block, COMPARED, advance, known))
    title = "FLOP utilisation under weak scaling, batch of half the chips, each algorithm at its best mesh"
    return Figure(9, title, "% of peak", tuple(panels))


def strong_scaling(study: MeshSliceStudy, advance: Advance) -> Figure:
    """Return figure 12: FLOP utilisation in percent by number of chips, at a fixed batch size."""
    names = tuple(name for name in COMPARED if name != "fsdp")
    panels = tuple(_scaling(study, model, study.strong_scaling_block, names, advance) for model in MODELS)
    title = f"FLOP utilisation under strong scaling, batch {study.experiment.fixed_batch}"
    return Figure(12, title, "% of peak", panels)


def _scaling(
    study: MeshSliceStudy,
    model: str,
    block: Callable[[str, int], FcBlock],
    names: Sequence[str],
    advance: Advance,
    known: tuple[tuple[str, str, float], ...] = (),
) -> FigurePanel:
    rows = []
    for chips in study.experiment.sizes:
        row: list[Cell] = [str(chips)]
        for name in names:
            row.append(study.utilisation(block(model, chips), name))
            advance()
        rows.append(tuple(row))
    return FigurePanel(model, ("chips", *map(title_of, names)), tuple(rows), known)


def communication(study: MeshSliceStudy, advance: Advance) -> Figure:
    """Return figure 10: launch, transfer and synchronisation of each algorithm, over the time of its products."""
    panels = []
    for model in MODELS:
        rows: list[tuple[Cell, ...]] = []
        for name in COMPARED:
            timing = study.timing(study.weak_scaling_block(model), name)
            if timing is not None:
                parts = [timing.launch_s, timing.transfer_s, timing.sync_s]
                rows.append((title_of(name), *(part / timing.compute_s for part in parts)))
            advance()
        panels.append(FigurePanel(model, ("algorithm", "launch", "transfer", "sync"), tuple(rows)))
    title = f"communication, hidden or not, relative to products, {study.experiment.chips} chips"
    return Figure(10, title, "x time of products", tuple(panels))


def shapes_of_products(study: MeshSliceStudy, advance: Advance) -> Figure:
    """Return figure 11: FLOP utilisation in percent of each distinct product of a block, at its best mesh."""
    panels = []
    for model in MODELS:
        block = study.weak_scaling_block(model)
        problems = study.problems(block, study.experiment.tall_mesh)
        rows = []
        for index in distinct_products(problems):
            p = problems[index]
            row: list[Cell] = [f"{_short(p.m)}, {_short(p.n)}, {_short(p.k)} {p.dataflow}"]
            for name in TWO_D:
                timing = study.timing(block, name, index)
                peak = study.pod.chip.peak(study.experiment.dtype) * block.chips
                row.append(None if timing is None else 100 * p.flops / peak / timing.total_s)
                advance()
            rows.append(tuple(row))
        panels.append(FigurePanel(model, ("M, N, K", *map(title_of, TWO_D)), tuple(rows)))
    title = f"FLOP utilisation of single products, {study.experiment.chips} chips, each at its best mesh"
    return Figure(11, title, "% of peak", tuple(panels))


def _short(size: int) -> str:
    return f"{size // 1024}K" if size % 1024 == 0 else str(size)


def mesh_shapes(study: MeshSliceStudy, advance: Advance) -> Figure:
    """Return figure 13: FLOP utilisation of MeshSlice in percent by mesh shape."""
    panels = []
    for model in MODELS:
        block = study.weak_scaling_block(model)
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            ("x".join(map(str, shape)), *_both(study, block, seconds))
            for shape, seconds in mesh_times(study, block).items()
        )
        panels.append(FigurePanel(model, ("mesh", *_readings(study)), rows))
        advance()
    title = f"FLOP utilisation of MeshSlice by mesh shape, {study.experiment.chips} chips"
    return Figure(13, title, "% of peak", tuple(panels))


def slice_counts(study: MeshSliceStudy, advance: Advance) -> Figure:
    """Return figure 14: FLOP utilisation of MeshSlice in percent by slice count, one for all products."""
    panels = []
    for model in MODELS:
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (str(count), *_both(study, study.weak_scaling_block(model), seconds))
            for count, seconds in slice_times(study, model).items()
        )
        panels.append(FigurePanel(model, ("S", *_readings(study)), rows))
        advance()
    shape = "x".join(map(str, study.experiment.tall_mesh))
    title = f"FLOP utilisation of MeshSlice on {shape} by slice count, one for all products"
    return Figure(14, title, "% of peak", tuple(panels))


def _readings(study: MeshSliceStudy) -> tuple[str, ...]:
    return ("estimate", "simulation") if study.timer.by == "simulate" else ("estimate",)


def _both(study: MeshSliceStudy, block: FcBlock, seconds: tuple[float, float]) -> tuple[float, ...]:
    values = tuple(study.percent_of_peak(block, value) for value in seconds)
    return values[: len(_readings(study))]


FIGURES: dict[int, Maker] = {
    9: weak_scaling,
    10: communication,
    11: shapes_of_products,
    12: strong_scaling,
    13: mesh_shapes,
    14: slice_counts,
}


def _steps(study: MeshSliceStudy, number: int) -> int:
    """Return how many times a figure calls `advance`."""
    if number == 11:
        blocks = [
            study.problems(study.weak_scaling_block(model), study.experiment.tall_mesh) for model in MODELS
        ]
        return len(TWO_D) * sum(len(distinct_products(problems)) for problems in blocks)
    sizes = len(study.experiment.sizes)
    each = {9: len(COMPARED) * sizes, 10: len(COMPARED), 12: (len(COMPARED) - 1) * sizes, 13: 1, 14: 1}
    return len(MODELS) * each[number]


def figures(
    study: MeshSliceStudy, numbers: Sequence[int] = (), progress: Progress = no_progress
) -> list[Figure]:
    """Return the figures of these numbers, or all, in order."""
    wanted = [number for number in FIGURES if not numbers or number in numbers]
    total, done = sum(_steps(study, number) for number in wanted), 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    return [FIGURES[number](study, advance) for number in wanted]
