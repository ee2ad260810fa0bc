"""What copies with few layers and short inputs do not show of a model of plain torch, whose layers are replaced.

Its own forward pass runs on a copy with all layers, in which layers of a kind have the same weights. So what is
done in one layer and not in others of its kind, dropout in another place, windows that no attribute names, and
what a call leaves for the next are found at the price of a forward pass.
"""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from meshweave.base.errors import MeshweaveError, ProofError, UnsupportedError
from meshweave.nn.parallel.seeds import keep_generators
from meshweave.nn.parallel.structure import ModelMap, dropout_after, dropout_of, heads_of
from meshweave.nn.prove.given import arguments_of, generated, loss_of, outputs_of
from meshweave.nn.prove.state import WIDE, prepared, without_dropout

_TOKENS = 8
_MOST_TOKENS = 512
_MOST_FLOPS = 4e10  # a few seconds of a core; a hundred times that on an accelerator
_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)


@dataclass(frozen=True)
class _LayerCall:
    """A call of a layer: its number, its arguments, which are copies, and the residual that it returned."""

    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Tensor

    @property
    def at(self) -> int:
        """The position of the residual among the arguments: of the tensor that is shaped as what is returned."""
        given = [*self.args, *self.kwargs.values()]
        places = (
            at for at, own in enumerate(given) if isinstance(own, Tensor) and own.shape == self.out.shape
        )
        if (at := next(places, None)) is None:
            raise ProofError("a layer is given no residual of the shape that it returns")
        return at

    @property
    def residual(self) -> Tensor:
        """The residual that the layer is given."""
        given: Tensor = [*self.args, *self.kwargs.values()][self.at]
        return given


class _Stop(Exception):
    """Ends a forward pass whose first layers are wanted."""


def check_whole(
    made: nn.Module, module: nn.Module, names: ModelMap, kinds: Sequence[int], longest: int
) -> None:
    """Raise ProofError where a model's forward pass is not just that of its layers one after the other.

    What else it does would be lost where parallel layers replace the model's own. Raises UnsupportedError where
    the copy does not run.

    Args:
        made: a copy with all layers, those of a kind with the same weights, few words, and dropout as it is.
        module: the model, whose dropout and windows are read.
        names: the names of its modules.
        kinds: for each layer the index of the first layer of its kind.
        longest: the most tokens that a row may have.
    """
    checked = _WatchedCopy(made, names, kinds, type(module).__name__)
    tokens = min(_TOKENS, longest)
    for parameter in made.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    try:
        with prepared(made, checked.dtype, drops=True), _CallRecorder(checked.device.type) as seen:
            checked.dropout(seen, _dropout_of(module, names), tokens)
            without_dropout(made.modules())
            checked.evaluation(tokens)
            before = checked.state()
            calls = checked.calls(tokens)
            checked.memory(before, tokens)
            checked.layers(calls)
            heads = [names.heads or heads_of(module, number, names) for number in range(len(kinds))]
            checked.reach([own.window for own in heads], longest)
    except MeshweaveError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"{checked.title} does not run in a copy with all layers, to prove it ({type(error).__name__}: "
            f"{error}); check=False trains it unproved"
        ) from error


