"""What `Trainer` and accelerate ask of a model whose ranks take the same batch: how many these are."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from meshweave.base.errors import UnsupportedError
from meshweave.nn.parallel.model import ParallelModel


def offer_to_trainer(model: ParallelModel) -> None:
    """Mark a model of transformers as distributed, so that `Trainer` gives all its ranks the same batch.

    A `Trainer` then neither wraps nor moves the model, and lets all of these ranks save. It takes them for ranks
    of tensor parallelism, whatever their strategy; ranks outside of the model's mesh get other rows. Nothing is
    done if the number of ranks does not divide that of the world, or this version of transformers has no such
    mark.
    """
    module: Any = model.module
    size = len(model.strategy.mesh.ranks)
    if not hasattr(type(module), "is_distributed_loading_by_transformers") or dist.get_world_size() % size:
        return
    from transformers.distributed.configuration_utils import DistributedConfig

    around = dist.get_world_size() // size
    module._tp_size, module._is_distributed_loading_by_transformers = size, True
    module.config.distributed_config = DistributedConfig(tp_size=size, tp_plan={}, fsdp_size=around)


def accelerate_config(model: ParallelModel) -> Any:
    """Return the `ParallelismConfig` of accelerate for a parallelised model, on CPUs, too.

    Give it to `Accelerator` or `TrainingArguments` as `parallelism_config`. A `Trainer` on GPUs makes its own.

    Args:
        model: what `parallelize` returned.

    Raises:
        UnsupportedError: accelerate is not installed, the model is not one of transformers, or the number of its
            ranks does not divide that of the job.
    """
    try:
        from accelerate import ParallelismConfig
    except ImportError:
        raise UnsupportedError("accelerate_config needs accelerate: pip install accelerate") from None
    if not getattr(model.module, "_is_distributed_loading_by_transformers", False):
        raise UnsupportedError(
            f"{type(model.module).__name__} is none that Trainer and accelerate take: no model of transformers, "
            "or on a number of ranks that does not divide the job's; train it by loss(tokens, targets).backward()"
        )

    sizes = model.module.config.distributed_config
    config: Any = ParallelismConfig(tp_size=sizes.tp_size, dp_shard_size=sizes.dp_size)
    if model.strategy.device_mesh.device_type == "cpu":
        config._validate_accelerator = _accept  # it wants devices other than CPUs, and needs none here
    return config


def _accept(accelerator: Any) -> None:
    """Raise nothing."""
