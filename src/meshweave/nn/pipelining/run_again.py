"""What a stage that recomputes keeps, to run its forward again as it ran: random states, buffers."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from meshweave.execute.torch import compat


class ForwardState:
    """What a forward of a module depends on besides its inputs and parameters, as it was before that ran.

    Args:
        module: the module.
        inputs: of the forward; like the module's parameters they may be on a GPU, whose generator then counts.
        names: of the buffers that a forward may change; None for all.
    """

    def __init__(self, module: nn.Module, inputs: Sequence[Tensor], names: Collection[str] | None) -> None:
        tensors = (*inputs, *itertools.islice(module.parameters(), 1))
        has_cuda = any(tensor.device.type == "cuda" for tensor in tensors)
        self._module, self._random = module, _random_states(("cpu", "cuda") if has_cuda else ("cpu",))
        named = dict(module.named_buffers(remove_duplicate=False))
        copies = {id(each): each.clone() for name, each in named.items() if names is None or name in names}
        self._buffers = {name: copies[id(each)] for name, each in named.items() if id(each) in copies}

    def keep_changed(self) -> set[str]:
        """Drop the copies of buffers that have the same values now; return the names of the others."""
        for name, each in self._module.named_buffers(remove_duplicate=False):
            if name in self._buffers and torch.equal(*compat.local_tensors((each, self._buffers[name]))):
                del self._buffers[name]
        return set(self._buffers)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Let the module run again in the block as from this state; then set random states and buffers back.

        So a second forward of a micro-batch computes what the first did, as with a spectral norm, and does not
        change buffers, such as running statistics, a second time.
        """
        now = _random_states([kind for kind, _ in self._random])
        held = [(owner._buffers, dict(owner._buffers)) for owner in self._module.modules()]
        _set_random_states(self._random)
        for name, each in self._buffers.items():
            path, _, key = name.rpartition(".")
            self._module.get_submodule(path)._buffers[key] = each
        try:
            yield
        finally:
            _set_random_states(now)
            for buffers, were in held:
                buffers.clear()
                buffers.update(were)


def _random_states(kinds: Sequence[str]) -> list[tuple[str, Tensor]]:
    return [(k, torch.cuda.get_rng_state() if k == "cuda" else torch.get_rng_state()) for k in kinds]


def _set_random_states(states: Sequence[tuple[str, Tensor]]) -> None:
    for kind, state in states:
        (torch.cuda.set_rng_state if kind == "cuda" else torch.set_rng_state)(state)
