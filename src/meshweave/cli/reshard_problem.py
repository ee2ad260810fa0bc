"""Options of `meshweave reshard` as a problem: a tensor or a model's state dict, and the chips that it lies on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshweave.algorithms.reshard import ReshardProblem, TensorMove
from meshweave.base.errors import DescriptionError, LayoutError, printable, require_known
from meshweave.base.units import DTYPES
from meshweave.cli.options import MAX_RANKS
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.layout.spec import layout_of_spec
from meshweave.describe.machine.cluster import Cluster, gives_chips, load_cluster
from meshweave.describe.machine.network import HostsNetwork
from meshweave.describe.model import load_model
from meshweave.describe.model.state_dict import (
    SERVER_AXES,
    TRAINER_AXES,
    llama_parameters,
    server_layout,
    trainer_layout,
)

MAX_DIMS = 6
MAX_ELEMENTS = 1 << 40


@dataclass(frozen=True)
class ReshardRequest:
    """A resharding problem on its cluster.

    Attributes:
        problem: the tensors to move, each with its source and destination layout.
        cluster: rank r of the meshes is chip r of it.
        what: one line that describes the problem, for people.
        src, dst: the source and the destination mesh; they may overlap.
    """

    problem: ReshardProblem
    cluster: Cluster
    what: str
    src: Mesh
    dst: Mesh


@dataclass(frozen=True)
class MeshSide:
    """The value of the option --from or --to: a mesh, and how a tensor lies on it.

    Attributes:
        option: "--from" or "--to", for errors.
        shape: the shape of the mesh.
        layout_spec: how a tensor lies on it, as a spec string ("S0RR", `describe.layout.spec`); "" for none.
    """

    option: str
    shape: tuple[int, ...]
    layout_spec: str


@dataclass(frozen=True)
class MeshPositions:
    """Where on the cluster the meshes are.

    Attributes:
        src_first: the first rank of the source mesh.
        dst_first: the first rank of the destination mesh; None for the first one after those of the source, with
            `row_per_host` the first one of the next host.
        row_per_host: whether each row of a mesh (along its last axis) is in a host of its own; else ranks are
            consecutive.
    """

    src_first: int
    dst_first: int | None
    row_per_host: bool


def read_side(option: str, text: str) -> MeshSide:
    """Return the mesh shape and layout spec of a text such as "2x4 S0RR", or "2x4" without a spec.

    Args:
        option: the name of the option, for errors.

    Raises LayoutError where the shape is wrong or too large; the spec is not checked.
    """
    shape, _, spec = text.strip().partition(" ")
    parts = shape.lower().split("x")
    if not all(part.isdecimal() and part.isascii() and int(part[:10]) for part in parts):
        raise LayoutError(
            f"{option} '{printable(text)}' does not begin with the shape of a mesh, such as 2x4"
        )
    if len(parts) > MAX_DIMS or any(len(p) > 9 for p in parts) or math.prod(map(int, parts)) > MAX_RANKS:
        raise LayoutError(
            f"{option} '{printable(text)}': give a mesh of at most {MAX_DIMS} axes and {MAX_RANKS} ranks"
        )
    return MeshSide(option, tuple(map(int, parts)), "".join(printable(spec).split()))


def read_request(
    model: str | None,
    from_: str,
    to: str,
    cluster: str,
    shape: str | None,
    dtype: str,
    positions: MeshPositions,
) -> ReshardRequest:
    """Return the problem of moving the tensors of a model, or one tensor, between two meshes.

    Args:
        model: a model as for `load_model`; None for one tensor.
        from_, to: a mesh and, for one tensor, how it lies there: "2x4 S0RR".
        cluster: as for `load_cluster`; where it does not give the number of chips, these are as many as the
            meshes need.
        shape: the global sizes of one tensor, "1024,1024,512"; None for a model.
        dtype: the element type of the tensors.
        positions: where on the cluster the meshes are.

    Raises LayoutError, DescriptionError or UnsupportedError where an option is wrong, and LayoutError where both
    or neither of `model` and `shape` are given.
    """
    sides = read_side("--from", from_), read_side("--to", to)
    if model is not None:
        if shape is not None:
            raise LayoutError("--shape is for one tensor; the tensors of a model have shapes of their own")
        return model_problem(model, dtype, *sides, cluster, positions)
    if shape is None:
        raise LayoutError("neither a model nor a tensor; name a model, or give --shape 1024,1024,512")
    return tensor_problem(shape, dtype, *sides, cluster, positions)


def tensor_problem(
    shape: str, dtype: str, from_: MeshSide, to: MeshSide, cluster: str, positions: MeshPositions
) -> ReshardRequest:
    """Return the problem of moving one tensor from the mesh and layout `from_` to the mesh and layout `to`.

    Args:
        shape: the tensor's global sizes, "1024,1024,512".
        dtype: its element type.
        cluster: as for `load_cluster`; where it does not give the number of chips, as many as the meshes need.
        positions: where on the cluster the meshes are.

    Raises LayoutError, DescriptionError or UnsupportedError where an option is wrong.
    """
    _check_dtype(dtype)
    sizes = _read_shape(shape)
    for side in (from_, to):
        if not side.layout_spec:
            raise LayoutError(
                f"{side.option} says nothing about how the tensor lies; give a spec after the mesh, such as "
                f"'{'x'.join(map(str, side.shape))} {'S0' + 'R' * (len(sizes) - 1)}'"
            )
    axes = tuple(f"axis{n}" for n in range(MAX_DIMS))
    fitted, src, dst = _placed_meshes(
        from_, to, axes[: len(from_.shape)], axes[: len(to.shape)], cluster, positions
    )
    layouts = []
    for side, mesh in ((from_, src), (to, dst)):
        if (letters := sum(map(side.layout_spec.count, "RS"))) != len(sizes):
            raise LayoutError(
                f"{side.option}: spec '{side.layout_spec}' is for {letters} dims, and --shape has {len(sizes)}"
            )
        layouts.append(layout_of_spec(side.layout_spec, mesh))
    problem = ReshardProblem((TensorMove("tensor", sizes, dtype, *layouts),))
    what = (
        f"{'x'.join(map(str, sizes))} {dtype}, {from_.layout_spec} on {_mesh_text(src)} "
        f"to {to.layout_spec} on {_mesh_text(dst)} of {fitted.name}"
    )
    return ReshardRequest(problem, fitted, what, src, dst)


def model_problem(
    model: str, dtype: str, from_: MeshSide, to: MeshSide, cluster: str, positions: MeshPositions
) -> ReshardRequest:
    """Return the problem of moving a Llama-like model's state dict from a trainer's mesh to a server's.

    Args:
        from_: the trainer's mesh (FSDP, tensor parallel), without a layout spec.
        to: the server's mesh (replicas, tensor parallel), without a layout spec.

    The other arguments are those of `read_request`. Raises LayoutError, DescriptionError or UnsupportedError
    where an option is wrong.
    """
    _check_dtype(dtype)
    for side, axes in ((from_, TRAINER_AXES), (to, SERVER_AXES)):
        if side.layout_spec or len(side.shape) != len(axes):
            raise LayoutError(
                f"{side.option}: the tensors of a model lie along the axes {' and '.join(axes)}; give the sizes "
                "of these two alone, such as 8x8"
            )
    transformer = load_model(model)
    parameters = llama_parameters(transformer)
    fitted, src, dst = _placed_meshes(from_, to, TRAINER_AXES, SERVER_AXES, cluster, positions)
    problem = ReshardProblem(
        tuple(
            TensorMove(each.name, each.shape, dtype, trainer_layout(each, src), server_layout(each, dst))
            for each in parameters
        )
    )
    count = sum(math.prod(each.shape) for each in parameters)
    what = (
        f"{transformer.name}, {len(parameters)} tensors, {count:,} parameters of {dtype}, FSDP x TP on "
        f"{_mesh_text(src)} to replicas x TP on {_mesh_text(dst)} of {fitted.name}"
    )
    return ReshardRequest(problem, fitted, what, src, dst)


def _check_dtype(dtype: str) -> None:
    require_known(dtype, DTYPES, "unknown dtype", DescriptionError, "known:")


def _read_shape(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > MAX_DIMS or not all(p.isdecimal() and p.isascii() and len(p) < 14 for p in parts):
        raise LayoutError(
            f"shape '{printable(text)}' is not 1 to {MAX_DIMS} sizes separated by commas, such as 1024,1024,512"
        )
    sizes = tuple(map(int, parts))
    if not 1 <= math.prod(sizes) <= MAX_ELEMENTS:
        raise LayoutError(f"shape '{printable(text)}': give sizes of at least 1, and at most 2^40 elements")
    return sizes


def _mesh_text(mesh: Mesh) -> str:
    last = max(mesh.ranks)
    ranks = f"ranks {mesh.ranks[0]} to {last}" if mesh.num_ranks > 1 else f"rank {last}"
    return f"a {'x'.join(map(str, mesh.shape))} mesh ({ranks})"


# --- meshes on chips ------------------------------------------------------------------------------------


def _placed_meshes(
    from_: MeshSide,
    to: MeshSide,
    src_axes: tuple[str, ...],
    dst_axes: tuple[str, ...],
    cluster: str,
    positions: MeshPositions,
) -> tuple[Cluster, Mesh, Mesh]:
    """Return both meshes, and the cluster, in the size that they need where none is given."""
    for option, first in (("--at", positions.src_first), ("--to-at", positions.dst_first)):
        if first is not None and not 0 <= first < MAX_RANKS:
            raise LayoutError(f"{option} gives the first rank of a mesh, 0 to {MAX_RANKS - 1}")
    described = load_cluster(cluster)
    per_host = described.network.chips_per_host if isinstance(described.network, HostsNetwork) else 1
    src = _mesh("source", from_, src_axes, positions.src_first, per_host if positions.row_per_host else None)
    follows = max(src.ranks) + 1
    if positions.row_per_host:
        follows = -(-follows // per_host) * per_host
    first = follows if positions.dst_first is None else positions.dst_first
    dst = _mesh("destination", to, dst_axes, first, per_host if positions.row_per_host else None)
    return fitting_cluster(described, cluster, max(*src.ranks, *dst.ranks) + 1), src, dst


def _mesh(name: str, side: MeshSide, axes: tuple[str, ...], first: int, per_host: int | None) -> Mesh:
    if per_host is None:
        return Mesh.of(name, side.shape, axes, first)
    row = side.shape[-1]
    if first % per_host + row > per_host:
        raise LayoutError(
            f"{side.option}: a row of {row} ranks from rank {first} on does not fit a host of {per_host} chips"
        )
    rows = math.prod(side.shape[:-1])
    ranks = tuple(first + per_host * at + n for at in range(rows) for n in range(row))
    return Mesh(name, side.shape, axes, ranks)


def fitting_cluster(cluster: Cluster, named: str, needed: int) -> Cluster:
    """Return a cluster with at least `needed` chips.

    Where `named` gives the number of chips, as ":N" or in words, it is the cluster itself. Else the cluster is
    resized, to more or to fewer chips: to `needed`, rounded up to whole hosts if that is more than one host. One
    that does not come in that size is returned unchanged if it is large enough.

    Args:
        named: the text that `cluster` was loaded by, such as "dgx-h100" or "dgx-h100:16".

    Raises LayoutError where the cluster is too small; for a `named` that gives chips it says how many would do.
    """
    given = gives_chips(named)
    if given and cluster.num_chips >= needed:
        return cluster
    wanted = needed
    if isinstance(cluster.network, HostsNetwork) and needed > cluster.network.chips_per_host:
        wanted = -(-needed // cluster.network.chips_per_host) * cluster.network.chips_per_host
    if given:
        raise LayoutError(
            f"{printable(named)} has {cluster.num_chips} chips, and ranks 0 to {needed - 1} need one each; "
            f"{wanted} would do"
        )
    try:
        return cluster.with_chips(wanted)
    except DescriptionError as error:
        if cluster.num_chips >= needed:
            return cluster
        raise LayoutError(f"there are ranks 0 to {needed - 1}: {error}") from None
