"""The tensors of a module, and how a checkpoint calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshweave.execute.torch import compat


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor of a module is in a checkpoint.

    Attributes:
        name: its name there.
        is_transposed: whether a matrix is stored as its transpose, as GPT-2's Conv1D has the weights of what is a
            Linear elsewhere.
    """

    name: str
    is_transposed: bool = False


Mapped = Mapping[str, str | StoredTensor] | Callable[[str], str | StoredTensor | None] | None
"""From the name of a tensor of a module to where it is stored; None, returned too, or no entry: its own name."""


def stored_as(mapping: Mapped, name: str) -> StoredTensor:
    """Return the name of tensor `name` of a module in a checkpoint, and whether it is stored transposed.

    `mapping` is a dict or function from names in the module to names in the checkpoint, or to a `StoredTensor`.
    None, a dict without an entry, and a function that returns None mean the tensor's own name.
    """
    mapped: str | StoredTensor | None = None
    if mapping is not None:
        mapped = mapping(name) if callable(mapping) else mapping.get(name)
    return mapped if isinstance(mapped, StoredTensor) else StoredTensor(name if mapped is None else mapped)


@dataclass(frozen=True)
class ModuleTensor:
    """One parameter or buffer of a module.

    Attributes:
        names: all its names in the module, more than one if it is tied.
        tensor: the tensor.
        owners: (module, attribute name) of each place that has it.
    """

    names: tuple[str, ...]
    tensor: Tensor
    owners: tuple[tuple[nn.Module, str], ...]

    def fill(self, part: Tensor, device: torch.device | str | None) -> None:
        """Copy `part`, which has the shape of this rank's shard, into the tensor, cast to its dtype.

        A tensor on the meta device is replaced, under all its names, by one with memory on `device`, None for the
        CPU. On a rank that has no elements of the tensor `part` is not read.
        """
        own = compat.local_tensor(self.tensor) if isinstance(self.tensor, DTensor) else self.tensor.detach()
        if not own.numel():  # on a rank outside of its mesh torch has (0,) for it, of whatever dims it is
            part = part.new_empty(own.shape)
        if own.device.type != "meta":
            own.copy_(part)
            return
        local = part.to(device or "cpu", own.dtype, copy=True).contiguous()
        made: Tensor = (
            compat.from_spec(local, compat.spec_of(self.tensor))
            if isinstance(self.tensor, DTensor)
            else local
        )
        is_parameter = isinstance(self.tensor, nn.Parameter)
        if is_parameter:
            made = nn.Parameter(made, requires_grad=self.tensor.requires_grad)
        for module, name in self.owners:
            setattr(module, name, made)


def plain_name(name: str) -> str:
    """Return the name of a tensor without the names of wrapper modules: "0._orig_mod.weight" -> "0.weight".

    These are the wrapper of activation checkpointing and the module that `torch.compile` returns.
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")


def slots_of(module: nn.Module) -> list[ModuleTensor]:
    """Return the parameters and persistent buffers of a module, each once with all of its names.

    Names are plain (`plain_name`).
    """
    by_tensor: dict[int, tuple[Tensor, list[str], list[tuple[nn.Module, str]]]] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        own = [
            *owner.named_parameters(recurse=False, remove_duplicate=False),
            *owner.named_buffers(recurse=False, remove_duplicate=False),
        ]
        for name, tensor in own:
            if name not in owner._non_persistent_buffers_set:
                _, names, owners = by_tensor.setdefault(id(tensor), (tensor, [], []))
                names.append(plain_name(f"{prefix}.{name}" if prefix else name))
                owners.append((owner, name))
    return [ModuleTensor(tuple(names), tensor, tuple(owners)) for tensor, names, owners in by_tensor.values()]
