"""Modules of a model that run by their own code on what a rank has, with parameters that ranks share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.algorithms.block.roles import AxisDims, Dim, Side
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.nn.hosted.residual import Tokens, as_plain
from meshweave.nn.parallel.buckets import KeptParameter
from meshweave.nn.parallel.embedding import ParallelEmbedding
from meshweave.nn.parallel.moves import terms
from meshweave.nn.parallel.norm import NormKind, ParallelNorm, be_instance_of
from meshweave.nn.parallel.parameters import ParameterLayout
from meshweave.nn.parallel.strategy import LayerStrategy
from meshweave.nn.parallel.uses import ParameterUse, entries_of

_SPLITS: tuple[Dim, ...] = ("batch", "sequence", "hidden", "inner")


def without_parameters(module: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return (copy, parameters): a shallow copy of a module without its own parameters, and these by name.

    A parameter that is None in the module, as a bias left out, is an attribute None of the copy.
    """
    own = copy.copy(module)
    own._parameters = {}
    present = {key: whole for key, whole in module._parameters.items() if whole is not None}
    own.__dict__.update(dict.fromkeys(module._parameters.keys() - present.keys()))
    return own, present


def kept_whole(strategy: LayerStrategy, whole: Tensor, dims: AxisDims) -> KeptParameter:
    """Return the `KeptParameter` of a parameter that every rank keeps whole.

    Its gradient is summed along the mesh axes that split the tensor it is computed with.

    Args:
        strategy: the strategy on its ranks.
        whole: the parameter.
        dims: for each mesh axis the dim of that tensor that it splits, or "".
    """
    replicated = strategy.roles.replicated
    layout = ParameterLayout(tuple(Side("", int(size)) for size in whole.shape), replicated)
    return KeptParameter(strategy, layout, replicated, terms(dims, _SPLITS))


class OwnSettings(nn.Module):  # type: ignore[misc]
    """A module that runs the code of another, `_own`, and has its settings: that code sees what is set here."""

    _own: Any

    def take_settings(self, own: nn.Module) -> None:
        """Run the code of `own` from now on. All its attributes that this module has not are its settings."""
        object.__setattr__(self, "_own", own)
        names = vars(own).keys() - vars(self).keys() - self._parameters.keys()
        self.__dict__.update({name: vars(own)[name] for name in names}, _settings=names)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, also for the module's own code where that has one of this name."""
        super().__setattr__(name, value)
        if name in vars(self).get("_settings", ()):
            self._own.__dict__[name] = value


