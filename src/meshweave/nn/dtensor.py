"""The one place where DTensors become layouts: `layout_of`, `mesh_of`.

A product sees every tensor as a matrix. A DTensor of more dims has its leading ones folded into the rows, and a
vector is one row on the left of a product, one column on the right; placements still name the dims of the DTensor.

Placements are applied from left to right, unless the spec of a DTensor says otherwise (`shard_order`). A Layout
has no such order: it is then on a mesh with the axes in that order.
"""

from __future__ import annotations

import keyword
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from meshweave.base.errors import LayoutError
from meshweave.describe.layout import Layout, Partial, Placement, Replicate, Shard, StridedShard
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.torch import compat

Side = Literal["left", "right"] | None
"""Which operand of a product a tensor is; a vector is a row on the left, a column on the right. None: it is no
operand; its dims are not folded into a matrix, and it may have none."""

_DEFAULT_AXES = ("row", "col", "depth")

_MESHES: WeakKeyDictionary[Any, Mesh] = WeakKeyDictionary()


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """Return the mesh over the global ranks of `device_mesh`: equal DeviceMeshes give equal meshes.

    Axes have the names of the mesh dims where all of those are ASCII identifiers and no keywords of Python, as
    the text of a program needs; else they are row, col, depth, d3, ... The mesh is named after axes and ranks:
    different meshes have different names in one program.
    """
    mesh = _MESHES.get(device_mesh)
    if mesh is None:
        shape = tuple(int(size) for size in device_mesh.mesh.shape)
        axes = tuple(device_mesh.mesh_dim_names or ())
        if len(axes) != len(shape) or not all(map(_is_word, axes)):
            axes = tuple(_DEFAULT_AXES[i] if i < 3 else f"d{i}" for i in range(len(shape)))
        mesh = _mesh(shape, axes, tuple(int(rank) for rank in device_mesh.mesh.reshape(-1).tolist()))
        _MESHES[device_mesh] = mesh
    return mesh


def layout_of(tensor: DTensor | compat.DTensorSpec, side: Side = "left") -> Layout:
    """Return the layout of a DTensor on its ranks, seen as the matrix of `matrix_shape`.

    The same spec gives the same Layout object as long as it is cached, and an equal one always.

    Args:
        side: "left" or "right" operand of a product, which matters for vectors only; None keeps the dims.

    Raises:
        LayoutError: an operand has no dims; a placement is none of Shard, Replicate, Partial("sum") and
            _StridedShard; the spec lacks the shape; or strided shards are of an uneven size that PyTorch,
            which takes them for a shard order, would gather otherwise than it cut them.
    """
    spec = compat.spec_of(tensor) if isinstance(tensor, DTensor) else tensor
    if spec.tensor_meta is None:
        raise LayoutError("this DTensorSpec has no tensor_meta, so the global shape is unknown")
    shape = tuple(int(size) for size in spec.tensor_meta.shape)
    layout = layout_on(spec.mesh, spec.placements, shape, side, compat.shard_order(spec))
    if (decoded := compat.decoded_shard_order(spec)) is not None:
        plain = [TorchShard(p.dim) if compat.is_strided_shard(p) else p for p in spec.placements]
        _check_readings(layout, layout_on(spec.mesh, plain, shape, side, decoded), shape)
    return layout


def layout_on(
    device_mesh: DeviceMesh,
    placements: Sequence[TorchPlacement],
    shape: Sequence[int],
    side: Side = "left",
    shard_order: compat.ShardOrder | None = None,
) -> Layout:
    """Return the layout of a tensor of global `shape` with these placements on `device_mesh`, as a matrix.

    Args:
        side: "left" or "right" operand of a product, which matters for vectors only; None keeps the dims.
        shard_order: pairs (tensor dim, the mesh dims that shard it, outermost first); None applies placements
            from left to right.

    Raises LayoutError for another number of placements than mesh dims, a placement that is none of Shard,
    Replicate, Partial("sum") and _StridedShard, an order that does not fit them, or an operand without dims.
    """
    mesh = mesh_of(device_mesh)
    if len(placements) != len(mesh.shape):
        raise LayoutError(
            f"{len(placements)} placements for the {len(mesh.shape)} dims of mesh {mesh.name}: one each is needed"
        )
    converted = tuple(
        _placement(placement, axis, len(shape)) for placement, axis in zip(placements, mesh.axes, strict=True)
    )
    order = tuple((int(dim), tuple(map(int, dims))) for dim, dims in shard_order or ())
    return _layout(mesh, converted, tuple(map(int, shape)), side, order)


