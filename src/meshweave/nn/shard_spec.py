"""How a tensor is sharded over a device mesh, apart from its shape and dtype: `ShardSpec`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from meshweave.describe.layout import Layout
from meshweave.execute.torch import compat
from meshweave.nn.dtensor import Side, layout_of, layout_on


@dataclass(frozen=True)
class ShardSpec:
    """How a tensor is sharded over a device mesh: PyTorch's DTensorSpec without shape and dtype.

    Attributes:
        placements: one per dim of the device mesh; None where they are yet to be chosen.
        shard_order: in which order mesh dims shard a tensor dim, where not from left to right.
    """

    device_mesh: DeviceMesh
    placements: tuple[TorchPlacement, ...] | None
    shard_order: compat.ShardOrder | None = None

    @classmethod
    def of(cls, tensor: DTensor) -> ShardSpec:
        """Return the mesh, placements and shard order of a DTensor."""
        spec = compat.spec_of(tensor)
        return cls(spec.mesh, tuple(spec.placements), compat.explicit_shard_order(spec))

    @property
    def is_partial(self) -> bool:
        """Return whether any placement is partial."""
        return any(isinstance(placement, TorchPartial) for placement in self.placements or ())

    @property
    def is_plain(self) -> bool:
        """Return whether all placements are Shard or Replicate, applied left to right; true without placements."""
        plain = (TorchShard, TorchReplicate)
        return self.shard_order is None and all(
            type(placement) in plain for placement in self.placements or ()
        )

    @property
    def gradient(self) -> ShardSpec:
        """Return the placements of this tensor's gradient: Replicate where the tensor is partial, else the
        same.
        """
        return self.without_partial([TorchReplicate()] * self.device_mesh.ndim)

    def without_partial(self, instead: Sequence[TorchPlacement]) -> ShardSpec:
        """Return the spec with Partial placements replaced by those of `instead` on the same mesh dims.

        `instead` has one placement per mesh dim. If anything is replaced, the shard order becomes left to right.
        """
        if not self.is_partial:
            return self
        assert self.placements is not None
        pairs = zip(self.placements, instead, strict=True)
        return ShardSpec(
            self.device_mesh, tuple(new if isinstance(old, TorchPartial) else old for old, new in pairs)
        )

    def layout(self, shape: Sequence[int], side: Side = "left") -> Layout:
        """Return the layout of a tensor of global `shape`.

        Args:
            side: "left" or "right" operand of a product, as whose matrix the tensor is seen; None keeps the dims
                as they are.

        Raises LayoutError where the placements do not fit the shape, or a `Layout` has nothing that stands for one
        of them.
        """
        assert self.placements is not None
        # First, for torch makes no spec of what does not fit, in other words.
        layout_on(self.device_mesh, self.placements, shape, side, self.shard_order)
        return layout_of(self.torch_spec(shape, torch.float32), side)

    def torch_spec(self, shape: Sequence[int], dtype: torch.dtype) -> compat.DTensorSpec:
        """Return torch's DTensorSpec of a row-major tensor of global `shape`.

        Raises UnsupportedError where this version of torch has no such spec, or none with a shard order and this
        has one.
        """
        assert self.placements is not None
        return compat.make_spec(self.device_mesh, self.placements, shape, dtype, self.shard_order)
