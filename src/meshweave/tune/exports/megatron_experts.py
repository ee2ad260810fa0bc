"""Routed layers and latent attention as arguments of Megatron-LM (core 0.19), and what it has no argument for."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

from meshweave.base.errors import UnsupportedError
from meshweave.describe.model import Transformer
from meshweave.describe.model.config_features import SAID, is_off
from meshweave.describe.model.experts import Experts, Router, SharedGate
from meshweave.describe.model.head_norm import JointNorm, SinkAttention
from meshweave.describe.model.latent import LatentAttention
from meshweave.describe.model.layer import LayerGraph
from meshweave.describe.model.nodes import Linear
from meshweave.describe.model.routed_architecture import TokenRouting, routing_of
from meshweave.tune.exports.row import PlannedRow

_DISPATCHERS = {
    "all_to_all": {"--moe-token-dispatcher-type": "alltoall"},
    **{
        name: {"--moe-token-dispatcher-type": "flex", "--moe-flex-dispatcher-backend": name}
        for name in ("deepep", "hybridep")
    },
}
"""Arguments of the libraries that dispatch copies, by their names in `cost.exchange`."""
_BESIDE = ("multi-token-prediction", "priced in the dtype")
"""In words of `SAID`: what leaves the function of the model as it is."""


def add_dispatch(row: PlannedRow, settings: dict[str, Any], flags: list[str], target: str) -> set[str]:
    """Add Megatron Core's arguments for a row's expert parallelism and for the dispatcher of tokens.

    Nothing is added for a model without experts.

    Args:
        settings: options with values, which are added to.
        flags: options without values, which are added to.
        target: the name of the software, for errors.

    Returns:
        The names of the priced step's settings (`PlannedRow.settings`) that the arguments hold.

    Raises:
        UnsupportedError: tensor ranks keep whole sequences, or Megatron Core has no such dispatcher.
    """
    if not row.model.is_routed:
        return set()
    if row.tensor > 1 and not row.is_sequence_parallel:
        raise UnsupportedError(
            f"{target} trains experts beside tensor parallelism with sequence parallelism alone, and not as "
            f"{row.degrees.strategy}"
        )
    name = row.settings.get("dispatcher", "all_to_all")
    if name not in _DISPATCHERS:
        raise UnsupportedError(f"{target} has no dispatcher {name}, for which the step is priced")
    settings |= {
        "--expert-model-parallel-size": row.degrees.expert,
        "--expert-tensor-parallel-size": row.degrees.expert_tensor,
        **_DISPATCHERS[name],
    }
    flags.append("--moe-grouped-gemm")
    return {"dispatcher"}


def add_routed_model(
    row: PlannedRow, settings: dict[str, Any], flags: list[str], left_out: list[str]
) -> set[str]:
    """Add Megatron-LM's arguments for a model's layers with experts, those without, and latent attention.

    Args:
        settings: options with values, which are added to.
        flags: options without values, which are added to.
        left_out: sentences on what the arguments do not say, which are added to.

    Returns:
        The names of the model's fields that the arguments hold.

    Raises:
        UnsupportedError: Megatron-LM has no argument for what the model computes; the error names all of it.
    """
    model = row.model
    routing = routing_of(json.loads(model.config)) if model.config else None
    graphs = [graph for _, graph in model.layers]
    experts = {node for graph in graphs for node in graph.nodes if isinstance(node, Experts)}
    routers = {node for graph in graphs for node in graph.nodes if isinstance(node, Router)}
    shared = {_inner(graph) for graph in graphs if graph.num_experts > 1}
    dense = {_inner(graph) for graph in graphs if graph.num_experts == 1}
    problems = _problems(model, routing)
    if max(len(experts), len(routers), len(shared)) > 1 or len(dense) > 1:
        problems.append("layers of different sizes")
    if problems or routing is None:
        raise UnsupportedError(
            f"Megatron-LM has no argument for what {model.name} computes: {', '.join(problems)}"
        )
    (expert,), (router,), (of_shared,) = experts, routers, shared
    settings |= {
        "--ffn-hidden-size": next(iter(dense), _said_inner(model, expert.inner)),
        "--num-experts": expert.experts,
        "--moe-ffn-hidden-size": expert.inner,
        "--moe-router-topk": expert.chosen,
    }
    if dense:
        settings["--moe-layer-freq"] = _pattern(model)
    if of_shared:
        settings["--moe-shared-expert-intermediate-size"] = of_shared
        flags += ["--moe-shared-expert-gate"] if _has(graphs, SharedGate) else []
    _add_routing(routing, router, settings, flags)
    _add_balance(routing, settings, left_out)
    config = json.loads(model.config)
    left_out += [
        f"The config has {key} = {config[key]}, which are not priced; --mtp-num-layers is not given."
        for key, said in SAID.items()
        if _BESIDE[0] in said and not is_off(config.get(key))
    ]
    return {"layers", "model_type", "others", "ffn_hidden"} | _add_latent(model, settings, flags)


def _has(graphs: list[LayerGraph], kind: type) -> bool:
    return any(isinstance(node, kind) for graph in graphs for node in graph.nodes)


def _inner(graph: LayerGraph) -> int:
    """Return the inner features of what every token meets in a layer's feed-forward part; 0 for none."""
    sizes = [
        node.operand.size
        for node in graph.nodes
        if isinstance(node, Linear) and node.group == "feed_forward" and node.name == "ff2"
    ]
    return sizes[0] if sizes else 0


