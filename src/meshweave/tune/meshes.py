"""All products of a block on all mesh shapes: the best two shapes of an algorithm, by branch and bound.

Each shape first gets a lower bound, the sum of the lower bounds of its products (`Matmul2d.lower_bounds`). Shapes
are tuned in the order of these bounds. A shape is given up as soon as its exact times plus the bounds of its
remaining products exceed the second best shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import cached_property

from meshweave.algorithms.matmul2d import Matmul2d, Matmul2dProblem
from meshweave.algorithms.matmul2d.common.problem import AXES, MESH
from meshweave.base.errors import LayoutError
from meshweave.cost.machine import Machine, mesh_machine
from meshweave.describe.machine.cluster import Cluster
from meshweave.tune.product import ConfigSearch, OpPrices, SearchCounts

Shape = tuple[int, ...]


def formed_shapes(entry: Matmul2d, cluster: Cluster) -> list[Shape]:
    """Return every mesh shape over all chips that an algorithm can use and the network carries.

    Flat shapes, in which an axis has size 1, are included.
    """
    wanted = entry.mesh_shapes(cluster.num_chips)
    formed: set[Shape] = set()
    for dims in {len(shape) for shape in wanted}:
        with suppress(LayoutError):  # more axes than the network has
            formed.update(cluster.network.mesh_shapes(dims))
    return [shape for shape in wanted if shape in formed]


class MeshSearchSpace:
    """A cluster, and caches of its machine and op prices for each mesh shape that a search lays on it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._machines: dict[Shape, Machine] = {}
        self._prices: dict[Hashable, OpPrices] = {}

    def shapes(self, entry: Matmul2d) -> list[Shape]:
        """Return the mesh shapes of all chips that an algorithm can use; flat ones only if no others are."""
        both = formed_shapes(entry, self.cluster)
        return [shape for shape in both if min(shape) > 1] or both

    def machine(self, shape: Shape) -> Machine:
        """Return the cluster with a mesh of this shape laid on all of its chips."""
        if shape not in self._machines:
            self._machines[shape] = mesh_machine(self.cluster, shape, AXES[: len(shape)], MESH)
        return self._machines[shape]

    def prices(self, shape: Shape) -> OpPrices:
        """Return the price cache of a mesh; meshes whose axes have the same links and hosts share one."""
        machine = self.machine(shape)
        names = [f"{MESH}.{axis}" for axis in AXES[: len(shape)]]
        key = tuple(
            (machine.axis(name, True), machine.axis(name, True, one_way=True), machine.any_host_span(name))
            for name in names
        )
        return self._prices.setdefault(key, OpPrices(machine))


class BlockOnMesh:
    """The matrix products of a transformer block on one mesh, in order; equal products share one search."""

    def __init__(
        self,
        entry: Matmul2d,
        shape: Shape,
        problems: Sequence[Matmul2dProblem],
        prices: OpPrices,
        counts: SearchCounts,
    ) -> None:
        self.entry, self.shape, self.problems = entry, shape, problems
        self.prices, self.counts = prices, counts

        self._searches: dict[Matmul2dProblem, ConfigSearch] = {}
        self._counts = Counter(problems)

    @property
    def searches(self) -> list[ConfigSearch]:
        """Return one search per product, in order."""
        return [self._search_of(problem) for problem in self.problems]

    def _search_of(self, problem: Matmul2dProblem) -> ConfigSearch:
        if problem not in self._searches:
            self._searches[problem] = ConfigSearch(self.entry, problem, self.prices, self.counts)
        return self._searches[problem]

    @cached_property
    def _lower_bounds(self) -> dict[Matmul2dProblem, int]:
        """Return a lower bound in picoseconds per product, by `Matmul2d.lower_bounds` where there are any."""
        return {problem: self._lower_bound_ps_of(problem) for problem in self._counts}

    def _lower_bound_ps_of(self, problem: Matmul2dProblem) -> int:
        skeletons = list(self.entry.lower_bounds(problem) or ())
        if not (skeletons and all(map(self.prices.may_bound, skeletons))):
            return self._search_of(problem).lower_bound_ps
        return min(self.prices.timed(skeleton).total_ps() for skeleton in skeletons)

    def lower_bound_ps(self) -> int:
        """Return a lower bound in picoseconds on the time of all products of the block, one after another."""
        return sum(count * self._lower_bounds[problem] for problem, count in self._counts.items())

    def total_ps(self, limit_ps: int | None) -> int | None:
        """Return the summed picoseconds of all products at their best configs; None if over `limit_ps`.

        `limit_ps` None is no limit. To stop early, the sum begins with lower bounds: each product's is replaced
        by a tighter one, then by its exact time, and None is returned once the sum is over the limit.
        """
        total, parts = self.lower_bound_ps(), dict(self._lower_bounds)
        for exact in (False, True):
            for problem, count in self._counts.items():
                config_search = self._search_of(problem)
                part = config_search.best()[0] if exact else config_search.lower_bound_ps
                total += count * (part - parts[problem])
                parts[problem] = part
                if limit_ps is not None and total > limit_ps:
                    return None
        return total


def best_meshes(
    entry: Matmul2d,
    space: MeshSearchSpace,
    shapes: Sequence[Shape],
    problems: Callable[[Shape], Sequence[Matmul2dProblem]],
    counts: SearchCounts,
    advance: Callable[[], None],
) -> list[tuple[int, BlockOnMesh]]:
    """Return (picoseconds, mesh) of the two fastest of `shapes`, or of the only one; of equals the first.

    Picoseconds are those of all products of the block, each at its best config.

    Args:
        problems: lists the products on a mesh shape.
        counts: to which the numbers of configs and of what was priced are added.
        advance: called once for each shape, when it is tuned or given up.
    """
    meshes = [BlockOnMesh(entry, shape, problems(shape), space.prices(shape), counts) for shape in shapes]
    order = sorted((mesh.lower_bound_ps(), number) for number, mesh in enumerate(meshes))
    fastest: list[tuple[int, int]] = []
    for bound_ps, number in order:
        limit_ps = fastest[1][0] if len(fastest) == 2 else None
        if limit_ps is None or bound_ps <= limit_ps:
            total_ps = meshes[number].total_ps(limit_ps)
            if total_ps is not None:
                fastest = sorted([*fastest, (total_ps, number)])[:2]
        advance()
    return [(total_ps, meshes[number]) for total_ps, number in fastest]
