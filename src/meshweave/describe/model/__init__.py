"""Models: transformers, their layers, FLOPs and memory, and the workload that trains them."""

from meshweave.describe.model.model_file import load_model
from meshweave.describe.model.transformer import FcLayer, Transformer

__all__ = [
    "FcLayer",
    "Transformer",
    "load_model",
]
