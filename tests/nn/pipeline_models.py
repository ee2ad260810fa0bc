"""Small models cut into stages: a GPT, a model in the shape of a U, a stage that two ranks share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

VOCABULARY, WIDTH, SEQUENCE = 11, 8, 5
CHANNELS, LENGTH = 3, 8


class Block(nn.Module):
    """Attention and a feed-forward part, each with its norm and residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        x = x + self.proj(scores.masked_fill(mask, -math.inf).softmax(-1) @ v)
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


class Embedding(nn.Module):
    """Tokens (rows, sequence) to activations."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(SEQUENCE, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions


def gpt(num_stages: int) -> list[nn.Module]:
    """Return a GPT in float64, a block a stage."""
    torch.manual_seed(7)
    stages: list[nn.Module] = [Block() for _ in range(num_stages)]
    stages[0] = nn.Sequential(Embedding(), stages[0])
    stages[-1] = nn.Sequential(stages[-1], nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
    return [stage.double() for stage in stages]


def tokens(rows: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(0, VOCABULARY, (rows, SEQUENCE + 1), generator=generator)
    return drawn[:, :-1].clone(), drawn[:, 1:].clone()


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of a GPT's output."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Down(nn.Module):
    """Halves the length; returns the result, and what it was made of for the skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Conv1d(channels, 2 * channels, 3, padding=1)
        self.halve = nn.Conv1d(2 * channels, 2 * channels, 2, stride=2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.nn.functional.silu(self.inner(x))
        return self.halve(wide), wide


class Up(nn.Module):
    """Doubles the length, and joins what the skip connection brings."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.double_length = nn.ConvTranspose1d(2 * channels, 2 * channels, 2, stride=2)
        self.inner = nn.Conv1d(4 * channels, channels, 3, padding=1)

    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:
        return self.inner(torch.cat([torch.nn.functional.silu(self.double_length(x)), skipped], 1))


class Middle(nn.Module):
    """Down and up again, with a skip connection inside."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = Down(channels), Up(channels)

    def forward(self, x: Tensor) -> Tensor:
        below, wide = self.down(x)
        made: Tensor = self.up(below, wide)
        return made


def u_model() -> list[nn.Module]:
    """Return a model in the shape of a U, in float64: stage 0 skips to stage 3, stage 1 to stage 2 beside it."""
    torch.manual_seed(8)
    stages = [Down(CHANNELS), Middle(2 * CHANNELS), Middle(2 * CHANNELS), Up(CHANNELS)]
    return [stage.double() for stage in stages]


U_SKIPS = ((0, 3),)


def waves(rows: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a U-shaped model."""
    generator = torch.Generator().manual_seed(4)
    shape = (rows, CHANNELS, LENGTH)
    batch, target = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return batch, target


class Summed(torch.autograd.Function):
    """The sum over ranks forwards, and nothing backwards; or the other way around."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, sums_forward: bool) -> Tensor:
        ctx.group, ctx.sums_backward = group, not sums_forward
        return _summed(x, group) if sums_forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return (_summed(grads[0], ctx.group) if ctx.sums_backward else grads[0]), None, None


def _summed(x: Tensor, group: Any) -> Tensor:
    if x.device.type == "meta":
        return x.clone()
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


class Shared:
    """A value that copies of a module share: a process group cannot be copied."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        return self


class SplitFeedForward(nn.Module):
    """A feed-forward part of which each rank of a group has a share: Megatron's columns, then rows."""

    def __init__(self, whole: nn.Sequential, group: Any, index: int, count: int) -> None:
        super().__init__()
        up, down = whole[0], whole[2]
        assert isinstance(up, nn.Linear)
        assert isinstance(down, nn.Linear)
        share = slice(index * up.out_features // count, (index + 1) * up.out_features // count)
        self.up = nn.Linear(up.in_features, up.out_features // count).double()
        self.down = nn.Linear(down.in_features // count, down.out_features, bias=False).double()
        self.bias = nn.Parameter(down.bias.detach().clone())
        with torch.no_grad():
            self.up.weight.copy_(up.weight[share])
            self.up.bias.copy_(up.bias[share])
            self.down.weight.copy_(down.weight[:, share])
        self.group_of = Shared(group)
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        x = Summed.apply(x, self.group_of.value, False)
        total: Tensor = Summed.apply(
            self.down(torch.nn.functional.gelu(self.up(x))), self.group_of.value, True
        )
        return total + self.bias


def feed_forwards(count: int) -> list[nn.Sequential]:
    """Return feed-forward stages of (rows, WIDTH) in float64."""
    torch.manual_seed(9)
    return [
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).double()
        for _ in range(count)
    ]


def run_whole(stages: Sequence[nn.Module], skips: Sequence[tuple[int, int]], batch: Tensor) -> Tensor:
    """Return the output of the unpipelined model."""
    passed: dict[tuple[int, int], Tensor] = {}
    out = batch
    for number, stage in enumerate(stages):
        ins = [out, *(passed[edge] for edge in skips if edge[1] == number)]
        made = stage(*ins)
        values = made if isinstance(made, tuple) else (made,)
        out = values[0]
        targets = [edge for edge in skips if edge[0] == number]
        passed |= dict(zip(targets, values[1:], strict=True))
    return out
