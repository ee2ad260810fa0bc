"""The bytes that each rank receives when PyTorch's DTensor computes a product, counted without moving any.

Each rank is run in turn on a fake process group, with tensors on the meta device. The count is the least that each
collective must deliver to the rank. It includes the padding that DTensor adds to uneven shards. An all-to-all
counts as an all-to-all, even where DTensor on gloo emulates it by an all-gather.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from meshweave.base.errors import LayoutError, UnsupportedError, require_known
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
class DTensorCollective:
    """One collective that DTensor issues on a rank.

    Attributes:
        kind: `all_gather`, `reduce_scatter`, `all_reduce` or `all_to_all`.
        num_ranks: the size of its group.
        input_bytes: the bytes that this rank contributes.
    """

    kind: str
    num_ranks: int
    input_bytes: int

    @property
    def received_bytes(self) -> int:
        """The least number of bytes that must reach this rank, rounded down."""
        others, n = self.num_ranks - 1, self.num_ranks
        if self.kind == "all_gather":
            return others * self.input_bytes
        return (2 if self.kind == "all_reduce" else 1) * others * self.input_bytes // n


@dataclass(frozen=True)
class DTensorTraffic:
    """What `a @ b` of two DTensors moves: the placements of the result, and by rank the bytes received and the
    collectives.
    """

    out_placements: tuple[Placement, ...]
    received_bytes_per_rank: tuple[int, ...]
    collectives: tuple[tuple[DTensorCollective, ...], ...]

    @property
    def received_bytes(self) -> int:
        """The bytes that all ranks together receive."""
        return sum(self.received_bytes_per_rank)


@dataclass(frozen=True)
class PlacedProduct:
    """The product of A (m, k) and B (k, n) with these placements, `sizes` being (m, n, k).

    The result is then redistributed to the placements `out`, if given.
    """

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
    """Return what DTensor moves for A (m, k) times B (k, n); `sizes` is (m, n, k). Raises as
    `dtensor_traffics`.
    """
    product = PlacedProduct(
        tuple(a_placements), tuple(b_placements), sizes, None if out is None else tuple(out)
    )
    return dtensor_traffics(mesh_shape, [product], dtype)[0]


def dtensor_traffics(
    mesh_shape: tuple[int, ...], products: Sequence[PlacedProduct], dtype: str = "float32"
) -> list[DTensorTraffic]:
    """Return what DTensor moves for each product, on a mesh of CPU ranks.

    Raises:
        LayoutError: placements do not fit the mesh, or DTensor does not have them.
        UnsupportedError: this process has a process group already; `out` is partial where the result is not;
            DTensor issues a collective that is not known here; or this torch lacks the parts of DTensor that are
            used.
    """
    require_known(dtype, DTYPES, "unknown dtype", LayoutError)
    mesh = Mesh.of("mesh", tuple(mesh_shape), tuple(f"x{i}" for i in range(len(mesh_shape))))
    for product in products:
        if product.out is not None:
            Layout(mesh, product.out).local_shape(product.sizes[:2], 0)  # raises where it does not fit
    by_rank = []
    with _without_warnings():
        for rank in range(mesh.num_ranks):
            with _fake_device_mesh(rank, mesh) as device_mesh:
                by_rank.append(
                    [_run_on_rank(product, mesh, device_mesh, rank, dtype) for product in products]
                )
    traffics = []
    for by_product in zip(*by_rank, strict=True):
        placements = {placements for placements, _ in by_product}
        assert len(placements) == 1, placements
        collectives = tuple(tuple(issued) for _, issued in by_product)
        received = tuple(sum(issued.received_bytes for issued in of_rank) for of_rank in collectives)
        traffics.append(DTensorTraffic(placements.pop(), received, collectives))
    return traffics


def to_torch(placements: Sequence[Placement]) -> tuple[Any, ...]:
    """Return these placements as DTensor's. Raises LayoutError for a placement that DTensor does not have."""
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
    """Return DTensor's placements as ours. Raises UnsupportedError for a placement that is not known here."""
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


def _run_on_rank(
    product: PlacedProduct, mesh: Mesh, device_mesh: Any, rank: int, dtype: str
) -> tuple[tuple[Placement, ...], list[DTensorCollective]]:
    import torch
    from torch.distributed.tensor import DTensor

    m, n, k = product.sizes

    def operand(shape: tuple[int, int], placements: tuple[Placement, ...]) -> Any:
        local = torch.empty(
            Layout(mesh, placements).local_shape(shape, rank), dtype=getattr(torch, dtype), device="meta"
        )
        return DTensor.from_local(
            local,
            device_mesh,
            to_torch(placements),
            run_check=False,
            shape=torch.Size(shape),
            stride=(shape[1], 1),
        )

    a, b = operand((m, k), product.a), operand((k, n), product.b)
    with torch.no_grad(), _count_collectives() as moved:
        c = a @ b
        out = from_torch(c.placements)
        if product.out is not None:
            if any(
                isinstance(new, Partial) and new != old for new, old in zip(product.out, out, strict=True)
            ):
                raise UnsupportedError("DTensor lets nobody redistribute a result into sums")
            c = c.redistribute(device_mesh, to_torch(product.out))
    return from_torch(c.placements), moved


@contextmanager
def _fake_device_mesh(rank: int, mesh: Mesh) -> Iterator[Any]:
    """Give the device mesh as `rank` sees it, in a fake process group."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from meshweave_lab.bench import observing

    if dist.is_initialized():
        raise UnsupportedError(
            "traffic is counted with a process group of its own; this process has one already"
        )
    serial = next(_serial)
    with observing.fake_default_group(rank, mesh.num_ranks):
        names = tuple(f"{axis}_{serial}" for axis in mesh.axes)
        yield init_device_mesh("cpu", mesh.shape, mesh_dim_names=names)


@contextmanager
def _count_collectives() -> Iterator[list[DTensorCollective]]:
    """Give a list that collects the collectives of the block, in the order of issue."""
    from meshweave_lab.bench import observing

    moved: list[DTensorCollective] = []

    def count_all_to_all(local: Any, mesh: Any, mesh_dim: int) -> None:
        num_bytes = local.numel() * local.element_size()
        moved.append(DTensorCollective("all_to_all", mesh.size(mesh_dim), num_bytes))

    with observing.observe_shard_dim_alltoall(count_all_to_all) as is_in_all_to_all:

        def count_collective(op: Any, args: tuple[Any, ...]) -> None:
            if op.namespace in _FUNCTIONAL and not is_in_all_to_all():
                moved.extend(_collectives(op.name().split("::")[1].split(".")[0], args))

        with observing.observe_ops(count_collective):
            yield moved


def _collectives(name: str, args: tuple[Any, ...]) -> Iterator[DTensorCollective]:
    from meshweave.execute.torch import compat_groups

    if name in _MOVE_NOTHING:
        return
    if name not in _KINDS:
        raise UnsupportedError(f"what DTensor's collective {name} moves is not known here")
    group = compat_groups.group_by_name(args[-1]) if isinstance(args[-1], str) else args[-1]
    for tensor in args[0] if isinstance(args[0], (list, tuple)) else [args[0]]:
        yield DTensorCollective(_KINDS[name], group.size(), tensor.numel() * tensor.element_size())


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence the log messages of DTensor, which would come once for every rank."""
    logger = logging.getLogger("torch.distributed.tensor")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
