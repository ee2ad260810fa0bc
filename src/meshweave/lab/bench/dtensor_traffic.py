"""What PyTorch's DTensor moves for a product: the bytes that each rank receives, counted without moving any.

Every rank is played in turn on a fake process group with tensors that have no storage. Counted is what each
collective must deliver to a rank however well it is carried out: padding that DTensor adds to uneven shards is in
it, an all-to-all counts as one even where DTensor on gloo gathers everything and throws most of it away.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from meshweave.base.errors import LayoutError, UnsupportedError, nearest
from meshweave.base.units import DTYPES
from meshweave.describe.layout import Layout, Partial, Placement, Replicate, Shard
from meshweave.describe.layout.mesh import Mesh

_FUNCTIONAL = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor")
_MOVE_NOTHING = ("wait_tensor", "_wrap_tensor_autograd", "mesh_get_process_group")
_KINDS = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
}
# DTensor caches plans by mesh, and a mesh does not know its rank: names keep the ranks' plans apart.
_serial = itertools.count()


@dataclass(frozen=True)
class Collective:
    """One collective as a rank meets it: `all_gather`, `reduce_scatter`, `all_reduce` or `all_to_all`, the ranks
    in its group and the bytes this rank puts in."""

    kind: str
    num_ranks: int
    input_bytes: int

    @property
    def received_bytes(self) -> int:
        """The least that must reach this rank, fractions of a byte dropped."""
        others, n = self.num_ranks - 1, self.num_ranks
        if self.kind == "all_gather":
            return others * self.input_bytes
        return (2 if self.kind == "all_reduce" else 1) * others * self.input_bytes // n


@dataclass(frozen=True)
class DTensorTraffic:
    """What `a @ b` costs as a DTensor: the placements of the result, bytes received and collectives by rank."""

    out_placements: tuple[Placement, ...]
    received_bytes_per_rank: tuple[int, ...]
    collectives: tuple[tuple[Collective, ...], ...]

    @property
    def received_bytes(self) -> int:
        """Of all ranks together."""
        return sum(self.received_bytes_per_rank)


@dataclass(frozen=True)
class Product:
    """A (m, k) times B (k, n) by their placements; with `out` the result is then redistributed to that."""

    a: tuple[Placement, ...]
    b: tuple[Placement, ...]
    sizes: tuple[int, int, int]  # m, n, k
    out: tuple[Placement, ...] | None = None


def dtensor_traffic(
    mesh_shape: tuple[int, ...],
    a_placements: Sequence[Placement],
    b_placements: Sequence[Placement],
    sizes: tuple[int, int, int],
    dtype: str = "float32",
    out: Sequence[Placement] | None = None,
) -> DTensorTraffic:
    """What DTensor moves for A (m, k) times B (k, n); `sizes` is (m, n, k). For many products see `traffics`.

    Raises as `traffics` does.
    """
    product = Product(tuple(a_placements), tuple(b_placements), sizes, None if out is None else tuple(out))
    return traffics(mesh_shape, [product], dtype)[0]


def traffics(
    mesh_shape: tuple[int, ...], products: Sequence[Product], dtype: str = "float32"
) -> list[DTensorTraffic]:
    """What DTensor moves for each product, on a mesh of CPU ranks.

    Raises LayoutError for placements that do not fit the mesh or that DTensor does not have, and UnsupportedError
    in a process that has a process group already, for an `out` that is partial where the result is not, for a
    collective that is not known here, and for a torch without the parts of DTensor that are looked into.
    """
    if dtype not in DTYPES:
        raise LayoutError(f"unknown dtype '{dtype}'{nearest(dtype, DTYPES)}")
    mesh = Mesh.of("mesh", tuple(mesh_shape), tuple(f"x{i}" for i in range(len(mesh_shape))))
    found = []
    with _quiet():
        for rank in range(mesh.num_ranks):
            with _playing(rank, mesh) as theirs:
                found.append([_of_rank(product, mesh, theirs, rank, dtype) for product in products])
    out = []
    for each in zip(*found, strict=True):
        placements = {placements for placements, _ in each}
        assert len(placements) == 1, placements
        collectives = tuple(tuple(moved) for _, moved in each)
        received = tuple(sum(one.received_bytes for one in moved) for moved in collectives)
        out.append(DTensorTraffic(placements.pop(), received, collectives))
    return out


def to_torch(placements: Sequence[Placement]) -> tuple[Any, ...]:
    """The same in DTensor's words. Raises LayoutError for what it does not have."""
    from torch.distributed import tensor as theirs

    out: list[Any] = []
    for placement in placements:
        match placement:
            case Shard(dim):
                out.append(theirs.Shard(dim))
            case Replicate():
                out.append(theirs.Replicate())
            case Partial(op):
                out.append(theirs.Partial(op))
            case _:
                raise LayoutError(f"DTensor has no placement {placement}")
    return tuple(out)


