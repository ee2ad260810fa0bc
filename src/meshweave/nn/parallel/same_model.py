"""Ranks compare what they give `parallelize` before anything is replaced, or take the first one's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshweave.execute.torch.context import TorchContext
from meshweave.nn.dtensor import mesh_of
from meshweave.nn.parallel.agreed import agree
from meshweave.nn.parallel.model_words import (
    argument_words,
    configuration_words,
    module_words,
    parameter_words,
    setting_words,
    version_words,
    weight_words,
)


def ranks_of(device_mesh: DeviceMesh | None) -> tuple[int, ...]:
    """Return the global ranks of a mesh; all ranks of the world for None."""
    return tuple(range(dist.get_world_size())) if device_mesh is None else tuple(mesh_of(device_mesh).ranks)


def require_same_model(
    context: TorchContext,
    module: nn.Module,
    device_mesh: DeviceMesh | None,
    arguments: Mapping[str, Any],
    *,
    broadcast_weights: bool,
) -> None:
    """Raise an error on all ranks of a mesh unless they have the same model, arguments, versions and settings.

    Collective. A rank outside of the mesh does nothing.

    Args:
        context: communicates between the ranks.
        module: the model, before it is changed.
        device_mesh: the mesh; None for all ranks of the world.
        arguments: the other arguments of `parallelize`, by name.
        broadcast_weights: whether ranks take the weights of the mesh's first rank instead of comparing weights.

    Raises:
        LayoutError: ranks differ; it names the first thing that differs.
        RankLostError, DeadlineError: another rank died, or did not come in time.
        BindError: another rank is in another call.
    """
    ranks = ranks_of(device_mesh)
    if len(ranks) == 1 or context.rank not in ranks:
        return
    mesh = (
        None
        if device_mesh is None
        else f"{tuple(device_mesh.mesh.shape)} of ranks {device_mesh.mesh.flatten().tolist()}"
    )
    given = {**arguments, "device_mesh": mesh, "broadcast_weights": broadcast_weights}
    given["cache_bytes of the context"] = context.programs.limit_bytes
    words: dict[str, Mapping[str, str]] = {
        "versions": version_words(),
        "arguments": argument_words(given),
        "configuration": configuration_words(module),
        "modules": module_words(module),
        "parameters": parameter_words(module),
        "settings": setting_words(),
    }
    if not broadcast_weights:
        words["weights"] = weight_words(module)
    agree(context, ranks, words, "all ranks to compare their models")
    if broadcast_weights:
        _broadcast(context, ranks, module)


@torch.no_grad()  # type: ignore[untyped-decorator]
def _broadcast(context: TorchContext, ranks: Sequence[int], module: nn.Module) -> None:
    """Give all ranks the parameters and buffers of the first, one by one."""
    group = context.group_of(tuple(ranks))
    for named in (module.named_parameters(), module.named_buffers()):
        for name, tensor in named:
            if tensor.device.type != "meta" and not isinstance(tensor, DTensor) and tensor.numel():
                flat = _bytes(tensor)
                with context.guard(f"the weights {name} of rank {ranks[0]}", ranks) as wait:
                    work = dist.broadcast(flat, src=ranks[0], group=group, async_op=True)
                    work.wait(wait.timeout)
                if flat.data_ptr() != tensor.data_ptr():
                    tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
