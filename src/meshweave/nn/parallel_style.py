"""`meshweave.nn.UniversalParallel`: a `ParallelStyle` of torch whose products are `meshweave.matmul`s."""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.describe.machine.cluster import Cluster
from meshweave.execute.torch import compat
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.dtensor import from_the_front
from meshweave.nn.linear import universal_linear
from meshweave.nn.transports import Transport


class UniversalParallel(ParallelStyle):  # type: ignore[misc]
    """A style for `torch.distributed.tensor.parallel.parallelize_module` with any layouts, on any mesh.

        style = mw.nn.UniversalParallel(weight=[Shard(0), Shard(1)], input=[Shard(0), Shard(2)])
        parallelize_module(model, mesh, {"layers.*.mlp.up_proj": style})

    Weight and bias become DTensors with the given placements. The layer is then the universal product: nothing
    of the input is redistributed, only what a rank needs and does not have is moved. torch's ColwiseParallel and
    RowwiseParallel take a mesh of one dim, and redistribute whole operands.

    Args:
        weight: placements of the weight (features out, features in), one per dim of the mesh.
        input: placements of an input that is a plain tensor, this rank's shard; None: each rank has the whole. An
            input that is a DTensor keeps its own.
        output: placements of the result; None takes what is cheapest of Shard and Replicate.
        use_local_output: whether the result is this rank's part as a plain tensor.
        transport: "messages", "shared" memory of one host, "mpi", "symmetric" memory on CUDA; "auto": shared
            where all ranks are processes of one host with tensors on the CPU, else messages.
        cluster: the machine, described or named as in the catalog, for which products are tuned; None takes,
            over messages, what moves fewest bytes.
        context: process groups, deadline and liveness; by default those of the default process group.
    """

    def __init__(
        self,
        *,
        weight: Sequence[Placement],
        input: Sequence[Placement] | None = None,
        output: Sequence[Placement] | None = None,
        use_local_output: bool = True,
        transport: Transport = "auto",
        cluster: Cluster | str | None = None,
        context: TorchContext | None = None,
    ) -> None:
        super().__init__()
        self.weight, self.input, self.output = weight, input, output
        self.use_local_output = use_local_output
        self._linear = universal_linear(output, transport=transport, cluster=cluster, context=context)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Shard a linear layer; `parallelize_module` calls it, as of every style."""
        if not isinstance(module, nn.Linear):
            raise UnsupportedError(
                f"UniversalParallel is a style of nn.Linear, and not of {type(module).__name__}; use a pattern "
                "that names the linear layers"
            )
        for name, placements in (("weight", self.weight), ("input", self.input), ("output", self.output)):
            if placements is not None and len(placements) != device_mesh.ndim:
                raise LayoutError(
                    f"{name}: {len(placements)} placements for a mesh of {device_mesh.ndim} dims"
                )
        lain = {"weight": list(self.weight), "bias": [_of_bias(one) for one in self.weight]}
        for name, parameter in list(module.named_parameters(recurse=False)):
            # Cut by place in the mesh: torch scatters by rank.
            alike = distribute_tensor(parameter.detach(), device_mesh, [Replicate()] * device_mesh.ndim)
            own = distribute_tensor(alike.to_local(), device_mesh, lain[name], src_data_rank=None)
            sharded = nn.Parameter(own, requires_grad=parameter.requires_grad)
            module.register_parameter(name, sharded)
        given = list(self.input or [Replicate()] * device_mesh.ndim)

        def forward(layer: nn.Linear, input: Tensor) -> Tensor:
            if not isinstance(input, DTensor):
                input = DTensor.from_local(input, device_mesh, given, run_check=False)
            result = self._linear(input, layer.weight, layer.bias)
            return result.to_local() if self.use_local_output else result

        module.forward = MethodType(forward, module)  # of which a deep copy of the layer has one of its own
        return module


def _of_bias(placement: Placement) -> Placement:
    """Return the placement of the bias (features out,) where the weight has this one."""
    if not compat.is_sharded(placement):
        return placement
    return from_the_front(placement, 2, "weight") if placement.dim in (0, -2) else Replicate()
