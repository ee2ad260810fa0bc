"""What a stage that recomputes keeps, to run its forward again as it ran: random states, buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from meshweave.nn.saved_versions import versions


def random_states(tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """Return [(type of device, state of its generator)]: "cpu", then "cuda" if one of the tensors is there."""
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


@contextmanager
def kept_buffers(module: nn.Module, before: Sequence[int]) -> Iterator[None]:
    """Let a module run again in the block on copies of buffers that its first forward changed; restore them.

    So a second forward of a micro-batch does not change buffers, such as running statistics, a second time. Copied
    are buffers that have changed since `before`, the `versions` of all buffers before the first forward, and
    statistics of norms, whose changes torch does not count.
    """
    unique = list(module.buffers())
    pairs = zip(before, versions(unique), [*unique, *unique], strict=False)
    changed = {id(each) for then, now, each in pairs if then != now}
    held = [(owner._buffers, dict(owner._buffers)) for owner in module.modules() if owner._buffers]
    for buffers, were in held:
        for name, each in were.items():
            if each is not None and ("running_mean" in were or id(each) in changed):
                buffers[name] = each.clone()
    try:
        yield
    finally:
        for buffers, were in held:
            buffers.update(were)
