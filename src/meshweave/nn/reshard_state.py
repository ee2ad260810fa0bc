"""`meshweave.nn.reshard_state_dict`: all tensors of a state dict move to another device mesh in one schedule.

A state dict may be nested, as that of an optimizer is: `{"state": {name: {"step": ..., "exp_avg": ...}},
"param_groups": [...]}`. Names of entries are then joined by dots: `state.up.weight.exp_avg`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor.placement_types import Placement

from meshweave.base.errors import LayoutError, did_you_mean
from meshweave.describe.layout import Layout, Replicate
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster
from meshweave.execute.torch import compat
from meshweave.execute.torch.bind import bind
from meshweave.execute.torch.call_order import share_refusal
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.dtensor import mesh_of
from meshweave.nn.parallel.checksums import checksum
from meshweave.nn.reshard import HOW_TO_DISTRIBUTE
from meshweave.nn.resharding import (
    DTensorMove,
    ReshardSession,
    check_dtype,
    given_spec,
    program_of,
    ranks_of,
    summed_part,
    with_article,
)
from meshweave.nn.shard_spec import ShardSpec

Placements = Mapping[str, Sequence[Placement]] | Callable[[str, DTensor], Sequence[Placement]]


def reshard_state_dict(
    state: Mapping[str, Any],
    device_mesh: DeviceMesh,
    placements: Placements,
    *,
    extra_bytes: int | None = None,
    cluster: Cluster | str | None = None,
    context: TorchContext | None = None,
    into: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Move all tensors of a state dict to another mesh in one schedule; every rank of any of the meshes calls it.

    Entries may lie on different meshes, such as the stages of a pipeline. All ranks give all names, and a rank
    outside the mesh of an entry gives the DTensor without elements that it has there, see `reshard`.

    A plain tensor, such as the `step` of an optimizer, counts as replicated over all source meshes. It must be
    the same on all their ranks, and arrives as a plain tensor of the same dtype and device on every destination
    rank. A rank that is only a destination gives any tensor of its shape and dtype.

    Args:
        state: DTensors and plain tensors by name, of any dtypes that `reshard` moves, mixed; or nested dicts and
            lists of them, with numbers, strings and None, which stay as they are on each rank.
        device_mesh: the destination.
        placements: of the DTensors on `device_mesh`, by name (dotted, where nested) or by a function of name and
            tensor. Plain tensors need none.
        extra_bytes: the most memory in bytes that a rank may take beside what it has and what it gets; messages
            become as small as that needs. None sets no limit. Sums that have to be made are not counted, nor
            is the program itself.
        into: tensors that get the results, such as the parameters of a receiver, by some or all of the names;
            they must have the shape, dtype and placements asked for, and no memory in common with `state`.
        cluster: the machine, described or named as in the catalog, rank r being its chip r, the same on all
            ranks; None takes rates of the catalog inside and between the hosts that ranks say they are on.
        context: process groups, deadline and liveness; by default those of the default process group.

    Returns:
        The state dict, nested as `state` and in its order, with the tensors of `into` or contiguous ones in new
        memory. No gradient flows through them. Outside the destination mesh tensors have no elements.

    Raises:
        LayoutError: a mesh or placements do not fit a tensor, there are plain tensors and no DTensor, two entries
            have one name, an entry is of another type, one of `into` does not fit, or `extra_bytes` is negative
            or not enough.
        BindError: a dtype does not move; there is no process group; ranks ask for different reshards, one of
            them refuses, or is in another call; or a plain tensor differs between source ranks.
        DescriptionError: there is no such cluster.
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    session = ReshardSession.of(device_mesh, cluster, context)
    into = {} if into is None else into
    leaves = list(_leaves(state))
    meshes = [leaf.device_mesh for _, leaf in leaves if isinstance(leaf, DTensor)]
    ranks = ranks_of([*meshes, device_mesh])
    num_tensors = sum(isinstance(leaf, Tensor) for _, leaf in leaves)
    with share_refusal(session.context, ranks, f"reshard_state_dict of {num_tensors} tensors"):
        tensors = _tensors(leaves)
        entries = _entries(tensors, meshes, device_mesh, placements)
        _check_entries(entries, session, extra_bytes)
        _check_into(into, entries, session)
        results = {name: _result_tensor(entries[name], into.get(name), session) for name in tensors}
        if entries and session.rank in ranks:
            _run(entries, results, session, extra_bytes)
    for name, entry in entries.items():
        if entry.is_plain and session.rank in entry.move.dst.mesh:
            results[name] = _delivered(results[name], entry.tensor, into.get(name))
    rebuilt: dict[str, Any] = _rebuilt(state, results)
    return rebuilt


@dataclass(frozen=True)
class _StateEntry:
    """A tensor of the state dict and its move; plain tensors have no source and target placements."""

    tensor: Tensor
    move: DTensorMove
    source: ShardSpec | None = None
    target: ShardSpec | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether the tensor is whole on each rank that has it, and no DTensor."""
        return self.target is None

    def source_part(self, session: ReshardSession) -> Tensor:
        """Return what this rank, one of the source mesh, sends from."""
        if self.source is None or self.target is None:
            return self.tensor.detach().to(session.context.device).contiguous()
        assert isinstance(self.tensor, DTensor)
        return summed_part(self.tensor, self.source, self.target)