def _said_inner(model: Transformer, otherwise: int) -> int:
    """Return the inner features of layers without experts that a config says, though no layer is one."""
    said = json.loads(model.config).get("intermediate_size")
    return said if isinstance(said, int) and said > 0 else otherwise


def _pattern(model: Transformer) -> str:
    """Return which layers have experts, as Megatron-LM reads it: 1 for those that do."""
    kinds = [kind for count, graph in model.layers for kind in [graph.num_experts > 1] * count]
    runs = [(int(kind), len(list(run))) for kind, run in groupby(kinds)]
    return "(" + "+".join(f"[{kind}]*{count}" for kind, count in runs) + ")"


def _problems(model: Transformer, routing: TokenRouting | None) -> list[str]:
    """Return in words what a model computes for which Megatron-LM has no argument here."""
    own = model.architecture
    graphs = [graph for _, graph in model.layers]
    problems = []
    if routing is None:
        family = f"model_type {own.model_type}" if own.model_type else "layers node by node"
        problems.append(f"how the router of {family} weighs experts")
    else:
        problems += [f"a router with {text}" for text in routing.others]
        problems += _routing_problems(routing, graphs)
    if own.activation not in ("silu", "swish"):
        problems.append(f"experts with the activation {own.activation}")
    kinds = {JointNorm: "norms of all queries and keys at once", SinkAttention: "attention with sinks"}
    problems += [words for kind, words in kinds.items() if _has(graphs, kind)]
    if own.window is not None:
        problems.append(f"a window of {own.window} tokens")
    if own.ffn_bias or (own.out_bias and not own.qkv_bias):
        problems.append("biases of experts" if own.ffn_bias else "a bias of attention's result alone")
    elif own.out_bias:
        problems.append("a bias of attention's result beside none in experts")
    if own.norm != "rms":
        problems.append(f"{own.norm} norms")
    if own.rotary_base is not None and not own.rotary_base.is_integer():
        problems.append(f"rotary_base = {own.rotary_base}")
    others = [text for text in own.others if not _is_beside(text)]
    return [*problems, *others, *_scaling_problems(model)]


def _is_beside(text: str) -> bool:
    said = SAID.get(text.partition(" = ")[0], "")
    return any(words in said for words in _BESIDE)


def _routing_problems(routing: TokenRouting, graphs: list[LayerGraph]) -> list[str]:
    """Return what of the scores of a router Megatron-LM computes otherwise (topk_routing_with_score_function)."""
    problems = []
    for router in {node for graph in graphs for node in graph.nodes if isinstance(node, Router)}:
        if routing.scores == "softmax" and routing.normalised and router.chosen == 1:
            problems.append("a router whose one chosen expert has the weight 1")
        if routing.scores == "sigmoid" and routing.normalised != (router.chosen > 1):
            problems.append(f"sigmoid scores {'' if routing.normalised else 'not '}divided by their sum")
        if not routing.best_of_group:
            continue
        theirs = router.chosen // router.top_groups
        if theirs != routing.best_of_group or (routing.scores == "softmax" and routing.normalised):
            problems.append(
                f"groups of experts chosen by the sum of their best {routing.best_of_group} scores, and not "
                f"of {theirs}"
            )
    return problems


