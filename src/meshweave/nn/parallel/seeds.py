"""The generators of torch: as they were after a model is parallelised, and in one state on all of its ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from meshweave.algorithms.block.roles import AxisDims, Side
from meshweave.nn.parallel.moves import PlacedMove
from meshweave.nn.parallel.strategy import LayerStrategy


def keep_generators(device: str) -> AbstractContextManager[Any]:
    """Return a context manager at whose end torch's default generators are as at its beginning.

    These are the host's, and that of the current device of type `device` ("cpu" for the host's alone).
    """
    kept: AbstractContextManager[Any] = torch.random.fork_rng(
        _current(device), device_type="cuda" if device == "cpu" else device
    )
    return kept


def share_generators(strategy: LayerStrategy) -> None:
    """Set torch's default generators on all ranks of the mesh to their state on its first rank, for equal dropout.

    These are the host's, and that of the current device. Collective; nothing is done on a mesh of one rank.
    """
    if strategy.is_alone:
        return
    device = strategy.device_mesh.device_type
    states = [torch.get_rng_state()]
    states += [torch.get_device_module(device).get_rng_state(number) for number in _current(device)]
    sizes = [len(state) for state in states]
    axis = (Side("", sum(sizes)),)
    terms: AxisDims = tuple("partial" if size > 1 else "" for size in strategy.mesh.shape)
    move = PlacedMove(strategy, axis, terms, strategy.roles.replicated, has_tokens=False)
    own = torch.cat(states).to(torch.float64)  # bytes, whose sums with zeros are exact
    if strategy.rank != strategy.mesh.ranks[0]:
        own.zero_()
    _set(move.sized(1, 1, torch.float64).run(own).to(torch.uint8).split(sizes), device)


def _set(states: tuple[Tensor, ...], device: str) -> None:
    torch.set_rng_state(states[0])
    for number, state in zip(_current(device), states[1:], strict=True):
        torch.get_device_module(device).set_rng_state(state, number)


def _current(device: str) -> list[int]:
    """Return the number of the device that this rank uses, alone in a list; none for the host."""
    return [] if device == "cpu" else [torch.get_device_module(device).current_device()]
