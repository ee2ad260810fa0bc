"""2D products of DTensors, which `meshweave.matmul` has as `algorithm`: `matmul2d` of what each rank has of them.

The placements of the operands give the dataflow: a matrix that is stored transposed is given as its `.t()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from meshweave.algorithms.matmul2d import Dataflow
from meshweave.base.errors import LayoutError
from meshweave.execute.torch.call_order import require_process_group, share_refusal
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.dtensor import mesh_of, require_dtensors, require_member, size_text
from meshweave.nn.in_graphs import allow_in_graph, context_of, placement_texts, placements_from
from meshweave.nn.matmul2d import matmul2d
from meshweave.nn.matmul2d_programs import Slices
from meshweave.nn.saved_versions import SavedVersions

_STORED, _TRANSPOSED = (Shard(0), Shard(1)), (Shard(1), Shard(0))

_DATAFLOWS: dict[tuple[Any, Any], Dataflow] = {
    (_STORED, _STORED): "os",
    (_STORED, _TRANSPOSED): "ls",
    (_TRANSPOSED, _STORED): "rs",
}


def matmul2d_of_dtensors(
    a: DTensor,
    b: DTensor,
    out: Sequence[Placement] | None,
    algorithm: str,
    slices: Slices,
    context: TorchContext | None,
    others: Sequence[str],
) -> DTensor:
    """Return the product of two DTensors by a 2D algorithm; `meshweave.matmul` documents the other arguments.

    Args:
        out: None, or [Shard(0), Shard(1)], which the result has in any case.
        others: the names of options of the universal product that the caller has given too; any is refused.

    Raises:
        LayoutError: operands that no dataflow has, `out` other than [Shard(0), Shard(1)], any of `others`, or an
            algorithm that shards otherwise.
        UnsupportedError: there is no such algorithm.
        BindError: operands differ in dtype, or have one that no program has; `slices` has no such value; another
            rank refuses the product, or is in another call; there is no process group.
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    if torch.compiler.is_dynamo_compiling():
        number = -1 if context is None else context.number
        widths = slices if isinstance(slices, int) else tuple(slices)
        return _in_graph(a, b, placement_texts(out), algorithm, widths, number, tuple(others))
    require_process_group()
    require_dtensors(a, b)
    require_member(a.device_mesh, "matmul")
    mesh = a.device_mesh
    context = context or TorchContext.default(mesh.device_type)
    with share_refusal(context, mesh_of(mesh).ranks, f"matmul {size_text(a.shape)} @ {size_text(b.shape)}"):
        dataflow = _dataflow(a, b, out, algorithm, others)
    (m, k), n = a.shape, b.shape[1]
    local = matmul2d(
        (a.t() if dataflow == "rs" else a).to_local(),
        (b.t() if dataflow == "ls" else b).to_local(),
        mesh=mesh,
        shape=(m, n, k),
        dataflow=dataflow,
        algorithm=algorithm,
        slices=slices,
        context=context,
    )
    if local.requires_grad:
        saved = a if b.requires_grad else None, b if a.requires_grad else None
        local = _Checked.apply(local, SavedVersions(saved))
    size = torch.Size((m, n))
    result: DTensor = DTensor.from_local(local, mesh, _STORED, run_check=False, shape=size, stride=(n, 1))
    return result


class _Checked(torch.autograd.Function):  # type: ignore[misc]
    """The result of a product, whose backward pass refuses operands that were changed in place since."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, versions: SavedVersions) -> Tensor:
        """Return this rank's part of the result as it is."""
        ctx.versions = versions
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient as it is. Raises RuntimeError, see `SavedVersions.check`."""
        ctx.versions.check()
        return grads[0], None


def _dataflow(
    a: DTensor, b: DTensor, out: Sequence[Placement] | None, algorithm: str, others: Sequence[str]
) -> Dataflow:
    """Return the dataflow of a product. Raises LayoutError where it has none."""
    if others:
        raise LayoutError(
            f"algorithm={algorithm!r} does not take {', '.join(others)}: an option of the universal product"
        )
    mesh = a.device_mesh
    if mesh.ndim != 2 or mesh != b.device_mesh or (a.ndim, b.ndim) != (2, 2) or a.shape[1] != b.shape[0]:
        raise LayoutError(
            f"algorithm={algorithm!r} multiplies matrices (M, K) by (K, N) on one mesh of two dims, not "
            f"{tuple(a.shape)} on {mesh} by {tuple(b.shape)} on {b.device_mesh}"
        )
    dataflow = _DATAFLOWS.get((tuple(a.placements), tuple(b.placements)))
    if dataflow is None or not (out is None or tuple(out) == _STORED):
        target = "" if out is None else f" to {list(out)}"
        raise LayoutError(
            f"algorithm={algorithm!r} takes operands stored as [Shard(0), Shard(1)], at most one of them as its "
            f".t(), and gives such a result; not {list(a.placements)} by {list(b.placements)}{target}"
        )
    return dataflow


@allow_in_graph  # type: ignore[untyped-decorator]
def _in_graph(
    a: DTensor, b: DTensor, out: Any, algorithm: str, slices: Slices, number: int, others: tuple[str, ...]
) -> DTensor:
    """Return a product of `matmul2d_of_dtensors` whose arguments are those of a graph."""
    context = context_of(number, a.device_mesh.device_type)
    return matmul2d_of_dtensors(a, b, placements_from(out), algorithm, slices, context, others)
