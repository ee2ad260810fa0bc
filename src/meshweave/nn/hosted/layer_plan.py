"""What stands for the modules of a layer on the ranks of a strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.algorithms.block.roles import Side
from meshweave.base.errors import UnsupportedError
from meshweave.nn.hosted.experts import HostedExperts
from meshweave.nn.hosted.heads import local_heads, take_heads
from meshweave.nn.hosted.latent import HostedLatent
from meshweave.nn.hosted.linears import HostedGroup, HostedLinear, attention_units, units_of
from meshweave.nn.hosted.own_modules import OwnModule, OwnParameters, hosted_norm
from meshweave.nn.hosted.parts import AttentionPart, InnerPart, LayerAnatomy
from meshweave.nn.hosted.residual import Tokens
from meshweave.nn.hosted.routers import HostedRouter, check_noise
from meshweave.nn.parallel.parameters import on_meta
from meshweave.nn.parallel.units import FeatureUnits
from meshweave.nn.parallel.uses import ParameterUse, entries_of


class LayerReplacements:
    """Plans the modules that take the places of a layer's own.

    Args:
        layer: the layer of the model.
        parts: what a trace shows of the layer.
        where: its name in the model.
        new: `plan` adds the replacements to it, by the names of the modules in the model.
        then: `plan` adds functions to it that make further changes once the modules are replaced.
        tokens: the tokens of the step that runs.
        model: the model, for its configuration.
    """

    def __init__(
        self,
        layer: nn.Module,
        parts: LayerAnatomy,
        where: str,
        new: dict[str, nn.Module],
        then: list[Callable[[], None]],
        tokens: Tokens,
        model: nn.Module,
    ) -> None:
        self.config: Any = getattr(model, "config", None)
        self.layer, self.parts, self.where, self.new, self.then = layer, parts, where, new, then
        self.tokens, self.roles = tokens, tokens.strategy.roles
        self.units = {
            part.path: units_of(part.columns, tokens.strategy, f"{where}.{part.path}")
            for part in parts.attention
        }
        self.shares_heads = any(dim == "inner" for dim in self.roles.core(True))

    def plan(self) -> ParameterUse:
        """Add a replacement for each module of the layer with parameters to `new`, and changes to `then`.

        Return the parameters of the replacements, which a pass through the layer gathers.

        Raises LayoutError or UnsupportedError where ranks cannot share the layer.
        """
        before, own_parameters = set(self.new), list[OwnParameters]()
        self.group_of = {path: group for group in self.parts.groups for path in group}
        self._plan_latent()
        made = {path: self._linear(path) for path in self.group_of}
        for group in self.parts.groups:
            joined = HostedGroup([made[path] for path in group])
            for linear in joined.linears:
                linear.join(joined)
        self.new |= {f"{self.where}.{path}": linear for path, linear in made.items()}
        if not made:
            raise UnsupportedError(
                f"{self.where}: a pass through the model shows none of its linear layers; layers that are left "
                "out at random, or by their number, are not computed: turn that off"
            )
        hidden = next(iter(made.values())).site.hidden
        for linear in made.values():
            if linear.site.hidden != hidden and not (linear.site.is_first or linear.is_local):
                raise UnsupportedError(
                    f"{linear.name} leads from inner features to {linear.site.hidden} others, and not to the "
                    f"{hidden} of the residual: where ranks share features, a linear layer between two others, as "
                    "of weights of low rank, is not computed"
                )
        for path, kind in self.parts.norms.items():
            name, norm = self._module(path)
            residual = self.roles.residual
            self.new[name] = hosted_norm(norm, self.tokens, name, kind, residual, Side("hidden", hidden))
        for part in self.parts.inner:
            name, module = self._module(part.path)
            dims = self.roles.core(part.is_attention)
            if part.is_wide and not self._is_of_one_head(part):
                linear = made[part.columns or part.leaving]
                side = Side("inner", linear.site.units, linear.site.unit)
                kind = self.parts.inner_norms[part.path]
                self.new[name] = hosted_norm(module, self.tokens, name, kind, dims, side)
            else:
                self.new[name] = OwnModule(module, self.tokens.strategy, name, dims, self._rows(module, part))
        if self.parts.experts:
            check_noise(self.layer, self.where)
        for path in self.parts.rows:
            name, module = self._module(path)
            self.new[name] = HostedRouter.of(module, self.tokens, name, self.config)
        for experts in self.parts.experts:
            name, module = self._module(experts.path)
            self.new[name] = HostedExperts(module, self.tokens, name, experts)
        own_parameters += self._own_of_rows()
        for own in self.parts.attention:
            owner = self.layer.get_submodule(own.path) if own.path else self.layer
            change = take_heads(owner, own.columns, self.units[own.path], self.tokens)
            if change is not None:
                self.then.append(change)
            if keys := self.parts.own.get(own.path):
                own_parameters.append(self._own_parameters(owner, own, keys))
        modules: list[Any] = [module for path, module in self.new.items() if path not in before]
        return ParameterUse([entries_of([*modules, *own_parameters])])

    def _own_parameters(self, owner: nn.Module, part: AttentionPart, keys: Sequence[str]) -> OwnParameters:
        inner = {key: owner._parameters[key] for key in keys if (part.path, key) not in self.parts.after}
        rows = self._rows_of(inner, part, 1)
        dims = {key: self.roles.core(True) if key in inner else self.roles.residual for key in keys}
        own = OwnParameters(owner, self.tokens.strategy, dims, rows)
        self.then.append(partial(self._take, owner, own))
        return own

    def _plan_latent(self) -> None:
        """Plan what stands for linear layers and norms of latent features."""
        parts, core = self.parts, self.roles.core(True)
        for path in parts.latent_into:
            name, module = self._module(path)
            self.new[name] = HostedLatent(module, self.tokens, name)
        for path in parts.latent_between:
            name, module = self._module(path)
            self.new[name] = OwnModule(module, self.tokens.strategy, name, core)
        for path in parts.latent_out:
            name, module = self._module(path)
            own = next(each for each in parts.attention if path in each.columns.of)
            first, end = local_heads(own.columns, self.units[own.path], self.tokens)
            columns = [column for head in own.columns.of[path][first:end] for column in head]
            rows = dict.fromkeys(("weight", "bias"), torch.tensor(columns))
            whole = end - first == own.columns.heads
            self.new[name] = OwnModule(module, self.tokens.strategy, name, core, None if whole else rows)

    def _own_of_rows(self) -> list[OwnParameters]:
        """Return the parameters of modules with others in them that compute on rows, such as a router's."""
        made = []
        for path, keys in self.parts.own.items():
            if path not in self.units:
                owner = self.layer.get_submodule(path)
                own = OwnParameters(owner, self.tokens.strategy, dict.fromkeys(keys, self.roles.residual), {})
                self.then.append(partial(self._take, owner, own))
                made.append(own)
        return made

    @staticmethod
    def _take(owner: Any, own: OwnParameters) -> None:
        forward = vars(owner).get("forward") or type(owner).forward.__get__(owner)
        owner.forward = partial(own.call, forward)

    def _module(self, path: str) -> tuple[str, nn.Module]:
        return f"{self.where}.{path}", on_meta(self.layer.get_submodule(path))

    def _linear(self, path: str) -> HostedLinear:
        part = self.parts.linears[path]
        name, linear = self._module(path)
        options: dict[str, Any] = {
            "place": "in" if part.reads_residual else "out",
            "is_attention": part.is_attention,
        }
        if part.is_attention:
            own = next(
                each for each in self.parts.attention if path in each.columns.of or path == each.leaving
            )
            if self.shares_heads:
                units = self.units[own.path]
                options["units"] = (
                    attention_units(own.columns, path, units) if part.reads_residual else FeatureUnits(units)
                )
            elif part.reads_residual:
                of_group = (own.columns.features[each] for each in self.group_of[path])
                options["units"] = FeatureUnits(math.gcd(*of_group))
        elif part.reads_residual:
            if part.leaving not in self.parts.features:
                raise UnsupportedError(
                    f"{name}: what it computes comes back to the residual neither by softmax attention nor by a "
                    "feed-forward part: linear attention and state spaces are not computed"
                )
            features = self.parts.features[part.leaving]
            options["units"] = FeatureUnits(features, parts=part.parts)
        return HostedLinear(linear, self.tokens, name, **options)

    def _is_of_one_head(self, part: InnerPart) -> bool:
        """Return whether a norm is over the only head of keys: ranks that share heads each have it whole."""
        if not part.is_attention or not self.shares_heads:
            return False
        columns = next(each for each in self.parts.attention if part.leaving == each.leaving).columns
        read = columns.of.get(part.columns, ())
        return columns.groups == 1 and any(len(own) == columns.features[part.columns] for own in read)

    def _rows(self, module: nn.Module, part: InnerPart) -> dict[str, Tensor]:
        """Return the rows of parameters that have one for each head, or each head of keys."""
        if not part.is_attention or not self.shares_heads:
            return {}
        own = next(each for each in self.parts.attention if part.leaving == each.leaving)
        return self._rows_of(module._parameters, own, 2)

    def _rows_of(
        self, parameters: Mapping[str, Tensor | None], own: AttentionPart, least_dims: int
    ) -> dict[str, Tensor]:
        first, end = local_heads(own.columns, self.units[own.path], self.tokens)
        rows: dict[str, Tensor] = {}
        per_key = own.columns.heads // own.columns.groups
        for name, value in parameters.items():
            if value is None or value.ndim < least_dims or end - first == own.columns.heads:
                continue
            if value.shape[0] == own.columns.heads:
                rows[name] = torch.arange(first, end)
            elif value.shape[0] == own.columns.groups:
                step = max(1, own.columns.heads // self.units[own.path])
                rows[name] = torch.arange(first, end, step) // per_key
        return rows
