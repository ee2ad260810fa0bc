"""Every algorithm and PyTorch's DTensor on the same operands, on real sockets, against bounds and theory.

All rivals run interleaved in one set of processes, so that they meet the same machine. Compute is paced: this
measures fidelity of schedules, not of this machine's products. Three yardsticks stand beside each time: the
bound max(compute, bytes per axis / rate), the algorithm's own theory without latency (its skeleton at link
rate), and its estimate with the constants of the described cluster.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from meshweave.algorithms.matmul import ALGORITHMS, Algorithm, Config, MatmulProblem
from meshweave.algorithms.matmul.problem import AXES, MESH
from meshweave.cost.machine import Machine, mesh_machine
from meshweave.describe.cluster import Cluster, NetworkAxis, Ring, Switch, Torus
from meshweave.errors import UnsupportedError
from meshweave.estimate import estimate
from meshweave.ir.text import to_text
from meshweave.lab.lab import RunningLab
from meshweave.lower import lower_chains, lower_rings
from meshweave.tune.product import tune_product

SAME = {"a": ["S0", "S1"], "b": ["S0", "S1"], "c": ["S0", "S1"]}
BEST = {
    "os": {"a": ["S0", "R"], "b": ["R", "S1"], "c": ["S0", "S1"]},
    "ls": {"a": ["S0", "S1"], "b": ["R", "S1"], "c": ["S0", "R"]},
    "rs": {"a": ["S0", "R"], "b": ["S0", "S1"], "c": ["R", "S1"]},
}
"""Placements under which DTensor need not gather: its inputs are replicated beforehand, at no cost here. A lower
bound of what DTensor could reach, not a rival on the same shards."""


@dataclass(frozen=True)
class Case:
    """One rival: an algorithm with a configuration and ring directions (0: gloo's own collectives), or DTensor."""

    name: str
    algorithm: str = ""
    config: Config = field(default_factory=Config)
    rings: int = 0


@dataclass(frozen=True)
class Result:
    """Seconds: median, fastest and slowest run; the yardsticks are None for DTensor, whose theory is not ours."""

    name: str
    median_s: float
    fastest_s: float
    slowest_s: float
    bound_s: float
    theory_s: float | None
    error: float

    @property
    def over_bound(self) -> float:
        return self.median_s / self.bound_s

    @property
    def over_theory(self) -> float | None:
        return None if self.theory_s is None else self.median_s / self.theory_s

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "over_bound": self.over_bound, "over_theory": self.over_theory}


def ideal(cluster: Cluster, flops_per_s: float) -> Cluster:
    """The cluster without latency, launch cost or copy time: links at their rate, products at the pace."""
    chip = replace(cluster.chip, effective_flops_per_s=flops_per_s, memory_bytes_per_s=1e15, launch_s=0.0)
    network = cluster.network
    if isinstance(network, Torus):
        network = replace(network, axes=tuple(_plain(axis) for axis in network.axes))
    elif isinstance(network, (Ring, Switch)):
        network = replace(network, link=_plain(network.link))
    return replace(cluster, chip=chip, network=network)


def _plain(axis: NetworkAxis) -> NetworkAxis:
    return replace(axis, link_latency_s=0.0, launch_s=0.0, constants=())


def bound_s(problem: MatmulProblem, machine: Machine) -> float:
    """max(compute, bytes per axis / rate): no 2D algorithm with these shards is faster."""
    compute = problem.flops / problem.num_chips / machine.cluster.chip.effective_flops_per_s
    moved = problem.traffic_bytes(0)
    return max(compute, *(amount / machine.rate(axis, "all_gather") for axis, amount in moved.items()), 0.0)


