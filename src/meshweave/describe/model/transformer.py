"""Decoder-only transformers: the sizes that their matrix products follow from, or their layers one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from meshweave.base.errors import DescriptionError
from meshweave.describe.model.architecture import Architecture, NotPriced
from meshweave.describe.model.architecture import Norm as NormKind
from meshweave.describe.model.dense import WHOLE, DenseForm, dense_head, dense_layer
from meshweave.describe.model.layer import LayerGraph
from meshweave.describe.model.nodes import Features, NodeWeight, Norm


@dataclass(frozen=True)
class FcLayer:
    """A fully connected layer: Y (tokens, out_features) = X (tokens, in_features) W (in, out)."""

    name: str
    in_features: int
    out_features: int


@dataclass(frozen=True)
class Transformer:
    """Sizes of a decoder-only transformer.

    Attributes:
        hidden: the hidden size, also called d_model.
        num_kv_heads: heads of keys and values; fewer than `num_heads` in grouped-query attention.
        ffn_hidden: the inner size of the FFN; a gated FFN has two matrices of that size.
        vocab_size: tokens in the vocabulary, None if the source does not state them.
        gated_ffn: whether the FFN is gated (SwiGLU and kin).
        source: where the sizes are from.
        tied_embeddings: whether input and output share one embedding table.
        architecture: what else defines it, for other software.
        not_priced: its properties that predictions of time and memory leave out.
        layers: runs of equal layers in their order, (count, layer) each, where sizes do not say what they
            are; sizes are then those of the last of them, `ffn_hidden` the inner features that a token uses.
        config: the config that these were read from, as JSON; "" where there is none.

    Raises:
        DescriptionError: a size is below 1, `num_kv_heads` does not divide `num_heads`, or `layers` are not
            `num_layers`, or begin or end in other features than `hidden`.
    """

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden: int
    vocab_size: int | None
    gated_ffn: bool
    source: str
    tied_embeddings: bool = True
    architecture: Architecture = field(default_factory=Architecture)
    not_priced: tuple[NotPriced, ...] = ()
    layers: tuple[tuple[int, LayerGraph], ...] = ()
    config: str = ""

    def __post_init__(self) -> None:
        sizes = {
            "num_layers": self.num_layers,
            "hidden": self.hidden,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "ffn_hidden": self.ffn_hidden,
            "vocab_size": 1 if self.vocab_size is None else self.vocab_size,
        }
        for key, size in sizes.items():
            if size < 1:
                raise DescriptionError(f"model {self.name}: {key} is {size}; give at least 1")
        if self.num_heads % self.num_kv_heads:
            raise DescriptionError(
                f"model {self.name}: num_kv_heads {self.num_kv_heads} does not divide "
                f"num_heads {self.num_heads}; give a divisor"
            )
        if self.layers and (count := sum(count for count, _ in self.layers)) != self.num_layers:
            raise DescriptionError(
                f"model {self.name}: runs: they have {count} layers, and num_layers is {self.num_layers}; give "
                "both the same"
            )
        ends = {graph.features[edge] for _, graph in self.layers for edge in (graph.input, graph.output)}
        if other := ends - {Features("hidden", self.hidden)}:
            raise DescriptionError(
                f"model {self.name}: a layer begins or ends in {other.pop()}, and hidden is {self.hidden}; give "
                "both the same"
            )

    @property
    def kinds(self) -> tuple[tuple[int, Transformer], ...]:
        """Return for each kind of layer (number of layers, the model with all its layers of that kind).

        Kinds are in the order of their first layers; without `layers`, those with the attention window come
        first.
        """
        if self.layers:
            counts: Counter[LayerGraph] = Counter()
            for count, graph in self.layers:
                counts[graph] += count
            alone_of = {graph: replace(self, layers=((self.num_layers, graph),)) for graph in counts}
            return tuple((count, alone_of[graph]) for graph, count in counts.items())
        own = self.architecture
        windowed = own.windowed_layers
        if own.window is None or windowed is None or windowed >= self.num_layers:
            return ((self.num_layers, self),)
        alone = replace(own, windowed_layers=None), replace(own, windowed_layers=None, window=None)
        both = windowed, self.num_layers - windowed
        return tuple(
            (count, replace(self, architecture=each)) for count, each in zip(both, alone, strict=True)
        )

    @cached_property
    def layer(self) -> LayerGraph:
        """Return the graph of a layer; of several kinds the first.

        Without `layers`, biases of products are left out.
        """
        if self.layers:
            return self.layers[0][1]
        own = self.architecture
        rotary = own.rotary_share if own.rotary_share is not None else WHOLE if self.gated_ffn else 0.0
        return dense_layer(
            self.hidden,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.ffn_hidden,
            DenseForm(
                gated=self.gated_ffn,
                norm="rms" if self.gated_ffn else "layer",
                rotary=rotary,
                window=own.window,
                post_norms=own.norms == "before and after",
                parallel=own.residual != "",
                qk_norm=bool(own.qk_norm),
                shared_norm=own.residual == "parallel with one norm",
            ),
        )

    def fc_layers(self) -> tuple[FcLayer, ...]:
        """Return the fully connected layers of one block (of several kinds the first) but those of experts.

        The projections to queries, keys and values are one layer, and so are a gated FFN's two input matrices.
        """
        return tuple(FcLayer(node.name, node.operand.size, node.result.size) for node in self.layer.linears)

    def not_priced_at(self, sequence: int) -> tuple[str, ...]:
        """Return the properties that predictions for sequences of this length leave out, a few words each."""
        return tuple(item.text for item in self.not_priced if sequence > item.beyond)

    @property
    def num_parameters(self) -> int:
        """Return the number of weights of the fully connected layers and, if the vocabulary is known, embeddings.

        Biases, norms and position embeddings (well under 1 %) are left out, unless layers are given one by one.
        """
        if self.layers:
            return self._whole(lambda weight: weight.size)
        return self.num_layers * self.layer.num_weights + self._table_parameters

    @property
    def num_active_parameters(self) -> int:
        """Return the number of weights that a token uses: all but those of experts that it is not routed to."""
        return self._whole(lambda weight: weight.active_size) if self.layers else self.num_parameters

    @property
    def is_routed(self) -> bool:
        """Return whether some layer has experts."""
        return any(graph.num_experts > 1 for _, graph in self.layers)

    @property
    def runs(self) -> tuple[tuple[int, LayerGraph], ...]:
        """Return (count, layer) of each run of equal layers in order; without `layers` of each kind."""
        return self.layers or tuple((count, kind.layer) for count, kind in self.kinds)

    @property
    def _table_parameters(self) -> int:
        return (self.vocab_size or 0) * self.hidden * (1 if self.tied_embeddings else 2)

    def _whole(self, size: Callable[[NodeWeight], int]) -> int:
        """Return the sum of a size of all parameters of the layers, and those of the ends."""
        last = dense_head(self.hidden, 1, self._norm).nodes[0].parameters
        of_layers = sum(count * sum(map(size, graph.parameters)) for count, graph in self.layers)
        return of_layers + sum(map(size, last)) + self._table_parameters

    @property
    def _norm(self) -> NormKind:
        return next(node.kind for node in self.layer.nodes if isinstance(node, Norm))
