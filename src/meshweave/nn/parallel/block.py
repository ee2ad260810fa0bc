"""One layer of a transformer on the ranks of a strategy: `ParallelBlock`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from meshweave.nn.parallel.attention import AttentionCore, Heads
from meshweave.nn.parallel.dropout import ShardDropout
from meshweave.nn.parallel.linear import LinearGroup, ParallelLinear
from meshweave.nn.parallel.norm import ParallelNorm
from meshweave.nn.parallel.parameters import fill, on_meta
from meshweave.nn.parallel.strategy import LayerStrategy
from meshweave.nn.parallel.structure import (
    LayerMap,
    check_heads,
    check_layer,
    check_mode,
    check_read,
    dropout_after,
    dropout_in_attention,
)
from meshweave.nn.parallel.units import FeatureUnits
from meshweave.nn.parallel.uses import ParameterUse, entries_of, run_opened


class ParallelBlock(nn.Module):  # type: ignore[misc]
    """A transformer layer on a strategy's ranks: attention and a feed-forward part, each with norm and residual.

    Making it allocates no weights, and `layer` stays as it is until `take`. Then the block has the modules of the
    layer under the same names; those with parameters are replaced by parallel ones.

    Args:
        layer: the layer.
        names: the names of its norms, linear layers and activation.
        heads: the numbers of heads over all ranks, and their width.
        strategy: how ranks share the layer.
        where: its name in the model, for errors.

    Attributes:
        use: gathers the parameters of the block, and sums their gradients.
        opens: whether a forward pass gathers the parameters of all modules of the block together, in one node of
            autograd. False in pipelines, where gradients of weights may be computed apart from those of
            activations, product by product: each module then gathers its own.
        is_followed: whether other layers run between the forward and the backward pass of this one. Gathered
            weights that a strategy does not keep are then freed in between.

    Raises:
        UnsupportedError: the layer has parameters that `names` leaves out, a norm that is not known, or heads or
            biases of a form that is not computed.
        LayoutError: sizes do not fit the heads or the mesh.
    """

    def __init__(
        self, layer: nn.Module, names: LayerMap, heads: Heads, strategy: LayerStrategy, where: str
    ) -> None:
        super().__init__()
        check_layer(layer, names, where)
        check_heads(layer, names, heads, where)
        self.names, self.layer_strategy, self.where = names, strategy, where
        self.opens, self.is_followed = True, True
        made: dict[str, ParallelNorm | ParallelLinear] = {}
        for path in (names.attention_norm, names.feed_forward_norm):
            made[path] = ParallelNorm(layer.get_submodule(path), strategy, f"{where}.{path}")
        self.heads = _shared(heads, strategy)
        self._reads_attention = dropout_in_attention(layer, names) == heads.dropout
        for path, options in _units(layer, names, self.heads, heads.keys).items():
            linear = on_meta(layer.get_submodule(path))
            made[path] = ParallelLinear(linear, strategy, name=f"{where}.{path}", **options)
        self._made = made
        self.use = ParameterUse([entries_of(list(made.values()))])
        self._connect(layer)

    def _connect(self, layer: nn.Module) -> None:
        names, strategy = self.names, self.layer_strategy

        def group(*paths: str) -> LinearGroup:
            return LinearGroup([cast(ParallelLinear, self._made[path]) for path in paths])

        self.into_attention, self.out_of_attention = group(*names.into_attention), group(names.out)
        self.into_feed_forward, self.out_of_feed_forward = group(*names.into_feed_forward), group(names.down)
        self.core = AttentionCore(self.heads, strategy)
        residual = strategy.roles.residual
        self.after_attention, self.after_feed_forward = (
            ShardDropout(dropout_after(layer, path), strategy, residual) for path in (names.out, names.down)
        )
        self.activation: Callable[[Tensor], Tensor] = layer.get_submodule(names.activation)
        self.attention_norm = self._made[names.attention_norm]
        self.feed_forward_norm = self._made[names.feed_forward_norm]

    def take(self, layer: nn.Module) -> None:
        """Move the modules of `layer`, of which the block was made, into it, with this rank's weight shards."""
        for name, child in layer.named_children():
            self.add_module(name, child)
        for name, buffer in layer.named_buffers(recurse=False):
            self.register_buffer(name, buffer, name not in layer._non_persistent_buffers_set)
        for path, made in self._made.items():
            fill(made, layer.get_submodule(path), f"{self.where}.{path}")
            _replace(self, path, made)
        self.training = layer.training
        self._dropouts = [child for child in self.modules() if isinstance(child, nn.Dropout)]
        del self._made

    def check_dropout(self) -> None:
        """Raise UnsupportedError where a dropout's probability or mode is not as when the block was made.

        The mode, training or evaluation, must be that of the block.
        """
        names, where = self.names, self.where
        check_read(
            f"dropout after {where}.{names.out}", dropout_after(self, names.out), self.after_attention.p
        )
        check_read(
            f"dropout after {where}.{names.down}", dropout_after(self, names.down), self.after_feed_forward.p
        )
        if self._reads_attention:
            now = dropout_in_attention(self, names)
            check_read(f"dropout of attention weights in {where}", now, self.core.dropout.p)
        for child in self._dropouts:
            check_mode(f"dropout in {where}", child, self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; modules that are known under another name already are not registered once more."""
        if name in ("activation", "attention_norm", "feed_forward_norm", "_made"):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def forward(
        self, x: Tensor, batch: int, sequence: int, rotary: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Return this rank's shard of the residual after the layer. Collective.

        Args:
            x: this rank's shard (batch, sequence, features) of the residual before it.
            batch, sequence: global sizes: the number of sequences, and the tokens of each.
            rotary: cosines and sines, each (1, positions, head width), of the positions that this rank's
                attention has; None without rotary positions.
        """
        if not self.opens or self.layer_strategy.is_alone or torch.compiler.is_compiling():
            return self._computed(x, batch, sequence, rotary)
        return run_opened(
            self.use,
            lambda: self._computed(x, batch, sequence, rotary),
            frees=not self.layer_strategy.roles.keeps_weights,
            frees_now=self.is_followed,
        )

    def _computed(self, x: Tensor, batch: int, sequence: int, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        normal = self.attention_norm(x, batch, sequence)
        q, k, v = self.into_attention(normal, batch, sequence)
        heads = self.core(q, k, v, rotary, batch, sequence, self.training)
        (out,) = self.out_of_attention(heads, batch, sequence)
        x = x + self.after_attention(out, self.training)
        normal = self.feed_forward_norm(x, batch, sequence)
        first, *rest = self.into_feed_forward(normal, batch, sequence)
        inner = self.activation(first)
        if rest:
            inner = inner * rest[0]
        (out,) = self.out_of_feed_forward(inner, batch, sequence)
        return x + self.after_feed_forward(out, self.training)


def _replace(module: nn.Module, path: str, new: nn.Module) -> None:
    owner, _, name = path.rpartition(".")
    setattr(module.get_submodule(owner), name, new)


def _units(layer: nn.Module, names: LayerMap, heads: Heads, key_heads: int) -> dict[str, dict[str, Any]]:
    """Return per linear layer the options of its `ParallelLinear`: place, units of inner features, fused parts.

    Args:
        heads: as they are shared; `key_heads` heads of keys and values are there in fact.
    """
    features = int(layer.get_submodule(names.down).weight.shape[1])
    of_features, of_heads = FeatureUnits(features), FeatureUnits(heads.keys)
    sizes: dict[str, dict[str, Any]] = {names.out: {"place": "out", "units": of_heads, "is_attention": True}}
    for path in names.into_attention:
        weight_count = key_heads if path in (names.key, names.value) else None
        units = replace(of_heads, weight_count=weight_count, parts=3 if path == names.fused else 1)
        sizes[path] = {"place": "in", "units": units, "is_attention": True}
    sizes |= {path: {"place": "in", "units": of_features} for path in names.into_feed_forward}
    sizes[names.down] = {"place": "out", "units": of_features}
    return sizes


def _shared(heads: Heads, strategy: LayerStrategy) -> Heads:
    """Return heads with copies of those of keys and values, where ranks then share all of them evenly."""
    axes = zip(strategy.roles.core(True), strategy.mesh.shape, strict=True)
    ranks = math.prod(size for dim, size in axes if dim == "inner")
    copies = math.lcm(heads.keys, ranks)
    if heads.keys % ranks and heads.queries % copies == 0:
        return replace(heads, keys=copies)
    return heads
