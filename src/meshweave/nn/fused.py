"""Linear layers fused with their collectives: communication that starts as tiles are finished, or starts them.

`linear_reduce_scatter` and `all_gather_linear` are the two products of a tensor-parallel layer whose activations
are sharded by rows in between (sequence parallelism). They run the programs of `algorithms.fused`, which are also
simulated, with their products written out by tiles. The backward pass of each is the other's program.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from meshweave.algorithms.fused import NoChoice, Tiles
from meshweave.algorithms.table import ALGORITHMS
from meshweave.algorithms.universal.problem import UniversalProblem
from meshweave.base.errors import LayoutError, did_you_mean
from meshweave.describe.layout import Layout
from meshweave.describe.layout import Shard as LayoutShard
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.torch.bind import BoundProgram, bind
from meshweave.execute.torch.cache import program_bytes
from meshweave.execute.torch.call_order import require_process_group, share_refusal
from meshweave.execute.torch.context import TorchContext
from meshweave.ir.analysis.edges import exposed_buffers
from meshweave.lower import lower_one_sided, write_out_tiles
from meshweave.nn.custom_ops import refuse_second_derivative
from meshweave.nn.matmul_plans import check_dtypes
from meshweave.nn.products import DTYPES
from meshweave.nn.transports import Transport, check_transport, memory_of, resolve

_ALL_GATHER = "t3_all_gather"
REDUCE_SCATTERS = ("t3_ring", "t3_direct", "looped_reduce_scatter", "t3_sequential")
"""The algorithms of `linear_reduce_scatter`, by their names in `ALGORITHMS`."""


@dataclass(frozen=True)
class _Options:
    algorithm: str
    tiles: Tiles
    transport: Transport
    context: TorchContext = field(compare=False)


def linear_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    *,
    algorithm: str = "t3_ring",
    tiles: Tiles | None = None,
    transport: Transport = "auto",
    context: TorchContext | None = None,
) -> Tensor:
    """Return this rank's rows of the sum over ranks of x weight^T; all ranks of the process group call it.

        operand  local shape         global shape, of DTensors     placement
        x        (rows, K / ranks)   (rows, K)                     Shard(1)
        weight   (N, K / ranks)      (N, K)                        Shard(1)
        result   (rows / ranks, N)   (rows, N)                     Shard(0)

    Each part of the result is computed by tiles, in an order that differs from rank to rank, and moves on as soon
    as all its terms are there. Differentiable once: the gradient of x is `all_gather_linear`'s program, and that
    of weight takes the rows that it gathers. Equal calls give equal bits.

    Args:
        x: the local tensor of each rank of the default process group, or a DTensor on a mesh of all of them.
        weight: as x.
        algorithm: "t3_ring", "t3_direct"; without tiles "looped_reduce_scatter", "t3_sequential".
            `tune_fused` chooses by simulation.
        tiles: sizes and order of tiles; None for four tiles of whole rows to a part.
        transport: as for `meshweave.matmul`.
        context: as for `meshweave.matmul`.

    Raises:
        LayoutError: shapes or placements do not fit; some rank would have no rows.
        BindError: dtypes differ, or ranks are about to run different products.
        UnsupportedError: the transport is not available here; a second derivative.
        RankLostError, DeadlineError: other ranks are missing or late. The error names the region that is not
            whole, its rank, and the ranks that have not delivered.
    """
    options = _options(algorithm, tiles, transport, context, x)
    ranks = _num_ranks()
    with share_refusal(options.context, range(ranks), "linear_reduce_scatter"):
        rows = _check(x, weight, 1, 1, "linear_reduce_scatter")
        k = x.shape[1] if isinstance(x, DTensor) else x.shape[1] * ranks
        sizes = rows, weight.shape[0], k
        local: Tensor = _ReduceScatterLinear.apply(_local(x), _local(weight), sizes, options)
        return _like(local, x, (rows, weight.shape[0]), 0)


def all_gather_linear(
    x: Tensor,
    weight: Tensor,
    *,
    algorithm: str = "t3_ring",
    tiles: Tiles | None = None,
    transport: Transport = "auto",
    context: TorchContext | None = None,
) -> Tensor:
    """Return x weight^T for the rows of all ranks; all ranks of the process group call it.

        operand  local shape         global shape, of DTensors     placement
        x        (rows / ranks, K)   (rows, K)                     Shard(0)
        weight   (N / ranks, K)      (N, K)                        Shard(0)
        result   (rows, N / ranks)   (rows, N)                     Shard(1)

    Rows go around a ring, and those of a tile are multiplied as soon as they are there. Differentiable once: the
    gradient of x is `linear_reduce_scatter`'s program with `algorithm`; what was gathered is kept for that of
    weight. Arguments and errors are those of `linear_reduce_scatter`; local tensors have one shape on all ranks.
    """
    options = _options(algorithm, tiles, transport, context, x)
    ranks = _num_ranks()
    with share_refusal(options.context, range(ranks), "all_gather_linear"):
        local_rows = _check(x, weight, 0, 0, "all_gather_linear")
        rows, columns = (
            (local_rows, weight.shape[0])
            if isinstance(x, DTensor)
            else (local_rows * ranks, weight.shape[0] * ranks)
        )
        sizes = rows, columns, x.shape[1]
        local: Tensor = _AllGatherLinear.apply(_local(x), _local(weight), sizes, options)
        return _like(local, x, (rows, columns), 1)


# --- autograd ---------------------------------------------------------------------------------------------------


class _ReduceScatterLinear(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, sizes: tuple[int, int, int], options: _Options
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes, ctx.options = sizes, options
        return _reduce_scatter(x, weight.t(), sizes, options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a fused linear layer")
        x, weight = ctx.saved_tensors
        rows, columns, k = ctx.sizes
        grad_x, gathered = _all_gather(grads[0], weight, (rows, k, columns), ctx.options)
        return grad_x, gathered.t() @ x, None, None


class _AllGatherLinear(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, sizes: tuple[int, int, int], options: _Options
    ) -> Tensor:
        result, gathered = _all_gather(x, weight.t(), sizes, options)
        ctx.save_for_backward(gathered, weight)
        ctx.sizes, ctx.options = sizes, options
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a fused linear layer")
        gathered, weight = ctx.saved_tensors
        rows, columns, k = ctx.sizes
        grad_x = _reduce_scatter(grads[0], weight, (rows, k, columns), ctx.options)
        return grad_x, grads[0].t() @ gathered, None, None


# --- on local tensors ---------------------------------------------------------------------------------------


def _reduce_scatter(a: Tensor, b: Tensor, sizes: tuple[int, int, int], options: _Options) -> Tensor:
    """Return this rank's rows of A B, of which `a` has columns and `b` rows."""
    bound = _bound(options.algorithm, _problem(a, b, sizes, (1, 0, 0)), options)
    bound.run({"a": a, "b": b})
    return bound.outputs["c"].clone()


