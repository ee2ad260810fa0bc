"""The figures of published runs as seconds of a step and bytes of memory: each source's FLOP formula and peak.

Every source counts in its own way:

    "step time s"                seconds
    "tokens/s/GPU"               tokens of a step over seconds and chips
    "samples/s/GPU"              sequences of a step over seconds and chips
    "TFLOP/s/GPU (hardware)"     FLOPs with recomputation; Narayanan et al. (SC '21, equation 3) recompute all:
                                 96 B s l h^2 (1 + s / 6 h + V / 16 l h)
    "TFLOP/s/GPU", "TFLOP/s/chip", "TFLOP/s/GPU (model)"  FLOPs of the model
    "MFU %"                      FLOPs of the model over the peak of the chips; llm-foundry's README has
                                 3 (2 N s + 4 L h s^2) for a sequence, with all N parameters

FLOPs of the model are otherwise those of Korthikanti et al. (MLSys '23, equation 7), which count attention without
a mask and logits once. nanotron has 6 N + 12 L h s for a token, with N summed over tensor and pipeline ranks
(trainer.py, _init_model): the embedding's table is in N beside the head's, and one that the first and the last
stage share is there twice, 1.61 for 1.34 billion.
"""

from __future__ import annotations

import re

from meshweave.algorithms.step import Step
from meshweave.base.units import GIB
from meshweave_studies.training_runs.cases import RunCase
from meshweave_studies.training_runs.models import NoPredictionError, stated_parameters

PEAK_FLOPS_PER_S = {"A100": 312e12, "H100": 989e12}
"""By the chip's name: what sources that print an MFU divide by, in bf16 and dense."""
_MEMORY = re.compile(r"\b(\d+(?:\.\d+)?)\s*(GiB|GB)\b")
_TERA = 1e12
_EIGHT_BITS = 2
"""llm-foundry divides by the peak of fp8 for products in it: 14.38 % of 1979 TFLOP/s are its 5856 tokens/s."""


def model_flops(case: RunCase, step: Step) -> float:
    """Return the FLOPs of the model in a step, as the source counts them."""
    parameters, of = stated_parameters(case.run), case.problem
    if parameters is None:
        return float(step.flops(case.stack.pairs)) + embedding_flops(case, step.parallelism.pipeline)
    attention = 4 * of.model.num_layers * of.model.hidden * of.sequence**2
    return 3.0 * of.batch * (2 * parameters * of.sequence + attention)


def embedding_flops(case: RunCase, pipeline: int) -> float:
    """Return the FLOPs of a step that a source counts for the embedding's table, on so many pipeline ranks."""
    of = case.problem
    if not case.stack.counts_embedding or (of.model.tied_embeddings and pipeline == 1):
        return 0.0
    return 6.0 * of.batch * of.sequence * (of.model.vocab_size or 0) * of.model.hidden


def published_seconds(case: RunCase, step: Step) -> float:
    """Return the seconds of a step that a row's figure says. Raises NoPredictionError for an unknown metric."""
    of, value, chips = case.problem, case.run.value, case.problem.cluster.num_chips
    metric = case.run.metric.lower()
    if metric == "step time s":
        return value
    if metric == "tokens/s/gpu":
        return of.batch * of.sequence / (value * chips)
    if metric == "samples/s/gpu":
        return of.batch / (value * chips)
    if metric == "tflop/s/gpu (hardware)":
        return step.flops("all", recomputed=True) / (value * _TERA * chips)
    if metric in ("tflop/s/gpu", "tflop/s/chip", "tflop/s/gpu (model)"):
        return model_flops(case, step) / (value * _TERA * chips)
    if metric == "mfu %":
        return model_flops(case, step) / (value / 100 * peak(case) * chips)
    raise NoPredictionError(f"the metric '{case.run.metric}' is not known")


def peak(case: RunCase) -> float:
    """Return the peak FLOP/s of a chip that the source divides by."""
    chip = case.problem.cluster.chip
    known = (rate for name, rate in PEAK_FLOPS_PER_S.items() if chip.name.startswith(name))
    rate = next(known, None) or chip.peak(case.problem.dtype)
    return rate if case.problem.precision is None else _EIGHT_BITS * rate


def published_bytes(case: RunCase) -> float | None:
    """Return the bytes of a chip's memory that a row states, None where it states none, or 0.

    GB are read as 2^30 bytes: PyTorch counts bytes, and nanotron and others divide by 1024^3.
    """
    stated = _MEMORY.search(case.run.second)
    return float(stated[1]) * GIB or None if stated else None
