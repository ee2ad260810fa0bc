"""What the ranks of test_pipeline run; started through `meshweave.execute.ranks.launch`."""

from __future__ import annotations

import copy
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pipeline_models as models
import torch
import torch.distributed as dist
from sections import Findings, run
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import meshweave as mw
from meshweave.algorithms.pipeline import ENTRIES, PipelineConfig
from meshweave.algorithms.pipeline.actions import folded, looped
from meshweave.algorithms.pipeline.torch_csv import schedule_to_csv
from meshweave.algorithms.pipeline.transfer_order import list_transfers
from meshweave.execute.torch.context import TorchContext

TOLERANCE = 1e-12
PLACEMENTS = {"interleaved-1f1b": looped(2, 2), "zbv": folded(2), "dualpipev": folded(2)}
"""Stages on pipeline ranks, where not one each."""


def sections(context: Any, payload: Mapping[str, Any]) -> dict[str, list[str]]:
    return run(context, payload, Check, "pipeline_rank_functions")


class Case:
    """A model, its batch, and what the unpipelined model makes of it."""

    def __init__(
        self, stages: Sequence[nn.Module], data: tuple[Tensor, Tensor], loss_fn: Any, skips: Any = ()
    ) -> None:
        self.stages, (self.batch, self.target), self.loss_fn, self.skips = stages, data, loss_fn, skips
        whole = [copy.deepcopy(stage) for stage in stages]
        self.output = models.run_whole(whole, skips, self.batch)
        self.loss = loss_fn(self.output, self.target)
        self.loss.backward()
        self.grads = [[parameter.grad for parameter in stage.parameters()] for stage in whole]

    def own(self, stage_ranks: Sequence[int], rank: int) -> dict[int, nn.Module]:
        return {s: copy.deepcopy(self.stages[s]) for s, of in enumerate(stage_ranks) if of == rank}


def gpt_case(num_stages: int, rows: int = 6) -> Case:
    return Case(models.gpt(num_stages), models.tokens(rows), models.cross_entropy)


def u_case(rows: int = 6) -> Case:
    return Case(models.u_model(), models.waves(rows), nn.functional.mse_loss, models.U_SKIPS)


class Check(Findings):
    """Collects what is wrong."""

    def near(self, case: str, made: Tensor | None, expected: Tensor) -> None:
        if made is None:
            self.wrong.append(f"{case}: nothing")
            return
        error = (made.detach() - expected.detach()).abs().max().item() if made.numel() else 0.0
        self.that(f"{case}: off by {error}", error <= TOLERANCE)

    def trains(self, name: str, case: Case, own: dict[int, nn.Module], plan: Any, **options: Any) -> Any:
        """Two steps, the second on top of the first one's gradients, agree with the whole model."""
        pipeline = mw.pipeline(
            own, plan, loss_fn=case.loss_fn, skips=case.skips, context=self.context, **options
        )
        is_last = len(case.stages) - 1 in own
        for step in (1, 2):
            loss = pipeline.step(case.batch, case.target)
            if is_last:
                self.near(f"{name}: loss", loss, case.loss)
            else:
                self.that(f"{name}: loss {loss}", loss is None)
            for number, module in own.items():
                for (label, parameter), grad in zip(
                    module.named_parameters(), case.grads[number], strict=True
                ):
                    self.near(f"{name}: step {step}, stage {number}, {label}", parameter.grad, step * grad)
        return pipeline

    def remembers(self, name: str, pipeline: Any) -> None:
        """What stages keep is as predicted."""
        memory = pipeline.memory
        self.that(f"{name}: {memory}", memory.predicted_bytes == memory.counted_bytes > 0)


def train_entry(check: Check, name: str, stage_ranks: Sequence[int], count: int) -> None:
    """An entry of the table on the GPT, on as many ranks as it has pipeline ranks."""
    rank, num_ranks = dist.get_rank(), max(stage_ranks) + 1
    if rank >= num_ranks:
        return
    case = gpt_case(len(stage_ranks))
    pipeline = check.trains(
        name, case, case.own(stage_ranks, rank), name,
        micro_batches=count, count_memory=True, ranks=tuple(range(num_ranks)),
    )  # fmt: skip
    memory = pipeline.memory
    check.that(f"{name}: {memory}", memory.predicted_bytes >= memory.counted_bytes > 0)
    if name not in MIXED:
        check.that(f"{name}: {memory}", memory.predicted_bytes == memory.counted_bytes)


