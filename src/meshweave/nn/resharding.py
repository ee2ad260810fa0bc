"""Reshards outside autograd: ranks agree on what moves, and plan it once per kind and context.

A rank knows only what it was called with. So at the first reshard of a kind all ranks exchange messages first:
each says what it is about to move and which host it is on, or why it refuses. Then all make the same plan, and
check that it is the same.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from meshweave.algorithms.reshard import (
    ReshardPlan,
    ReshardProblem,
    TensorMove,
    plan_reshard,
    reshard_program,
)
from meshweave.algorithms.reshard.plan import MAX_MESSAGES, MESSAGE_BYTES
from meshweave.base.errors import BindError, LayoutError
from meshweave.cost.fabric import HostTopology
from meshweave.describe.layout import Layout
from meshweave.describe.machine.cluster import Cluster, described, load_cluster
from meshweave.execute.ranks.agreement import agree, exchange
from meshweave.execute.ranks.blame import ranks_text
from meshweave.execute.torch import compat
from meshweave.execute.torch.buffers import torch_dtype
from meshweave.execute.torch.cache import description_bytes
from meshweave.execute.torch.call_order import require_process_group
from meshweave.execute.torch.context import TorchContext
from meshweave.ir.program import Program
from meshweave.nn.dtensor import ascending_dims, from_the_front, mesh_of, size_text
from meshweave.nn.products import DTYPES
from meshweave.nn.shard_spec import ShardSpec

_AS = {
    "uint8": (
        "uint8",
        "bool",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ),
    "int16": ("uint16",),
    "int32": ("uint32",),
    "int64": ("uint64", "complex64"),
}
CARRIERS: dict[torch.dtype, str] = DTYPES | {
    getattr(torch, name): carrier for carrier, names in _AS.items() for name in names if hasattr(torch, name)
}
"""The dtype of a program that values of a dtype move in: one of the same size where programs lack the dtype."""

_MACHINES = {"cpu": ("local-cpu", "p3.8xlarge"), "cuda": ("h100-node", "dgx-h100")}
"""By device type: the catalog's clusters whose rates hold inside a host and between hosts, by default."""

_LEAST_MESSAGE_BYTES = 1 << 10
"""Smaller messages cost too much time for the memory that they save."""


@dataclass(frozen=True)
class _AgreedReshard:
    """A program that its ranks have agreed upon, and the notes with which they did."""

    program: Program
    notes: set[str]


@dataclass(frozen=True)
class ReshardSession:
    """The context of the ranks that reshard, and the cluster they plan for; None for the hosts they are on."""

    context: TorchContext
    cluster: Cluster | str | None

    @classmethod
    def of(
        cls, device_mesh: DeviceMesh, cluster: Cluster | str | None, context: TorchContext | None
    ) -> ReshardSession:
        """Return the session of a call; `context` None is the default context of the mesh's device type.

        Raises:
            LayoutError: `device_mesh` is no DeviceMesh.
            BindError: there is no default process group.
        """
        require_process_group()
        if not isinstance(device_mesh, DeviceMesh):
            raise LayoutError(f"device_mesh is {with_article(device_mesh)}; it must be a DeviceMesh")
        return cls(context or TorchContext.default(device_mesh.device_type), cluster)

    @property
    def rank(self) -> int:
        """Return this process's global rank."""
        return self.context.rank or 0

    def no_elements(self, dtype: torch.dtype) -> Tensor:
        """Return a tensor of shape (0,), torch's local part of a DTensor on a rank outside its mesh."""
        return torch.empty(0, dtype=dtype, device=self.context.device)


