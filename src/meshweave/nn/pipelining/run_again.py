"""What a stage that recomputes keeps, to run its forward again as it ran: random states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def random_states(tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """Return (type of device, state) of the CPU's generator, and of CUDA's where a tensor is on such a device."""
    states = [("cpu", torch.get_rng_state())]
    if any(tensor.device.type == "cuda" for tensor in tensors):
        states.append(("cuda", torch.cuda.get_rng_state()))
    return states


def set_random_states(states: Sequence[tuple[str, Tensor]]) -> None:
    """Set generators to the states that `random_states` has returned."""
    for kind, state in states:
        if kind == "cuda":
            torch.cuda.set_rng_state(state)
        else:
            torch.set_rng_state(state)