@dataclass(frozen=True)
class MatrixView:
    """A DTensor as a matrix: leading dims are folded into rows; `is_transposed` takes the transpose of that."""

    tensor: DTensor
    is_transposed: bool = False

    @property
    def local(self) -> Tensor:
        """Return this rank's shard as a detached matrix (local rows, local columns), swapped if `is_transposed`.

        It is a view of the shard where the strides allow, else a copy.
        """
        local = compat.local_tensor(self.tensor)
        if local.ndim != 2:
            local = local.reshape(math.prod(local.shape[:-1]), local.shape[-1])
        return local.t() if self.is_transposed else local

    @property
    def layout(self) -> Layout:
        """Return the layout of the matrix before `is_transposed` swaps rows and columns.

        Raises LayoutError where the DTensor has none; see `layout_of`.
        """
        return layout_of(self.tensor)

    @property
    def shape(self) -> tuple[int, int]:
        """Return the global (rows, columns) before `is_transposed` swaps them."""
        return matrix_shape(tuple(self.tensor.shape))

    @property
    def order(self) -> tuple[int, int] | None:
        """Return (1, 0) if the DTensor is a column-major matrix, ignoring `is_transposed`, else None.

        Its global strides decide. None also where it does not have two dims.
        """
        if self.tensor.ndim != 2:
            return None
        down, across = self.tensor.stride()
        return (1, 0) if down < across else None


def matrix_shape(shape: Sequence[int], side: Side = "left") -> tuple[int, int]:
    """Return (rows, columns) of the matrix that a product sees in a tensor of `shape`.

    All dims but the last are folded into rows. A vector of n is (1, n) with `side` "left", (n, 1) with "right".

    Raises LayoutError for a tensor without dims, and for `side` None.
    """
    rows, columns = _folds(tuple(shape), side)
    return math.prod(rows), math.prod(columns)


def require_dtensors(a: object, b: object) -> None:
    """Raise LayoutError where a or b, the operands of `matmul`, is no DTensor."""
    if not (isinstance(a, DTensor) and isinstance(b, DTensor)):
        raise LayoutError(f"matmul takes two DTensors, not {type(a).__name__} and {type(b).__name__}")


def require_member(device_mesh: DeviceMesh, what: str) -> None:
    """Raise LayoutError, whose text begins with `what`, where this rank is not in `device_mesh`."""
    if device_mesh.get_coordinate() is None:
        raise LayoutError(
            f"{what}: rank {device_mesh.get_rank()} is not in {device_mesh}; only the ranks of the mesh call it"
        )


def ascending_dims(device_mesh: DeviceMesh) -> list[bool]:
    """Return, for each mesh dim, whether global ranks increase along it at all coordinates of the other dims.

    `[[0, 1], [3, 2]]` -> [True, False]. Along a dim where they do not, torch's all-gather or reduce-scatter of a
    DTensor swaps the parts of ranks: it orders members of a process group by rank, not by coordinate.
    """
    mesh = mesh_of(device_mesh)
    grid = np.reshape(mesh.ranks, mesh.shape)
    return [bool((np.diff(grid, axis=dim) > 0).all()) for dim in range(grid.ndim)]


def size_text(shape: Sequence[int]) -> str:
    """Return a shape as text: (4, 6) -> `4x6`, () -> `scalar`."""
    return "x".join(map(str, shape)) or "scalar"


def _is_word(name: str) -> bool:
    # Python's parser, which reads programs, rewrites identifiers outside ASCII.
    return name.isidentifier() and name.isascii() and not keyword.iskeyword(name)


def _mesh(shape: tuple[int, ...], axes: tuple[str, ...], ranks: tuple[int, ...]) -> Mesh:
    name = "_".join(f"{axis}{size}" for axis, size in zip(axes, shape, strict=True)) or "mesh"
    if ranks != tuple(range(len(ranks))):
        consecutive = ranks == tuple(range(ranks[0], ranks[0] + len(ranks)))
        name += f"_at{ranks[0]}" if consecutive else f"_x{zlib.crc32(repr(ranks).encode()):08x}"
    return Mesh(name, shape, axes, ranks)


def _placement(placement: TorchPlacement, axis: str, num_dims: int) -> Placement:
    # Exact types: a subclass (masked or norm partials, say) means something else with the same fields.
    kind = type(placement)
    if kind is TorchReplicate:
        return Replicate()
    if kind is TorchPartial and placement.reduce_op == "sum":
        return Partial()
    if kind is TorchShard or compat.is_strided_shard(placement):
        dim = int(placement.dim) + (num_dims if placement.dim < 0 else 0)
        if not 0 <= dim < num_dims:
            raise _no_such_dim(f"mesh axis {axis}", placement, num_dims)
        return Shard(dim) if kind is TorchShard else StridedShard(dim, int(placement.split_factor))
    raise LayoutError(
        f"mesh axis {axis}: placement {placement!r} has no counterpart in a layout; redistribute to Shard, "
        "Replicate, Partial('sum') or _StridedShard"
    )