@dataclass(frozen=True)
class DTensorMove:
    """A tensor that moves from one layout to another.

    Attributes:
        name: for errors, such as its key in a state dict; "" for none.
        shape: the global shape.
        src: the source layout after partial sums are added up (`summed_spec`), so that no axis is partial.
        dst: the destination layout; no axis is partial.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    src: Layout
    dst: Layout

    @classmethod
    def of(cls, name: str, tensor: Tensor, source: ShardSpec, target: ShardSpec) -> DTensorMove:
        """Return the move of a tensor from the placements of `source`, with partial sums, to those of `target`.

        Raises:
            LayoutError: the placements do not fit the tensor, `target` is partial, or the meshes are of different
                types of device.
            BindError: tensors of the dtype cannot be moved.
        """
        shape, prefix = tuple(map(int, tensor.shape)), f"{name}: " if name else ""
        check_dtype(tensor.dtype, prefix)
        try:
            before, dst = source.layout(shape, None), target.layout(shape, None)
        except LayoutError as error:
            raise LayoutError(f"{prefix}{error}") from None
        if target.is_partial:
            raise LayoutError(
                f"{prefix}the destination {dst} is a sum yet to be made; reshard to Shard or Replicate"
            )
        if source.device_mesh.device_type != target.device_mesh.device_type:
            raise LayoutError(
                f"{prefix}from {source.device_mesh} to {target.device_mesh}: both must be of one type of device"
            )
        src = summed_spec(source, target, shape).layout(shape, None) if before.partial_axes else before
        return cls(name, shape, tensor.dtype, src, dst)

    @cached_property
    def tensor_move(self) -> TensorMove:
        """Return the move for the planner: in a carrier dtype (`CARRIERS`), with shape (1,) for 0-dim tensors."""
        return TensorMove(self.name or "x", self.shape or (1,), CARRIERS[self.dtype], self.src, self.dst)

    @property
    def description(self) -> str:
        """Return the name, dtype, shape and both layouts as text; ranks compare the texts before anything
        moves.
        """
        what = f"{self.name} {self.dtype} {size_text(self.shape)}".strip().replace("torch.", "")
        return f"{what} from {self.src} to {self.dst}"

    def as_carried(self, local: Tensor) -> Tensor:
        """Return a local shard with its bits viewed as the equally wide program dtype, a 0-dim tensor as (1,).

        Detached; shares memory with `local` unless that is lazily conjugated or negated.
        """
        local = local.detach().resolve_conj().resolve_neg().view(torch_dtype(CARRIERS[self.dtype]))
        return local if self.shape else local.view(1)

    def check(self, local: Tensor, layout: Layout, rank: int) -> None:
        """Raise LayoutError unless `local` of global rank `rank` has the shape of its shard by `layout`."""
        if tuple(local.shape) != (shape := layout.local_shape(self.shape, rank)):
            raise LayoutError(
                f"{self.name or 'the tensor'} is {tuple(local.shape)} on rank {rank}; as {layout} a tensor of "
                f"shape {self.shape} is {shape} there"
            )


def check_dtype(dtype: torch.dtype, prefix: str = "") -> None:
    """Raise BindError if tensors of a dtype cannot be moved; its message begins with `prefix`."""
    if dtype not in CARRIERS:
        known = ", ".join(str(known).removeprefix("torch.") for known in CARRIERS)
        raise BindError(f"{prefix}{dtype} is no dtype that reshard moves: {known}")


def given_spec(device_mesh: DeviceMesh, placements: Sequence[Placement], num_dims: int) -> ShardSpec:
    """Return the mesh and placements of a tensor of `num_dims` dims, with negative dims counted from the front.

    Raises LayoutError where `placements` is no sequence, or names a dim that the tensor does not have.
    """
    if isinstance(placements, (Placement, str)) or not isinstance(placements, Sequence):
        raise LayoutError(f"placements is {placements!r}; it must be a sequence with one per dim of the mesh")
    return ShardSpec(device_mesh, tuple(from_the_front(each, num_dims, "placements") for each in placements))


def summed_spec(source: ShardSpec, target: ShardSpec, shape: Sequence[int]) -> ShardSpec:
    """Return the placements of a tensor of global `shape` after its partial sums are added up on its own mesh.

    A Partial becomes Shard of a dim that `target` shards and `source` does not, if the mesh dim divides its size
    and its ranks ascend (`ascending_dims`); else Replicate.
    """
    placements = source.placements or ()
    sharded_dims = [placement.dim for placement in placements if compat.is_sharded(placement)]
    target_dims = dict.fromkeys(p.dim for p in target.placements or () if compat.is_sharded(p))
    replacements: list[Placement] = []
    ascends = ascending_dims(source.device_mesh)
    for mesh_dim, placement in enumerate(placements):
        size = source.device_mesh.size(mesh_dim)
        free = (d for d in target_dims if d not in sharded_dims and shape[d] and shape[d] % size == 0)
        dim = next(free, None) if isinstance(placement, Partial) and ascends[mesh_dim] else None
        replacements.append(Replicate() if dim is None else Shard(dim))
        sharded_dims += [] if dim is None else [dim]
    return source.without_partial(replacements)


def summed_part(tensor: DTensor, source: ShardSpec, target: ShardSpec) -> Tensor:
    """Return this rank's shard of a tensor after its partial sums are added up, placed as `summed_spec` says.

    Collective where `source`, its placements now, is partial. `target` is how the whole move is to place it.
    """
    if not source.is_partial:
        return compat.local_tensor(tensor)
    placements = summed_spec(source, target, tensor.shape).placements
    return compat.local_tensor(tensor.detach().redistribute(source.device_mesh, placements))


def ranks_of(meshes: Iterable[DeviceMesh]) -> tuple[int, ...]:
    """Return the global ranks of all these meshes together, each once, ascending."""
    return tuple(sorted({rank for mesh in meshes for rank in mesh_of(mesh).ranks}))


def with_article(value: object) -> str:
    """Return the name of a value's type, with "a" before it, for an error: [] -> `a list`."""
    return f"a {type(value).__name__}"


