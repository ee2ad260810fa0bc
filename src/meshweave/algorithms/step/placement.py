"""Lay the ranks of each degree on a cluster, and price their collectives and messages there.

The chips of a cluster are one mesh. A degree of `size` ranks, `stride` chips apart, is an axis of it, and all
groups of an axis communicate at once: those that leave a host share its NICs (`cost.machine`, `cost.libraries`).
A price depends on sizes and strides alone, so on a network of hosts the first hosts stand for the cluster.
On a torus whose axes are not those of the mesh, groups are priced as if their members were neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshweave.algorithms.block.problem import MESH
from meshweave.algorithms.step.problem import Degree, Parallelism, StepProblem
from meshweave.base.units import to_s
from meshweave.cost.machine import Machine
from meshweave.cost.price import price
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.network import HostsNetwork
from meshweave.ir.work import Transfer

Axis = tuple[str, int, int]
"""The name, size and stride of a mesh axis."""


def axis_machine(cluster: Cluster, axes: Sequence[Axis]) -> Machine:
    """Return a machine whose mesh has these axes at their strides, and others between them."""
    chips = _part(cluster, max((size * stride for _, size, stride in axes), default=1))
    shape: list[int] = []
    names: list[str] = []
    inside = 1
    for number, (name, size, stride) in enumerate(sorted(axes, key=lambda axis: (axis[2], -axis[1]))):
        if stride > inside:
            shape.append(stride // inside)
            names.append(f"inside{number}")
        shape.append(size)
        names.append(name)
        inside = max(stride, inside) * size
    if inside < chips.num_chips:
        shape.append(chips.num_chips // inside)
        names.append("outside")
    mesh = Mesh.of(MESH, tuple(reversed(shape)), tuple(reversed(names)))
    return Machine(chips, (mesh,), logical=True)


def machine_of(problem: StepProblem, axes: tuple[Axis, ...]) -> Machine:
    """Return the machine of these axes on the cluster of a problem, one object for all that is priced on it."""
    machines = problem.cache("machines")
    if axes not in machines:
        machines[axes] = axis_machine(problem.priced_cluster, axes)
    machine: Machine = machines[axes]
    return machine


def _part(cluster: Cluster, num_chips: int) -> Cluster:
    """Return the first hosts of a cluster with `num_chips` chips; the cluster where these are no whole hosts."""
    network = cluster.network
    if not isinstance(network, HostsNetwork) or num_chips >= cluster.num_chips:
        return cluster
    chips = max(num_chips, network.chips_per_host)
    return cluster if chips % network.chips_per_host else cluster.with_chips(chips)


def block_axes(parallelism: Parallelism) -> tuple[Axis, ...]:
    """Return the axes of a layer's mesh: tensor parallelism as rows and columns, context as depth."""
    rows, columns = parallelism.tensor_mesh
    stride = parallelism.stride("tensor")
    axes: tuple[Axis, ...] = (("row", rows, stride * columns), ("col", columns, stride))
    if parallelism.context > 1:
        axes = (("depth", parallelism.context, parallelism.stride("context")), *axes)
    return axes


def replica_groups(parallelism: Parallelism) -> tuple[tuple[int, int], ...]:
    """Return (size, stride) of the groups with equal weights: data and context, one group if adjacent."""
    degrees: tuple[Degree, ...] = ("context", "data")
    order = sorted(degrees, key=parallelism.stride)
    groups = [
        (parallelism.size(each), parallelism.stride(each)) for each in order if parallelism.size(each) > 1
    ]
    if len(groups) == 2 and groups[0][0] * groups[0][1] == groups[1][1]:
        return ((groups[0][0] * groups[1][0], groups[0][1]),)
    return tuple(groups)


def sharding_groups(
    parallelism: Parallelism,
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """Return the groups over which ZeRO shards, and those of copies of a shard."""
    left = parallelism.shards
    shards: list[tuple[int, int]] = []
    copies: list[tuple[int, int]] = []
    for size, stride in replica_groups(parallelism):
        inside = math.gcd(left, size)
        left //= inside
        if inside > 1:
            shards.append((inside, stride))
        if inside < size:
            copies.append((size // inside, stride * inside))
    return tuple(shards), tuple(copies)


def boundary_s(
    problem: StepProblem, parallelism: Parallelism, num_bytes: int, is_whole: bool
) -> tuple[float, bool]:
    """Return the seconds of sending a micro-batch's residual to the next pipeline rank, and whether in parts.

    A residual that every tensor-parallel rank has whole (`is_whole`) is sent in parts and gathered by the
    receivers, if that is faster (Narayanan et al., SC '21, section 4.1).
    """
    size, stride = parallelism.pipeline, parallelism.stride("pipeline")
    sent_s = message_s(problem, size, stride, num_bytes)
    tensor = parallelism.tensor_size
    if not is_whole or tensor == 1:
        return sent_s, False
    gathered_s = collective_s(problem, "all_gather", ((tensor, parallelism.stride("tensor")),), num_bytes)
    in_parts_s = message_s(problem, size, stride, -(-num_bytes // tensor)) + gathered_s
    return min(sent_s, in_parts_s), in_parts_s < sent_s


def collective_s(problem: StepProblem, kind: str, groups: Sequence[tuple[int, int]], num_bytes: int) -> float:
    """Return the seconds of a collective over ranks with equal weights, one group of axes after the other.

    Args:
        kind: "all_reduce", "reduce_scatter" or "all_gather".
        groups: (size, stride) of each.
        num_bytes: of the whole tensor on a rank.
    """
    known = problem.cache("collectives")
    key = kind, tuple(groups), num_bytes
    if key not in known:
        total, left = 0.0, num_bytes
        for size, stride in groups:
            part = left if kind == "all_reduce" else -(-left // size)
            total += _transfer_s(problem, Transfer(kind, f"{MESH}.row", size, part), stride)
            left = left if kind == "all_reduce" else part
        known[key] = total
    return float(known[key])


def message_s(problem: StepProblem, size: int, stride: int, num_bytes: int) -> float:
    """Return the seconds of a message to a neighbour of a degree, which all ranks send at once."""
    known = problem.cache("messages")
    key = size, stride, num_bytes
    if key not in known:
        known[key] = _transfer_s(problem, Transfer("permute", f"{MESH}.row", size, num_bytes), stride)
    return float(known[key])


def _transfer_s(problem: StepProblem, work: Transfer, stride: int) -> float:
    return to_s(price(work, machine_of(problem, (("row", work.num_ranks, stride),))).total_ps)
