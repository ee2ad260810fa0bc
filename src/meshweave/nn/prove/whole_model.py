"""What copies with few layers and short inputs do not show of a model of plain torch, whose layers are replaced.

Its own forward pass runs on a copy with all layers, in which layers of a kind have the same weights. So what is
done in one layer and not in others of its kind, dropout in another place, windows that no attribute names, and
what a call leaves for the next are found at the price of a forward pass.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from meshweave.base.errors import ProofError
from meshweave.nn.parallel.structure import ModelMap, dropout_after, heads_of
from meshweave.nn.prove.state import WIDE, WideCasts, without_dropout

_TOKENS = 8
_MOST_TOKENS = 512
_MOST_FLOPS = 2e9
_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)


@dataclass(frozen=True)
class _Call:
    """A call of a layer: its number, its arguments, which are copies, and the residual that it returned."""

    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Tensor


class _Stop(Exception):
    """Ends a forward pass whose first layers are wanted."""


def check_whole(
    made: nn.Module, module: nn.Module, names: ModelMap, kinds: Sequence[int], longest: int
) -> None:
    """Raise ProofError where a forward pass does what layers that stand for a model's own would not do.

    Args:
        made: a copy with all layers, those of a kind with the same weights, few words, and dropout as it is.
        module: the model, whose dropout and windows are read.
        kinds: for each layer the first layer that is of its kind.
        longest: the most tokens that a row may have.
    """
    checked = _Checked(made, names, kinds, type(module).__name__)
    made.requires_grad_(True)
    with torch.random.fork_rng([]), WideCasts():
        torch.manual_seed(20)
        checked.dropout(_dropout_of(module, names), min(_TOKENS, longest))
        without_dropout(made.modules())
        before = dict(checked.state())
        calls = checked.calls(min(_TOKENS, longest))
        checked.memory(before)
        checked.layers(calls)
        heads = [names.heads or heads_of(module, number, names) for number in range(len(kinds))]
        checked.reach([own.window for own in heads], longest)


class _Checked:
    """A copy of a model, whose forward passes are looked at."""

    def __init__(self, made: nn.Module, names: ModelMap, kinds: Sequence[int], title: str) -> None:
        self.made, self.names, self.kinds, self.title = made, names, kinds, title
        self.layers_of = list(made.get_submodule(names.layers))
        self.own = [layer.forward for layer in self.layers_of]

    def refuse(self, words: str) -> None:
        raise ProofError(f"{self.title} is another model than its layers make: {words}")

    def run(self, sequence: int) -> None:
        tokens = torch.arange(sequence, device=next(self.made.parameters()).device)
        words = self.made.get_submodule(self.names.embedding).weight.shape[0]
        with torch.enable_grad():
            self.made(tokens[None] * 7 % words)

    # --- dropout and random numbers ---------------------------------------------------------------------------

    def dropout(self, expected: list[float], sequence: int) -> None:
        """Run it once, and compare the probabilities of dropout with those of what replaces its layers."""
        before = _generators()
        with _Dropouts() as seen:
            self.run(sequence)
        if _generators() != before:
            self.refuse(
                "forward draws random numbers beside dropout, as noise, or layers or paths that are left out, "
                "which are not computed; turn that off"
            )
        if seen.found != expected:
            self.refuse(
                f"forward drops out with probabilities {seen.found or 'of none'}, in this order, and computed are "
                f"{expected or 'none'}: after the embedding, of attention weights, after attention and after the "
                "feed-forward part; set others to 0"
            )

    # --- what calls leave -------------------------------------------------------------------------------------

    def state(self) -> Iterator[tuple[str, Any]]:
        """Yield numbers and buffers of modules that are replaced, by name."""
        names = self.names
        kept = tuple(f"{path}." for path in (names.rotary,) if path)
        for path, child in self.made.named_modules():
            if f"{path}.".startswith(kept or ("\n",)) or path.endswith(f".{names.layer.activation}"):
                continue
            for name, value in vars(child).items():
                if isinstance(value, int | float):
                    yield f"{path}.{name}".lstrip("."), value
            for name, buffer in child._buffers.items():
                if buffer is not None:
                    yield f"{path}.{name}".lstrip("."), buffer.clone()

    def memory(self, before: dict[str, Any]) -> None:
        for name, value in self.state():
            old = before.get(name, value)
            if not (torch.equal(old, value) if isinstance(value, Tensor) else old == value or value != value):
                self.refuse(
                    f"forward changes {name} in each call, which is not done by what replaces it; keep it outside "
                    "of the model"
                )

    # --- layers -----------------------------------------------------------------------------------------------

    def calls(self, sequence: int, end: int | None = None) -> list[_Call]:
        """Return the calls of layers in a forward pass, of the first `end` layers, and last that of the norm."""
        found: list[_Call] = []

        def noted(number: int, own: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                given = tuple(map(_copied, args)), {key: _copied(value) for key, value in kwargs.items()}
                out = own(*args, **kwargs)
                found.append(_Call(number, *given, _residual((out,)).clone()))
                if number == end:
                    raise _Stop
                return out

            return forward

        norm = self.made.get_submodule(self.names.norm)
        watched = [*self.layers_of, norm]
        for number, (layer, own) in enumerate(zip(watched, [*self.own, norm.forward], strict=True)):
            layer.__dict__["forward"] = noted(number, own)
        try:
            self.run(sequence)
        except _Stop:
            pass
        finally:
            for layer in watched:
                del layer.__dict__["forward"]
        return found

    def layers(self, calls: list[_Call]) -> None:
        """Check that each layer is called once, on the result of that before, and computes what its kind does."""
        count, numbers = len(self.kinds), [call.number for call in calls]
        if numbers != list(range(count + 1)):
            self.refuse(
                f"forward calls {self.names.layers} as {', '.join(map(str, numbers[:-1]))}, and each is computed "
                "once, in order"
            )
        trained = [_given(call).requires_grad for call in calls[1:]]
        for before, call in pairwise(calls):
            here = f"{self.names.layers}.{call.number}" if call.number < count else self.names.norm
            if not _are_close(_given(call), before.out) or trained[call.number - 1] != trained[0]:
                self.refuse(f"what {here} is given is not the result of {self.names.layers}.{before.number}")
        for call, kind in zip(calls, self.kinds, strict=False):
            if kind != call.number:
                self._as_its_kind(call, calls[kind])

    def _as_its_kind(self, call: _Call, first: _Call) -> None:
        made = []
        for each in (call, first):
            x = _given(call).detach().clone().requires_grad_()
            out = self._of_layer(each, x)
            (grad,) = torch.autograd.grad(out.square().sum(), x, allow_unused=True)
            made.append((out.detach(), torch.zeros_like(x) if grad is None else grad))
        if not all(_are_close(*pair) for pair in zip(*made, strict=True)):
            path = self.names.layers
            self.refuse(
                f"{path}.{call.number} computes something else than {path}.{first.number} of the same weights and "
                "input, by its number or by what it is given; layers whose attributes differ are known to differ"
            )

    def _of_layer(self, call: _Call, x: Tensor) -> Tensor:
        """Return what a layer makes of a residual `x`, and else of the arguments of a call."""
        given = [*call.args, *call.kwargs.values()]
        at = next(at for at, value in enumerate(given) if _is_residual(value))
        given[at] = x
        count = len(call.args)
        named = dict(zip(call.kwargs, given[count:], strict=True))
        return _residual((self.own[call.number](*given[:count], **named),))

    # --- windows ----------------------------------------------------------------------------------------------

    def reach(self, windows: Sequence[int | None], longest: int) -> None:
        """Check in long rows, as long as time allows, that the last token sees what it is computed to see."""
        first = sorted(set(self.kinds))
        most = max(sum(p.numel() for p in layer.parameters()) for layer in self.layers_of)
        sequence = min(longest, _MOST_TOKENS, int(_MOST_FLOPS / (12 * most * (first[-1] + 1))))
        if sequence < 16:
            return
        try:
            calls = self.calls(sequence, first[-1])
        except Exception:  # more tokens than it takes
            return
        for number in first:
            x = _given(calls[number]).detach().clone().requires_grad_()
            out = self._of_layer(calls[number], x)
            seen = torch.autograd.grad(out[:, -1].sum(), x)[0].abs().sum((0, 2)) > 0
            window = windows[number] or sequence
            if int(seen.sum()) != min(window, sequence):
                self.refuse(
                    f"a token of {self.names.layers}.{number} sees {int(seen.sum())} tokens of {sequence}, and "
                    f"computed are {min(window, sequence)}; name it sliding_window, or give mapping= with heads"
                )


class _Dropouts(TorchFunctionMode):  # type: ignore[misc]
    """A context that notes the probabilities of dropout, where some are dropped, as `found`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, and note what it drops."""
        named, p = kwargs or {}, 0.0
        if func in _DROPOUTS:
            given = inspect.signature(func).bind(*args, **named)
            given.apply_defaults()
            p = float(given.arguments["p"]) if given.arguments["training"] else 0.0
        elif func is torch.dropout:
            p = float(named.get("p", args[1] if len(args) > 1 else 0.0))
            p = p if named.get("train", args[2] if len(args) > 2 else False) else 0.0
        elif func is F.scaled_dot_product_attention:
            p = float(named.get("dropout_p", args[4] if len(args) > 4 else 0.0))
        if not p:
            return func(*args, **named)
        self.found.append(p)
        with torch.random.fork_rng([]):  # so that other random numbers show
            return func(*args, **named)


def _generators() -> tuple[bytes, object]:
    """Return the states of torch's generator of the CPU and of Python's."""
    return bytes(torch.get_rng_state().numpy()), random.getstate()


def _dropout_of(module: nn.Module, names: ModelMap) -> list[float]:
    """Return the probabilities of dropout of what replaces the layers of a model, in order, without 0."""
    found = [float(module.get_submodule(names.dropout).p)] if names.dropout else []
    for number, layer in enumerate(module.get_submodule(names.layers)):
        heads = names.heads or heads_of(module, number, names)
        found += [
            heads.dropout,
            *(dropout_after(layer, path) for path in (names.layer.out, names.layer.down)),
        ]
    return [p for p in found if p]


def _is_residual(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 3


def _residual(values: Any) -> Tensor:
    """Return the first floating tensor with rows among values, and within the first of them."""
    for value in values:
        if _is_residual(value):
            return value
        if isinstance(value, list | tuple) and value:
            return _residual(value)
    raise ProofError("a layer is given or returns no residual (batch, sequence, features)")


def _given(call: _Call) -> Tensor:
    return _residual([*call.args, *call.kwargs.values()])


def _copied(value: Any) -> Any:
    """Return a copy of a tensor, which is trained where that is, also within a checkpoint that enters anew."""
    if not isinstance(value, Tensor):
        return value
    made = value.clone()
    return made.requires_grad_() if value.requires_grad and not made.requires_grad else made


def _are_close(one: Tensor, other: Tensor) -> bool:
    rounding = 1e-9 if one.dtype == WIDE else 1e-3
    return one.shape == other.shape and bool(torch.allclose(one, other, rtol=rounding, atol=rounding))
