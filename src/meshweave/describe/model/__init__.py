"""Models: transformers, their layers, FLOPs and memory, and the workload that trains them."""

from meshweave.describe.model.model_file import ModelSource as ModelSource
from meshweave.describe.model.model_file import load_model as load_model
from meshweave.describe.model.transformer import FcLayer as FcLayer
from meshweave.describe.model.transformer import Transformer as Transformer
