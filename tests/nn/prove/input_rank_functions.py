"""What ranks do in tests of proofs with masked logits and rows that ranks do not share evenly."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.execute.ranks.job import RankContext
from meshweave.nn.prove.proof import prove

_WORDS = 24


class Masked(nn.Module):  # type: ignore[misc]
    """A model of tokens whose last words are no answers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(_WORDS, 16), nn.Linear(16, _WORDS + 8)
        self.factor = 1.0

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.head(self.table(tokens)) * self.factor
        return logits.masked_fill(torch.arange(_WORDS + 8) >= _WORDS, float("-inf"))


def said(context: RankContext, payload: Mapping[str, Any]) -> dict[str, str]:
    """Return what is said of each pair of models."""
    torch.manual_seed(0)
    model = Masked()
    other = copy.deepcopy(model)
    other.factor = 1 + 1e-6
    linear = nn.Linear(4, 4)
    alike = nn.parallel.DistributedDataParallel(copy.deepcopy(linear))
    answers = {
        "masked": str(prove(model, copy.deepcopy(model))),
        "masked, and other": str(prove(model, other)),
        "uneven": str(prove(linear, alike, torch.randn(4, 4))),
    }
    with torch.no_grad():
        answers["without gradients"] = str(prove(linear, alike))
    return answers
