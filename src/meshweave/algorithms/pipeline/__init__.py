"""Pipelines: stages of a model on meshes of their own, micro-batches in flight between them."""

from __future__ import annotations

from meshweave.algorithms.pipeline.actions import Action as Action
from meshweave.algorithms.pipeline.actions import ActionKind as ActionKind
from meshweave.algorithms.pipeline.actions import Schedule as Schedule
from meshweave.algorithms.pipeline.algorithm import PipelineAlgorithm as PipelineAlgorithm
from meshweave.algorithms.pipeline.algorithm import PipelineConfig as PipelineConfig
from meshweave.algorithms.pipeline.delayed import DelayedWeights as DelayedWeights
from meshweave.algorithms.pipeline.eager import EagerOneForwardOneBackward as EagerOneForwardOneBackward
from meshweave.algorithms.pipeline.gpipe import GPipe as GPipe
from meshweave.algorithms.pipeline.interleaved import INTERLEAVED_1F1B as INTERLEAVED_1F1B
from meshweave.algorithms.pipeline.one_f_one_b import OneForwardOneBackward as OneForwardOneBackward
from meshweave.algorithms.pipeline.problem import Edge as Edge
from meshweave.algorithms.pipeline.problem import PartCost as PartCost
from meshweave.algorithms.pipeline.problem import PipelineProblem as PipelineProblem
from meshweave.algorithms.pipeline.problem import Recompute as Recompute
from meshweave.algorithms.pipeline.problem import Stage as Stage
from meshweave.algorithms.pipeline.problem import Stash as Stash
from meshweave.algorithms.pipeline.program import pipeline_program as pipeline_program
from meshweave.algorithms.pipeline.zero_bubble import ZERO_BUBBLE

ENTRIES: tuple[PipelineAlgorithm, ...] = (
    OneForwardOneBackward(),
    GPipe(),
    INTERLEAVED_1F1B,
    EagerOneForwardOneBackward(),
    DelayedWeights(),
    *ZERO_BUBBLE,
)
