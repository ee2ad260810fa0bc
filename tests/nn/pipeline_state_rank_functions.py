"""Sections of test_pipeline: parameters that stages share or that change, steps that fail, wrong arguments."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pipeline_models as models
import torch
import torch.distributed as dist
from pipeline_rank_functions import Check
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import meshweave as mw
from meshweave.algorithms.pipeline.actions import Action, ActionKind, Schedule
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.pipelining.stage_problem import StagePlaces
from meshweave.nn.pipelining.tied import TiedTable

mse = nn.functional.mse_loss
SHARING = {"zbv": ((0, 1, 1, 0), (0, 3)), "interleaved-1f1b": ((0, 1, 0, 1), (0, 2))}
"""Where four stages lie, and two of them that have one weight, on the same rank."""


def _linears(count: int) -> list[nn.Sequential]:
    torch.manual_seed(6)
    return [nn.Sequential(nn.Linear(models.WIDTH, models.WIDTH), nn.Tanh()).double() for _ in range(count)]


def _data(rows: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    made = [torch.randn(rows, models.WIDTH, generator=draw, dtype=torch.float64) for _ in range(2)]
    return made[0], made[1]


def _context(check: Check) -> TorchContext:
    """A context of its own, for a refusal in a step breaks it."""
    return TorchContext(liveness=check.context.liveness, deadline_s=30)


def tied_and_uneven(check: Check) -> None:
    """A table of embedding and head whose words ranks do not share evenly: both copies get the whole gradient."""
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("pp", "tp"))
    number, own = dist.get_rank() // 2, mesh["tp"]
    ends = Mesh("p0", (2,), ("tp",), (0, 1)), Mesh("p1", (2,), ("tp",), (2, 3))
    rows = torch.arange(15, dtype=torch.float64).view(5, 3)
    table = nn.Parameter(distribute_tensor(torch.ones_like(rows), own, [Shard(0)]))
    table.grad = distribute_tensor(rows * (1 + number), own, [Shard(0)])
    TiedTable({number: table}, StagePlaces(ends, (), ((0, 1),)), check.context).sum_gradients()
    check.that("sum of both ends", torch.equal(table.grad.full_tensor(), 3 * rows))


def shared_by_stages(check: Check) -> None:
    """A weight that two stages of one rank have: its gradient is that of both, scaled once, also of many steps."""
    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("pp", "dp"))
    batch, target = _data(12)
    for name, (places, (first, second)) in SHARING.items():
        for meshes, at in ((mesh, rank // 2), ((), rank)):
            whole = _linears(4)
            whole[second][0].weight = whole[first][0].weight
            stages = copy.deepcopy(nn.ModuleList(whole))
            mse(models.run_whole(whole, (), batch), target).backward()
            own = {number: stages[number] for number in range(4) if places[number] == at}
            if not own:
                continue
            pipeline = mw.pipeline(
                own, name, micro_batches=3, loss_fn=mse, meshes=meshes, context=check.context,
                ranks=range(4) if meshes else range(2),
            )  # fmt: skip
            for step in (1, 2):
                pipeline.step(batch, target)
                for number, stage in own.items():
                    for (label, made), wanted in zip(
                        stage.named_parameters(), whole[number].parameters(), strict=True
                    ):
                        case = f"{name} on {len(mesh.mesh) if meshes else 1}, step {step}, {number}.{label}"
                        check.near(case, made.grad, step * wanted.grad)


def changed_parameters(check: Check) -> None:
    """A parameter that is trained from the second step on would not be scaled: it is refused."""
    rank, (batch, target) = dist.get_rank(), _data(6)
    stages = _linears(2)
    if rank > 1:
        return
    stages[0][0].bias.requires_grad_(False)
    pipeline = mw.pipeline(
        {rank: stages[rank]}, "1f1b", micro_batches=3, loss_fn=mse, ranks=(0, 1), context=_context(check)
    )
    pipeline.step(batch, target)
    stages[0][0].weight.requires_grad_(False)  # nothing is summed over ranks: it may
    pipeline.step(batch, target)
    check.that("a frozen gradient", rank == 1 or stages[0][0].bias.grad is None)
    stages[0][0].bias.requires_grad_(True)
    words = "stage 0: 0.bias requires a gradient, and did not in the first step"
    kind = "LayoutError" if rank == 0 else "BindError"
    check.refused("unfrozen", kind, words, lambda: pipeline.step(batch, target))


def frozen_where_summed(check: Check) -> None:
    """One that is frozen later would get a gradient of zeros where ranks sum it."""
    rank, (batch, target) = dist.get_rank(), _data(6)
    if rank > 1:
        return
    (stage,) = _linears(1)
    pipeline = mw.pipeline(
        {0: stage}, "1f1b", micro_batches=3, loss_fn=mse, ranks=(0, 1), context=_context(check),
        meshes=(mw.Mesh.of("two", (2,), ("dp",)),),
    )  # fmt: skip
    pipeline.step(batch, target)
    stage[0].bias.requires_grad_(False)
    words = "stage 0: 0.bias is frozen since the first step"
    check.refused("frozen", "LayoutError", words, lambda: pipeline.step(batch, target))


def shared_and_reduced_early(check: Check) -> None:
    """One of two stages with one weight is reduced while the other still adds to the gradient of that weight."""
    rank, (batch, target) = dist.get_rank(), _data(6)
    if rank > 1:
        return
    before = "0 FORWARD", "1 FORWARD", "1 INPUT_GRAD", "0 BACKWARD"
    for last in (("0 REDUCE_GRAD", "1 WEIGHT_GRAD"), ("1 WEIGHT_GRAD", "0 REDUCE_GRAD"), ("1 WEIGHT_GRAD",)):
        listed = [
            Action(ActionKind[kind], int(stage), None if kind == "REDUCE_GRAD" else 0)
            for stage, kind in (each.split() for each in (*before, *last))
        ]
        whole = _linears(2)
        whole[1][0].weight = whole[0][0].weight
        stages = copy.deepcopy(nn.ModuleList(whole))
        mse(models.run_whole(whole, (), batch), target).backward()
        stages[0][0].weight.register_hook(
            lambda _: time.sleep(0.1)
        )  # a reduction that does not wait comes first
        pipeline = mw.pipeline(
            dict(enumerate(stages)), Schedule((0, 0), 1, (tuple(listed),)), loss_fn=mse, ranks=(0, 1),
            meshes=(mw.Mesh.of("two", (2,), ("dp",)),), context=_context(check),
        )  # fmt: skip
        pipeline.step(batch, target)
        for number, stage in enumerate(stages):
            for (name, parameter), wanted in zip(
                stage.named_parameters(), whole[number].parameters(), strict=True
            ):
                check.near(f"{last}: {number}.{name}", parameter.grad, wanted.grad)


def _on_two_ranks(check: Check, stages: Sequence[nn.Module], **options: Any) -> Any:
    """Return a pipeline of stages that two ranks share the rows of: ranks 0 and 1, or 2 and 3."""
    mesh = mw.Mesh.of("two", (2,), ("dp",), dist.get_rank() // 2 * 2)
    return mw.pipeline(
        dict(enumerate(stages)), "gpipe", micro_batches=3, loss_fn=mse, ranks=mesh.ranks, meshes=(mesh,),
        context=_context(check), **options,
    )  # fmt: skip


def held_gradients(check: Check) -> None:
    """Gradients that are held beyond their step stay as they are; one that is replaced in a step is noticed."""
    stages, (batch, target) = _linears(2), _data(6)
    pipeline, weight = _on_two_ranks(check, stages), stages[0][0].weight
    pipeline.step(batch, target)
    held = weight.grad
    assert held is not None
    before = held.clone()
    for stage in stages:
        stage.zero_grad()
    pipeline.step(3 * batch, target)
    check.near("held", held, before)
    again = weight.grad.clone()
    pipeline.step(batch, target)
    check.near("added up", weight.grad, again + before)
    kept = weight.grad.clone()

    def clamp(parameter: Tensor) -> None:
        parameter.grad = None if parameter.grad is None else parameter.grad.clamp(-1, 1)

    hook = weight.register_post_accumulate_grad_hook(clamp)
    words = "stage 0: the gradient of 0.weight was replaced during the step"
    check.refused("replaced", "LayoutError", words, partial(pipeline.step, batch, target))
    check.near("as before", weight.grad, kept)
    hook.remove()
    pipeline.step(batch, target)
    check.near("and on", weight.grad, kept + before)


class Calls(nn.Module):
    """A stage that calls a function before it runs, but where it is tried on shapes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.before = inner, list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        if self.before and x.device.type != "meta":
            self.before.pop()()
        made: Tensor = self.inner(x)
        return made


