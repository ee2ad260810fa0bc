"""One planner for any problem: every algorithm that solves it, every config, ranked by estimated time.

This is the plain search that the contract of algorithms allows. The planner of whole models (`search`) prunes the
same ranking with lower bounds, and `universal` settles partial sums in turns; both choose configs that this one
would rank.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from meshweave.algorithms.contract import Algorithm
from meshweave.algorithms.table import algorithm, solving
from meshweave.base.errors import UnsupportedError
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import Cluster
from meshweave.estimate import Estimate
from meshweave.ir.program import Program


@dataclass(frozen=True)
class RankedConfig:
    """One config of one algorithm for a problem, with its estimated time on a cluster."""

    algorithm: Algorithm[Any, Any]
    problem: Hashable
    config: Any
    estimate: Estimate

    @property
    def program(self) -> Program:
        """Return the program, which is written anew at each call."""
        return self.algorithm.program(self.problem, self.config)

    @property
    def traffic_bytes(self) -> dict[str, int]:
        """Return the bytes that rank 0 moves, by mesh axis."""
        return self.algorithm.traffic(self.problem, self.config, self.program.ranks[0])

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes that the first rank holds at once."""
        return self.algorithm.peak_bytes(self.problem, self.config, self.program.ranks[0])


def machine_for(entry: Algorithm[Any, Any], problem: Hashable, config: Any, cluster: Cluster) -> Machine:
    """Return the cluster with the meshes of a program laid on it, logical ones where a torus does not form them."""
    return Machine.of(cluster, entry.program(problem, config), logical=True)


def rank_configs(
    problem: Hashable,
    cluster: Cluster,
    *,
    algorithms: Sequence[str] | None = None,
    most: int = 1000,
    progress: Callable[[int], None] = lambda count: None,
) -> list[RankedConfig]:
    """Return the configs of a problem, the fastest first; of equals the one listed first.

    Args:
        problem: a problem of any family.
        algorithms: names to choose among; None takes all that solve the problem.
        most: at most so many configs of each algorithm are priced, in the order in which it lists them.
        progress: is called with the number of configs priced so far.

    Raises:
        UnsupportedError: a name is unknown, or an algorithm that was asked for, or every one, refuses the problem.
    """
    entries = solving(problem)
    if algorithms is not None:
        refused = [algorithm(name) for name in algorithms if name not in entries]
        if refused:
            raise UnsupportedError(
                f"{refused[0].name} does not solve this problem{_reason(refused[0], problem)}"
            )
        entries = {name: entries[name] for name in algorithms}
    ranked = []
    for entry in entries.values():
        machine = None
        for number, config in enumerate(entry.candidates(problem, cluster)):
            if number == most:
                break
            if machine is None:
                machine = machine_for(entry, problem, config, cluster)
            ranked.append(RankedConfig(entry, problem, config, entry.estimate(problem, config, machine)))
            progress(len(ranked))
    if not ranked:
        raise UnsupportedError(f"no algorithm solves a {type(problem).__name__} like this one")
    return sorted(ranked, key=lambda one: one.estimate.total_s)


def _reason(entry: Algorithm[Any, Any], problem: Hashable) -> str:
    if not isinstance(problem, entry.problem_type):
        return f": it solves a {entry.problem_type.__name__}, not a {type(problem).__name__}"
    return f": {entry.refusal(problem)}"
