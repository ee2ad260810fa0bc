"""How a DTensor lies on its mesh: device mesh, placements and the order in which mesh dims shard a tensor dim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from meshweave.base.errors import LayoutError
from meshweave.describe.layout import Layout
from meshweave.execute.torch import compat
from meshweave.nn.dtensor import layout_of, layout_on


@dataclass(frozen=True)
class ShardSpec:
    """Placements on a device mesh, one per mesh dim.

    `shard_order` says in which order mesh dims shard a tensor dim; None is the order of mesh dims.
    """

    device_mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shard_order: Any = None

    @classmethod
    def of(cls, tensor: DTensor) -> ShardSpec:
        """Return how a DTensor lies."""
        spec = compat.spec_of(tensor)
        return cls(spec.mesh, tuple(spec.placements), compat.explicit_shard_order(spec))

    @classmethod
    def given(cls, device_mesh: DeviceMesh, placements: Sequence[Placement], num_dims: int) -> ShardSpec:
        """Return the spec that a caller gives for a tensor of `num_dims` dims, with dims counted from the front.

        Raises:
            LayoutError: `placements` is no sequence.
        """
        if isinstance(placements, (Placement, str)) or not isinstance(placements, Sequence):
            raise LayoutError(
                f"placements is {placements!r}; it must be a sequence with one per dim of the mesh"
            )
        counted = []
        for placement in placements:
            if type(placement) is Shard and -num_dims <= placement.dim < 0:
                placement = Shard(placement.dim + num_dims)
            elif compat.is_strided_shard(placement) and -num_dims <= placement.dim < 0:
                placement = compat.strided_shard(placement.dim + num_dims, placement.split_factor)
            counted.append(placement)
        return cls(device_mesh, tuple(counted))

    def dtensor_spec(self, shape: Sequence[int], dtype: torch.dtype) -> compat.DTensorSpec:
        """Return torch's spec of a tensor of global `shape` that lies so."""
        return compat.make_spec(self.device_mesh, self.placements, shape, dtype, self.shard_order)

    def layout(self, shape: Sequence[int]) -> Layout:
        """Return the layout of a tensor of global `shape`.

        Raises:
            LayoutError: see `dtensor.layout_of`.
        """
        # Checked before torch makes a spec, which refuses with other words what does not fit.
        layout_on(self.device_mesh, self.placements, shape, None, self.shard_order)
        return layout_of(self.dtensor_spec(shape, torch.float32), None)

    @property
    def is_partial(self) -> bool:
        """Return whether a sum is yet to be made over some mesh dim."""
        return any(isinstance(placement, Partial) for placement in self.placements)

    @property
    def is_plain(self) -> bool:
        """Return whether it has Shard and Replicate only, in the order of mesh dims."""
        return self.shard_order is None and all(type(p) in (Shard, Replicate) for p in self.placements)

    @property
    def spec_of_gradient(self) -> ShardSpec:
        """Return how the gradient lies: each term of a sum has the gradient of the sum, Replicate for Partial."""
        return self._with_partials_as([Replicate()] * len(self.placements))

    def summed(self, target: ShardSpec, shape: Sequence[int]) -> ShardSpec:
        """Return how a tensor of global `shape` lies once its sums are made on its own mesh.

        A sum is scattered over a dim that `target` shards, if the mesh dim divides its size evenly; else it is
        replicated.
        """
        if not self.is_partial:
            return self
        sharded_dims = [placement.dim for placement in self.placements if compat.is_sharded(placement)]
        target_dims = dict.fromkeys(p.dim for p in target.placements if compat.is_sharded(p))
        replacements: list[Placement] = []
        for mesh_dim, placement in enumerate(self.placements):
            size = self.device_mesh.size(mesh_dim)
            free = (d for d in target_dims if d not in sharded_dims and shape[d] and shape[d] % size == 0)
            dim = next(free, None) if isinstance(placement, Partial) else None
            replacements.append(Replicate() if dim is None else Shard(dim))
            sharded_dims += [] if dim is None else [dim]
        return self._with_partials_as(replacements)

    def _with_partials_as(self, replacements: Sequence[Placement]) -> ShardSpec:
        if not self.is_partial:
            return self
        pairs = zip(self.placements, replacements, strict=True)
        return ShardSpec(self.device_mesh, tuple(new if isinstance(p, Partial) else p for p, new in pairs))
