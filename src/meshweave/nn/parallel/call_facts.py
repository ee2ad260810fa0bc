"""What a call of a parallelised model must not be in, and what ranks must have alike in it but values of tensors.

It is taken in every call, and seldom becomes words: a number stands for it, which is kept for later calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshweave.base.errors import UnsupportedError
from meshweave.execute.torch import compat_gradients
from meshweave.nn.parallel.agreed import digest

Facts = tuple[tuple[str, Any], ...]
"""Things by name. Values can be hashed, and those under one name are of one type: equal ones have equal words."""

_CALL, _STEP = (
    0x9E3779B97F4A7C15,
    0xBF58476D1CE4E5B9,
)  # odd: counts that differ by one show in the lowest bits


def check_transforms() -> None:
    """Raise UnsupportedError inside `torch.func` transforms (grad, vmap), which cannot transform communication."""
    if compat_gradients.is_transformed():
        raise UnsupportedError(
            "torch.func.grad, vmap and the like do not transform what ranks exchange: call the model outside of "
            "them, and take gradients by loss.backward() or torch.autograd.grad"
        )


def check_anomaly_mode() -> None:
    """Raise UnsupportedError where `torch.autograd.detect_anomaly` looks for nan, which fails for DTensors."""
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled() and torch.is_grad_enabled():
        raise UnsupportedError(
            "detect_anomaly looks for nan in DTensors, which torch has no means for: give check_nan=False, or "
            "look at parameter.grad.to_local()"
        )


@dataclass(frozen=True)
class CallInputs:
    """What a call of a parallelised module computes with beside its tokens (batch, sequence).

    Attributes:
        targets: (batch, sequence): for each token the one that is to be predicted; None where logits are wanted.
        named: by name, arguments of the model's own forward pass that its code computes with; tensors are whole.
        logits_to_keep: for how many last tokens of a sequence logits are returned; 0 for all.
        num_items: the divisor of the sum of losses; None for the number of tokens that have a target.
        with_logits: whether logits are returned beside the loss.
    """

    targets: Tensor | None = None
    named: Mapping[str, Any] = field(default_factory=dict)
    logits_to_keep: int = 0
    num_items: Tensor | float | None = None
    with_logits: bool = False

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors among `named` and `num_items`, by argument name; they must be the same on all
        ranks.
        """
        every = {**self.named, "num_items_in_batch": self.num_items}
        return {name: value for name, value in every.items() if isinstance(value, Tensor)}

    @property
    def facts(self) -> Facts:
        """Return what must be the same on all ranks, but for tensors' values, as (name, value) for `CallFacts`."""
        cache = self.named.get("past_key_values")
        return (
            ("given", ", ".join(self.tensors)),
            ("logits_to_keep", str(self.logits_to_keep)),
            ("use_cache", str(self.named.get("use_cache"))),
            ("logits beside the loss", bool(self.with_logits)),
            ("num_items_in_batch", "" if isinstance(self.num_items, Tensor) else str(self.num_items)),
            ("past_key_values", "none" if cache is None else f"of {int(cache.get_seq_length())} tokens"),
        )


class CallFacts(NamedTuple):
    """What must be the same on all ranks in one call of a model.

    Attributes:
        steady: (subject, ((name, value), ...)) of what seldom changes between calls; its part of `number` is
            cached.
        calls: forward calls so far.
        steps: steps of optimizers so far.
        generator: a hash of the state of torch's generator; None where it may differ between ranks.
    """

    steady: tuple[tuple[str, Facts], ...]
    calls: int
    steps: int
    generator: int | None

    @property
    def number(self) -> int:
        """Return a hash of all four attributes, equal on ranks with equal facts; it may have more than 64 bits."""
        drawn = 0 if self.generator is None else 2 * self.generator + 1
        return _steady_number(self.steady) + self.calls * _CALL + self.steps * _STEP + drawn

    @property
    def words(self) -> dict[str, Mapping[str, str]]:
        """Return the facts as {subject: {name: text}}, which `agree` compares between ranks to name what
        differs.
        """
        words = _words(self.steady)
        counts = {"optimizer steps": str(self.steps), "forward calls": str(self.calls)}
        words["progress"] = {**counts, **words.get("progress", {})}
        if self.generator is not None:
            words["generator"] = {"state": f"#{self.generator:x}"}
        return words


class GivenTensor(NamedTuple):
    """What ranks compare of a tensor given to a call, beside values: shape, dtype, whether it is on "meta"."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_meta: bool

    @classmethod
    def of(cls, given: Tensor | None) -> GivenTensor | str:
        """Return shape, dtype and whether the tensor is on the meta device; "none" for None."""
        return "none" if given is None else cls(given.shape, given.dtype, given.is_meta)

    def __str__(self) -> str:
        where = " on the meta device" if self.is_meta else ""
        return f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}{where}"


def _words(steady: tuple[tuple[str, Facts], ...]) -> dict[str, Mapping[str, str]]:
    return {subject: {name: str(value) for name, value in facts} for subject, facts in steady}


@lru_cache(256)
def _steady_number(steady: tuple[tuple[str, Facts], ...]) -> int:
    return int(digest(_words(steady))[:15], 16)
