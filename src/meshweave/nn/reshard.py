"""`meshweave.reshard`: a DTensor moves from one device mesh to another, and its gradient moves back.

Nothing is gathered first. Each rank of the destination gets what it needs from ranks that have it, and ranks that
need the same pass copies on among themselves (AlpaComm, MLSys '23). The meshes may have all, some or no ranks in
common.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from meshweave.base.errors import LayoutError
from meshweave.describe.machine.cluster import Cluster
from meshweave.execute.torch import compat
from meshweave.execute.torch.bind import bind
from meshweave.execute.torch.cache import program_bytes
from meshweave.execute.torch.call_order import call_order, share_refusal
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.dtensor import ascending_dims, size_text
from meshweave.nn.resharding import (
    DTensorMove,
    ReshardSession,
    given_spec,
    program_of,
    ranks_of,
    summed_part,
    with_article,
)
from meshweave.nn.shard_spec import ShardSpec

NOT_COMPILED = "ranks outside of one mesh take part without elements, which a graph has no word for"


@torch.compiler.disable(reason=NOT_COMPILED)  # type: ignore[untyped-decorator]
def reshard(
    tensor: DTensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    cluster: Cluster | str | None = None,
    context: TorchContext | None = None,
) -> DTensor:
    """Move a DTensor to another device mesh, or to other placements on its own; every rank of either calls it.

    The first reshard of a kind is planned and bound. Its buffers, for the input, the output and messages, are kept
    for the next of its kind until the context drops them (`cache_bytes` of `TorchContext`); `reshard_state_dict`
    keeps none. `torch.compile` breaks the graph at the call.

    A rank outside the source mesh calls it with the DTensor that torch has there, without elements and with the
    global shape: `torch.distributed.tensor.empty(*shape, dtype=dtype, device_mesh=mesh, placements=placements)`,
    or `DTensor.from_local(torch.empty(0, dtype=dtype), mesh, placements, run_check=False, shape=shape,
    stride=stride)`, which takes Partial, too. A rank outside the destination mesh gets a DTensor without elements.
    Ranks that are in neither mesh may call it, too: they communicate nothing, and get one as well.

    Args:
        tensor: with placements that a layout has: Shard, Replicate, Partial("sum"), _StridedShard. Sums are
            made on the source mesh, by torch, before anything leaves it.
        device_mesh: the destination.
        placements: one per dim of `device_mesh`: Shard, Replicate or _StridedShard.
        cluster: the machine, described or named as in the catalog, rank r being its chip r. None: ranks exchange
            the names of their hosts, and rates of the catalog are taken inside and between hosts. All ranks must
            name the same.
        context: process groups, deadline and liveness; by default those of the default process group.

    Returns:
        A contiguous DTensor in new memory. It is differentiable if `tensor` requires a gradient, which must be so
        on all ranks or on none. Then all ranks run their backward passes, in the same order: the gradient goes
        back to where `tensor` lies, with Replicate where that is partial. A rank outside the destination mesh
        calls the same functions as those in it, which cost nothing there, or just `result.sum().backward()`.
        Second derivatives are taken likewise, and need the same functions on all ranks.

    Raises:
        LayoutError: a mesh or placements do not fit the tensor.
        BindError: a dtype does not move; there is no process group; or ranks ask for different reshards, one of
            them refuses, or is in another call, before any byte of it moves.
        DescriptionError: there is no such cluster.
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    if not isinstance(tensor, DTensor):
        raise LayoutError(f"reshard takes a DTensor, not {with_article(tensor)}: {HOW_TO_DISTRIBUTE}")
    session = ReshardSession.of(device_mesh, cluster, context)
    ranks = ranks_of([tensor.device_mesh, device_mesh])
    with share_refusal(session.context, ranks, _title(tensor)):
        source = ShardSpec.of(tensor)
        target = given_spec(device_mesh, placements, tensor.ndim)
        move = DTensorMove.of("", tensor, source, target)
        if session.rank in move.src.mesh and not source.is_partial:
            move.check(compat.local_tensor(tensor), move.src, session.rank)
        needs_gradient = torch.is_grad_enabled() and tensor.requires_grad
        result: DTensor = _ReshardFunction.apply(
            tensor, source, target, session, "differentiable" if needs_gradient else ""
        )
        return result


def _title(tensor: DTensor) -> str:
    return f"reshard of {size_text(tensor.shape)}"


HOW_TO_DISTRIBUTE = (
    "distribute_tensor(tensor, device_mesh, placements) makes one, or DTensor.from_local of local parts"
)


class _ReshardFunction(torch.autograd.Function):  # type: ignore[misc]
    """A linear function whose gradient is the reshard back, another of these, so that it is differentiable too."""

    @staticmethod
    def forward(
        ctx: Any, tensor: DTensor, source: ShardSpec, target: ShardSpec, session: ReshardSession, note: str
    ) -> DTensor:
        """Return the result, and keep what gradients need."""
        ctx.back, ctx.target, ctx.session = source.gradient, target, session
        return _resharded(tensor, source, target, session, note)

    @staticmethod
    def backward(ctx: Any, *grads: DTensor) -> tuple[DTensor | None, ...]:
        """Return the gradients of the arguments; None for what has none."""
        grad = _in_placements_of(ctx.target, grads[0], ctx.session)
        return _ReshardFunction.apply(grad, ctx.target, ctx.back, ctx.session, ""), None, None, None, None


def _in_placements_of(target: ShardSpec, grad: DTensor, session: ReshardSession) -> DTensor:
    """Return a gradient in the placements of its tensor, the only ones that ranks outside that mesh know of."""
    spec, mesh = ShardSpec.of(grad), target.device_mesh
    if mesh.get_coordinate() is None or spec == target:
        return grad
    is_plain = spec.gradient.is_plain and target.is_plain
    if is_plain and all(ascending_dims(mesh)):  # what torch surely redistributes as declared
        redistributed: DTensor = grad.redistribute(mesh, target.placements)
        return redistributed
    resharded: DTensor = _ReshardFunction.apply(grad, spec, target, session, "")
    return resharded


def _resharded(
    tensor: DTensor, source: ShardSpec, target: ShardSpec, session: ReshardSession, note: str
) -> DTensor:
    """Reshard outside autograd; the program is bound at the first reshard of a kind."""
    move = DTensorMove.of("", tensor, source, target)
    dtype, rank = move.dtype, session.rank
    local = session.no_elements(dtype)
    if rank in move.src.mesh or rank in move.dst.mesh:
        key = "bound", move, session.cluster
        with call_order(session.context).titled(_title(tensor)):
            program = program_of((move,), session, note=note)
            programs = session.context.programs
            cached = programs.get(program.ranks, key)
            if cached is None:
                bound = bind(program, rank, {}, context=session.context)
                cached = programs.put(program.ranks, key, bound, program_bytes(program))
            bound = cached.value
        is_source = rank in move.src.mesh
        bound.run({"x0": move.as_carried(summed_part(tensor, source, target))} if is_source else {})
        if rank in move.dst.mesh:
            local = bound.outputs["y0"].clone().view(dtype).view(move.dst.local_shape(move.shape, rank))
    return compat.from_spec(local, target.torch_spec(move.shape, dtype))
