"""Adapters of low rank (LoRA, as PEFT puts them into a model) on ranks that each have a part of the weight.

A layer with an adapter computes x (W + s B A)^T (Hu et al., LoRA, 2021, equation 3). A rank computes W + s B A of
the part of W that it keeps, under any strategy; the gradient that arrives there is that of W, summed as the
strategy does. Those of A and B follow from it, and are summed over the axes that split W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshweave.base.errors import UnsupportedError
from meshweave.execute.torch import compat
from meshweave.nn.hosted.linears import HostedLinear
from meshweave.nn.hosted.own_modules import kept_whole
from meshweave.nn.parallel.buckets import KeptParameter
from meshweave.nn.parallel.linear import is_transposed
from meshweave.nn.parallel.model import ParallelModel
from meshweave.nn.parallel.takeable import is_adapter
from meshweave.nn.parallel.uses import ParameterUse, entries_of
from meshweave.nn.weights.blocks import Block, block_of

_MERGE = "merge it (merge_and_unload()) before parallelize, or train all weights"


@dataclass(frozen=True)
class TakenAdapter:
    """An adapter that was taken out of a model.

    Attributes:
        path: the name, in the model, of the linear layer that it adapts.
        layer: the layer of PEFT, with the model's own in it.
        name: what PEFT calls the adapter.
    """

    path: str
    layer: Any
    name: str


class AdaptedLinear(HostedLinear):
    """A linear layer whose products use W + s B A: its weight W with an adapter (LoRA) added."""

    _adapter: Adapter

    @property
    def weight(self) -> Any:
        """Return W + s B A, as a DTensor with the placements of W, computed at each access."""
        return self._adapter.added(self._parameters["weight"])

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool = False, adapter_names: Any = None
    ) -> nn.Module:
        """Return this layer without its adapter, for PEFT; if `merge`, s B A is added to the weight first.

        `safe_merge` and `adapter_names` are ignored: there is one adapter.
        """
        base: Any = self._parameters["weight"]
        with torch.no_grad():
            if merge:
                compat.local_tensor(base).copy_(compat.local_tensor(self.weight))
        del self.lora_A, self.lora_B, self._adapter
        self.__class__ = HostedLinear
        return self


class _Matrices(nn.ModuleDict):  # type: ignore[misc]
    """The matrix A or B of a layer, under the name of its adapter, which PEFT takes for a layer of its own.

    PEFT finds there what it lists, saves and loads, and what it would have switched or merged is refused.
    """

    adapter_layer_names: tuple[str, ...] = ()
    other_param_names: tuple[str, ...] = ()
    merged_adapters: tuple[str, ...] = ()
    disable_adapters = False

    @property
    def active_adapters(self) -> list[str]:
        """Return the name of the adapter, in a list."""
        return list(self)

    def _get_available_adapters(self) -> set[str]:
        return set(self)

    def enable_adapters(self, enabled: bool) -> NoReturn:
        """Raise UnsupportedError, for PEFT's `disable_adapter` and what is like it."""
        raise UnsupportedError(
            "adapters of a parallelised model are not switched off or on: merge_and_unload() merges them for "
            "good, and parallelize of the model without them computes what it is without"
        )

    def merge(self, *args: Any, **given: Any) -> NoReturn:
        """Raise UnsupportedError, for PEFT's `merge_adapter` and `unmerge_adapter`."""
        raise UnsupportedError(
            "adapters of a parallelised model are not merged to be taken out again: merge_and_unload() merges "
            "them for good"
        )

    unmerge = merge


class Adapter:
    """The matrices A (rank, in features) and B (out features, rank) of a LoRA adapter, whole on every rank.

    Each rank adds them to the shard of the weight that it keeps.

    Args:
        linear: the parallel linear layer.
        taken: the adapter as PEFT made it.
    """

    def __init__(self, linear: HostedLinear, taken: TakenAdapter) -> None:
        strategy, layer = linear.layer_strategy, taken.layer
        self.scale = float(layer.scaling[taken.name])
        self.opened: dict[str, Tensor] = {}
        self.kept: dict[str, KeptParameter] = {}
        for key in ("lora_A", "lora_B"):
            whole = getattr(layer, key)[taken.name].weight
            self.kept[key] = kept_whole(strategy, whole, linear.layouts["weight"].dims)
            holder = nn.Module()
            holder.weight = self.kept[key].layout.distribute(f"{taken.path}.{key}", whole, strategy)
            setattr(linear, key, _Matrices({taken.name: holder}))
        self._holders = {key: getattr(linear, key)[taken.name] for key in self.kept}
        base: Any = linear._parameters["weight"]
        rows, columns = positions_of(block_of(taken.path, base))
        self.is_transposed = linear.is_transposed
        self.rows, self.columns = (columns, rows) if self.is_transposed else (rows, columns)
        self._use = ParameterUse([entries_of([self])])

    def __getattr__(self, name: str) -> Any:
        if name not in ("lora_A", "lora_B"):
            raise AttributeError(name)
        return self._holders[name].weight

    def added(self, weight: Any) -> Any:
        """Return W + s B A for `weight` W, differentiably; s is `scale`. Collective.

        Args:
            weight: the layer's weight, a DTensor. The result is a DTensor of its placements and dtype, of which
                each rank computes its own shard. Gradients of A and B are summed over the ranks that split W.
        """
        return _Added.apply(weight, *self._use(), self)


