"""What moves between meshes, outside autograd: agreed upon, planned once per kind and context, bound to shards.

Ranks that take part in a reshard know what they were called with and nothing else. So the first of a kind begins
with words: each says what it is about to move and which host it is on, or why it cannot. Then all make the same
plan, and agree that it is the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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
from meshweave.base.errors import BindError, LayoutError, MeshweaveError
from meshweave.cost.fabric import HostNetwork
from meshweave.describe.layout import Layout
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.network import HostsNetwork
from meshweave.execute.ranks.agreement import agree, exchange
from meshweave.execute.ranks.blame import ranks_text
from meshweave.execute.torch import compat
from meshweave.execute.torch.bind import torch_dtype
from meshweave.execute.torch.context import TorchContext
from meshweave.ir.program import Program
from meshweave.nn.placements import layout_of, layout_on
from meshweave.nn.products import DTYPES

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
"""The dtype of a program in which values of a dtype move: another of the same size where programs have not it."""

_MACHINES = {"cpu": ("local-cpu", "p3.8xlarge"), "cuda": ("h100-node", "dgx-h100")}
"""Clusters of the catalog whose rates hold within a host and between hosts, where the caller names none."""

_LEAST_MESSAGE_BYTES = 1 << 10
"""Smaller messages than this do not pay, whatever they save in memory."""


class _Reshards(dict[Any, Any]):
    """What a context has agreed upon, planned and bound."""


@dataclass(frozen=True)
class Site:
    """Where reshards run, and on what machine they are planned for."""

    context: TorchContext
    cluster: Cluster | str | None

    @classmethod
    def of(cls, mesh: DeviceMesh, cluster: Cluster | str | None, context: TorchContext | None) -> Site:
        return cls(context or TorchContext.default(mesh.device_type), cluster)

    @property
    def rank(self) -> int:
        return self.context.rank or 0

    @property
    def known(self) -> dict[Any, Any]:
        return self.context.cache(_Reshards)

    def nothing(self, dtype: torch.dtype) -> Tensor:
        """The local part of a DTensor on a rank outside its mesh, as torch has it."""
        return torch.empty(0, dtype=dtype, device=self.context.device)


@dataclass(frozen=True)
class Place:
    """How a tensor lies: `order` in which axes shard a dim, where it is not the usual."""

    device_mesh: DeviceMesh
    placements: tuple[Placement, ...]
    order: Any = None

    @classmethod
    def of(cls, tensor: DTensor) -> Place:
        spec = compat.spec_of(tensor)
        return cls(spec.mesh, tuple(spec.placements), compat.explicit_shard_order(spec))

    def spec(self, shape: Sequence[int], dtype: torch.dtype) -> compat.DTensorSpec:
        return compat.make_spec(self.device_mesh, self.placements, shape, dtype, self.order)

    def layout(self, shape: Sequence[int]) -> Layout:
        """Raises LayoutError, see `layout_of`."""
        # First, for torch makes no spec of what does not fit, in other words.
        layout_on(self.device_mesh, self.placements, shape, None, self.order)
        return layout_of(self.spec(shape, torch.float32), None)

    @property
    def is_partial(self) -> bool:
        return any(isinstance(placement, Partial) for placement in self.placements)

    @property
    def is_plain(self) -> bool:
        """Whether it is Shard and Replicate only, in the usual order."""
        return self.order is None and all(type(one) in (Shard, Replicate) for one in self.placements)

    @property
    def of_gradient(self) -> Place:
        """The gradient of each term of a sum is the gradient of the sum."""
        return self._with_sums([Replicate()] * len(self.placements))

    def summed(self, target: Place, shape: Sequence[int]) -> Place:
        """Sums made where they are, in shards if some dim that the target shards divides evenly, else in full."""
        if not self.is_partial:
            return self
        taken = [one.dim for one in self.placements if compat.is_sharded(one)]
        wanted = dict.fromkeys(one.dim for one in target.placements if compat.is_sharded(one))
        instead: list[Placement] = []
        for axis, placement in enumerate(self.placements):
            size = self.device_mesh.size(axis)
            free = (dim for dim in wanted if dim not in taken and shape[dim] and shape[dim] % size == 0)
            dim = next(free, None) if isinstance(placement, Partial) else None
            instead.append(Replicate() if dim is None else Shard(dim))
            taken += [] if dim is None else [dim]
        return self._with_sums(instead)

    def _with_sums(self, instead: Sequence[Placement]) -> Place:
        if not self.is_partial:
            return self
        pairs = zip(self.placements, instead, strict=True)
        return Place(self.device_mesh, tuple(new if isinstance(one, Partial) else one for one, new in pairs))


@dataclass(frozen=True)
class Move:
    """A tensor of global `shape`, from one layout to another."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    src: Layout
    dst: Layout

    @classmethod
    def of(cls, name: str, tensor: DTensor, source: Place, target: Place) -> Move:
        """Of a tensor that lies as `source` says, once sums are made. Raises LayoutError, BindError."""
        shape, dtype = tuple(map(int, tensor.shape)), tensor.dtype
        called = f"{name}: " if name else ""
        if dtype not in CARRIERS:
            known = ", ".join(str(known).removeprefix("torch.") for known in CARRIERS)
            raise BindError(f"{called}{dtype} is no dtype that reshard moves: {known}")
        try:
            before, dst = source.layout(shape), target.layout(shape)
        except LayoutError as error:
            raise LayoutError(f"{called}{error}") from None
        if target.is_partial:
            raise LayoutError(
                f"{called}the destination {dst} is a sum yet to be made; reshard to Shard or Replicate"
            )
        if source.device_mesh.device_type != target.device_mesh.device_type:
            raise LayoutError(
                f"{called}from {source.device_mesh} to {target.device_mesh}: both must be of one type of device"
            )
        return cls(
            name,
            shape,
            dtype,
            source.summed(target, shape).layout(shape) if before.partial_axes else before,
            dst,
        )

    @cached_property
    def item(self) -> TensorMove:
        """For the planner; a tensor without dims is one of a single element there."""
        return TensorMove(self.name or "x", self.shape or (1,), CARRIERS[self.dtype], self.src, self.dst)

    @property
    def told(self) -> str:
        size = "x".join(map(str, self.shape)) or "scalar"
        return f"{self.name} {self.dtype} {size} from {self.src} to {self.dst}".strip().replace("torch.", "")

    def carried(self, local: Tensor) -> Tensor:
        """A local part as the program sees it: the same memory."""
        local = local.detach().resolve_conj().view(torch_dtype(CARRIERS[self.dtype]))
        return local if self.shape else local.view(1)

    def check(self, local: Tensor, layout: Layout, rank: int) -> None:
        """Raises LayoutError where a rank's part is not what its placements say."""
        if tuple(local.shape) != (shape := layout.local_shape(self.shape, rank)):
            raise LayoutError(
                f"{self.name or 'the tensor'} is {tuple(local.shape)} on rank {rank}; as {layout} a tensor of "
                f"shape {self.shape} is {shape} there"
            )


