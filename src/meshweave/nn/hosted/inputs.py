"""What a forward pass of transformers takes beside tokens, on ranks that each have a part of these.

Every rank gives a mask, positions and tokens whole, as one process does, and takes the part that belongs to its
tokens. The model's own code then computes with them: padding, documents in one row, keys of tokens before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.algorithms.block.roles import AxisDims, num_parts
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.nn.parallel.call_facts import CallInputs
from meshweave.nn.parallel.embedding import local_tokens
from meshweave.nn.parallel.features import ForwardArguments
from meshweave.nn.parallel.strategy import LayerStrategy

_CACHE = ("past_key_values", "use_cache")


class HostedArguments(ForwardArguments):
    """The arguments that a forward pass by the model's own code takes on ranks.

    Attributes:
        is_whole: whether this rank has a part of every layer, and not only a stage of a pipeline.
    """

    def __init__(
        self, module: nn.Module, has_shift: bool, strategy: LayerStrategy, recompute: bool = False
    ) -> None:
        super().__init__(module, has_shift)
        self.strategy, self.recompute, self.is_whole = strategy, recompute, True
        self._taken = taken_by(module)

    # --- what is taken --------------------------------------------------------------------------------------

    def inputs(
        self, tokens: Tensor | None, args: tuple[Any, ...], given: dict[str, Any], targets: Tensor | None
    ) -> CallInputs:
        """Return what a call computes with beside its tokens, after a check of its arguments.

        In evaluation without gradients a call with labels returns logits beside the loss, as in transformers.

        Args:
            tokens: the first argument, (batch, sequence).
            args, given: further arguments, by position and by name.
            targets: for each token the one to predict; None to make them of the argument `labels`, if it is given.

        Raises:
            LayoutError: tokens are no tensor, there are too many arguments, targets and labels are both given, or
                an argument is of another form.
            UnsupportedError: an argument would change the result, and is not computed.
        """
        made = super().inputs(tokens, args, given, targets)
        is_evaluated = not self.module.training and not torch.is_grad_enabled()
        return replace(made, with_logits=is_evaluated and targets is None and made.targets is not None)

    def takes(self, name: str, value: Any, tokens: Tensor) -> bool:
        """Return whether a call on `tokens` (batch, sequence) computes with the argument `name` of this value.

        Raises LayoutError or UnsupportedError where it computes with the argument, but not with this value, or
        where the model's class does not take the argument.
        """
        if name in ("attention_mask", "position_ids"):
            return self.strategy.roles.ring_axis is None and self._takes_rows(name, value, tokens)
        if name in _CACHE and value is not False:
            self._check_cache(name, value)
            return True
        if name == "use_cache":
            return name in self._taken
        if name == "output_router_logits":  # routers read it there
            return value is getattr(getattr(self.module, "config", None), name, None)
        if name in ("logits_to_keep", "num_logits_to_keep"):
            return isinstance(value, int) and value > 0 and why_no_generation(self.strategy) == ""
        if name == "num_items_in_batch":
            return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        return name == "return_dict" and value is True

    def why_not(self, name: str) -> str:
        """Return, as text for an error, why the argument `name` has no effect, or what to use in its place."""
        if name in ("attention_mask", "position_ids"):
            return (
                "keys go round in a ring by their places in whole rows; under all_to_all_heads it is computed"
            )
        return super().why_not(name)

    def _takes_rows(self, name: str, value: Any, tokens: Tensor) -> bool:
        """Return True for a mask or positions. Raises MeshweaveError, saying what is right, for others."""
        kind = type(self.module).__name__
        if name not in self._taken:
            raise UnsupportedError(f"{kind} takes no {name}")
        if not isinstance(value, Tensor) or value.ndim != 2:
            shape = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise LayoutError(f"{name} is {shape}; give a tensor (batch, sequence), all of it on every rank")
        batch = int(tokens.shape[0])
        if value.shape[0] != batch and not (name == "position_ids" and value.shape[0] == 1):
            raise LayoutError(f"{name} has {value.shape[0]} rows, and tokens {batch}; give one for each")
        if name == "position_ids" and value.shape[1] != tokens.shape[1]:
            raise LayoutError(
                f"position_ids are of {value.shape[1]} tokens, and there are {tokens.shape[1]}; give one for each"
            )
        return True

    def _check_cache(self, name: str, value: Any) -> None:
        """Raise UnsupportedError where keys are not kept for later tokens."""
        if reason := why_no_generation(self.strategy):
            raise UnsupportedError(f"{name} is not computed: {reason}")
        if not self.is_whole:
            raise UnsupportedError(f"{name} is not computed: a stage of a pipeline has some layers only")
        if name not in self._taken:
            raise UnsupportedError(f"{type(self.module).__name__} takes no {name}")
        if torch.is_grad_enabled():
            raise UnsupportedError(
                f"{name}: keys are kept where no gradients are; call it under torch.no_grad()"
            )
        if name == "past_key_values" and not hasattr(value, "get_seq_length"):
            raise UnsupportedError(
                f"past_key_values is a {type(value).__name__}; give a Cache that this model has filled"
            )

    def call_inputs(self, tokens: Tensor, targets: Tensor | None, taken: Mapping[str, Any]) -> CallInputs:
        """Return what a call on `tokens` (batch, sequence) computes with.

        Args:
            tokens: the tokens of all ranks.
            targets: for each token the one to predict; None where logits are wanted.
            taken: by name, the other arguments of the call, for which `takes` is true.

        Raises LayoutError where a mask is not of all tokens, UnsupportedError for `logits_to_keep` with targets.
        """
        named = dict(taken)
        if named.get("use_cache") is False and "position_ids" not in named:
            named.pop("use_cache")  # ranks make none anyway
        cache = named.get("past_key_values")
        columns = int(tokens.shape[-1]) + (0 if cache is None else int(cache.get_seq_length()))
        if "attention_mask" in named and named["attention_mask"].shape[1] != columns:
            seen = named["attention_mask"].shape[1]
            raise LayoutError(
                f"attention_mask is of {seen} tokens, and there are {columns}; give one for each"
            )
        last = max(int(named.pop(name, 0)) for name in ("logits_to_keep", "num_logits_to_keep"))
        if last and targets is not None:
            raise UnsupportedError(
                "logits_to_keep: a loss is of all tokens; give no labels, or no logits_to_keep"
            )
        named.pop("return_dict", None)
        return CallInputs(targets, named, last, named.pop("num_items_in_batch", None))

    # --- what a rank takes of it ----------------------------------------------------------------------------

    def local(self, inputs: CallInputs, batch: int) -> dict[str, Any]:
        """Return the model's own forward arguments, by name: `named` of the inputs, cut to this rank's sequences.

        Args:
            inputs: those of the call, of all ranks.
            batch: the number of sequences of all ranks. Tensors with as many rows are cut; others are given whole.
        """
        rows: AxisDims = tuple(dim if dim == "batch" else "" for dim in self.strategy.roles.core(True))
        return {
            name: local_tokens(value, self.strategy, rows)
            if isinstance(value, Tensor) and value.shape[0] == batch
            else value
            for name, value in inputs.named.items()
        }

    def joins_documents(self, taken: Mapping[str, Any]) -> bool:
        """Return whether one process would let tokens attend to earlier documents packed into the same row.

        Positions restart at each document. transformers masks other documents where a call has neither a mask
        nor a cache. One process mostly makes a cache; ranks make none, and compute the same with a mask of ones.

        Args:
            taken: `CallInputs.named`.
        """
        positions, module = taken.get("position_ids"), self.module
        if positions is None or taken.keys() & {"attention_mask", "past_key_values"}:
            return False
        caches = taken.get("use_cache", getattr(getattr(module, "config", None), "use_cache", None))
        if not caches or "use_cache" not in self._taken:
            return False
        if module.training and any(
            getattr(each, "gradient_checkpointing", False) for each in module.modules()
        ):
            return False
        return bool((positions.diff(dim=-1) != 1).any())


def taken_by(module: nn.Module) -> set[str]:
    """Return the names of the arguments of a model's forward pass.

    `use_cache` is among them, too, where the pass hands it on to the inner model by `**kwargs`.
    """
    parameters = inspect.signature(type(module).forward).parameters
    inner: Any = getattr(module, str(getattr(module, "base_model_prefix", "")), None)
    hands_on = inner is not None and any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if hands_on and "use_cache" in inspect.signature(type(inner).forward).parameters:
        return {*parameters, "use_cache"}
    return set(parameters)


def why_no_generation(strategy: LayerStrategy) -> str:
    """Return why a strategy cannot generate tokens, and what to use; "" where it does not split sequences."""
    roles = strategy.roles
    parts = (roles.residual, roles.core(True), roles.core(False), roles.operand(True), roles.operand(False))
    if all("sequence" not in dims for dims in parts):
        return ""
    return (
        f"ranks of {strategy.name} have parts of a row, and a new token is one; generate with the weights under "
        "megatron or atp (save_pretrained, then load_weights)"
    )


def splits_rows(strategy: LayerStrategy) -> bool:
    """Return whether ranks have different sequences of the batch in attention."""
    return num_parts(strategy.roles.core(True), strategy.mesh.shape, ("batch",)) > 1


def causal_lm_output(loss: Tensor | None, logits: Tensor | None, out: Any) -> Any:
    """Return the `CausalLMOutputWithPast` of transformers with `loss` and `logits`.

    Args:
        loss, logits: None for none.
        out: what the forward pass of the model's class returned; its cache of keys and values is taken over.
    """
    from transformers.modeling_outputs import CausalLMOutputWithPast

    return CausalLMOutputWithPast(
        loss=loss, logits=logits, past_key_values=getattr(out, "past_key_values", None)
    )


def with_own_signature(forward: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """Return `forward` under the signature of the forward pass of the module's class, plus a keyword `targets`.

    Libraries read from the signature which arguments a model takes.
    """

    def call(*args: Any, **given: Any) -> Any:
        return forward(*args, **given)

    own = inspect.signature(type(module).forward.__get__(module))
    targets = inspect.Parameter("targets", inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters = list(own.parameters.values())
    at = next((n for n, p in enumerate(parameters) if p.kind is p.VAR_KEYWORD), len(parameters))
    vars(call)["__signature__"] = own.replace(parameters=[*parameters[:at], targets, *parameters[at:]])
    return call
