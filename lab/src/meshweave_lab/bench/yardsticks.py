"""Yardsticks for measured products: the bound by the links' rates, and the pace that balances compute with
them.
"""

from __future__ import annotations

from dataclasses import replace

from meshweave.algorithms.matmul2d import Matmul2dProblem
from meshweave.algorithms.matmul2d.common.problem import AXES, MESH
from meshweave.cost.machine import Machine, mesh_machine
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.links import NetworkAxis
from meshweave.describe.machine.network import with_axes

UNPACED_FLOPS_PER_S = 1e15
"""The rate of products that take no time to speak of."""


def ideal_cluster(cluster: Cluster, flops_per_s: float) -> Cluster:
    """Return the cluster without latency, launch cost or copy time: links at their rate, products at
    `flops_per_s`.
    """
    chip = replace(cluster.chip.with_flops_per_s(flops_per_s), memory_bytes_per_s=1e15, launch_s=0.0)
    return replace(cluster, chip=chip, network=with_axes(cluster.network, _without_latency))


def _without_latency(axis: NetworkAxis) -> NetworkAxis:
    return replace(axis, link_latency_s=0.0, launch_s=0.0, constants=())


def with_pace(cluster: Cluster, flops_per_s: float) -> Cluster:
    """Return the cluster with products at `flops_per_s` and all else unchanged; 0 keeps the cluster's own rate."""
    if not flops_per_s:
        return cluster
    return replace(cluster, chip=cluster.chip.with_flops_per_s(flops_per_s))


def matmul_machine(cluster: Cluster, problem: Matmul2dProblem) -> Machine:
    """Return the machine with the problem's mesh on the cluster. Raises LayoutError where it does not fit."""
    return mesh_machine(cluster, problem.mesh_shape, AXES[: len(problem.mesh_shape)], MESH)


def bound_s(problem: Matmul2dProblem, machine: Machine) -> float:
    """Return max(compute, bytes per axis / rate) in seconds: no 2D algorithm with these shards is faster."""
    compute = problem.flops / problem.num_chips / machine.cluster.chip.effective_flops_per_s
    return max(compute, _communication_s(problem, machine))


def _communication_s(problem: Matmul2dProblem, machine: Machine) -> float:
    """Return the seconds of the bytes along the slower axis, whose groups all communicate at once."""
    moved = problem.traffic_bytes(0)
    seconds = (amount / machine.rate(axis, "all_gather", shared=True) for axis, amount in moved.items())
    return max(seconds, default=0.0)


def balanced_flops_per_s(problem: Matmul2dProblem, cluster: Cluster, ratio: float) -> float:
    """Return the pace at which compute takes `ratio` times as long as communication along the slower axis."""
    machine = matmul_machine(ideal_cluster(cluster, 1.0), problem)
    return problem.flops / problem.num_chips / (ratio * _communication_s(problem, machine))
