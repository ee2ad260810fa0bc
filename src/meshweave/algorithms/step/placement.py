"""Lay the ranks of each degree on a cluster, and price their collectives and messages there.

The chips of a cluster are one mesh. A degree of `size` ranks, `stride` chips apart, is an axis of it, and all
groups of an axis communicate at once: those that leave a host share its NICs (`cost.machine`, `cost.libraries`).
A price depends on sizes and strides alone, so on a network of hosts the first hosts stand for the cluster: those
after which groups lie on hosts as they did before.
A torus has the shape nearest to a cube, and messages of several hops share its links (`Machine.flows`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from meshweave.algorithms.block.nodes.experts import MESH_OF_EXPERTS
from meshweave.algorithms.block.problem import MESH
from meshweave.algorithms.step.problem import Degree, Parallelism, StepProblem
from meshweave.base.errors import LayoutError
from meshweave.base.units import to_s
from meshweave.cost.machine import Machine
from meshweave.cost.price import price
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.levels import level_sizes
from meshweave.describe.machine.network import HostsNetwork, TorusNetwork
from meshweave.ir.work import Transfer

Axis = tuple[str, int, int]
"""The name, size and stride of a mesh axis."""
Groups = tuple[tuple[int, int], ...]
"""(Number of ranks, chips between neighbours) of groups of ranks, the innermost first."""


def axis_machine(cluster: Cluster, axes: Sequence[Axis], expert_axes: Sequence[Axis] = ()) -> Machine:
    """Return a machine whose mesh has the axes `axes`, (name, size, stride in chips) each, on hosts of a cluster.

    Only the first hosts are taken, as few as whole groups of all axes fill. The mesh has further axes, "inside..."
    and "outside", for the chips between and beside the groups.

    Args:
        expert_axes: axes of a second mesh over the same chips, for experts; () for none.
    """
    chips = _part(cluster, math.lcm(*(size * stride for _, size, stride in (*axes, *expert_axes))))
    meshes = [_mesh(MESH, axes, chips.num_chips)]
    if expert_axes:
        meshes.append(_mesh(MESH_OF_EXPERTS, expert_axes, chips.num_chips))
    return Machine(chips, tuple(meshes), logical=True)


def _mesh(mesh_name: str, axes: Sequence[Axis], num_chips: int) -> Mesh:
    """Return a mesh with these axes at their strides, and others between and outside of them."""
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
    if inside < num_chips:
        shape.append(num_chips // inside)
        names.append("outside")
    return Mesh.of(mesh_name, tuple(reversed(shape)), tuple(reversed(names)))


def machine_of(problem: StepProblem, axes: tuple[Axis, ...], expert_axes: tuple[Axis, ...] = ()) -> Machine:
    """Return `axis_machine` of these axes on a problem's `priced_cluster`, cached in the problem."""
    key = axes, expert_axes
    return problem.once("machines", key, lambda: axis_machine(problem.priced_cluster, axes, expert_axes))


def _part(cluster: Cluster, block: int) -> Cluster:
    """Return the first hosts of a cluster that blocks of so many chips fill; the cluster where no part does.

    Groups of a block that is no part of a host cross hosts, each elsewhere, and the slowest sets the pace of all.
    """
    network = cluster.network
    if isinstance(network, TorusNetwork):  # in the shape in which a step is simulated
        return replace(cluster, network=replace(network, shape=network.cube, reconfigurable=False))
    if not isinstance(network, HostsNetwork):
        return cluster
    chips = math.lcm(block, network.chips_per_host)
    return cluster if chips >= cluster.num_chips else cluster.with_chips(chips)


def block_axes(parallelism: Parallelism) -> tuple[Axis, ...]:
    """Return (name, size, stride in chips) of each axis of a layer's mesh, the outermost first.

    They are "depth" for context ranks, where there are several, and "row" and "col" for tensor ranks.
    """
    rows, columns = parallelism.tensor_mesh
    stride = parallelism.stride("tensor")
    axes: tuple[Axis, ...] = (("row", rows, stride * columns), ("col", columns, stride))
    if parallelism.context > 1:
        axes = (("depth", parallelism.context, parallelism.stride("context")), *axes)
    return axes


