"""`meshweave.pipeline`: stages of a model, each a torch module on its ranks, trained by a schedule.

The schedule becomes a Program, which is proved, can be simulated, and runs here with the modules as its
calls. Stages may have several ranks, and different numbers of them: what passes between two such stages is
resharded. Skip connections lead over stages.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshweave.algorithms.pipeline.actions import Schedule
from meshweave.algorithms.pipeline.algorithm import PipelineConfig
from meshweave.algorithms.pipeline.problem import PipelineProblem
from meshweave.base.errors import BindError, LayoutError, UnsupportedError
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.torch.call_order import require_process_group, share_refusal
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.host_memory import keep_freed_memory
from meshweave.ir.analysis.lifetimes import peak_stash_bytes
from meshweave.ir.program import Program
from meshweave.nn.parallel.agreed import agree as agree_on_words
from meshweave.nn.pipelining.binding import BoundPipeline, bind_stages
from meshweave.nn.pipelining.parallel_stage import ParallelStage
from meshweave.nn.pipelining.plan import (
    PipelineOptions,
    check_stage_numbers,
    kind_of_micro_batch,
    meshes_of,
    micro_batches_of,
    plan_of,
)
from meshweave.nn.pipelining.saved_memory import PipelineMemory, SavedMemory
from meshweave.nn.pipelining.stage_functions import LossFunction, StageStep, TensorKind
from meshweave.nn.pipelining.stage_problem import PipelineData, StagePlaces, agreed_places
from meshweave.nn.pipelining.stage_words import require_target_of_all, stage_words
from meshweave.trace import Trace

Batch: TypeAlias = Tensor | Sequence[Tensor] | None


def pipeline(
    stages: Mapping[int, nn.Module],
    plan: str | Path | Schedule,
    *,
    micro_batches: int | None = None,
    loss_fn: LossFunction | None = None,
    meshes: DeviceMesh | Sequence[Mesh] = (),
    data_axes: Sequence[str] = ("dp",),
    skips: Sequence[tuple[int, int]] = (),
    config: PipelineConfig | None = None,
    recompute: Collection[int] = (),
    scale_grads: bool = True,
    has_local_batch: bool = False,
    outputs: Mapping[int, Sequence[Tensor]] | None = None,
    ranks: Sequence[int] | None = None,
    trace: bool = False,
    count_memory: bool = False,
    context: TorchContext | None = None,
) -> Pipeline:
    """Return a pipeline of modules; all of its ranks call this, each with the stages that it has.

    A stage is called with what the stages before it pass on: that of the stage right before it, then those
    of `skips` in their order. It returns one tensor for each stage that reads something of it, in the same
    order, with the rows (samples) as dim 0.

    Args:
        stages: the modules of this process, by the number of their stage. On several ranks the modules of a
            stage have the same parameters, or shards of them, among which a module communicates by itself.
        plan: a schedule: the name of one ("1f1b", "eager-1f1b", ...), a `Schedule`, or a file with a CSV of
            torch's.
        micro_batches: the number of micro-batches; needed with the name of a schedule, else None or that of the
            schedule.
        loss_fn: of the output and the target of a micro-batch, on the last stage. Without one only
            `evaluate` works.
        meshes: the meshes of stages that have several ranks, or a DeviceMesh whose first dim is that of pipeline
            ranks.
        data_axes: the axes of meshes along which ranks share the rows of a micro-batch. Along the other axes
            ranks are given the same rows, and return the same.
        skips: (source stage, target stage) of each skip connection.
        config: how transfers run, and what the schedule leaves open.
        recompute: stages that keep only their inputs, and run their forward again before the backward.
        scale_grads: as in torch's schedules, divide gradients by the number of micro-batches, for a loss
            that is a mean; where the last stage has data-parallel ranks, by their number, too. `step` then
            returns the mean of losses, else their sum. What was in `.grad` before stays, and is not divided.
        has_local_batch: whether `step` is given the rows of this data-parallel rank alone, those of the first
            micro-batch first. By default all ranks of a stage give the whole batch, and each takes its rows
            of each micro-batch.
        outputs: for stages of this process that do not run on the meta device, examples of what they pass on, as
            this rank has it of one micro-batch.
        ranks: those that call this; default: all.
        trace: keep a `Trace` of each step in `trace`.
        count_memory: count what stages keep, for `memory`; it costs some time for each tensor that autograd
            saves.
        context: deadline and liveness; by default those of the default process group. The pipeline makes a context
            of its own beside it, so that its stages may run programs in this one.

    Raises:
        LayoutError: stages, meshes, skips and schedule do not fit together.
        DescriptionError: the CSV file is not one of torch's schedules, or there is no such file.
        UnsupportedError: there is no algorithm of that name.
        BindError, RankLostError, DeadlineError: other ranks refuse, are missing or late.
    """
    require_process_group()
    device = next((p.device for module in stages.values() for p in module.parameters()), torch.device("cpu"))
    context = (context or TorchContext.default(device)).beside()
    members = tuple(sorted(ranks)) if ranks is not None else tuple(range(context.num_ranks))
    with share_refusal(context, members, "pipeline"):
        chosen = plan_of(plan)
        count, given = micro_batches_of(chosen, micro_batches), meshes_of(meshes)
        places = agreed_places(context, members, tuple(stages), given, data_axes, tuple(skips))
        check_stage_numbers("recompute", recompute, places.num_stages)
        check_stage_numbers("outputs", outputs or (), places.num_stages)
    if context.device.type == "cpu":
        keep_freed_memory()
    options = PipelineOptions(
        chosen,
        count,
        loss_fn,
        config or PipelineConfig(),
        frozenset(recompute),
        scale_grads,
        dict(outputs or {}),
        has_local_batch,
        trace,
        count_memory,
    )
    return Pipeline(dict(sorted(stages.items())), places, options, context)


class Pipeline:
    """Stages of a model on their ranks; made by `meshweave.pipeline`.

    Attributes:
        places: which rank has which stage.
        trace: that of the last `step` or `evaluate` on this rank; None unless `trace` was given.
            `meshweave.trace.merge` joins those of ranks.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        places: StagePlaces,
        options: PipelineOptions,
        context: TorchContext,
    ) -> None:
        self.places = places
        self._stages, self._options, self._context = stages, options, context
        self._rank = context.rank or 0
        self._memory = SavedMemory() if options.count_memory else None
        self._bound: dict[bool, BoundPipeline] = {}
        self._is_compared, self._running = False, threading.Lock()
        self.trace: Trace | None = None

    # --- steps -------------------------------------------------------------------------------------------------

    def step(self, batch: Batch = None, target: Tensor | None = None) -> Tensor | None:
        """Run forwards and backwards of all micro-batches; add gradients to `.grad` of parameters. Collective.

        Args:
            batch: on ranks of the first stage a tensor or several, with the samples as dim 0; else ignored.
            target: on ranks of the last stage the tensor that the loss takes, samples as dim 0; else ignored.

        Returns:
            On ranks of the last stage the loss of the whole batch, the mean over micro-batches and data-parallel
            ranks or, without `scale_grads`, the sum; else None.

        Raises:
            LayoutError: there is no `loss_fn`; a batch or target is missing, or has other rows than the first
                one; a stage has other outputs or trained parameters; ranks that must give the same do not.
            UnsupportedError: inference mode is on, or a step runs already, in another thread or around this one.
            BindError, RankLostError, DeadlineError: other ranks refuse, are missing or late.
        """
        if self._options.loss_fn is None and self._is_last:
            raise LayoutError("step needs a loss_fn on the last stage; give one to pipeline")
        return self._run(batch, target, trains=True, wants_outputs=False)[0]

    def evaluate(self, batch: Batch = None, target: Tensor | None = None) -> tuple[Any, Tensor | None]:
        """Run forwards alone; return (outputs, loss) on ranks of the last stage, else (None, None). Collective.

        Outputs, a tensor or tuple as the stage returns, are this rank's rows of all micro-batches, in order (of
        scalars one each). Batch, target and loss are those of `step`; without a target or a `loss_fn` the loss is
        None. Raises LayoutError if a batch is missing or has other rows than the first, a stage other outputs, or
        some ranks of the last stage alone have a target; UnsupportedError if a step runs already; BindError,
        RankLostError or DeadlineError as `step`.
        """
        loss, outputs = self._run(batch, target, trains=False, wants_outputs=True)
        return outputs, loss

    def _run(
        self, batch: Batch, target: Tensor | None, *, trains: bool, wants_outputs: bool
    ) -> tuple[Tensor | None, Any]:
        if not self._running.acquire(blocking=False):  # before what it was given, and gradients, are replaced
            raise UnsupportedError("a step of this pipeline already runs")
        try:
            return self._stepped(batch, target, trains=trains, wants_outputs=wants_outputs)
        finally:
            for stage in self._stages.values():
                if isinstance(stage, ParallelStage):
                    stage.num_items = None  # its loss by hand is a mean again
            self._running.release()

    def _stepped(
        self, batch: Batch, target: Tensor | None, *, trains: bool, wants_outputs: bool
    ) -> tuple[Tensor | None, Any]:
        bound = self.prepare(batch, target, trains=trains)
        trained = bound.gradients if trains else {}
        with share_refusal(self._context, self.places.ranks, "step of a pipeline"):
            self._data(batch, target, trains=trains)
            self._compare(batch, target, trains=trains)
            for number, gradients in trained.items():
                gradients.check(self._stages[number], number, bound.splits(number))
            steps = self._give(bound, batch, target, wants_outputs)
            if self._memory is not None and trains:
                self._memory.reset_peak()
                self._memory.exclude_batch([*_tensors(batch), *([] if target is None else [target])])
            for gradients in trained.values():
                gradients.begin()
            try:
                self.trace = bound.bound.run()
                if bound.tied is not None:
                    bound.tied.sum_gradients()
                for number, gradients in trained.items():
                    gradients.check_kept(self._stages[number], number, self._options.micro_batches)
            except BaseException:
                for gradients in trained.values():
                    gradients.abandon()
                raise
        for gradients in trained.values():
            gradients.end(self._divisor)
        return self._loss(bound, steps), self._outputs(steps)

    def _compare(self, batch: Batch, target: Tensor | None, *, trains: bool) -> None:
        """Compare what ranks give the first step that trains and each other one, and check tokens and targets.

        Raises LayoutError where ranks that are to give the same do not, or a stage refuses tokens or targets.
        """
        if trains and not self._is_compared:
            words = stage_words(
                self._stages, self.places, batch=_tensors(batch), target=target, options=self._options
            )
            agree_on_words(self._context, self.places.ranks, words, "all ranks to compare their stages")
            self._is_compared = True
        if not trains and self._is_last:
            require_target_of_all(target, self.places.meshes[-1].ranks, self._context)
        for number, stage in self._stages.items():
            if isinstance(stage, ParallelStage):
                for tokens in _tensors(batch) if number == 0 else ():
                    stage.check(tokens)
                if target is not None and stage.is_last:
                    parts = self._divisor * self._options.scale_grads
                    shares = self.places.data_parallelism(number) if self._options.has_local_batch else 1
                    stage.count_targets(
                        target, parts, shares, self.places.meshes[number].ranks, self._context
                    )

    @property
    def _is_last(self) -> bool:
        return self.places.num_stages - 1 in self._stages

    @property
    def _divisor(self) -> int:
        if not self._options.scale_grads:
            return 1
        return self._options.micro_batches * self.places.data_parallelism(self.places.num_stages - 1)

    def _give(
        self, bound: BoundPipeline, batch: Batch, target: Tensor | None, wants_outputs: bool
    ) -> Mapping[int, StageStep]:
        """Give each stage its part of the batch and target."""
        steps = {}
        for number, functions in bound.functions.items():
            step = StageStep(outputs={} if wants_outputs and functions.is_last else None)
            if functions.is_first:
                rows = bound.problem.rows
                parts = [self._micro_batches("batch", number, rows, value) for value in _tensors(batch)]
                step.batch = list(zip(*parts, strict=True))
            if functions.is_last and target is not None:
                step.targets = self._micro_batches("target", number, bound.problem.rows, target)
            functions.step = steps[number] = step
        return steps

    def _micro_batches(self, name: str, stage: int, rows: int, value: Tensor) -> list[Tensor]:
        """Return this rank's rows of each micro-batch, from a tensor of the whole batch or of this rank's part."""
        count, parts = self._options.micro_batches, self.places.data_parallelism(stage)
        own = rows // parts
        expected = own * count if self._options.has_local_batch else rows * count
        if len(value) != expected:
            raise LayoutError(f"the {name} has {len(value)} rows, and this pipeline was bound for {expected}")
        if self._options.has_local_batch:
            return list(value.split(own))
        at = self.places.data_index(stage, self._rank) * own
        return [part[at : at + own] for part in value.split(rows)]

    def _loss(self, bound: BoundPipeline, steps: Mapping[int, StageStep]) -> Tensor | None:
        last = self.places.num_stages - 1
        if last not in steps or not steps[last].losses:
            return None
        losses = bound.gradients[last].losses
        total = torch.stack(list(steps[last].losses.values())).sum() if losses is None else losses.total()
        return total / self._divisor

    def _outputs(self, steps: Mapping[int, StageStep]) -> Any:
        made = steps[self.places.num_stages - 1].outputs if self._is_last else None
        if not made:
            return None
        values = [made[micro_batch] for micro_batch in sorted(made)]
        if isinstance(values[0], tuple):
            return tuple(torch.cat(torch.atleast_1d(each)) for each in zip(*values, strict=True))
        return torch.cat(torch.atleast_1d(values))

    # --- the program -----------------------------------------------------------------------------------------

    def prepare(
        self, batch: Batch = None, target: Tensor | None = None, *, trains: bool = True
    ) -> BoundPipeline:
        """Write and bind the program for batches of these shapes, unless one is bound; return it. Collective.

        Arguments are those of `step`, whose first call does this; `trains` False is for `evaluate`. Raises
        LayoutError, UnsupportedError, BindError, RankLostError or DeadlineError as `step` does.
        """
        if trains not in self._bound:
            with share_refusal(self._context, self.places.ranks, "pipeline"):
                data = self._data(batch, target, trains=trains)
                own = self._stages, self.places, self._options, self._context
                self._bound[trains] = bind_stages(*own, data, self._memory, trains=trains)
        return self._bound[trains]

    @property
    def program(self) -> Program:
        """Return the program of a step. Raises BindError before the first step or `prepare`."""
        return self._trained.bound.program

    @property
    def schedule(self) -> Schedule:
        """Return the schedule of a step. Raises BindError before the first step or `prepare`."""
        return self._trained.schedule

    @property
    def problem(self) -> PipelineProblem:
        """Return the stages and edges of the pipeline, with the FLOPs and bytes of each from its profile.

        Raises BindError before the first step or `prepare`.
        """
        return self._trained.problem

    @property
    def memory(self) -> PipelineMemory:
        """Return the peak bytes of activations on this rank, predicted and counted.

        Raises BindError before the first step or `prepare`.
        """
        counted = None if self._memory is None else self._memory.peak_bytes
        return PipelineMemory(peak_stash_bytes(self.program, self._rank), counted)

    @property
    def _trained(self) -> BoundPipeline:
        if True not in self._bound:
            raise BindError(
                "the program of a pipeline is written at its first step; call step or prepare first"
            )
        return self._bound[True]

    def _data(self, batch: Batch, target: Tensor | None, *, trains: bool) -> PipelineData | None:
        """Return the kinds of the whole of a micro-batch, on ranks of the first or last stage.

        Raises LayoutError where such a rank is not given what it needs, UnsupportedError where a step would have
        no gradients.
        """
        if trains and torch.is_inference_mode_enabled():
            raise UnsupportedError("step has no gradients in inference mode: call it outside, or evaluate")
        if 0 in self._stages and not _tensors(batch):
            raise LayoutError("ranks of the first stage must give a batch")
        if self._is_last and trains and target is None:
            raise LayoutError("ranks of the last stage must give a target")
        if 0 not in self._stages and not self._is_last:
            return None

        def whole(stage: int, value: Tensor) -> TensorKind:
            parts = self.places.data_parallelism(stage) if self._options.has_local_batch else 1
            return kind_of_micro_batch(value, self._options.micro_batches, parts, trains=trains)

        given, last = _tensors(batch) if 0 in self._stages else (), self.places.num_stages - 1
        of_target = None if target is None or not self._is_last else whole(last, target)
        return PipelineData(tuple(whole(0, value) for value in given), of_target)


def _tensors(batch: Batch) -> tuple[Tensor, ...]:
    return tuple(batch) if isinstance(batch, list | tuple) else () if batch is None else (batch,)
