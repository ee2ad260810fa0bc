"""The simulations of T3's study, each run once, two at a time.

What the paper calls a configuration (section 5.3) is made of three simulated programs of a sub-layer: the
sequential one, T3 under round-robin arbitration, and T3 under the communication-aware one (T3-MCA). Ideal
overlap follows from the sequential one's parts, the larger of product and reduce-scatter and then the
all-gather; with near-memory reduction, from that of a reduce-scatter which runs alone and adds near memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from meshweave.base.progress import Progress, no_progress
from meshweave_studies.gpu import Arbiter, GpuRun, lower, run
from meshweave_studies.gpu.kernels import Kernels, Source
from meshweave_studies.t3.models import SubLayer
from meshweave_studies.t3.programs import (
    SlicedProduct,
    fused_alone_program,
    overlapped_program,
    reduce_scatter_program,
    sequential_program,
)
from meshweave_studies.t3.readings import READINGS, TABLE_1, T3Reading

GPU, GPU_2X = "t3-80cu", "t3-160cu"
LINK_PS = 500_000
"""Table 1: a ring with 500 ns a link; its rate is a reading."""
NUM_THREADS = 2
"""Simulations at once: the core runs without Python's lock."""


class Simulated(StrEnum):
    """A program of a sub-layer, and how its memory controllers choose."""

    SEQUENTIAL = "sequential"
    T3 = "T3"
    T3_MCA = "T3-MCA"
    FUSED_ALONE = "T3's product without communication"
    REDUCE_SCATTER = "reduce-scatter"
    NEAR_MEMORY = "near-memory reduce-scatter"


SEQUENTIAL, T3, T3_MCA = Simulated.SEQUENTIAL, Simulated.T3, Simulated.T3_MCA
FUSED_ALONE = Simulated.FUSED_ALONE
REDUCE_SCATTER, NEAR_MEMORY = Simulated.REDUCE_SCATTER, Simulated.NEAR_MEMORY


@dataclass(frozen=True)
class GpuJob:
    """A program to simulate on a GPU.

    Attributes:
        product_units, collective_units: compute units that kernels of products and of collectives use; 0 for all.
    """

    product: SlicedProduct
    what: Simulated
    gpu: str = GPU
    product_units: int = 0
    collective_units: int = 0

    @property
    def size(self) -> int:
        """Return a number that grows with the time of the simulation."""
        product = self.product
        tiles = product.rows * product.columns // 128
        return tiles * (0 if self.what in (REDUCE_SCATTER, NEAR_MEMORY) else product.depth) + 256 * tiles


def simulate_job(job: GpuJob, reading: T3Reading = READINGS[TABLE_1]) -> GpuRun:
    """Return the run of a job by a reading, one GPU standing for all (section 5.1.1)."""
    gpu = reading.gpu(job.gpu)
    if job.what == SEQUENTIAL:
        program = sequential_program(job.product)
    elif job.what in (T3, T3_MCA):
        program = overlapped_program(job.product, reading.order)
    elif job.what == FUSED_ALONE:
        program = fused_alone_program(job.product, reading.order)
    else:
        program = reduce_scatter_program(job.product)
    kernels = lower(program, gpu, near_memory=job.what == NEAR_MEMORY)
    _share_units(kernels, job)
    aware = Arbiter("communication-aware", reading.threshold, drains=reading.drains)
    return run(
        kernels,
        gpu,
        link_bytes_per_s=reading.link_bytes_per_s,
        link_ps=LINK_PS,
        arbiter=aware if job.what == T3_MCA else Arbiter(),
        plain_sets=reading.plain_sets,
    )


def _share_units(kernels: Kernels, job: GpuJob) -> None:
    for kernel in kernels.kernels:
        kernel.compute_units = job.product_units if kernel.name == "product" else job.collective_units


@dataclass(frozen=True)
class Times:
    """Seconds of a sub-layer's parts and configurations.

    Attributes:
        product, reduce_scatter, all_gather: of the sequential run, each kernel alone.
        near_memory: a reduce-scatter that adds near memory.
        sequential, t3, mca: whole runs.
    """

    product: float
    reduce_scatter: float
    all_gather: float
    near_memory: float
    sequential: float
    t3: float
    mca: float

    @property
    def ideal(self) -> float:
        """Return the seconds of ideal overlap: the longer of product and reduce-scatter, then the all-gather."""
        return max(self.product, self.reduce_scatter) + self.all_gather

    @property
    def ideal_near_memory(self) -> float:
        """Return the seconds of ideal overlap with a near-memory reduce-scatter."""
        return max(self.product, self.near_memory) + self.all_gather

    def gain(self, configuration: str) -> float:
        """Return by how many percent a configuration (an attribute's name) is faster than the sequential one."""
        return 100 * (self.sequential / float(getattr(self, configuration)) - 1)


