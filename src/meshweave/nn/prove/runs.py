"""One run of a model: what it gives, in which types, and where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook

from meshweave.execute.torch.context import TorchContext
from meshweave.nn.prove.state import WIDE


@dataclass(frozen=True)
class ModelRun:
    """The results of one run of a model.

    Attributes:
        values: outputs and losses by name, as `given.outputs_of` names them: "logits", "loss" and the like.
        grads: the gradient of each parameter, by name; None for one that got no gradient.
        drew: whether random numbers were drawn.
        narrowest: the floating-point dtype of fewest bits that a module returned; float64 where none was looked
            for.
    """

    values: dict[str, Tensor]
    grads: dict[str, Tensor | None]
    drew: bool
    narrowest: torch.dtype = WIDE


@contextmanager
def narrowest_seen() -> Iterator[list[torch.dtype]]:
    """Yield a list of one entry: the narrowest floating dtype that a module has returned in the block so far.

    It is float64 at first. All modules of the process count; of a tuple or list only the first element does.
    """
    seen = [WIDE]

    def look(_: nn.Module, __: Any, out: Any) -> None:
        first = out[0] if isinstance(out, tuple | list) and out else out
        if isinstance(first, Tensor) and first.is_floating_point():
            seen[0] = min(seen[0], first.dtype, key=lambda kind: torch.finfo(kind).bits)

    handle = register_module_forward_hook(look)
    try:
        yield seen
    finally:
        handle.remove()


def settled_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return a parameter's gradient, None for none; that of a DTensor has the parameter's placements.

    Collective where the gradient has other placements.
    """
    grad = parameter.grad
    if (
        isinstance(grad, DTensor)
        and isinstance(parameter, DTensor)
        and grad.placements != parameter.placements
    ):
        return grad.redistribute(placements=parameter.placements)
    return grad


def context_for(strategy: Any, device: torch.device) -> TorchContext:
    """Return the context in which ranks compare: that of a `LayerStrategy` for `device`.

    For None it is the default context of the device.
    """
    own = getattr(strategy, "context", None)
    context: TorchContext = own(device) if callable(own) else TorchContext.default(device)
    return context


def free_bytes(device: torch.device, ranks: int) -> int:
    """Return the bytes of memory that are free for `ranks` ranks of this host together.

    On CUDA these are `ranks` times those of `device`, else those of the host; 2^62 where the system does not tell.
    """
    if device.type == "cuda":
        return ranks * int(torch.cuda.mem_get_info(device)[0])
    with suppress(OSError, StopIteration, ValueError), Path("/proc/meminfo").open() as file:
        line = next(line for line in file if line.startswith("MemAvailable"))
        return 1024 * int(line.split()[1])
    return 1 << 62
