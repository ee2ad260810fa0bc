"""What ranks do in tests of choice by trial."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import reference_models
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshweave.algorithms.step import Parallelism
from meshweave.base.errors import LayoutError
from meshweave.describe.model.transformer import Transformer
from meshweave.execute.ranks.job import RankContext
from meshweave.nn.parallel import timed_here
from meshweave.nn.parallel.machine_here import measure_step
from meshweave.nn.parallel.parallelize import parallelize
from meshweave.nn.parallel.planned_here import plans_here
from meshweave.nn.parallel.trials import Trials


def choose_unaided(context: RankContext, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is tried where nobody gives plans, in fp32 and in fp64, and what the log says."""
    torch.set_num_threads(1)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("meshweave.nn.parallel.planned_here")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    tables = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = reference_models.make("llama").to(dtype)
        tokens, targets = torch.randint(0, reference_models.words(model), (2, 2 * context.num_ranks, 8))
        made = parallelize(model, "auto", trials=Trials(tokens, targets, steps=1), check=False)
        assert made.trials is not None
        tables.append(made.trials.trials)
    rows = [[t.words, t.kind, t.predicted_s, t.measured_s] for t in tables[0]]
    return {"rows": rows, "others": [[t.words, t.predicted_s] for t in tables[1]], "log": lines}


SMALL_MODEL = Transformer(
    name="a small model", num_layers=1, hidden=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_hidden=64,
    vocab_size=64, gated_ffn=True, source="a test",
)  # fmt: skip


def measured_alone(context: RankContext, payload: Mapping[str, Any]) -> list[Any]:
    """Return what is measured, few times, of a step that takes nothing; what is drawn after it and without it."""
    timed_here._SUMS, timed_here._REPEATS_BY_TURNS = 1, 2
    torch.manual_seed(0)
    measured = measure_step(lambda rows: None, lambda: None, [1], SMALL_MODEL, 8)
    drawn = float(torch.rand(()))
    torch.manual_seed(0)
    return [asdict(measured), drawn, float(torch.rand(()))]


def plan_unlike(context: RankContext, payload: Mapping[str, Any]) -> list[int]:
    """Return how many plans there are where rank 1 alone has a model or tokens that are not taken."""
    torch.set_num_threads(1)
    counts = []
    for what in ("model", "tokens"):
        model = reference_models.make("llama").float()
        tokens, targets = torch.randint(0, reference_models.words(model), (2, 4, 8))
        if context.rank == 1 and what == "model":
            next(model.parameters()).requires_grad_(False)
        given = tokens.flatten() if context.rank == 1 and what == "tokens" else tokens
        counts.append(len(plans_here(model, given, targets, parallelize, 1e9)))
    return counts


def choose(context: RankContext, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was tried for a model, what was chosen, and the loss of the model that stays."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = reference_models.make("plain llama").float()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    tokens, targets = torch.randint(0, reference_models.words(model), (2, 2 * context.num_ranks, 8))
    plans = [
        (Parallelism(data=context.num_ranks), 1.0),
        (Parallelism(tensor=context.num_ranks, strategy="megatron"), 2.0),
        ("all_to_all_heads", None),
        ("no_such_strategy", None),
    ]
    results = Path(payload["results"])
    trials = Trials(tokens, targets, plans, most=5, steps=1, results=results)
    answer: dict[str, Any] = {"refused": ""}
    try:
        parallelize(model, "auto", check=False)
    except LayoutError as error:
        answer["refused"] = str(error)
    made = parallelize(model, "auto", trials=trials, check=False)
    assert made.trials is not None
    now = [each.full_tensor() if isinstance(each, DTensor) else each for each in made.module.parameters()]
    dist.barrier()
    rows = [[t.words, t.kind, t.predicted_s, t.measured_s, t.refused] for t in made.trials.trials]
    return {
        **answer,
        "rows": rows,
        "table": str(made.trials),
        "chosen": made.trials.chosen.words,
        "strategy": made.strategy.name,
        "is_same": all(torch.equal(a, b) for a, b in zip(before, now, strict=True)),
        "loss": float(made.step(tokens, targets)),
        "next": [t.expected_s for t in Trials(tokens, targets, plans, results=results).candidates()],
    }