# --- agreement before bytes move --------------------------------------------------------------------------------

_WHAT = "all to say what they reshard"


def _agreed_hosts(
    session: ReshardSession, ranks: Sequence[int], descriptions: Sequence[str], digests: Mapping[str, str]
) -> dict[int, str]:
    """Return the host name of each rank, once all have said that they are about to move the same.

    `digests` are those of values that must be the same on all ranks that have them, by name.

    Raises:
        BindError: ranks are about to move different tensors, have different values, or one of them refuses.
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    digest = hashlib.sha256("\n".join(descriptions).encode()).hexdigest()
    message = json.dumps({"asks": digest, "host": socket.gethostname(), "digests": dict(digests)})
    messages = exchange(session.context, ranks, message, _WHAT, topic="a reshard")
    answers = {rank: json.loads(text) for rank, text in messages.items()}
    if len({answer["asks"] for answer in answers.values()}) > 1:
        lists = exchange(session.context, ranks, json.dumps(list(descriptions)), _WHAT)
        raise BindError(_difference({rank: json.loads(text) for rank, text in lists.items()}))
    _check_same_values({rank: answer["digests"] for rank, answer in answers.items()})
    return {rank: answer["host"] for rank, answer in answers.items()}


def _difference(descriptions: Mapping[int, Sequence[str]]) -> str:
    for at in range(max(map(len, descriptions.values()))):
        parties: dict[str, list[int]] = {}
        for rank, each in descriptions.items():
            parties.setdefault(each[at] if at < len(each) else "nothing more", []).append(rank)
        if len(parties) > 1:
            sides = ", ".join(f"{ranks_text(ranks)} '{text}'" for text, ranks in parties.items())
            return f"ranks are about to reshard different tensors: {sides}"
    return "ranks are about to reshard different tensors"


def _check_same_values(digests: Mapping[int, Mapping[str, str]]) -> None:
    """Raise BindError if ranks have different values of one name."""
    ranks_with: dict[str, dict[str, list[int]]] = {}
    for rank, digest_of in digests.items():
        for name, digest in digest_of.items():
            ranks_with.setdefault(name, {}).setdefault(digest, []).append(rank)
    for name, parties in ranks_with.items():
        if len(parties) > 1:
            sides = " and ".join(map(ranks_text, parties.values()))
            raise BindError(
                f"{name} is a plain tensor, which must be the same on all source ranks, and differs between "
                f"{sides}; make a DTensor of what is not replicated"
            )


@cache
def _catalog_cluster(name: str) -> Cluster:
    return load_cluster(name)


def _host_network(session: ReshardSession, host_names: Mapping[int, str]) -> HostTopology:
    """Return the network of the hosts that ranks said they are on, with the catalog's rates."""
    node, hosts = (
        _catalog_cluster(name) for name in _MACHINES.get(session.context.device.type, _MACHINES["cpu"])
    )
    return HostTopology.of_host_names(host_names, node, hosts)


