"""What ranks must have alike in a call of a parallelised model, but for the values of tensors.

It is taken in every call, and seldom becomes words: a number stands for it, which is kept for later calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshweave.nn.parallel.agreed import digest

Facts = tuple[tuple[str, Any], ...]
"""Things by name. Values can be hashed, and those under one name are of one type: equal ones have equal words."""

_CALL, _STEP = (
    0x9E3779B97F4A7C15,
    0xBF58476D1CE4E5B9,
)  # odd: counts that differ by one show in the lowest bits


class CallFacts(NamedTuple):
    """What ranks must have alike in a call.

    Attributes:
        steady: (subject, ((name, value), ...)) of what is mostly as in the call before, so that its number
            is kept.
        calls: forward calls so far.
        steps: steps of optimizers so far.
        generator: a hash of the state of torch's generator; None where ranks need not have it alike.
    """

    steady: tuple[tuple[str, Facts], ...]
    calls: int
    steps: int
    generator: int | None

    @property
    def number(self) -> int:
        """Return an integer, equal for equal facts and hardly ever for others; it may have more than 64 bits."""
        drawn = 0 if self.generator is None else 2 * self.generator + 1
        return _steady_number(self.steady) + self.calls * _CALL + self.steps * _STEP + drawn

    @property
    def words(self) -> dict[str, Mapping[str, str]]:
        """Return all of it as {subject: {name: text}}, for `agree` to compare and to name what differs."""
        words = _words(self.steady)
        counts = {"optimizer steps": str(self.steps), "forward calls": str(self.calls)}
        words["progress"] = {**counts, **words.get("progress", {})}
        if self.generator is not None:
            words["generator"] = {"state": f"#{self.generator:x}"}
        return words


class GivenTensor(NamedTuple):
    """What ranks compare of a tensor that a call is given, beside its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_meta: bool

    @classmethod
    def of(cls, given: Tensor | None) -> GivenTensor | str:
        """Return the facts of a tensor; "none" for None."""
        return "none" if given is None else cls(given.shape, given.dtype, given.is_meta)

    def __str__(self) -> str:
        where = " on the meta device" if self.is_meta else ""
        return f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}{where}"


def _words(steady: tuple[tuple[str, Facts], ...]) -> dict[str, Mapping[str, str]]:
    return {subject: {name: str(value) for name, value in facts} for subject, facts in steady}


@lru_cache(256)
def _steady_number(steady: tuple[tuple[str, Facts], ...]) -> int:
    return int(digest(_words(steady))[:15], 16)
