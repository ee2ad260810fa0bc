"""The methods of transformers that work on a parallelised model, in the places of its class's own."""

from __future__ import annotations

from typing import Any

from meshweave.nn.hosted.generate import RankGenerate
from meshweave.nn.hosted.model import HostedModel
from meshweave.nn.hosted.trainer import offer_to_trainer
from meshweave.nn.parallel.model import ParallelModel
from meshweave.nn.weights.pretrained import RankSavePretrained


def offer_methods(model: ParallelModel) -> set[str]:
    """Give the module of a model methods that all its ranks call together, in place of its own.

    A model that runs by its own code (`HostedModel`) gets `generate`, if it has one, and is then marked for
    transformers' `Trainer` (`offer_to_trainer`). Any module with `save_pretrained` and a `config` gets
    `save_pretrained`.

    Return the names of methods that `refuse_features` is to leave alone: with `generate` all public ones of
    transformers' `GenerationMixin`; "save_pretrained" where it was given; empty if neither was.
    """
    module: Any = model.module
    offered: set[str] = set()
    if isinstance(model, HostedModel) and hasattr(module, "generate"):
        from transformers import GenerationMixin

        module.generate = RankGenerate(module, model.arguments, model.agreement)
        offered |= {name for name in vars(GenerationMixin) if not name.startswith("_")}
        offer_to_trainer(model)
    if hasattr(module, "save_pretrained") and hasattr(module, "config"):
        module.save_pretrained = RankSavePretrained(module, model.context)
        offered.add("save_pretrained")
    return offered
