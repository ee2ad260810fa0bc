"""What enters and leaves the modules of a model in one forward pass, to find the first that differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from meshweave.algorithms.block.roles import AxisDims, Side
from meshweave.nn.parallel.linear import LinearGroup, ParallelLinear
from meshweave.nn.parallel.strategy import LayerStrategy
from meshweave.nn.prove.differences import Compared, Difference, ProofRanks
from meshweave.nn.prove.given import Given, outputs_of
from meshweave.nn.prove.shards import LocalTensor, Places, local_of
from meshweave.nn.prove.state import WIDE, plain_name, prepared

Event = tuple[str, str, int]
"""Name of a module, "input" or "output", and which of its calls."""
Trail = dict[Event, LocalTensor]


class ComparedModels(Protocol):
    """A model beside its original, as `ModelPair` has them.

    Attributes:
        model: the original.
        made: what was parallelised: a module, or an object such as a `ParallelModel`.
        module: the module of `made`.
        given: the inputs of both.
        ranks: the ranks that compare.
        training: whether both are in training mode.
    """

    model: nn.Module
    made: Any
    module: nn.Module
    given: Given
    ranks: ProofRanks
    training: bool


def first_module(comparison: ComparedModels, dtype: torch.dtype | None, difference: Difference) -> Difference:
    """Return the first module input or output in a forward pass that differs from the original's. Collective.

    Args:
        comparison: the model and its original.
        dtype: in which the parallelised model runs; None for its own.
        difference: that of the outputs; it is returned, with a remark, where no module before differs.
    """
    rows = comparison.given.rows(comparison.given.part).cast(dtype)
    right: Trail = {}
    with (
        prepared(comparison.model, dtype or WIDE, training=comparison.training),
        _recorded(comparison.model, right),
        torch.no_grad(),
    ):
        outputs_of(comparison.model, rows.cast(dtype or WIDE))
    made: Trail = {}
    module = comparison.module
    with prepared(module, dtype, comparison.made, comparison.training), ExitStack() as stack:
        stack.enter_context(_recorded(module, made))
        strategy = getattr(comparison.made, "strategy", None)
        if isinstance(strategy, LayerStrategy):
            stack.enter_context(_groups_recorded(comparison.made, made, tuple(rows.inputs[0].shape)))
            comparison.made.loss(rows.inputs[0], rows.targets).backward()
        else:
            outputs_of(module, rows)["loss"].backward()
    places = _Origins(comparison, rows.inputs[0])
    allowed = 4 * max(difference.allowed, 1e-9) if dtype is None else 1e-8
    seen: list[Compared] = []
    for event, value in right.items():
        if event not in made:
            continue
        actual = places.of(made[event], value.values)
        if actual is not None:
            actual = replace(actual, part=comparison.given.part)
            seen.append(_compared(comparison, event, actual, value.values, allowed))
    common = set.intersection(
        *(set(names) for names in comparison.ranks.say([c.what for c in seen]).values())
    )
    found_one = comparison.ranks.first_difference([c for c in seen if c.what in common])
    if found_one is None:
        return replace(
            difference,
            cause=f"{difference.cause}; no module before was found to differ beyond rounding, of {len(common)} "
            "inputs and outputs",
        )
    return replace(found_one, cause=f"{found_one.cause}; {difference.what} are off by {difference.error:.2g}")


def _compared(
    comparison: ComparedModels, event: Event, actual: LocalTensor, wanted: Tensor, allowed: float
) -> Compared:
    name, kind, call = event
    model = comparison.model
    module = model.get_submodule(name)
    again = f", call {call + 1}" if call else ""
    bias = getattr(module, "bias", None)
    bias = bias.detach() if kind == "output" and isinstance(bias, Tensor) and bias.ndim == 1 else None
    if bias is not None and (not wanted.ndim or bias.shape[0] != wanted.shape[-1]):
        bias = None
    return Compared(
        f"{kind} of {name or 'the model'}{again}",
        actual,
        wanted,
        allowed,
        hint=_hint(model, module, name, kind),
        bias=bias,
    )


def _hint(model: nn.Module, module: nn.Module, name: str, kind: str) -> str:
    """Return what a module computes, where it is the first whose input or output differs."""
    words = type(module).__name__.lower()
    owner = name.rpartition(".")[0]
    is_linear = isinstance(module, nn.Linear) or words in ("conv1d", "parallellinear")
    if kind == "input":
        about = type(model.get_submodule(owner)).__name__.lower() + owner.lower()
        if is_linear and "att" in about:
            return (
                "what enters attention agrees and what leaves it does not: its rotary embedding, mask, window, "
                "scale, cap, groups or norms of heads are not the ones assumed"
            )
        if _is_activation(name, words):
            return "another product enters the activation (gate and up exchanged), or a multiplier or cap"
        if is_linear and ("mlp" in about or "ffn" in about or "feed" in about):
            return "the activation or the gate between the products is not the one assumed"
        return "what stands before it is not what is assumed: a multiplier, a cap or another order of norms"
    if "norm" in words:
        return "the norm is not the one assumed, or has another epsilon"
    if "rotary" in words:
        return "the rotary embedding has other frequencies or positions"
    if is_linear:
        return "its weight, its bias or the communication of its product"
    if isinstance(module, nn.Embedding):
        return "the rows of its table, or the sum over ranks that share them"
    if _is_activation(name, words):
        return "the activation is not the one assumed"
    return "what it does with the results of its parts is not what is assumed"


def _is_activation(name: str, words: str) -> bool:
    return "act" in name.rpartition(".")[2] or "elu" in words or "activation" in words


# --- recording ------------------------------------------------------------------------------------------------


@contextmanager
def _recorded(model: nn.Module, trail: Trail) -> Iterator[None]:
    """Record what enters and leaves each module."""
    calls: Counter[tuple[str, str]] = Counter()

    def record(name: str, kind: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, output: Any = None) -> None:
            value = arguments if kind == "input" else output
            values = value if isinstance(value, tuple | list) else (value,)
            tensor = next((each for each in values if isinstance(each, Tensor)), None)
            number = calls[name, kind]
            calls[name, kind] += 1
            if tensor is not None and tensor.is_floating_point():
                trail[name, kind, number] = LocalTensor(_kept(tensor))

        return hook

    with ExitStack() as stack:
        for name, module in model.named_modules():
            plain = plain_name(name)
            stack.callback(module.register_forward_pre_hook(record(plain, "input")).remove)
            stack.callback(module.register_forward_hook(record(plain, "output")).remove)
        yield


def _kept(tensor: Tensor) -> Tensor:
    """Return a copy of a plain tensor, of its real shape where a subclass tells code another; a DTensor itself."""
    return tensor.detach() if isinstance(tensor, DTensor) else tensor.detach().as_subclass(Tensor).clone()


@contextmanager
def _groups_recorded(made: Any, trail: Trail, sizes: tuple[int, int]) -> Iterator[None]:
    """Record products of layers of this library, several of which are one call of a `LinearGroup`."""
    names = {id(module): name for name, module in made.module.named_modules()}
    put: list[tuple[Any, str, Any]] = []
    for owner in (made, *made.blocks):
        for attribute, group in list(vars(owner).items()):
            if isinstance(group, LinearGroup):
                put.append((owner, attribute, group))
                recorder = _GroupRecorder(
                    group, [names.get(id(each), "") for each in group.linears], trail, sizes
                )
                object.__setattr__(owner, attribute, recorder)
    try:
        yield
    finally:
        for owner, attribute, group in put:
            object.__setattr__(owner, attribute, group)


class _GroupRecorder:
    """A group of linear layers that records what enters and leaves each."""

    def __init__(self, group: LinearGroup, names: list[str], trail: Trail, sizes: tuple[int, int]) -> None:
        self._group, self._names, self._trail, self._sizes = group, names, trail, sizes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def __call__(self, x: Tensor, batch: int, sequence: int) -> list[Tensor]:
        group, sizes = self._group, self._sizes
        results = group(x, batch, sequence)
        roles, own = group.strategy.roles, group.linears[0].site
        inner = roles.core(own.is_attention)
        ins, outs = (roles.residual, inner) if own.is_first else (inner, roles.residual)
        at = 0
        for name, linear in zip(self._names, group.linears, strict=True):
            value = torch.cat(results[at : at + linear.parts], -1).detach()
            at += linear.parts
            entering = _features(linear, ins, sizes, not own.is_first)
            self._trail[name, "input", 0] = LocalTensor(x.detach(), entering)
            self._trail[name, "output", 0] = LocalTensor(value, _features(linear, outs, sizes, own.is_first))
        return results


def _features(linear: ParallelLinear, dims: AxisDims, sizes: tuple[int, int], is_inner: bool) -> Places:
    """Return which part this rank has of what enters or leaves a linear layer; copies of heads have one place."""
    strategy, own = linear.layer_strategy, linear.site
    tokens = [range(*strategy.span(side, dims)) for side in strategy.tokens(*sizes)]
    if not is_inner:
        features = list(range(*strategy.span(Side("hidden", own.hidden), dims)))
        return tuple(tokens[0]), tuple(tokens[1]), tuple(features)
    start, stop = (end // own.unit for end in strategy.span(Side("inner", own.units, own.unit), dims))
    real = [unit * linear.real_units // own.units for unit in range(start, stop)]
    one = [unit * own.unit + at for unit in real for at in range(own.unit)]
    width = linear.real_units * own.unit
    parts = linear.parts if own.is_first else 1
    features = [part * width + at for part in range(parts) for at in one]
    return tuple(tokens[0]), tuple(tokens[1]), tuple(features)


class _Origins:
    """Where what a rank has of an activation is in the whole."""

    def __init__(self, comparison: ComparedModels, tokens: Tensor) -> None:
        self.rank, self.lines = comparison.ranks.rank, comparison.ranks.lines
        self.strategy: Any = getattr(comparison.made, "strategy", None)
        self.sizes = tuple(tokens.shape)

    def of(self, actual: LocalTensor, wanted: Tensor) -> LocalTensor | None:
        """Return what was found with its place in `wanted`; None where that cannot be told."""
        values = actual.values
        if actual.places is not None:
            return actual
        if isinstance(values, DTensor):
            if any(isinstance(placement, Partial) for placement in values.placements):
                values = values.redistribute(placements=[Replicate()] * len(values.placements))
            return local_of(values, self.rank) if values.shape == wanted.shape else None
        if values.ndim == wanted.ndim + 1 and len(values) == 1:
            values = values[0]
        if values.shape == wanted.shape:
            return LocalTensor(values)
        if values.ndim != wanted.ndim or not values.numel():
            return None
        if isinstance(self.strategy, LayerStrategy):
            return self._of_residual(values, wanted)
        return self._chunk(values, wanted)

    def _of_residual(self, values: Tensor, wanted: Tensor) -> LocalTensor | None:
        if wanted.ndim != 3:
            return None
        with suppress(ValueError, IndexError):
            for roles in (
                self.strategy.roles.residual,
                self.strategy.roles.core(False),
                self.strategy.roles.core(True),
            ):
                sides = (*self.strategy.tokens(*wanted.shape[:2]),)
                spans = [self.strategy.span(side, roles) for side in sides]
                for word in ("hidden", "inner"):
                    ends = [*spans, self.strategy.span(Side(word, wanted.shape[2]), roles)]
                    if tuple(stop - start for start, stop in ends) == tuple(values.shape):
                        return LocalTensor(values, tuple(tuple(range(*span)) for span in ends))
        return None

    def _chunk(self, values: Tensor, wanted: Tensor) -> LocalTensor | None:
        cut = [dim for dim in range(values.ndim) if values.shape[dim] != wanted.shape[dim]]
        if len(cut) != 1 or wanted.shape[cut[0]] % values.shape[cut[0]]:
            return None
        ratio = wanted.shape[cut[0]] // values.shape[cut[0]]
        line = next((line for line in self.lines if len(line) == ratio and self.rank in line), None)
        if line is None:
            return None
        size = values.shape[cut[0]]
        places = [range(n) for n in wanted.shape]
        places[cut[0]] = range(line.index(self.rank) * size, (line.index(self.rank) + 1) * size)
        return LocalTensor(values, tuple(map(tuple, places)))
