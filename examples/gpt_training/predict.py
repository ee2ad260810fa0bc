"""What a step should take on this machine: its constants from a short measurement, the rest from the cost model.

All ranks measure at once, since they will compute at once: a training step of the whole model without
communication, the optimizer, and messages from rank to rank. The first two give a rate of products and one of
memory, such that the estimate of a step on one rank is what was measured. From these `step_of` says what
a step takes in any layout, and `meshweave.plan` which is the fastest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import meshweave as mw
from gpt_training.models import ModelSize, build, loss_of
from gpt_training.trainer import Trainer, TrainOptions

LARGE, SMALL = 1 << 22, 1 << 10
"""Bytes of the messages that are timed."""
NUM_PLANNED = 3
"""Layouts that are tried, beside data parallelism alone."""
STRATEGIES = ("megatron_sp", "megatron")
"""Strategies for the ranks of a layer that a plan chooses among."""
OPTIMIZER_BYTES = 28
"""AdamW in fp32 reads weight, gradient and two moments, and writes all but the gradient: 7 words a parameter."""


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


def _median_s(run: Callable[[], object], repeat: int = 5) -> float:
    """Return the median seconds of a run on the slowest rank, all ranks beginning each together."""
    times = []
    for _ in range(repeat + 1):
        dist.barrier()
        begin = time.monotonic()
        run()
        times.append(time.monotonic() - begin)
    median = torch.tensor(statistics.median(times[1:]), dtype=torch.float64)
    dist.all_reduce(median, dist.ReduceOp.MAX)
    return float(median)


def measured_problem(size: ModelSize, batch: int, rows: int) -> mw.algorithms.StepProblem:
    """Return the problem of a step on a cluster with the constants of this machine; collective.

    Args:
        batch: sequences of a step.
        rows: of the micro-batch that is measured.
    """
    model = build(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, size.vocab_size, (rows, size.sequence))

    def compute() -> None:
        loss_of(model(tokens), tokens).backward()

    compute_s = _median_s(compute)
    optimizer_s = _median_s(optimizer.step)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    small_s, large_s = (_message_s(num_bytes) for num_bytes in (SMALL, LARGE))
    rate = LARGE / max(large_s - small_s, 1e-9)
    link = replace(
        mw.load_cluster("local-cpu").network.axis(0),
        name="loopback",
        link_bytes_per_s=rate,
        link_latency_s=small_s,
        source="measured",
    )
    memory_rate = OPTIMIZER_BYTES * num_parameters / optimizer_s

    def estimated_s(flops_per_s: float) -> float:
        alone = _cluster(flops_per_s, memory_rate, link, 1)
        problem = mw.algorithms.StepProblem(transformer_of(size), alone, rows, size.sequence, "float32")
        step = mw.algorithms.step_of(problem, mw.Parallelism(micro_batch=rows))
        return step.time_s - step.optimizer_s

    low, high = 1e6, 1e15
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if estimated_s(middle) > compute_s else (low, middle)
    cluster = _cluster(high, memory_rate, link, dist.get_world_size())
    return mw.algorithms.StepProblem(transformer_of(size), cluster, batch, size.sequence, "float32")


def planned(problem: mw.algorithms.StepProblem) -> list[tuple[mw.Parallelism, float]]:
    """Return the layouts that are predicted to be fastest, with the seconds of a step; the first rank plans."""
    answer: list[object] = [None]
    if dist.get_rank() == 0:
        plan = mw.plan(
            problem.model,
            problem.cluster,
            batch=problem.batch,
            sequence=problem.sequence,
            dtype=problem.dtype,
            stack="ideal",  # the rate of the chip was measured with the runtime's own overheads
            cp=1,
            zero=0,
            recompute="none",
            strategy=list(STRATEGIES),
            order=("tensor", "context", "data", "pipeline"),
        )
        answer = [[(row.degrees.model_dump(), row.step_s) for row in plan.step.ranked[:NUM_PLANNED]]]
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


def _cluster(flops_per_s: float, memory_rate: float, link: object, num_chips: int) -> mw.Cluster:
    local = mw.load_cluster("local-cpu")
    chip = replace(
        local.chip,
        peak_flops_per_s=(("float32", flops_per_s),),
        effective_flops_per_s=flops_per_s,
        memory_bytes_per_s=memory_rate,
        source="measured",
    )
    network = replace(local.network, size=num_chips, link=link)  # type: ignore[type-var]
    return replace(local, name="this machine", chip=chip, network=network, source="measured")


def _message_s(num_bytes: int) -> float:
    """Return the seconds of a message to the next rank, while all ranks send one."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    if num_ranks == 1:
        return 1e-6
    sent, received = torch.zeros(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)

    def around() -> None:
        arrives = dist.irecv(received, (rank - 1) % num_ranks)
        leaves = dist.isend(sent, (rank + 1) % num_ranks)
        arrives.wait()
        leaves.wait()

    return _median_s(around, 10)