class _WatchedCopy:
    """A copy of a model, whose forward passes are looked at."""

    def __init__(self, made: nn.Module, names: ModelMap, kinds: Sequence[int], title: str) -> None:
        self.made, self.names, self.kinds, self.title = made, names, kinds, title
        self.layers_of = list(made.get_submodule(names.layers))
        self.own = [layer.forward for layer in self.layers_of]
        table = made.get_submodule(names.embedding).weight
        self.dtype, self.device = table.dtype, table.device

    def refuse(self, words: str) -> None:
        """Raise ProofError, which says in `words` what the model does that its layers alone do not."""
        raise ProofError(f"{self.title} is another model than its layers make: {words}")

    def run(self, sequence: int) -> None:
        """Run a forward pass on one row of `sequence` generated tokens, with targets where the copy takes them."""
        given = generated(self.made, 1, self.device, (1, sequence))
        self.made(*given.inputs, **arguments_of(self.made, given))

    # --- dropout and random numbers ---------------------------------------------------------------------------

    def dropout(self, seen: _CallRecorder, expected: list[float], sequence: int) -> None:
        """Run it once, and compare the probabilities of dropout with those of what replaces its layers."""
        before = _generators(self.device)
        self.run(sequence)
        if _generators(self.device) != before:
            self.refuse(
                "forward draws random numbers beside dropout, as noise, or layers or paths that are left out, "
                "which are not computed; turn that off"
            )
        if seen.probabilities != expected:
            self.refuse(
                f"forward drops out with probabilities {seen.probabilities or 'of none'}, in this order, and "
                f"computed are {expected or 'none'}: after the embedding, of attention weights, after attention "
                "and after the feed-forward part; set others to 0"
            )
        seen.probabilities.clear()
        with self.evaluated():
            self.run(sequence)
        if seen.probabilities:
            self.refuse(
                f"forward drops out with probabilities {seen.probabilities} in evaluation, too, which is not "
                "done; give p if self.training else 0.0"
            )

    # --- evaluation -------------------------------------------------------------------------------------------

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Run the block with the copy in evaluation, then set it to training."""
        self.made.eval()
        yield
        self.made.train()

    def evaluation(self, sequence: int) -> None:
        """Check that in evaluation results of the same shape are those of training without dropout."""
        given = generated(self.made, 1, self.device, (1, sequence))
        trained = outputs_of(self.made, given)
        with self.evaluated():
            outputs = outputs_of(self.made, given)
        for name, out in outputs.items():
            before = trained.get(name, out)
            if before.shape == out.shape and not _are_close(before.detach(), out.detach()):
                self.refuse(
                    f"in evaluation it has other {name} than in training without dropout, and what "
                    "replaces its layers computes the same in both; do what differs outside of the model"
                )

    # --- what calls leave -------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return numbers, copies of buffers and sums of weights of modules that are replaced, by name."""
        tensors = {id(own): own.clone() for own in self.made.buffers()}
        tensors |= {id(own): own.detach().sum() for own in self.made.parameters()}
        kept: dict[str, Any] = {}
        rotary = f"{self.names.rotary or self.names.head}."
        for path, child in self.made.named_modules():
            if not f"{path}.".startswith(rotary) and not path.endswith(f".{self.names.layer.activation}"):
                own = {name: each for name, each in vars(child).items() if isinstance(each, int | float)}
                for name, each in (*child._parameters.items(), *child._buffers.items()):
                    own |= {} if each is None else {name: tensors[id(each)]}
                kept |= {f"{path}.{name}".lstrip("."): each for name, each in own.items()}
        return kept

    def memory(self, before: dict[str, Any], sequence: int) -> None:
        """Compare the state with that before a call; where it differs, once more, with that before an equal call.

        What is kept for display, as the loss, is the same after both.
        """
        after = self.state()
        if _changed(before, after):
            before = after
            self.run(sequence)
            if changed := _changed(before, self.state()):
                self.refuse(
                    f"forward changes {changed[0]} in each call, which is not done by what replaces it; keep it "
                    "outside of the model"
                )

    # --- layers -----------------------------------------------------------------------------------------------

    def calls(self, sequence: int, end: int | None = None) -> list[_LayerCall]:
        """Return the calls of layers in a forward pass, of the first `end` layers, and last that of the norm."""
        calls: list[_LayerCall] = []

        def noted(number: int, own: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                given = tuple(map(_copied, args)), {key: _copied(value) for key, value in kwargs.items()}
                out = own(*args, **kwargs)
                calls.append(_LayerCall(number, *given, _residual((out,)).detach().clone()))
                if number == end:
                    raise _Stop
                return out

            return forward

        norm = self.made.get_submodule(self.names.norm)
        watched = [*self.layers_of, norm]
        own = [*self.own, norm.forward]
        for number, layer in enumerate(watched):
            layer.forward = noted(number, own[number])
        try:
            self.run(sequence)
        except _Stop:
            pass
        finally:
            for layer, forward in zip(watched, own, strict=True):
                layer.forward = forward
        return calls

    def layers(self, calls: list[_LayerCall]) -> None:
        """Check that each layer is called once, on the result of that before, and computes what its kind does."""
        path, count, numbers = self.names.layers, len(self.kinds), [call.number for call in calls]
        if numbers != list(range(count + 1)):
            self.refuse(
                f"forward calls {path} as {', '.join(map(str, numbers[:-1]))}, and each is computed "
                "once, in order"
            )
        trained = [call.residual.requires_grad for call in calls[1:]]
        for before, call in pairwise(calls):
            here = f"{path}.{call.number}" if call.number < count else self.names.norm
            if not _are_close(call.residual, before.out) or trained[call.number - 1] != trained[0]:
                self.refuse(f"what {here} is given is not the result of {path}.{before.number}")
        self.made.requires_grad_(False)  # gradients of residuals are looked at
        made: dict[int, tuple[Tensor, Tensor]] = {}
        for call, kind in zip(calls, self.kinds, strict=False):
            x = calls[kind].residual.detach().clone().requires_grad_()
            out = self._of_layer(call, x)
            loss_of(out, None).backward()
            own = out.detach(), torch.zeros_like(x) if x.grad is None else x.grad
            if not all(map(_are_close, made.setdefault(kind, own), own)):
                self.refuse(
                    f"{path}.{call.number} computes something else than {path}.{kind} of the same weights and "
                    "input, by its number or by what it is given; layers of other attributes are known to differ"
                )

    def _of_layer(self, call: _LayerCall, x: Tensor) -> Tensor:
        """Return what a layer makes of a residual `x`, and else of the arguments of a call."""
        given = [*call.args, *call.kwargs.values()]
        given[call.at] = x
        count = len(call.args)
        named = dict(zip(call.kwargs, given[count:], strict=True))
        return _residual((self.own[call.number](*given[:count], **named),))

    # --- windows ----------------------------------------------------------------------------------------------

    def reach(self, windows: Sequence[int | None], longest: int) -> None:
        """Check in long rows, as long as time allows, that the last token sees what it is computed to see."""
        first = sorted(set(self.kinds))
        size = max(sum(p.numel() for p in layer.parameters()) for layer in self.layers_of)
        flops = 2 * size * (first[-1] + 1 + 2 * len(first))
        most = _MOST_FLOPS * (1 if self.device.type == "cpu" else 100)
        calls: list[_LayerCall] = []
        sequence = 2 * min(longest, _MOST_TOKENS, int(most / flops))
        while not calls and (sequence := sequence // 2) >= 2 * _TOKENS:
            with suppress(Exception), warnings.catch_warnings(action="ignore"):  # it may take fewer tokens
                calls = self.calls(sequence, first[-1])
        for number, call in ((at, calls[at]) for at in first if calls):
            x = call.residual.requires_grad_()
            dim = x.shape.index(sequence)
            loss_of(self._of_layer(call, x).select(dim, -1), None).backward()
            grad = torch.zeros_like(x) if x.grad is None else x.grad
            seen = int((grad.movedim(dim, 0).flatten(1).abs().sum(1) > 0).sum())
            if seen != (wanted := min(windows[number] or sequence, sequence)):
                self.refuse(
                    f"a token of {self.names.layers}.{number} sees {seen} tokens of {sequence}, and computed are "
                    f"{wanted}; name it sliding_window, or give mapping= with heads"
                )


class _CallRecorder(TorchFunctionMode):  # type: ignore[misc]
    """A context that notes the probabilities of dropout, where some are dropped, as `probabilities`.

    It multiplies by the factors of a weight, where that has some (`reduced`).
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.probabilities: list[float] = []
        self.device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, and note what it drops."""
        named, p = kwargs or {}, 0.0
        if func is F.linear and len(args) > 1 and (factors := getattr(args[1], "factors", ())):
            left, right = factors
            return F.linear(F.linear(args[0], right), left, *args[2:], **named)
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
        self.probabilities.append(p)
        with keep_generators(self.device):  # so that other random numbers show
            return func(*args, **named)


def _generators(device: torch.device) -> tuple[Any, ...]:
    """Return the states of generators: torch's of the CPU and of a device, Python's and that of numpy."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return random.getstate(), repr(np.random.get_state()), [bytes(state.numpy()) for state in states]


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of numbers and tensors that have other bits; those of `before` are looked at."""
    return [name for name, value in after.items() if _bits(before.get(name, value)) != _bits(value)]


def _bits(value: Any) -> object:
    if not isinstance(value, Tensor):
        return repr(value)
    return value.shape, value.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy().tobytes()


def _dropout_of(module: nn.Module, names: ModelMap) -> list[float]:
    """Return the probabilities of dropout of what replaces the layers of a model, in order, without 0."""
    drops = [dropout_of(module, names.dropout)]
    for number, layer in enumerate(module.get_submodule(names.layers)):
        heads = names.heads or heads_of(module, number, names)
        drops += [
            heads.dropout,
            *(dropout_after(layer, path) for path in (names.layer.out, names.layer.down)),
        ]
    return [p for p in drops if p]


def _residual(values: Any) -> Tensor:
    """Return the first floating tensor with features among values, and within the first of them."""
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1:
            return value
        if isinstance(value, list | tuple) and value:
            return _residual(value)
    raise ProofError("a layer returns no residual")


def _copied(value: Any) -> Any:
    """Return a copy of a tensor, which is trained where that is."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _are_close(one: Tensor, other: Tensor) -> bool:
    rounding = 1e-9 if one.dtype == WIDE else 1e-3
    return one.shape == other.shape and bool(torch.allclose(one, other, rtol=rounding, atol=rounding))
