"""Schedules of ours in torch's own pipeline runtime, and a trace of what it does.

torch's runtime runs a list of actions per rank, with each pipeline rank on one process and stages that pass
values to the next stage alone. What it cannot run, skip connections and stages of different layouts,
`meshweave.pipeline` runs.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshweave.algorithms.pipeline.actions import Action, ActionKind, Schedule
from meshweave.algorithms.pipeline.progress import prove_progress
from meshweave.algorithms.pipeline.torch_csv import schedule_to_csv
from meshweave.algorithms.pipeline.transfer_order import list_transfers
from meshweave.base.errors import LayoutError
from meshweave.execute.torch.compat_pipelining import (
    load_pipeline_csv,
    observe_pipeline_actions,
    pipeline_runtime,
)
from meshweave.trace import Span, Trace

_COMPUTE, _TRANSFERS = "compute", "transfers"


def torch_pipeline(
    stages: Sequence[Any],
    schedule: Schedule,
    loss_fn: Callable[..., Any] | None = None,
    *,
    scale_grads: bool = True,
) -> Any:
    """Return torch's pipeline runtime, which runs `schedule`; its `step` and `eval` are those of torch.

    Transfers are listed by `list_transfers` unless the schedule lists them. Gathers of parameters, at the begin,
    and reductions of gradients, at the end, are added for stages for which the schedule lists none. The list is
    proved to end under the strictest rules of transfers before torch gets it.

    Args:
        stages: this process's `torch.distributed.pipelining.PipelineStage`s.
        schedule: with as many stages as torch's have, and a pipeline rank for each process of their group.
        loss_fn: of (output, target) of a micro-batch.
        scale_grads: whether gradients are divided by the number of micro-batches, for losses that are means.

    Raises:
        LayoutError: the schedule does not end, or its stages are not those of this process; or it lists transfers
            of skip connections, which torch's runtime does not run.
        UnsupportedError: this torch has no such runtime.
    """
    if not stages:
        raise LayoutError("there is no stage; give the PipelineStages of this process")
    own, rank = sorted(stage.stage_index for stage in stages), stages[0].group_rank
    if rank >= schedule.num_ranks or schedule.stages_of(rank) != tuple(own):
        expected = schedule.stages_of(rank) if rank < schedule.num_ranks else ()
        raise LayoutError(
            f"pipeline rank {rank} has stages {own}, and the schedule gives it {list(expected)} of "
            f"{schedule.num_stages}"
        )
    listed = schedule if schedule.has_communication else list_transfers(schedule)
    listed = _with_parameter_actions(listed)
    prove_progress(listed)
    text = schedule_to_csv(listed)
    runtime = pipeline_runtime(stages, schedule.num_micro_batches, loss_fn=loss_fn, scale_grads=scale_grads)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(text, newline="")
        load_pipeline_csv(runtime, str(path), "compute_comms")
    return runtime


def _with_parameter_actions(schedule: Schedule) -> Schedule:
    """Return a schedule whose stages gather their parameters first, and reduce and scale gradients at the end.

    torch scales gradients when it reduces them, so that each trained stage needs the action.
    """
    kinds = {(leaf.kind, leaf.stage) for leaf in schedule.leaves()}
    trains = any(kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD) for kind, _ in kinds)
    actions = []
    for rank, order in enumerate(schedule.actions):
        gathers, reductions = [], []
        for stage in schedule.stages_of(rank):
            if (ActionKind.UNSHARD, stage) not in kinds:
                gathers.append(Action(ActionKind.UNSHARD, stage))
            if trains and (ActionKind.REDUCE_GRAD, stage) not in kinds:
                reductions.append(Action(ActionKind.REDUCE_GRAD, stage))
        actions.append((*gathers, *order, *reductions))
    return Schedule(schedule.stage_ranks, schedule.num_micro_batches, tuple(actions))


class ActionRecorder:
    """Records the time spans of actions that torch's pipeline runtime runs here, in the order of their ends."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._rank = dist.get_rank() if dist.is_initialized() else 0

    @property
    def trace(self) -> Trace:
        """Return the trace of the actions recorded so far. Times are those of CLOCK_MONOTONIC, in picoseconds.

        A send or receive is the time in which it is issued: torch moves the bytes later, beside other
        actions, and the compute action that needs a value waits for it inside its own span.
        """
        return Trace("torch.distributed.pipelining", "torch", tuple(self._spans))

    @contextlib.contextmanager
    def watch(self, action: str) -> Iterator[None]:
        """Record the time of the block as a span of `action`, such as "0F1" in torch's CSV."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            end = time.monotonic_ns()
            kind = "send" if "SEND" in action else "recv" if "RECV" in action else "call"
            lane = _COMPUTE if kind == "call" else _TRANSFERS
            self._spans.append(
                Span(self._rank, len(self._spans), lane, kind, action, start * 1000, end * 1000)
            )


@contextlib.contextmanager
def record_torch_actions() -> Iterator[ActionRecorder]:
    """Record the actions that torch's pipeline runtimes run in the block, in this process; yield the recorder."""
    recorder = ActionRecorder()
    with observe_pipeline_actions(recorder.watch):
        yield recorder
