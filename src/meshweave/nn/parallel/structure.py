"""Which modules of a model are which: maps, and what must hold of the modules that they name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.nn.parallel.attention import Heads


@dataclass(frozen=True)
class LayerMap:
    """The names of modules in a layer: x = x + out(attention(norm(x))); x = x + down(act(up(norm(x)))).

    Attributes:
        attention_norm, feed_forward_norm: norms before each half.
        query, key, value: three linear layers, or all in `fused`, side by side in this order.
        out: the linear layer after attention.
        gate: the linear layer whose result, after the activation, multiplies that of `up`; "" without a gate.
        up, down: the linear layers of the feed-forward half.
        activation: the module of the activation function, after `gate`, or after `up` without one.
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
        """Return the names of the linear layers that make queries, keys and values: one fused, or three."""
        return (self.fused,) if self.fused else (self.query, self.key, self.value)

    @property
    def into_feed_forward(self) -> tuple[str, ...]:
        """Return the names of the feed-forward half's first linear layers: (gate, up), or (up,) without a gate."""
        return (self.gate, self.up) if self.gate else (self.up,)

    @property
    def linears(self) -> tuple[str, ...]:
        """Return the names of all linear layers of a layer, in the order of the forward pass."""
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
        """Return the name of the first module that this map names and `module` lacks; "" where it has all.

        Modules of layers are looked for in each layer, and only where `layers` is an `nn.ModuleList`.
        """
        named = dict(module.named_modules(remove_duplicate=False))
        own = [getattr(self, each.name) for each in fields(self)]
        wanted = [name for name in own if isinstance(name, str) and name]
        layers = named.get(self.layers)
        if isinstance(layers, nn.ModuleList):
            parts = [part for each in fields(self.layer) if (part := getattr(self.layer, each.name))]
            wanted += [
                f"{self.layers}.{number}.{part}" for number in range(len(layers) or 1) for part in parts
            ]
        return next((name for name in wanted if name not in named), "")


def check_layer(layer: nn.Module, names: LayerMap, where: str) -> None:
    """Raise UnsupportedError where a layer has a parameter that is in no linear layer or norm of `names`.

    `where` is the layer's name, for errors.
    """
    known = {*names.linears, names.attention_norm, names.feed_forward_norm}
    for name, _ in layer.named_parameters():
        if name.rpartition(".")[0] not in known:
            raise UnsupportedError(
                f"{where}.{name}: in no linear layer or norm that the map names; it would not take part"
            )


def check_modules(module: nn.Module, names: ModelMap) -> None:
    """Raise UnsupportedError where a model lacks a module that its map names, or has one of an unknown class.

    The layers must be a non-empty `nn.ModuleList`, linear layers `nn.Linear`s and tables `nn.Embedding`s that
    have the forward pass of that class. The classes of norms, activations and rotary modules are not looked at.
    """
    kind = type(module).__name__
    if missing := names.missing(module):
        raise UnsupportedError(f"{kind} has no module {missing}, which the mapping names")
    layers = module.get_submodule(names.layers)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise UnsupportedError(f"{names.layers}: {type(layers).__name__} is no nn.ModuleList of layers")
    for number, layer in enumerate(layers):
        for path in names.layer.linears:
            check_linear(layer.get_submodule(path), f"{names.layers}.{number}.{path}")
    check_linear(module.get_submodule(names.head), names.head)
    for path in filter(None, (names.embedding, names.positions)):
        _check_embedding(module.get_submodule(path), path)


def check_linear(linear: nn.Module, name: str) -> None:
    """Raise UnsupportedError where a module is no `nn.Linear` with the forward pass of that class.

    `name` is the module's, for errors.
    """
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        raise UnsupportedError(
            f"{name}: {type(linear).__name__} is no linear layer that is known; give an nn.Linear"
        )


def _check_embedding(embedding: nn.Module, name: str) -> None:
    """Raise UnsupportedError where a module is no plain table of rows."""
    if not isinstance(embedding, nn.Embedding) or type(embedding).forward is not nn.Embedding.forward:
        raise UnsupportedError(
            f"{name}: {type(embedding).__name__} is no table that is known; give an nn.Embedding"
        )


