"""Pipelines: stages of a model on meshes of their own, micro-batches in flight between them."""

from __future__ import annotations

from meshweave.algorithms.pipeline.one_f_one_b import OneForwardOneBackward
from meshweave.algorithms.pipeline.problem import MicroBatches, PipelineAlgorithm, PipelineProblem

ENTRIES: tuple[PipelineAlgorithm, ...] = (OneForwardOneBackward(),)

__all__ = ["ENTRIES", "MicroBatches", "OneForwardOneBackward", "PipelineAlgorithm", "PipelineProblem"]
