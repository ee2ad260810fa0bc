"""The models of published training runs, and what their sources state of runs elsewhere than in a row.

Both stand in `published/training_models.toml`, with their source; Llama 3 stands in the catalog. A row
may state sizes itself, as `h12288 l96 a96`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

from meshweave.base.limits import STEP_LAYERS
from meshweave.describe.files import parse_table
from meshweave.describe.model import load_model
from meshweave.describe.model.architecture import Architecture
from meshweave.describe.model.transformer import Transformer
from meshweave_studies.training_runs.routed_runs import exclusion, routed_model
from meshweave_studies.training_runs.rows import COUNTS, PublishedRun

_FILE = "training_models.toml"
_EXPERTS = re.compile(
    r"deepseek|grok|gpt[ _-]?oss|kimi|mixtral|[ _-]a\d+b\b|nemotron[ _-]?(?:3|5|h)|\bmoe\b|experts",
    re.IGNORECASE,
)
_SIZE = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)\s*([mbt])\b", re.IGNORECASE)
_SHAPE = re.compile(r"\bh([1-9]\d*)\b.*\bl([1-9]\d*)\b.*\ba([1-9]\d*)\b", re.IGNORECASE)
_PARAMETERS = re.compile(r"\((\d+) params\)")
_CHECKPOINTS = re.compile(r"\bS?AC\b")
"""Words of torchtitan for what is computed again."""
_CATALOG = {"8b": "llama-3-8b", "70b": "llama-3-70b", "405b": "llama-3.1-405b"}
"""Llama 3 and 3.1 by size: both have the same shapes."""
_FAMILY_WORDS = (("mpt", "mpt"), ("mistral", "mistral"), ("gemma3", "gemma-3"))
"""Words of a model's name, and the family that they name."""
_LLAMA_2 = {size: f"llama-2-{size}" for size in ("7b", "13b", "70b")}
_VOCABULARY = 51200


class NoPredictionError(Exception):
    """Why a row cannot be predicted, in words."""


@lru_cache(maxsize=1)
def _tables() -> dict[str, Any]:
    text = files("meshweave_studies").joinpath("published", _FILE).read_text("utf-8")
    return parse_table(text, _FILE, "toml")


def has_experts(run: PublishedRun) -> bool:
    """Return whether a run is of a model with experts."""
    return bool(_EXPERTS.search(run.model)) or (run.count("ep") or 1) > 1


def model_of(run: PublishedRun, *, experts: bool = False) -> Transformer:
    """Return the model of a run; `experts`: also one with experts.

    Raises NoPredictionError where its sizes are not known, or it has experts.
    """
    if has_experts(run):
        if not experts:
            raise NoPredictionError("experts, or layers that are not of a dense transformer")
        if reason := exclusion(run):
            raise NoPredictionError(reason)
        if (model := routed_model(run)) is None:
            raise NoPredictionError("experts of a model whose sizes are not known")
        return model
    shape = _SHAPE.search(run.model)
    if shape:
        hidden, layers, heads = (int(number) for number in shape.groups())
        if layers > STEP_LAYERS.most:
            raise NoPredictionError(STEP_LAYERS.refusal(layers))
        return _gpt(run.model, [layers, hidden, heads], _VOCABULARY, "stated in the row")
    size, name = size_of(run), _family_name(run)
    catalog = _LLAMA_2 if re.search(r"llama-? ?2", run.model, re.IGNORECASE) else _CATALOG
    if name == "llama" and size in catalog:
        return load_model(catalog[size])
    for family in _tables()["families"]:
        for known, numbers in family["sizes"].items():
            if family["name"] == name and known.lower() == size:
                return _from_family(family, known, numbers)
    raise NoPredictionError("the sizes of the model are not known")


def size_of(run: PublishedRun) -> str:
    """Return the size in a model's name, such as "7b" of "MPT 7b (6658859008 params)"; "" where it has none."""
    size = _SIZE.search(run.model.replace("_", " "))
    return f"{size[1]}{size[2]}".lower() if size else ""


def with_source_columns(run: PublishedRun) -> PublishedRun:
    """Return a run with what its source states elsewhere: empty columns, and words added to `config`."""
    chips, config, counts = run.chips, run.config, dict(run.counts)
    for stated in _tables()["stated"]:
        if any(word in run.source for word in stated["sources"]) and stated.get("model") in (
            None,
            size_of(run),
        ):
            columns = stated["columns"]
            counts = {name: columns[name] for name in COUNTS if name in columns} | counts
            chips = chips if chips[:1].isdigit() else columns.get("chips", chips)
            config = config or columns.get("config", "")
            if not _CHECKPOINTS.search(config):
                config = f"{config} {columns.get('recompute', '')}".rstrip()
            config = f"{config} {columns.get('adds', '')}".strip()
    return replace(run, chips=chips, config=config, counts=counts)


def stated_parameters(run: PublishedRun) -> int | None:
    """Return the number of parameters that a model's name states, as llm-foundry's do; None where it does not."""
    stated = _PARAMETERS.search(run.model)
    return int(stated[1]) if stated else None


def _family_name(run: PublishedRun) -> str:
    model, source = run.model.lower(), run.source.lower()
    known = next((name for word, name in _FAMILY_WORDS if word in model), "")
    if known:
        return known
    if "configs/v5e" in source:
        return "maxtext"
    if "llama-like" in model or "nanotron" in source:
        return "nanotron"
    if "zero bubble" in source:
        return "zero-bubble"
    if "llama" in model:
        return "llama"
    if "nemotron" in model:
        return "nemotron"
    is_megatron = any(word in f"{model} {source}" for word in ("gpt", "megatron", "mt-nlg"))
    return "gpt" if is_megatron else ""


def _from_family(family: Mapping[str, Any], size: str, numbers: list[int]) -> Transformer:
    name, source = f"{family['name']} {size}", f"{_FILE}: {family['source']}"
    if len(numbers) == 5:
        layers, hidden, heads, kv_heads, ffn = numbers
        sizes = layers, hidden, heads, kv_heads, hidden // heads, ffn, family["vocab_size"]
        return Transformer(name, *sizes, False, source, tied_embeddings=False)
    if not family.get("gated"):
        return _gpt(name, numbers, family["vocab_size"], source)
    layers, hidden, heads, *others, ffn = numbers
    kv_heads, width = others or (heads, hidden // heads)
    shape = layers, hidden, heads, kv_heads, width, ffn, family["vocab_size"]
    windows = {key: family[key] for key in ("window", "windowed_layers") if key in family}
    tied = size not in family.get("untied", ())
    return Transformer(name, *shape, True, source, tied, Architecture(**windows))


def _gpt(name: str, numbers: list[int], vocab_size: int, source: str) -> Transformer:
    layers, hidden, heads = numbers
    return Transformer(
        name, layers, hidden, heads, heads, hidden // heads, 4 * hidden, vocab_size, False, source
    )
