"""Read the default config of every class in transformers' registry, and compare numbers of parameters.

python validation/model_types.py

writes src/meshweave/catalog/model_types.json, what families are beyond their configs, and
validation/results/model_types.md, what became of each. A causal language model is built on the meta device. Its
family is known where the reader takes its config and counts its parameters to within 0.5 %, learned positions
apart; of others a plan says that they are not known, unless the reader refuses them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    AutoModelForCausalLM,
)

from meshweave.base.errors import MeshweaveError
from meshweave.describe.model import Transformer
from meshweave.describe.model import config_features as features
from meshweave.describe.model.hugging_face import transformer_from_config
from meshweave.describe.model.model_types import known_model_types, model_type_table
from meshweave.describe.model.routed_config import DEFAULTED, FAMILIES, is_routed
from meshweave.describe.model.window_rules import WINDOW_FORMS, WindowRule

ROOT = Path(__file__).parents[1]
CATALOG = ROOT / "src/meshweave/catalog/model_types.json"
TABLE = Path(__file__).parent / "results/model_types.md"
WITHIN = 0.005
ENCODERS = ("bert", "roberta", "camembert", "electra", "xlm", "reformer", "xlnet", "git")
_LEARNED = re.compile(r"(wpe|embed_positions|position_embeddings?|pos_emb\w*|positions_embed)\.weight$")
_DEFAULTS = {
    *features.KV_HEADS, *features.ACTIVATION, *features.NORM_EPS, *features.INIT_STD, *features.WINDOWS,
    *features.DEFINING, *features.SAID, "vocab_size", "head_dim", "tie_word_embeddings", "use_sliding_window",
    "multi_query", "rope_parameters", "rotary_dim", "partial_rotary_factor", "rotary_pct",
}  # fmt: skip


@dataclass(frozen=True)
class ReadType:
    """What became of a family.

    Attributes:
        parameters: of its model, 0 where it was not built.
        model: as it was read, None where it was refused.
        refused: why.
    """

    name: str
    is_causal: bool
    parameters: int
    model: Transformer | None
    refused: str = ""

    @property
    def error(self) -> float | None:
        """Return by what share our number of parameters differs, None where there is none to compare with."""
        return self.model.num_parameters / self.parameters - 1 if self.model and self.parameters else None

    @property
    def outcome(self) -> str:
        """Return refused, exact, said (something is not priced), or WRONG: neither exact nor said."""
        if self.model is None:
            return "refused"
        said = [text for text in self.said if not text.startswith("the model is made for")]
        if said:
            return "said"
        return "exact" if self.error is not None and abs(self.error) <= WITHIN else "WRONG"

    @property
    def said(self) -> tuple[str, ...]:
        """Return what is said of any length of sequence."""
        return self.model.not_priced_at(2**40) if self.model else ()


def default_config(name: str, **changes: Any) -> dict[str, Any]:
    """Return the default config of a family as its `config.json` has it."""
    config: dict[str, Any] = json.loads(_config(name, **changes).to_json_string(use_diff=False))
    return config


def _config(name: str, **changes: Any) -> Any:
    """Return the default config of a family; where it lacks the size of a head, with that which follows."""
    made = CONFIG_MAPPING[name](**changes)
    size = getattr(made, "hidden_size", None), getattr(made, "num_attention_heads", None)
    if getattr(made, "head_dim", 0) is None and all(isinstance(each, int) for each in size):
        made = CONFIG_MAPPING[name](**changes, head_dim=size[0] // size[1])
    return made


def built(name: str) -> torch.nn.Module | None:
    """Return the causal language model of a family by its default config, without memory; None if it fails."""
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    try:
        with torch.device("meta"):
            model: torch.nn.Module = AutoModelForCausalLM.from_config(_config(name))
        model.tie_weights()  # type: ignore[operator]
    except Exception:  # a default config need not be one that works
        return None
    return model


def _defaults(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that count where a config leaves them out, without those that follow from sizes."""
    probes = [config]
    for keys in (features.HIDDEN, features.HEADS):
        key = next((key for key in keys if isinstance(config.get(key), int)), None)
        try:
            probes.append(default_config(name, **{key: 2 * config[key]}) if key else config)
        except Exception:  # such sizes may not go together
            probes.append(config)
    kept = {}
    of_heads = set(features.KV_HEADS) if config.get("multi_query") else set()
    for key in sorted((_DEFAULTS - of_heads) & config.keys()):
        value = config[key]
        has_word = isinstance(value, bool) or not (features.is_off(value) or isinstance(value, list))
        if has_word and all(probe.get(key) == value for probe in probes):
            kept[key] = value
    return kept


