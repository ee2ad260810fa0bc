"""Sentences on what the settings of an export do not hold of a model and of a step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any

from meshweave.base.errors import printable
from meshweave.describe.model import Transformer
from meshweave.tune.exports.row import PlannedRow

PLAIN_TYPES = ("", "llama", "mistral", "qwen2", "qwen3", "gpt2")
"""Families whose layers are what fields say, and nothing else: norms before attention and FFN, one after all."""
MEGATRON_ORDER = ("tensor", "context", "data", "pipeline")
"""Axes of ranks, innermost first, as Megatron Core has them by default, torchtitan and accelerate always."""
_NAMES_AND_PRICES = ("name", "source", "not_priced", "architecture", "config")
_OF_ROTARY = ("rotary_base", "rotary_share")


def defining_fields(model: Transformer) -> dict[str, Any]:
    """Return the fields that define a model, by name: those of `Transformer` and of its `Architecture`.

    Name, source, config and what is not priced are left out. `layers` is in words: the types of the nodes.
    """
    sizes = {item.name: getattr(model, item.name) for item in fields(model)}
    own = {item.name: getattr(model.architecture, item.name) for item in fields(model.architecture)}
    sizes["layers"] = ", ".join(
        f"{count} of {' '.join(type(node).__name__ for node in graph.nodes)}" for count, graph in model.layers
    )
    return {name: value for name, value in (sizes | own).items() if name not in _NAMES_AND_PRICES}


def model_left_out(model: Transformer, told: Collection[str], target: str) -> list[str]:
    """Return a sentence on fields that an export does not hold, and one on fields that the model does not state.

    Fields are those of `defining_fields`. Either sentence is left out where there is no such field.

    Args:
        told: names of the fields that the export holds.
        target: the other software.
    """
    values = defining_fields(model)
    untold = [
        f"{name} = {printable(value)}"
        for name, value in values.items()
        if name not in (*told, "others", "model_type") and value not in (None, "", ())
    ]
    untold += () if "others" in told else map(printable, model.architecture.others)
    if "model_type" not in told and model.architecture.model_type not in PLAIN_TYPES:
        untold.append(f"model_type = {model.architecture.model_type}, whose class may compute more")
    is_rotary = model.architecture.positions in ("rotary", None)
    unknown = [
        name
        for name, value in values.items()
        if value is None
        and name not in ("window", "windowed_layers", "max_positions")
        and (is_rotary or name not in _OF_ROTARY)
    ]
    sentences = []
    if untold:
        sentences.append(f"The model has {', '.join(untold)}, which {target} is not told here.")
    if unknown:
        sentences.append(
            f"The plan does not know the model's {', '.join(unknown)}: {target} takes what it takes."
        )
    return sentences


def step_left_out(row: PlannedRow, told: Collection[str], target: str) -> list[str]:
    """Return a sentence for each setting of the priced step that an export does not hold, but for its stack.

    Where ranks share a layer there is one more, on what its communication was priced to overlap with. `told` are
    the settings that the export holds, `target` is the other software.
    """
    sentences = [
        f"The step is priced with {name} = {printable(value)}, which {target} is not told here."
        for name, value in row.settings.items()
        if name not in (*told, "stack")
    ]
    if row.tensor * row.degrees.context > 1:
        beside = {"layers": "all that its program allows", "sites": "the product that it belongs to"}
        sentences.append(
            f"Communication of a layer is priced beside {beside[row.plan.step.overlap]}; what "
            f"{target} overlaps there is its own to set."
        )
    return sentences


def order_sentence(order: Collection[str], theirs: str) -> str:
    """Return a sentence that says that the plan's order of ranks is not the one of the other software.

    Args:
        order: names of the plan's degrees, innermost first.
        theirs: the end of the sentence, such as "DeepSpeed always has tensor, data".
    """
    return f"The order of ranks is {', '.join(order)}, innermost first; {theirs}."