def from_the_front(placement: TorchPlacement, num_dims: int, where: str) -> TorchPlacement:
    """Return a placement with a negative dim counted from the front: Shard(-1) -> Shard(1) for `num_dims` 2.

    Placements without a dim stay as they are. Raises LayoutError, whose text begins with `where`, for a dim that a
    tensor of `num_dims` dims does not have.
    """
    if type(placement) is not TorchShard and not compat.is_strided_shard(placement):
        return placement
    if not -num_dims <= placement.dim < num_dims:
        raise _no_such_dim(where, placement, num_dims)
    if placement.dim >= 0:
        return placement
    dim = placement.dim + num_dims
    if type(placement) is TorchShard:
        return TorchShard(dim)
    return compat.strided_shard(dim, placement.split_factor)


def _no_such_dim(where: str, placement: TorchPlacement, num_dims: int) -> LayoutError:
    return LayoutError(
        f"{where}: {placement!r} names dim {placement.dim} of a tensor of {num_dims} dims, which has "
        + (f"{-num_dims} to {num_dims - 1}" if num_dims else "none")
    )


def _folds(shape: tuple[int, ...], side: Side) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if side not in ("left", "right"):
        raise LayoutError(f"the side of a product is 'left' or 'right', not '{side}'")
    if not shape:
        raise LayoutError("a tensor without dims is no operand of a product; it needs at least one dim")
    if len(shape) == 1 and side == "right":
        return shape, ()
    return shape[:-1], shape[-1:]


@lru_cache(maxsize=1024)
def _layout(
    mesh: Mesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    side: Side,
    order: compat.ShardOrder,
) -> Layout:
    folds = None if side is None else _folds(shape, side)
    applied = list(range(len(placements)))
    for dim, axes in order:
        if any(getattr(placements[axis], "dim", None) != dim for axis in axes):
            raise LayoutError(f"shard order {order}: mesh dims {axes} do not all shard tensor dim {dim}")
        for place, axis in zip(sorted(axes), axes, strict=True):
            applied[place] = axis
    if applied != sorted(applied):
        mesh, placements = _transposed(mesh, tuple(applied)), tuple(placements[axis] for axis in applied)
    return Layout(mesh, placements, None if len(shape) == 2 else folds)


@lru_cache(maxsize=1024)
def _transposed(mesh: Mesh, axes: tuple[int, ...]) -> Mesh:
    """Return the mesh with the same ranks at the same coordinates and the axes in another order."""
    shape = tuple(mesh.shape[axis] for axis in axes)
    ranks = []
    for place in range(mesh.num_ranks):
        coords = [0] * len(axes)
        for axis in reversed(axes):
            place, coords[axis] = divmod(place, mesh.shape[axis])
        ranks.append(mesh.rank_at(tuple(coords)))
    return _mesh(shape, tuple(mesh.axes[axis] for axis in axes), tuple(ranks))


@lru_cache(maxsize=1024)
def _check_readings(layout: Layout, ordered: Layout, shape: tuple[int, ...]) -> None:
    """Refuse strided shards that mean one thing placement by placement and another as a shard order.

    PyTorch 2.13 cuts by the first reading (`distribute_tensor`) and gathers by the second (`redistribute`), and
    FSDP cuts by the second. They differ for some uneven sizes, where its own `full_tensor` fails.
    """
    seen = shape if layout.folds is None else tuple(map(math.prod, layout.folds))
    if not _same(layout, ordered, seen):
        raise LayoutError(
            f"{layout}: strided shards of an uneven tensor of shape {shape} do not say which rank holds what: "
            f"taken as a shard order they are {ordered}; pad the tensor, or give its DTensorSpec a shard_order"
        )


def _same(a: Layout, b: Layout, shape: Sequence[int]) -> bool:
    """Return whether every rank holds the same elements in the same order."""
    return all(
        np.array_equal(indices_a, indices_b)
        for rank in a.mesh.ranks
        for indices_a, indices_b in zip(a.indices(shape, rank), b.indices(shape, rank), strict=True)
    )


def kind_text(value: Any) -> str:
    """Return what a value is, as text for an error: `a DTensor (4, 6) of float32` for tensors, else `a list`."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    name = "DTensor" if hasattr(value, "device_mesh") else "tensor"
    return f"a {name} {tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
