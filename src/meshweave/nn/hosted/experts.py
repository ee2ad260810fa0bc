"""Experts of a routed layer on the ranks that have them: the code of their class, for the experts of a rank.

The router is the model's own and computes on the rows of the residual that a rank has. What it chooses goes to the
ranks of the experts and back by `ExpertExchange`; there the class's own forward pass computes with the parameters
of these experts. Ranks that share each expert have some of its inner features; their results are terms of a sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.algorithms.block.roles import TOKENS, AxisDims, Dim, Side, num_parts
from meshweave.algorithms.step.executed import splits_rows
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.nn.experts import ExpertExchange
from meshweave.nn.hosted.expert_parts import ExpertsPart, operand_indices, own_call
from meshweave.nn.hosted.own_modules import OwnSettings, without_parameters
from meshweave.nn.hosted.residual import Tokens, as_plain
from meshweave.nn.parallel.buckets import KeptParameter
from meshweave.nn.parallel.checksums import checksum_factors
from meshweave.nn.parallel.moves import Mover, PlacedMove
from meshweave.nn.parallel.parameters import ParameterLayout
from meshweave.nn.parallel.strategy import LayerStrategy
from meshweave.nn.parallel.uses import ParameterUse, entries_of


class HostedExperts(OwnSettings):
    """The experts of a layer in the place of the model's own, called with the same arguments.

    Args:
        module: the model's own, on meta.
        tokens: the tokens of the step that runs.
        name: that of the module in the model.
        part: what a trace shows of it.

    Raises UnsupportedError where the strategy splits the features of the residual, or splits inner features of
    experts whose places are not known.
    """

    def __init__(self, module: nn.Module, tokens: Tokens, name: str, part: ExpertsPart) -> None:
        super().__init__()
        strategy = self.layer_strategy = tokens.strategy
        self._tokens, self._part = tokens, part
        self.dims = strategy.roles.expert_dims
        _check(strategy, name, type(module).__name__, part)
        self._modules["act_fn"] = module._modules.get("act_fn")
        own, parameters = without_parameters(module)
        first, end = strategy.span(Side("expert", part.count), self.dims)
        self.first, self.local = first, end - first
        features = strategy.span(Side("inner", part.inner), self.dims)
        self._sizes = self.local, features[1] - features[0]
        self._is_first = features[0] == 0
        self.layouts: dict[str, ParameterLayout] = {}
        self.kept: dict[str, KeptParameter] = {}
        self.opened: dict[str, Tensor] = {}
        for key, whole in parameters.items():
            kept = self.kept[key] = kept_of(part, key, tuple(whole.shape), strategy)
            self.layouts[key] = kept.layout
            setattr(self, key, kept.layout.distribute(f"{name} ({key})", whole, strategy))
        self._use = ParameterUse([entries_of([self])])
        self._moves = BoundaryMoves(strategy, self.dims)
        self._is_shared = num_parts(self.dims, strategy.mesh.shape, ("expert",)) > 1
        self.take_settings(own)

    @torch.compiler.disable(reason="the rows of an expert are counted on the host")  # type: ignore[untyped-decorator]
    def forward(self, *given: Any, **named: Any) -> Tensor:
        """Return the experts' results for this rank's tokens of the residual, in their shape. Collective.

        Operands are those of the model's own class: the tokens, the experts chosen for each and their gates.

        Raises LayoutError where, on CPUs, copies of a token were sent to different experts.
        """
        values = [*given, *named.values()]
        at = operand_indices(values)
        x, chosen, gates = (as_plain(values[place]) for place in at)
        shape, tokens, index = x.shape, self._tokens, chosen
        if self._moves.are_needed:
            x, index, gates = self._moves.to_experts(tokens, x, index, gates)
        else:
            x = x.reshape(-1, shape[-1])
        made = self._routed(x, index, gates) if self._is_shared else self._computed(x, index, gates)
        if self._moves.are_needed:
            made = self._moves.to_residual(tokens, made, index, chosen)
        tokens.place = self.layer_strategy.roles.residual
        told: Tensor = tokens.told(made.reshape(shape))
        return told

    def _routed(self, x: Tensor, index: Tensor, gates: Tensor) -> Tensor:
        """Return the sums of what experts on all ranks make of tokens, each times its gate."""
        exchange = exchange_of(self.layer_strategy, self._part.count, str(x.device))
        choices = torch.where(index < self._part.count, index, -1)
        rows, handle = exchange.dispatch(x, choices)
        experts = torch.arange(self.local, device=x.device)
        own = experts.repeat_interleave(torch.tensor(handle.rows_per_expert, device=x.device))
        made = self._computed(rows, own[:, None], rows.new_ones((rows.shape[0], 1)))
        return exchange.combine(made.to(x.dtype), handle, gates.to(x.dtype))

    def _computed(self, x: Tensor, index: Tensor, gates: Tensor) -> Tensor:
        """Return what the class's own code makes of rows, of the experts that this rank has."""
        own, parameters = self._own, dict(zip(self.kept, self._use(), strict=True))
        own.training = self.training
        used = list(parameters.values())
        if not self._is_first:  # they are added once
            for key in self._part.added:
                parameters[key] = parameters[key] * 0
        made = own_call(own, self._part, parameters, self._sizes, x, index, gates)
        return made if x.shape[0] else _LeadsBack.apply(made, x, *used)

    def extra_repr(self) -> str:
        """Return, for printing, the class whose code it runs, and which experts and inner features this rank
        has.
        """
        return (
            f"{type(self._own).__name__}, {self.local} of {self._part.count} experts from {self.first} on, "
            f"{self._sizes[1]} of {self._part.inner} inner features"
        )


