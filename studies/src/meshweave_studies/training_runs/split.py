"""Which runs constants of stacks are fitted on, and which only judge them: a hash of the model decides.

All runs of models with the same shape are a family and on the same side, whatever the source, the chips and the
software: 22B, 530B and 1T of Megatron's README are runs of arXiv 2205.05198. vTrain's runs have two models on one
host: there those on 2 and 4 GPUs are fitted, and those on 8, and on many hosts, judge.
"""

from __future__ import annotations

import hashlib

from meshweave.describe.model.transformer import Transformer
from meshweave_studies.training_runs.rows import PublishedRun

_FITTED_CHIPS = ("2", "4")
"""On how many GPUs vTrain's fitted runs were."""


def family_of(model: Transformer) -> str:
    """Return the name of the family of a model's runs."""
    shape = f"{model.num_layers} layers, hidden {model.hidden}, ffn {model.layer.counts['ffn']}"
    return f"{shape}, vocabulary {model.vocab_size}"


def is_fitted(model: Transformer) -> bool:
    """Return whether constants may be fitted on runs of a model; they are judged on the others."""
    return hashlib.sha256(family_of(model).encode()).digest()[0] % 2 == 0


def is_fitted_run(run: PublishedRun, model: Transformer | None = None) -> bool:
    """Return whether constants may be fitted on a run of a model; the model decides but for vTrain's runs."""
    if "vTrain" in run.source:
        return run.chips.split()[0] in _FITTED_CHIPS
    return model is not None and is_fitted(model)
