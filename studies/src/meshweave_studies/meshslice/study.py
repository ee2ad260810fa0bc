"""Blocks of a transformer under an algorithm: chosen by estimate, as its own tuner would, and timed by a `Timer`.

Each algorithm runs at its own best mesh and configurations, as the papers compare them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshweave.algorithms.matmul2d import Matmul2d, Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.matmul2d.common.passes import Stationary
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.network import RingNetwork
from meshweave.describe.model import load_model
from meshweave.describe.model.workload import Workload
from meshweave.tune.meshes import BlockOnMesh, MeshSearchSpace, Shape, best_meshes
from meshweave.tune.product import SearchCounts
from meshweave.tune.search import LayerDataflow, block_products, choose_transposed, layer_dataflows
from meshweave.tune.unrolled import REFERENCE_ALGORITHM, UNROLLED, ProductSizes, sizes_of, unrolled_entry
from meshweave_studies.meshslice.readings import MeasuredRun
from meshweave_studies.meshslice.times import Timer, Timing, sum_timings

RING_BASELINES = ("tp1d", "fsdp")
"""They run on a ring: two of the four links of a chip in a 2D torus."""


@dataclass(frozen=True)
class ExperimentSizes:
    """The sizes at which the paper's experiments run."""

    chips: int = 256
    sizes: tuple[int, ...] = (16, 32, 64, 128, 256)
    tall_mesh: Shape = (32, 8)
    fixed_batch: int = 32
    sequence: int = 2048
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class FcBlock:
    """The fully connected layers of one block.

    Attributes:
        model: the catalog name.
        batch: the sequences of all chips together.
        always_stationary: the matrix that stays put in every layer; None to choose it by layer.
    """

    model: str
    chips: int
    batch: int
    always_stationary: Stationary | None = None


@dataclass(frozen=True)
class ChosenProducts:
    """Products with the configurations at which an algorithm runs them on one mesh."""

    entry: Matmul2d
    cluster: Cluster
    shape: Shape
    products: tuple[tuple[Matmul2dProblem, Matmul2dConfig], ...]

    def timing(self, timer: Timer) -> Timing:
        """Return the timing of all products, one after another."""
        return sum_timings(timer.timing(problem, self.entry, c, self.cluster) for problem, c in self.products)


