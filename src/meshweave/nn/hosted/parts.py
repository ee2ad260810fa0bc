"""The parts of a model of transformers: what its linear layers, norms, heads and tables are."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from meshweave.nn.hosted.columns import HeadColumns
from meshweave.nn.hosted.expert_parts import ExpertsPart
from meshweave.nn.parallel.norm import NormKind


@dataclass(frozen=True)
class ModelNames:
    """The names of modules that every causal language model has.

    Attributes:
        embedding, layers, head: as `ModelMap` has them.
        positions: none: they are computed with by the model's own code.
    """

    embedding: str
    layers: str
    head: str
    positions: str = ""


@dataclass(frozen=True)
class LinearPart:
    """A linear layer of a layer.

    Attributes:
        path: its name in the layer.
        enters: whether it enters the inner features, or leaves them.
        is_attention: whether these are heads.
        parts, unit: of the columns that enter a feed-forward part: matrices side by side, and columns in a run.
        leaving: of one that enters, the linear layer that it leads to.
    """

    path: str
    enters: bool
    is_attention: bool
    parts: int = 1
    unit: int = 1
    leaving: str = ""


@dataclass(frozen=True)
class InnerPart:
    """A module with parameters between linear layers, such as a norm of queries.

    Attributes:
        path: its name in the layer.
        is_attention: whether it is of heads.
        is_wide: whether it is a norm over the features of all heads, or of the feed-forward part.
        leaving: the linear layer that it leads to.
        columns: the linear layer whose columns its features are; "" for what enters the one that leaves.
    """

    path: str
    is_attention: bool
    is_wide: bool
    leaving: str
    columns: str = ""


@dataclass(frozen=True)
class AttentionPart:
    """The heads of a module of attention.

    Attributes:
        path: the name of the module in the layer.
        leaving: the linear layer after attention.
        columns: which columns of which linear layer each head reads.
    """

    path: str
    leaving: str
    columns: HeadColumns


@dataclass
class LayerAnatomy:
    """The parts of a layer; names are those in the layer.

    Attributes:
        groups: linear layers that have an operand in common.
        norms: norms of the residual, and what they compute or why that is not known.
        inner_norms: the same of norms over all inner features.
        features: of the feed-forward parts, by the linear layer that leaves them.
        own: names of parameters of modules that have others in them.
        after: those of them that what leaves the heads is computed with.
        experts: modules of experts.
        rows: in a layer with experts, modules that compute on whole rows of the residual, such as routers.
        latent_into, latent_between, latent_out: of latent attention, the linear layers that make latent features,
            the modules after them, and the linear layers that heads read.
        results: of how many the tuple is that the layer returns; 0 where it returns the residual alone.
    """

    linears: dict[str, LinearPart] = field(default_factory=dict)
    groups: list[tuple[str, ...]] = field(default_factory=list)
    norms: dict[str, NormKind | str] = field(default_factory=dict)
    inner_norms: dict[str, NormKind | str] = field(default_factory=dict)
    inner: list[InnerPart] = field(default_factory=list)
    attention: list[AttentionPart] = field(default_factory=list)
    features: dict[str, int] = field(default_factory=dict)
    experts: list[ExpertsPart] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    latent_into: list[str] = field(default_factory=list)
    latent_between: list[str] = field(default_factory=list)
    latent_out: list[str] = field(default_factory=list)
    results: int = 0
    own: dict[str, tuple[str, ...]] = field(default_factory=dict)
    after: set[tuple[str, str]] = field(default_factory=set)


@dataclass(frozen=True)
class Anatomy:
    """The parts of a model.

    Attributes:
        names: of what every model has.
        layers: those of each layer.
        norms: of the residual, outside of layers.
        tables: names of modules outside of layers that make rows for the residual.
        scale: what rows of the embedding are multiplied by.
        norms_before: those of the norms that come before the layers.
        buffers: of modules, by name, as their classes compute them.
        shifts_labels: whether the loss of labels is that of each token's follower.
        norms_twice: those that are called more than once, as before and after the layers.
        ends: names of other modules outside of layers that compute on the residual, and whether before them.
    """

    names: ModelNames
    layers: list[LayerAnatomy]
    norms: dict[str, NormKind | str]
    tables: tuple[str, ...]
    scale: float
    norms_before: frozenset[str]
    norms_twice: frozenset[str]
    ends: dict[str, bool]
    shifts_labels: bool
    buffers: dict[tuple[str, str], Tensor]
