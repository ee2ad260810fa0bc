"""What `meshweave reshard` is to move, a tensor or a model's state dict, and the chips that it lies on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshweave.algorithms.reshard import Item, ReshardProblem
from meshweave.base.errors import DescriptionError, LayoutError, UnsupportedError, nearest
from meshweave.base.units import DTYPES
from meshweave.cli.options import MAX_RANKS
from meshweave.describe.files import printable
from meshweave.describe.layout import Replicate
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.layout.spec import layout_of_spec
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.network import Hosts
from meshweave.describe.model import load_model
from meshweave.describe.model.state_dict import (
    SERVER_AXES,
    TRAINER_AXES,
    server_layout,
    state_dict,
    trainer_layout,
)

MAX_DIMS = 6
MAX_ELEMENTS = 1 << 40
MAX_PAIRS = 1 << 16
"""Shards of the source times shards of the destination, for one tensor; so many can take 10 s to plan."""
MAX_ALL_PAIRS = 1 << 21
"""For all tensors of a state dict together."""


@dataclass(frozen=True)
class Asked:
    """A problem on its cluster, and a line that says what it is."""

    problem: ReshardProblem
    cluster: Cluster
    what: str
    src: Mesh
    dst: Mesh


@dataclass(frozen=True)
class Side:
    """The value of --from or --to: the shape of a mesh, and a spec string or nothing."""

    option: str
    shape: tuple[int, ...]
    spec: str


@dataclass(frozen=True)
class Laid:
    """Where meshes begin, in ranks; `by_host`: each row of a mesh in a host of its own."""

    at: int
    to_at: int | None
    by_host: bool


def read_side(option: str, text: str) -> Side:
    """ "2x4 S0RR" as a mesh of (2, 4) and the spec S0RR. Raises LayoutError."""
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
    return Side(option, tuple(map(int, parts)), "".join(printable(spec).split()))


def tensor_problem(shape: str, dtype: str, from_: Side, to: Side, cluster: str, laid: Laid) -> Asked:
    """One tensor between two layouts that spec strings name. Raises MeshweaveError."""
    _check_dtype(dtype)
    sizes = _read_shape(shape)
    for side in (from_, to):
        if not side.spec:
            raise LayoutError(
                f"{side.option} says nothing about how the tensor lies; give a spec after the mesh, such as "
                f"'{'x'.join(map(str, side.shape))} {'S0' + 'R' * (len(sizes) - 1)}'"
            )
    axes = tuple(f"axis{n}" for n in range(MAX_DIMS))
    sized, src, dst = _meshes(from_, to, axes[: len(from_.shape)], axes[: len(to.shape)], cluster, laid)
    layouts = []
    for side, mesh in ((from_, src), (to, dst)):
        if (letters := sum(map(side.spec.count, "RS"))) != len(sizes):
            raise LayoutError(
                f"{side.option}: spec '{side.spec}' is for {letters} dims, and --shape has {len(sizes)}"
            )
        layouts.append(layout_of_spec(side.spec, mesh))
    problem = ReshardProblem((Item("tensor", sizes, dtype, *layouts),))
    what = (
        f"{'x'.join(map(str, sizes))} {dtype}, {from_.spec} on {_told(src)} to {to.spec} on {_told(dst)} "
        f"of {sized.name}"
    )
    return Asked(_checked(problem), sized, what, src, dst)


def model_problem(model: str, dtype: str, from_: Side, to: Side, cluster: str, laid: Laid) -> Asked:
    """A state dict, from a trainer's mesh to a server's. Raises MeshweaveError."""
    _check_dtype(dtype)
    for side, axes in ((from_, TRAINER_AXES), (to, SERVER_AXES)):
        if side.spec or len(side.shape) != len(axes):
            raise LayoutError(
                f"{side.option}: the tensors of a model lie along the axes {' and '.join(axes)}; give the sizes "
                "of these two alone, such as 8x8"
            )
    described = load_model(model)
    parameters = state_dict(described)
    sized, src, dst = _meshes(from_, to, TRAINER_AXES, SERVER_AXES, cluster, laid)
    problem = ReshardProblem(
        tuple(
            Item(one.name, one.shape, dtype, trainer_layout(one, src), server_layout(one, dst))
            for one in parameters
        )
    )
    count = sum(math.prod(one.shape) for one in parameters)
    what = (
        f"{described.name}, {len(parameters)} tensors, {count:,} parameters of {dtype}, FSDP x TP on {_told(src)} "
        f"to replicas x TP on {_told(dst)} of {sized.name}"
    )
    return Asked(_checked(problem), sized, what, src, dst)


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise DescriptionError(
            f"unknown dtype '{printable(dtype)}'{nearest(dtype, DTYPES)}; known: {', '.join(DTYPES)}"
        )


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


def _told(mesh: Mesh) -> str:
    last = max(mesh.ranks)
    ranks = f"ranks {mesh.ranks[0]} to {last}" if mesh.num_ranks > 1 else f"rank {last}"
    return f"a {'x'.join(map(str, mesh.shape))} mesh ({ranks})"


def _checked(problem: ReshardProblem) -> ReshardProblem:
    """Raises UnsupportedError where planning would take long."""
    pairs = []
    for item in problem.items:
        shards = [
            math.prod(
                size
                for size, placement in zip(layout.mesh.shape, layout.placements, strict=True)
                if not isinstance(placement, Replicate)
            )
            for layout in (item.src, item.dst)
        ]
        pairs.append(math.prod(shards))
    if max(pairs) > MAX_PAIRS or sum(pairs) > MAX_ALL_PAIRS:
        raise UnsupportedError(
            f"{sum(pairs):,} pairs of a source and a destination shard are more than is planned here "
            f"({MAX_PAIRS:,} for a tensor, {MAX_ALL_PAIRS:,} for a model); give smaller meshes"
        )
    return problem


# --- meshes on chips ------------------------------------------------------------------------------------


def _meshes(
    from_: Side, to: Side, src_axes: tuple[str, ...], dst_axes: tuple[str, ...], cluster: str, laid: Laid
) -> tuple[Cluster, Mesh, Mesh]:
    """Both meshes, and the cluster in the size that they need where none is given."""
    for option, first in (("--at", laid.at), ("--to-at", laid.to_at)):
        if first is not None and not 0 <= first < MAX_RANKS:
            raise LayoutError(f"{option} gives the first rank of a mesh, 0 to {MAX_RANKS - 1}")
    found = load_cluster(cluster)
    per_host = found.network.chips_per_host if isinstance(found.network, Hosts) else 1
    src = _mesh("source", from_, src_axes, laid.at, per_host if laid.by_host else None)
    follows = max(src.ranks) + 1
    if laid.by_host:
        follows = -(-follows // per_host) * per_host
    first = follows if laid.to_at is None else laid.to_at
    dst = _mesh("destination", to, dst_axes, first, per_host if laid.by_host else None)
    return _sized(found, cluster, max(*src.ranks, *dst.ranks) + 1), src, dst


def _mesh(name: str, side: Side, axes: tuple[str, ...], first: int, per_host: int | None) -> Mesh:
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


def _sized(cluster: Cluster, named: str, needed: int) -> Cluster:
    """A cluster for which no number of chips was given at the size that is needed, if it comes in that size.

    Raises LayoutError where it is too small, with the number of chips that would do.
    """
    base, _, number = named.rpartition(":")
    given = bool(base) and number.isdecimal()
    if given and cluster.num_chips >= needed:
        return cluster
    whole = load_cluster(base) if given else cluster
    wanted = needed
    if isinstance(whole.network, Hosts) and needed > whole.network.chips_per_host:
        wanted = -(-needed // whole.network.chips_per_host) * whole.network.chips_per_host
    try:
        fitting = whole.with_chips(wanted)
    except DescriptionError as error:
        if not given and cluster.num_chips >= needed:
            return cluster
        raise LayoutError(f"the meshes take ranks 0 to {needed - 1}: {error}") from None
    if given:
        raise LayoutError(
            f"{printable(named)} has {cluster.num_chips} chips, and the meshes need {needed}; "
            f"{printable(base)}:{wanted} would do"
        )
    return fitting