def _run(
    entries: Mapping[str, _StateEntry],
    results: Mapping[str, Tensor],
    session: ReshardSession,
    extra_bytes: int | None,
) -> None:
    """Move the entries into the results."""
    digests = {
        name: _digest(entry)
        for name, entry in entries.items()
        if entry.is_plain and session.rank in entry.move.src.mesh
    }
    has_plain = any(entry.is_plain for entry in entries.values())
    program = program_of(
        tuple(entry.move for entry in entries.values()),
        session,
        extra_bytes=extra_bytes,
        digests=digests if has_plain else None,
    )
    buffers = {}
    for number, (name, entry) in enumerate(entries.items()):
        if session.rank in entry.move.src.mesh:
            buffers[f"x{number}"] = entry.move.as_carried(entry.source_part(session))
        if session.rank in entry.move.dst.mesh:
            buffers[f"y{number}"] = entry.move.as_carried(_local(results[name]))
    bind(program, session.rank, buffers, context=session.context).run()


def _digest(entry: _StateEntry) -> str:
    return f"{int(checksum(entry.move.as_carried(entry.tensor))):x}"


def _local(tensor: Tensor) -> Tensor:
    return compat.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def _result_tensor(entry: _StateEntry, given: Tensor | None, session: ReshardSession) -> Tensor:
    """Return the tensor that an entry arrives in; without elements on a rank outside its destination mesh."""
    move = entry.move
    if given is not None and not entry.is_plain:
        return given
    local = session.no_elements(move.dtype)
    if session.rank in move.dst.mesh:
        local = local.new_empty(move.dst.local_shape(move.shape, session.rank))
    if entry.target is None:
        return local
    return compat.from_spec(local, entry.target.torch_spec(move.shape, move.dtype))


def _delivered(arrived: Tensor, source: Tensor, given: Tensor | None) -> Tensor:
    """Return a plain tensor that has arrived: in the tensor given for it, else on the device of the rank's own."""
    if given is None:
        return arrived.to(source.device)
    with torch.no_grad():
        return given.copy_(arrived)


# --- nested state dicts -----------------------------------------------------------------------------------------


