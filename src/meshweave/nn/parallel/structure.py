"""Which modules of a model are which: maps of known models by the names of their modules, and a user's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.nn.parallel.attention import Heads


@dataclass(frozen=True)
class LayerMap:
    """The names of modules in a layer out = x + down(act(up(norm(x)))) after x + out(attention(norm(x))).

    Attributes:
        attention_norm, feed_forward_norm: norms before each half.
        query, key, value: three linear layers, or all in `fused`, side by side in this order.
        out: the linear layer after attention.
        gate: the linear layer whose activation multiplies that of `up`; "" without a gate.
        up, down: the linear layers of the feed-forward half.
        activation: the module of the activation function.
    """

    attention_norm: str
    out: str
    feed_forward_norm: str
    up: str
    down: str
    activation: str
    query: str = ""
    key: str = ""
    value: str = ""
    fused: str = ""
    gate: str = ""

    @property
    def into_attention(self) -> tuple[str, ...]:
        """Return the linear layers that enter attention."""
        return (self.fused,) if self.fused else (self.query, self.key, self.value)

    @property
    def into_feed_forward(self) -> tuple[str, ...]:
        """Return the linear layers that enter the feed-forward half."""
        return (self.gate, self.up) if self.gate else (self.up,)

    @property
    def linears(self) -> tuple[str, ...]:
        """Return all linear layers."""
        return (*self.into_attention, self.out, *self.into_feed_forward, self.down)


@dataclass(frozen=True)
class ModelMap:
    """The names of modules in a decoder-only transformer, for `parallelize`.

    Attributes:
        embedding: the table of words.
        layers: the list of layers.
        layer: the names in a layer.
        norm: the norm after the last layer.
        head: the linear layer that makes logits.
        positions: the table of learned positions; "" without.
        rotary: the module that makes cosines and sines, called with (x, positions); "" without.
        dropout: the dropout after the embedding; "" without.
        heads: sizes of attention; None to read them from the configuration and the modules of attention.
        has_causal_loss: whether `forward(tokens, labels)` shifts labels by one, as transformers does.
    """

    embedding: str
    layers: str
    layer: LayerMap
    norm: str
    head: str
    positions: str = ""
    rotary: str = ""
    dropout: str = ""
    heads: Heads | None = None
    has_causal_loss: bool = True

    def missing(self, module: nn.Module) -> str:
        """Return the first module that a model lacks; "" where it has all."""
        named = {name for name, _ in module.named_modules()}
        own = [getattr(self, each.name) for each in fields(self)]
        wanted = [name for name in own if isinstance(name, str) and name]
        first = f"{self.layers}.0"
        wanted += [f"{first}.{getattr(self.layer, each.name)}" for each in fields(self.layer)]
        return next((name for name in wanted if not name.endswith(".") and name not in named), "")


_LLAMA = ModelMap(
    "model.embed_tokens",
    "model.layers",
    LayerMap(
        "input_layernorm",
        "self_attn.o_proj",
        "post_attention_layernorm",
        "mlp.up_proj",
        "mlp.down_proj",
        "mlp.act_fn",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        gate="mlp.gate_proj",
    ),
    "model.norm",
    "lm_head",
    rotary="model.rotary_emb",
)
_GPT2 = ModelMap(
    "transformer.wte",
    "transformer.h",
    LayerMap("ln_1", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj", "mlp.act", fused="attn.c_attn"),
    "transformer.ln_f",
    "lm_head",
    positions="transformer.wpe",
    dropout="transformer.drop",
)
_NANO_GPT = ModelMap(
    "transformer.wte",
    "transformer.h",
    LayerMap("ln_1", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj", "mlp.gelu", fused="attn.c_attn"),
    "transformer.ln_f",
    "lm_head",
    positions="transformer.wpe",
    dropout="transformer.drop",
    has_causal_loss=False,
)
KNOWN = {"Llama, Qwen2 or Mistral": _LLAMA, "GPT-2": _GPT2, "nanoGPT": _NANO_GPT}
"""The maps of models that are recognised by the names of their modules."""


def recognised(module: nn.Module) -> tuple[str, ModelMap]:
    """Return the name and the map of a model. Raises UnsupportedError where it is none that is known."""
    lacking = {}
    for name, known in KNOWN.items():
        if not (missing := known.missing(module)):
            return name, known
        lacking[name] = missing
    said = "; ".join(f"no {name}: it has no module {missing}" for name, missing in lacking.items())
    raise UnsupportedError(
        f"{type(module).__name__} is no model known here ({said}); give mapping=ModelMap(...)"
    )


def check_layer(layer: nn.Module, names: LayerMap, where: str) -> None:
    """Raise UnsupportedError where a layer has parameters that no part of its map computes with."""
    known = {*names.linears, names.attention_norm, names.feed_forward_norm}
    for name, _ in layer.named_parameters():
        if name.rpartition(".")[0] not in known:
            raise UnsupportedError(
                f"{where}.{name}: a parameter that the map of a layer does not name; it would not take part"
            )


def heads_of(module: nn.Module, layer: nn.Module, names: LayerMap) -> Heads:
    """Return the sizes of attention of a layer, from its module and the configuration of the model.

    Raises LayoutError where they are not said.
    """
    attention = layer.get_submodule(names.out.rpartition(".")[0])
    config = getattr(module, "config", None)
    queries = _first((config, attention), "num_attention_heads", "n_head", "num_heads")
    if queries is None:
        raise LayoutError(
            f"{type(module).__name__} does not say how many heads it has; give mapping= with heads"
        )
    keys = _first((config, attention), "num_key_value_heads", "n_kv_head", "num_kv_heads") or queries
    width = _first((attention, config), "head_dim")
    linear = layer.get_submodule(names.out)
    sizes = tuple(linear.weight.shape)
    inner = sizes[0] if type(linear).__name__ == "Conv1D" else sizes[1]
    width = int(width or inner // queries)
    owner: Any = attention if hasattr(attention, "sliding_window") else config
    window = getattr(owner, "sliding_window", None)
    scale = _first((attention,), "scaling")
    return Heads(
        int(queries),
        int(keys),
        width,
        float(scale) if scale is not None else float(width) ** -0.5,
        None if window is None else int(window),
        _probability(attention, "attention_dropout", "attn_dropout"),
    )


def dropout_after(module: nn.Module, path: str) -> float:
    """Return the probability of the dropout beside the linear layer at `path`, after which it comes; 0 without."""
    return _probability(module.get_submodule(path.rpartition(".")[0]), "resid_dropout", "dropout")


def _probability(module: nn.Module, *names: str) -> float:
    for name in names:
        value: Any = getattr(module, name, None)
        if isinstance(value, nn.Dropout):
            return float(value.p)
        if isinstance(value, float | int) and not isinstance(value, bool):
            return float(value)
    return 0.0


def _first(owners: tuple[Any, ...], *names: str) -> Any:
    for owner in owners:
        for name in names:
            if (value := getattr(owner, name, None)) is not None:
                return value
    return None


def uncovered(module: nn.Module, replaced: set[str]) -> Iterator[str]:
    """Yield the modules that have parameters of their own and were not replaced."""
    for name, child in module.named_modules():
        if name not in replaced and next(child.parameters(recurse=False), None) is not None:
            yield name
