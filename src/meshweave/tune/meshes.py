"""All products of a block on all mesh shapes: the best two shapes of an algorithm, by branch and bound.

Each shape first gets a lower bound, the sum of its products' bounds, from what all configurations have in
common where the algorithm says. In the order of these the products are tuned exactly, and a shape is given up
as soon as what it has plus what it needs at least is too much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property

from meshweave.algorithms.matmul2d import Matmul2d, MatmulProblem
from meshweave.algorithms.matmul2d.common.problem import AXES, MESH
from meshweave.base.errors import LayoutError
from meshweave.cost.machine import Machine, mesh_machine
from meshweave.describe.machine.cluster import Cluster
from meshweave.estimate import TimedSkeleton
from meshweave.tune.product import Choices, Prices, Tally

Shape = tuple[int, ...]


class Ground:
    """A cluster with meshes laid on it: machines and prices, each made once for all algorithms."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._machines: dict[Shape, Machine] = {}
        self._prices: dict[Hashable, Prices] = {}

    def shapes(self, entry: Matmul2d) -> list[Shape]:
        """Mesh shapes that both the algorithm and the cluster can form; flat ones only if there are no others."""
        wanted = entry.mesh_shapes(self.cluster.num_chips)
        formed: set[Shape] = set()
        for dims in {len(shape) for shape in wanted}:
            try:
                formed.update(self.cluster.network.mesh_shapes(dims))
            except LayoutError:  # more axes than the network has
                continue
        both = [shape for shape in wanted if shape in formed]
        return [shape for shape in both if min(shape) > 1] or both

    def machine(self, shape: Shape) -> Machine:
        found = self._machines.get(shape)
        if found is None:
            found = mesh_machine(self.cluster, shape, AXES[: len(shape)], MESH)
            self._machines[shape] = found
        return found

    def prices(self, shape: Shape) -> Prices:
        """Prices on this mesh, shared with the meshes whose axes run over the same links."""
        machine = self.machine(shape)
        key = tuple(machine.axis(f"{MESH}.{axis}") for axis in AXES[: len(shape)])
        return self._prices.setdefault(key, Prices(machine))


class OnMesh:
    """The products of a block on one mesh, in order; products of equal sizes share their choices."""

    def __init__(
        self, entry: Matmul2d, shape: Shape, problems: Sequence[MatmulProblem], prices: Prices, tally: Tally
    ) -> None:
        self.entry, self.shape, self.problems = entry, shape, problems
        self.prices, self.tally = prices, tally

        self._choices: dict[MatmulProblem, Choices] = {}
        self._counts = Counter(problems)

    @property
    def choices(self) -> list[Choices]:
        """One for each product."""
        return [self._of(problem) for problem in self.problems]

    def _of(self, problem: MatmulProblem) -> Choices:
        found = self._choices.get(problem)
        if found is None:
            found = Choices(self.entry, problem, self.prices, self.tally)
            self._choices[problem] = found
        return found

    @cached_property
    def _least(self) -> dict[MatmulProblem, int]:
        """A lower bound per product, for which no configuration is looked at where the algorithm knows what
        all have in common."""
        return {problem: self._least_ps_of(problem) for problem in self._counts}

    def _least_ps_of(self, problem: MatmulProblem) -> int:
        skeletons = self.entry.least(problem)
        if skeletons is None:
            return self._of(problem).floor_ps
        return min(TimedSkeleton(skeleton, self.prices.__getitem__).total_ps() for skeleton in skeletons)

    def least_ps(self) -> int:
        """A lower bound of the time of all products."""
        return sum(count * self._least[problem] for problem, count in self._counts.items())

    def total_ps(self, limit_ps: int | None) -> int | None:
        """Time of all products at their best; None if that is certainly over the limit.

        Each product's part is made more exact in two rounds, until the sum is exact or over the limit.
        """
        total, parts = self.least_ps(), dict(self._least)
        for exact in (False, True):
            for problem, count in self._counts.items():
                choices = self._of(problem)
                part = choices.best()[0] if exact else choices.floor_ps
                total += count * (part - parts[problem])
                parts[problem] = part
                if limit_ps is not None and total > limit_ps:
                    return None
        return total


def best_meshes(
    entry: Matmul2d,
    ground: Ground,
    shapes: Sequence[Shape],
    problems: Callable[[Shape], Sequence[MatmulProblem]],
    tally: Tally,
    advance: Callable[[], None],
) -> list[tuple[int, OnMesh]]:
    """(picoseconds, mesh) of the two fastest of `shapes`, or of the only one; of equals the first is faster.

    `problems` lists the products on a mesh shape; `advance` is called once for each shape that is dealt with.
    """
    meshes = [OnMesh(entry, shape, problems(shape), ground.prices(shape), tally) for shape in shapes]
    order = sorted((mesh.least_ps(), number) for number, mesh in enumerate(meshes))
    found: list[tuple[int, int]] = []
    for least_ps, number in order:
        limit_ps = found[1][0] if len(found) == 2 else None
        if limit_ps is None or least_ps <= limit_ps:
            total_ps = meshes[number].total_ps(limit_ps)
            if total_ps is not None:
                found = sorted([*found, (total_ps, number)])[:2]
        advance()
    return [(total_ps, meshes[number]) for total_ps, number in found]