def stepped_within(check: Check) -> None:
    """A step that is begun while another one runs is refused, and changes nothing of that one."""
    wholes, (batch, target), said = _linears(2), _data(6), list[str]()
    first = Calls(copy.deepcopy(wholes[0]))
    stages = [first, copy.deepcopy(wholes[1])]
    pipeline = _on_two_ranks(check, stages)
    mse(models.run_whole(wholes, (), batch), target).backward()

    def other() -> None:
        check.refused("within", "UnsupportedError", "already runs", lambda: pipeline.step(9 * batch, target))
        said.append("")

    def beside() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(30)

    for number in range(2):
        first.before.append(beside)
        pipeline.step(batch, target)
        check.that(f"step {number}: called", len(said) == number + 1)
        for stage, whole in zip((first.inner, stages[1]), wholes, strict=True):
            check.near(f"step {number}", stage[0].weight.grad, (number + 1) * whole[0].weight.grad)


def calling_threads(check: Check) -> None:
    """Stages run in the thread that calls, where lanes of transfers have more to copy than there are stages."""
    rank, (batch, target), names = dist.get_rank(), _data(12), list[str]()
    (stage,) = _linears(1)
    own = Calls(stage)
    own.before += [lambda: names.append(threading.current_thread().name)] * 4
    pipeline = mw.pipeline(
        {min(rank, 1): own}, "1f1b", micro_batches=4, loss_fn=mse, context=check.context,
        meshes=(mw.Mesh.of("one", (1,), ("dp",)), mw.Mesh("three", (3,), ("dp",), (1, 2, 3))),
    )  # fmt: skip
    pipeline.evaluate(batch, target)
    check.that(f"threads {names}", names == [threading.current_thread().name] * 4)


