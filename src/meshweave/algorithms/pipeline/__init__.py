"""Pipelines: stages of a model on meshes of their own, micro-batches in flight between them."""

from __future__ import annotations

from meshweave.algorithms.pipeline.actions import Action, ActionKind, Schedule
from meshweave.algorithms.pipeline.algorithm import PipelineAlgorithm, PipelineConfig
from meshweave.algorithms.pipeline.delayed import DelayedWeights
from meshweave.algorithms.pipeline.eager import EagerOneForwardOneBackward
from meshweave.algorithms.pipeline.gpipe import GPipe
from meshweave.algorithms.pipeline.interleaved import INTERLEAVED_1F1B
from meshweave.algorithms.pipeline.one_f_one_b import OneForwardOneBackward
from meshweave.algorithms.pipeline.problem import Edge, PartCost, PipelineProblem, Recompute, Stage, Stash
from meshweave.algorithms.pipeline.program import pipeline_program
from meshweave.algorithms.pipeline.reader import read_schedule
from meshweave.algorithms.pipeline.zero_bubble import ZERO_BUBBLE

ENTRIES: tuple[PipelineAlgorithm, ...] = (
    OneForwardOneBackward(),
    GPipe(),
    INTERLEAVED_1F1B,
    EagerOneForwardOneBackward(),
    DelayedWeights(),
    *ZERO_BUBBLE,
)

__all__ = [
    "ENTRIES",
    "INTERLEAVED_1F1B",
    "Action",
    "ActionKind",
    "DelayedWeights",
    "EagerOneForwardOneBackward",
    "Edge",
    "GPipe",
    "OneForwardOneBackward",
    "PartCost",
    "PipelineAlgorithm",
    "PipelineConfig",
    "PipelineProblem",
    "Recompute",
    "Schedule",
    "Stage",
    "Stash",
    "pipeline_program",
    "read_schedule",
]
