"""Models: transformers, their layers, FLOPs and memory, and the workload that trains them."""

from meshweave.describe.model.model_file import ModelSource, load_model
from meshweave.describe.model.transformer import FcLayer, Transformer

__all__ = [
    "FcLayer",
    "ModelSource",
    "Transformer",
    "load_model",
]