def from_torch(placements: Sequence[Any]) -> tuple[Placement, ...]:
    """DTensor's placements in our words. Raises UnsupportedError for what we do not have."""
    from torch.distributed import tensor as theirs

    out: list[Placement] = []
    for placement in placements:
        # The exact type: a strided shard is a shard too, of other elements.
        if type(placement) is theirs.Shard:
            out.append(Shard(placement.dim))
        elif type(placement) is theirs.Replicate:
            out.append(Replicate())
        elif type(placement) is theirs.Partial:
            out.append(Partial(placement.reduce_op))
        else:
            raise UnsupportedError(f"a result that is placed {placement} is not known here")
    return tuple(out)


def _of_rank(
    product: Product, mesh: Mesh, theirs: Any, rank: int, dtype: str
) -> tuple[tuple[Placement, ...], list[Collective]]:
    import torch
    from torch.distributed.tensor import DTensor

    m, n, k = product.sizes

    def operand(shape: tuple[int, int], placements: tuple[Placement, ...]) -> Any:
        local = torch.empty(
            Layout(mesh, placements).local_shape(shape, rank), dtype=getattr(torch, dtype), device="meta"
        )
        return DTensor.from_local(
            local,
            theirs,
            to_torch(placements),
            run_check=False,
            shape=torch.Size(shape),
            stride=(shape[1], 1),
        )

    a, b = operand((m, k), product.a), operand((k, n), product.b)
    with torch.no_grad(), _counting() as moved:
        c = a @ b
        out = from_torch(c.placements)
        if product.out is not None:
            if any(
                isinstance(new, Partial) and new != old for new, old in zip(product.out, out, strict=True)
            ):
                raise UnsupportedError("DTensor lets nobody redistribute a result into sums")
            c = c.redistribute(theirs, to_torch(product.out))
    return from_torch(c.placements), moved


@contextmanager
def _playing(rank: int, mesh: Mesh) -> Iterator[Any]:
    """The device mesh as `rank` sees it, among ranks that do not exist."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UnsupportedError(
            "traffic is counted with a process group of its own; this process has one already"
        )
    serial = next(_serial)
    dist.init_process_group("fake", rank=rank, world_size=mesh.num_ranks, store=FakeStore())
    try:
        names = tuple(f"{axis}_{serial}" for axis in mesh.axes)
        yield init_device_mesh("cpu", mesh.shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


@contextmanager
def _counting() -> Iterator[list[Collective]]:
    """The collectives of the block, in the order that they are issued."""
    from torch.distributed.tensor import DTensor, placement_types
    from torch.utils._python_dispatch import TorchDispatchMode

    moved: list[Collective] = []
    is_emulating = False

    class Counting(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented  # DTensor makes plain calls of it first
            if op.namespace in _FUNCTIONAL and not is_emulating:
                moved.extend(_collectives(op.name().split("::")[1].split(".")[0], args))
            return op(*args, **(kwargs or {}))

    original = getattr(placement_types, "shard_dim_alltoall", None)
    if original is None:
        raise UnsupportedError("this torch does its all-to-all elsewhere than torch 2.9 to 2.13")

    def all_to_all(local: Any, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int) -> Any:
        nonlocal is_emulating
        moved.append(Collective("all_to_all", mesh.size(mesh_dim), local.numel() * local.element_size()))
        is_emulating = True
        try:
            return original(local, gather_dim, shard_dim, mesh, mesh_dim)
        finally:
            is_emulating = False

    placement_types.shard_dim_alltoall = all_to_all
    try:
        with Counting():
            yield moved
    finally:
        placement_types.shard_dim_alltoall = original


def _collectives(name: str, args: tuple[Any, ...]) -> Iterator[Collective]:
    from torch.distributed.distributed_c10d import _resolve_process_group

    if name in _MOVE_NOTHING:
        return
    if name not in _KINDS:
        raise UnsupportedError(f"what DTensor's collective {name} moves is not known here")
    group = _resolve_process_group(args[-1]) if isinstance(args[-1], str) else args[-1]
    for tensor in args[0] if isinstance(args[0], (list, tuple)) else [args[0]]:
        yield Collective(_KINDS[name], group.size(), tensor.numel() * tensor.element_size())


@contextmanager
def _quiet() -> Iterator[None]:
    """Without DTensor's advice, which would come once for every rank."""
    logger = logging.getLogger("torch.distributed.tensor")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
