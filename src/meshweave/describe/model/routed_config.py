"""Models with experts from a Hugging Face `config.json`, family by family.

Families name the same sizes differently, and differ in which layers have experts. A family that is not in the
table is refused: its parameters were not compared with those of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from meshweave.base.errors import UnsupportedError
from meshweave.base.limits import STEP_LAYERS
from meshweave.describe.files import Problem, fail_with_all, format_value
from meshweave.describe.model.architecture import Norm as NormKind
from meshweave.describe.model.architecture import NotPriced
from meshweave.describe.model.config_features import is_off, not_priced, other_layers, wrong_types
from meshweave.describe.model.layer import LayerGraph
from meshweave.describe.model.model_types import model_type_of, model_type_table
from meshweave.describe.model.routed import (
    FeedForward,
    GroupedHeads,
    LatentHeads,
    RoutedExperts,
    composed_layer,
)
from meshweave.describe.model.routed_architecture import routed_architecture
from meshweave.describe.model.transformer import Transformer
from meshweave.describe.model.window_rules import with_layer_kinds

_COUNT = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k", "num_experts_per_token")
_MOST = 2**31
_READ = {
    *_COUNT, *_CHOSEN, "moe_intermediate_size", "intermediate_size_mlp", "mlp_layer_types", "moe_layers",
    "mlp_only_layers", "moe_layer_interval", "moe_layer_start_index", "moe_layer_end_index", "decoder_sparse_step",
    "interleave_moe_layer_step", "first_k_dense_replace", "shared_expert_intermediate_size",
    "shared_intermediate_size", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "n_group",
    "topk_group", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "qk_head_dim", "num_experts_per_token", "router_jitter_noise", "input_jitter_noise", "moe_norm_min",
    "swiglu_alpha", "swiglu_limit", "route_scale", "router_scaling_factor", "enable_moe_fp32_combine",
    "rope_interleave", "attn_scale", "floor_scale", "attn_temperature_tuning", "seq_aux", "aux_loss_alpha",
    "ep_size", "moe_layer_freq", "initial_context_length", "experts_per_token", "lm_head_bias",
    "router_aux_loss_coef",
}  # fmt: skip
"""Keys that are read here, or change nothing that a price knows."""
DEFAULTED = (
    "num_key_value_heads", "head_dim", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "attention_bias", "qkv_bias", "use_qk_norm", "tie_word_embeddings", "sliding_window",
    "use_sliding_window", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts",
    "shared_expert_intermediate_size", "shared_intermediate_size", "moe_layer_interval", "moe_layer_start_index",
    "decoder_sparse_step", "interleave_moe_layer_step", "first_k_dense_replace", "mlp_only_layers", "n_group",
    "topk_group",
)  # fmt: skip
"""Keys of which the catalog has the default of each class of transformers, for configs that leave them out."""
_WINDOWED = ("sliding_attention", "chunked_attention")


@dataclass(frozen=True)
class RoutedFamily:
    """How configs of a family are read.

    Attributes:
        inner: the key of the inner features of an expert.
        dense: the key of the inner features of layers without experts.
        biases, qk_norm, sinks: as in `routed.GroupedHeads`. The keys `attention_bias` and `qkv_bias` of a config
            take the place of `biases`, and `use_qk_norm` that of an empty `qk_norm`.
        norm: the kind of the norms.
        expert_biases, router_parameters: as in `routed.RoutedExperts`.
    """

    inner: str = "moe_intermediate_size"
    dense: str = "intermediate_size"
    biases: tuple[str, ...] = ()
    norm: NormKind = "rms"
    qk_norm: str = ""
    sinks: bool = False
    expert_biases: bool = False
    router_parameters: int = 0


_LATENT = RoutedFamily()
_WHOLE = RoutedFamily(inner="intermediate_size")
FAMILIES: Mapping[str, RoutedFamily] = {
    "mixtral": _WHOLE,
    "qwen2_moe": RoutedFamily(biases=("qkv",)),
    "qwen3_moe": RoutedFamily(qk_norm="head"),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "kimi_k2": _LATENT,
    "glm4_moe_lite": _LATENT,
    "gpt_oss": replace(_WHOLE, biases=("qkv", "out"), sinks=True, expert_biases=True, router_parameters=1),
    "llama4_text": replace(_WHOLE, dense="intermediate_size_mlp"),
    "olmoe": replace(_WHOLE, qk_norm="joint"),
    "phimoe": replace(_WHOLE, norm="layer"),
    "granitemoe": _WHOLE,
    "granitemoeshared": _WHOLE,
    "granitemoe_swa": replace(_WHOLE, sinks=True),
    "glm4_moe": RoutedFamily(),
    "solar_open": RoutedFamily(),
    "minimax_m2": replace(_WHOLE, qk_norm="joint"),
    "mellum": RoutedFamily(qk_norm="head"),
    "ernie4_5_moe": RoutedFamily(router_parameters=1),
    "exaone_moe": RoutedFamily(qk_norm="head"),
    "hy_v3": RoutedFamily(qk_norm="head"),
    "flint": RoutedFamily(qk_norm="head", sinks=True),
}


def is_routed(data: Mapping[str, Any]) -> bool:
    """Return whether a config is of a family in `FAMILIES`, and does not say that it has no experts."""
    stated = [data[key] for key in _COUNT if data.get(key) is not None]
    return model_type_of(data) in FAMILIES and (not stated or any(not is_off(count) for count in stated))


def routed_transformer(data: dict[str, Any], name: str, file: str) -> Transformer:
    """Return the model of a config with experts.

    Args:
        data: the content of a `config.json`.
        name: of the model.
        file: what errors name, and the source of the model.

    Raises:
        DescriptionError: sizes are missing or wrong; the error lists them.
        UnsupportedError: some layers are not attention, or which of them have the window is not known.
        KeyError: the family is not in `FAMILIES`; see `is_routed`.
    """
    if (reason := other_layers(data)) is not None:
        raise UnsupportedError(f"{file}: {reason}")
    family = FAMILIES[model_type_of(data)]
    data = {**model_type_table()["routed"].get(model_type_of(data), {}), **data}
    config = _RoutedReader(data, family)
    config.problems += wrong_types(data)
    count = config.size("num_hidden_layers")
    if count > STEP_LAYERS.most:
        config.problems.append(Problem("num_hidden_layers", STEP_LAYERS.refusal(count)))
    config.data = with_layer_kinds(data, count, file)
    graphs = [config.layer(number) for number in range(min(count, STEP_LAYERS.most))]
    vocabulary, heads = config.size("vocab_size"), config.size("num_attention_heads")
    hidden = config.size("hidden_size")
    if config.problems:
        fail_with_all(file, list(dict.fromkeys(config.problems)))
    runs = tuple((len(list(run)), graph) for graph, run in groupby(graphs, key=lambda graph: graph))
    (attention,) = runs[-1][1].attentions
    return Transformer(
        name,
        count,
        hidden,
        heads,
        attention.groups,
        attention.width,
        runs[-1][1].counts["ffn"],
        vocabulary,
        True,
        file,
        bool(data.get("tie_word_embeddings")),
        routed_architecture(data, runs),
        not_priced=tuple(config.not_priced()),
        layers=runs,
        config=json.dumps(data, sort_keys=True),
    )


class _RoutedReader:
    """A config, and the problems that reading it has shown."""

    def __init__(self, data: dict[str, Any], family: RoutedFamily) -> None:
        self.data, self.family = data, family
        self.problems: list[Problem] = []

    def size(self, *keys: str, default: int | None = None) -> int:
        """Return the value of the first of some keys that the config has, else `default`.

        What is missing without a default, or is no size, is noted in `problems`, and 1 returned in its place.
        """
        for key in keys:
            value = self.data.get(key)
            if value is None:
                continue
            least = 1 if default is None else min(default, 1)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
                text = f"{format_value(value)} is not valid; give a whole number from {least} to {_MOST}"
                self.problems.append(Problem(key, text))
                return 1
            return value
        if default is None:
            self.problems.append(Problem(keys[0], f"missing; give it as {' or '.join(keys)}"))
            return 1
        return default

    def layer(self, number: int) -> LayerGraph:
        """Return the layer with a number, from 0; once there are problems, a layer of size 1."""
        hidden = self.size("hidden_size")
        part = self._experts() if self.has_experts(number) else FeedForward(self.size(self.family.dense))
        heads = self._heads(number, hidden)
        if self.problems:  # said at the end
            return composed_layer(1, GroupedHeads(1, 1, 1), FeedForward(1))
        return composed_layer(hidden, heads, part, self.family.norm)

    def has_experts(self, number: int) -> bool:
        """Return whether the layer with a number, from 0, has experts."""
        data = self.data
        kinds = data.get("mlp_layer_types")
        if isinstance(kinds, list):
            if number >= len(kinds):
                text = f"names {len(kinds)} layers, and there are more; give one for each"
                self.problems.append(Problem("mlp_layer_types", text))
                return False
            return kinds[number] in ("sparse", "moe")
        if isinstance(data.get("moe_layers"), list):
            return number in data["moe_layers"]
        dense = data.get("mlp_only_layers") or []
        if not isinstance(dense, list):
            text = f"{format_value(dense)} is not valid; give a list of the numbers of layers"
            self.problems.append(Problem("mlp_only_layers", text))
        elif number in dense:
            return False
        if "moe_layer_interval" in data:
            first, end = self.size("moe_layer_start_index", default=0), data.get("moe_layer_end_index", -1)
            last = self.size("num_hidden_layers") - 1
            last = last if end == -1 else self.size("moe_layer_end_index", default=0)
            return (number + 1) % self.size("moe_layer_interval") == 0 and first <= number <= last
        step = self.size("decoder_sparse_step", "interleave_moe_layer_step", default=0) or 1
        return number >= self.size("first_k_dense_replace", default=0) and (number + 1) % step == 0

    def _experts(self) -> RoutedExperts:
        data, family = self.data, self.family
        inner, experts = self.size(family.inner), self.size(*_COUNT)
        shared = self.size("shared_expert_intermediate_size", "shared_intermediate_size", default=0)
        names = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
        number = self.size(*names, default=int(model_type_of(data) == "llama4_text"))
        chosen = self.size(*_CHOSEN)
        if chosen > experts:
            self.problems.append(Problem(_CHOSEN[0], f"{chosen} of {experts} experts; give at most all"))
        return RoutedExperts(
            experts,
            chosen,
            inner,
            shared=shared or number * inner,
            shared_gate=model_type_of(data) == "qwen2_moe",
            groups=self.size("n_group", default=1),
            top_groups=self.size("topk_group", default=1),
            router_parameters=family.router_parameters,
            biases=family.expert_biases,
        )

    def _heads(self, number: int, hidden: int) -> GroupedHeads | LatentHeads:
        heads = self.size("num_attention_heads")
        if self.data.get("kv_lora_rank") is not None:
            if self.data.get("attention_bias"):
                self.problems.append(Problem("attention_bias", "true; latent attention has none here"))
            return LatentHeads(
                heads,
                self.size("q_lora_rank", default=0),
                self.size("kv_lora_rank"),
                self.size("qk_nope_head_dim"),
                self.size("qk_rope_head_dim"),
                self.size("v_head_dim"),
            )
        family, groups = self.family, self.size("num_key_value_heads", default=heads)
        if heads % groups:
            self.problems.append(
                Problem("num_key_value_heads", f"{groups} does not divide the {heads} heads; give a divisor")
            )
            groups = heads
        qk_norm = "head" if self.data.get("use_qk_norm") and not family.qk_norm else family.qk_norm
        if model_type_of(self.data) == "llama4_text":
            qk_norm = ""  # without parameters
        return GroupedHeads(
            heads,
            groups,
            self.size("head_dim", default=hidden // heads),
            self._window(number),
            biases=self._biases(),
            qk_norm=qk_norm,
            sinks=family.sinks,
        )

    def _biases(self) -> tuple[str, ...]:
        """Return which products of attention add a bias."""
        family, data = self.family, self.data
        if "qkv_bias" in data:
            return ("qkv",) if data["qkv_bias"] else ()
        said = data.get("attention_bias")
        if said is None:
            return family.biases
        if not said:
            return ()
        only = model_type_of(data) in ("glm4_moe", "solar_open")
        return ("qkv",) if only else ("qkv", "out")

    def _window(self, number: int) -> int | None:
        """Return how many tokens a token attends to in a layer; None for all."""
        data = self.data
        kinds = data.get("layer_types")
        if isinstance(kinds, list) and number < len(kinds):
            if kinds[number] not in _WINDOWED:
                return None
            key = "sliding_window" if kinds[number] == "sliding_attention" else ""
            return self.size(key, default=0) or None
        if data.get("use_sliding_window") is False:
            return None
        return self.size("sliding_window", default=0) or None

    def not_priced(self) -> Iterator[NotPriced]:
        """Yield the properties of the config that predictions leave out, or that are not understood."""
        hidden = self.size("hidden_size")
        left = {key: value for key, value in self.data.items() if key not in _READ}
        yield from not_priced(left, hidden, is_known=True, learned=False)
        if self.family.sinks:
            yield NotPriced("attention sinks not priced")
