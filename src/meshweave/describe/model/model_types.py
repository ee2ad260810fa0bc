"""What transformers' families (`model_type`) are beyond their configs: the catalog's `model_types.json`.

`validation/model_types.py` writes it from the classes of transformers, and compares the numbers of parameters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from meshweave.describe.model.architecture import Norm, Positions


@dataclass(frozen=True)
class KnownModelType:
    """A family whose parameters, in its default config, are counted to within 0.5 % of transformers.

    Attributes:
        is_gated: whether its FFN is gated.
        default_ffn: whether the FFN has four times the hidden size where a config does not say.
        norm, positions, qk_norm: as of `Architecture`.
        biases: which of "qkv", "out" and "ffn" add a bias in the default config.
        defaults: keys that count where a config leaves them out, with their values.
    """

    is_gated: bool
    default_ffn: bool
    norm: Norm
    positions: Positions
    qk_norm: bool
    biases: tuple[str, ...]
    defaults: Mapping[str, Any]


@lru_cache(maxsize=1)
def model_type_table() -> dict[str, Any]:
    """Return what the catalog has on model families.

    Under "known", "routed" and "windows" it has by `model_type` the facts of `KnownModelType`, the defaults of
    configs with experts, and `WindowRule`s; under "not_causal" the names of families without a causal language
    model.
    """
    text = (files("meshweave") / "catalog" / "model_types.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def model_type_of(data: Mapping[str, Any]) -> str:
    """Return the `model_type` of a config, "" where it has none."""
    name = data.get("model_type")
    return name if isinstance(name, str) else ""


def known_model_types() -> tuple[str, ...]:
    """Return the names of the families that are known (`KnownModelType`), sorted."""
    return tuple(sorted(model_type_table()["known"]))


def known_model_type(name: str) -> KnownModelType | None:
    """Return the facts on a family of models; None for a family that is not known."""
    entry = model_type_table()["known"].get(name)
    return None if entry is None else KnownModelType(**{**entry, "biases": tuple(entry["biases"])})


def not_causal_reason(name: str) -> str | None:
    """Return why models of `model_type` `name`, without a causal language model in transformers, are refused.

    None for any other name.
    """
    if name not in model_type_table()["not_causal"]:
        return None
    return f"model_type: '{name}' has no causal language model; only causal decoders of text are supported"