def local_part(tensor: DTensor) -> Tensor:
    """This rank's part, outside autograd."""
    return compat.local_tensor(tensor)


def ranks_of(meshes: Iterable[DeviceMesh]) -> tuple[int, ...]:
    """The global ranks of all of these, ascending."""
    return tuple(sorted({int(rank) for mesh in meshes for rank in mesh.mesh.reshape(-1).tolist()}))


# --- words before bytes -----------------------------------------------------------------------------------------

_WHAT = "all to say what they reshard"


@contextlib.contextmanager
def telling(site: Site, ranks: Sequence[int]) -> Iterator[None]:
    """What this rank refuses in here is told to the others of `ranks`, which listen at the first of a kind."""
    try:
        yield
    except Exception as error:  # of the caller's functions, too: the others are not to wait for it
        if site.rank in ranks:
            words = json.dumps({"refuses": f"{type(error).__name__}: {error}"})
            with contextlib.suppress(MeshweaveError):
                exchange(site.context, ranks, words, _WHAT)
        raise


def _hosts(site: Site, ranks: Sequence[int], told: Sequence[str]) -> dict[int, str]:
    """The host of each rank, once all have said that they are about to move the same.

    Raises BindError, naming the ranks and what differs, where they are not; RankLostError, DeadlineError.
    """
    digest = hashlib.sha256("\n".join(told).encode()).hexdigest()
    words = json.dumps({"asks": digest, "host": socket.gethostname()})
    said = {rank: json.loads(text) for rank, text in exchange(site.context, ranks, words, _WHAT).items()}
    refusals = {rank: one["refuses"] for rank, one in said.items() if "refuses" in one}
    if refusals:
        first, why = next(iter(refusals.items()))
        raise BindError(f"{ranks_text(list(refusals))} will not reshard; rank {first} has {why}")
    if len({one["asks"] for one in said.values()}) > 1:
        lists = exchange(site.context, ranks, json.dumps(list(told)), _WHAT)
        raise BindError(_difference({rank: json.loads(text) for rank, text in lists.items()}))
    return {rank: one["host"] for rank, one in said.items()}


