"""One product on one mesh: the fastest of an algorithm's configs, by branch and bound.

Every config first gets a lower bound: the total time of the ops of its longest lane. In the order of these bounds
the configs are priced exactly, until the next bound is above the best time. The result equals that of pricing all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshweave.algorithms.matmul2d import Matmul2d, Matmul2dConfig, Matmul2dProblem
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.base.units import to_s
from meshweave.cost.machine import Machine
from meshweave.cost.price import price
from meshweave.estimate import Estimate, TimedSkeleton, estimate_skeleton
from meshweave.ir.skeleton import Skeleton
from meshweave.ir.work import Transfer, Work

KEPT_PHASES = 8
"""Skeletons of more phases are built again when needed, instead of being kept for all mesh shapes."""


class OpPrices(dict[Work, int]):
    """A cache of {work of an op: picoseconds on a machine}, shared by meshes whose axes use the same links."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __missing__(self, work: Work) -> int:
        price_ps = self[work] = price(work, self.machine).total_ps
        return price_ps

    def timed(self, skeleton: Skeleton) -> TimedSkeleton:
        """Return a skeleton (`ir.skeleton`: a program's tasks on one rank) with these durations of its tasks."""
        return TimedSkeleton(skeleton, self.__getitem__, self.machine)

    def may_bound(self, floor: Skeleton) -> bool:
        """Return whether the time of `floor`, a skeleton of `Matmul2d.lower_bounds`, is a valid lower bound here.

        False only where the cluster's transport buffers sends (`Cluster.send_buffer_bytes`) and `floor` has
        broadcasts or reduces: buffering lets these overlap more than the skeleton says.
        """
        if not self.machine.cluster.send_buffer_bytes:
            return True
        works = (task.work for _, task in floor.counted_tasks())
        return not any(isinstance(work, Transfer) and work.kind in ("broadcast", "reduce") for work in works)


@dataclass
class SearchCounts:
    """The work of a search.

    Attributes:
        num_configs: number of configs to choose among.
        num_skeletons: number of skeletons (`ir.skeleton`) built; one that is built twice counts twice.
        num_exact: number of configs whose exact time was computed.
    """

    num_configs: int = 0
    num_skeletons: int = 0
    num_exact: int = 0


@dataclass(frozen=True)
class TunedProduct:
    """A product at its fastest config.

    Attributes:
        estimate: its estimated seconds, in all and by part.
        runner_up: the second fastest config; None where there is only one.
        runner_up_s: its estimated seconds.
    """

    problem: Matmul2dProblem
    config: Matmul2dConfig
    estimate: Estimate
    runner_up: Matmul2dConfig | None = None
    runner_up_s: float = 0.0

    @property
    def margin_text(self) -> str:
        """Return the runner-up and how much slower it is, as in "S=6 is 0.8 % slower"; "" without a runner-up."""
        if self.runner_up is None:
            return ""
        other = str(self.runner_up)
        if self.runner_up.overlap != self.config.overlap:
            other += f" hiding {self.runner_up.overlap}s"
        return f"{other} is {100 * (self.runner_up_s / self.estimate.total_s - 1):.1f} % slower"


class ConfigSearch:
    """A branch-and-bound search over the configs of one product on one machine.

    Args:
        entry: the algorithm; its `candidates` for `problem` are the configs.
        prices: the prices of ops on the machine.
        counts: to which the numbers of configs and of what was priced are added.

    Raises:
        UnsupportedError: the algorithm offers no config for the product.
    """

    def __init__(
        self, entry: Matmul2d, problem: Matmul2dProblem, prices: OpPrices, counts: SearchCounts
    ) -> None:
        self.entry, self.problem, self.counts = entry, problem, counts
        self._prices = prices
        self.configs: Sequence[Matmul2dConfig] = list(entry.candidates(problem))
        if not self.configs:
            raise UnsupportedError(f"{entry.name} offers no configuration for {problem}")
        counts.num_configs += len(self.configs)
        self._timed: dict[int, TimedSkeleton] = {}
        self._exact: dict[int, int] = {}
        self._order = sorted((self._lower_bound_ps(number), number) for number in range(len(self.configs)))
        self._best: tuple[int, int] | None = None

    @property
    def lower_bound_ps(self) -> int:
        """Return the least of the lower bounds, in picoseconds, on the times of all configs."""
        return self._order[0][0]

    def best(self) -> tuple[int, int]:
        """Return (picoseconds, index in `configs`) of the fastest config; of equals the first."""
        if self._best is None:
            self._best = self.ranked(1)[0]
        return self._best

    def ranked(self, count: int) -> list[tuple[int, int]]:
        """Return (picoseconds, index in `configs`) of the `count` fastest configs at most, fastest first."""
        fastest: list[tuple[int, int]] = []
        for floor in self._order:
            if len(fastest) == count and floor > fastest[-1]:
                if floor[0] > fastest[-1][0]:
                    break
                continue
            fastest.append((self._total_ps(floor[1]), floor[1]))
            fastest.sort()
            del fastest[count:]
        return fastest

    def _skeleton(self, number: int) -> TimedSkeleton:
        timed = self._timed.get(number)
        if timed is None:
            self.counts.num_skeletons += 1
            skeleton = self.entry.skeleton(self.problem, self.configs[number])
            timed = self._prices.timed(skeleton)
            if len(skeleton.phases) <= KEPT_PHASES:
                self._timed[number] = timed
        return timed

    def _lower_bound_ps(self, number: int) -> int:
        floor = self.entry.config_lower_bound(self.problem, self.configs[number])
        if floor is not None and self._prices.may_bound(floor):
            return self._prices.timed(floor).total_ps()
        return self._skeleton(number).lower_bound_ps()

    def _total_ps(self, number: int) -> int:
        total = self._exact.get(number)
        if total is None:
            self.counts.num_exact += 1
            total = self._exact[number] = self._skeleton(number).total_ps()
        return total


def finish_search(search: ConfigSearch, machine: Machine) -> TunedProduct:
    """Return the fastest config of a search, with its runner-up."""
    (_, best), *others = search.ranked(2)
    config = search.configs[best]
    exact = estimate_skeleton(search.entry.skeleton(search.problem, config), machine)
    if not others:
        return TunedProduct(search.problem, config, exact)
    total_ps, second = others[0]
    return TunedProduct(search.problem, config, exact, search.configs[second], to_s(total_ps))


def tune_product(entry: Matmul2d, problem: Matmul2dProblem, machine: Machine) -> TunedProduct:
    """Return the fastest config of one product on one mesh, with its estimate and the runner-up.

    All of `entry.candidates` are compared by estimated time. Of equals the first wins, with the fewest slices.

    Args:
        machine: a cluster with a mesh of the problem's shape laid on it (`cost.machine.mesh_machine`).

    Raises:
        UnsupportedError: the algorithm offers nothing for this product, or does not have its dataflow.
        LayoutError: the mesh shapes of problem and machine differ.
    """
    if problem.dataflow not in entry.dataflows:
        known = ", ".join(entry.dataflows)
        raise UnsupportedError(f"{entry.name} has no dataflow {problem.dataflow}; it has {known}")
    if all(mesh.shape != problem.mesh_shape for mesh in machine.meshes):
        shapes = ", ".join("x".join(map(str, mesh.shape)) for mesh in machine.meshes)
        wanted = "x".join(map(str, problem.mesh_shape))
        raise LayoutError(f"the product is for a {wanted} mesh, the machine has {shapes}")
    return finish_search(ConfigSearch(entry, problem, OpPrices(machine), SearchCounts()), machine)