class Fails:
    """A loss that fails when told to."""

    def __init__(self) -> None:
        self.fails = False

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("a loss that fails")
        return mse(output, target)


class Decays(nn.Module):
    """A layer whose factor becomes less with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor.mul_(0.5).clone()


def statistics_once(check: Check) -> None:
    """A stage that runs again changes its buffers once, computes with those of its first run, and gets the same
    gradients.
    """
    found, (batch, target) = [], _data(6)
    for recompute in ((), (0,)):
        first, second = _linears(2)
        stages = {0: nn.Sequential(first, nn.BatchNorm1d(models.WIDTH).double(), Decays()), 1: second}
        pipeline = mw.pipeline(
            stages, "gpipe", micro_batches=3, loss_fn=mse, ranks=(dist.get_rank(),), context=_context(check),
            recompute=recompute,
        )  # fmt: skip
        pipeline.step(batch, target)
        found.append([*stages[0].buffers(), *(each.grad for each in stages[0].parameters())])
    for once, again in zip(*found, strict=True):
        check.that(f"{again} instead of {once}", torch.allclose(once, again, rtol=1e-12))


def failed_steps(check: Check) -> None:
    """Gradients of steps before stay where one fails, also where ranks sum them."""
    rank, (batch, target) = dist.get_rank(), _data(6)
    for meshes in ((), (mw.Mesh.of("two", (2,), ("dp",), rank // 2 * 2),)):
        loss_fn, stages, ranks = Fails(), _linears(2), meshes[0].ranks if meshes else (rank,)
        pipeline = mw.pipeline(
            dict(enumerate(stages)), "gpipe", micro_batches=3, loss_fn=loss_fn, ranks=ranks, meshes=meshes,
            context=_context(check),
        )  # fmt: skip
        pipeline.step(batch, target)
        before = [[parameter.grad.clone() for parameter in stage.parameters()] for stage in stages]
        loss_fn.fails = True
        try:
            pipeline.step(batch, target)
        except ValueError:
            pass
        else:
            check.that(f"{len(ranks)} ranks: no error", False)
        for stage, grads in zip(stages, before, strict=True):
            for parameter, grad in zip(stage.parameters(), grads, strict=True):
                check.near(f"{len(ranks)} ranks: a gradient before", parameter.grad, grad)


class Aside(nn.Module):
    """A stage that skips a table of its own over the next one: what it makes depends on no input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table = nn.Linear(models.WIDTH, models.WIDTH), nn.Embedding(2, models.WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), self.table(torch.zeros(len(x), dtype=torch.long, device=x.device))


