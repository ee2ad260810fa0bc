"""`load_weights`: each rank reads of a checkpoint what it has of the module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from meshweave.base.errors import DescriptionError, LayoutError, did_you_mean
from meshweave.nn.weights.blocks import block_of
from meshweave.nn.weights.checkpoint import Checkpoint
from meshweave.nn.weights.slots import Mapped, ModuleTensor, StoredTensor, slots_of, stored_as


@dataclass
class LoadReport:
    """What `load_weights` did on this rank.

    Attributes:
        loaded: from the name of a tensor in the module, the first of several, to its name in the checkpoint.
        missing: names of tensors of the module that the checkpoint does not have; these are as they were.
        unused: names of tensors of the checkpoint that the module does not have.
        bytes_read: the bytes of the parts that this rank read.
    """

    loaded: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    bytes_read: int = 0


@dataclass
class _Names:
    """How the tensors of a module are called in a checkpoint."""

    module: nn.Module
    checkpoint: Checkpoint
    mapping: Mapped

    @cached_property
    def _tied(self) -> dict[str, str]:
        """What transformers says of a model's tied weights, one name by the other."""
        keys = getattr(self.module, "_tied_weights_keys", None)
        is_tied = getattr(getattr(self.module, "config", None), "tie_word_embeddings", False)
        return dict(keys) if isinstance(keys, Mapping) and is_tied else {}

    def stored(self, names: Sequence[str]) -> StoredTensor | None:
        """Return where a tensor with these names is stored; None where it is not."""
        tied = [self._tied[name] for name in names if name in self._tied]
        base = getattr(self.module, "base_model_prefix", "")
        for name in (*names, *tied):
            mapped = stored_as(self.mapping, name)
            prefixed = (mapped.name, mapped.name.removeprefix(f"{base}."), f"{base}.{mapped.name}")
            for candidate in prefixed if base else prefixed[:1]:
                if candidate in self.checkpoint:
                    return StoredTensor(candidate, mapped.is_transposed)
        renamed = next((self._renamed[name] for name in (*names, *tied) if name in self._renamed), None)
        return None if renamed is None else StoredTensor(renamed)

    @cached_property
    def _renamed(self) -> dict[str, str]:
        """What transformers renames of a checkpoint when it loads one, by the name in the model."""
        if not any(base.__module__.startswith("transformers.") for base in type(self.module).__mro__):
            return {}
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
        except ImportError:  # of versions that rename nothing
            return {}
        renamings = [
            each for each in get_model_conversion_mapping(self.module) if not hasattr(each, "operations")
        ]
        names = {}
        for stored in self.checkpoint.names:
            name = stored
            for renaming in renamings:
                name, _ = renaming.rename_source_key(name)
            names[name] = stored
        return names


@torch.no_grad()  # type: ignore[untyped-decorator]
def load_weights(
    module: nn.Module,
    path: Path | str,
    *,
    mapping: Mapped = None,
    device: torch.device | str | None = None,
    strict: bool = True,
) -> LoadReport:
    """Fill the parameters and buffers of a module from safetensors; each rank reads what it has, without messages.

    Tensors may be DTensors with any placements but partial ones, in a stage of a pipeline or all of a model.
    Tied ones are read once, under whichever name the checkpoint has. Names with and without the prefix of a
    Hugging Face model's base are the same. Values are cast to the dtypes of the module.

    Args:
        path: a .safetensors file, or a folder with model.safetensors or with model.safetensors.index.json.
        mapping: a dict or function from a tensor's name in the module to its name in the checkpoint, or to a
            `StoredTensor`, where it is stored transposed; None, or no entry, for its own name.
        device: where tensors go that are on the meta device. None is the CPU.
        strict: whether a tensor that the checkpoint does not have is an error, once all others are filled; extra
            ones never are.

    Raises:
        DescriptionError: there is no such checkpoint, or with `strict` tensors of the module are missing in it.
        LayoutError: a tensor has another shape there, or fractions for integers here, or is a partial sum here;
            or a parameter of floats is quantised there: of integers, or of 8 bits with a scale beside it.
        UnsupportedError: safetensors is not installed.
    """
    checkpoint, report = Checkpoint(path), LoadReport()
    names, used = _Names(module, checkpoint, mapping), set()
    for slot in slots_of(module):
        stored = names.stored(slot.names)
        if stored is None:
            report.missing.append(slot.names[0])
            continue
        used.add(stored.name)
        block = block_of(slot.names[0], slot.tensor)
        _check_shape(slot, stored, checkpoint)
        part = checkpoint.read(stored.name, block[::-1] if stored.is_transposed else block)
        _check_dtype(slot, stored, checkpoint, part.dtype)
        report.bytes_read += part.numel() * part.element_size()
        slot.fill(part.t() if stored.is_transposed else part, device)
        report.loaded[slot.names[0]] = stored.name
    report.unused = [name for name in checkpoint.names if name not in used]
    if strict and report.missing:
        near = did_you_mean(report.missing[0], report.unused)
        listed = ", ".join(report.missing[:3]) + (", ..." if len(report.missing) > 3 else "")
        raise DescriptionError(f"{path}: {len(report.missing)} tensors are missing, {listed}{near}")
    return report


def _check_dtype(
    slot: ModuleTensor, stored: StoredTensor, checkpoint: Checkpoint, there: torch.dtype
) -> None:
    """Raise LayoutError where values of dtype `there` are none of the module's dtype: they would lose a part, or
    a scale beside them.
    """
    own, where = slot.tensor.dtype, f"{stored.name} of {checkpoint.path}"
    is_real = not own.is_complex
    if there.is_floating_point > (own.is_floating_point or own.is_complex) or (there.is_complex and is_real):
        raise LayoutError(f"{slot.names[0]} is {own}, and {where} {there}")
    scales = (f"{stored.name}{ending}" for ending in ("_scale_inv", "_scale"))
    has_scale = there.itemsize == 1 < own.itemsize and any(scale in checkpoint for scale in scales)
    is_coded = has_scale or not (there.is_floating_point or there.is_complex)
    if is_coded and isinstance(slot.tensor, nn.Parameter) and (own.is_floating_point or own.is_complex):
        raise LayoutError(
            f"{slot.names[0]} is {own}, and {where} is quantised, as {there}; write that file in a floating-point "
            "dtype first"
        )


def _check_shape(slot: ModuleTensor, stored: StoredTensor, checkpoint: Checkpoint) -> None:
    """Raise LayoutError where a tensor is stored in another shape, transposed or not as it should be included."""
    shape, there = tuple(slot.tensor.shape), checkpoint.shape(stored.name)
    expected = shape[::-1] if stored.is_transposed else shape
    if there != expected:
        hint = ""
        if len(there) == 2 and there == expected[::-1]:
            instead = f"StoredTensor({stored.name!r}, is_transposed={not stored.is_transposed})"
            hint = f"; it is stored transposed: map it to {instead}"
        raise LayoutError(
            f"{slot.names[0]} has shape {shape}, and {stored.name} of {checkpoint.path} {there}{hint}"
        )
