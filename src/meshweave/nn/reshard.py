"""`meshweave.reshard`: DTensors from one device mesh to another, and whole state dicts in one schedule.

Nothing is gathered first: each rank of the destination gets what it holds there, from ranks that have it, and
copies are passed on among those that need the same (AlpaComm, MLSys '23). The meshes may have all, some or no
ranks in common.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from meshweave.base.errors import LayoutError, did_you_mean
from meshweave.describe.machine.cluster import Cluster
from meshweave.execute.torch import compat
from meshweave.execute.torch.bind import bind
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.resharding import Move, Place, Site, local_part, program_of, ranks_of, telling


def reshard(
    tensor: DTensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    cluster: Cluster | str | None = None,
    context: TorchContext | None = None,
) -> DTensor:
    """The same tensor on another device mesh, or with other placements on its own; every rank of either calls it.

    The first of a kind is planned and bound. What it is bound to, an input, an output and room for messages, is
    kept for the next of its kind as long as the context lives; `reshard_state_dict` keeps none of that.

    A rank outside the source mesh calls it with the DTensor that torch has there, without elements and with the
    global shape: `torch.distributed.tensor.empty(*shape, dtype=dtype, device_mesh=mesh, placements=placements)`,
    or `DTensor.from_local(torch.empty(0, dtype=dtype), mesh, placements, run_check=False, shape=shape,
    stride=stride)`, which takes Partial, too. A rank outside the destination mesh gets such a one. Ranks that are
    in neither may call it, take no part, and get one as well.

    Args:
        tensor: of any placements that a layout has: Shard, Replicate, Partial("sum"), _StridedShard. Sums are
            made on the source mesh, by torch, before anything leaves it.
        placements: one per dim of `device_mesh`: Shard, Replicate or _StridedShard.
        cluster: the machine, described or named as in the catalog, rank r being its chip r. None lets the ranks
            tell each other their host, and takes the catalog's rates within and between hosts. All ranks must
            name the same.
        context: process groups, deadline and liveness; by default those of the default process group.

    Returns:
        A contiguous DTensor in new memory. It is differentiable if `tensor` requires a gradient, which must be so
        on all ranks or on none. Then all ranks run their backward passes, in the same order: the gradient goes
        back to where `tensor` lies, with Replicate where that is partial. A rank outside the destination mesh
        calls the same functions as those in it, which cost nothing there, or just `result.sum().backward()`.
        Second derivatives are taken likewise, and need the same functions on all ranks.

    Raises:
        LayoutError: a mesh or placements that do not fit the tensor.
        BindError: a dtype that does not move; ranks that do not ask for the same, or of which one refuses, at the
            first reshard of its kind, before any byte of it moves.
        DescriptionError: there is no such cluster.
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    if not isinstance(tensor, DTensor):
        raise LayoutError(f"reshard takes a DTensor, not {_a(tensor)}: {_DISTRIBUTE}")
    site = _site(device_mesh, cluster, context)
    with telling(site, ranks_of([tensor.device_mesh, device_mesh])):
        source, target = Place.of(tensor), _given(device_mesh, placements, tensor.ndim)
        move = Move.of("", tensor, source, target)
        if site.rank in move.src.mesh and not source.is_partial:
            move.check(local_part(tensor), move.src, site.rank)
    wants = torch.is_grad_enabled() and tensor.requires_grad
    found: DTensor = _Reshard.apply(tensor, source, target, site, "differentiable" if wants else "")
    return found


_DISTRIBUTE = (
    "distribute_tensor(tensor, device_mesh, placements) makes one, or DTensor.from_local of local parts"
)


def _a(value: object) -> str:
    return f"a {type(value).__name__}"


def _site(device_mesh: DeviceMesh, cluster: Cluster | str | None, context: TorchContext | None) -> Site:
    if not isinstance(device_mesh, DeviceMesh):
        raise LayoutError(f"device_mesh is {_a(device_mesh)}; it must be a DeviceMesh")
    return Site.of(device_mesh, cluster, context)


def _given(device_mesh: DeviceMesh, placements: Sequence[Placement], num_dims: int) -> Place:
    """With dims counted from the front. Raises LayoutError."""
    if isinstance(placements, (Placement, str)) or not isinstance(placements, Sequence):
        raise LayoutError(f"placements is {placements!r}; it must be a sequence with one per dim of the mesh")
    counted = []
    for one in placements:
        if type(one) is Shard and -num_dims <= one.dim < 0:
            one = Shard(one.dim + num_dims)
        elif compat.is_strided_shard(one) and -num_dims <= one.dim < 0:
            one = compat.strided_shard(one.dim + num_dims, one.split_factor)
        counted.append(one)
    return Place(device_mesh, tuple(counted))