def _add_routing(routing: TokenRouting, router: Router, settings: dict[str, Any], flags: list[str]) -> None:
    settings["--moe-router-score-function"] = routing.scores
    if routing.scores == "softmax" and not routing.normalised:
        flags.append("--moe-router-pre-softmax")
    if routing.scale != 1:
        settings["--moe-router-topk-scaling-factor"] = routing.scale
    if routing.has_bias:
        flags.append("--moe-router-enable-expert-bias")
    if routing.best_of_group:
        settings |= {
            "--moe-router-num-groups": router.groups,
            "--moe-router-group-topk": router.top_groups,
        }


def _add_balance(routing: TokenRouting, settings: dict[str, Any], left_out: list[str]) -> None:
    if routing.loss is None:
        settings["--moe-router-load-balancing-type"] = "none"
        if not routing.has_bias:
            left_out.append(
                "The model's config has no loss that balances experts: Megatron-LM is told of none, too."
            )
        return
    settings["--moe-router-load-balancing-type"] = (
        "seq_aux_loss" if routing.loss_each_sequence else "aux_loss"
    )
    settings["--moe-aux-loss-coeff"] = routing.loss
    left_out.append(
        f"The coefficient {routing.loss} of the loss that balances experts is the config's. Megatron-LM divides "
        "that loss by the experts a token meets and adds it for each layer; transformers takes all layers at once."
    )


def _add_latent(model: Transformer, settings: dict[str, Any], flags: list[str]) -> set[str]:
    """Add the arguments of latent attention, if the model has it; return the fields that they tell."""
    nodes = [node for _, graph in model.layers for node in graph.nodes]
    attention = next((node for node in nodes if isinstance(node, LatentAttention)), None)
    if attention is None:
        return set()
    flags.append("--multi-latent-attention")
    ranks = [node.operand.size for node in nodes if isinstance(node, Linear) and node.name == "q_b"]
    settings |= {"--q-lora-rank": ranks[0]} if ranks else {}
    settings |= {
        "--kv-lora-rank": attention.latent,
        "--qk-head-dim": attention.own,
        "--qk-pos-emb-head-dim": attention.shared,
        "--v-head-dim": attention.value,
    }
    scaling = _scaling(model)
    if not scaling:
        settings["--rope-type"] = "rope"
        flags.append("--no-rope-fusion")  # refused beside latent attention
        return {"rotary_scaling"}
    settings |= {
        "--rope-type": "yarn",
        "--rotary-scaling-factor": float(scaling["factor"]),
        "--mscale": float(scaling.get("mscale", 1.0)),
        "--mscale-all-dim": float(scaling.get("mscale_all_dim", 0.0)),
    }
    return {"rotary_scaling"}


def _scaling(model: Transformer) -> dict[str, Any]:
    scaling: dict[str, Any] = json.loads(model.architecture.rotary_scaling or "{}")
    return scaling


_YARN = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
"""What latent attention has for YaRN without an argument (MLATransformerConfig)."""


def _scaling_problems(model: Transformer) -> list[str]:
    scaling = _scaling(model)
    is_latent = _has([graph for _, graph in model.layers], LatentAttention)
    if not scaling:
        return []
    kind = scaling.get("rope_type", scaling.get("type"))
    if not is_latent:
        return [] if kind == "llama3" else [f"rotary scaling {kind}"]
    if kind != "yarn" or "factor" not in scaling:
        return [f"rotary scaling {kind} of latent attention"]
    known = {"rope_type", "type", "factor", "mscale", "mscale_all_dim", *_YARN}
    others = [f"{key} = {value}" for key, value in scaling.items() if key not in known]
    fixed = [
        f"{key} = {scaling[key]}" for key, value in _YARN.items() if key in scaling and scaling[key] != value
    ]
    missing = [] if "original_max_position_embeddings" in scaling else ["no original_max_position_embeddings"]
    return [f"YaRN with {text}" for text in (*others, *fixed, *missing)]