class _Added(torch.autograd.Function):  # type: ignore[misc]
    """W + s B A of a part of W; gradients of A and B are terms of sums over the ranks that split W."""

    @staticmethod
    def forward(ctx: Any, weight: DTensor, a: Tensor, b: Tensor, adapter: Adapter) -> DTensor:
        """Return the sum."""
        ctx.save_for_backward(a, b)
        ctx.adapter = adapter
        rows, columns = adapter.rows.to(a.device), adapter.columns.to(a.device)
        own = compat.local_tensor(weight)
        change = (b[rows] @ a[:, columns]) * adapter.scale
        made = own + (change.t() if adapter.is_transposed else change).to(own.dtype)
        return compat.from_spec(made, compat.spec_of(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Return the gradients of the arguments."""
        (a, b), adapter = ctx.saved_tensors, ctx.adapter
        rows, columns = adapter.rows.to(a.device), adapter.columns.to(a.device)
        own = compat.local_tensor(grads[0]).to(a.dtype) * adapter.scale
        own = own.t() if adapter.is_transposed else own
        of_a, of_b = torch.zeros_like(a), torch.zeros_like(b)
        of_a[:, columns] = b[rows].t() @ own
        of_b[rows] = own @ a[:, columns].t()
        return grads[0] if ctx.needs_input_grad[0] else None, of_a, of_b, None


def positions_of(block: Block) -> list[Tensor]:
    """Return, for each dim, the indices in the whole tensor of the elements of a block, as int64 (n,).

    A block is, for each dim, a list of (start, stop) ranges: [[(0, 2), (4, 6)]] -> [tensor([0, 1, 4, 5])].
    """
    return [torch.tensor([at for run in runs for at in range(*run)], dtype=torch.int64) for runs in block]


# --- taking adapters out of a model, and putting them into its parallel layers ---------------------------------


@contextmanager
def without_adapters(module: nn.Module, runs_own_code: bool) -> Iterator[list[TakenAdapter]]:
    """Take PEFT's adapters out of a model, and yield them as a list; if the block raises, put them back.

    Args:
        module: the model, changed in place.
        runs_own_code: whether the model runs by its own code, as one with adapters must.

    Raises UnsupportedError, with the name of the layer, for an adapter of a kind that is not computed, and for any
    adapter where the model does not run by its own code.
    """
    taken = [
        TakenAdapter(path, child, _only(path, child))
        for path, child in module.named_modules()
        if is_adapter(child)
    ]
    if taken and not runs_own_code:
        raise UnsupportedError(
            f"{taken[0].path}: adapters are computed in models that run by their own code, and "
            f"{type(module).__name__} has layers of this library; {_MERGE}"
        )
    _place(module, taken, lambda each: each.layer.get_base_layer())
    try:
        yield taken
    except BaseException:
        _place(module, taken, lambda each: each.layer)
        raise


@contextmanager
def all_trained(module: nn.Module) -> Iterator[None]:
    """Let all parameters of a wholly frozen model require gradients in the block, for a proof to compare them.

    A model with a parameter that is trained is left as it is.
    """
    parameters = list(module.parameters())
    if any(parameter.requires_grad for parameter in parameters):
        yield
        return
    module.requires_grad_(True)
    try:
        yield
    finally:
        module.requires_grad_(False)


def _place(module: nn.Module, taken: list[TakenAdapter], made: Callable[[TakenAdapter], nn.Module]) -> None:
    for each in taken:
        owner, _, name = each.path.rpartition(".")
        setattr(module.get_submodule(owner), name, made(each))


def put_in(model: ParallelModel, taken: list[TakenAdapter]) -> None:
    """Put the adapters `taken` back into the layers of a parallelised model, which then computes with them."""
    if taken:
        from peft.tuners.tuners_utils import BaseTunerLayer

        BaseTunerLayer.register(_Matrices)
    for each in taken:
        linear = model.module.get_submodule(each.path)
        assert isinstance(linear, HostedLinear), each.path
        linear._adapter = Adapter(linear, each)
        linear.__class__ = AdaptedLinear


def _only(path: str, layer: Any) -> str:
    """Return the name of the only adapter of a layer. Raises UnsupportedError for another form."""
    names = list(layer.lora_A)
    wrong = ""
    if len(names) != 1 or list(layer.active_adapters) != names:
        wrong = f"has the adapters {', '.join(names)}, and one that is active is computed"
    elif layer.merged or layer.disable_adapters:
        wrong = "is merged or disabled"
    elif getattr(layer, "lora_variant", None) or any(
        any(getattr(layer, kind, {}).values()) for kind in ("lora_bias", "use_dora")
    ):
        wrong = "has a variant or a bias, which is not computed"
    elif any(getattr(drop, "p", 0) for drop in layer.lora_dropout.values()):
        wrong = "has lora_dropout, which is not computed: give lora_dropout=0"
    elif not isinstance(base := layer.get_base_layer(), nn.Linear) and not is_transposed(base):
        wrong = f"stands around a {type(base).__name__}, and a linear layer is computed"
    elif bool(layer.fan_in_fan_out) != is_transposed(base):
        wrong = "takes its weight for transposed, which it is not"
    elif not _is_product(layer, names[0]):
        wrong = "adds something else than scaling * B @ A to its weight"
    if wrong:
        raise UnsupportedError(f"{path}: the adapter {wrong}; {_MERGE}")
    return str(names[0])


def _is_product(layer: Any, name: str) -> bool:
    """Return whether an adapter adds s B A by PEFT's own account; True without memory."""
    a, b = layer.lora_A[name].weight.detach(), layer.lora_B[name].weight.detach()
    if a.is_meta or b.is_meta:
        return True
    with torch.no_grad():
        own, theirs = (b.float() @ a.float()) * layer.scaling[name], layer.get_delta_weight(name).float()
        return bool(torch.allclose(own.t() if layer.fan_in_fan_out else own, theirs, rtol=1e-2, atol=1e-6))
