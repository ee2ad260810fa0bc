"""The memory that a rank has free for a trial of a plan, and what a trial needs."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from meshweave.base.errors import LayoutError
from meshweave.nn.parallel.all_ranks import device_type_here

_MEMORY = Path("/proc/meminfo")


def available_bytes() -> float:
    """Return the free bytes of memory for a rank: of its GPU, or its equal share of the host's.

    The host's are divided by `LOCAL_WORLD_SIZE`, or the ranks of the world where that is not set; infinity where
    the host does not say.
    """
    if device_type_here() == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    if not _MEMORY.exists():
        return math.inf
    fields = dict(line.split(":", 1) for line in _MEMORY.read_text("utf-8").splitlines())
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size())
    return 1024 * float(fields["MemAvailable"].split()[0]) / ranks


def needed_bytes_of(module: nn.Module) -> int:
    """Return the most bytes, beside activations, that a trial needs on a rank: four times those of the parameters.

    They are a copy of the model, its gradients, and two states of an optimizer. Raises LayoutError where
    parameters are on the meta device, or there are none.
    """
    total = 0
    if next(module.parameters(), None) is None:
        raise LayoutError("a model without parameters cannot be tried: there is nothing to train")
    for parameter in module.parameters():
        if parameter.device.type == "meta":
            raise LayoutError("a model on the meta device cannot be tried; give a plan, or fill it first")
        total += parameter.numel() * parameter.element_size()
    return 4 * total
