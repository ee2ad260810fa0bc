"""What a config with experts says beside sizes: norms, positions, and how a router weighs experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from meshweave.base.errors import DescriptionError
from meshweave.describe.files import format_value
from meshweave.describe.model.architecture import Architecture
from meshweave.describe.model.config_architecture import read_architecture
from meshweave.describe.model.config_features import is_off
from meshweave.describe.model.experts import Experts
from meshweave.describe.model.head_norm import HeadNorm
from meshweave.describe.model.latent import LatentNorm
from meshweave.describe.model.layer import LayerGraph
from meshweave.describe.model.model_types import model_type_of
from meshweave.describe.model.nodes import Linear, Norm

Scores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class TokenRouting:
    """How a router chooses experts of a token and weighs them.

    Attributes:
        scores: the function that turns the logits of the router into scores.
        normalised: whether the scores of chosen experts are divided by their sum.
        scale: the factor of their weights after that.
        has_bias: whether a bias of each expert, which no gradient moves, is added for the choice alone.
        best_of_group: how many of the highest scores of a group add up to the score of the group, where a token is
            limited to some groups; 0 for no limit.
        loss: the coefficient of the auxiliary loss that balances experts; None where the config has none.
        loss_each_sequence: whether that loss is one of each sequence.
        others: what else of the router the config says, as "key = value".
    """

    scores: Scores
    normalised: bool
    scale: float = 1.0
    has_bias: bool = False
    best_of_group: int = 0
    loss: float | None = None
    loss_each_sequence: bool = False
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class RoutingRule:
    """How the models of a family route tokens, and what their configs mean where they leave keys out.

    Attributes:
        scores, has_bias, best_of_group: as of `TokenRouting`.
        normalised: the same; None where `norm_topk_prob` says it.
        defaults: keys that count where a config leaves them out, as transformers has them.
    """

    scores: Scores
    defaults: Mapping[str, Any]
    normalised: bool | None = None
    has_bias: bool = False
    best_of_group: int = 1


def _defaults(base: float, positions: int, **others: Any) -> dict[str, Any]:
    rotary = {"rope_theta": base, "rope_type": "default"}
    common = {"hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-6}
    return {**common, "rope_parameters": rotary, "max_position_embeddings": positions, **others}


RULES: Mapping[str, RoutingRule] = {
    "mixtral": RoutingRule("softmax", _defaults(1e6, 131072, rms_norm_eps=1e-5), normalised=True),
    "qwen2_moe": RoutingRule("softmax", _defaults(1e4, 32768, norm_topk_prob=False)),
    "qwen3_moe": RoutingRule("softmax", _defaults(1e4, 32768, norm_topk_prob=False)),
    "deepseek_v2": RoutingRule(
        "softmax",
        _defaults(1e4, 2048, norm_topk_prob=False, routed_scaling_factor=1.0, topk_method="greedy"),
    ),
    "deepseek_v3": RoutingRule(
        "sigmoid",
        _defaults(1e4, 4096, norm_topk_prob=True, routed_scaling_factor=2.5),
        has_bias=True,
        best_of_group=2,
    ),
    "kimi_k2": RoutingRule("sigmoid", {}, has_bias=True, best_of_group=2),
    "glm4_moe": RoutingRule(
        "sigmoid",
        _defaults(
            1e4,
            131072,
            norm_topk_prob=True,
            routed_scaling_factor=1.0,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
        ),
        has_bias=True,
        best_of_group=2,
    ),
}
"""Families whose routers were read in transformers (modeling_*.py of 5.23), by `model_type`; kimi_k2, which has no
class there, is DeepSeek-V3 by its own code, and its configs say all."""
_METHODS = {"deepseek_v2": ("greedy", "group_limited_greedy")}
_OF_LOSS = ("router_aux_loss_coef", "aux_loss_alpha")
_JITTER = ("router_jitter_noise", "input_jitter_noise")


def routing_of(data: Mapping[str, Any]) -> TokenRouting | None:
    """Return how the model of a config routes tokens to experts; None for a family that is not in `RULES`.

    Raises:
        DescriptionError: the value of a key that takes a number is no number.
    """
    family = model_type_of(data)
    rule = RULES.get(family)
    if rule is None:
        return None
    given = {**rule.defaults, **data}
    others = [f"{key} = {given[key]}" for key in _JITTER if not is_off(given.get(key))]
    if rule.scores == "sigmoid":
        keys = "norm_topk_prob", "routed_scaling_factor"
        others += [f"no {key}" for key in keys if given.get(key) is None]
    if given.get("scoring_func", rule.scores) != rule.scores:
        others.append(f"scoring_func = {given['scoring_func']}")
    if given.get("topk_method", "noaux_tc") not in _METHODS.get(family, ("noaux_tc",)):
        others.append(f"topk_method = {given['topk_method']}")
    is_limited = (_number(given, "n_group") or 1) > 1 and given.get("topk_method") != "greedy"
    is_normalised = bool(given.get("norm_topk_prob")) if rule.normalised is None else rule.normalised
    if family == "deepseek_v2" and is_normalised:
        others.append("norm_topk_prob = true")  # its class in transformers does not read it
    return TokenRouting(
        rule.scores,
        is_normalised,
        _number(given, "routed_scaling_factor") or 1.0,
        rule.has_bias,
        rule.best_of_group if is_limited else 0,
        next((_number(given, key) for key in _OF_LOSS if not is_off(given.get(key))), None),
        bool(given.get("seq_aux")) and not is_off(given.get("aux_loss_alpha")),
        tuple(others),
    )


_MOST = 1e30


def _number(given: Mapping[str, Any], key: str) -> float:
    """Return the number that a config has under a key; 0 for none. Raises DescriptionError for anything else."""
    value = given.get(key)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MOST:
        raise DescriptionError(f"{key}: {format_value(value)} is not valid; give a number")
    return float(value)


def routed_architecture(data: Mapping[str, Any], runs: tuple[tuple[int, LayerGraph], ...]) -> Architecture:
    """Return the architecture of a config with experts, whose layers are `runs`."""
    rule = RULES.get(model_type_of(data))
    nodes = [node for _, graph in runs for node in graph.nodes]
    attentions = [(count, node) for count, graph in runs for node in graph.attentions]
    read = read_architecture({**(rule.defaults if rule else {}), **data}, None, attentions[0][1].width)
    biased = {node.name for node in nodes if isinstance(node, Linear) and node.bias}
    windows = [(count, node.window) for count, node in attentions if node.window is not None]
    windowed = sum(count for count, _ in windows)
    return replace(
        read,
        norm=next(node.kind for node in nodes if isinstance(node, Norm)),
        qkv_bias="qkv" in biased,
        out_bias="out" in biased,
        ffn_bias=any(isinstance(node, Experts) and node.biases for node in nodes),
        qk_norm=any(isinstance(node, HeadNorm | LatentNorm) for node in nodes),
        window=max((window for _, window in windows), default=None),
        windowed_layers=windowed if 0 < windowed < sum(count for count, _ in attentions) else None,
    )