class MeshSliceStudy:
    """The experiments of the paper on one machine, timed by one timer; nothing is computed twice.

    Args:
        cluster: the pod, or its catalog name or TOML file.
        timer: times what estimates have chosen.
        measured: how the blocks ran on the real 4x4 mesh.
    """

    def __init__(
        self,
        cluster: str | Cluster,
        timer: Timer,
        experiment: ExperimentSizes | None = None,
        measured: MeasuredRun | None = None,
    ) -> None:
        self.experiment = experiment or ExperimentSizes()
        self.measured = measured or MeasuredRun()
        self.timer = timer
        self.estimates: Timer = timer if timer.by == "estimate" else Timer("estimate", timer.rule)
        self._pod = load_cluster(cluster) if isinstance(cluster, str) else cluster
        self._search_spaces: dict[tuple[int, bool], MeshSearchSpace] = {}
        self._chosen: dict[tuple[FcBlock, str, int | None], ChosenProducts | None] = {}
        self._on_mesh: dict[tuple[FcBlock, str, Shape], ChosenProducts] = {}

    @cached_property
    def pod(self) -> Cluster:
        """The machine at the size of most experiments."""
        return self.cluster(self.experiment.chips)

    def cluster(self, chips: int) -> Cluster:
        """Return the machine with this many chips."""
        return self._pod.with_chips(chips)

    def search_space(self, chips: int, ring: bool = False) -> MeshSearchSpace:
        """Return the meshes of the pod, or of a ring of as many of its chips, which has two links per chip."""
        space = self._search_spaces.get((chips, ring))
        if space is None:
            cluster = self.cluster(chips)
            if ring:
                link = cluster.network.axis(0, 2)
                cluster = replace(cluster, name=f"{cluster.name} ring", network=RingNetwork(link, chips))
            space = self._search_spaces[chips, ring] = MeshSearchSpace(cluster)
        return space

    def weak_scaling_block(
        self, model: str, chips: int | None = None, always: Stationary | None = None
    ) -> FcBlock:
        """Return a block under weak scaling: half a sequence per chip."""
        chips = chips or self.experiment.chips
        return FcBlock(model, chips, chips // 2, always)

    def strong_scaling_block(self, model: str, chips: int) -> FcBlock:
        """Return a block under strong scaling: the same batch at every number of chips."""
        return FcBlock(model, chips, self.experiment.fixed_batch)

    def workload(self, block: FcBlock) -> Workload:
        """Return the tokens and dtype of a block."""
        return Workload(block.batch, self.experiment.sequence, self.experiment.dtype)

    def problems(
        self, block: FcBlock, shape: Shape, algorithm: str = REFERENCE_ALGORITHM
    ) -> list[Matmul2dProblem]:
        """Return the 12 products of a block under an algorithm, layer by layer.

        The rivals with a layout of their own keep it, also where `always_stationary` gives one to all others.
        """
        tokens = self.workload(block).tokens
        layers = load_model(block.model).fc_layers()
        entry = PRODUCTS_2D[UNROLLED.get(algorithm, algorithm)]
        flows = layer_dataflows(entry, layers, tokens)
        if block.always_stationary and not entry.own_stationary:
            flipped = choose_transposed([block.always_stationary] * len(layers))
            flows = [LayerDataflow(block.always_stationary, flip, "given") for flip in flipped]
        return block_products(layers, flows, tokens, shape, self.experiment.dtype)

    def flops(self, block: FcBlock) -> int:
        """Return the FLOPs of the products of a block: 2 for each weight and token, in each of three passes."""
        layers = load_model(block.model).fc_layers()
        return 6 * self.workload(block).tokens * sum(one.in_features * one.out_features for one in layers)

    # --- choosing -----------------------------------------------------------------------------------------

    def entry(self, algorithm: str, block: FcBlock, product: int | None = None) -> Matmul2d:
        """Return the algorithm of a name; "wang[S=meshslice]" and others like it run at the slice counts that
        MeshSlice takes for the same products.
        """
        if algorithm not in UNROLLED:
            return PRODUCTS_2D[algorithm]
        return unrolled_entry(algorithm, self._counts(block, product))

    def _counts(self, block: FcBlock, product: int | None) -> dict[ProductSizes, int]:
        leader = self.chosen(block, REFERENCE_ALGORITHM, product)
        if leader is None:
            return {}
        return {sizes_of(problem): config.slice_count for problem, config in leader.products}

    def shapes(self, block: FcBlock, algorithm: str) -> list[Shape]:
        """Return the mesh shapes that an algorithm can run on."""
        space = self.search_space(block.chips, algorithm in RING_BASELINES)
        return space.shapes(PRODUCTS_2D[UNROLLED.get(algorithm, algorithm)])

    def chosen(self, block: FcBlock, algorithm: str, product: int | None = None) -> ChosenProducts | None:
        """Return an algorithm at its best mesh for a block or for one product of it; None where it has no mesh."""
        key = block, algorithm, product
        if key not in self._chosen:
            self._chosen[key] = self._choose(block, algorithm, product)
        return self._chosen[key]

    def _choose(self, block: FcBlock, algorithm: str, product: int | None) -> ChosenProducts | None:
        shapes = self.shapes(block, algorithm)
        if not shapes:
            return None
        space = self.search_space(block.chips, algorithm in RING_BASELINES)
        entry = self.entry(algorithm, block, product)

        def problems(shape: Shape) -> list[Matmul2dProblem]:
            all_of_them = self.problems(block, shape, algorithm)
            return all_of_them if product is None else [all_of_them[product]]

        if self.timer.rule != "apart":  # the tuner's search knows no other rule
            chosen = [self._by_timer(entry, space.cluster, shape, problems(shape)) for shape in shapes]
            return min(chosen, key=lambda products: products.timing(self.estimates).total_s)
        ranked = best_meshes(entry, space, shapes, problems, SearchCounts(), lambda: None)
        return _at_best(entry, space.cluster, ranked[0][1])

    def _by_timer(
        self, entry: Matmul2d, cluster: Cluster, shape: Shape, problems: Sequence[Matmul2dProblem]
    ) -> ChosenProducts:
        """Return products on a mesh, each at the config that the study's own estimates find fastest."""
        best: dict[Matmul2dProblem, Matmul2dConfig] = {}
        for problem in dict.fromkeys(problems):
            best[problem] = min(
                entry.candidates(problem),
                key=lambda config: self.estimates.product_s(problem, entry, config, cluster),
            )
        return ChosenProducts(entry, cluster, shape, tuple((problem, best[problem]) for problem in problems))

    def on_mesh(self, block: FcBlock, shape: Shape, algorithm: str = REFERENCE_ALGORITHM) -> ChosenProducts:
        """Return an algorithm on a given mesh, with the configurations that its tuner takes there."""
        key = block, algorithm, shape
        if key not in self._on_mesh:
            space = self.search_space(block.chips, algorithm in RING_BASELINES)
            entry, problems = self.entry(algorithm, block), self.problems(block, shape, algorithm)
            if self.timer.rule == "apart":
                mesh = BlockOnMesh(entry, shape, problems, space.prices(shape), SearchCounts())
                self._on_mesh[key] = _at_best(entry, space.cluster, mesh)
            else:
                self._on_mesh[key] = self._by_timer(entry, space.cluster, shape, problems)
        return self._on_mesh[key]

    # --- times --------------------------------------------------------------------------------------------

    def timing(self, block: FcBlock, algorithm: str, product: int | None = None) -> Timing | None:
        """Return the timing of a block, or of one product of it, by an algorithm at its best; None where it has
        no mesh.
        """
        chosen = self.chosen(block, algorithm, product)
        return None if chosen is None else chosen.timing(self.timer)

    def block_s(
        self, block: FcBlock, algorithm: str = REFERENCE_ALGORITHM, product: int | None = None
    ) -> float:
        """Return the seconds of a block, or of one product of it, by an algorithm that has a mesh."""
        timing = self.timing(block, algorithm, product)
        assert timing is not None, f"{algorithm} has no mesh of {block.chips} chips"
        return timing.total_s

    def percent_of_peak(self, block: FcBlock, seconds: float) -> float:
        """Return the FLOP utilisation in percent of a block that takes so many seconds."""
        peak = self._pod.chip.peak(self.experiment.dtype)
        return 100 * self.flops(block) / block.chips / peak / seconds

    def utilisation(self, block: FcBlock, algorithm: str = REFERENCE_ALGORITHM) -> float | None:
        """Return the FLOP utilisation in percent of an algorithm at its best; None where it has no mesh."""
        timing = self.timing(block, algorithm)
        return None if timing is None else self.percent_of_peak(block, timing.total_s)


def _at_best(entry: Matmul2d, cluster: Cluster, mesh: BlockOnMesh) -> ChosenProducts:
    products = [(choices.problem, choices.configs[choices.best()[1]]) for choices in mesh.searches]
    return ChosenProducts(entry, cluster, mesh.shape, tuple(products))


def distinct_products(problems: Sequence[Matmul2dProblem]) -> list[int]:
    """Return the positions of the products that differ in M, N, K; the first of equals. A block has eight."""
    first: dict[tuple[int, int, int], int] = {}
    for position, problem in enumerate(problems):
        first.setdefault((problem.m, problem.n, problem.k), position)
    return list(first.values())
