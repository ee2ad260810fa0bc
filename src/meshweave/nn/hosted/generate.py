"""`generate` of transformers on a model whose ranks each have some heads: its own loop, on every rank.

Each rank runs the whole loop, with keys of its heads in its own cache. Logits are whole on every rank, so all
choose the same token. Ranks compare their arguments, the state of the generator that tokens are drawn from, the
tokens of each forward pass, and the result.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.base.errors import UnsupportedError
from meshweave.nn.hosted.inputs import HostedArguments, splits_rows, why_no_generation
from meshweave.nn.parallel.agreed import without_addresses
from meshweave.nn.parallel.checksums import checksum
from meshweave.nn.parallel.step_agreement import StepAgreement

_WHAT = "all ranks to compare what they generate"
_ALONE = {
    "max_time": "ranks would stop at different tokens; give max_new_tokens or stop strings",
    "assistant_model": "tokens are not drafted by another model; generate without",
    "assistant_early_exit": "tokens are not drafted by the first layers; generate without",
    "inputs_embeds": "give input_ids",
}
"""Options that are refused, each with its reason."""


class RankGenerate:
    """The method `generate` of a parallelised model of transformers, in place of its own.

    All ranks of the mesh call it with equal arguments, and get equal tokens. Refused are pipelines, strategies
    that split sequences, `max_time`, `assistant_model`, `assistant_early_exit`, `inputs_embeds`, caches other than
    "dynamic", and beams where the batch is split.

    Args:
        module: the model.
        arguments: those of the model's forward pass, which know its strategy.
        agreement: compares arguments, the generator's state and tokens between ranks.
    """

    def __init__(self, module: nn.Module, arguments: HostedArguments, agreement: StepAgreement) -> None:
        self._module, self._arguments, self._agreement = module, arguments, agreement
        self.__signature__ = inspect.signature(type(module).generate.__get__(module))

    def __call__(self, *args: Any, **given: Any) -> Any:
        """Return what transformers' own `generate` does, equal on all ranks.

        Raises:
            UnsupportedError: the strategy, a pipeline or an option is refused.
            LayoutError: ranks give other arguments, have torch's generator in another state, or get other tokens.
        """
        module = self._module
        named = dict(zip(self.__signature__.parameters, args, strict=False)) | given
        self._check(named)
        words = {"arguments of a call": _words(named)}
        if self._option("do_sample", named):
            words["generator"] = {"state": _state(module)}
        self._agreement.compare(words, _WHAT)
        out = type(module).generate(module, *args, **given)
        tokens = out if isinstance(out, Tensor) else out.sequences
        self._agreement.compare({"generated tokens": _words({"tokens": tokens})}, _WHAT)
        return out

    def _check(self, given: Mapping[str, Any]) -> None:
        kind, strategy = type(self._module).__name__, self._arguments.strategy
        if reason := why_no_generation(strategy):
            raise UnsupportedError(f"{kind} does not generate: {reason}")
        if not self._arguments.is_whole:
            raise UnsupportedError(f"{kind} does not generate: a stage of a pipeline has some layers only")
        for name, why in _ALONE.items():
            if self._option(name, given) is not None:
                raise UnsupportedError(f"generate with {name} is not computed: {why}")
        cache = self._option("cache_implementation", given)
        if cache not in (None, "dynamic"):
            raise UnsupportedError(
                f"generate with a {cache} cache is not computed; give cache_implementation='dynamic'"
            )
        if splits_rows(strategy) and (self._option("num_beams", given) or 1) > 1:
            raise UnsupportedError(
                f"generate with num_beams is not computed where ranks have rows of their own, as under "
                f"{strategy.name}: beams change rows; generate with the weights under megatron or atp"
            )

    def _option(self, name: str, given: Mapping[str, Any]) -> Any:
        """Return an option of this call: as given, or of the configuration that is given, or of the model's."""
        configs = given.get("generation_config"), getattr(self._module, "generation_config", None)
        options = (given.get(name), *(getattr(each, name, None) for each in configs))
        return next((option for option in options if option is not None), None)


def _words(given: Mapping[str, Any]) -> dict[str, str]:
    """Return arguments in words; of tensors a checksum."""
    words = {}
    for name, value in given.items():
        if isinstance(value, Tensor):
            words[name] = f"{tuple(value.shape)} {value.dtype}"
            words[f"{name}, its values"] = f"#{int(checksum(value)):x}"
        else:
            words[name] = without_addresses(repr(value))
    return words


def _state(module: nn.Module) -> str:
    """Return the checksum of the state of the generator that draws tokens."""
    device = next(module.parameters()).device
    state = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state()
    return f"#{int(checksum(state)):x}"
