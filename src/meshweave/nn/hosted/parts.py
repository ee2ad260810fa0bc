"""The parts of a model of transformers: what its linear layers, norms, heads and tables are."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from torch import Tensor, nn

from meshweave.base.errors import UnsupportedError
from meshweave.nn.hosted.columns import HeadColumns
from meshweave.nn.hosted.expert_parts import ExpertsPart
from meshweave.nn.parallel.norm import NormKind


@dataclass(frozen=True)
class ModelNames:
    """The names of modules that every causal language model has.

    Attributes:
        embedding: the table of words.
        layers: the list of layers.
        head: the linear layer that makes logits.
        positions: always "": the model's own code computes with positions.
    """

    embedding: str
    layers: str
    head: str
    positions: str = ""


def names_of(module: nn.Module) -> ModelNames:
    """Return the names of the embedding, the list of layers and the head of a causal language model.

    Raises UnsupportedError where one of them is not there, or embedding or head have modules in them.
    """
    kind, config = type(module).__name__, getattr(module, "config", None)
    config = getattr(config, "get_text_config", lambda: config)()
    paths = {id(child): path for path, child in reversed(list(module.named_modules()))}
    ends = []
    for word, method in (("embedding", "get_input_embeddings"), ("head", "get_output_embeddings")):
        end = getattr(module, method, lambda: None)()
        if end is None or id(end) not in paths:
            raise UnsupportedError(f"{kind} does not say which module is its {word} ({method})")
        if inner := [name for name, _ in end.named_children()]:
            raise UnsupportedError(
                f"{paths[id(end)]}: {type(end).__name__} has modules beside its weight ({', '.join(inner)}), "
                "which are not computed"
            )
        ends.append(paths[id(end)])
    count = getattr(config, "num_hidden_layers", None)
    lists = [
        (shared_depth(path, ends[0]), sum(p.numel() for p in child.parameters()), path)
        for path, child in module.named_modules()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    if not lists:
        raise UnsupportedError(f"{kind} has no nn.ModuleList of its {count} layers")
    return ModelNames(ends[0], max(lists)[2], ends[1])


def shared_depth(path: str, other: str) -> int:
    """Return how many leading parts two dotted names have in common: "a.b.c" and "a.b.d" -> 2."""
    pairs = zip(path.split("."), other.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@dataclass(frozen=True)
class LinearPart:
    """A linear layer of a layer.

    Attributes:
        path: its name in the layer.
        reads_residual: whether it makes inner features, and does not lead from them back to the residual.
        is_attention: whether its inner features are those of heads, and not of a feed-forward part.
        parts, unit: of one that makes inner features of a feed-forward part: how many matrices lie side by side
            in its columns, and how many consecutive columns an inner feature has in each.
        leaving: of one that makes inner features, the path of the linear layer that leads from them back to the
            residual; "" for others.
    """

    path: str
    reads_residual: bool
    is_attention: bool
    parts: int = 1
    unit: int = 1
    leaving: str = ""


@dataclass(frozen=True)
class InnerPart:
    """A module with parameters between linear layers, such as a norm of queries.

    Attributes:
        path: its name in the layer.
        is_attention: whether it is between linear layers of attention, and not of a feed-forward part.
        is_wide: whether it is a norm over all inner features: those of all heads, or of the feed-forward part.
        leaving: the linear layer that it leads to.
        columns: of a wide norm the linear layer whose result it normalises; "" where it normalises the operand of
            `leaving`.
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
    """The parts of a layer; modules are named by their paths in the layer.

    Attributes:
        linears: linear layers, by path.
        groups: linear layers that have an operand in common.
        norms: norms of the residual, and what they compute or why that is not known.
        inner_norms: the same of norms over all inner features.
        inner: other modules with parameters between linear layers, and these norms.
        attention: modules of attention, with the columns that their heads read.
        features: how many inner features each feed-forward part has, by the linear layer that leaves them.
        own: for modules that have other modules and parameters of their own, the names of these parameters.
        after: (path, name) of those of `own` in attention that are used after the heads, on the residual.
        experts: modules of experts.
        rows: in a layer with experts, modules that compute on whole rows of the residual, such as routers.
        latent_into, latent_between, latent_out: of latent attention, the linear layers that make latent features,
            the modules after them, and the linear layers that heads read.
        results: the length of the tuple that the layer returns; 0 where it returns the residual alone.
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
        names: those of embedding, list of layers, and head.
        layers: the parts of each layer.
        norms: norms of the residual outside of layers, and what they compute or why that is not known.
        tables: names of modules outside of layers that make rows for the residual.
        scale: what rows of the embedding are multiplied by.
        norms_before: the names of those norms that come before the layers.
        norms_twice: the names of those norms that are called more than once, as before and after the layers.
        ends: other modules outside of layers that compute on the residual, and whether each comes before layers.
        shifts_labels: whether the model's own forward shifts labels by one.
        buffers: values by (module, buffer) for buffers on the meta device, as the classes of modules compute them.
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
