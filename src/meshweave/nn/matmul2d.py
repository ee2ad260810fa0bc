"""A 2D-parallel product on local shards, for a user's own model: `matmul2d`.

Forward and both backward products are programs of one algorithm. Their dataflows come from one row of
MeshSlice's Table 1, so that no matrix is transposed and each gradient is sharded like what it is a gradient
of. Programs are bound once per size and reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from meshweave.algorithms.matmul2d import ALGORITHMS, Dataflow, Matmul2dConfig, Matmul2dProblem, algorithm
from meshweave.algorithms.matmul2d.common.passes import STATIONARY_OF, TABLE, PassName
from meshweave.algorithms.matmul2d.common.problem import two_d_placements
from meshweave.base.errors import BindError, LayoutError
from meshweave.describe.layout import Layout, Shard
from meshweave.execute.torch.bind import BoundProgram, bind
from meshweave.execute.torch.cache import program_bytes
from meshweave.execute.torch.call_order import call_order, require_process_group, share_refusal
from meshweave.execute.torch.context import TorchContext
from meshweave.ir.program import Program
from meshweave.lower import lower_rings
from meshweave.nn.dtensor import mesh_of, size_text
from meshweave.nn.matmul import NOT_COMPILED, autocast_operands
from meshweave.nn.products import DTYPES

Slices = int | Sequence[int]


@torch.compiler.disable(reason=NOT_COMPILED)  # type: ignore[untyped-decorator]
def matmul2d(
    a: Tensor,
    b: Tensor,
    *,
    mesh: DeviceMesh,
    shape: tuple[int, int, int],
    dataflow: Dataflow = "os",
    algorithm: str = "meshslice",
    slices: Slices = 4,
    block: int = 8,
    ring_ways: Literal[0, 1, 2] | None = None,
    context: TorchContext | None = None,
) -> Tensor:
    """Return this rank's shard of a distributed product; every rank of `mesh` calls it with its shards.

    Under `torch.autocast` operands are cast as for `torch.matmul`. `torch.compile` breaks the graph at the call.

    Rows of each global matrix are sharded over mesh dim 0, columns over dim 1, by DTensor's chunk rule
    (`[Shard(0), Shard(1)]`), uneven sizes included:

        dataflow  computes       a (global)  b (global)  stationary
        os        C = A B        (M, K)      (K, N)      C
        ls        C = A B^T      (M, K)      (N, K)      A
        rs        C = A^T B      (K, M)      (K, N)      B

    Args:
        mesh: a 2D DeviceMesh that this rank is in.
        shape: the global (M, N, K).
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
        LayoutError: shards do not fit `shape` on `mesh`, or the mesh is not 2D.
        BindError: a and b differ in dtype, or have one that no program has; another rank refuses the product, or
            is in another call; there is no process group.
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    require_process_group()
    context = context or TorchContext.default(a.device)
    ranks = mesh_of(mesh).ranks  # kept, where DeviceMesh.mesh is computed at each access
    with share_refusal(context, ranks, _title(dataflow, shape)):
        return _matmul2d(a, b, mesh, ranks, shape, dataflow, algorithm, slices, block, ring_ways, context)


def _title(dataflow: str, shape: tuple[int, int, int]) -> str:
    return f"matmul2d {dataflow} of sizes {size_text(shape)}"


def _matmul2d(
    a: Tensor,
    b: Tensor,
    mesh: DeviceMesh,
    ranks: tuple[int, ...],
    shape: tuple[int, int, int],
    dataflow: Dataflow,
    algorithm: str,
    slices: Slices,
    block: int,
    ring_ways: Literal[0, 1, 2] | None,
    context: TorchContext,
) -> Tensor:
    """Return the product of `matmul2d`, which documents the arguments."""
    if mesh.ndim != 2:
        raise LayoutError(f"matmul2d needs a 2D mesh, this one has {mesh.ndim} dims")
    a, b = autocast_operands(a.device.type, a, b)
    if a.dtype != b.dtype or a.dtype not in DTYPES:
        raise BindError(f"a is {a.dtype} and b {b.dtype}; both must be one of {', '.join(DTYPES.values())}")
    rows, columns = mesh_of(mesh).shape
    problem = Matmul2dProblem(*shape, (rows, columns), dataflow, DTYPES[a.dtype], ranks)
    rank = ranks[_position(mesh)]
    _check_shard(problem, "a", a, rank)
    _check_shard(problem, "b", b, rank)
    widths = _widths(slices)
    if ring_ways is None:
        ring_ways = 1 if a.device.type == "cpu" else 0
    if ring_ways not in (0, 1, 2):
        raise BindError(f"a ring has 1 or 2 ways, or 0 for the backend's own collectives, not {ring_ways}")
    out: Tensor = _Matmul2dFunction.apply(
        a, b, problem, rank, algorithm, Matmul2dConfig(widths, block), ring_ways, context
    )
    return out


