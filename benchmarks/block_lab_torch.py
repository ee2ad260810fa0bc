"""PyTorch's own tensor parallelism of the same block: `parallelize_module` with sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from meshweave.algorithms.block import BlockProblem
from meshweave.algorithms.block.nodes.norm import EPSILON

PLAN = {
    "norm_a": SequenceParallel(),
    "w_qkv": ColwiseParallel(input_layouts=Shard(1)),
    "w_o": RowwiseParallel(output_layouts=Shard(1)),
    "norm_f": SequenceParallel(),
    "w_1": ColwiseParallel(input_layouts=Shard(1)),
    "w_2": RowwiseParallel(output_layouts=Shard(1)),
}
"""As PyTorch's tutorial of tensor parallelism has it, with the residual sharded along the sequence."""


class GptBlock(nn.Module):
    """A GPT layer; columns of `w_qkv` are queries, keys and values of one head after those of another."""

    def __init__(self, problem: BlockProblem) -> None:
        super().__init__()
        self.problem = problem
        hidden, inner = problem.hidden, problem.heads * problem.head_dim
        self.norm_a, self.norm_f = nn.LayerNorm(hidden, EPSILON), nn.LayerNorm(hidden, EPSILON)
        self.w_qkv = nn.Linear(hidden, 3 * inner, bias=False)
        self.w_o = nn.Linear(inner, hidden, bias=False)
        self.w_1 = nn.Linear(hidden, problem.ffn, bias=False)
        self.w_2 = nn.Linear(problem.ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual after both halves; `x` is (batch, part of the sequence, hidden)."""
        m = x + self.w_o(self._attention(self.w_qkv(self.norm_a(x))))
        return m + self.w_2(F.gelu(self.w_1(self.norm_f(m)), approximate="tanh"))

    def _attention(self, qkv: Tensor) -> Tensor:
        batch, sequence, columns = qkv.shape
        d = self.problem.head_dim
        units = qkv.view(batch, sequence, columns // (3 * d), 3 * d).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            units[..., :d], units[..., d : 2 * d], units[..., 2 * d :], is_causal=True
        )
        return out.transpose(1, 2).flatten(2)


def bind_parallelized(
    problem: BlockProblem, whole: Mapping[str, Any], num_ranks: int, rank: int
) -> tuple[Callable[[], None], Callable[[], dict[str, tuple[Any, Any]]]]:
    """Return what runs a step of the parallelised block, and what returns its results beside their indices."""
    block = GptBlock(problem)
    weights = {"WQKV0": block.w_qkv, "WO0": block.w_o, "W1_0": block.w_1, "W2_0": block.w_2}
    norms = {"GA0": block.norm_a, "GF0": block.norm_f}
    with torch.no_grad():
        for name, linear in weights.items():
            linear.weight.copy_(torch.from_numpy(whole[name]).t())
        for name, norm in norms.items():
            norm.weight.copy_(torch.from_numpy(whole[name][0]))
            norm.bias.copy_(torch.from_numpy(whole[name][1]))
    mesh = init_device_mesh("cpu", (num_ranks,))
    parallelize_module(block, mesh, PLAN)
    rows = np.array_split(np.arange(problem.sequence), num_ranks)[rank]
    x, dz = (torch.from_numpy(whole[name][:, rows].copy()) for name in ("X", "DZ"))
    x.requires_grad_()
    known: dict[str, Tensor] = {}

    def run() -> None:
        x.grad = None
        block.zero_grad()
        z = block(x)
        z.backward(dz)
        known["Z"] = z.detach()
        for name, norm in norms.items():
            summed = [
                part.grad.redistribute(placements=[Replicate()]).to_local()
                for part in (norm.weight, norm.bias)
            ]
            known[f"D{name}"] = torch.stack([_ready(part) for part in summed])

    def results() -> dict[str, tuple[Any, Any]]:
        all_of = [np.arange(size) for size in (problem.batch, problem.sequence, problem.hidden)]
        tokens = (all_of[0], rows, all_of[2])
        assert x.grad is not None
        out: dict[str, tuple[Any, Any]] = {
            "Z": (_ready(known["Z"]).numpy(), tokens),
            "DX": (x.grad.numpy(), tokens),
        }
        for name in norms:
            out[f"D{name}"] = known[f"D{name}"].numpy(), (np.arange(2), all_of[2])
        for name, linear in weights.items():
            gradient = linear.weight.grad
            assert isinstance(gradient, DTensor)
            (placement,) = gradient.placements
            index = [np.arange(size) for size in gradient.shape]
            assert isinstance(placement, Shard)
            index[placement.dim] = np.array_split(index[placement.dim], num_ranks)[rank]
            out[f"D{name}"] = gradient.to_local().t().numpy(), tuple(reversed(index))
        return out

    return run, results


def _ready(value: Any) -> Tensor:
    """Return a tensor once the communication that it waits for is over."""
    return value.wait() if hasattr(value, "wait") else value
