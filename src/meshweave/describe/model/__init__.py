"""Models: transformers, their layers, FLOPs and memory, and the workload that trains them."""

from meshweave.describe.model.transformer import (
    FcLayer,
    Transformer,
    load_model,
)

__all__ = [
    "FcLayer",
    "Transformer",
    "load_model",
]
