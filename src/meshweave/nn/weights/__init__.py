"""Weights in safetensors files, as Hugging Face keeps them, into and out of a module with any placements.

`load_weights` reads on each rank the parts that the rank has, and nothing else, from one file or from the files of
an index. `save_weights` writes whole tensors under the names of the module: what was trained on one mesh can be
read by transformers, or on another mesh.
"""

from meshweave.nn.weights.checkpoint import Checkpoint
from meshweave.nn.weights.load import LoadReport, load_weights
from meshweave.nn.weights.save import save_weights
from meshweave.nn.weights.slots import StoredTensor

__all__ = ["Checkpoint", "LoadReport", "StoredTensor", "load_weights", "save_weights"]
