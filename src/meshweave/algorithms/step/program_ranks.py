"""Where the ranks of a step's program lie: the meshes of each pipeline rank, and replicas that stand for others.

A pipeline rank has its ranks on a mesh with the axes of a block, and on one with an axis for each group of
replicas. Experts have one more, since their groups and replicas lie across those of all else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from meshweave.algorithms.block.nodes.experts import MESH_OF_EXPERTS
from meshweave.algorithms.block.problem import AXES
from meshweave.algorithms.step.memory import update_bytes
from meshweave.algorithms.step.placement import (
    Axis,
    expert_mesh_axes,
    expert_replica_groups,
    replica_groups,
    sharding_groups,
)
from meshweave.algorithms.step.stage_settings import BucketRanks, StageSettings
from meshweave.algorithms.step.stages import Stages
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.network import HostsNetwork

STAGE_AXES = AXES[-4:]
"""The mesh axes of a stage: ranks of data parallelism, of the sequence, and two of tensor parallelism."""
REPLICAS, EXPERTS = "r", "e"
"""What the names of meshes of replicas begin with, and of experts, before the pipeline rank."""


class ProgramRanks:
    """The ranks of a step's program, in which each data-parallel replica stands for `copies` equal ones.

    Attributes:
        groups: (size, stride in chips) of the groups of replicas in the whole step, those that ZeRO shards over
            first.
        settings, expert_settings: how buckets (a layer's weights or gradients on a rank, as a vector) are sharded
            and gathered: of all weights but experts', and of experts.
        here: the parallelism of the program's ranks: with the replicas that it has, without degrees of experts.
    """

    def __init__(self, step: Stages, copies: int) -> None:
        self.p, self.copies = step.parallelism, copies
        self.here = replace(self.p, data=self.p.data // copies, zero_group=None, expert=1, expert_tensor=1)
        self.is_routed = step.problem.model.is_routed
        p, problem, stack = self.p, step.problem, step.problem.stack
        sharding, copies_of = sharding_groups(p) if p.zero else ((), replica_groups(p))
        self.groups = (*sharding, *copies_of)
        self.settings = StageSettings(
            problem.dtype,
            problem.gradient_dtype,
            tuple(f"replica{number}" for number in range(len(self.groups))),
            len(sharding),
            p.zero,
            stack.regathers,
            stack.overlap,
            stack.waits_for_gathers,
            stack.waits_for_tensor,
            update_bytes(problem),
        )
        own = expert_replica_groups(p) if self.is_routed else ()
        self.expert_settings = replace(
            self.settings,
            groups=tuple(f"replica{number}" for number in range(len(own))),
            num_sharding=len(own) if p.zero else 0,
        )

    def mesh(self, rank: int) -> Mesh:
        """Return the mesh of pipeline rank `rank` with the axes data, context and two of tensor ranks.

        Its ranks are numbered as in the program, where only the replicas that are simulated have ranks.
        """
        p = self.here
        strides = (
            p.stride("data"),
            p.stride("context"),
            p.stride("tensor") * p.tensor_mesh[1],
            p.stride("tensor"),
        )
        shape = p.data, p.context, *p.tensor_mesh
        return _strided(f"p{rank}", shape, STAGE_AXES, strides, rank * p.stride("pipeline"))

    def replica_mesh(self, rank: int) -> Mesh:
        """Return the mesh of pipeline rank `rank` with an axis per group of replicas and one of tensor ranks.

        Axes are ordered by stride, the widest first. Ranks are numbered as for `mesh`.
        """
        p = self.here
        groups = (replica_groups(p) or ((1, p.stride("data")),)) if self.copies > 1 else self.groups
        axes = [(f"replica{number}", *group) for number, group in enumerate(groups)]
        axes = sorted([*axes, ("tensor", p.tensor_size, p.stride("tensor"))], key=lambda axis: -axis[2])
        names, shape, strides = zip(*axes, strict=True)
        return _strided(f"{REPLICAS}{rank}", shape, names, strides, rank * p.stride("pipeline"))

    def _expert_axes(self) -> Iterator[tuple[Axis, int]]:
        """Yield the axes of the ranks of a stage for experts, without what is folded, and the copies of each."""
        kept = self.here.data * self.p.stride("data") if self.copies > 1 else self.p.num_ranks
        for name, size, stride in expert_mesh_axes(self.p) or (("replica0", 1, 1),):
            own = min(size, max(kept // stride, 1))
            yield (name, own, stride), size // own

    def _expert_mesh(self, rank: int) -> Mesh:
        """Return the same ranks with axes of those that share experts and each of them, and of replicas."""
        axes = sorted((axis for axis, _ in self._expert_axes()), key=lambda axis: -axis[2])
        names, shape, strides = zip(*axes, strict=True)
        return _strided(f"{EXPERTS}{rank}", shape, names, strides, rank * self.here.stride("pipeline"))

    def copies_of_experts(self) -> Iterator[tuple[str, int]]:
        """Yield ("mesh.axis", copies) for each axis of an expert mesh along which one rank stands for several.

        `copies` is that number of ranks, the simulated one included.
        """
        for rank in range(self.p.pipeline if self.is_routed else 0):
            for (name, _, _), copies in self._expert_axes():
                if copies > 1:
                    yield f"{EXPERTS}{rank}.{name}", copies

    def experts_of_block(self) -> Mesh | None:
        """Return the mesh over which experts are divided in the program of one layer; None without experts.

        Its ranks are positions on the block's mesh, from 0, and not those of the whole step.
        """
        if not self.is_routed:
            return None
        places = {rank: place for place, rank in enumerate(self.mesh(0).ranks)}
        mesh = self._expert_mesh(0)
        return Mesh(MESH_OF_EXPERTS, mesh.shape, mesh.axes, tuple(places[rank] for rank in mesh.ranks))

    def meshes(self) -> Iterator[Mesh]:
        """Yield for each pipeline rank `mesh`, `replica_mesh` and, with experts, the mesh of experts."""
        for rank in range(self.p.pipeline):
            yield self.mesh(rank)
            yield self.replica_mesh(rank)
            if self.is_routed:
                yield self._expert_mesh(rank)

    def bucket_ranks(self, rank: int) -> tuple[BucketRanks, BucketRanks | None]:
        """Return the ranks of a pipeline rank's buckets: (of all weights but experts', of experts').

        The second is None for a model without experts.
        """
        others = BucketRanks(self.replica_mesh(rank), ("tensor",), self.settings)
        if not self.is_routed:
            return others, None
        mesh = self._expert_mesh(rank)
        own = tuple(axis for axis in mesh.axes if axis not in self.expert_settings.groups)
        return others, BucketRanks(mesh, own, self.expert_settings)

    def unfolded(self, mesh: Mesh) -> Mesh:
        """Return `mesh`, a mesh of the program, with its ranks numbered as on all chips of the whole step.

        The simulated replicas are the first ones of the whole step.
        """
        stride, size = self.here.stride("data"), self.here.data
        ranks = (
            rank // (stride * size) * stride * self.p.data + rank % (stride * size) for rank in mesh.ranks
        )
        return replace(mesh, ranks=tuple(ranks))


def replica_copies(step: Stages) -> int:
    """Return the number of equal replicas that one simulated replica can stand for; 1 where they are not equal.

    Replicas one after the other in whole hosts are equal: moving along the data axis maps each host to another,
    with all its chips, NICs and groups. Replicas that share a host are all simulated.
    """
    p, cluster = step.parallelism, step.problem.cluster
    network = cluster.network
    if not isinstance(network, HostsNetwork) or p.data == 1 or p.zero_group is not None:
        return 1
    stride, chips = p.stride("data"), network.chips_per_host
    if p.context > 1 and p.stride("context") > stride:
        return 1
    if len(replica_groups(p)) > 1:
        return 1
    kept = 1 if stride % chips == 0 else chips // stride if chips % stride == 0 else 0
    while kept and step.problem.model.is_routed and not _keeps_experts(step, kept):
        kept = 2 * kept if kept < p.data else 0
    return p.data // kept if kept and p.data % kept == 0 else 1


def _keeps_experts(step: Stages, kept: int) -> bool:
    """Return whether so many replicas have equal parts of each group of ranks for experts, or whole ones.

    Ranks of a group are alike where tokens go evenly to experts; else the group is simulated whole.
    """
    p = step.parallelism
    stride = p.stride("data")
    if any(p.size(each) > 1 and p.stride(each) > stride for each in ("tensor", "context")):
        return False
    span = kept * stride
    for name, size, own in expert_mesh_axes(p):
        is_whole, is_left_out = own * size <= span, own >= span
        if step.problem.imbalance and not name.startswith("replica") and not is_whole:
            return False
        if not is_whole and not is_left_out and (span % own or size % (span // own)):
            return False
    return True


def _strided(
    name: str, shape: tuple[int, ...], axes: tuple[str, ...], strides: tuple[int, ...], base: int
) -> Mesh:
    """Return a mesh whose axes have these strides, from rank `base` on."""
    places = product(*(range(0, size * stride, stride) for size, stride in zip(shape, strides, strict=True)))
    return Mesh(name, tuple(shape), tuple(axes), tuple(base + sum(place) for place in places))