def _all_gather(
    a: Tensor, b: Tensor, sizes: tuple[int, int, int], options: _Options
) -> tuple[Tensor, Tensor]:
    """Return the columns of A B that `b` has, and all of A, of which `a` has this rank's rows."""
    problem = _problem(a, b, sizes, (0, 1, 1))
    bound = _bound(_ALL_GATHER, problem, options)
    bound.run({"a": a, "b": b})
    gathered = bound.scratch["gathered"].clone()
    start = -(-sizes[0] // len(problem.ranks)) * bound.rank
    gathered[start : start + a.shape[0]] = a  # no rank sends itself its own rows
    return bound.outputs["c"].clone(), gathered


def _problem(
    a: Tensor, b: Tensor, sizes: tuple[int, int, int], shards: tuple[int, int, int]
) -> UniversalProblem:
    mesh = Mesh.of("tp", (_num_ranks(),), ("x",))
    m, n, k = sizes
    of_a, of_b, of_c = (Layout(mesh, (LayoutShard(dim),)) for dim in shards)
    order_a, order_b = ((1, 0) if one.stride(0) == 1 and one.stride(1) > 1 else None for one in (a, b))
    orders = order_a, order_b, None
    return UniversalProblem(m, n, k, of_a, of_b, of_c, DTYPES[a.dtype], orders)


def _bound(name: str, problem: UniversalProblem, options: _Options) -> BoundProgram:
    """Return a product bound to memory of its own, at the first of its kind by all ranks together."""
    context = options.context
    key = "fused", name, problem, options.tiles, options.transport
    cached = context.programs.get(problem.ranks, key)
    if cached is None:
        entry = ALGORITHMS[name]
        config = options.tiles if isinstance(next(entry.candidates(problem)), Tiles) else NoChoice()
        program = write_out_tiles(entry.program(problem, config))
        resolved = resolve(options.transport, problem.ranks, context)
        rank = context.rank
        assert rank is not None
        if resolved == "messages" or not exposed_buffers(program):
            bound = bind(lower_one_sided(program), rank, {}, context=context)
        else:
            memory = memory_of(resolved, problem.ranks, context)
            bound = bind(program, rank, {}, context=context, memory=memory)
        cached = context.programs.put(problem.ranks, key, bound, program_bytes(program))
    run: BoundProgram = cached.value
    return run


# --- arguments ----------------------------------------------------------------------------------------------


def _options(
    algorithm: str, tiles: Tiles | None, transport: Transport, context: TorchContext | None, x: Tensor
) -> _Options:
    require_process_group()
    if algorithm not in REDUCE_SCATTERS:
        raise LayoutError(
            f"algorithm is {algorithm!r}{did_you_mean(algorithm, REDUCE_SCATTERS)}; it must be one of "
            f"{', '.join(REDUCE_SCATTERS)}"
        )
    check_transport(transport)
    return _Options(algorithm, tiles or Tiles(), transport, context or TorchContext.default(x.device.type))


def _num_ranks() -> int:
    return int(torch.distributed.get_world_size())


def _check(x: Tensor, weight: Tensor, of_x: int, of_weight: int, name: str) -> int:
    """Return the rows of x. Raises LayoutError, BindError."""
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise LayoutError(
            f"{name} of x {tuple(x.shape)} and weight {tuple(weight.shape)}: they must be (rows, K) and (N, K)"
        )
    if isinstance(x, DTensor) != isinstance(weight, DTensor):
        raise LayoutError(f"{name} of a DTensor and a plain tensor: make both DTensors, or neither")
    for one, dim, what in ((x, of_x, "x"), (weight, of_weight, "weight")):
        if isinstance(one, DTensor):
            ranks = one.device_mesh.mesh.reshape(-1).tolist()
            if one.device_mesh.ndim != 1 or ranks != list(range(_num_ranks())):
                raise LayoutError(
                    f"{name} needs a mesh of one dim with all ranks in order, {what} is on {ranks}"
                )
            if tuple(one.placements) != (Shard(dim),):
                raise LayoutError(f"{name} needs {what} in Shard({dim}), it is in {one.placements}")
    check_dtypes(x=x, weight=weight)
    return int(x.shape[0])


def _local(one: Tensor) -> Tensor:
    return one.to_local() if isinstance(one, DTensor) else one


def _like(local: Tensor, x: Tensor, shape: tuple[int, int], dim: int) -> Tensor:
    """Return a local result as a DTensor where x is one."""
    if not isinstance(x, DTensor):
        return local
    result: Tensor = DTensor.from_local(
        local, x.device_mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
    )
    return result
