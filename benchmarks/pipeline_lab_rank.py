"""What one rank of `pipeline_lab.py` does: pipelines of torch modules, every variant in turns."""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import meshweave as mw
from meshweave.cost.fabric import HostTopology
from meshweave.execute.ranks.job import RankContext
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.measure import start_together, without_garbage_collection
from meshweave_lab.description_file import load_lab
from meshweave_lab.pace import paced

WIDTH, SEQUENCE = 128, 256
CHANNELS, LENGTH = 128, 256
ROWS = 4
"""Rows of a micro-batch. What passes between stages is eight times the least token bucket of a link."""
MESHES = (
    mw.Mesh("first", (2,), ("dp",), (0, 1)),
    mw.Mesh("second", (2,), ("tp",), (2, 3)),
    mw.Mesh("third", (2,), ("dp",), (4, 5)),
)
"""Data-parallel ranks at both ends, ranks that each need all rows between them: both boundaries are reshards."""
TOLERANCE = 1e-4


class Block(nn.Module):
    """One layer of a GPT."""

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
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Mixer(nn.Module):
    """Two products with a residual: a convolution of the U, as products over channels."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(channels, inner), nn.Linear(inner, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.silu(self.up(x)))


class Down(nn.Module):
    """The first part of a U: half as long, twice the channels; and what the last part joins."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(*(Mixer(CHANNELS, 4 * CHANNELS) for _ in range(2)))
        self.halve = nn.Linear(2 * CHANNELS, 2 * CHANNELS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.inner(x)
        return self.halve(x.reshape(x.shape[0], -1, 2 * CHANNELS)), x


class Bottom(nn.Module):
    """The middle of a U. Each of its ranks has all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mixer(2 * CHANNELS, 4 * CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Up(nn.Module):
    """The last part of a U: twice as long, and joined with what skips over the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.double_length = nn.Linear(2 * CHANNELS, 2 * CHANNELS)
        self.join = nn.Linear(2 * CHANNELS, CHANNELS)
        self.inner = nn.Sequential(*(Mixer(CHANNELS, 4 * CHANNELS) for _ in range(2)))

    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:
        longer = self.double_length(x).reshape(skipped.shape)
        return self.inner(self.join(torch.cat([longer, skipped], -1)))


def model_of(
    name: str, micro_batches: int
) -> tuple[list[nn.Module], tuple[tuple[int, int], ...], Tensor, Tensor]:
    """Return stages, skip connections, the batch and the target of "gpt" or "u"."""
    torch.manual_seed(0)
    rows = ROWS * micro_batches
    if name == "gpt":
        # The stage in the middle has all rows on each rank, so half as many layers take as long.
        stages: list[nn.Module] = [nn.Sequential(*(Block() for _ in range(count))) for count in (2, 1, 2)]
        return stages, (), torch.randn(rows, SEQUENCE, WIDTH), torch.randn(rows, SEQUENCE, WIDTH)
    batch, target = (torch.randn(rows, LENGTH, CHANNELS) for _ in range(2))
    return [Down(), Bottom(), Up()], ((0, 2),), batch, target


def measure_pipelines(context: RankContext, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Run every variant once to warm up and then `repeat` times, in changing order, each from a common start.

    `payload`: lab (its file), model, variants [{name, plan, transfers, strategy}], micro_batches, repeat,
    deadline_s. Returns the seconds from the common start to the end of this rank's part for each variant,
    its program as text, the largest error of gradients as a share of their largest value, late_s, and how
    the pace was kept.
    """
    torch.set_num_threads(1)
    description = load_lab(payload["lab"])
    network = HostTopology.of(description.cluster())
    shared = TorchContext(liveness=context.liveness, deadline_s=payload["deadline_s"])
    stages, skips, batch, target = model_of(payload["model"], payload["micro_batches"])
    expected = _expected(stages, skips, batch, target)
    stage = context.rank // 2
    pipelines, programs = [], []
    for variant in payload["variants"]:
        config = mw.schedules.PipelineConfig(
            variant["transfers"], strategy=variant["strategy"], network=network
        )
        pipeline = mw.pipeline(
            {stage: stages[stage]}, variant["plan"], micro_batches=payload["micro_batches"],
            loss_fn=functional.mse_loss, meshes=MESHES, skips=skips, config=config, context=shared,
        )  # fmt: skip
        pipeline.prepare(batch, target)
        pipelines.append(pipeline)
        programs.append(mw.ir.to_text(pipeline.program) if context.rank == 0 else "")
        if context.rank == 0:
            print(f"{payload['model']}: {variant['name']}: bound", file=sys.stderr, flush=True)
    times: list[list[float]] = [[] for _ in pipelines]
    errors = [0.0 for _ in pipelines]
    late_s = 0.0
    gc.collect()
    with without_garbage_collection(), paced(description.flops_per_s) as pacer:
        for repetition in range(payload["repeat"] + 1):
            for which in range(len(pipelines)) if repetition % 2 else reversed(range(len(pipelines))):
                stages[stage].zero_grad()
                start_ns, late_ns = start_together(shared)
                pipelines[which].step(batch, target)
                took = (time.monotonic_ns() - start_ns) / 1e9
                if repetition:
                    times[which].append(took)
                    late_s = max(late_s, late_ns / 1e9)
                if payload["variants"][which]["transfers"] != "signals":
                    errors[which] = max(errors[which], _error(stages[stage], expected[stage]))
        report = pacer.report()
    shared.close()
    return {
        "times": times,
        "programs": programs,
        "errors": errors,
        "late_s": late_s,
        "pace": asdict(report),
    }


def _expected(
    stages: list[nn.Module], skips: tuple[tuple[int, int], ...], batch: Tensor, target: Tensor
) -> list[list[Tensor]]:
    """Return the gradients of each stage's parameters in the unpipelined model."""
    if skips:
        below, skipped = stages[0](batch)
        out = stages[2](stages[1](below), skipped)
    else:
        out = stages[2](stages[1](stages[0](batch)))
    functional.mse_loss(out, target).backward()
    grads = [[parameter.grad.clone() for parameter in stage.parameters()] for stage in stages]
    for stage in stages:
        stage.zero_grad()
    return grads


def _error(stage: nn.Module, expected: list[Tensor]) -> float:
    """Return the largest error of a gradient as a share of its largest value; of one that is missing infinity."""
    return max(
        math.inf
        if parameter.grad is None
        else ((parameter.grad - grad).abs().nan_to_num(nan=math.inf).max() / grad.abs().max()).item()
        for parameter, grad in zip(stage.parameters(), expected, strict=True)
    )