def routed_defaults(name: str) -> dict[str, Any]:
    """Return the keys that count where a config with experts leaves them out: those that no size changes."""
    if name not in CONFIG_MAPPING:
        return {}
    config = default_config(name)
    probes = [default_config(name, **{key: 2 * config[key]}) for key in _SIZES]
    kept = {
        key: config[key]
        for key in DEFAULTED
        if config.get(key) is not None and all(probe.get(key) == config[key] for probe in probes)
    }
    parts = config.get("mlp_layer_types") or ()
    if "first_k_dense_replace" not in kept and "sparse" in parts:
        kept["first_k_dense_replace"] = parts.index("sparse")
    return kept


_SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers")


def _biases(model: torch.nn.Module) -> list[str]:
    found = set()
    for path, module in model.named_modules():
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        is_linear = isinstance(weight, torch.Tensor) and weight.dim() == 2 and isinstance(bias, torch.Tensor)
        if not is_linear or not re.search(r"\.\d+\.", path):
            continue
        last = path.rpartition(".")[2]
        if re.search(r"attn|attention", path):
            found.add("out" if re.fullmatch(r"o_proj|out_proj|dense|c_proj|wo|out", last) else "qkv")
        else:
            found.add("ffn")
    return sorted(found)


def candidate(name: str, config: dict[str, Any], model: torch.nn.Module, is_gated: bool) -> dict[str, Any]:
    """Return the entry of a family for the catalog."""
    modules = [type(module).__name__ for module in model.modules()]
    names = [path for path, _ in model.named_parameters()]
    ffn = next((config[key] for key in features.FFN if isinstance(config.get(key), int)), None)
    hidden = next((config[key] for key in features.HIDDEN if isinstance(config.get(key), int)), 0)
    positions = "other"
    if any(_LEARNED.search(path) for path in names):
        positions = "learned"
    elif any("rope" in key or "rotary" in key for key in config) or any("Rotary" in each for each in modules):
        positions = "rotary"
    elif name in ("bloom", "mpt"):
        positions = "alibi"
    defaults = _defaults(name, config)
    if positions == "learned":
        defaults |= {key: config[key] for key in features.MAX_POSITIONS if isinstance(config.get(key), int)}
    return {
        "is_gated": is_gated,
        "default_ffn": ffn is None or (not is_gated and ffn == 4 * hidden),
        "norm": "rms" if any("RMS" in each for each in modules) else "layer",
        "positions": positions,
        "qk_norm": any(re.search(r"\b(q|k|query|key|qk)_?(layer)?norm", path) for path in names),
        "biases": _biases(model),
        "defaults": defaults,
    }


def _is_close(config: dict[str, Any], count: int, num_learned: int) -> bool:
    try:
        read = transformer_from_config(config, "config.json")
    except MeshweaveError:
        return False
    return min(abs(read.num_parameters / n - 1) for n in (count, count - num_learned)) <= WITHIN


def _is_understood(config: dict[str, Any]) -> bool:
    said = transformer_from_config(config, "config.json").not_priced_at(2**40)
    return not any("understood" in text for text in said)


def make_catalog() -> None:
    """Write the catalog's file of families."""
    known: dict[str, Any] = {}
    not_causal = []
    names = sorted(CONFIG_MAPPING)
    write_catalog({}, [])
    for name in names:
        try:
            config = default_config(name)
        except Exception:  # a class that has no default config
            continue
        model = None if is_routed(config) else built(name)  # the reader has families with experts by itself
        if model is not None:
            count = sum(parameter.numel() for parameter in model.parameters())
            learned = sum(p.numel() for path, p in model.named_parameters() if _LEARNED.search(path))
            for is_gated in (False, True):
                write_catalog({name: candidate(name, config, model, is_gated)}, [])
                if _is_close(config, count, learned) and _is_understood(config):
                    known[name] = candidate(name, config, model, is_gated)
                    break
        is_decoder = {"num_key_value_heads", "rms_norm_eps", "vocab_size"} <= config.keys()
        masked = name in MODEL_FOR_MASKED_LM_MAPPING_NAMES
        if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and (masked or not is_decoder):
            not_causal.append(name)
    write_catalog(known, not_causal)


def windowed_layers(name: str, count: int, **changes: Any) -> list[bool | None]:
    """Return which of `count` layers have the window by a family's class, None for a layer of another kind.

    It is empty where the class does not say of layers.
    """
    made = CONFIG_MAPPING[name](num_hidden_layers=count, sliding_window=64, **changes)
    words = {"sliding_attention": True, "full_attention": False}
    return [words.get(kind) for kind in getattr(made, "layer_types", None) or ()]