# --- plans and programs -----------------------------------------------------------------------------------------


def program_of(
    moves: tuple[DTensorMove, ...],
    session: ReshardSession,
    *,
    extra_bytes: int | None = None,
    note: str = "",
    digests: Mapping[str, str] | None = None,
) -> Program:
    """Return the program of `moves`: move i reads the buffer "xi" and writes the buffer "yi" (x0, y0, ...).

    Collective the first time that ranks ask for these moves, and at every call with `digests`.

    Args:
        extra_bytes: the most scratch memory of a rank, in bytes; None for no limit.
        note: any other text that ranks must agree on the first time.
        digests: by name, of values that must be the same on all ranks that have them; None for no check.

    Raises:
        LayoutError: the cluster has fewer chips than there are ranks, or `extra_bytes` is not enough.
        DescriptionError: there is no such cluster.
        BindError: ranks are about to move different tensors, or have different values; nothing has moved then.
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    kind = moves, session.cluster, extra_bytes
    meshes = dict.fromkeys(layout.mesh for move in moves for layout in (move.src, move.dst))
    ranks = tuple(sorted({rank for mesh in meshes for rank in mesh.ranks}))
    programs = session.context.programs
    cached = programs.get(ranks, kind)
    if digests is not None or cached is None or note not in cached.value.notes:
        network = None
        if session.cluster is not None:
            network = HostTopology.of(described(session.cluster), ranks[-1] + 1)
        limit = f"extra_bytes {extra_bytes}" if extra_bytes is not None else ""
        options = filter(None, (note, limit, _cluster_text(session.cluster)))
        descriptions = [*(move.description for move in moves), *options]
        host_names = _agreed_hosts(session, ranks, descriptions, digests or {})
        if cached is None:
            problem = ReshardProblem(tuple(move.tensor_move for move in moves))
            network = network or _host_network(session, host_names)
            program = reshard_program(_plan_within(problem, network, extra_bytes))
            agree(session.context, program)
            cached = programs.put(ranks, kind, _AgreedReshard(program, set()), description_bytes(program))
        cached.value.notes.add(note)
    agreed: _AgreedReshard = cached.value
    return agreed.program


def _cluster_text(cluster: Cluster | str | None) -> str:
    if cluster is None:
        return ""
    return f"cluster {cluster.name if isinstance(cluster, Cluster) else cluster}"


def _plan_within(problem: ReshardProblem, network: HostTopology, extra_bytes: int | None) -> ReshardPlan:
    """Return the plan with the largest messages that need no more than `extra_bytes` of scratch on any rank."""
    plan = plan_reshard(problem, network)
    if extra_bytes is None:
        return plan
    message_bytes = max(min(extra_bytes, MESSAGE_BYTES), _LEAST_MESSAGE_BYTES)
    while True:
        if plan.num_messages > MAX_MESSAGES:
            raise LayoutError(
                f"extra_bytes is {extra_bytes}, and this takes {plan.num_messages:,} messages, more than the "
                f"{MAX_MESSAGES:,} that a program may have"
            )
        scratch, rank = max((plan.scratch_bytes(rank), rank) for rank in problem.ranks)
        if scratch <= extra_bytes:
            return plan
        if message_bytes < _LEAST_MESSAGE_BYTES:
            raise LayoutError(
                f"extra_bytes is {extra_bytes}, and rank {rank} needs {scratch} even if no message is larger than "
                f"{2 * message_bytes} bytes"
            )
        plan = plan_reshard(problem, network, message_bytes=message_bytes)
        message_bytes //= 2