def replica_groups(parallelism: Parallelism) -> tuple[tuple[int, int], ...]:
    """Return (size, stride in chips) of each kind of group of ranks with equal weights, innermost first.

    These are groups of data ranks and of context ranks. They make one group where the inner one's ranks fill the
    stride of the outer one: context 2 at stride 1 and data 4 at stride 2 give ((8, 1),). A degree of 1 has no
    group.
    """
    degrees: tuple[Degree, ...] = ("context", "data")
    order = sorted(degrees, key=parallelism.stride)
    groups = [
        (parallelism.size(each), parallelism.stride(each)) for each in order if parallelism.size(each) > 1
    ]
    if len(groups) == 2 and groups[0][0] * groups[0][1] == groups[1][1]:
        return ((groups[0][0] * groups[1][0], groups[0][1]),)
    return tuple(groups)


@lru_cache(maxsize=8192)
def expert_axes(parallelism: Parallelism) -> tuple[Axis, ...]:
    """Return (name, size, stride in chips) of each axis of the ranks among which experts are divided.

    They are "tensor" for ranks that shard one expert, innermost, and "rank" for those with different experts;
    axes of size 1 are left out.

    Raises:
        LayoutError: the ranks of such a group lie at unequal distances, as where pipeline ranks lie between.
    """
    p = parallelism
    if p.experts == (1, 1):
        return ()
    *groups, _ = _expert_groups(_stage_degrees(p), *p.experts)
    if any(len(each) > 1 for each in groups):
        raise LayoutError(
            f"order {'-'.join(p.order)} lays the ranks that share experts (expert {p.expert}, expert_tensor "
            f"{p.expert_tensor}) at unequal distances; give another order or other degrees"
        )
    return tuple((name, *each[0]) for name, each in zip(("tensor", "rank"), groups, strict=True) if each)


def _stage_degrees(parallelism: Parallelism) -> tuple[tuple[int, int], ...]:
    """Return (size, stride) of the degrees of a stage, the innermost first."""
    stride = 1
    out: list[tuple[int, int]] = []
    for degree in parallelism.order:
        size = parallelism.size(degree)
        if degree != "pipeline" and size > 1:
            out.append((size, stride))
        stride *= size
    return tuple(out)


def expert_replica_groups(parallelism: Parallelism) -> Groups:
    """Return (size, stride in chips) of each kind of group of ranks that hold the same experts, innermost first.

    They are what remains of the data, context and tensor degrees after the ranks that share experts are taken out,
    innermost first; groups that adjoin are joined.
    """
    return _expert_groups(_stage_degrees(parallelism), *parallelism.experts)[2]


@lru_cache(maxsize=4096)
def _expert_groups(degrees: Groups, expert: int, tensor: int) -> tuple[Groups, Groups, Groups]:
    """Return the groups of ranks that shard an expert, that have different ones, and that hold the same."""
    sharding, left = _divided(degrees, tensor)
    different, same = _divided(left, expert)
    return _joined(sharding), _joined(different), _joined(same)


def _joined(groups: Groups) -> Groups:
    """Return the groups with adjoining ones as one."""
    out: list[tuple[int, int]] = []
    for size, stride in groups:
        if out and out[-1][0] * out[-1][1] == stride:
            out[-1] = out[-1][0] * size, out[-1][1]
        else:
            out.append((size, stride))
    return tuple(out)


def expert_mesh_axes(parallelism: Parallelism) -> tuple[Axis, ...]:
    """Return (name, size, stride in chips) of each axis of a stage's ranks, as experts are laid on them.

    They are `expert_axes`, then "replica0", ... for the groups of ranks that hold the same experts.

    Raises:
        LayoutError: pipeline ranks lie between those that share experts.
    """
    groups = expert_replica_groups(parallelism)
    return (*expert_axes(parallelism), *((f"replica{at}", *group) for at, group in enumerate(groups)))


def sharding_groups(parallelism: Parallelism) -> tuple[Groups, Groups]:
    """Return (groups of ranks that ZeRO shards over, groups of ranks with copies of one shard), innermost first.

    Each group is (size, stride in chips).
    """
    return _divided(replica_groups(parallelism), parallelism.shards)


def expert_sharding_groups(parallelism: Parallelism) -> tuple[Groups, Groups]:
    """Return what `sharding_groups` does, for experts' weights, over the ranks that hold the same experts."""
    return _divided(expert_replica_groups(parallelism), parallelism.expert_shards)


