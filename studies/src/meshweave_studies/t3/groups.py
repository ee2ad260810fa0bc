"""Groups of sub-layers as the figures of T3 have them, and what is computed of a whole group at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import geometric_mean

from meshweave_studies.t3.end_to_end import Basis, Iteration, Phase, iteration
from meshweave_studies.t3.models import (
    FUTURE,
    FUTURE_DEGREE,
    LARGE,
    LARGE_DEGREE,
    MODELS,
    SMALL_DEGREES,
    STUDIED,
    SubLayer,
    sub_layer_of,
    sub_layers,
)
from meshweave_studies.t3.study import (
    FUSED_ALONE,
    GPU,
    GPU_2X,
    SEQUENTIAL,
    SIZES_MB,
    SPLITS,
    T3_MCA,
    GpuJob,
    T3Study,
    Times,
    ring_job,
    split_job,
    times_jobs,
)

SMALL = sub_layers(*STUDIED)
"""The 16 sub-layers of figures 15, 16 and 18."""
SHARED = sub_layers(*STUDIED, degrees=(8,), names=("OP", "FC-2"))
"""The sub-layers of figure 6."""
BIG = sub_layers(*LARGE, degrees=(LARGE_DEGREE,))
"""The 12 sub-layers of section 6.4."""
SCALED = sub_layers(*LARGE, *FUTURE, degrees=(FUTURE_DEGREE,))
"""Larger models at the degree that the paper has for those of a trillion parameters."""
DOUBLED = {
    name: sub_layers(*STUDIED, *LARGE, degrees=(*SMALL_DEGREES, LARGE_DEGREE), names=(name,))
    for name in ("FC-2", "OP")
}
"""The sub-layers of figure 20."""
GENERATED = {model: SubLayer(model, 8, "FC-2", tokens=MODELS[model].batch) for model in STUDIED}
"""A token of each sequence of the batch (section 7.3)."""


SLOWED = "T-NLG TP 8, FC-2"
"""The sub-layer of figure 17."""


def geomean_gain(gains: Iterable[float]) -> float:
    """Return the geometric mean of speed-ups, each given and returned as percent faster."""
    return 100 * (geometric_mean([1 + gain / 100 for gain in gains]) - 1)


def all_times(study: T3Study, layers: Sequence[SubLayer], gpu: str = GPU) -> dict[SubLayer, Times]:
    """Return the times of several sub-layers, simulated together."""
    study.prefetch(job for layer in layers for job in times_jobs(layer, gpu))
    return {layer: study.times(layer, gpu) for layer in layers}


def iterations(
    study: T3Study, models: Sequence[str], phase: Phase, basis: Basis, degrees: tuple[int, ...] = ()
) -> dict[str, Iteration]:
    """Return by "MODEL TP DEGREE" the iterations of models at each of their degrees that is in `degrees`.

    () stands for all degrees.
    """
    all_times(study, sub_layers(*models, degrees=degrees))
    return {
        f"{model} TP {degree}": iteration(study, model, degree, phase, basis)
        for model in models
        for degree in MODELS[model].degrees
        if not degrees or degree in degrees
    }


def twice_gain(study: T3Study, layer: SubLayer, gpu: str) -> float:
    """Return by how many percent T3-MCA is faster than sequential in a sub-layer on a GPU of the catalog."""
    sequential, mca = (
        study.run(GpuJob(layer.product, what, gpu)).duration_ps for what in (SEQUENTIAL, T3_MCA)
    )
    return 100 * (sequential / mca - 1)


def twice_jobs() -> list[GpuJob]:
    """Return the jobs of figure 20."""
    return [
        GpuJob(layer.product, what, gpu)
        for layers in DOUBLED.values()
        for layer in layers
        for gpu in (GPU, GPU_2X)
        for what in (SEQUENTIAL, T3_MCA)
    ]


def every_job() -> list[GpuJob]:
    """Return the jobs of all rows and figures."""
    layers = (*sub_layers(*STUDIED, *LARGE, *FUTURE), *GENERATED.values())
    return [
        *(job for layer in layers for job in times_jobs(layer)),
        *(split_job(layer, split) for layer in SHARED for split in ("ideal", *SPLITS)),
        GpuJob(sub_layer_of(SLOWED).product, FUSED_ALONE),
        *map(ring_job, SIZES_MB),
        *twice_jobs(),
    ]
