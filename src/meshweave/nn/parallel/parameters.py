"""Parameters as DTensors: which parts of a whole tensor a rank has, and placements that say so.

A parameter is a matrix of torch, (features out, features in) or transposed, or a vector. A fused one has several
matrices side by side along its inner features, such as queries, keys and values. Of each a rank has its part.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from meshweave.algorithms.block.roles import AxisDims, Side, Sides
from meshweave.algorithms.block.sides import layout_of
from meshweave.base.errors import LayoutError
from meshweave.describe.layout import Tile
from meshweave.execute.torch import compat
from meshweave.nn.parallel.put_gradients import with_strides_of
from meshweave.nn.parallel.strategy import LayerStrategy
from meshweave.nn.saved_versions import check_versions, versions


@dataclass(frozen=True)
class ParameterLayout:
    """How a parameter lies on the ranks of a strategy.

    Attributes:
        sides: its dims, in torch's order; of a fused parameter those of one of its matrices.
        dims: for each mesh axis of the strategy the dim that it shards, "" for none.
        parts: how many matrices of a fused parameter lie side by side along the dim of inner features; else 1.
    """

    sides: Sides
    dims: AxisDims
    parts: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the global shape of the parameter, with all its fused matrices."""
        return tuple(side.size * self._copies(side) for side in self.sides)

    def _copies(self, side: Side) -> int:
        return self.parts if side.dim == "inner" else 1

    def ranges(
        self,
        strategy: LayerStrategy,
        dims: AxisDims | None = None,
        coordinates: tuple[int, ...] | None = None,
    ) -> list[list[tuple[int, int]]]:
        """Return, for each dim of the parameter, the ranges (start, stop) of elements that a rank has.

        A dim has one range; that of inner features has one for each of the fused matrices.

        Args:
            strategy: the strategy on its ranks.
            dims: for each mesh axis the dim that it shards; None as the parameter is kept.
            coordinates: those of the rank in the mesh; None for this one.
        """
        ranges = []
        for side in self.sides:
            start, stop = strategy.span(side, self.dims if dims is None else dims, coordinates)
            ranges.append([(start + n * side.size, stop + n * side.size) for n in range(self._copies(side))])
        return ranges

    def local(self, whole: Tensor, strategy: LayerStrategy) -> Tensor:
        """Return this rank's shard of a whole tensor, in new memory."""
        for dim, ranges in enumerate(self.ranges(strategy)):
            pieces = [whole.narrow(dim, start, stop - start) for start, stop in ranges]
            whole = torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0]
        return whole.contiguous().clone() if whole.device.type != "meta" else whole.contiguous()

    def placements(self, name: str, strategy: LayerStrategy) -> tuple[Placement, ...]:
        """Return the DTensor placements of this layout, one per dim of the strategy's device mesh.

        Raises LayoutError, with the parameter's `name`, where DTensor has none for it.
        """
        layout = layout_of(strategy.mesh, self.sides, self.dims)
        places = {side.dim: at for at, side in enumerate(self.sides) if side.dim}
        out: list[Placement] = []
        for axis in range(
            strategy.device_mesh.ndim
        ):  # one that the device mesh lacks is the last of the layout
            dim = self.dims[axis]
            if not dim:
                out.append(Replicate())
                continue
            if isinstance(layout.placements[axis], Tile):
                side = self.sides[places[dim]]
                raise LayoutError(
                    f"{name}: {side.count} units of {side.unit} features are not shared out evenly to "
                    f"{strategy.mesh.shape[axis]} ranks of axis {strategy.mesh.axes[axis]}, for which DTensor has "
                    "no placement; take a mesh whose size divides them"
                )
            is_fused = self.parts > 1 and dim == "inner"
            at = places[dim]
            out.append(compat.strided_shard(at, self.parts) if is_fused else Shard(at))
        return tuple(out)

    def distribute(self, name: str, whole: Tensor, strategy: LayerStrategy) -> nn.Parameter:
        """Return a parameter as a DTensor with this rank's shard of `whole`; on meta if `whole` is there.

        Raises LayoutError, with the parameter's `name`, where `whole` has another shape or DTensor has no such
        placements.
        """
        if tuple(whole.shape) != self.shape:
            raise LayoutError(f"{name} has shape {tuple(whole.shape)}; its sizes make {self.shape}")
        placements = self.placements(name, strategy)
        requires_grad = whole.requires_grad
        local = self.local(whole.detach(), strategy)
        made = DTensor.from_local(
            local,
            strategy.device_mesh,
            placements,
            run_check=False,
            shape=whole.shape,
            stride=torch.empty(whole.shape, device="meta").stride(),
        )
        return nn.Parameter(made, requires_grad=requires_grad)


def on_meta(module: nn.Module) -> nn.Module:
    """Return a shallow copy of a module whose own parameters are on the meta device, without memory."""
    shadow = copy.copy(module)
    shadow._parameters = {
        name: None if given is None else nn.Parameter(given.detach().to("meta"), given.requires_grad)
        for name, given in module._parameters.items()
    }
    return shadow


def fill(made: Any, whole: nn.Module, name: str) -> None:
    """Set the parameters of `made`, a parallel module planned on meta, to this rank's shards of those of `whole`.

    `name` is the module's, for errors. Raises LayoutError where a parameter of `whole` has another shape.
    """
    for key, layout in made.layouts.items():
        setattr(made, key, layout.distribute(f"{name} ({key})", getattr(whole, key), made.layer_strategy))


def ranges_of(module: nn.Module) -> dict[str, list[list[tuple[int, int]]]]:
    """Return {name of a parameter: for each dim the (start, stop) ranges of elements in this rank's shard}.

    Only parameters of this library's parallel layers are in it; fused ones have several ranges along a dim.
    """
    return {
        f"{path}.{name}" if path else name: layout.ranges(child.layer_strategy)
        for path, child in module.named_modules()
        if hasattr(child, "layer_strategy")  # others may have layouts of their own
        for name, layout in getattr(child, "layouts", {}).items()
    }


class _LocalParts(torch.autograd.Function):  # type: ignore[misc]
    """This rank's parts of parameters. A gradient lies as its parameter does, and gets its spec.

    `DTensor.to_local` works out how the gradient lies in each backward pass, and is a node of the graph for each
    parameter. After a large product each costs some 100 us, since caches hold none of Python.
    """

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Return the result, and keep what gradients need."""
        ctx.set_materialize_grads(False)
        ctx.parameters = parameters
        ctx.versions = versions(parameters) if any(ctx.needs_input_grad) else []
        parts = compat.local_tensors(parameters)
        return tuple(map(Tensor.view_as, parts, parts))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments; None for what has none."""
        check_versions(ctx.parameters, ctx.versions)
        pairs = zip(ctx.parameters, grads, strict=True)
        return tuple(
            [
                None if grad is None else compat.from_spec(with_strides_of(each, grad), compat.spec_of(each))
                for each, grad in pairs
            ]
        )


def local_parts(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's shards of DTensor parameters, differentiably; plain tensors are returned as they are.

    In eager code they are one node of the autograd graph. So give only parameters of one product or norm:
    zero-bubble pipelines, which compute gradients of weights apart from those of activations, do so node by node.
    """
    if torch.compiler.is_compiling() or not all(isinstance(each, DTensor) for each in parameters):
        return [each.to_local() if isinstance(each, DTensor) else each for each in parameters]
    return list(compat.apply_directly(_LocalParts, *parameters))
