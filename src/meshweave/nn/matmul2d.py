"""A 2D-parallel product on local shards, for a user's own model: `matmul2d`.

Forward and both backward products are programs of one algorithm. Their dataflows come from one row of
MeshSlice's Table 1, so that no matrix is transposed and each gradient is sharded like what it is a gradient
of. Programs are bound once per size and reused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TorchShard

from meshweave.algorithms.matmul2d import Dataflow, Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.matmul2d.common.passes import STATIONARY_OF, TABLE, PassName
from meshweave.algorithms.matmul2d.meshslice import MeshSlice
from meshweave.base.errors import BindError, LayoutError
from meshweave.describe.layout import Layout, Shard
from meshweave.execute.torch import compat
from meshweave.execute.torch.bind import BoundProgram, bind
from meshweave.execute.torch.cache import program_bytes
from meshweave.execute.torch.call_order import call_order, require_process_group, share_refusal
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.autocast import autocast_operands
from meshweave.nn.custom_ops import refuse_second_derivative
from meshweave.nn.dtensor import mesh_of, require_member, size_text
from meshweave.nn.in_graphs import context_of, traced_product
from meshweave.nn.matmul2d_programs import Slices, backward_problem, product_program, slice_widths
from meshweave.nn.matmul_plans import check_dtypes
from meshweave.nn.products import DTYPES


def matmul2d(
    a: Tensor,
    b: Tensor,
    *,
    mesh: DeviceMesh,
    shape: tuple[int, int, int],
    dataflow: Dataflow = "os",
    algorithm: str = MeshSlice.name,
    slices: Slices = 4,
    block: int = 8,
    ring_ways: Literal[0, 1, 2] | None = None,
    context: TorchContext | None = None,
) -> Tensor:
    """Return this rank's shard of a distributed product; every rank of `mesh` calls it with its shards.

    Under `torch.autocast` operands are cast as for `torch.matmul`. In a graph of
    `torch.compile` a call is one op, forward and backward each.

    Rows of each global matrix are sharded over mesh dim 0, columns over dim 1, by DTensor's chunk rule
    (`[Shard(0), Shard(1)]`), uneven sizes included:

        dataflow  computes       a (global)  b (global)  stationary
        os        C = A B        (M, K)      (K, N)      C
        ls        C = A B^T      (M, K)      (N, K)      A
        rs        C = A^T B      (K, M)      (K, N)      B

    Args:
        mesh: a 2D DeviceMesh that this rank is in.
        shape: the global (M, N, K).
        algorithm: the name of a 2D product, such as "meshslice", "summa", "wang".
        slices: slice count of MeshSlice, or the relative widths of unequal slices. At most as many as the
            sliced dim (K for os, N for ls, M for rs) has elements; more are cut down to that.
        block: neighbouring elements that stay together in a slice.
        ring_ways: run collectives as rings of this many directions, 0 as the backend's own collectives;
            None takes one-way rings on a CPU (gloo) and the backend's own on CUDA (NCCL).
        context: process groups, deadline and liveness; by default those of the default process group.

    Returns:
        The local shard of C (M, N), of the operands' dtype. Once differentiable in a and b; whether each needs a
        gradient must be the same on all ranks.

    Raises:
        LayoutError: shards do not fit `shape` on `mesh`, the mesh is not 2D or lacks this rank, there is no such
            dataflow, or the algorithm shards otherwise.
        UnsupportedError: there is no such algorithm.
        BindError: a and b differ in dtype, or have one that no program has; `slices` or `ring_ways` has no such
            value; another rank refuses the product, or is in another call; there is no process group.
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    if torch.compiler.is_dynamo_compiling():
        number = -1 if context is None else context.number
        settings = shape, dataflow, algorithm, slices if isinstance(slices, int) else tuple(slices), block
        return _matmul2d_in_graph(
            _with_mesh(a, mesh), _with_mesh(b, mesh), *settings, ring_ways, number
        ).to_local()
    require_process_group()
    require_member(mesh, "matmul2d")
    context = context or TorchContext.default(a.device)
    ranks = mesh_of(mesh).ranks  # kept, where DeviceMesh.mesh is computed at each access
    with share_refusal(context, ranks, _title(dataflow, shape)):
        if mesh.ndim != 2:
            raise LayoutError(f"matmul2d needs a 2D mesh, this one has {mesh.ndim} dims")
        a, b = autocast_operands(a.device.type, a, b)
        check_dtypes(a=a, b=b)
        rows, columns = mesh_of(mesh).shape
        problem = Matmul2dProblem(*shape, (rows, columns), dataflow, DTYPES[a.dtype], ranks)
        rank = mesh.get_rank()
        _check_shard(problem, "a", a, rank)
        _check_shard(problem, "b", b, rank)
        config = Matmul2dConfig(slice_widths(slices), block)
        if ring_ways is None:
            ring_ways = 1 if a.device.type == "cpu" else 0
        if ring_ways not in (0, 1, 2):
            raise BindError(
                f"a ring has 1 or 2 ways, or 0 for the backend's own collectives, not {ring_ways}"
            )
        product = _LocalProduct2d(problem, rank, algorithm, config, ring_ways, context)
        result: Tensor = _Matmul2dFunction.apply(a, b, product)
        return result


