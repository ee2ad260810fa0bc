"""A model in the shape of a U on four ranks: a pipeline with a skip connection, and its gradients.

    python examples/pipeline.py

Stage 0 is on two data-parallel ranks, stages 1 and 2 on one each. What stage 0 makes for stage 2 skips stage 1.
Gradients are compared with those of the whole model on one process.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import meshweave as mw

WIDTH, ROWS, MICRO_BATCHES = 16, 8, 4


class Joined(nn.Module):
    """The last stage: it joins what comes through the pipeline with what skipped it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, 1)

    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:
        return self.linear(torch.cat([x, skipped], 1))


class Split(nn.Module):
    """The first stage: it returns one tensor for each stage that reads one, first for the next."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.tanh(self.linear(x))
        return made, made


def main() -> None:
    here = {"PYTHONPATH": str(Path(__file__).parent)}
    for rank, line in enumerate(mw.launch("pipeline:on_a_rank", 4, {}, timeout_s=100, env=here)):
        print(f"rank {rank}: {line}")
    print("gradients are those of the whole model")


def on_a_rank(context: mw.nn.RankContext, payload: dict[str, Any]) -> str:
    """Train one step. Return in words what this rank did."""
    torch.manual_seed(0)
    model = [Split(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), Joined()]
    batch, target = torch.randn(ROWS, WIDTH), torch.randn(ROWS, 1)
    whole = copy.deepcopy(model)
    made, skipped = whole[0](batch)
    nn.functional.mse_loss(whole[2](whole[1](made), skipped), target).backward()

    number = max(context.rank - 1, 0)  # the stage of this rank
    pipeline = mw.pipeline(
        {number: model[number]},
        "eager-1f1b",
        micro_batches=MICRO_BATCHES,
        loss_fn=nn.functional.mse_loss,
        meshes=[mw.Mesh.of("first", (2,), ("dp",))],
        skips=[(0, 2)],
        trace=True,
    )
    loss = pipeline.step(batch, target)

    for parameter, expected in zip(model[number].parameters(), whole[number].parameters(), strict=True):
        assert torch.allclose(parameter.grad, expected.grad, atol=1e-6)
    ran = " ".join(span.label.split()[0] for span in pipeline.trace.spans if span.kind == "call")
    return ran if loss is None else f"{ran}; loss {loss:.4f}"


if __name__ == "__main__":
    main()
