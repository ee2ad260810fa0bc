"""The data of MeshSlice's figures 9 to 14, computed again, and the points of them that its text states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshweave.algorithms.matmul2d import ALGORITHMS
from meshweave.reproduce.figures import Cell, Figure, Panel
from meshweave.reproduce.meshslice.agreement import COMPARED, mesh_times, slice_times
from meshweave.reproduce.meshslice.rows import PAPER
from meshweave.reproduce.meshslice.study import Block, Study, distinct_products
from meshweave.reproduce.published import MODELS, published
from meshweave.tune.search import Progress
from meshweave.tune.unrolled import FOLLOWERS, LEADER

TWO_D = tuple(name for name in COMPARED if name not in ("tp1d", "fsdp"))


def title_of(algorithm: str) -> str:
    """ "Wang" also for the one at MeshSlice's slice counts, as the paper calls it."""
    return ALGORITHMS[FOLLOWERS.get(algorithm, algorithm)].title


def _published(row: str, model: str) -> float:
    return next(entry.values[model] for entry in published(PAPER) if entry.id == row)


Advance = Callable[[], None]
Maker = Callable[[Study, Advance], Figure]


def weak_scaling(study: Study, advance: Advance) -> Figure:
    panels = []
    for model in MODELS:
        top = _published("utilisation", model)
        first, last = str(study.setting.sizes[0]), str(study.setting.sizes[-1])
        known = (
            (last, title_of(LEADER), top),
            (first, title_of(LEADER), top / (1 - _published("scaling_loss", model) / 100)),
            (last, "Wang", top / (1 + _published("over_wang", model) / 100)),
        )
        panels.append(_scaling(study, model, study.weak, COMPARED, advance, known))
    title = "FLOP utilisation under weak scaling, batch of half the chips, each algorithm at its best mesh"
    return Figure(9, title, "% of peak", tuple(panels))


def strong_scaling(study: Study, advance: Advance) -> Figure:
    names = tuple(name for name in COMPARED if name != "fsdp")
    panels = tuple(_scaling(study, model, study.strong, names, advance) for model in MODELS)
    title = f"FLOP utilisation under strong scaling, batch {study.setting.fixed_batch}"
    return Figure(12, title, "% of peak", panels)


def _scaling(
    study: Study,
    model: str,
    block: Callable[[str, int], Block],
    names: Sequence[str],
    advance: Advance,
    known: tuple[tuple[str, str, float], ...] = (),
) -> Panel:
    rows = []
    for chips in study.setting.sizes:
        row: list[Cell] = [str(chips)]
        for name in names:
            row.append(study.utilisation(block(model, chips), name))
            advance()
        rows.append(tuple(row))
    return Panel(model, ("chips", *map(title_of, names)), tuple(rows), known)


def communication(study: Study, advance: Advance) -> Figure:
    panels = []
    for model in MODELS:
        rows: list[tuple[Cell, ...]] = []
        for name in COMPARED:
            timing = study.timing(study.weak(model), name)
            if timing is not None:
                parts = [timing.launch_s, timing.transfer_s, timing.sync_s]
                rows.append((title_of(name), *(part / timing.compute_s for part in parts)))
            advance()
        panels.append(Panel(model, ("algorithm", "launch", "transfer", "sync"), tuple(rows)))
    title = f"communication, hidden or not, relative to products, {study.setting.chips} chips"
    return Figure(10, title, "x time of products", tuple(panels))


def shapes_of_products(study: Study, advance: Advance) -> Figure:
    panels = []
    for model in MODELS:
        block = study.weak(model)
        problems = study.problems(block, study.setting.tall)
        rows = []
        for index in distinct_products(problems):
            p = problems[index]
            row: list[Cell] = [f"{_short(p.m)}, {_short(p.n)}, {_short(p.k)} {p.dataflow}"]
            for name in TWO_D:
                timing = study.timing(block, name, index)
                peak = study.pod.chip.peak(study.setting.dtype) * block.chips
                row.append(None if timing is None else 100 * p.flops / peak / timing.total_s)
                advance()
            rows.append(tuple(row))
        panels.append(Panel(model, ("M, N, K", *map(title_of, TWO_D)), tuple(rows)))
    title = f"FLOP utilisation of single products, {study.setting.chips} chips, each at its best mesh"
    return Figure(11, title, "% of peak", tuple(panels))


def _short(size: int) -> str:
    return f"{size // 1024}K" if size % 1024 == 0 else str(size)


def mesh_shapes(study: Study, advance: Advance) -> Figure:
    panels = []
    for model in MODELS:
        block = study.weak(model)
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            ("x".join(map(str, shape)), *_both(study, block, seconds))
            for shape, seconds in mesh_times(study, block).items()
        )
        panels.append(Panel(model, ("mesh", *_readings(study)), rows))
        advance()
    title = f"FLOP utilisation of MeshSlice by mesh shape, {study.setting.chips} chips"
    return Figure(13, title, "% of peak", tuple(panels))


def slice_counts(study: Study, advance: Advance) -> Figure:
    panels = []
    for model in MODELS:
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (str(count), *_both(study, study.weak(model), seconds))
            for count, seconds in slice_times(study, model).items()
        )
        panels.append(Panel(model, ("S", *_readings(study)), rows))
        advance()
    shape = "x".join(map(str, study.setting.tall))
    title = f"FLOP utilisation of MeshSlice on {shape} by slice count, one for all products"
    return Figure(14, title, "% of peak", tuple(panels))


def _readings(study: Study) -> tuple[str, ...]:
    return ("estimate", "simulation") if study.timer.by == "simulate" else ("estimate",)


def _both(study: Study, block: Block, seconds: tuple[float, float]) -> tuple[float, ...]:
    values = tuple(study.of_peak(block, one) for one in seconds)
    return values[: len(_readings(study))]


FIGURES: dict[int, Maker] = {
    9: weak_scaling,
    10: communication,
    11: shapes_of_products,
    12: strong_scaling,
    13: mesh_shapes,
    14: slice_counts,
}


def _steps(study: Study, number: int) -> int:
    """How many times a figure advances."""
    if number == 11:
        blocks = [study.problems(study.weak(model), study.setting.tall) for model in MODELS]
        return len(TWO_D) * sum(len(distinct_products(problems)) for problems in blocks)
    sizes = len(study.setting.sizes)
    each = {9: len(COMPARED) * sizes, 10: len(COMPARED), 12: (len(COMPARED) - 1) * sizes, 13: 1, 14: 1}
    return len(MODELS) * each[number]


def figures(
    study: Study, numbers: Sequence[int] = (), progress: Progress = lambda done, total: None
) -> list[Figure]:
    """The figures of these numbers, or all, in order."""
    wanted = [number for number in FIGURES if not numbers or number in numbers]
    total, done = sum(_steps(study, number) for number in wanted), 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    return [FIGURES[number](study, advance) for number in wanted]