_BOTH = [TorchShard(0), TorchShard(1)]


def _with_mesh(local: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a DTensor, which can carry a mesh into a graph; its global shape says nothing."""
    carrier: DTensor = DTensor.from_local(local, mesh, _BOTH, run_check=False)
    return carrier


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _matmul2d_in_graph(
    a: DTensor,
    b: DTensor,
    shape: tuple[int, int, int],
    dataflow: Dataflow,
    algorithm: str,
    slices: Slices,
    block: int,
    ring_ways: Literal[0, 1, 2] | None,
    number: int,
) -> DTensor:
    """Return a product of `matmul2d` whose arguments are those of a graph."""
    mesh, local_a = a.device_mesh, a.to_local()
    local = matmul2d(
        local_a,
        b.to_local(),
        mesh=mesh,
        shape=shape,
        dataflow=dataflow,
        algorithm=algorithm,
        slices=slices,
        block=block,
        ring_ways=ring_ways,
        context=context_of(number, mesh.device_type),
    )
    return _with_mesh(local, mesh)


def _title(dataflow: str, shape: tuple[int, int, int]) -> str:
    return f"matmul2d {dataflow} of sizes {size_text(shape)}"


def _check_shard(problem: Matmul2dProblem, operand: str, shard: Tensor, rank: int) -> None:
    whole = problem.stored_shape(operand)
    expected = Layout(problem.mesh, (Shard(0), Shard(1))).local_shape(whole, rank)
    if tuple(shard.shape) != expected:
        raise LayoutError(
            f"{operand} of shape {tuple(shard.shape)} is no shard of {whole} on rank {rank} of mesh "
            f"{problem.mesh_shape}, which is {expected}"
        )


class _Matmul2dFunction(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, product: _LocalProduct2d) -> Tensor:
        """Return the result, and keep what gradients need."""
        ctx.save_for_backward(a, b)
        ctx.product = product
        return product.run(a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments; None for what has none."""
        refuse_second_derivative("a 2D product")
        problem, (a, b) = ctx.product.problem, ctx.saved_tensors
        role = {"x": a, "w": b, "dy": grads[0]}
        out: list[Tensor | None] = []
        passes: tuple[PassName, PassName] = ("backward_data", "backward_weight")
        for needed, of in zip(ctx.needs_input_grad, passes, strict=False):
            if not needed:
                out.append(None)
                continue
            left, right = (role[operand] for operand in TABLE[STATIONARY_OF[problem.dataflow]][of].operands)
            out.append(replace(ctx.product, problem=backward_problem(problem, of)).run(left, right))
        return (*out, None)


@dataclass(frozen=True)
class _LocalProduct2d:
    """A product of `matmul2d`, bound at its first run."""

    problem: Matmul2dProblem
    rank: int
    name: str
    config: Matmul2dConfig
    ring_ways: int
    context: TorchContext

    @property
    def title(self) -> str:
        """Return what messages call the product."""
        return _title(self.problem.dataflow, (self.problem.m, self.problem.n, self.problem.k))

    def run(self, a: Tensor, b: Tensor) -> Tensor:
        """Return this rank's shard of C, as a node of the graph where one is traced."""
        if not compat.is_traced(a):
            return self.multiply(a, b)
        problem = self.problem
        key = "matmul2d", problem, self.name, self.config, self.ring_ways
        rows, columns = Layout(problem.mesh, (Shard(0), Shard(1))).local_shape(
            (problem.m, problem.n), self.rank
        )
        return traced_product(
            self.context, key, self.title, (rows, columns), lambda: self, a.detach(), b.detach()
        )

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """Return this rank's shard of C."""
        bound = self._bound()
        bound.run({"a": a.detach(), "b": b.detach()})
        return bound.outputs["c"].clone()

    def _bound(self) -> BoundProgram:
        """Return the bound program, made at its first use or the first since it was dropped."""
        context, ranks = self.context, self.problem.mesh.ranks
        key = self.problem, self.name, self.config, self.ring_ways
        cached = context.programs.get(ranks, key)
        if cached is None:
            with call_order(context).titled(self.title):
                program = product_program(*key)
                bound = bind(program, self.rank, {}, context=context)
            cached = context.programs.put(ranks, key, bound, program_bytes(program))
        value: BoundProgram = cached.value
        return value
