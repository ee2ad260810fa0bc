"""How well estimates agree with simulation: the choices that they lead to, and their times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import mean
from typing import Any

from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.tune.meshes import Shape
from meshweave.tune.unrolled import REFERENCE_ALGORITHM
from meshweave_studies.meshslice.study import ChosenProducts, FcBlock, MeshSliceStudy
from meshweave_studies.meshslice.times import Timer

COMPARED = ("meshslice", "wang[S=meshslice]", "collective", "summa[S=meshslice]", "cannon", "tp1d", "fsdp")
"""The algorithms of the MeshSlice paper, unrolled as there."""

Times = tuple[float, float]
"""Seconds by estimate and by the study's timer."""


def mesh_times(study: MeshSliceStudy, block: FcBlock) -> dict[Shape, Times]:
    """Return the times of MeshSlice on every mesh shape, at the slice counts that its tuner takes there."""
    out = {}
    for shape in study.shapes(block, REFERENCE_ALGORITHM):
        chosen = study.on_mesh(block, shape)
        out[shape] = _times(study, chosen)
    return out


def slice_times(study: MeshSliceStudy, model: str) -> dict[int, Times]:
    """Return the times of MeshSlice on the tall mesh by slice count, one for all products.

    The counts are those that every product can be cut into.
    """
    block, shape, entry = (
        study.weak_scaling_block(model),
        study.experiment.tall_mesh,
        PRODUCTS_2D[REFERENCE_ALGORITHM],
    )
    problems = study.problems(block, shape)
    offered = [{config.slice_count: config for config in entry.candidates(problem)} for problem in problems]
    out = {}
    for count in sorted(set.intersection(*(set(configs) for configs in offered))):
        products = tuple((p, configs[count]) for p, configs in zip(problems, offered, strict=True))
        out[count] = _times(study, ChosenProducts(entry, study.cluster(block.chips), shape, products))
    return out


def product_slice_times(study: MeshSliceStudy, block: FcBlock) -> Iterator[tuple[str, dict[int, Times]]]:
    """Yield the name of each distinct product of a block, and its times by slice count.

    The mesh is the one that MeshSlice's tuner takes for the block.
    """
    chosen = study.chosen(block, REFERENCE_ALGORITHM)
    if chosen is None:
        return
    for problem in dict.fromkeys(problem for problem, _ in chosen.products):
        each = (
            (
                config.slice_count,
                ChosenProducts(chosen.entry, chosen.cluster, chosen.shape, ((problem, config),)),
            )
            for config in chosen.entry.candidates(problem)
        )
        sizes = f"{problem.dataflow} {problem.m} x {problem.n} x {problem.k}"
        yield f"{block.chips} chips, {sizes}", {count: _times(study, products) for count, products in each}


def _times(study: MeshSliceStudy, chosen: ChosenProducts) -> Times:
    return chosen.timing(study.estimates).total_s, chosen.timing(study.timer).total_s


def picks_best(times: Mapping[Any, Times]) -> tuple[bool, str]:
    """Return whether the choice by estimate is the fastest by the timer too; if not, both choices and the loss
    in words.
    """
    picked, best = (min(times, key=lambda key: times[key][reading]) for reading in (0, 1))
    if times[picked][1] <= times[best][1]:
        return True, ""
    loss = 100 * (times[picked][1] / times[best][1] - 1)
    return False, f"{_shown(picked)} is picked, {_shown(best)} is {loss:.1f} % faster"


def _shown(key: object) -> str:
    return "x".join(map(str, key)) if isinstance(key, tuple) else f"S = {key}"


def product_errors(study: MeshSliceStudy, models: tuple[str, ...], timer: Timer) -> dict[str, list[float]]:
    """Return |estimated / timed seconds - 1| in percent of every product in the tables and figures, by
    algorithm.

    The products are those of all compared algorithms at their best under weak and, but for FSDP, strong scaling,
    of MeshSlice on every mesh shape, and on the tall mesh at every slice count.
    """
    errors: dict[str, dict[tuple[object, ...], float]] = {}
    for chosen in _everything(study, models):
        known = errors.setdefault(chosen.entry.name, {})
        for problem, config in chosen.products:
            key = problem, config, chosen.cluster.name, chosen.cluster.num_chips
            if key not in known:
                expected = study.estimates.product_s(problem, chosen.entry, config, chosen.cluster)
                timed = timer.product_s(problem, chosen.entry, config, chosen.cluster)
                known[key] = 100 * abs(expected / timed - 1)
    return {name: list(known.values()) for name, known in errors.items()}


def _everything(study: MeshSliceStudy, models: tuple[str, ...]) -> Iterator[ChosenProducts]:
    entry = PRODUCTS_2D[REFERENCE_ALGORITHM]
    for model in models:
        for chips in study.experiment.sizes:
            weak = study.weak_scaling_block(model, chips)
            for shape in study.shapes(weak, REFERENCE_ALGORITHM):
                yield study.on_mesh(weak, shape)
            for block in (weak, study.strong_scaling_block(model, chips)):
                for algorithm in COMPARED:
                    if algorithm == "fsdp" and block is not weak:
                        continue
                    chosen = study.chosen(block, algorithm)
                    if chosen is not None:
                        yield chosen
        block, shape = study.weak_scaling_block(model), study.experiment.tall_mesh
        for problem in study.problems(block, shape):
            products = tuple((problem, config) for config in entry.candidates(problem))
            yield ChosenProducts(entry, study.cluster(block.chips), shape, products)


def summary(errors: dict[str, list[float]]) -> tuple[float, str]:
    """Return the mean of all errors, and in words how many there are and how far off each algorithm is."""
    everything = [error for of_algorithm in errors.values() for error in of_algorithm]
    by_name = ", ".join(f"{name} {mean(own):.1f} % (worst {max(own):.1f} %)" for name, own in errors.items())
    return mean(everything), f"{len(everything)} products: {by_name}"
