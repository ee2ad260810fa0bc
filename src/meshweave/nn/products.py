"""Products of matrices on their ranks: tuned once, bound once per context, run on local shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from meshweave.algorithms.universal import Slicing, UniversalProblem, universal_program
from meshweave.algorithms.universal.config import STAGE_LIMITS, ScheduleKind, StageLimits
from meshweave.algorithms.universal.problem import Operand, transposed_layout
from meshweave.base.errors import BindError
from meshweave.cost.rates import RankRates
from meshweave.describe.layout import Layout
from meshweave.execute.memory.in_place import InPlaceProgram
from meshweave.execute.ranks.agreement import agree
from meshweave.execute.torch.bind import BoundProgram, bind
from meshweave.execute.torch.cache import CachedProgram, program_bytes
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.threads import agreed_num_threads, num_threads_set
from meshweave.ir.analysis.replicas import ALIGNMENT_BYTES
from meshweave.ir.program import Program
from meshweave.ir.program.views import dense_strides
from meshweave.lower import lower_one_sided, lower_to_shared_memory
from meshweave.nn.transports import (
    FENCES_S,
    Resolved,
    Transport,
    memory_of,
    resolve_transport,
    shared_memory_rates,
)
from meshweave.tune.universal import TunedUniversal, tune_universal

DTYPES: dict[torch.dtype, str] = {
    getattr(torch, name): name
    for name in ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8")
}

Order = tuple[int, int] | None


@dataclass(frozen=True)
class Matrix:
    """An operand of a product as a matrix.

    Attributes:
        layout: how its elements lie on the ranks.
        shape: the global (rows, columns).
        order: (1, 0) where it is column-major in memory, None where it is row-major.
    """

    layout: Layout
    shape: tuple[int, int]
    order: Order

    @property
    def transposed(self) -> Matrix:
        """Return the transpose: rows and columns of layout and shape swapped, and `order`; no data moves."""
        order = (1, 0) if self.order is None else None
        return Matrix(transposed_layout(self.layout), self.shape[::-1], order)


def problem_of(a: Matrix, b: Matrix, c: Layout, dtype: torch.dtype) -> UniversalProblem:
    """Return the problem of multiplying a (m, k) by b (k, n) into layout `c`; `dtype` is that of all three.

    Raises LayoutError where their sizes or layouts do not fit.
    """
    (m, k), (_, n) = a.shape, b.shape
    return UniversalProblem(m, n, k, a.layout, b.layout, c, DTYPES[dtype], (a.order, b.order, None))


# --- tuning -----------------------------------------------------------------------------------------------------


def tune(
    problem: UniversalProblem,
    transport: Resolved,
    rates: RankRates | None,
    stationary: Operand | None,
    default_rates: RankRates,
    schedule: ScheduleKind = "direct",
    limits: StageLimits = STAGE_LIMITS,
) -> TunedUniversal:
    """Return how to compute a product over a transport: the stationary operand, slices and order of steps.

    With the caller's `rates` it is the config that is estimated to be fastest. Without them, over any transport
    but shared memory, it is the one that moves fewest bytes, never more than DTensor moves, and of several the
    fastest at `default_rates`. In shared memory without `rates` it is the fastest at the rates of one host. There,
    in either case, a config that moves nothing is preferred if it is slower by no more than the seconds of the
    fences (`FENCES_S`).

    Args:
        transport: how ranks get operands of others.
        rates: FLOP/s and bytes/s that the caller gave; None if it gave none.
        stationary: the operand that must stay; None for any.
        default_rates: taken for `rates` None; not with the transport "shared".
        schedule: how the local products of a rank are ordered.
        limits: the most products, fetches and accumulates of one stage of that order.
    """
    search = partial(tune_universal, problem, stationary=stationary, schedule=schedule, limits=limits)
    if transport != "shared":
        if rates is None:
            return search(default_rates, objective="bytes")
        return search(rates)
    rates = rates or shared_memory_rates()
    slices = (1,)  # what is read in place needs nothing to hide it
    fastest = search(rates, slices=slices)
    if fastest.moved_bytes:
        least = search(rates, objective="bytes", slices=slices)
        if not least.moved_bytes and least.estimate.total_s <= fastest.estimate.total_s + FENCES_S:
            return least
    return fastest


def cheapest(
    problems: Sequence[UniversalProblem],
    transport: Resolved,
    rates: RankRates | None,
    stationary: Operand | None,
    default_rates: RankRates,
) -> int:
    """Return the index in `problems` of the product that costs least; of equal ones the first.

    Without the caller's `rates`, and not in shared memory, fewest moved bytes come first, then the estimated time
    at `default_rates`. Otherwise it is the estimated time, then bytes; in shared memory without `rates`, the time
    at the rates of one host. Each product is priced with four slices.

    Args:
        problems: products of the same operands into different layouts.
        transport: how ranks get operands of others.
        rates: FLOP/s and bytes/s that the caller gave; None if it gave none.
        stationary: the operand that must stay; None for any.
        default_rates: taken for `rates` None; not with the transport "shared".
    """
    if len(problems) == 1:
        return 0
    by_bytes = rates is None and transport != "shared"
    rates = rates or (shared_memory_rates() if transport == "shared" else default_rates)
    costs = []
    for problem in problems:
        objective = "bytes" if by_bytes else "time"
        tuned = tune_universal(problem, rates, stationary=stationary, objective=objective, slices=(4,))
        cost = tuned.moved_bytes, tuned.estimate.total_s
        costs.append(cost if by_bytes else cost[::-1])
    return costs.index(min(costs))


# --- binding ----------------------------------------------------------------------------------------------------

LocalProduct = Callable[[Tensor, Tensor], Tensor]
"""From this rank's parts of A and B to its part of C, in new memory; every rank of the product calls it."""