MIXED = ("dualpipev",)
"""Schedules in which one stage has whole backwards and split ones: predicted as if all were split."""


def few_schedules(check: Check) -> None:
    """Split backwards, and two stages a rank; whole ones are those of `u_shaped`."""
    train_entry(check, "zb-h1", range(2), 3)
    train_entry(check, "zbv", folded(2), 3)


def every_schedule(check: Check) -> None:
    """Each entry of the table; fewer micro-batches than stages where it takes that."""
    for entry in ENTRIES:
        train_entry(
            check, entry.name, PLACEMENTS.get(entry.name, range(4)), 6 if entry.name == "dualpipev" else 3
        )


def u_shaped(check: Check) -> None:
    """Skip connections, by our executor; torch's CSV cannot say them, and its runtime refuses them."""
    rank, case = dist.get_rank(), u_case()
    own = case.own(range(4), rank)
    pipeline = check.trains("U", case, own, "eager-1f1b", micro_batches=3, trace=True, recompute=(1,))
    trace = pipeline.trace
    check.that("trace", trace is not None and {s.rank for s in trace.spans} == {rank})
    labels = {span.label.split()[0] for span in trace.spans}
    check.that(f"trace has {sorted(labels)}", {f"{rank}F", f"{rank}B"} <= labels)
    outputs, loss = pipeline.evaluate(case.batch, case.target)
    if rank == 3:
        check.near("outputs", outputs, case.output)
        check.near("loss of an evaluation", loss, case.loss)
    else:
        check.that("no outputs", outputs is None and loss is None)
    schedule = pipeline.schedule
    listed = list_transfers(schedule, edges=[(0, 1), (1, 2), (2, 3), *models.U_SKIPS])
    check.refused("CSV", "UnsupportedError", "skip connection", lambda: schedule_to_csv(listed))


def torch_stage(module: nn.Module, number: int, count: int) -> Any:
    from torch.distributed.pipelining import PipelineStage

    return PipelineStage(module, number, count, torch.device("cpu"))


def torch_schedules(check: Check) -> None:
    """Schedules of ours in torch's own runtime: gradients, losses, and the actions it ran."""
    rank, case = dist.get_rank(), gpt_case(4)
    for name in ("eager-1f1b", "zb-1p"):
        own = case.own(range(4), rank)
        schedule = mw.algorithm(name).schedule(_chain(4, 6), PipelineConfig())
        runtime = mw.nn.torch_pipeline([torch_stage(own[rank], rank, 4)], schedule, case.loss_fn)
        losses: list[Tensor] = []
        with mw.nn.record_torch_actions() as recorder:
            runtime.step(
                *([case.batch] if rank == 0 else []), target=case.target if rank == 3 else None, losses=losses
            )
        for (label, parameter), grad in zip(own[rank].named_parameters(), case.grads[rank], strict=True):
            check.near(f"{name}: {label}", parameter.grad, grad)
        if rank == 3:
            check.near(f"{name}: loss", torch.stack(losses).mean(), case.loss)
        ran = [span.label for span in recorder.trace.spans if span.kind == "call"]
        listed = [str(action) for action in schedule.actions[rank]]
        own_actions = [label for label in ran if label in set(listed)]
        check.that(f"{name}: ran {ran}", own_actions == listed)