def _divided(groups: Groups, count: int) -> tuple[Groups, Groups]:
    """Return the groups of the first `count` ranks along others, innermost first, and those of what is left."""
    taken: list[tuple[int, int]] = []
    others: list[tuple[int, int]] = []
    for size, stride in groups:
        inside = math.gcd(count, size)
        count //= inside
        if inside > 1:
            taken.append((inside, stride))
        if inside < size:
            others.append((size // inside, stride * inside))
    return tuple(taken), tuple(others)


def boundaries_s(
    problem: StepProblem, parallelism: Parallelism, ranks: tuple[int, ...], num_bytes: int, is_whole: bool
) -> tuple[tuple[float, ...], bool]:
    """Return (seconds to send a micro-batch's residual from each stage to the next, whether it is sent in parts).

    A residual that every tensor-parallel rank has whole (`is_whole`) is sent in one part by each and
    all-gathered by the receivers, if that is faster across all pipeline ranks (Narayanan et al., SC '21, section
    4.1). Stages of one rank send nothing.

    Args:
        ranks: for each stage its pipeline rank.
        num_bytes: bytes of the residual on one rank.
    """
    p = parallelism
    key = p.tensor_size, p.stride("tensor"), p.pipeline, p.stride("pipeline"), ranks, num_bytes, is_whole
    return problem.once("boundaries", key, lambda: _boundaries_s(problem, p, ranks, num_bytes, is_whole))


def _boundaries_s(
    problem: StepProblem, parallelism: Parallelism, ranks: Sequence[int], num_bytes: int, is_whole: bool
) -> tuple[tuple[float, ...], bool]:
    p, tensor = parallelism, parallelism.tensor_size
    gathered_s, part = 0.0, num_bytes
    if is_whole and tensor > 1:
        part = -(-num_bytes // tensor)
        gathered_s = collective_s(problem, "all_gather", ((tensor, p.stride("tensor")),), num_bytes)
    axis = p.pipeline, p.stride("pipeline")
    in_parts = part < num_bytes and message_s(problem, *axis, part) + gathered_s < message_s(
        problem, *axis, num_bytes
    )
    if not in_parts:
        gathered_s, part = 0.0, num_bytes
    sent_s = []
    for one, other in pairwise(ranks):
        size = 2 if _is_inside(problem, p, *sorted((one, other))) else p.pipeline
        sent_s.append(message_s(problem, size, axis[1], part) + gathered_s if one != other else 0.0)
    return tuple(sent_s), in_parts


def _is_inside(problem: StepProblem, parallelism: Parallelism, first: int, last: int) -> bool:
    """Return whether pipeline ranks `first` to `last` of every pipeline lie in one innermost block of chips.

    That is a host, a package or the innermost subtree; False on a torus.
    """
    (level, *_), stride = level_sizes(problem.cluster.network) or (1,), parallelism.stride("pipeline")
    block = parallelism.pipeline * stride
    begins = range(first * stride, parallelism.num_ranks, block)[: level // math.gcd(level, block)]
    return all(begin % level + (last + 1 - first) * stride <= level for begin in begins)


def collective_s(problem: StepProblem, kind: str, groups: Sequence[tuple[int, int]], num_bytes: int) -> float:
    """Return the seconds of a collective that runs over one kind of group after the other, innermost first.

    All groups of one kind in the cluster run at once. Of a reduce-scatter or all-gather the next kind moves only
    the shards of the one before.

    Args:
        kind: "all_reduce", "reduce_scatter" or "all_gather".
        groups: (number of ranks, chips between neighbours) of each kind of group.
        num_bytes: bytes of the tensor before it is scattered, or after it is gathered.
    """
    known = problem.cache("collectives")
    key = kind, tuple(groups), num_bytes
    if key not in known:
        known[key] = sum(_transfer_s(problem, *each) for each in collective_steps(kind, groups, num_bytes))
    return float(known[key])


def collective_steps(
    kind: str, groups: Sequence[tuple[int, int]], num_bytes: int
) -> Iterator[tuple[Transfer, int]]:
    """Yield (collective, chips between neighbours) for each of `groups`; arguments are as of `collective_s`."""
    for size, stride in groups:
        part = num_bytes if kind == "all_reduce" else -(-num_bytes // size)
        yield Transfer(kind, f"{MESH}.row", size, part), stride
        num_bytes = part


def message_s(problem: StepProblem, size: int, stride: int, num_bytes: int) -> float:
    """Return the seconds of a message of `num_bytes` bytes to the neighbour `stride` chips away.

    All ranks send at once. `size` is the number of ranks in each row of neighbours, `stride` chips apart.
    """
    known = problem.cache("messages")
    key = size, stride, num_bytes
    if key not in known:
        known[key] = _transfer_s(problem, Transfer("permute", f"{MESH}.row", size, num_bytes), stride)
    return float(known[key])


def _transfer_s(problem: StepProblem, work: Transfer, stride: int) -> float:
    return to_s(price(work, machine_of(problem, (("row", work.num_ranks, stride),))).total_ps)