class _LeadsBack(torch.autograd.Function):  # type: ignore[misc]
    """A tensor as it is, that leads back to others with gradients of zero: ranks without rows sum, too."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, *read: Tensor) -> Tensor:
        """Return the tensor."""
        ctx.save_for_backward(*read)
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient as it is, and zeros."""
        needs = ctx.needs_input_grad
        zeros = [
            torch.zeros_like(each) if need else None
            for each, need in zip(ctx.saved_tensors, needs[1:], strict=True)
        ]
        return grads[0] if needs[0] else None, *zeros


def _check(strategy: LayerStrategy, name: str, kind: str, part: ExpertsPart) -> None:
    """Raise UnsupportedError where a strategy splits what the code of experts has whole."""
    if splits_rows(strategy.roles, strategy.mesh.shape):
        raise UnsupportedError(
            f"{name}: a router reads whole rows of the residual, which {strategy.name} splits; take "
            "data_parallel, zero3, megatron or megatron_sp"
        )
    if num_parts(strategy.roles.expert_dims, strategy.mesh.shape, ("inner",)) > 1 and not part.forms:
        raise UnsupportedError(
            f"{name}: inner features of {kind} do not lie in its parameters in a form that is known, and "
            "expert_tensor ranks would split them; give a Parallelism with expert_tensor=1"
        )


def kept_of(part: ExpertsPart, key: str, shape: Sequence[int], strategy: LayerStrategy) -> KeptParameter:
    """Return how a parameter of experts is sharded, gathered for use, and its gradient summed.

    The gradient is summed only along axes whose ranks have copies of this part of the parameter.

    Args:
        part: the experts.
        key: the name of the parameter in the module of experts.
        shape: its global shape.
        strategy: how ranks share experts.
    """
    sides, parts = part.sides(key, shape)
    names = {side.dim for side in sides}
    used: AxisDims = tuple(d if d in names and n > 1 else "" for d, n in _named(strategy))
    shards = [role.shards_weights for role in strategy.roles.axes]
    free: list[Dim] = [side.dim for side in reversed(sides) if side.dim and side.dim not in used]
    stored: list[Dim] = list(used)
    for axis, (dim, size) in enumerate(_named(strategy)):
        if shards[axis] and not dim and size > 1 and free:
            stored[axis] = free[0]
    summed: AxisDims = tuple(
        "partial" if not dim or (dim == "inner" and dim not in names) else kept
        for (dim, _), kept in zip(_named(strategy), used, strict=True)
    )
    return KeptParameter(strategy, ParameterLayout(sides, tuple(stored), parts), used, summed)


def _named(strategy: LayerStrategy) -> list[tuple[Dim, int]]:
    return list(zip(strategy.roles.expert_dims, strategy.mesh.shape, strict=True))


