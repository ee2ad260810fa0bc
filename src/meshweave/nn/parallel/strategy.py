"""What each dim of a device mesh does in the layers of a model: the roles of a strategy, on real ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshweave.algorithms.block import BlockAlgorithm, BlockConfig
from meshweave.algorithms.block.problem import AXES, MESH
from meshweave.algorithms.block.roles import IDLE, AxisDims, Roles, Side, Sides
from meshweave.algorithms.block.sites import site_problem
from meshweave.algorithms.table import STRATEGIES
from meshweave.base.errors import LayoutError
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.groups import PerWorld
from meshweave.nn.dtensor import mesh_of
from meshweave.nn.in_graphs import context_of


@dataclass(frozen=True, eq=False)
class LayerStrategy:
    """A strategy on the ranks of a device mesh; equal ones are the same object.

    Attributes:
        name: that of the strategy.
        roles: for each mesh axis, which dim of each tensor of a layer it splits.
        mesh: the ranks along the axes of the strategy; an axis that the device mesh lacks has size 1.
        config: chunks of the batch and slices of products.
        rank: the global rank of this process.
        device_mesh: torch's mesh of the DTensors of parameters.
        context_number: `TorchContext.number` of the context in which programs run, which whoever runs the model
            keeps alive; negative for the default one of a device.
    """

    name: str
    roles: Roles
    mesh: Mesh
    config: BlockConfig
    rank: int
    device_mesh: DeviceMesh = field(repr=False)
    context_number: int = -1

    @classmethod
    def of(
        cls,
        name: str,
        device_mesh: DeviceMesh,
        config: BlockConfig | None = None,
        entry: Any = None,
        context: TorchContext | None = None,
        experts: AxisDims = (),
    ) -> LayerStrategy:
        """Return a strategy on a device mesh with a dim for each of its axes.

        The dim of an idle last axis, or the second of two, may be missing.

        Args:
            name: of the strategy.
            config: chunks and slices of products; None for the default.
            entry: the `BlockAlgorithm` itself, for one that is not in the table; `name` is then ignored.
            context: that programs run in; None for the default one of a device.
            experts: for each axis "expert" if its ranks have different experts, "inner" if they split each
                expert, "" if they have equal ones; () for what the axes do in other feed-forward parts.

        Raises:
            UnsupportedError: there is no such strategy.
            LayoutError: its mesh does not fit, or this rank is not in it.
        """
        entry = entry or STRATEGIES.named(name)
        sizes = mesh_of(device_mesh).shape
        lacks_one = len(sizes) == len(entry.roles) - 1 and entry.roles[-1] is IDLE
        shape = (*sizes, 1) if lacks_one or len(sizes) == 1 < len(entry.roles) == 2 else sizes
        if len(shape) != len(entry.roles):
            raise LayoutError(
                f"{entry.name} has {len(entry.roles)} mesh axes; the device mesh has {len(sizes)}"
            )
        problem = site_problem(1, 1, 1, shape, "float32")
        if (reason := entry.refusal(problem)) is not None:
            raise LayoutError(f"{entry.name} {reason}; the device mesh is {'x'.join(map(str, sizes))}")
        roles: Roles = replace(entry.roles_of(problem), experts=experts)
        ranks = mesh_of(device_mesh).ranks
        rank = dist.get_rank()
        if rank not in ranks:
            raise LayoutError(f"rank {rank} is not in the device mesh of ranks {ranks[0]} to {ranks[-1]}")
        mesh = Mesh(MESH, shape, AXES[-len(shape) :], ranks)
        number = -1 if context is None else context.number
        key = (entry.name, roles, mesh, config or BlockConfig(), rank, device_mesh, number)
        known = _known.kept()  # device meshes of an earlier world are equal, and have no groups any more
        if key not in known:
            known[key] = cls(*key)
        return known[key]

    @cached_property
    def coordinates(self) -> tuple[int, ...]:
        """Return the coordinates of this rank in `mesh`."""
        return tuple(self.mesh.coords(self.rank))

    def context(self, device: torch.device) -> TorchContext:
        """Return the context in which the strategy's programs on `device` run."""
        return context_of(self.context_number, str(device))

    @cached_property
    def is_alone(self) -> bool:
        """Return whether the mesh has a single rank, which then has all of each layer."""
        return math.prod(self.mesh.shape) == 1

    @cached_property
    def only_splits_batch(self) -> bool:
        """Return whether the mesh is plain data parallelism: several ranks with whole weights and own sequences.

        Nothing is then communicated before the loss. False for a mesh of one rank.
        """
        roles = self.roles
        ranks_of_rows = tuple("batch" if size > 1 else "" for size in self.mesh.shape)
        edges = (roles.residual, *map(roles.core, (True, False)), *map(roles.operand, (True, False)))
        shards = any(role.shards_weights for role in roles.axes) or any(
            map(any, map(roles.weight, (True, False)))
        )
        return not self.is_alone and not shards and all(dims == ranks_of_rows for dims in edges)

    def span(self, side: Side, dims: AxisDims, coordinates: tuple[int, ...] | None = None) -> tuple[int, int]:
        """Return (start, stop), in elements, of a rank's shard along one dim of a tensor.

        Args:
            side: the dim: its name, and its size in units that ranks never divide.
            dims: for each mesh axis the name of the dim that it splits, "" for none.
            coordinates: those of the rank in `mesh`; None for this one.
        """
        start, count, most = 0, side.count, side.count
        for dim, parts, at in zip(dims, self.mesh.shape, coordinates or self.coordinates, strict=True):
            if dim != side.dim or not dim:
                continue
            run = -(-most // parts)
            start += min(run * at, count)
            count, most = min(max(count - run * at, 0), run), run
        return start * side.unit, (start + count) * side.unit

    def local_shape(self, sides: Sides, dims: AxisDims) -> tuple[int, ...]:
        """Return the shape of this rank's shard of a tensor with dims `sides`; mesh axes split it as in `dims`."""
        return tuple(stop - start for start, stop in (self.span(side, dims) for side in sides))

    def tokens(self, batch: int, sequence: int) -> Sides:
        """Return the dims (batch, sequence) of a tensor of tokens, from their global sizes."""
        return Side("batch", batch), Side("sequence", sequence)


_known: PerWorld[LayerStrategy] = PerWorld()


def device_mesh_for(
    entry: BlockAlgorithm, sizes: tuple[int, ...], device_type: str, strides: tuple[int, ...] | None = None
) -> DeviceMesh:
    """Return a device mesh of all ranks for a strategy, with a dim "tp", or several named as the last of `AXES`.

    Args:
        sizes: the ranks along each dim.
        strides: the difference of ranks of neighbours along each dim; None where the last dim is innermost.

    Raises LayoutError where the product of the sizes is not the number of ranks of the world.
    """
    world = dist.get_world_size()
    if math.prod(sizes) != world:
        raise LayoutError(f"{entry.name} on {'x'.join(map(str, sizes))} ranks, there are {world}")
    names = ("tp",) if len(sizes) == 1 else AXES[-len(sizes) :]
    if strides is None:
        return init_device_mesh(device_type, sizes, mesh_dim_names=names)
    ranks = torch.arange(world).as_strided(sizes, strides)
    return DeviceMesh(device_type, ranks, mesh_dim_names=names)


def chunked(config: BlockConfig, most: int) -> BlockConfig:
    """Return `config` with `chunks`, the parts into which a rank's batch is cut, lowered to `most` if it has
    more.
    """
    return replace(config, chunks=min(config.chunks, most)) if config.chunks > most else config


def overlap_of(strategy: LayerStrategy) -> str:
    """Return a sentence, for reports, that says what the communication of a parallelised model overlaps with.

    In such a model each product is a program of its own, in contrast to programs of whole layers.
    """
    if strategy.is_alone:
        return "nothing is communicated"
    if strategy.config.chunks == 1:
        return "communication runs beside the product that it belongs to, where its program has slices"
    return (
        f"communication of {strategy.config.chunks} chunks runs beside the product that it belongs to, and not "
        "beside another product, attention or a norm, as a program of a whole layer has it"
    )