@dataclass
class T3Study:
    """The runs of the study by a reading, each simulated once."""

    reading: T3Reading = READINGS[TABLE_1]
    _known: dict[GpuJob, GpuRun] = field(default_factory=dict)

    def prefetch(self, jobs: Iterable[GpuJob], progress: Progress = no_progress) -> None:
        """Simulate what is not known yet, the longest first, `NUM_THREADS` at a time."""
        missing = sorted({job for job in jobs if job not in self._known}, key=lambda job: -job.size)
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            running = {pool.submit(simulate_job, job, self.reading): job for job in missing}
            for done, future in enumerate(as_completed(running), start=1):
                self._known[running[future]] = future.result()
                progress(done, len(missing))

    def run(self, job: GpuJob) -> GpuRun:
        """Return the run of a job."""
        self.prefetch([job])
        return self._known[job]

    def times(self, layer: SubLayer, gpu: str = GPU) -> Times:
        """Return the times of a sub-layer."""
        jobs = times_jobs(layer, gpu)
        self.prefetch(jobs)
        sequential, t3, mca, near_memory = (self._known[job] for job in jobs)
        product, reduce_scatter, all_gather = (
            sequential.kernel_ps(name) / 1e12 for name in ("product", "reduce_scatter", "all_gather")
        )
        return Times(
            product,
            reduce_scatter,
            all_gather,
            near_memory.kernel_ps("reduce_scatter") / 1e12,
            sequential.duration_ps / 1e12,
            t3.duration_ps / 1e12,
            mca.duration_ps / 1e12,
        )

    def traffic(self, layer: SubLayer, what: Simulated) -> dict[Source, int]:
        """Return the bytes that memory reads and writes in a sub-layer's run, by source."""
        return dict(self.run(GpuJob(layer.product, what)).traffic_bytes)


def times_jobs(layer: SubLayer, gpu: str = GPU) -> tuple[GpuJob, GpuJob, GpuJob, GpuJob]:
    """Return the jobs of a sub-layer's times: sequential, T3, T3-MCA, and the near-memory reduce-scatter."""
    product = layer.product
    return (
        GpuJob(product, SEQUENTIAL, gpu),
        GpuJob(product, T3, gpu),
        GpuJob(product, T3_MCA, gpu),
        GpuJob(_without_product(product), NEAR_MEMORY, gpu),
    )


def _without_product(product: SlicedProduct) -> SlicedProduct:
    """Return the output alone, so that sub-layers with equal outputs share one reduce-scatter."""
    return replace(product, depth=1, transpose_a=False, transpose_b=True)


# --- compute units shared (figure 6) -----------------------------------------------------------------------------

SPLITS = {"72-8": (72, 8), "64-16": (64, 16)}
"""Figure 6: compute units of the product and of the all-reduce."""


@dataclass(frozen=True)
class SharedTimes:
    """Seconds of product and all-reduce with all compute units, and with the shares of a split."""

    product: float
    all_reduce: float
    split_product: float
    split_all_reduce: float

    @property
    def potential(self) -> float:
        """Return the speed-up of overlap, memory not shared, over the sequential run with all units."""
        return (self.product + self.all_reduce) / max(self.split_product, self.split_all_reduce)


def split_job(layer: SubLayer, split: str) -> GpuJob:
    """Return the sequential run of a sub-layer whose kernels use the shares of a split; "ideal" is no split."""
    return GpuJob(layer.product, SEQUENTIAL, GPU, *SPLITS.get(split, (0, 0)))


def shared_times(study: T3Study, layer: SubLayer, split: str) -> SharedTimes:
    """Return the times of a sub-layer under a split of `SPLITS`, or "ideal"."""
    study.prefetch(split_job(layer, of) for of in ("ideal", split))
    parts = []
    for of in ("ideal", split):
        one = study.run(split_job(layer, of))
        product = one.kernel_ps("product") / 1e12
        parts += [product, sum(one.kernel_ps(name) for name in ("reduce_scatter", "all_gather")) / 1e12]
    return SharedTimes(*parts)


# --- reduce-scatter by size (figure 14) --------------------------------------------------------------------------

SIZES_MB = (6, 12, 24, 48, 96, 192)
RING = 4
"""GPUs of figure 14."""


def ring_job(megabytes: int) -> GpuJob:
    """Return a reduce-scatter of so many MB (2^20 bytes) over four GPUs."""
    return GpuJob(SlicedProduct(megabytes * 128, 4096, 1, RING), REDUCE_SCATTER)


def ring_times(study: T3Study, megabytes: int) -> tuple[float, float]:
    """Return seconds by bandwidth theory (3/4 of the bytes on each link, three hops), and simulated."""
    steps = RING - 1
    theory = steps / RING * megabytes * 2**20 / study.reading.link_bytes_per_s + steps * LINK_PS / 1e12
    return theory, study.run(ring_job(megabytes)).kernel_ps("reduce_scatter") / 1e12


def last_sum_s(study: T3Study, megabytes: int) -> float:
    """Return the seconds of memory in which no link is busy: the last part's sum, two reads and a write.

    Near-memory reduction has no such sum (section 6.1.1: it shortens the final step alone).
    """
    return 3 * megabytes * 2**20 / RING / study.reading.gpu(GPU).memory.bytes_per_s


# --- memory over time (figure 17) --------------------------------------------------------------------------------


def traffic_curve(one: GpuRun, source: Source, bins: int = 10) -> list[tuple[float, float]]:
    """Return points (ms, GB/s) of a source's memory traffic, each the mean of `bins` microseconds of the run."""
    of_bin = np.asarray(one.traffic_over_time[:, source], dtype=np.float64)
    whole = np.add.reduceat(of_bin, np.arange(0, len(of_bin), bins))
    return [
        ((number + 0.5) * bins / 1e3, float(total) / (bins * 1e-6) / 1e9)
        for number, total in enumerate(whole)
    ]