def prepare(
    problem: UniversalProblem, tuned: TunedUniversal, rank: int, transport: Transport, context: TorchContext
) -> LocalProduct:
    """Bind a product and return it as a function of this rank's shards of A and B to that of C, in new memory.

    All ranks of the problem call `prepare`, and later the function. The context keeps the product for a
    later `prepare` of the same one, which counts as a use of it; calls of the function do not. If the
    context has dropped it, that `prepare` binds it anew; a function that was returned before still works.

    Args:
        tuned: how it is computed, as `tune` returns it; the same on all ranks.
        rank: this one, global.

    Raises:
        BindError: ranks are about to run different products, or lack the memory.
        UnsupportedError: there is no such transport, or it is not available here.
        RankLostError, DeadlineError: other ranks are missing or late; the function raises them, too.
    """
    return prepare_cached(problem, tuned, rank, transport, context).value


def prepare_cached(
    problem: UniversalProblem, tuned: TunedUniversal, rank: int, transport: Transport, context: TorchContext
) -> CachedProgram[LocalProduct]:
    """Return the product, cached in `context`; its `value` computes this rank's shard of C from those of A and B.

    Collective at its first use in the context, or the first since it was dropped: all ranks bind it then. `value`
    returns new memory, and all ranks call it.

    Where nothing has to move, and in shared memory, a rank reads its own operands where the caller has them. In
    shared memory it first copies the parts that other ranks read. Where several ranks compute the same copy of C,
    an operand with unusual strides or alignment is copied. Other transports copy operands into buffers of the
    program.

    Args:
        tuned: how it is computed, as `tune` returns it; the same on all ranks.
        rank: this one, global.

    Raises:
        BindError: ranks are about to run different products; nothing has moved then. Some rank has no memory for
            "shared"; "auto" takes messages then.
        UnsupportedError: there is no such transport, or it is not available here.
        RankLostError, DeadlineError: other ranks are missing or late; the returned function raises them, too.
    """
    resolved = resolve_transport(transport, problem.ranks, context)
    key = problem, tuned.config, transport
    cached = context.programs.get(problem.ranks, key)
    if cached is None:
        moves = (
            tuned.moved_bytes > 0 or tuned.config.summed_a is not None or tuned.config.summed_b is not None
        )
        in_place = not moves or resolved == "shared"
        config = replace(tuned.config, num_slices=1) if in_place else tuned.config
        is_recomputed = Slicing(problem, config).is_recomputed
        program = universal_program(problem, config)
        # Before any of them sets up what the others may not want, and where nothing moves, too: they may.
        agree(context, replace(program, name=f"{program.name}, {transport}"))
        num_threads = agreed_num_threads(context, problem.ranks) if is_recomputed else None
        with torch.inference_mode(False):  # buffers outlive the call, and later ones may be ordinary
            if moves:
                run = _bound(program, rank, resolved, context, num_threads, is_auto=transport == "auto")
            else:
                run = InPlaceProgram(lower_to_shared_memory(program), rank, context)
        if is_recomputed and in_place:
            run = _recomputing(run, program, rank, num_threads)
        cached = context.programs.put(problem.ranks, key, run, program_bytes(program))
    return cached


def _bound(
    program: Program,
    rank: int,
    transport: Resolved,
    context: TorchContext,
    num_threads: int | None,
    *,
    is_auto: bool,
) -> LocalProduct:
    def by_messages() -> LocalProduct:
        return copying(bind(lower_one_sided(program), rank, {}, context=context, num_threads=num_threads))

    if transport == "messages":
        return by_messages()
    memory = memory_of(transport, program.ranks, context)
    if transport != "shared":
        return copying(bind(program, rank, {}, context=context, memory=memory, num_threads=num_threads))
    try:
        return InPlaceProgram(lower_to_shared_memory(program), rank, context, memory)
    except BindError:  # on every rank, for they agree on the program: some has no memory left
        if not is_auto:
            raise
        return by_messages()


def _recomputing(run: LocalProduct, program: Program, rank: int, num_threads: int | None) -> LocalProduct:
    """Return a product whose bits follow from the values of its operands alone.

    Ranks that compute the same copy of C then get the same bits, wherever each one's operands lie in memory and
    however many threads it has. An operand is copied where its strides or its alignment are unusual.
    """
    shape_a, shape_b = (program.local_shape(name, rank) for name in ("a", "b"))
    strides_a = dense_strides(shape_a, program.buffer_of["a"].order)
    strides_b = dense_strides(shape_b, program.buffer_of["b"].order)

    def recompute(a: Tensor, b: Tensor) -> Tensor:
        a, b = _laid_out(a, shape_a, strides_a), _laid_out(b, shape_b, strides_b)
        if num_threads is None or num_threads == torch.get_num_threads():
            return run(a, b)
        with num_threads_set(num_threads):
            return run(a, b)

    return recompute


def _laid_out(tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Return a tensor of equal values with these strides at an aligned address; itself where it is one."""
    if tensor.stride() == strides and tensor.data_ptr() % ALIGNMENT_BYTES == 0:
        return tensor
    if tensor.shape != shape:
        return tensor  # the product refuses it
    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def copying(bound: BoundProgram) -> LocalProduct:
    """Return a function that copies A and B into a bound program's buffers, runs it and returns a copy of C."""

    def run(a: Tensor, b: Tensor) -> Tensor:
        bound.run({"a": a, "b": b})
        return bound.outputs["c"].clone()

    return run