class Joined(nn.Module):
    """A stage that adds what is skipped to it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:
        made: Tensor = self.inner(x) + skipped
        return made


def given_wrongly(check: Check) -> None:
    """Options, batches and stages whose results would be wrong, or whose error would not say why."""
    (batch, target), rank = _data(6), dist.get_rank()

    def step(
        given: Any = batch, wanted: Any = target, stages: Sequence[nn.Module] = _linears(2), **options: Any
    ) -> None:
        options = {
            "micro_batches": 3,
            "loss_fn": mse,
            "ranks": (rank,),
            "context": _context(check),
            **options,
        }
        plan = options.pop("plan", "gpipe")
        pipeline = mw.pipeline(dict(enumerate(stages)), plan, **options)
        pipeline.step(batch, target) if options["loss_fn"] is mse and given is None else None
        pipeline.step(given, wanted)

    pipeline = mw.pipeline(
        dict(enumerate(_linears(2))),
        "gpipe",
        micro_batches=3,
        loss_fn=mse,
        ranks=(rank,),
        context=_context(check),
    )
    pipeline.step(batch, target)
    for count in (0, -2, 2.0, True):
        check.refused(f"count {count}", "LayoutError", "from 1 on", partial(step, micro_batches=count))
    check.refused("recompute", "LayoutError", "recompute names stage 2", lambda: step(recompute=[2]))
    check.refused("outputs", "LayoutError", "outputs names stage 5", lambda: step(outputs={5: [batch]}))
    with torch.inference_mode():
        words = "step has no gradients in inference mode"
        check.refused("inference", "UnsupportedError", words, step)
        check.refused("later", "UnsupportedError", words, lambda: pipeline.step(batch, target))
    check.refused("scalar", "LayoutError", "a row for each", lambda: step(torch.tensor(1.0)))
    check.refused("array", "LayoutError", "ndarray", lambda: step(batch.numpy()))
    check.refused("target", "LayoutError", "the target has 3 rows", lambda: step(wanted=target[:3]))
    check.refused("no batch later", "LayoutError", "must give a batch", lambda: step(None))
    for wrong in (3, torch.tensor(1.0), batch.tolist(), {"x": batch}):
        check.refused(f"{wrong} later", "LayoutError", "a row for each", lambda: pipeline.step(wrong, target))  # noqa: B023
        check.refused(f"target {wrong}", "LayoutError", "a row for each", lambda: pipeline.step(batch, wrong))  # noqa: B023
    check.refused("axes", "LayoutError", "data_axes is 'dp'", partial(step, data_axes="dp"))
    meshes = [mw.Mesh.of(name, (1,), (name,), rank) for name in ("dp", "tp")]
    check.refused("meshes", "LayoutError", "dp and tp have the same ranks", partial(step, meshes=meshes))
    loss = Weighted()
    check.refused("trained", "LayoutError", "the loss has a parameter weight", partial(step, loss_fn=loss))
    step(loss_fn=loss.requires_grad_(False))
    words = "give outputs={1: ["
    check.refused(
        "values", "LayoutError", words, partial(step, loss_fn=lambda y, t: mse(y, t) * float(t[0, 0]))
    )
    example = [torch.zeros(2, models.WIDTH, dtype=torch.float64)]
    lost = [_linears(1)[0], Aside().double(), _linears(1)[0], Joined().double()]
    words = "stage 1: a backward in two parts misses the gradient of table.weight"
    cut = {"stages": lost, "plan": _split_on_one_rank(), "micro_batches": None, "skips": [(1, 3)]}
    for outputs in ({}, {0: example, 1: example * 2, 2: example, 3: example}):
        case = f"lost, {len(outputs)} examples"
        check.refused(case, "UnsupportedError", words, partial(step, **cut, outputs=outputs))
    doubling, own = [Doubles(), *_linears(1)], batch.clone()
    words = "stage 0 changes its inputs in place"
    check.refused("in place", "LayoutError", words, lambda: step(own, stages=doubling, recompute=[0]))
    with torch.autocast("cpu", torch.bfloat16):
        narrow = [stage.float() for stage in _linears(2)]
        check.refused(
            "autocast", "LayoutError", "autocast", lambda: step(batch.float(), target.float(), narrow)
        )


class Weighted(nn.Module):
    """A loss with a weight for each column."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(models.WIDTH, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return mse(output * self.weight, target)


class Doubles(nn.Module):
    """A stage that changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(models.WIDTH, models.WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x.mul_(2))
        return made


def _split_on_one_rank() -> mw.schedules.Schedule:
    """Four stages of a rank, three micro-batches, backwards in two parts."""
    order = [f"{stage}F{m}" for m in range(3) for stage in range(4)]
    order += [f"{stage}{part}{m}" for m in range(3) for stage in (3, 2, 1, 0) for part in "IW"]
    return mw.schedules.schedule_from_csv(",".join(order) + "\n")