def balanced_flops_per_s(problem: MatmulProblem, cluster: Cluster, ratio: float) -> float:
    """The pace at which compute takes `ratio` times the slower axis' communication."""
    machine = mesh_machine(ideal(cluster, 1.0), problem.mesh_shape, AXES[:2], MESH)
    moved = problem.traffic_bytes(0)
    communication_s = max(amount / machine.rate(axis, "all_gather") for axis, amount in moved.items())
    return problem.flops / problem.num_chips / (ratio * communication_s)


def cases(
    problem: MatmulProblem, cluster: Cluster, names: Sequence[str], slices: Sequence[int] = ()
) -> list[Case]:
    """Each algorithm at its best by estimate on `cluster` (MeshSlice also at the given slice counts), Collective
    on gloo's own collectives, and DTensor with the same placements and with replicated inputs.

    Algorithms that cannot use the mesh are left out.
    """
    machine = mesh_machine(cluster, problem.mesh_shape, AXES[:2], MESH)
    ways = 2 if max(problem.mesh_shape) > 2 else 1
    out = []
    for name in names:
        entry = ALGORITHMS[name]
        if (
            problem.mesh_shape not in entry.meshes(problem.num_chips)
            or problem.dataflow not in entry.dataflows
        ):
            continue
        best = tune_product(entry, problem, machine).config
        out.append(Case(f"{name} {best}" if best.slice_count > 1 else name, name, best, ways))
    out += [Case(f"meshslice S={s}", "meshslice", Config((1,) * s), ways) for s in slices]
    out.append(Case("collective, gloo's own", "collective"))
    return [*out, Case("DTensor, same placements"), Case("DTensor, inputs replicated")]


def bench(
    lab: RunningLab,
    problem: MatmulProblem,
    rivals: Sequence[Case],
    *,
    flops_per_s: float,
    repeat: int = 5,
    seed: int = 0,
    timeout_s: float = 600.0,
) -> tuple[list[Result], list[dict[str, Any]]]:
    """Runs all rivals on a lab that is up; returns results in the given order and the ranks' pace reports.

    `flops_per_s` paces products; 0 leaves them unpaced. Raises what `RunningLab.launch` raises.
    """
    if problem.num_chips != lab.num_ranks:
        raise UnsupportedError(f"a mesh of {problem.num_chips} ranks on a lab of {lab.num_ranks}")
    payload = {
        "problem": [problem.m, problem.n, problem.k, list(problem.mesh_shape), problem.dataflow],
        "cases": [_payload(case, problem) for case in rivals],
        "repeat": repeat,
        "seed": seed,
        "flops_per_s": flops_per_s,
        "deadline_s": timeout_s,
    }
    ranks = lab.launch("meshweave.lab.bench_rank:bench_matmul", payload, timeout_s=timeout_s)
    cluster = ideal(lab.description.cluster(), flops_per_s or 1e15)
    machine = mesh_machine(cluster, problem.mesh_shape, AXES[:2], MESH)
    results = []
    for number, case in enumerate(rivals):
        runs = list(zip(*(rank["times"][number] for rank in ranks), strict=True))
        spans = [max(end for _, end in run) - min(start for start, _ in run) for run in runs]
        theory = None
        if case.algorithm:
            skeleton = ALGORITHMS[case.algorithm].skeleton(problem, case.config)
            theory = estimate(skeleton, machine).total_s
        results.append(
            Result(
                case.name,
                statistics.median(spans),
                min(spans),
                max(spans),
                bound_s(problem, machine),
                theory,
                max(rank["errors"][number] for rank in ranks),
            )
        )
    return results, [rank["pace"] for rank in ranks]


def _payload(case: Case, problem: MatmulProblem) -> dict[str, Any]:
    if not case.algorithm:
        return {"name": case.name, "dtensor": SAME if "same" in case.name else BEST[problem.dataflow]}
    entry: Algorithm = ALGORITHMS[case.algorithm]
    program = entry.program(problem, case.config)
    if case.rings:
        program = lower_chains(lower_rings(program, 1 if case.rings == 1 else 2))
    return {"name": case.name, "program": to_text(program)}
