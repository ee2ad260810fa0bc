"""Which runs constants of stacks are fitted on, and which only judge them: a hash of the model decides.

All runs of models with the same shape are a family and on the same side, whatever the source, the chips and the
software: 22B, 530B and 1T of Megatron's README are runs of arXiv 2205.05198.
"""

from __future__ import annotations

import hashlib

from meshweave.describe.model.transformer import Transformer


def family_of(model: Transformer) -> str:
    """Return the name of the family of a model's runs."""
    shape = f"{model.num_layers} layers, hidden {model.hidden}, ffn {model.layer.counts['ffn']}"
    return f"{shape}, vocabulary {model.vocab_size}"


def is_fitted(model: Transformer) -> bool:
    """Return whether constants may be fitted on runs of a model; they are judged on the others."""
    return hashlib.sha256(family_of(model).encode()).digest()[0] % 2 == 0
