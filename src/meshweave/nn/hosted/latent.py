"""Latent attention: heads read what linear layers make of latent features, which every rank has whole.

The linear layers that make latent features compute on the tokens of the residual; these features then go to where
heads are, and their gradients are sums over ranks with different heads. What heads read of them each rank
multiplies with the rows of the weights that belong to its heads; these weights every rank has whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from meshweave.algorithms.block.roles import TOKENS, AxisDims, Side
from meshweave.base.errors import UnsupportedError
from meshweave.nn.hosted.own_modules import OwnModule
from meshweave.nn.hosted.readings import is_matrix
from meshweave.nn.hosted.residual import Tokens, as_plain
from meshweave.nn.hosted.trace import FlowTrace, ModuleCall
from meshweave.nn.parallel.moves import Mover, PlacedMove, terms


@dataclass(frozen=True)
class Latents:
    """The linear layers and norms of latent attention (as in DeepSeek-V2), by path in the model.

    Attributes:
        into: linear layers that make latent features.
        between: modules that latent features pass on their way to `out`, such as norms.
        out: linear layers that heads read.
    """

    into: frozenset[str] = frozenset()
    between: frozenset[str] = frozenset()
    out: frozenset[str] = frozenset()


def latents_of(trace: FlowTrace) -> Latents:
    """Return the modules of latent attention, read off a trace; all sets are empty for a model without it.

    A model has it where one linear layer before attention reads the result of another in the same layer.
    """
    calls = {call.path: call for call in trace.calls}
    into, between, out = set[str](), set[str](), set[str]()
    added = frozenset[str]().union(*trace.layer_sources.values())
    for call in trace.calls:
        if not (call.attended and is_matrix(call.module)):
            continue
        for path in _linears(calls, call)[0]:
            before, through = _linears(calls, calls[path])
            if before and not before & added:
                out.add(path)
                into |= before
                between |= through
    return Latents(frozenset(into - out), frozenset(between), frozenset(out))


def _linears(calls: Mapping[str, ModuleCall], call: ModuleCall) -> tuple[set[str], set[str]]:
    """Return the linear layers that a call reads, and the modules between."""
    linears, through, pending = set[str](), set[str](), list(call.sources)
    while pending:
        path = pending.pop()
        if path not in calls or path in through:
            continue
        if is_matrix(calls[path].module):
            linears.add(path)
        else:
            through.add(path)
            pending += calls[path].sources
    return linears, through


class HostedLatent(OwnModule):
    """A linear layer that makes latent features of this rank's tokens, and moves them to the ranks of the heads.

    Raises UnsupportedError where the strategy splits the features of the residual.
    """

    def __init__(self, module: nn.Module, tokens: Tokens, name: str) -> None:
        strategy = tokens.strategy
        residual, core = strategy.roles.residual, strategy.roles.core(True)
        if "hidden" in residual:
            raise UnsupportedError(
                f"{name} reads whole rows of the residual, which {strategy.name} splits; take data_parallel, "
                "zero3, megatron or megatron_sp"
            )
        super().__init__(module, strategy, name, residual)
        self._tokens = tokens
        side = (Side("", int(module.weight.shape[0])),)
        there: AxisDims = tuple(dim if dim in TOKENS else "" for dim in core)
        self._move = Mover(
            PlacedMove(strategy, side, residual, there),
            PlacedMove(strategy, side, terms(core, ("inner",)), residual),
        )

    def forward(self, *given: Any, **named: Any) -> Tensor:
        """Return the latent features (batch, sequence, features) of this rank's attention tokens. Collective.

        `given` and `named` are the arguments of the linear layer: this rank's part of the residual.
        """
        rows: Tensor = super().forward(*(as_plain(each) for each in given), **named)
        return self._move(rows, *self._tokens.sizes)
