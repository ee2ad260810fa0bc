"""The parts of a model of transformers, read off a trace of it, without lists of names for families of models.

A linear layer whose operand comes of the residual alone enters the inner features; one whose operand comes through
another linear layer leaves them. Which columns a head reads, derivatives say. What has another form is refused by
name, and what this takes a model for is proved by `mw.prove` before it is trained.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshweave.base.errors import UnsupportedError
from meshweave.nn.hosted.columns import feature_parts, head_columns
from meshweave.nn.hosted.expert_parts import experts_part, is_experts
from meshweave.nn.hosted.latent import latents_of
from meshweave.nn.hosted.parts import (
    Anatomy,
    AttentionPart,
    InnerPart,
    LayerAnatomy,
    LinearPart,
    ModelNames,
    names_of,
    shared_depth,
)
from meshweave.nn.hosted.readings import (
    buffers_of,
    heads_in,
    is_matrix,
    is_norm_before,
    norm_kind,
    scale_of,
    shifts_labels,
    wide_linear,
)
from meshweave.nn.hosted.trace import FlowTrace, ModuleCall, is_norm, traced
from meshweave.nn.parallel.linear import is_transposed
from meshweave.nn.parallel.norm import NormKind
from meshweave.nn.prove.reduced import kinds_of, reduced

_TOKENS = (2, 12)
_WORDS = 32


def anatomy_of(module: nn.Module, device: torch.device) -> Anatomy:
    """Return the parts of a model, read off a forward pass of a reduced copy on `device`.

    The copy has few words, and one layer of each kind. Raises UnsupportedError, with the name of the module, for
    one of an unknown form.
    """
    names: Any = names_of(module)
    kinds = kinds_of(module, names)
    chosen = sorted(set(kinds))
    copy = reduced(
        module,
        names,
        chosen,
        words=_WORDS,
        sequence=_TOKENS[1],
        binds=(),
        device=device,
        dtype=torch.float64,
    ).requires_grad_(True)  # frozen or not: the graph of autograd says what flows where
    for child in copy.modules():
        if getattr(child, "gradient_checkpointing", False):
            child.gradient_checkpointing = False  # it hides from derivatives what they are of
    generator = torch.Generator().manual_seed(5)
    words = int(copy.get_submodule(names.embedding).weight.shape[0])
    tokens = torch.randint(0, words, _TOKENS, generator=generator).to(device)
    trace = traced(copy, names.layers, tokens)
    reader = AnatomyReader(copy, names, trace, len(chosen))
    reader.read()
    at = {number: place for place, number in enumerate(chosen)}
    return Anatomy(
        names,
        [reader.layers[at[kind]] for kind in kinds],
        reader.norms,
        tuple(reader.tables),
        reader.scale,
        frozenset(reader.norms_before),
        frozenset(reader.norms_twice),
        reader.ends,
        shifts_labels(copy, tokens),
        buffers_of(module, copy, names.layers, [at[kind] for kind in kinds]),
    )


class AnatomyReader:
    """Tells what each module of a model does, from a trace of one forward pass.

    Args:
        model: the reduced copy that was traced.
        names: the names of its embedding, list of layers, and head.
        trace: its calls, in order.
        count: the number of its layers.

    Attributes:
        layers: the parts of each of the `count` layers of the model that was traced.
        norms: for norms outside of layers, by path, what they compute, or why that is not known.
        tables: the embeddings beside that of tokens, such as learned positions.
        scale: what the embedding of tokens is multiplied by.
        residual: the paths of modules whose results have the features of the residual.
        norms_before: norms before the first layer.
        norms_twice: norms that are called more than once.
        ends: other modules outside of layers, and whether each comes before the first layer.
    """

    def __init__(self, model: nn.Module, names: ModelNames, trace: FlowTrace, count: int) -> None:
        self.model, self.names, self.trace = model, names, trace
        self.prefixes = [f"{names.layers}.{number}." for number in range(count)]
        self.layers = [LayerAnatomy() for _ in range(count)]
        self.norms: dict[str, NormKind | str] = {}
        self.tables: list[str] = []
        self.scale = 1.0
        self.calls: dict[str, ModuleCall] = {}
        self.residual = {prefix[:-1] for prefix in self.prefixes}
        self.norms_before: set[str] = set()
        self.norms_twice: set[str] = set()
        self.ends: dict[str, bool] = {}
        self.latents = latents_of(trace)
        experts = [call.path for call in trace.calls if is_experts(call.module)]
        self.routed = {each for each in self.prefixes if any(path.startswith(each) for path in experts)}

    def read(self) -> None:
        """Fill the attributes, from the calls in their order, then from which linear layers lead to which.

        Raises UnsupportedError, which names the module, for a module that is called twice (norms outside of layers
        may be), a layer that is not called, a result that no linear layer adds to the residual, and unknown
        parameters.
        """
        for call in self.trace.calls:
            if call.path in self.calls and call.path in self.norms and call.sources <= self.residual:
                self.norms_twice.add(call.path)
                continue
            if call.path in self.calls:
                raise UnsupportedError(
                    f"{call.path} is called twice in a forward pass, which is not computed"
                )
            self.calls[call.path] = call
            self._sort(call)
        for prefix, layer in zip(self.prefixes, self.layers, strict=True):
            if prefix[:-1] not in self.trace.layer_sources:
                raise UnsupportedError(f"{prefix[:-1]} is not called in a forward pass of tokens")
            self._read_rows(prefix, layer)
            self._check_called(prefix, layer)
            stray = self.trace.layer_sources[prefix[:-1]] - self.residual
            if stray:
                raise UnsupportedError(
                    f"{', '.join(sorted(stray))}: what it computes is added to the residual by no linear layer "
                    "that leaves the inner features"
                )
            self._read_own(prefix, layer)
            layer.results = self.trace.layer_results[prefix[:-1]]
            self._read_layer(prefix, layer)
            self._read_after(prefix, layer)
            strange = [
                path for path in layer.own if path not in [part.path for part in layer.attention] or not path
            ]
            if strange and not layer.experts:
                raise UnsupportedError(
                    f"{prefix}{strange[0]} has parameters of its own, {layer.own[strange[0]][0]}, and is no "
                    "attention"
                )

    def _sort(self, call: ModuleCall) -> None:
        prefix = next((each for each in self.prefixes if call.path.startswith(each)), "")
        layer = self.layers[self.prefixes.index(prefix)] if prefix else None
        name = call.path[len(prefix) :]
        if call.path == self.names.embedding:
            self.scale = scale_of(call, self._given(call))
        elif call.path == self.names.head:
            self._require_linear(call)
            return
        elif call.operand is None or (isinstance(call.module, nn.Embedding) and layer is None):
            if layer is not None or call.result is None:
                raise UnsupportedError(
                    f"{call.path}: {type(call.module).__name__} is given no row of numbers"
                )
            self.tables.append(call.path)
        elif call.sources <= self.residual and is_norm(call.module):
            (self.norms if layer is None else layer.norms)[name] = norm_kind(call)
            if layer is None and not any(path.startswith(self.prefixes[0]) for path in self.calls):
                self.norms_before.add(name)
        elif layer is None:
            if not call.sources <= self.residual or list(call.module.children()):
                raise UnsupportedError(
                    f"{call.path}: {type(call.module).__name__} outside of layers computes on more than the "
                    "residual"
                )
            self.ends[name] = not any(path.startswith(self.prefixes[0]) for path in self.calls)
        elif (is_residual := self._sort_apart(call, layer, prefix)) is not None:
            if not is_residual:
                return
        elif is_matrix(call.module):
            self._require_linear(call)
            enters = call.sources <= self.residual
            layer.linears[name] = LinearPart(name, enters, False)
            if enters:
                return
        else:
            if call.sources <= self.residual:
                raise UnsupportedError(
                    f"{call.path}: {type(call.module).__name__} computes with parameters of its own on the "
                    "residual"
                )
            return  # of inner features; its result is, too
        self.residual.add(call.path)

    def _sort_apart(self, call: ModuleCall, layer: LayerAnatomy, prefix: str) -> bool | None:
        """Sort what is of experts or latent attention; return whether it makes the residual, None for others."""
        name, reads_rows, kind = (
            call.path[len(prefix) :],
            call.sources <= self.residual,
            type(call.module).__name__,
        )
        if call.path in self.latents.between:
            layer.latent_between.append(name)
            return False
        if call.path in self.latents.into | self.latents.out:
            self._require_linear(call)
            if call.path in self.latents.into:
                layer.latent_into.append(name)
            else:
                layer.latent_out.append(name)
                layer.linears[name] = LinearPart(name, True, True)
            return False
        if is_experts(call.module):
            if call.made is None or not reads_rows:
                raise UnsupportedError(f"{call.path}: {kind} has experts that make no rows of the residual")
            layer.experts.append(experts_part(name, call.module, call.given, call.made))
            return True
        is_added = call.path in self.trace.layer_sources[prefix[:-1]]
        if reads_rows and (
            call.result is None or (prefix in self.routed and (is_added or not is_matrix(call.module)))
        ):
            layer.rows.append(name)
            return is_added
        return None

    def _given(self, call: ModuleCall) -> Tensor:
        return call.module.weight.detach()

    def _require_linear(self, call: ModuleCall) -> None:
        """Raise UnsupportedError where a module computes something else than a linear layer."""
        weight = call.module.weight.t() if is_transposed(call.module) else call.module.weight
        if call.operand is not None and call.made is not None and call.operand.shape[-1] == weight.shape[1]:
            with torch.no_grad():
                wanted = nn.functional.linear(call.operand, weight, getattr(call.module, "bias", None))
            if wanted.shape == call.made.shape and torch.allclose(wanted, call.made, rtol=1e-4, atol=1e-5):
                return
        raise UnsupportedError(f"{call.path}: {type(call.module).__name__} is no linear layer that is known")

    def _read_rows(self, prefix: str, layer: LayerAnatomy) -> None:
        """Read which linear layers of a routed layer are routers or gates of rows: none that leaves reads them."""
        if layer.rows and not layer.experts:
            kind = type(self.model.get_submodule(f"{prefix}{layer.rows[0]}")).__name__
            raise UnsupportedError(
                f"{prefix}{layer.rows[0]}: {kind} returns several tensors, and there are no experts to choose"
            )
        if not layer.experts:
            return
        calls = {path[len(prefix) :]: call for path, call in self.calls.items() if path.startswith(prefix)}
        read = {
            path[len(prefix) :]
            for call in calls.values()
            for path in call.sources
            if call.path[len(prefix) :] in layer.linears or not is_matrix(call.module)
        }
        for name, part in list(layer.linears.items()):
            if part.reads_residual and name not in read:
                del layer.linears[name]
                layer.rows.append(name)
                self.residual.add(f"{prefix}{name}")

    # --- a layer --------------------------------------------------------------------------------------------

    def _read_layer(self, prefix: str, layer: LayerAnatomy) -> None:
        calls = {path[len(prefix) :]: call for path, call in self.calls.items() if path.startswith(prefix)}
        taken: dict[str, str] = {}
        for name, part in list(layer.linears.items()):
            if part.reads_residual:
                continue
            into, through = self._into(calls, prefix, name)
            if not into:
                raise UnsupportedError(f"{prefix}{name}: no linear layer leads to it")
            for each in into:
                if each in taken:
                    raise UnsupportedError(f"{prefix}{each} leads to both {taken[each]} and {name}")
                taken[each] = name
            self._read_half(calls, prefix, layer, name, into, through)
        idle = [name for name, part in layer.linears.items() if part.reads_residual and name not in taken]
        if idle:
            raise UnsupportedError(
                f"{prefix}{idle[0]} leads to no linear layer that leaves the inner features"
            )
        self._group(calls, layer, taken)

    def _check_called(self, prefix: str, layer: LayerAnatomy) -> None:
        """Raise UnsupportedError where code computes with a parameter of a module that it does not call."""
        whole = self.model.get_submodule(prefix[:-1])
        paths = {each: path.rpartition(".") for path, each in whole.named_parameters()}
        called = [call for path, call in self.calls.items() if path.startswith(prefix) and not layer.experts]
        for operand in (call.operand for call in called if call.operand is not None):
            for path, _, name in (paths[each] for each in self.trace.parameters(operand) if each in paths):
                module = whole.get_submodule(path)
                if not list(module.children()):
                    raise UnsupportedError(
                        f"{prefix}{path}: {type(module).__name__} is not called, and its {name} is computed with, "
                        "which is not supported: let the code call the module"
                    )

    def _read_own(self, prefix: str, layer: LayerAnatomy) -> None:
        """Read the parameters of modules that have others in them: those of attention may be one for each head."""
        whole = self.model.get_submodule(prefix[:-1])
        for path, module in whole.named_modules():
            if is_experts(module):
                continue
            if list(module.children()) and (own := [*dict(module.named_parameters(recurse=False))]):
                layer.own[path] = tuple(own)

    def _read_after(self, prefix: str, layer: LayerAnatomy) -> None:
        """Read which of these parameters come after the heads: they are added to the residual."""
        for part in layer.attention:
            module = self.model.get_submodule(f"{prefix}{part.path}")
            read = self.trace.parameters(self.calls[f"{prefix}{part.leaving}"].operand)
            for name in layer.own.get(part.path, ()):
                if module._parameters[name] not in read:
                    layer.after.add((part.path, name))

    def _into(self, calls: dict[str, ModuleCall], prefix: str, name: str) -> tuple[list[str], list[str]]:
        """Return the linear layers that lead to one, and the modules between."""
        into, through, pending = [], [], list(calls[name].sources)
        while pending:
            path = pending.pop()
            if path in self.residual or path in self.latents.into:
                continue
            own = path[len(prefix) :]
            if not path.startswith(prefix):
                raise UnsupportedError(f"{prefix}{name} reads {path} of another layer")
            if is_matrix(calls[own].module):
                if own not in into:
                    into.append(own)
            elif own not in through:
                through.append(own)
                pending += calls[own].sources
        order = list(calls)
        return sorted(into, key=order.index), sorted(through, key=order.index)

    def _read_half(
        self,
        calls: dict[str, ModuleCall],
        prefix: str,
        layer: LayerAnatomy,
        name: str,
        into: list[str],
        through: list[str],
    ) -> None:
        is_attention = any(calls[each].attended for each in (name, *through))
        points = {each: calls[each].result for each in into}
        operand: Any = calls[name].operand
        for each in through:
            wide = wide_linear(calls, each, into, prefix, self.residual)
            if wide == name or (wide is None and is_norm_before(calls[each], calls[name])):
                operand, wide = calls[each].operand, ""
            elif wide is not None:
                points[wide] = calls[each].result
            if wide is not None:
                layer.inner_norms[each] = norm_kind(calls[each])
            layer.inner.append(InnerPart(each, is_attention, wide is not None, name, wide or ""))
        layer.linears[name] = LinearPart(name, False, is_attention)
        if is_attention:
            owner = name.rpartition(".")[0]
            for each in into:  # linear layers may have owners of their own
                owner = ".".join(owner.split(".")[: shared_depth(owner, each)])
            heads = heads_in(self.model.get_submodule(f"{prefix}{owner}".rstrip(".")), self.model, operand)
            columns = head_columns(operand, points, heads, f"{prefix}{owner}")
            layer.attention.append(AttentionPart(owner, name, columns))
            for each in into:
                layer.linears[each] = LinearPart(each, True, True, leaving=name)
            return
        layer.features[name] = int(operand.shape[-1])
        for each, (parts, unit) in feature_parts(operand, points, f"{prefix}{name}").items():
            layer.linears[each] = LinearPart(each, True, False, parts, unit, name)

    def _group(self, calls: dict[str, ModuleCall], layer: LayerAnatomy, taken: dict[str, str]) -> None:
        groups: dict[tuple[int, str], list[str]] = {}
        for name, part in layer.linears.items():
            if name in layer.latent_out:
                continue
            key = (id(calls[name].operand), taken[name]) if part.reads_residual else (id(name), "")
            groups.setdefault(key, []).append(name)
        layer.groups = [tuple(group) for group in groups.values()]
