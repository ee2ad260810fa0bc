"""What defines a model beside its sizes, read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from meshweave.base.errors import printable
from meshweave.describe.files import format_value
from meshweave.describe.model.architecture import Architecture, Positions, Residual
from meshweave.describe.model.config_features import (
    ACTIVATION,
    DEFINING,
    INIT_STD,
    NORM_EPS,
    SAID,
    is_off,
    max_positions_of,
    window_of,
    windowed_layers_of,
)
from meshweave.describe.model.model_types import KnownModelType, model_type_of

_BIAS_KEYS = {
    "attention_bias": ("qkv", "out"),
    "attention_out_bias": ("out",),
    "mlp_bias": ("ffn",),
    "use_qkv_bias": ("qkv",),
    "qkv_bias": ("qkv",),
    **dict.fromkeys(("use_bias", "bias", "enable_bias"), ("qkv", "out", "ffn")),
}
_TEXTS = (*SAID, *DEFINING)
_READ = {*_BIAS_KEYS, "no_bias", "qk_layernorm", "use_qk_norm", "alibi", "learned_pos_emb", "norm_type"}


def read_architecture(data: Mapping[str, Any], known: KnownModelType | None, head_dim: int) -> Architecture:
    """Return the architecture that a config describes, besides sizes.

    Args:
        data: the config, with the defaults of its family already filled in.
        known: the facts on its family, for the norm, positions and biases that no key says; None for a family
            that is not known.
        head_dim: features of a head, by which `rotary_dim` is divided.
    """
    base, share, scaling = _rotary(data, head_dim)
    positions = _positions(data, known, base)
    is_rotary = positions == "rotary"
    biases = _biases(data, known)
    own_eps = next((key for key in NORM_EPS if _number(data.get(key)) is not None), None)
    norm = known.norm if known else "rms" if own_eps == "rms_norm_eps" else None
    qk_norm = next(
        (data[key] for key in ("qk_layernorm", "use_qk_norm") if type(data.get(key)) is bool), None
    )
    return Architecture(
        printable(model_type_of(data)),
        norm,
        _number(data.get(own_eps)) if own_eps else None,
        next((printable(data[key]) for key in ACTIVATION if _is_word(data.get(key))), None),
        biases["qkv"],
        biases["out"],
        biases["ffn"],
        positions,
        max_positions_of(data),
        base if is_rotary else None,
        share if is_rotary else None,
        scaling if is_rotary else "",
        window_of(data),
        qk_norm=qk_norm if qk_norm is not None or known is None else known.qk_norm,
        init_std=next((_number(data[key]) for key in INIT_STD if _number(data.get(key)) is not None), None),
        others=tuple(f"{key} = {format_value(data[key])}" for key in sorted(_TEXTS) if _is_other(data, key)),
        windowed_layers=windowed_layers_of(data),
        residual=_residual(data),
        norms="before and after" if model_type_of(data) in _SANDWICHES else "",
    )


def _is_other(data: Mapping[str, Any], key: str) -> bool:
    return key not in _READ and not is_off(data.get(key)) and data[key] != 1


def _is_word(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _number(value: object) -> float | None:
    """Return a positive number that is not beyond sense, else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < _MOST else None  # type: ignore[operator,arg-type]


_MOST = 1e30


def _biases(data: Mapping[str, Any], known: KnownModelType | None) -> dict[str, bool | None]:
    """Return which layers add a bias; None where neither the config nor its family says."""
    biases: dict[str, bool | None] = {
        name: known is not None and name in known.biases if known else None for name in ("qkv", "out", "ffn")
    }
    for key, names in _BIAS_KEYS.items():
        default = known.defaults.get(key) if known else None
        if type(data.get(key)) is bool and data[key] != default:
            biases |= dict.fromkeys(names, data[key])
    if type(data.get("no_bias")) is bool:
        biases = dict.fromkeys(biases, not data["no_bias"])
    return biases


_ONE_NORM = ("gptj", "codegen", "phi", "cohere", "cohere2", "stablelm", "falcon")
"""Families whose parts of a layer share a norm where they are beside each other."""
_PARALLEL = ("gptj", "codegen", "phi", "cohere", "cohere2")
"""Families whose parts always are."""
_SANDWICHES = ("gemma2", "gemma3", "gemma3_text", "glm4")
"""Families with a norm before and after each part."""


def _residual(data: Mapping[str, Any]) -> Residual:
    """Return whether both parts of a layer read the same residual."""
    family = model_type_of(data)
    is_default = family == "gpt_neox" or family in _PARALLEL
    if not data.get("use_parallel_residual", data.get("parallel_attn", is_default)):
        return ""
    has_two = bool(data.get("new_decoder_architecture")) and data.get("num_ln_in_parallel_attn") != 1
    return "parallel with one norm" if family in _ONE_NORM and not has_two else "parallel"


def _positions(data: Mapping[str, Any], known: KnownModelType | None, base: float | None) -> Positions | None:
    attention = data.get("attn_config")
    table = attention if isinstance(attention, dict) else data
    if table.get("alibi") is True:
        return "alibi"
    if known:
        return known.positions
    return None if base is None else "rotary"


def _rotary(data: Mapping[str, Any], head_dim: int) -> tuple[float | None, float | None, str]:
    """Return the base of rotary angles, the share of a head that turns, and the scaling as JSON."""
    given = data.get("rope_parameters")
    table: Mapping[str, Any] = given if isinstance(given, dict) else {}
    old = data.get("rope_scaling")
    keys = ("rope_theta", "rotary_emb_base")
    base = next((n for source in (data, table) for key in keys if (n := _number(source.get(key)))), None)
    share = next((n for source in (data, table) for key in _SHARE if (n := _number(source.get(key)))), None)
    dim = _number(data.get("rotary_dim"))
    if share is None and dim is not None:
        share = dim / head_dim
    if any(isinstance(value, dict) for value in table.values()):  # one table for each kind of layer
        return base, share, json.dumps(table, sort_keys=True)
    if isinstance(old, dict) or any(key in data for key in keys):  # of transformers 4, which has no table
        scaling = old if isinstance(old, dict) else {}
    else:
        scaling = {k: v for k, v in table.items() if k not in (*keys, *_SHARE)}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return (
        base,
        1.0 if share is None else share,
        "" if kind == "default" else json.dumps(scaling, sort_keys=True),
    )


_SHARE = ("partial_rotary_factor", "rotary_pct")