def _difference(told: Mapping[int, Sequence[str]]) -> str:
    for at in range(max(map(len, told.values()))):
        parties: dict[str, list[int]] = {}
        for rank, one in told.items():
            parties.setdefault(one[at] if at < len(one) else "nothing more", []).append(rank)
        if len(parties) > 1:
            sides = ", ".join(f"{ranks_text(ranks)} '{text}'" for text, ranks in parties.items())
            return f"ranks are about to reshard different tensors: {sides}"
    return "ranks are about to reshard different tensors"


def _fabric(site: Site, hosts: Mapping[int, str]) -> HostNetwork:
    """The machine as the ranks found it, with the catalog's rates: where ranks sit matters more than how fast."""
    within, between = (
        load_cluster(name) for name in _MACHINES.get(site.context.device.type, _MACHINES["cpu"])
    )
    assert isinstance(between.network, HostsNetwork)
    near, far = HostNetwork.of(within, 1), HostNetwork.of(between, 1)
    number_of = {name: number for number, name in enumerate(dict.fromkeys(hosts.values()))}
    host_of, nic_of = [0] * (max(hosts) + 1), [0] * (max(hosts) + 1)
    ranks_on = dict.fromkeys(number_of, 0)
    for rank, name in hosts.items():
        host_of[rank], nic_of[rank] = number_of[name], ranks_on[name] % between.network.nics_per_host
        ranks_on[name] += 1
    return HostNetwork(
        tuple(host_of),
        tuple(nic_of),
        far.nic_bytes_per_s,
        near.local_bytes_per_s,
        max(far.nic_latency_s, near.local_latency_s),
        near.local_latency_s,
    )


# --- plans and programs -----------------------------------------------------------------------------------------


def program_of(
    moves: tuple[Move, ...], site: Site, *, extra_bytes: int | None = None, note: str = ""
) -> Program:
    """The program that does `moves`; number i of them is from buffer xi to buffer yi.

    At the first of a kind all ranks of the moves agree; `note` is part of what they must agree on.

    Raises:
        LayoutError: the cluster has fewer chips than there are ranks; `extra_bytes` is not enough.
        DescriptionError: there is no such cluster.
        BindError: ranks are about to move different tensors; nothing has moved then.
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    kind = moves, site.cluster, extra_bytes
    if (kind, note) not in site.known:
        meshes = dict.fromkeys(layout.mesh for move in moves for layout in (move.src, move.dst))
        ranks = tuple(sorted({rank for mesh in meshes for rank in mesh.ranks}))
        fabric = None
        with telling(site, ranks):
            if site.cluster is not None:
                cluster = load_cluster(site.cluster) if isinstance(site.cluster, str) else site.cluster
                fabric = HostNetwork.of(cluster, ranks[-1] + 1)
        also = note, f"extra_bytes {extra_bytes}" if extra_bytes is not None else "", _called(site.cluster)
        hosts = _hosts(site, ranks, [*(move.told for move in moves), *filter(None, also)])
        if kind not in site.known:
            problem = ReshardProblem(tuple(move.item for move in moves))
            program = reshard_program(_planned(problem, fabric or _fabric(site, hosts), extra_bytes))
            agree(site.context, program)
            site.known[kind] = program
        site.known[kind, note] = True
    found: Program = site.known[kind]
    return found


def _called(cluster: Cluster | str | None) -> str:
    if cluster is None:
        return ""
    return f"cluster {cluster if isinstance(cluster, str) else cluster.name}"


def _planned(problem: ReshardProblem, fabric: HostNetwork, extra_bytes: int | None) -> ReshardPlan:
    """In as large messages as `extra_bytes` lets ranks pack and pass on. Raises LayoutError."""
    plan = plan_reshard(problem, fabric)
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
        plan = plan_reshard(problem, fabric, message_bytes=message_bytes)
        message_bytes //= 2
