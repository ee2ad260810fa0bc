"""Routers of experts: the model's own, on the rows of a rank, and the auxiliary loss of those of all ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from meshweave.algorithms.block.roles import Side
from meshweave.base.errors import UnsupportedError
from meshweave.nn.hosted.own_modules import OwnModule
from meshweave.nn.hosted.residual import Tokens, as_plain
from meshweave.nn.parallel.moves import Mover, PlacedMove
from meshweave.nn.parallel.norm import be_instance_of


class HostedRouter(OwnModule):
    """A router in the place of the model's own, whose class it extends, so that transformers records its logits.

    Where the model computes an auxiliary loss, its logits are gathered for all tokens of all ranks, since that
    loss is not a sum over tokens.
    """

    _tokens: Tokens
    _config: Any

    @classmethod
    def of(cls, module: nn.Module, tokens: Tokens, name: str, config: Any) -> nn.Module:
        """Return the replacement of `module`, a router or another module of a routed layer that needs whole rows.

        Args:
            module: the model's own, on meta.
            tokens: the tokens of the step that runs.
            name: that of the module in the model.
            config: the model's configuration, of which `output_router_logits` is read at each call.
        """
        own = OwnModule(module, tokens.strategy, name, tokens.strategy.roles.residual)
        own.__class__ = cls
        be_instance_of(own, module)
        own._tokens, own._config = tokens, config
        return own

    def forward(self, *given: Any, **named: Any) -> Any:
        """Return the module's own results for this rank's rows.

        With `output_router_logits` in the configuration, the first result, the logits, is gathered for the tokens
        of all ranks (tokens, experts), and the call is collective.
        """
        out = OwnModule.forward(self, *given, **named)
        if not getattr(self._config, "output_router_logits", False) or not isinstance(out, tuple):
            return out
        logits, *rest = out
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            return out
        tokens, roles = self._tokens, self.layer_strategy.roles
        rows = tokens.rows_of(as_plain(logits), roles.residual)
        side = (Side("", int(logits.shape[1])),)
        there = PlacedMove(self.layer_strategy, side, roles.residual, roles.replicated)
        back = PlacedMove(self.layer_strategy, side, roles.replicated, roles.residual)
        whole = Mover(there, back)(rows, *tokens.sizes).flatten(0, 1)
        return (whole, *rest)


def auxiliary_loss(module: nn.Module, out: Any, num_tokens: int) -> Tensor | None:
    """Return what a model adds to its loss for its routers: the auxiliary loss times its factor, a tensor ().

    None where the result of the forward pass has no auxiliary loss.

    Args:
        module: the model, which has the factor (`router_aux_loss_coef`).
        out: the result of the class's forward pass.
        num_tokens: the number of tokens of all ranks.

    Raises UnsupportedError where the loss was not computed from the logits of all tokens, or its factor is
    unknown.
    """
    loss = getattr(out, "aux_loss", None)
    if loss is None:
        return None
    kind, logits = type(module).__name__, getattr(out, "router_logits", None) or ()
    if any(each.shape[0] != num_tokens for each in logits) or not logits:
        raise UnsupportedError(
            f"{kind} computes its auxiliary loss of other rows than {num_tokens} tokens: give "
            "output_router_logits=False"
        )
    factor = getattr(module, "router_aux_loss_coef", None)
    if not isinstance(factor, float | int):
        raise UnsupportedError(f"{kind} does not say the factor of its auxiliary loss (router_aux_loss_coef)")
    return factor * as_plain(loss)


def check_auxiliary(module: nn.Module, is_whole: bool, has_mask: bool) -> None:
    """Raise UnsupportedError where a model's auxiliary loss would not be that over all tokens and layers.

    Args:
        module: the model; its configuration has `output_router_logits`.
        is_whole: whether this rank has a part of every layer, and not only a stage of a pipeline.
        has_mask: whether the call has an attention mask.
    """
    if not getattr(getattr(module, "config", None), "output_router_logits", False):
        return
    wrong = "" if is_whole else "in a stage of a pipeline"
    wrong = wrong or ("with an attention_mask" if has_mask else "")
    if wrong:
        raise UnsupportedError(
            f"the auxiliary loss of {type(module).__name__} is not computed {wrong}: give "
            "config.output_router_logits=False"
        )


def check_noise(layer: nn.Module, where: str) -> None:
    """Raise UnsupportedError where a router in `layer` adds random noise: copies of a token would differ.

    Such a module has a positive float attribute with "jitter" in its name. `where` is the layer's name.
    """
    for path, module in layer.named_modules():
        for name, value in vars(module).items():
            if "jitter" in name and isinstance(value, float) and value > 0:
                raise UnsupportedError(
                    f"{where}.{path} has {name}={value}, noise that each rank draws by itself: give 0"
                )