def _leaves(state: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of everything in a state dict that is no dict and no list."""
    if isinstance(state, (Mapping, list, tuple)):
        pairs = state.items() if isinstance(state, Mapping) else enumerate(state)
        for key, value in pairs:
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, state


def _rebuilt(state: Any, tensors: Mapping[str, Tensor], prefix: str = "") -> Any:
    """Return the state dict with its tensors replaced by name."""
    if isinstance(state, Mapping):
        names = {key: f"{prefix}.{key}" if prefix else str(key) for key in state}
        return {key: _rebuilt(value, tensors, names[key]) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        values = [
            _rebuilt(each, tensors, f"{prefix}.{at}" if prefix else str(at)) for at, each in enumerate(state)
        ]
        return type(state)(*values) if hasattr(state, "_fields") else type(state)(values)
    return tensors[prefix] if isinstance(state, Tensor) else state


def _tensors(leaves: Sequence[tuple[str, Any]]) -> dict[str, Tensor]:
    """Return the tensors by name. Raises LayoutError for leaves of other types and for names that occur twice."""
    tensors: dict[str, Tensor] = {}
    for name, value in leaves:
        if isinstance(value, Tensor):
            if name in tensors:
                raise LayoutError(f"the state has two tensors named {name}")
            tensors[name] = value
        elif value is not None and not isinstance(value, (bool, int, float, complex, str)):
            raise LayoutError(
                f"{name} is {with_article(value)}; a state dict has tensors, numbers, strings and None, in dicts "
                "and lists"
            )
    return tensors


# --- entries and their checks -----------------------------------------------------------------------------------


def _entries(
    tensors: Mapping[str, Tensor],
    meshes: Sequence[DeviceMesh],
    device_mesh: DeviceMesh,
    placements: Placements,
) -> dict[str, _StateEntry]:
    """Return the entries in the order of names, the same on all ranks. Raises LayoutError, BindError."""
    entries = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        if isinstance(tensor, DTensor):
            entries[name] = _dtensor_entry(name, tensor, device_mesh, placements)
        elif meshes:
            _check_plain_placements(name, placements)
            move = _plain_move(name, tensor, _mesh_over(meshes), mesh_of(device_mesh))
            entries[name] = _StateEntry(tensor, move)
        else:
            raise LayoutError(
                f"{name} is {with_article(tensor)}, and the state has no DTensor that says which ranks have it: "
                f"{HOW_TO_DISTRIBUTE}"
            )
    return entries


def _dtensor_entry(
    name: str, tensor: DTensor, device_mesh: DeviceMesh, placements: Placements
) -> _StateEntry:
    if callable(placements):
        wanted = placements(name, tensor)
    elif name in placements:
        wanted = placements[name]
    else:
        raise LayoutError(f"there are no placements for {name}{did_you_mean(name, placements)}")
    try:
        source, target = ShardSpec.of(tensor), given_spec(device_mesh, wanted, tensor.ndim)
    except LayoutError as error:
        raise LayoutError(f"{name}: {error}") from None
    return _StateEntry(tensor, DTensorMove.of(name, tensor, source, target), source, target)


def _check_plain_placements(name: str, placements: Placements) -> None:
    if not callable(placements) and any(type(p) is not TorchReplicate for p in placements.get(name, ())):
        raise LayoutError(
            f"{name} is a plain tensor, which arrives whole on every rank: leave its placements out, or give "
            "Replicate"
        )


def _plain_move(name: str, tensor: Tensor, src: Mesh, dst: Mesh) -> DTensorMove:
    """Return the move of a plain tensor, which is replicated over both meshes."""
    check_dtype(tensor.dtype, f"{name}: ")
    src_layout, dst_layout = (Layout(mesh, (Replicate(),) * len(mesh.shape)) for mesh in (src, dst))
    return DTensorMove(name, tuple(map(int, tensor.shape)), tensor.dtype, src_layout, dst_layout)


def _mesh_over(meshes: Sequence[DeviceMesh]) -> Mesh:
    """Return the one source mesh, or of several a mesh of all their ranks."""
    distinct = list(dict.fromkeys(map(mesh_of, meshes)))
    ranks = ranks_of(meshes)
    return distinct[0] if len(distinct) == 1 else Mesh("sources", (len(ranks),), ("rank",), ranks)


def _check_entries(
    entries: Mapping[str, _StateEntry], session: ReshardSession, extra_bytes: int | None
) -> None:
    """Raise LayoutError if a local part is not what its placements say, or the limit is negative."""
    if extra_bytes is not None and extra_bytes < 0:
        raise LayoutError(f"extra_bytes is {extra_bytes}; it must be at least 0")
    for entry in entries.values():
        is_partial = entry.source is not None and entry.source.is_partial
        if session.rank in entry.move.src.mesh and not is_partial:
            entry.move.check(_local(entry.tensor), entry.move.src, session.rank)


def _check_into(
    into: Mapping[str, Tensor], entries: Mapping[str, _StateEntry], session: ReshardSession
) -> None:
    """Raise LayoutError if a tensor of `into` does not lie as its result, or shares memory.

    The memory from its first to its last element must not be that of a tensor that is read or gets a result.
    """
    used = [
        (*_memory(_local(entry.tensor)), f"{name}, which is read")
        for name, entry in entries.items()
        if session.rank in entry.move.src.mesh
    ]
    for name, given in into.items():
        if name not in entries:
            raise LayoutError(f"into has {name}, which is not in the state{did_you_mean(name, entries)}")
        _check_fits(name, given, entries[name])
        move = entries[name].move
        if session.rank in move.dst.mesh:
            move.check(_local(given), move.dst, session.rank)
            start, end = _memory(_local(given))
            for first, last, what in used:
                if max(first, start) < min(last, end):
                    raise LayoutError(f"{name} of into lies in the memory of {what}")
            used.append((start, end, f"{name} of into"))


def _check_fits(name: str, given: Tensor, entry: _StateEntry) -> None:
    """Raise LayoutError if a tensor of `into` is not of the kind, shape, dtype and placements of its result."""
    move, target = entry.move, entry.target
    if target is None:
        if isinstance(given, DTensor) or not isinstance(given, Tensor) or given.dtype != move.dtype:
            raise LayoutError(f"into has {with_article(given)} for {name}, a plain tensor of {move.dtype}")
        return
    if not isinstance(given, DTensor):
        raise LayoutError(f"into has {with_article(given)} for {name}: {HOW_TO_DISTRIBUTE}")
    if (tuple(map(int, given.shape)), given.dtype, given.device_mesh) != (
        move.shape,
        move.dtype,
        target.device_mesh,
    ) or ShardSpec.of(given).layout(move.shape, None) != move.dst:
        raise LayoutError(
            f"into has {name} of {given.dtype} and shape {tuple(given.shape)} as {list(given.placements)}; what "
            f"is asked for is of {move.dtype} and shape {move.shape} as {list(target.placements or ())}"
        )


def _memory(local: Tensor) -> tuple[int, int]:
    """Return [start, end) of the addresses of a tensor's elements."""
    if not local.numel():
        return 0, 0
    pairs = zip(local.shape, local.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs)
    return local.data_ptr(), local.data_ptr() + (last + 1) * local.element_size()