# --- one tensor, under autograd ---------------------------------------------------------------------------------


class _Reshard(torch.autograd.Function):  # type: ignore[misc]
    """Linear, and the gradient is the way back: another of these, so that it is differentiable in turn."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, source: Place, target: Place, site: Site, note: str) -> DTensor:
        ctx.back, ctx.target, ctx.site = source.of_gradient, target, site
        return _moved(tensor, source, target, site, note)

    @staticmethod
    def backward(ctx: Any, *grads: DTensor) -> tuple[DTensor | None, ...]:
        grad = _as_declared(grads[0], ctx.target, ctx.site)
        return _Reshard.apply(grad, ctx.target, ctx.back, ctx.site, ""), None, None, None, None


def _as_declared(grad: DTensor, target: Place, site: Site) -> DTensor:
    """A gradient in the placements of what it is of. Ranks outside that mesh could not know of any other."""
    place, mesh = Place.of(grad), target.device_mesh
    if mesh.get_coordinate() is None or place == target:
        return grad
    if place.of_gradient.is_plain and target.is_plain:  # what torch is sure to lay as it says
        redistributed: DTensor = grad.redistribute(mesh, target.placements)
        return redistributed
    own: DTensor = _Reshard.apply(grad, place, target, site, "")
    return own


def _moved(tensor: DTensor, source: Place, target: Place, site: Site, note: str) -> DTensor:
    """`reshard` outside autograd. What it takes is prepared at the first of a kind."""
    move = Move.of("", tensor, source, target)
    dtype, rank = move.dtype, site.rank
    out = site.nothing(dtype)
    if rank in move.src.mesh or rank in move.dst.mesh:
        program = program_of((move,), site, note=note)
        key = "bound", move, site.cluster
        run = site.known.get(key)
        if run is None:
            run = site.known[key] = bind(program, site.rank, {}, context=site.context)
        run.run({"x0": move.carried(_summed(tensor, source, target))} if rank in move.src.mesh else {})
        if rank in move.dst.mesh:
            out = run.outputs["y0"].clone().view(dtype).view(move.dst.local_shape(move.shape, rank))
    return DTensor(out, target.spec(move.shape, dtype), requires_grad=False)


def _summed(tensor: DTensor, source: Place, target: Place) -> Tensor:
    """This rank's part, once the sums of its mesh are made."""
    if not source.is_partial:
        return local_part(tensor)
    placements = source.summed(target, tensor.shape).placements
    return local_part(tensor.detach().redistribute(source.device_mesh, placements))


# --- many tensors -----------------------------------------------------------------------------------------------

Placements = Mapping[str, Sequence[Placement]] | Callable[[str, DTensor], Sequence[Placement]]


def reshard_state_dict(
    state: Mapping[str, DTensor | Tensor],
    device_mesh: DeviceMesh,
    placements: Placements,
    *,
    extra_bytes: int | None = None,
    cluster: Cluster | str | None = None,
    context: TorchContext | None = None,
    into: Mapping[str, DTensor] | None = None,
) -> dict[str, DTensor]:
    """All tensors of a state dict on another mesh, in one schedule; every rank of any of the meshes calls it.

    Entries may lie on different meshes, such as the stages of a pipeline. All ranks give all names, and a rank
    outside the mesh of an entry gives the DTensor without elements that it has there, see `reshard`.

    Args:
        state: DTensors by name, of any dtypes that `reshard` moves, mixed.
        placements: on `device_mesh`, by name or by a function of name and tensor.
        extra_bytes: the most memory in bytes that a rank may take beside what it has and what it gets; messages
            become as small as that needs. None sets no limit. Sums that have to be made are not counted, nor
            is the program itself.
        into: DTensors that get the results, such as the parameters of a receiver, by some or all of the names;
            they must lie as asked for, and not in the memory of `state`.
        cluster, context: as for `reshard`.

    Returns:
        DTensors by name in the order of `state`: those of `into`, else contiguous ones in new memory. None is
        differentiable.

    Raises as `reshard` does, and LayoutError where an entry is no DTensor, where one of `into` does not fit, or
    where `extra_bytes` is not enough.
    """
    site = _site(device_mesh, cluster, context)
    into = {} if into is None else into
    meshes = [one.device_mesh for one in state.values() if isinstance(one, DTensor)]
    ranks = ranks_of([*meshes, device_mesh])
    with telling(site, ranks):
        places = {name: _places(name, state[name], device_mesh, placements) for name in sorted(state)}
        moves = {name: Move.of(name, state[name], *place) for name, place in places.items()}
        _check(moves, state, places, site, extra_bytes)
        _check_into(into, moves, places, state, site)
    if not moves:
        return {}
    results = {
        name: into[name] if name in into else _room(moves[name], places[name][1], site) for name in state
    }
    if site.rank in ranks:
        program = program_of(tuple(moves.values()), site, extra_bytes=extra_bytes)
        tensors = {}
        for at, (name, move) in enumerate(moves.items()):
            if site.rank in move.src.mesh:
                tensors[f"x{at}"] = move.carried(_summed(state[name], *places[name]))
            if site.rank in move.dst.mesh:
                tensors[f"y{at}"] = move.carried(local_part(results[name]))
        bind(program, site.rank, tensors, context=site.context).run()
    return results