class OwnModule(OwnSettings):
    """A module that runs its own code on a rank's part of its arguments; every rank has its whole parameters.

    Args:
        module: the module.
        strategy: the strategy on its ranks.
        name: that of the module in the model.
        dims: for each mesh axis the dim that it splits of the module's argument, or ""; gradients are summed along
            axes that split one.
        rows: {parameter: indices of the rows of this rank's heads}, for parameters with a row for each head.

    Raises UnsupportedError where the module has modules in it.
    """

    def __init__(
        self,
        module: nn.Module,
        strategy: LayerStrategy,
        name: str,
        dims: AxisDims,
        rows: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        if list(module.children()):
            raise UnsupportedError(f"{name}: {type(module).__name__} has modules beside its parameters")
        self.layer_strategy, self._rows = strategy, dict(rows or {})
        own, parameters = without_parameters(module)
        self._buffers = module._buffers  # one for both
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self.layouts: dict[str, ParameterLayout] = {}
        self.kept: dict[str, KeptParameter] = {}
        self.opened: dict[str, Tensor] = {}
        for key, whole in parameters.items():
            self.kept[key] = kept_whole(strategy, whole, dims)
            self.layouts[key] = self.kept[key].layout
            setattr(self, key, self.layouts[key].distribute(name, whole, strategy))
        self._use = ParameterUse([entries_of([self])])
        self.take_settings(own)

    def forward(self, *given: Any, **named: Any) -> Any:
        """Return what the module's own code returns for `given` and `named`, this rank's parts of its arguments.

        The code sees whole parameters; of parameters with a row for each head it sees the rows of this rank's
        heads.
        """
        own = self._own
        own.training = self.training
        for key, value in zip(self.kept, self._use(), strict=True):
            own.__dict__[key] = value if key not in self._rows else value[self._rows[key].to(value.device)]
        try:
            return type(own).forward(own, *given, **named)
        finally:
            for key in self.kept:
                own.__dict__[key] = None

    def extra_repr(self) -> str:
        """Return the name of the class whose code it runs."""
        return type(self._own).__name__


class OwnParameters:
    """The own parameters of a module that has other modules in it; its code sees them for the time of a call.

    Args:
        module: the module.
        strategy: the strategy on its ranks.
        dims: for each parameter, for each mesh axis the dim that it splits of what the parameter is computed with,
            or ""; gradients are summed along axes that split one.
        rows: {parameter: indices of the rows of this rank's heads}, for parameters with a row for each head.
    """

    def __init__(
        self,
        module: nn.Module,
        strategy: LayerStrategy,
        dims: Mapping[str, AxisDims],
        rows: Mapping[str, Tensor],
    ) -> None:
        self._module, self._rows = module, rows
        self.opened: dict[str, Tensor] = {}
        self.kept = {key: kept_whole(strategy, module._parameters[key], lies) for key, lies in dims.items()}
        self._use = ParameterUse([entries_of([self])])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self.kept:
            raise AttributeError(name)
        return self._module._parameters[name]

    def call(self, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Return what `forward` returns for `given` and `named`, with the own parameters as plain tensors.

        They are gathered whole, or with the rows of this rank's heads. Collective where they are gathered.
        """
        own = self._module.__dict__
        for key, value in zip(self.kept, self._use(), strict=True):
            own[key] = value[self._rows[key].to(value.device)] if key in self._rows else value
        try:
            return forward(*given, **named)
        finally:
            for key in self.kept:
                del own[key]


class OwnTable(OwnModule):
    """A module that makes rows of the residual by positions, such as learned ones; a rank takes its part.

    A call raises LayoutError, with the module's name, for a position that it has no row for.
    """

    def __init__(self, module: nn.Module, tokens: Tokens, name: str) -> None:
        super().__init__(module, tokens.strategy, name, tokens.strategy.roles.residual)
        self._tokens, self._name = tokens, name

    def forward(self, *given: Any, **named: Any) -> Tensor:
        """Return this rank's part (..., sequence, hidden) of the rows that the module's own code makes.

        Its arguments are those of the module's own forward pass. Raises LayoutError for a position that there is
        no row for, UnsupportedError outside of a forward pass of the whole model.
        """
        try:
            rows: Tensor = super().forward(*given, **named)
        except IndexError as error:
            count = next((int(whole.shape[0]) for whole in self.parameters()), 0)
            raise LayoutError(
                f"{self._name} has {count} rows, and a position beyond them is asked for; give shorter sequences"
            ) from error
        tokens, residual = self._tokens, self.layer_strategy.roles.residual
        sequence = int(tokens.current_ids().shape[1])
        first, _ = tokens.core_span(sequence)
        start, stop = self.layer_strategy.span(Side("sequence", sequence), residual)
        if rows.shape[-2] > 1:
            rows = rows.narrow(-2, start - first, stop - start)
        start, stop = self.layer_strategy.span(Side("hidden", rows.shape[-1]), residual)
        rows = rows.narrow(-1, start, stop - start)
        return tokens.told(rows) if rows.ndim == 3 else rows


class HostedEmbedding(ParallelEmbedding):
    """The table of words, in the place of the model's own, whose rows may be multiplied by a number."""

    def __init__(self, embedding: nn.Module, tokens: Tokens, name: str, scale: float) -> None:
        super().__init__(embedding, tokens.strategy, name)
        self._tokens, self.scale = tokens, scale
        self._by_number = scale != 1 and _multiplies_by_number(embedding, scale)

    def forward(self, ids: Tensor) -> Tensor:
        """Return this rank's part (batch, sequence, hidden) of the residual before the first layer. Collective.

        The tokens are those of the step that runs; `ids` are ignored. It is zeros where the first layer that runs
        is given the residual. Raises UnsupportedError outside of a forward pass of the whole model.
        """
        tokens = self._tokens
        if tokens.given is not None:
            return tokens.stand_in()
        rows = super().forward(tokens.current_ids())
        if self.scale != 1:
            rounded = torch.tensor(self.scale, dtype=rows.dtype, device=rows.device)
            rows = rows * (self.scale if self._by_number else rounded)
        return tokens.told(rows)


def _multiplies_by_number(embedding: nn.Module, scale: float) -> bool:
    """Return whether an embedding's code multiplies rows by a number, and not by that rounded to their type."""
    weight = embedding.weight
    own, _ = without_parameters(embedding)
    has_memory = not any(buffer is not None and buffer.is_meta for buffer in embedding._buffers.values())
    if weight.dtype not in (torch.bfloat16, torch.float16) or not has_memory:
        return False
    device = torch.device("cpu") if weight.is_meta else weight.device
    row = torch.linspace(1, 2, 65, dtype=weight.dtype, device=device)[None]
    own.__dict__.update(weight=row, padding_idx=None)
    with torch.no_grad():
        made = type(own).forward(own, torch.zeros(1, dtype=torch.int64, device=device))
    rounded = torch.tensor(scale, dtype=row.dtype, device=device)
    return torch.equal(made, row * scale) and not torch.equal(made, row * rounded)


class HostedNorm(ParallelNorm):
    """A norm of rows of the residual, or of inner features, by one kernel of torch where a rank has whole rows."""

    def __init__(
        self, norm: nn.Module, tokens: Tokens, name: str, dims: AxisDims, side: Side, kind: NormKind
    ) -> None:
        super().__init__(norm, tokens.strategy, name, dims, side, kind)
        self._tokens = tokens

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return this rank's part of the normalised rows, of the same number of dims as x.

        Args:
            x: this rank's rows (batch, sequence, features), or (batch * sequence, features).

        Raises:
            UnsupportedError: it is called outside of a forward or backward pass of the whole model, or the forward
                of the class that it stands for was replaced.
        """
        rows = as_plain(x)
        is_flat = rows.ndim == 2
        if is_flat and not self.has_whole_rows:
            rows = self._tokens.rows_of(rows, self.dims)
        out = super().forward(rows, *self._tokens.sizes)
        if is_flat:
            return out if self.has_whole_rows else out.flatten(0, 1)
        return self._tokens.told(out) if self.dims == self.layer_strategy.roles.residual else out


def hosted_norm(
    norm: nn.Module, tokens: Tokens, name: str, kind: NormKind | str, dims: AxisDims, side: Side
) -> nn.Module:
    """Return the module that takes the place of a norm of rows.

    Where a rank has whole rows, norms of classes of torch and unknown ones run by their own code, others by one
    kernel of torch.

    Args:
        norm: the model's own, on meta.
        tokens: the tokens of the step that runs.
        name: that of the norm in the model.
        kind: what it computes, or a message why that is not known.
        dims: the layout of the rows: for each mesh axis the dim that it splits, or "".
        side: the dim of their features.

    Raises:
        UnsupportedError: rows lie on several ranks, and it is no norm that is known; or it has modules in it.
        LayoutError: ranks have copies of features.
    """
    weight = getattr(norm, "weight", None)
    if side.dim not in dims:
        has_size = weight is None or weight.numel() == side.size
        if isinstance(kind, NormKind) and not isinstance(norm, nn.LayerNorm | nn.RMSNorm) and has_size:
            return HostedNorm(norm, tokens, name, dims, side, kind)
        own = OwnModule(norm, tokens.strategy, name, dims)
        be_instance_of(own, norm)
        return own
    if weight is not None and weight.numel() != side.size:
        raise LayoutError(
            f"{name}: ranks have copies of heads, which a norm over all heads would count twice"
        )
    if isinstance(kind, str):
        raise UnsupportedError(kind)
    return HostedNorm(norm, tokens, name, dims, side, kind)