def heads_of(module: nn.Module, number: int, model_map: ModelMap) -> Heads:
    """Return the head counts, width, scale, window and dropout of the attention of layer `number`, from 0.

    They are read from its module and the configuration of the model. Raises LayoutError where neither says how
    many heads there are, UnsupportedError where attention is not causal.
    """
    names, layer = model_map.layer, module.get_submodule(f"{model_map.layers}.{number}")
    attention = layer.get_submodule(names.out.rpartition(".")[0])
    config = getattr(module, "config", None)
    if getattr(attention, "is_causal", True) is False:
        raise UnsupportedError(f"{model_map.layers}.{number}: attention that is not causal is not computed")
    queries = _first((config, attention), "num_attention_heads", "n_head", "num_heads")
    if queries is None:
        raise LayoutError(
            f"{type(module).__name__} does not say how many heads it has; give mapping= with heads"
        )
    keys = _first((config, attention), "num_key_value_heads", "n_kv_head", "num_kv_heads") or queries
    width = _first((attention, config), "head_dim")
    width = int(width or layer.get_submodule(names.out).weight.shape[1] // queries)
    owner: Any = attention if hasattr(attention, "sliding_window") else config
    window = getattr(owner, "sliding_window", None)
    scale = _first((attention,), "scaling")
    return Heads(
        int(queries),
        int(keys),
        width,
        float(scale) if scale is not None else float(width) ** -0.5,
        None if window is None else int(window),
        dropout_in_attention(layer, names),
    )


def check_heads(layer: nn.Module, names: LayerMap, heads: Heads, where: str) -> None:
    """Raise an error unless the linear layers of a layer fit its heads, and each other.

    Args:
        layer: the transformer layer.
        names: the names of its modules.
        heads: sizes over all ranks.
        where: the layer's name, for errors.

    Raises:
        LayoutError: a linear layer of attention does not have the features that the heads need.
        UnsupportedError: the number of key heads does not divide that of query heads, or is smaller in a fused
            layer; or of linear layers with one operand only some have a bias.
    """
    of_queries, of_keys = heads.queries * heads.width, heads.keys * heads.width
    if names.fused:
        wanted = [(names.fused, 0, of_queries + 2 * of_keys)]
    else:
        wanted = [(names.query, 0, of_queries), (names.key, 0, of_keys), (names.value, 0, of_keys)]
    for path, side, features in (*wanted, (names.out, 1, of_queries)):
        count = int(layer.get_submodule(path).weight.shape[side])
        if count != features:
            raise LayoutError(
                f"{where}.{path} has {count} features for {heads.queries} heads of queries and {heads.keys} of "
                f"keys, each of {heads.width}, which make {features}"
            )
    if heads.queries % heads.keys or (names.fused and heads.keys != heads.queries):
        raise UnsupportedError(
            f"{where}: {heads.queries} heads of queries with {heads.keys} of keys"
            f"{' in one product' if names.fused else ''} are not computed"
        )
    for group in (names.into_attention, names.into_feed_forward):
        with_bias = [path for path in group if getattr(layer.get_submodule(path), "bias", None) is not None]
        if len(with_bias) not in (0, len(group)):
            raise UnsupportedError(f"{where}: of {', '.join(group)} only {', '.join(with_bias)} have a bias")


def dropout_after(module: nn.Module, path: str) -> float:
    """Return the probability of the dropout that follows the linear layer at `path`; 0.0 where there is none.

    It is the `resid_dropout`, `residual_dropout` or `dropout`, a module or a number, of the module that holds the
    linear layer.
    """
    beside = module.get_submodule(path.rpartition(".")[0])
    return _probability(beside, "resid_dropout", "residual_dropout", "dropout")


def dropout_of(module: nn.Module, path: str) -> float:
    """Return the probability of the dropout module at `path`; 0.0 for ""."""
    return float(module.get_submodule(path).p) if path else 0.0


def dropout_in_attention(layer: nn.Module, names: LayerMap) -> float:
    """Return the probability with which a layer drops weights of attention; 0.0 where it says none.

    It is the `attention_dropout` or `attn_dropout`, a module or a number, of the module with the layer `out`.
    """
    return _probability(
        layer.get_submodule(names.out.rpartition(".")[0]), "attention_dropout", "attn_dropout"
    )


def check_read(what: str, now: float, read: float) -> None:
    """Raise UnsupportedError, whose text begins with `what`, unless a dropout's probability `now` is still `read`.

    `read` is the probability that `parallelize` has read.
    """
    if now != read:
        raise UnsupportedError(
            f"{what} was set to {now:g} after parallelize, which has read {read:g}: set it before"
        )


def check_mode(what: str, dropout: nn.Module, owner: nn.Module) -> None:
    """Raise UnsupportedError, whose text begins with `what`, where `dropout` and `owner` are in different modes.

    One is then in training mode and the other in evaluation. A dropout of probability 0 may be in either.
    """
    if dropout.training != owner.training and dropout.p:
        raise UnsupportedError(
            f"{what} is {'on' if dropout.training else 'off'} by train() or eval() of its own, and follows the "
            f"mode of all {type(owner).__name__}: set its p before parallelize, and call train() or eval() of that"
        )


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
    """Yield the names of the modules of a model that have parameters of their own and are not in `replaced`."""
    for name, child in module.named_modules():
        if name not in replaced and next(child.parameters(recurse=False), None) is not None:
            yield name