def _room(move: Move, target: Place, site: Site) -> DTensor:
    """What a tensor goes into; without elements on a rank outside its mesh."""
    out = site.nothing(move.dtype)
    if site.rank in move.dst.mesh:
        out = out.new_empty(move.dst.local_shape(move.shape, site.rank))
    return DTensor(out, target.spec(move.shape, move.dtype), requires_grad=False)


def _places(name: str, tensor: Tensor, mesh: DeviceMesh, placements: Placements) -> tuple[Place, Place]:
    """Where an entry lies, and where it shall. Raises LayoutError."""
    if not isinstance(tensor, DTensor):
        raise LayoutError(f"{name} is {_a(tensor)} and no DTensor: {_DISTRIBUTE}")
    if callable(placements):
        asked = placements(name, tensor)
    elif name in placements:
        asked = placements[name]
    else:
        raise LayoutError(f"there are no placements for {name}{did_you_mean(name, placements)}")
    try:
        return Place.of(tensor), _given(mesh, asked, tensor.ndim)
    except LayoutError as error:
        raise LayoutError(f"{name}: {error}") from None


def _check(
    moves: Mapping[str, Move],
    state: Mapping[str, Tensor],
    places: Mapping[str, tuple[Place, Place]],
    site: Site,
    extra_bytes: int | None,
) -> None:
    """Raises LayoutError where local parts are not what the placements say, or the limit is none."""
    if extra_bytes is not None and extra_bytes < 0:
        raise LayoutError(f"extra_bytes is {extra_bytes}; it must be at least 0")
    for name, move in moves.items():
        if site.rank in move.src.mesh and not places[name][0].is_partial:
            move.check(local_part(state[name]), move.src, site.rank)


def _check_into(
    into: Mapping[str, DTensor],
    moves: Mapping[str, Move],
    places: Mapping[str, tuple[Place, Place]],
    state: Mapping[str, Tensor],
    site: Site,
) -> None:
    """Raises LayoutError where what gets a result does not lie as that, or where the memory from its first to its
    last element is that of something else that is read or gets a result."""
    used = [
        (*_memory(local_part(one)), f"{name}, which is read")
        for name, one in state.items()
        if site.rank in moves[name].src.mesh
    ]
    for name, one in into.items():
        if name not in moves:
            raise LayoutError(f"into has {name}, which is not in the state{did_you_mean(name, moves)}")
        move, target = moves[name], places[name][1]
        if not isinstance(one, DTensor):
            raise LayoutError(f"into has {_a(one)} for {name}: {_DISTRIBUTE}")
        found = tuple(map(int, one.shape)), one.dtype, one.device_mesh
        if (
            found != (move.shape, move.dtype, target.device_mesh)
            or Place.of(one).layout(move.shape) != move.dst
        ):
            raise LayoutError(
                f"into has {name} of {one.dtype} and shape {tuple(one.shape)} as {list(one.placements)}; what is "
                f"asked for is of {move.dtype} and shape {move.shape} as {list(target.placements)}"
            )
        if site.rank in move.dst.mesh:
            move.check(local_part(one), move.dst, site.rank)
            start, end = _memory(local_part(one))
            for first, last, other in used:
                if max(first, start) < min(last, end):
                    raise LayoutError(f"{name} of into lies in the memory of {other}")
            used.append((start, end, f"{name} of into"))


def _memory(local: Tensor) -> tuple[int, int]:
    """[start, end) of the addresses of a tensor's elements."""
    if not local.numel():
        return 0, 0
    pairs = zip(local.shape, local.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs)
    return local.data_ptr(), local.data_ptr() + (last + 1) * local.element_size()