def different_layouts(check: Check) -> None:
    """Stages on two ranks each, whose layouts differ on either side of the boundary."""
    rank = dist.get_rank()
    tensor_ranks = dist.new_group([2, 3])
    wholes = models.feed_forwards(2)
    generator = torch.Generator().manual_seed(5)
    data = tuple(torch.randn(8, models.WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    case = Case(wholes, data, nn.functional.mse_loss)
    first, last = mw.Mesh.of("first", (2,), ("dp",)), mw.Mesh.of("last", (2,), ("tp",), 2)
    own: dict[int, nn.Module] = case.own((0, 1), rank // 2)
    if rank >= 2:
        own = {1: models.SplitFeedForward(wholes[1], tensor_ranks, rank - 2, 2)}
    for name in ("1f1b", "zb-h1"):
        pipeline = mw.pipeline(
            own, name, micro_batches=2, loss_fn=case.loss_fn, meshes=(first, last), context=check.context
        )
        for module in own.values():
            module.zero_grad()
        loss = pipeline.step(case.batch, case.target)
        if rank < 2:
            for parameter, grad in zip(own[0].parameters(), case.grads[0], strict=True):
                check.near(f"{name}: data parallel", parameter.grad, grad)
            continue
        share = own[1].share
        up, up_bias, down, bias = case.grads[1]
        split = own[1]
        check.near(f"{name}: loss", loss, case.loss)
        check.near(f"{name}: up", split.up.weight.grad, up[share])
        check.near(f"{name}: up bias", split.up.bias.grad, up_bias[share])
        check.near(f"{name}: down", split.down.weight.grad, down[:, share])
        check.near(f"{name}: bias", split.bias.grad, bias)


def evaluations(check: Check) -> None:
    """Losses of forwards alone, which data-parallel ranks sum after the last of them."""
    rank, wholes = dist.get_rank(), models.feed_forwards(2)
    generator = torch.Generator().manual_seed(5)
    data = tuple(torch.randn(8, models.WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    case = Case(wholes, data, nn.functional.mse_loss)
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("pp", "dp"))
    pipeline = mw.pipeline(
        case.own((0, 1), rank // 2), "1f1b", micro_batches=4, loss_fn=case.loss_fn, meshes=mesh,
        context=check.context,
    )  # fmt: skip
    for number in range(30):
        _, loss = pipeline.evaluate(case.batch, case.target)
        if rank >= 2:
            check.near(f"evaluation {number}", loss, case.loss)


def data_parallel(check: Check) -> None:
    """Data-parallel ranks at the end, too; own rows; a DeviceMesh; sums of losses; chunks; no overlap."""
    rank, case = dist.get_rank(), gpt_case(2, 8)
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("pp", "dp"))
    own = case.own((0, 1), rank // 2)
    check.trains("dp", case, own, "1f1b", micro_batches=2, meshes=mesh)
    own = case.own((0, 1), rank // 2)
    rows = slice(0, 2), slice(4, 6)
    mine = [slice(rows_.start + 2 * (rank % 2), rows_.stop + 2 * (rank % 2)) for rows_ in rows]
    pipeline = mw.pipeline(
        own, "gpipe", micro_batches=2, loss_fn=case.loss_fn, meshes=mesh, context=check.context,
        config=PipelineConfig("blocking", chunks=2), has_local_batch=True, scale_grads=False,
    )  # fmt: skip
    local, local_target = (torch.cat([value[part] for part in mine]) for value in (case.batch, case.target))
    loss = pipeline.step(local, local_target)
    for number, module in own.items():
        for parameter, grad in zip(module.parameters(), case.grads[number], strict=True):
            check.near("sums", parameter.grad, 4 * grad)
    if rank >= 2:
        check.near("sum of losses", loss, 4 * case.loss)
    uneven = mw.Mesh.of("three", (3,), ("dp",), 1)
    own = {0: copy.deepcopy(case.stages[0])} if rank == 0 else {1: copy.deepcopy(case.stages[1])}
    three = Case(case.stages, (case.batch[:6], case.target[:6]), case.loss_fn)
    check.trains("1 to 3", three, own, "1f1b", micro_batches=2, meshes=(uneven,))


def signals(check: Check) -> None:
    """One byte for each tensor: the same actions in the same order, and no gradient is right."""
    rank, case = dist.get_rank(), gpt_case(4)
    own = case.own(range(4), rank)
    config = PipelineConfig("signals")
    pipeline = mw.pipeline(
        own, "1f1b", micro_batches=3, loss_fn=case.loss_fn, config=config, trace=True, context=check.context
    )
    loss = pipeline.step(case.batch, case.target)
    check.that("a loss", (loss is not None) == (rank == 3))
    sends = [bound.op for bound in pipeline.program.ops_on_rank(rank) if bound.op.kind == "send"]
    check.that(f"sends {sends}", all(pipeline.program.view_bytes(send.src) == 1 for send in sends))
    calls = [span.label.split()[0] for span in pipeline.trace.spans if span.kind == "call"]
    check.that(f"calls {calls}", sorted(calls) == sorted([f"{rank}F", f"{rank}B"] * 3))


def plans(check: Check) -> None:
    """A CSV file of torch's, whose rows are not in the order of stages; sums of gradients with what was there."""
    rank, case = dist.get_rank(), gpt_case(4)
    schedule = mw.algorithm("1f1b").schedule(_chain(4, 2), PipelineConfig())
    turned = replace(schedule, stage_ranks=(3, 2, 1, 0), actions=schedule.actions[::-1])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(schedule_to_csv(turned), newline="")
        check.trains("CSV", case, case.own(range(4), rank), str(path))


def _chain(count: int, micro_batches: int) -> Any:
    from meshweave.algorithms.pipeline.examples import chain_of_ranks

    return chain_of_ranks(range(count), micro_batches)


def refusals(check: Check) -> None:
    """What does not fit is said on all ranks in one line, before anything runs."""
    rank, case = dist.get_rank(), gpt_case(4)
    own = case.own(range(4), rank)

    def made(stages: dict[int, nn.Module], plan: Any = "1f1b", **options: Any) -> Any:
        options = {"micro_batches": 3, "loss_fn": case.loss_fn, "context": check.context, **options}
        return mw.pipeline(stages, plan, **options)

    def refused(name: str, kind: str, words: str, call: Any, only: Sequence[int] = range(4)) -> None:
        """Ranks in `only` raise the error, and the others say that one of them refuses."""
        if rank in only:
            check.refused(name, kind, words, call)
        else:
            check.refused(name, "BindError", "refuses", call)

    refused("name", "UnsupportedError", "1f1b", lambda: made(own, "1f1c"))
    refused("count", "LayoutError", "micro_batches", lambda: made(own, micro_batches=None))
    refused("file", "DescriptionError", "No such file", lambda: made(own, "no/such.csv"))
    refused("gap", "LayoutError", "no rank has stage 3", lambda: made({(rank if rank < 3 else 4): own[rank]}))
    refused("twice", "LayoutError", "no mesh has just these", lambda: made({min(rank, 2): own[rank]}))
    refused("skip", "LayoutError", "must lead over a stage", lambda: made(own, skips=((1, 2),)))
    refused(
        "batch",
        "LayoutError",
        "do not divide",
        lambda: made(own).step(case.batch[:4], case.target[:4]),
        (0, 3),
    )
    wrong = {rank: nn.Linear(3, 3).double()} if rank == 2 else own
    words = "stage 2 does not run on what stage 1 makes, float64 (2, 5, 8)"
    refused("shapes", "LayoutError", words, lambda: made(wrong).step(case.batch, case.target), (2,))
    refused(
        "placement",
        "LayoutError",
        "zbv: two stages a rank",
        lambda: made(own, "zbv").step(case.batch, case.target),
    )


def fails(context: Any, payload: Mapping[str, Any]) -> tuple[str, float]:
    """Return what a rank hears, and after how many seconds, where stage 1 alone raises in a step."""
    ours = TorchContext(liveness=context.liveness, deadline_s=40)
    stages = models.feed_forwards(3)
    own = {context.rank: stages[context.rank]}
    batch = torch.ones(6, models.WIDTH, dtype=torch.float64)
    pipeline = mw.pipeline(own, "1f1b", micro_batches=3, loss_fn=nn.functional.mse_loss, context=ours)

    def boom(*_: Any) -> None:
        raise ValueError("no more of this")

    pipeline.step(batch, batch)
    if context.rank == 1:
        add = (
            own[1].register_forward_hook
            if payload["where"] == "forward"
            else own[1].register_full_backward_hook
        )
        add(boom)
    begin, said = time.monotonic(), ""
    try:
        pipeline.step(batch, batch)
        pipeline.step(batch, batch)  # a rank may be through before another fails
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    took = time.monotonic() - begin
    dist.barrier()
    return said, took


def dies(context: Any, payload: Mapping[str, Any]) -> None:
    """The rank of a stage is killed in the middle of its third step."""
    ours = TorchContext(liveness=context.liveness, deadline_s=20)
    stages = models.feed_forwards(3)
    own = {context.rank: stages[context.rank]}
    batch = torch.ones(6, models.WIDTH, dtype=torch.float64)
    pipeline = mw.pipeline(own, "1f1b", micro_batches=3, loss_fn=nn.functional.mse_loss, context=ours)
    for step in range(10**6):
        if context.rank == 2 and step == 2:
            own[2].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        pipeline.step(batch, batch)