@cache
def fitted_rule(name: str) -> WindowRule | None:
    """Return by which rule layers of a family have the window, in default configs of several lengths.

    None: all have it, or its class does not take the number of layers.
    """
    try:
        default = CONFIG_MAPPING[name]()
        is_optional = getattr(default, "use_sliding_window", None) is False
        on = {"use_sliding_window": True} if is_optional else {}
        seen = {count: windowed_layers(name, count, **on) for count in _COUNTS}
    except Exception:  # a class of other sizes
        return None
    if not any(seen.values()):
        is_own = is_optional and hasattr(default, "sliding_window")
        return WindowRule("all", is_optional=True) if is_own else None
    tried = (WindowRule(form, number, "", is_optional) for form in WINDOW_FORMS for number in range(1, 100))
    rule = next(
        (rule for rule in tried if _fits(rule, seen, on)), WindowRule("other", is_optional=is_optional)
    )
    if rule.form in ("all", "none", "other"):
        return rule if rule.form != "all" or is_optional else None
    for key in features.WINDOW_NUMBERS:
        changed = {count: windowed_layers(name, count, **on, **{key: 7}) for count in _COUNTS}
        if _fits(replace(rule, number=7), changed, on):
            return replace(rule, key=key)
    return rule


_COUNTS = (100, 47, 30)


def _fits(rule: WindowRule, seen: dict[int, list[bool | None]], on: dict[str, bool]) -> bool:
    return rule.form != "other" and all(rule.windowed(on, count) == kinds for count, kinds in seen.items())


def write_catalog(known: dict[str, Any], not_causal: list[str]) -> None:
    """Write the file of the catalog, a line for each family, and read it anew."""
    names = sorted(set(CONFIG_MAPPING) - set(not_causal))
    rules = {name: rule for name in names if (rule := fitted_rule(name)) is not None}
    windows = ",\n".join(f"{json.dumps(name)}: {json.dumps(asdict(rule))}" for name, rule in rules.items())
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known))
    found = {name: defaults for name in sorted(FAMILIES) if (defaults := routed_defaults(name))}
    routed = ",\n".join(f"{json.dumps(name)}: {json.dumps(defaults)}" for name, defaults in found.items())
    CATALOG.write_text(
        f'{{"transformers": {json.dumps(transformers.__version__)},\n'
        f'"not_causal": {json.dumps(sorted(not_causal))},\n'
        f'"windows": {{\n{windows}\n}},\n"routed": {{\n{routed}\n}},\n"known": {{\n{lines}\n}}}}\n'
    )
    model_type_table.cache_clear()


def read_type(name: str, *, count: bool = True) -> ReadType:
    """Return what becomes of a family; with `count` its model is built, to count parameters."""
    is_causal = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    try:
        config = default_config(name)
    except Exception as error:
        return ReadType(
            name, is_causal, 0, None, f"transformers has no default config ({type(error).__name__})"
        )
    try:
        read = transformer_from_config(config, "config.json")
    except MeshweaveError as error:
        return ReadType(name, is_causal, 0, None, str(error).partition(": ")[2] or str(error))
    model = built(name) if count else None
    parameters = sum(parameter.numel() for parameter in model.parameters()) if model else 0
    return ReadType(name, is_causal, parameters, read)


def table(types: list[ReadType]) -> str:
    """Return the table of what became of each family, as Markdown."""
    counts = Counter(each.outcome for each in types)
    causal = Counter(each.outcome for each in types if each.is_causal)
    lines = [
        "# What the reader makes of transformers' configs",
        "",
        f"Default configs of the {len(types)} `model_type`s of transformers {transformers.__version__}, by "
        "`python validation/model_types.py`. exact: planned, parameters within 0.5 %; said: planned, and what is "
        "not priced or known is said; refused: an error of one line.",
        "",
        f"All: {', '.join(f'{n} {word}' for word, n in sorted(counts.items()))}. Causal language models, "
        f"{sum(causal.values())}: {', '.join(f'{n} {word}' for word, n in sorted(causal.items()))}.",
        "",
        "| model_type | causal | outcome | parameters | error | words |",
        "|---|---|---|---|---|---|",
    ]
    for each in types:
        error = "" if each.error is None else f"{100 * each.error:+.2f} %"
        words = " ".join("; ".join([each.refused] if each.refused else each.said).split()).replace("|", "/")
        count = f"{each.parameters:,}" if each.parameters else ""
        causal_word = "yes" if each.is_causal else ""
        lines.append(f"| {each.name} | {causal_word} | {each.outcome} | {count} | {error} | {words[:200]} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    make_catalog()
    TABLE.write_text(table([read_type(name) for name in sorted(CONFIG_MAPPING)]))
    print(f"{len(known_model_types())} families known; {TABLE} and {CATALOG} written")
