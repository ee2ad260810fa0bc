"""The measured 4x4 TPUv4, with its own constants: collectives do not overlap with products there.

There each op follows the one before it, so a product takes the sum of its parts. The paper does not say at which
batch and slice counts it ran: a reading of the paper does (`readings`).
"""

from __future__ import annotations

from statistics import mean

from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.matmul2d.common.passes import PASSES
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.describe.machine.cluster import load_cluster
from meshweave_studies.meshslice.readings import MeasuredRun
from meshweave_studies.meshslice.study import ChosenProducts, FcBlock, MeshSliceStudy
from meshweave_studies.meshslice.times import Timer
from meshweave_studies.published import MODELS
from meshweave_studies.verdict import percent_faster

SHAPE = (4, 4)


class MeasuredMesh:
    """The blocks of both models on the 4x4 mesh, run as the study's reading says and timed by its timer."""

    def __init__(self, study: MeshSliceStudy) -> None:
        self.study = study
        self.run = study.measured
        self.cluster = load_cluster(self.run.cluster)

    def block(self, model: str) -> FcBlock:
        """Return the block of a model at 16 chips."""
        return FcBlock(model, 16, self.run.batch)

    def chosen(self, model: str, algorithm: str, overlap: bool) -> ChosenProducts:
        """Return the block's products at their best configurations by estimate, with overlap or without."""
        entry, cluster = PRODUCTS_2D[algorithm], self.cluster
        estimates = self.study.estimates

        def cost(problem: Matmul2dProblem, config: Matmul2dConfig) -> float:
            timing = estimates.timing(problem, entry, config, cluster)
            return timing.total_s if overlap else timing.serial_s

        products = []
        for problem in self.study.problems(self.block(model), SHAPE, algorithm):
            configs = [c for c in entry.candidates(problem) if algorithm != "meshslice" or self._allowed(c)]
            products.append((problem, min(configs, key=lambda config: cost(problem, config))))
        return ChosenProducts(entry, cluster, SHAPE, tuple(products))

    def _allowed(self, config: Matmul2dConfig) -> bool:
        given = self.run.slice_count
        return config.slice_count > 1 if given is None else config.slice_count == given

    def serial(self, model: str, algorithm: str) -> float:
        """Return the FLOP utilisation in percent where nothing overlaps (table 3)."""
        return self._of_peak(model, self._serial_s(model, algorithm))

    def overlapped(self, model: str, algorithm: str) -> float:
        """Return the FLOP utilisation in percent where collectives overlap products (table 3)."""
        return self._of_peak(model, self.chosen(model, algorithm, True).timing(self.study.timer).total_s)

    def overhead(self) -> float:
        """Return by how many percent MeshSlice takes longer than Collective without overlap; mean of the models
        (section 5.3.1).
        """
        return mean(
            percent_faster(self._serial_s(m, "meshslice"), self._serial_s(m, "collective")) for m in MODELS
        )

    def slicing(self) -> float:
        """Return the time of copying slices in percent of Collective's; mean of the models (section 5.3.1)."""
        copies = [self.chosen(m, "meshslice", False).timing(self.study.timer).copy_s for m in MODELS]
        whole = [self._serial_s(m, "collective") for m in MODELS]
        return 100 * mean(copy_s / whole_s for copy_s, whole_s in zip(copies, whole, strict=True))

    def communication_errors(self, timer: Timer) -> list[float]:
        """Return |estimated / timed communication - 1| of MeshSlice in percent, one per layer of both models
        (figure 15).
        """
        errors = []
        for model in MODELS:
            chosen = self.chosen(model, "meshslice", True)
            for first in range(0, len(chosen.products), len(PASSES)):
                layer = ChosenProducts(
                    chosen.entry, chosen.cluster, SHAPE, chosen.products[first : first + len(PASSES)]
                )
                expected = layer.timing(self.study.estimates).communication_s
                errors.append(round(100 * abs(expected / layer.timing(timer).communication_s - 1), 4))
        return errors

    def _serial_s(self, model: str, algorithm: str) -> float:
        return self.chosen(model, algorithm, False).timing(self.study.timer).serial_s

    def _of_peak(self, model: str, seconds: float) -> float:
        block = self.block(model)
        peak = self.cluster.chip.peak(self.study.experiment.dtype)
        return 100 * self.study.flops(block) / block.chips / peak / seconds


def local_shapes(run: MeasuredRun) -> list[tuple[int, int, int]]:
    """Return the distinct (m, n, k) of the local products of MeshSlice's slices, for both models.

    Each product has the number of slices that is fastest by the estimate without overlap.
    """
    mesh = MeasuredMesh(MeshSliceStudy(run.cluster, Timer("estimate"), measured=run))
    out: dict[tuple[int, int, int], None] = {}
    for model in MODELS:
        for problem, config in mesh.chosen(model, "meshslice", False).products:
            rows, columns = problem.mesh_shape
            sliced = config.slice_count
            parts = {
                "os": (rows, columns, sliced),
                "ls": (rows, sliced, columns),
                "rs": (sliced, columns, rows),
            }[problem.dataflow]
            m, n, k = (
                size // part for size, part in zip((problem.m, problem.n, problem.k), parts, strict=True)
            )
            out[m, n, k] = None
    return list(out)
