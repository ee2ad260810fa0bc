"""One planner for any problem: every algorithm that solves it, ranked by estimated time.

The contract of algorithms is enough for this search. It prices every candidate; where an algorithm divides its
candidates into parts with lower bounds, as a training step does, it goes best first and prices few (`best_first`).
`simulate_best` then simulates the first few with contention. The planner of the products of a model (`search`)
gets the same ranking faster.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from meshweave.algorithms.contract import Algorithm
from meshweave.algorithms.table import algorithm, algorithms_for
from meshweave.base.errors import BindError, UnsupportedError, require_whole
from meshweave.base.limits import SIMULATED_OPS
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import Cluster, described
from meshweave.simulate import simulate
from meshweave.tune.best_first import BestFirst
from meshweave.tune.ranked import RankedConfig, num_ops


def solvers(problem: Hashable, names: Sequence[str] | None = None) -> dict[str, Algorithm[Any, Any]]:
    """Return by name the algorithms that solve a problem: all, or those of `names`.

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
    cluster: Cluster | str | Path,
    *,
    algorithms: Sequence[str] | None = None,
    max_configs: int = 1000,
    num_exact: int = 2,
    progress: Callable[[int], None] = lambda count: None,
) -> list[RankedConfig]:
    """Return the configs of a problem, the fastest by estimate first. Equally fast ones stay in candidate order.

    Of an algorithm that divides its candidates into parts these are the best of each row (`Algorithm.row`) that
    were priced; no other is faster than the first `num_exact`. Ctrl-C ends the search of such an algorithm with
    the best so far, once there is one.

    Args:
        problem: a problem of any family.
        cluster: a cluster, or its name or file.
        algorithms: names to choose among; None takes all that solve the problem.
        max_configs: the most configs to price of each algorithm whose candidates are priced one by one; those
            after them are left out.
        num_exact: how many of the first rows no config that was not priced may be faster than; see above.
        progress: called with the number of configs priced so far.

    Raises:
        UnsupportedError: a name is unknown, a named algorithm refuses the problem, or all algorithms refuse it.
    """
    cluster = described(cluster)
    max_configs = require_whole(max_configs, "max_configs", BindError)
    num_exact = require_whole(num_exact, "num_exact", BindError)
    ranked: list[RankedConfig] = []
    priced = 0
    for entry in solvers(problem, algorithms).values():
        parts = entry.branches(problem)
        if parts is not None:
            bare = Machine(cluster, (), logical=True)  # such an entry says itself where ranks lie
            search = BestFirst(entry, problem, bare, num_exact)
            search.progress = lambda *_, before=priced, of=search: progress(before + of.num_priced)
            search.run(parts)
            ranked += search.ranked()
            priced += search.num_priced
            continue
        machine = None
        for config in islice(entry.candidates(problem, cluster), max_configs):
            if machine is None:
                machine = entry.machine(problem, config, cluster)
            ranked.append(RankedConfig(entry, problem, config, entry.estimate(problem, config, machine)))
            priced += 1
            progress(priced)
    if not ranked:
        raise UnsupportedError(f"no algorithm solves a {type(problem).__name__} like this one")
    return sorted(ranked, key=lambda config: config.estimate.total_s)


def simulate_best(
    ranked: Sequence[RankedConfig],
    cluster: Cluster,
    count: int,
    progress: Callable[[int], None] = lambda count: None,
) -> list[RankedConfig]:
    """Return `ranked` with its first `count` configs simulated and sorted by simulated time; the others follow.

    Args:
        cluster: the machine that they are simulated on.
        progress: called with the number of configs simulated so far.

    Raises:
        UnsupportedError: one of the programs has more ops than `base.limits.SIMULATED_OPS`, so that none is
            simulated; or a machine has no meshes.
    """
    for config in ranked[:count]:
        if (ops := num_ops(config.program)) > SIMULATED_OPS.most:
            raise UnsupportedError(
                f"the program of {config.algorithm.name}, {config.config}, {SIMULATED_OPS.refusal(ops)} that are "
                "simulated here; use estimates, or fewer chips"
            )
    simulated = []
    for number, config in enumerate(ranked[:count]):
        simulated.append(simulated_config(config, cluster))
        progress(number + 1)
    return [*sorted(simulated, key=lambda config: config.seconds), *ranked[count:]]


def simulated_config(config: RankedConfig, cluster: Cluster) -> RankedConfig:
    """Return the config with `simulated` set: its program is simulated on `cluster`, with contention."""
    machine = config.algorithm.machine(config.problem, config.config, cluster)
    trace = simulate(config.program, machine)
    return replace(config, simulated=(trace.duration_s, trace.exposed_s(config.program.ranks[0])))


def _refusal_text(entry: Algorithm[Any, Any], problem: Hashable) -> str:
    if not isinstance(problem, entry.problem_type):
        return f": it solves a {entry.problem_type.__name__}, not a {type(problem).__name__}"
    return f": {entry.refusal(problem)}"
