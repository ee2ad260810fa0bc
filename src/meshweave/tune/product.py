"""One product on one mesh: the fastest of an algorithm's configurations, by branch and bound.

Every configuration first gets a lower bound: what its longest lane has to do. In the order of these bounds
they are then followed exactly, until a bound shows that no later one can win. The answer is that of trying all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshweave.algorithms.matmul2d import Config, Matmul2d, MatmulProblem
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.base.units import to_s
from meshweave.cost.machine import Machine
from meshweave.cost.price import price
from meshweave.estimate import Estimate, TimedSkeleton, estimate
from meshweave.ir.work import Work

KEPT_PHASES = 8
"""Skeletons of more phases are built again when needed, instead of being kept for all mesh shapes."""


class Prices(dict[Work, int]):
    """Picoseconds of ops on a machine, each asked for once. `machine` stands for all with the same axes."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __missing__(self, work: Work) -> int:
        found = self[work] = price(work, self.machine).total_ps
        return found


@dataclass
class Tally:
    """How many configurations a search had to choose from, how many skeletons it built (again), and how many
    it followed exactly."""

    configurations: int = 0
    built: int = 0
    followed: int = 0


@dataclass(frozen=True)
class Tuned:
    """A product at its best configuration. `runner_up` is the next best one, which takes `runner_up_s` seconds;
    None where there is no choice."""

    problem: MatmulProblem
    config: Config
    estimate: Estimate
    runner_up: Config | None = None
    runner_up_s: float = 0.0

    @property
    def why(self) -> str:
        """What the choice gains, as in "S=6 is 0.8 % slower"."""
        if self.runner_up is None:
            return ""
        other = str(self.runner_up)
        if self.runner_up.overlap != self.config.overlap:
            other += f" hiding {self.runner_up.overlap}s"
        return f"{other} is {100 * (self.runner_up_s / self.estimate.total_s - 1):.1f} % slower"


class Choices:
    """The configurations of one product on one machine, looked at no further than needed."""

    def __init__(self, entry: Matmul2d, problem: MatmulProblem, prices: Prices, tally: Tally) -> None:
        self.entry, self.problem, self.tally = entry, problem, tally
        self._cost_ps: Callable[[Work], int] = prices.__getitem__
        self.configs: Sequence[Config] = list(entry.candidates(problem))
        if not self.configs:
            raise UnsupportedError(f"{entry.name} offers no configuration for {problem}")
        tally.configurations += len(self.configs)
        self._timed: dict[int, TimedSkeleton] = {}
        self._exact: dict[int, int] = {}
        self._order = sorted((self._floor_ps(number), number) for number in range(len(self.configs)))
        self._best: tuple[int, int] | None = None

    @property
    def floor_ps(self) -> int:
        """No configuration takes less."""
        return self._order[0][0]

    def best(self) -> tuple[int, int]:
        """Picoseconds and number of the fastest configuration; of equals the first."""
        if self._best is None:
            self._best = self.ranked(1)[0]
        return self._best

    def ranked(self, count: int) -> list[tuple[int, int]]:
        """(picoseconds, number) of the `count` fastest configurations, or of as many as there are."""
        found: list[tuple[int, int]] = []
        for floor in self._order:
            if len(found) == count and floor > found[-1]:
                if floor[0] > found[-1][0]:
                    break
                continue
            found.append((self._total_ps(floor[1]), floor[1]))
            found.sort()
            del found[count:]
        return found

    def _skeleton(self, number: int) -> TimedSkeleton:
        timed = self._timed.get(number)
        if timed is None:
            self.tally.built += 1
            skeleton = self.entry.skeleton(self.problem, self.configs[number])
            timed = TimedSkeleton(skeleton, self._cost_ps)
            if len(skeleton.phases) <= KEPT_PHASES:
                self._timed[number] = timed
        return timed

    def _floor_ps(self, number: int) -> int:
        floor = self.entry.floor(self.problem, self.configs[number])
        if floor is not None:
            return TimedSkeleton(floor, self._cost_ps).total_ps()
        return self._skeleton(number).floor_ps()

    def _total_ps(self, number: int) -> int:
        total = self._exact.get(number)
        if total is None:
            self.tally.followed += 1
            total = self._exact[number] = self._skeleton(number).total_ps()
        return total


def tune_choices(choices: Choices, machine: Machine) -> Tuned:
    """The fastest of the choices, with its runner-up."""
    (_, best), *others = choices.ranked(2)
    config = choices.configs[best]
    exact = estimate(choices.entry.skeleton(choices.problem, config), machine)
    if not others:
        return Tuned(choices.problem, config, exact)
    total_ps, second = others[0]
    return Tuned(choices.problem, config, exact, choices.configs[second], to_s(total_ps))


def tune_product(entry: Matmul2d, problem: MatmulProblem, machine: Machine) -> Tuned:
    """The fastest configuration of one product on one mesh.

    `entry` is an entry of the table of algorithms, `problem` gives M, N, K, the dataflow, the element type and
    the mesh shape, (rows, columns) or (rows, columns, depth), and `machine` a cluster with a mesh of that
    shape laid on it (`mesh_machine`). All that `entry.configs` offers is compared, by estimated time; of
    configurations that take the same time the first one offered wins, which is the one with fewest slices.
    The result holds the configuration, its estimate in seconds and the runner-up.

    Raises UnsupportedError where the algorithm offers nothing for this product or does not know its dataflow,
    LayoutError where mesh shapes of problem and machine differ.
    """
    if problem.dataflow not in entry.dataflows:
        known = ", ".join(entry.dataflows)
        raise UnsupportedError(f"{entry.name} has no dataflow {problem.dataflow}; it has {known}")
    if all(mesh.shape != problem.mesh_shape for mesh in machine.meshes):
        shapes = ", ".join("x".join(map(str, mesh.shape)) for mesh in machine.meshes)
        wanted = "x".join(map(str, problem.mesh_shape))
        raise LayoutError(f"the product is for a {wanted} mesh, the machine has {shapes}")
    return tune_choices(Choices(entry, problem, Prices(machine), Tally()), machine)
