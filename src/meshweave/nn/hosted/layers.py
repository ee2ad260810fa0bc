"""The layers of a model that runs by its own code: which of them run, and with which parameters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshweave.nn.hosted.parts import Anatomy
from meshweave.nn.hosted.residual import Tokens
from meshweave.nn.parallel.strategy import LayerStrategy
from meshweave.nn.parallel.uses import ParameterUse, ThroughoutUse, run_opened


@dataclass(frozen=True)
class LayerSpan:
    """Which consecutive layers a forward pass runs.

    Attributes:
        end: the number after that of the last layer that runs; 0 to stop before the first layer.
        first: the number of the first layer that runs, from 0; it is given `Tokens.given` where that is set.
        stops: whether the forward pass ends with the last of these layers, and not with the head.
    """

    end: int
    first: int = 0
    stops: bool = False


class RunsLayers(Protocol):
    """The model that layers belong to.

    Attributes:
        anatomy: its parts.
        tokens: those of the step that runs.
        span: which layers run.
        strategy: the strategy on its ranks.
        recompute: whether the backward pass computes layers again (activation checkpointing).
        blocks: all layers, in order.
        throughout: parameters that stay gathered from their first use in a call of the model to its end.
    """

    anatomy: Anatomy
    tokens: Tokens
    span: LayerSpan
    strategy: LayerStrategy
    recompute: bool
    blocks: list[nn.Module]
    throughout: ThroughoutUse

    def dropping(self) -> AbstractContextManager[Any]:
        """Return the context manager in which a forward pass runs.

        In training with dropout it is `RankDropout.around`, else one that does nothing.
        """


class StopError(Exception):
    """Raised to end a forward pass early; `residual` is this rank's part of the residual at that place."""

    def __init__(self, residual: Tensor) -> None:
        super().__init__()
        self.residual = residual


class HostedLayer:
    """Takes the place of a layer's forward pass: runs it if the layer is in the model's `span`, else skips it.

    Attributes:
        use: the layer's parameters.
        opens: whether a forward pass gathers the parameters of all modules of the layer together.
        is_followed: whether other layers run between the forward and the backward pass of this one.
    """

    def __init__(self, layer: nn.Module, number: int, model: RunsLayers, use: ParameterUse) -> None:
        self._forward, self._layer = type(layer).forward.__get__(layer), layer
        self._number, self._model, self.use = number, model, use
        self.opens, self.is_followed = True, True
        self._results = model.anatomy.layers[number].results

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Return what the layer returns; outside of the span the residual that it is given, in the same form.

        Raises StopError, with the residual, where the forward pass ends after this layer, or before the first.
        """
        model, span = self._model, self._model.span
        if given:
            x, given = given[0], given[1:]
        else:
            x = named.pop(key := next(iter(named)))
            assert isinstance(x, Tensor), key
        if span.end == 0:
            raise StopError(x)
        if span.first == self._number and model.tokens.given is not None:
            x = model.tokens.told(model.tokens.given)
        if not span.first <= self._number < span.end:
            return skipped_layer_results(model, self._number, x, self._results)
        if torch.compiler.is_compiling():
            result = self._run(x, *given, **named)
        else:
            model.throughout.reach(self._number)
            result = self._run(x, *given, **named)
            if self._number == len(model.blocks) - 1:
                model.throughout.reach(len(model.blocks))
        if span.stops and self._number == span.end - 1:
            raise StopError(result[0] if isinstance(result, tuple | list) else result)
        return result

    def _run(self, *given: Any, **named: Any) -> Any:
        """Return what the layer returns, which may be computed again by the model's own means or the plan's."""
        layer, own = vars(self._layer), "_gradient_checkpointing_func"
        held = self._model.tokens.sizes, self._model.tokens.last_position
        run = layer.get(own)
        if run is None and not self._model.recompute:
            return self._again(held, self._forward, *given, **named)
        if run is not None:  # transformers' layers call it with their forward
            layer[own] = lambda inner, *args, **kwargs: run(
                partial(self._again, held, inner), *args, **kwargs
            )
        try:
            once = partial(self._again, held, self._forward)
            if self._model.recompute and torch.is_grad_enabled():
                return checkpoint(once, *given, use_reentrant=False, **named)
            return once(*given, **named)
        finally:
            if run is not None:
                layer[own] = run

    def _again(
        self,
        held: tuple[tuple[int, int], Tensor | None],
        run: Callable[..., Any],
        *given: Any,
        **named: Any,
    ) -> Any:
        """Return what the layer's own forward returns, in a forward pass or long after it."""
        model, tokens = self._model, self._model.tokens
        (tokens.held, tokens.last_position), tokens.place = held, model.strategy.roles.residual
        with nullcontext() if tokens.ids is not None else model.dropping():
            if not self.opens or model.strategy.is_alone or torch.compiler.is_compiling():
                return run(*given, **named)
            return run_opened(
                self.use,
                lambda: run(*given, **named),
                frees=not model.strategy.roles.keeps_weights,
                frees_now=self.is_followed,
            )


def skipped_layer_results(model: RunsLayers, number: int, x: Tensor, results: int) -> Any:
    """Return the residual x as layer `number`, which is not run, would return it.

    For the last layer, where a span begins after it, the residual is `Tokens.given`.

    Args:
        model: the model.
        number: the layer's, from 0.
        x: this rank's part of the residual before the layer.
        results: the length of the tuple that the layer returns; 0 for the residual alone.
    """
    tokens = model.tokens
    if number == len(model.blocks) - 1 and model.span.first > number and tokens.given is not None:
        x = tokens.told(tokens.given)
    return x if not results else (x, *[None] * (results - 1))


class OtherStage(nn.Module):  # type: ignore[misc]
    """A stand-in for layer `number`, which is on another stage of a pipeline.

    Args:
        number: that of the layer, from 0.
        model: the model on this stage.
        results: the length of the tuple that the layer returns; 0 for the residual alone.
    """

    def __init__(self, number: int, model: RunsLayers, results: int) -> None:
        super().__init__()
        object.__setattr__(self, "_stands", (number, model, results))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # as models ask layers for their kind
            number, model, _ = self._stands
            return getattr(model.blocks[number], name)

    def forward(self, x: Tensor | None = None, *given: Any, **named: Any) -> Any:
        """Return the residual x as the layer would return it: alone, or with None for its other results.

        x is the first argument, by position or by name. In the place of the model's last layer the residual is
        `Tokens.given`, where that is set and only the head runs. Raises StopError where a forward pass stops
        before the first layer.
        """
        number, model, results = self._stands
        x = next(iter(named.values())) if x is None else x
        if model.span.end == 0:
            raise StopError(x)
        return skipped_layer_results(model, number, x, results)


class OtherStageModule(nn.Module):  # type: ignore[misc]
    """A stand-in for a table or a norm that is on another stage of a pipeline."""

    def __init__(self, tokens: Tokens) -> None:
        super().__init__()
        object.__setattr__(self, "_tokens", tokens)

    def forward(self, *given: Any, **named: Any) -> Tensor:
        """Return zeros in the shape of this rank's residual, whatever is given.

        The first layer that runs on this stage is given the real residual.
        """
        return self._tokens.stand_in()
