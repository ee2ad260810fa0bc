"""What a step should take on this machine: its constants from a short measurement, the rest from the cost model.

`meshweave.nn.measure_step` measures a step of the whole model on each rank by itself, the optimizer, and sums over
ranks. Of that `measured_problem` makes a problem of which `step_of` says what a step takes in any layout, and
`meshweave.plan` which is the fastest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import meshweave as mw
from gpt_training.models import ModelSize, build, loss_of
from gpt_training.trainer import Trainer, TrainOptions

MEMORY_BYTES = 4 << 30
"""What a rank may use."""
NUM_PLANNED = 3
"""Layouts that are tried, beside data parallelism alone."""


def transformer_of(size: ModelSize) -> mw.Transformer:
    """Return the sizes as the planner has them."""
    return mw.Transformer(
        name=f"small {size.style}",
        num_layers=size.num_layers,
        hidden=size.hidden,
        num_heads=size.num_heads,
        num_kv_heads=size.num_kv_heads,
        head_dim=size.head_dim,
        ffn_hidden=size.ffn_hidden,
        vocab_size=size.vocab_size,
        gated_ffn=size.style == "llama",
        source="examples/gpt_training",
        tied_embeddings=False,
    )


def measured_problem(
    size: ModelSize, batch: int, rows: int
) -> tuple[mw.algorithms.StepProblem, mw.nn.MeasuredStep]:
    """Return the problem of a step on this machine, and what was measured; collective.

    Args:
        batch: sequences of a step.
        rows: of the larger micro-batch that is measured; the other is half of it.
    """
    model = build(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, size.vocab_size, (rows, size.sequence))

    def compute(count: int) -> None:
        optimizer.zero_grad()
        loss_of(model(tokens[:count]), tokens[:count]).backward()

    sizes, described = sorted({max(rows // 2, 1), rows}), transformer_of(size)
    measured = mw.nn.measure_step(compute, optimizer.step, sizes, described, size.sequence)
    problem = mw.nn.measured_problem(measured, described, batch, size.sequence, MEMORY_BYTES)
    return problem, measured


def planned(
    problem: mw.algorithms.StepProblem, measured: mw.nn.MeasuredStep
) -> list[tuple[mw.Parallelism, float]]:
    """Return the layouts that are predicted to be fastest, with the seconds of a step; the first rank plans."""
    answer: list[object] = [None]
    if dist.get_rank() == 0:
        ranked = mw.nn.fastest_here(problem, measured)
        answer = [[(vars(layout), seconds) for layout, seconds in ranked[:NUM_PLANNED]]]
    dist.broadcast_object_list(answer)
    rows: list[Any] = answer[0]  # type: ignore[assignment]
    return [(mw.Parallelism(**degrees), seconds) for degrees, seconds in rows]


def fastest_tried(options: TrainOptions, rows: list[tuple[mw.Parallelism, float]]) -> mw.nn.TrialTable:
    """Return the table of steps of the planned layouts, and of data parallelism alone; all ranks call it."""
    num_ranks = dist.get_world_size()
    alone = mw.Parallelism(data=num_ranks, micro_batch=max(options.batch // num_ranks, 1))
    others = [(chosen, seconds) for chosen, seconds in rows if chosen.data != num_ranks]
    alone_s = next((seconds for chosen, seconds in rows if chosen.data == num_ranks), None)
    running: list[Trainer] = []

    def start(chosen: mw.Parallelism) -> Callable[[], object]:
        for trainer in running:
            trainer.close()
        running[:] = [Trainer(replace(options, parallelism=chosen, folder=None, save_every=0))]
        return running[0].step

    trials = [mw.nn.Trial.of(chosen, seconds) for chosen, seconds in ((alone, alone_s), *others)]
    table = mw.nn.run_trials(trials, start)
    running[0].close()
    return table
