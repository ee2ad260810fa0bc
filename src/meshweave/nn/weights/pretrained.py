"""`save_pretrained` of a model whose parameters are sharded over ranks: it writes what `from_pretrained` reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.weights.save import DEFAULT_FILE_BYTES, save_weights, write_by_first
from meshweave.nn.weights.slots import slots_of

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
}
_IGNORED = ("is_main_process", "token", "save_peft_format", "distributed_checkpoint", "safe_serialization")
"""Arguments of transformers' method that change nothing here."""


class RankSavePretrained:
    """The `save_pretrained` of a parallelised model of transformers; all ranks of the job call it.

    Args:
        module: the model.
        context: liveness and deadline of waits for other ranks; None takes those of the default process group.
    """

    def __init__(self, module: Any, context: TorchContext | None) -> None:
        self._module, self._context = module, context

    def __call__(
        self,
        save_directory: Path | str,
        *,
        max_shard_size: int | str = DEFAULT_FILE_BYTES,
        save_original_format: bool = True,
        **given: Any,
    ) -> None:
        """Write config.json, generation_config.json and the weights in safetensors, as `save_weights` does.

        On rank 0 it sets `dtype` and `architectures` of the model's configuration.

        Args:
            save_directory: the folder.
            max_shard_size: the most bytes of tensors in one file, such as "5GB".
            save_original_format: whether tensors get the names that checkpoints of the model's kind have, where
                transformers renames them when it loads one.
            **given: other arguments of transformers' method, which must change nothing.

        Raises:
            UnsupportedError: an argument would change something, the model has LoRA adapters, or safetensors is
                not installed.
            LayoutError: ranks do not have all of a tensor, or `max_shard_size` is no size.
            BindError: another rank refuses what it was given.
            CheckpointError: a rank cannot write; on all ranks.
            RankLostError, DeadlineError: other ranks are missing or late.
        """
        module = self._module
        if adapted := next((name for name, _ in module.named_parameters() if ".lora_" in name), None):
            raise UnsupportedError(
                f"{adapted} is an adapter: save after merge_and_unload() of PEFT's model, or by the "
                "save_pretrained of that, which writes adapters alone"
            )
        for name, value in given.items():
            if name not in _IGNORED and value not in (None, False):
                raise UnsupportedError(
                    f"save_pretrained with {name} is not done on a parallelised model; push or convert the folder"
                )
        mapping = stored_names(module) if save_original_format else _kept_names(module)
        context = self._context or TorchContext.default()
        file_bytes = bytes_of(max_shard_size)
        save_weights(module, save_directory, mapping=mapping, file_bytes=file_bytes, context=context)

        def write_configs() -> None:
            folder, config = str(save_directory), module.config
            config.dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
            config.architectures = [type(module).__name__]
            config.save_pretrained(folder)
            if module.can_generate():
                module.generation_config.save_pretrained(folder)

        write_by_first(Path(save_directory), write_configs, context)


def bytes_of(size: int | str) -> int:
    """Return a size in bytes, given as an integer from 1 on, or as text: "5GB" -> 5 * 10**9, "1GiB" -> 2**30.

    Raises LayoutError for other values.
    """
    if type(size) is int and size > 0:
        return size
    text = size if isinstance(size, str) else ""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    num_bytes = int(float(match[1]) * _UNITS.get(match[2].upper(), 0)) if match else 0
    if num_bytes < 1:
        raise LayoutError(f"max_shard_size is {size!r}; give bytes, or text such as '5GB'")
    return num_bytes


def stored_names(module: nn.Module) -> dict[str, str]:
    """Return {name of a tensor in the module: the name under which transformers stores it}.

    A tied tensor goes by the first of its names. Where transformers would join or split tensors as it saves them,
    all names are the module's own, for a tied tensor the one that transformers keeps; `from_pretrained` reads
    these, too.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    names = _kept_names(module)
    if any(hasattr(each, "operations") for each in get_model_conversion_mapping(module)):
        return names  # of several tensors one: from_pretrained reads the module's own names, too
    numbers = {name: torch.tensor(number) for number, name in enumerate(names.values())}
    reverted: Mapping[str, torch.Tensor] = revert_weight_conversion(module, numbers)
    stored = {int(number): name for name, number in reverted.items()}
    return {first: stored[number] for number, first in enumerate(names)}


def _kept_names(module: nn.Module) -> dict[str, str]:
    """Return, by the first name of each tensor, that under which transformers keeps it of names that are tied."""
    tied = getattr(module, "_tied_weights_keys", None) or {}
    kept = {}
    for slot in slots_of(module):
        own = [name for name in slot.names if name not in tied]
        kept[slot.names[0]] = (own or slot.names)[0]
    return kept
