"""One planner for any problem: every algorithm that solves it, every config, ranked by estimated time.

The contract of algorithms is enough for this search: it prices every candidate. `simulate_best` then simulates
the first few with contention. The planner of whole models (`search`) gets the same ranking faster, by lower
bounds, and `blocks` ranks a block over all meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from meshweave.algorithms.contract import Algorithm
from meshweave.algorithms.table import algorithm, algorithms_for
from meshweave.base.errors import UnsupportedError
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import Cluster
from meshweave.estimate import Estimate
from meshweave.ir.program import Program
from meshweave.simulate import simulate


@dataclass(frozen=True)
class RankedConfig:
    """One config of one algorithm for a problem, with its estimated time on a cluster.

    Attributes:
        simulated: seconds with contention, and those of them in which the first rank runs no product and no call;
            None where it was not simulated.
    """

    algorithm: Algorithm[Any, Any]
    problem: Hashable
    config: Any
    estimate: Estimate
    simulated: tuple[float, float] | None = None

    @property
    def seconds(self) -> float:
        """Return the simulated seconds, or else the estimated ones."""
        return self.simulated[0] if self.simulated else self.estimate.total_s

    @property
    def exposed_s(self) -> float:
        """Return the seconds in which neither products nor calls run, simulated or else estimated."""
        return self.simulated[1] if self.simulated else self.estimate.exposed_s

    @cached_property
    def program(self) -> Program:
        """Return the program."""
        return self.algorithm.program(self.problem, self.config)

    @cached_property
    def traffic_bytes(self) -> dict[str, int]:
        """Return the bytes that the first rank moves, by mesh axis."""
        return self.algorithm.traffic(self.problem, self.config, self.program.ranks[0])

    @cached_property
    def peak_bytes(self) -> int:
        """Return the most bytes that the first rank holds at once."""
        return self.algorithm.peak_bytes(self.problem, self.config, self.program.ranks[0])


def machine_for(entry: Algorithm[Any, Any], problem: Hashable, config: Any, cluster: Cluster) -> Machine:
    """Return the cluster with the meshes of a config's program laid on it.

    A mesh that is no part of the torus becomes a logical mesh, whose neighbours may be several hops apart.
    """
    return Machine.of(cluster, entry.program(problem, config), logical=True)


def solvers(problem: Hashable, names: Sequence[str] | None = None) -> dict[str, Algorithm[Any, Any]]:
    """Return the algorithms that solve a problem, all or those named.

    Raises:
        UnsupportedError: a name is unknown, or a named algorithm refuses the problem.
    """
    entries = algorithms_for(problem)
    if names is not None:
        refused = [algorithm(name) for name in names if name not in entries]
        if refused:
            raise UnsupportedError(
                f"{refused[0].name} does not solve this problem{_refusal_text(refused[0], problem)}"
            )
        entries = {name: entries[name] for name in names}
    return entries


def rank(
    problem: Hashable,
    cluster: Cluster,
    *,
    algorithms: Sequence[str] | None = None,
    max_configs: int = 1000,
    progress: Callable[[int], None] = lambda count: None,
) -> list[RankedConfig]:
    """Return the configs of a problem, the fastest by estimate first. Equally fast ones stay in candidate order.

    Args:
        problem: a problem of any family.
        algorithms: names to choose among; None takes all that solve the problem.
        max_configs: the most configs to price of each algorithm, its first candidates.
        progress: called with the number of configs priced so far.

    Raises:
        UnsupportedError: a name is unknown, a named algorithm refuses the problem, or all algorithms refuse it.
    """
    entries = solvers(problem, algorithms)
    ranked = []
    for entry in entries.values():
        machine = None
        for number, config in enumerate(entry.candidates(problem, cluster)):
            if number == max_configs:
                break
            if machine is None:
                machine = machine_for(entry, problem, config, cluster)
            ranked.append(RankedConfig(entry, problem, config, entry.estimate(problem, config, machine)))
            progress(len(ranked))
    if not ranked:
        raise UnsupportedError(f"no algorithm solves a {type(problem).__name__} like this one")
    return sorted(ranked, key=lambda config: config.estimate.total_s)


def simulate_best(
    ranked: Sequence[RankedConfig],
    cluster: Cluster,
    count: int,
    progress: Callable[[int], None] = lambda count: None,
) -> list[RankedConfig]:
    """Return the configs with the first `count` simulated, these the fastest first, and the others after them.

    Raises UnsupportedError where the machine cannot place a group.
    """
    simulated = []
    for number, config in enumerate(ranked[:count]):
        simulated.append(simulated_config(config, cluster))
        progress(number + 1)
    return [*sorted(simulated, key=lambda config: config.seconds), *ranked[count:]]


def simulated_config(config: RankedConfig, cluster: Cluster) -> RankedConfig:
    """Return a config with the simulated seconds of its program, contention included."""
    machine = machine_for(config.algorithm, config.problem, config.config, cluster)
    trace = simulate(config.program, machine)
    return replace(config, simulated=(trace.duration_s, trace.exposed_s(config.program.ranks[0])))


def _refusal_text(entry: Algorithm[Any, Any], problem: Hashable) -> str:
    if not isinstance(problem, entry.problem_type):
        return f": it solves a {entry.problem_type.__name__}, not a {type(problem).__name__}"
    return f": {entry.refusal(problem)}"
