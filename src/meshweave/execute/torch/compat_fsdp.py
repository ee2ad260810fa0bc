"""The private names of FSDP2 that meshweave uses: a part of `compat`, under the same rules."""

from __future__ import annotations

from typing import Any

from meshweave.execute.torch.compat import _missing


def fsdp_ranks(module: Any) -> list[int]:
    """Return the global ranks of the data-parallel mesh of the first FSDP2 module inside `module` with parameters.

    Return [] where no module is under FSDP2. Relies on `FSDPModule._get_fsdp_state()`, its `_fsdp_param_group`
    (2.9) or `_fsdp_param_groups` (2.13), and their `mesh_info.mesh`. Raises UnsupportedError where one of them
    is gone.
    """
    from torch.distributed.fsdp import FSDPModule

    for child in module.modules():
        if isinstance(child, FSDPModule):
            try:
                state = child._get_fsdp_state()
                groups = getattr(state, "_fsdp_param_groups", None)
                groups = [state._fsdp_param_group] if groups is None else groups
                meshes = [group.mesh_info.mesh for group in groups if group is not None]
            except AttributeError as error:
                raise _missing(f"FSDP state ({error})") from None
            if meshes:
                return [int(rank) for rank in meshes[0].mesh.flatten().tolist()]
    return []
