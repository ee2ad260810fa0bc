"""Every strategy for a transformer block, on every mesh of a cluster, in every number of chunks: one ranking.

Each strategy is an algorithm for `BlockProblem`, and each mesh a problem of its own. All configs of all strategies
are priced on all meshes: closed forms over skeletons take milliseconds, also with thousands of chips.
`ranking.simulate_best` then simulates the first few with contention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshweave.algorithms.block import BlockAlgorithm, BlockProblem
from meshweave.algorithms.block.problem import AXES, Overlap
from meshweave.algorithms.contract import Algorithm
from meshweave.algorithms.table import algorithm
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.base.progress import Progress, no_progress
from meshweave.cost.machine import Machine, mesh_machine
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.model.transformer import Transformer
from meshweave.describe.model.workload import Workload
from meshweave.tune.ranked import RankedConfig
from meshweave.tune.ranking import simulate_best, solvers
from meshweave_studies.matrix.device_meshes import device_meshes

MeshShape = tuple[int, ...]
"""The sizes of a mesh (rows, columns) or (depth, rows, columns)."""


@dataclass(frozen=True)
class BlockRanking:
    """Strategies for a block of a model on a cluster: first those that were simulated, then the others, by time.

    Attributes:
        ranked: of every strategy on every mesh the config with the least estimate.
        num_priced: how many configs were priced.
        note: why none was simulated although some should have been.
    """

    model: Transformer
    workload: Workload
    cluster: Cluster
    layers: int
    ranked: tuple[RankedConfig, ...]
    num_priced: int
    note: str = ""

    def machine(self, ranked: RankedConfig) -> Machine:
        """Return the cluster with the mesh of a ranked config laid on it."""
        return block_machine(self.cluster, mesh_of(ranked))

    def margin(self, position: int = 0) -> float | None:
        """Return by which share of its own time the next config is slower.

        None for the last one, and where one of the two was simulated and the other estimated.
        """
        pair = self.ranked[position : position + 2]
        if len(pair) < 2 or (pair[0].simulated is None) != (pair[1].simulated is None):
            return None
        return pair[1].seconds / pair[0].seconds - 1


def mesh_of(ranked: RankedConfig) -> MeshShape:
    """Return the mesh shape of a ranked config."""
    assert isinstance(ranked.problem, BlockProblem)
    return ranked.problem.mesh_shape


def block_machine(cluster: Cluster, mesh_shape: MeshShape) -> Machine:
    """Return a cluster with the mesh of a block laid on it."""
    return mesh_machine(cluster, mesh_shape, AXES[-len(mesh_shape) :], logical=True)


def block_meshes(cluster: Cluster) -> tuple[MeshShape, ...]:
    """Return the meshes that the network carries: (rows, columns), those with the fewest columns first.

    Then come those (depth, rows, columns) of which no size is 1; with a 1 they are meshes of two axes.
    """
    carried = set(cluster.network.mesh_shapes(2))
    flat = (mesh for mesh in device_meshes(cluster.num_chips) if mesh in carried)
    try:
        deep = cluster.network.mesh_shapes(3)
    except LayoutError:  # a torus of two axes has no third
        deep = ()
    return *flat, *(mesh for mesh in deep if min(mesh) > 1)


def rank_blocks(
    model: Transformer,
    workload: Workload,
    cluster: Cluster,
    *,
    layers: int = 1,
    algorithms: Sequence[str] | None = None,
    mesh_shapes: Sequence[MeshShape] | None = None,
    max_simulated: int = 0,
    overlap: Overlap = "layers",
    progress: Progress = no_progress,
) -> BlockRanking:
    """Return all strategies for some layers of a model on all chips of a cluster, forward and backward.

    Args:
        layers: how many consecutive layers are one program.
        algorithms: names of strategies to choose among; None takes all.
        mesh_shapes: meshes to choose among; None takes all that the network carries.
        max_simulated: how many configs at the head are simulated with contention, which orders them anew; none
            where one of them is too large, which the note says.
        overlap: what communication may run beside: "layers", all that the program of the layers has beside it;
            "sites", the product that it belongs to, as in a model of `meshweave.parallelize`.
        progress: called with the numbers of meshes priced and configs simulated so far, and of all of them.

    Raises:
        UnsupportedError: the model has experts, a strategy is unknown, or none can run the block on any of the
            meshes.
        LayoutError: a mesh does not have the chips of the cluster.
    """
    if model.is_routed:
        raise UnsupportedError(
            f"{model.name} has experts, which have ranks of their own beside those of a block; "
            "`meshweave plan` lays such models"
        )
    search = _Search(cluster, overlap)
    meshes = block_meshes(cluster) if mesh_shapes is None else mesh_shapes
    total = len(meshes) + max_simulated
    for number, mesh in enumerate(meshes):
        if math.prod(mesh) != cluster.num_chips:
            raise LayoutError(
                f"mesh {'x'.join(map(str, mesh))} is not one of the {cluster.num_chips} chips of {cluster.name}"
            )
        search.add(BlockProblem.of(model, workload, mesh, layers=layers), algorithms)
        progress(number + 1, total)
    if not search.best:
        raise UnsupportedError(
            f"no strategy runs a block of {model.name} on {cluster.num_chips} chips of {cluster.name}"
            + (f": {search.refusals[0]}" if search.refusals else "")
        )
    ranked, note = sorted(search.best.values(), key=lambda config: config.seconds), ""
    try:
        ranked = simulate_best(
            ranked, cluster, max_simulated, lambda count: progress(len(meshes) + count, total)
        )
    except UnsupportedError as error:
        note = f"None is simulated: {error}"
    return BlockRanking(model, workload, cluster, layers, tuple(ranked), search.num_priced, note)


class _Search:
    """The best config so far of every strategy on every mesh."""

    def __init__(self, cluster: Cluster, overlap: Overlap) -> None:
        self.cluster, self.overlap = cluster, overlap
        self.best: dict[tuple[str, MeshShape], RankedConfig] = {}
        self.refusals: list[str] = []
        self.num_priced = 0

    def add(self, problem: BlockProblem, names: Sequence[str] | None) -> None:
        """Price every config of the strategies that run a problem. Raises UnsupportedError for an unknown name."""
        known = solvers(problem)
        machine = block_machine(self.cluster, problem.mesh_shape)
        for name in names if names is not None else known:
            if name not in known:
                self._note_refusal(problem, name)
                continue
            for config in known[name].candidates(problem, self.cluster):
                try:
                    config = self._placed(known[name], config)
                    priced = known[name].estimate(problem, config, machine)
                except (LayoutError, UnsupportedError) as error:
                    self.refusals.append(f"{name}: {error}")
                    continue
                self._keep(RankedConfig(known[name], problem, config, priced), problem.mesh_shape)

    def _placed(self, entry: Algorithm[Any, Any], config: Any) -> Any:
        """Return a config with the overlap of the search. Raises UnsupportedError where an entry has no other."""
        if self.overlap == "layers":
            return config
        if not isinstance(entry, BlockAlgorithm):
            raise UnsupportedError("its program is known as a whole, and not site by site")
        return replace(config, overlap=self.overlap)

    def _keep(self, ranked: RankedConfig, mesh_shape: MeshShape) -> None:
        self.num_priced += 1
        key = (ranked.algorithm.name, mesh_shape)
        if key not in self.best or ranked.seconds < self.best[key].seconds:
            self.best[key] = ranked

    def _note_refusal(self, problem: BlockProblem, name: str) -> None:
        try:
            solvers(problem, [name])
        except UnsupportedError as error:
            if not issubclass(BlockProblem, algorithm(name).problem_type):
                raise
            self.refusals.append(str(error))