class BoundaryMoves:
    """The moves of tokens from ranks that have them in the residual to those whose experts take them, and back.

    Ranks that share each expert get the same tokens; all others get tokens of their own, so that none is computed
    twice.

    Args:
        strategy: the strategy on its ranks.
        dims: for each mesh axis "expert" if its ranks have different experts, "inner" if they split each expert,
            or "".
    """

    def __init__(self, strategy: LayerStrategy, dims: AxisDims) -> None:
        self._strategy, self._residual = strategy, strategy.roles.residual
        there: list[Dim] = []
        sums: list[Dim] = []
        for own, dim, size in zip(self._residual, dims, strategy.mesh.shape, strict=True):
            is_inner = dim == "inner" and size > 1
            lies: Dim = "" if is_inner or size == 1 else own if own in TOKENS else "sequence"
            there.append(own if size == 1 else lies)
            sums.append("partial" if is_inner else there[-1])
        self._there, self._sums = tuple(there), tuple(sums)
        self._num_terms = num_parts(self._sums, strategy.mesh.shape, ("partial",))
        self.are_needed = self._sums != self._residual

    def _pair(self, width: int) -> tuple[PlacedMove, PlacedMove]:
        sides = (Side("", width),)
        return (
            PlacedMove(self._strategy, sides, self._residual, self._there),
            PlacedMove(self._strategy, sides, self._sums, self._residual),
        )

    def to_experts(self, tokens: Tokens, x: Tensor, index: Tensor, gates: Tensor) -> list[Tensor]:
        """Return [rows (tokens, hidden), choices, gates (tokens, choices)] of the tokens for this rank's experts.

        Collective.

        Args:
            tokens: the tokens of the step that runs.
            x: (..., hidden), this rank's tokens in the residual.
            index: (tokens, choices), the indices of the experts chosen for them.
            gates: (tokens, choices), the weights of these.
        """
        moved = []
        for each in (x, gates):
            rows = tokens.rows_of(each.reshape(-1, each.shape[-1]), self._residual)
            moved.append(Mover(*self._pair(each.shape[-1]))(rows, *tokens.sizes).flatten(0, 1))
        there, _ = self._pair(index.shape[-1])
        chosen = index
        if there.is_needed:
            rows = tokens.rows_of(index, self._residual).float().contiguous()
            chosen = there.sized(*tokens.sizes, rows.dtype).run(rows).flatten(0, 1).to(index.dtype)
        return [moved[0], chosen, moved[1]]

    def to_residual(self, tokens: Tokens, made: Tensor, index: Tensor, chosen: Tensor) -> Tensor:
        """Return this rank's shard (tokens, hidden) of the residual, from the experts' results. Collective.

        On CPUs, where ranks have terms of a sum, numbers that stand for each token's choices are summed with the
        terms and compared.

        Args:
            tokens: the tokens of the step that runs.
            made: the experts' results (tokens, hidden), for the tokens that `to_experts` returned.
            index: the choices that `to_experts` returned, (tokens, choices).
            chosen: the choices of this rank's router for its tokens in the residual, (tokens, choices).

        Raises LayoutError, where they are compared, if ranks that share each expert have made different choices.
        """
        is_checked = self._num_terms > 1 and made.device.type == "cpu"
        if is_checked:
            made = torch.cat((made, choice_digits(index, made.dtype, self._num_terms)), -1)
        there, back = self._pair(made.shape[-1])
        rows = Mover(back, there)(tokens.rows_of(made, self._there), *tokens.sizes).flatten(0, 1)
        if not is_checked:
            return rows
        own = choice_digits(chosen, rows.dtype, self._num_terms)
        if not torch.equal(rows[:, -_DIGITS:], self._num_terms * own):
            raise LayoutError(
                "ranks that share each expert have sent tokens to other experts: copies of a router or of the "
                "residual have grown apart; debug_every= of parallelize says which"
            )
        return rows[:, :-_DIGITS].contiguous()


_DIGITS = 4


def choice_digits(index: Tensor, dtype: torch.dtype, num_terms: int) -> Tensor:
    """Return numbers (tokens, `_DIGITS`) of `dtype`, a hash of the choices (tokens, choices) of each token.

    Sums of the numbers of `num_terms` ranks are exact, in any order. Together they have 28 bits for two ranks in
    bfloat16, four less each time that there are twice as many ranks, and 64 at most.
    """
    exact = int(2 / torch.finfo(dtype).eps)  # all whole numbers up to it are of that dtype
    bits = max(1, min((exact // num_terms).bit_length() - 1, 64 // _DIGITS))
    number = ((index.long() + 1) * checksum_factors(index.device)[: index.shape[-1]]).sum(-1, keepdim=True)
    shifts = torch.arange(64 - bits * _DIGITS, 64, bits, device=index.device)
    return ((number >> shifts) & ((1 << bits) - 1)).to(dtype)


@lru_cache(64)
def exchange_of(strategy: LayerStrategy, count: int, device: str) -> ExpertExchange:
    """Return the exchange between this rank and the ranks that have the others of `count` experts.

    Equal arguments give the same object.
    """
    around = [
        range(size) if dim == "expert" else (at,)
        for (dim, size), at in zip(_named(strategy), strategy.coordinates, strict=True)
    ]
    mesh = strategy.mesh
    ranks = [mesh.rank_at(at) for at in itertools.product(*around)]
    context = strategy.context(torch.device(device))
    return ExpertExchange(ranks, count, context=context, device=device)