def _widths(slices: Slices) -> tuple[int, ...]:
    if isinstance(slices, int) and slices > 0:
        return (1,) * slices
    if isinstance(slices, (int, str)) or not all(isinstance(width, int) and width > 0 for width in slices):
        raise BindError(f"slices {slices!r} is neither a positive count nor a sequence of positive widths")
    return tuple(slices)


def _position(mesh: DeviceMesh) -> int:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise LayoutError("this rank is not in the mesh")
    return int(coordinate[0]) * mesh_of(mesh).shape[1] + int(coordinate[1])


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
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        problem: Matmul2dProblem,
        rank: int,
        name: str,
        config: Matmul2dConfig,
        ring_ways: int,
        context: TorchContext,
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.config = problem, rank, name, config, ring_ways, context
        return _run(problem, rank, name, config, ring_ways, context, a, b)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        problem, rank, name, config, ring_ways, context = ctx.config
        a, b = ctx.saved_tensors
        role = {"x": a, "w": b, "dy": grads[0]}
        out: list[Tensor | None] = []
        passes: tuple[PassName, PassName] = ("backward_data", "backward_weight")
        for needed, of in zip(ctx.needs_input_grad, passes, strict=False):
            if not needed:
                out.append(None)
                continue
            left, right = (role[operand] for operand in TABLE[STATIONARY_OF[problem.dataflow]][of].operands)
            out.append(
                _run(backward_problem(problem, of), rank, name, config, ring_ways, context, left, right)
            )
        return (*out, None, None, None, None, None, None)


def backward_problem(forward: Matmul2dProblem, name: PassName) -> Matmul2dProblem:
    """Return the product that gives the gradient of A ("backward_data") or of B ("backward_weight")."""
    rule = TABLE[STATIONARY_OF[forward.dataflow]][name]
    size = {"t": forward.m, "o": forward.n, "i": forward.k}
    m, n, k = (size[letter] for letter in rule.sizes)
    return replace(forward, m=m, n=n, k=k, dataflow=rule.dataflow)


def _run(
    problem: Matmul2dProblem,
    rank: int,
    name: str,
    config: Matmul2dConfig,
    ring_ways: int,
    context: TorchContext,
    a: Tensor,
    b: Tensor,
) -> Tensor:
    bound = _bound(problem, rank, name, config, ring_ways, context)
    bound.run({"a": a.detach(), "b": b.detach()})
    return bound.outputs["c"].clone()


def _bound(
    problem: Matmul2dProblem,
    rank: int,
    name: str,
    config: Matmul2dConfig,
    ring_ways: int,
    context: TorchContext,
) -> BoundProgram:
    """Return the bound program of a product, made at its first use or the first since it was dropped."""
    ranks, key = problem.mesh.ranks, (problem, name, config, ring_ways)
    cached = context.programs.get(ranks, key)
    if cached is None:
        with call_order(context).titled(_title(problem.dataflow, (problem.m, problem.n, problem.k))):
            program = product_program(problem, name, config, ring_ways)
            bound = bind(program, rank, {}, context=context)
        cached = context.programs.put(ranks, key, bound, program_bytes(program))
    value: BoundProgram = cached.value
    return value


def product_program(problem: Matmul2dProblem, name: str, config: Matmul2dConfig, ring_ways: int) -> Program:
    """Return the program that `matmul2d` runs for a product: slices cut down to the dim's size, rings lowered."""
    if config.slice_count > problem.sliced_size:
        config = replace(config, slices=config.slices[: problem.sliced_size])
    entry = algorithm(name)
    if entry.operand_placements(problem) != two_d_placements(problem):
        known = [
            n for n, e in ALGORITHMS.items() if e.operand_placements(problem) == two_d_placements(problem)
        ]
        raise LayoutError(
            f"{name} shards otherwise than [Shard(0), Shard(1)]; take one of {', '.join(known)}"
        )
    program = entry.program(problem, config)
    if ring_ways == 0:
        return program
    return lower_rings(program, 1 if ring_ways == 1 else 2)
