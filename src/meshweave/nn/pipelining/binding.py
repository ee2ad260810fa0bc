"""Modules bound to the calls of a pipeline's program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.algorithms.pipeline.actions import Schedule
from meshweave.algorithms.pipeline.algorithm import PipelineAlgorithm
from meshweave.algorithms.pipeline.problem import PipelineProblem
from meshweave.algorithms.pipeline.program import pipeline_program
from meshweave.base.errors import LayoutError
from meshweave.execute.torch.bind import BoundProgram, bind
from meshweave.execute.torch.buffers import torch_dtype
from meshweave.execute.torch.context import TorchContext
from meshweave.ir.program import Program
from meshweave.nn.pipelining.gradients import StageGradients
from meshweave.nn.pipelining.plan import PipelineOptions, forwards_of, schedule_of
from meshweave.nn.pipelining.saved_memory import SavedMemory
from meshweave.nn.pipelining.stage_functions import StageFunctions, StageShape
from meshweave.nn.pipelining.stage_problem import (
    PipelineData,
    StagePlaces,
    last_backward_first,
    pipeline_problem,
    profile_all,
    require_all_parameters,
    stage_shape,
    whole_backwards,
)
from meshweave.nn.pipelining.tied import TiedTable


@dataclass(frozen=True)
class BoundPipeline:
    """A pipeline's program, bound on this rank for batches of one shape and dtype.

    Attributes:
        problem: stages and edges.
        schedule: the actions of the program.
        bound: the program, bound to this rank's buffers and to the functions of its stages.
        functions, gradients: for the stages of this rank, by number of the stage.
        tied: the table that the first and the last stage share; None where this rank has no copy of it, or there
            are no backward passes.
    """

    problem: PipelineProblem
    schedule: Schedule
    bound: BoundProgram
    functions: Mapping[int, StageFunctions]
    gradients: Mapping[int, StageGradients]
    tied: TiedTable | None

    def splits(self, number: int) -> bool:
        """Return whether stage `number` computes, on this rank, some weight gradient in an action of its own.

        False for the first stage, which has no input gradients.
        """
        functions = self.functions[number]
        return not functions.is_first and len(functions.whole_backwards) < self.problem.micro_batches


def bind_stages(
    stages: Mapping[int, nn.Module],
    places: StagePlaces,
    options: PipelineOptions,
    context: TorchContext,
    data: PipelineData | None,
    memory: SavedMemory | None,
    *,
    trains: bool,
) -> BoundPipeline:
    """Profile the stages, write the program, and bind it. Collective among the ranks of `places`.

    Args:
        stages: the modules of this rank, by number of the stage.
        places: which ranks have which stage.
        options: what `meshweave.pipeline` was called with.
        context: communicates between the ranks.
        data: shapes and dtypes for one micro-batch over all data-parallel ranks of a stage: on ranks of the first
            stage those of the batch, on ranks of the last that of the target; else None.
        memory: counts the bytes that stages keep, if the pipeline `trains`; None counts nothing.
        trains: whether there are backward passes.

    Raises:
        LayoutError, UnsupportedError: stages, their parameters, data and schedule do not fit together.
        BindError, RankLostError, DeadlineError: other ranks refuse, are missing or late.
    """
    rank, loss_fn = context.rank or 0, options.loss_fn
    own = {each for stage in stages.values() for each in stage.parameters()}
    for name, each in loss_fn.named_parameters() if trains and isinstance(loss_fn, nn.Module) else ():
        if each.requires_grad and each not in own:
            raise LayoutError(
                f"the loss has a parameter {name}, and gradients of stages alone are summed and scaled: compute "
                "with it in the last stage, or freeze it"
            )
    profiles, rows = profile_all(
        context, places, stages, data, loss_fn, trains=trains, outputs=options.outputs
    )
    problem = pipeline_problem(
        places, profiles, options.micro_batches, rows, options.recompute, trains=trains
    )
    schedule = schedule_of(options.plan, problem, options.config)
    if not trains:
        schedule = forwards_of(schedule)
    for number, profile in enumerate(profiles):
        require_all_parameters(number, profile, schedule)
    config = options.config
    program = pipeline_program(
        problem, schedule, config.transfers,
        chunks=config.chunks, strategy=config.strategy, network=config.network,
        title=options.plan.title if isinstance(options.plan, PipelineAlgorithm) else "schedule",
    )  # fmt: skip
    shapes = {number: stage_shape(places, number, profiles, rows) for number in stages}
    counted = memory if trains else None
    functions, gradients = _stage_functions(
        stages, places, options, shapes, schedule, counted, context.device, trains=trains, rank=rank
    )
    calls: dict[str, Any] = {"marker": lambda *_: None}
    for number, each in functions.items():
        calls |= each.calls()
        for part in ("weight_grad", "backward"):  # those that are given what gradients of parameters go to
            calls[f"stage{number}_{part}"] = gradients[number].after(calls[f"stage{number}_{part}"])
    tensors = _tokens(program, rank, context.device)
    tensors |= {f"dw{number}": each.vector for number, each in gradients.items() if each.vector is not None}
    bound = bind(program, rank, tensors, context=context, calls=calls, trace=options.trace)
    tied = TiedTable.of(stages, places, context) if trains else None
    return BoundPipeline(problem, schedule, bound, functions, gradients, tied)


def _stage_functions(
    stages: Mapping[int, nn.Module],
    places: StagePlaces,
    options: PipelineOptions,
    shapes: Mapping[int, StageShape],
    schedule: Schedule,
    memory: SavedMemory | None,
    device: torch.device,
    *,
    trains: bool,
    rank: int,
) -> tuple[dict[int, StageFunctions], dict[int, StageGradients]]:
    """Return the functions and gradients of the stages of this rank, which is `rank`."""
    gradients: dict[int, StageGradients] = {}
    functions: dict[int, StageFunctions] = {}
    for number in last_backward_first(schedule, stages):
        trained = stages[number] if trains else nn.Module()
        ranks, index = places.data_parallelism(number), places.data_index(number, rank)
        gradients[number] = StageGradients.of(
            trained, ranks=ranks, index=index, number=number, device=device, others=gradients.values()
        )
    for number, module in stages.items():
        functions[number] = StageFunctions(
            module,
            shapes[number],
            options.loss_fn,
            whole_backwards(schedule, number),
            trains=trains,
            losses=gradients[number].losses,
            memory=memory,
            recomputes=number in options.recompute,
            has_signals=options.config.transfers == "signals",
        )
    return functions, gradients


def _tokens(program: Program, rank: int, device: torch.device) -> dict[str, Tensor]:
    """Return what stands for the inputs of a rank in the program: zeros without memory of their own."""
    tensors = {}
    for buffer in program.buffers:
        if buffer.kind == "input" and rank in program.mesh_of[buffer.mesh]:
            shape, dtype = program.local_shape(buffer.name, rank), torch_dtype(buffer.dtype)
            tensors[buffer.name] = torch.zeros(1, dtype=dtype, device=device).expand(shape)
    return tensors
