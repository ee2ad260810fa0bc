"""What ranks do in tests of long training with batches of changing sizes: what each holds, now and then."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import reference_models
import small_models
import torch
import torch.distributed as dist
from plain_models import WORDS
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import meshweave as mw
from meshweave.execute.ranks.job import RankContext


def held() -> dict[str, int]:
    """Return the threads, descriptors and resident bytes of this process."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "resident": resident,
    }


def steps(context: RankContext, payload: Mapping[str, Any]) -> list[dict[str, int]]:
    """Train for `num_steps` on batches and sequences of sizes by a seed; return what is held, now and then."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    is_pipeline = payload["strategy"] == "pipeline"
    step = _pipeline_step() if is_pipeline else _parallel_step(payload["strategy"], payload["cache_bytes"])
    rng, listed = random.Random(payload["seed"]), []
    for number in range(payload["num_steps"]):
        rows, length = 4 * rng.randint(1, payload["most_rows"]), 2 * rng.randint(1, payload["most_length"])
        if is_pipeline:  # bound for one size, and refuses others
            rows, length = 4 * payload["most_rows"], 2 * payload["most_length"]
        generator = torch.Generator().manual_seed(number)
        tokens, targets = (torch.randint(0, WORDS, (rows, length), generator=generator) for _ in range(2))
        step(tokens, targets)
        if (number + 1) % payload["every"] == 0:
            listed.append({"step": number + 1, **held()})
            if dist.get_rank() == 0:
                print(listed[-1], flush=True)
    return listed


def _parallel_step(strategy: str, cache_bytes: int) -> Callable[[Tensor, Tensor], None]:
    size = dist.get_world_size()
    hosted, _, name = strategy.rpartition(" ")
    shape = (2, size // 2) if name in ("atp", "meshslice_block", "summa_block") else (size,)
    model = small_models.make_model("qwen3") if hosted else reference_models.make("plain llama")
    context = mw.TorchContext(cache_bytes=cache_bytes)
    made = mw.parallelize(model, name, init_device_mesh("cpu", shape), check=False, context=context)
    optimizer = torch.optim.SGD(made.module.parameters(), lr=1e-4)

    def step(tokens: Tensor, targets: Tensor) -> None:
        made.step(tokens, targets)
        optimizer.step()
        optimizer.zero_grad()

    return step


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(WORDS, 16), nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(self.words(tokens)).tanh()


def _pipeline_step() -> Callable[[Tensor, Tensor], None]:
    rank, size = dist.get_rank(), dist.get_world_size()
    stages = [_Words(), *(nn.Linear(16, 16) for _ in range(size - 2)), nn.Linear(16, WORDS)]
    made = mw.pipeline(
        {rank: stages[rank]},
        "1f1b",
        micro_batches=2,
        loss_fn=lambda out, target: nn.functional.cross_entropy(out.flatten(0, 1), target.flatten()),
    )
    optimizer = torch.optim.SGD(stages[rank].parameters(), lr=1e-4)

    def step(tokens: Tensor, targets: Tensor) -> None:
        made.step(tokens, targets)
        optimizer.step()
        optimizer.zero_grad()

    return step
