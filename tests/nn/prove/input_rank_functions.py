"""What ranks do in tests of proofs with masked logits and rows that ranks do not share evenly."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from plain_models import PlainLlama
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from meshweave.execute.ranks.job import RankContext
from meshweave.nn.parallel.parallelize import parallelize
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


def said_of_replicas(context: RankContext, payload: Mapping[str, Any]) -> dict[str, str]:
    """Return what is said of pairs of ranks that share layers, beside others with rows of their own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = PlainLlama()
    made = parallelize(copy.deepcopy(model), "megatron", mesh["tensor"], check=False)

    def average(module: nn.Module) -> None:
        for parameter in module.parameters():
            own: Any = parameter.grad
            dist.all_reduce(own.to_local(), group=mesh["data"].get_group())
            own.to_local().div_(2)

    return {
        "averaged": str(prove(model, made, data_mesh=mesh["data"], after_backward=average)),
        "not averaged": str(prove(model, made, data_mesh=mesh["data"])),
    }


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
