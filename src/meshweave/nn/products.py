"""Products of matrices on their ranks: tuned once, bound once per context, run on local shards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from meshweave.algorithms.matmul.universal import Choice, Slicing, UniversalProblem, universal_program
from meshweave.algorithms.matmul.universal.problem import Operand
from meshweave.algorithms.matmul.universal.slicing import Block, Panel
from meshweave.describe.layout import Layout, Placement, Shard, StridedShard, Tile
from meshweave.errors import UnsupportedError, nearest
from meshweave.estimate.universal import Rates
from meshweave.execute.agree import agree
from meshweave.execute.groups import TorchContext
from meshweave.execute.memory import RemoteMemory, open_memory
from meshweave.execute.torch_backend import BoundProgram, bind
from meshweave.lower import lower_one_sided
from meshweave.tune.universal import TunedUniversal, tune_universal

DTYPES: dict[torch.dtype, str] = {
    getattr(torch, name): name
    for name in ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8")
}

Transport = Literal["messages", "shared", "mpi", "symmetric"]
TRANSPORTS = ("messages", "shared", "mpi", "symmetric")

Order = tuple[int, int] | None


@dataclass(frozen=True)
class Matrix:
    """An operand as a product sees it: a layout, global (rows, columns), how dims lie in memory, and this
    rank's part as a tensor of two dims."""

    layout: Layout
    shape: tuple[int, int]
    order: Order
    local: Tensor

    @property
    def transposed(self) -> Matrix:
        order = (1, 0) if self.order is None else None
        return Matrix(transposed(self.layout), self.shape[::-1], order, self.local.t())


def transposed(layout: Layout) -> Layout:
    """The layout of the transpose of a matrix."""
    rows, columns = ((0,), (0,)) if layout.folds is None else layout.folds
    turned = {
        dim: (dim + len(columns) if dim < len(rows) else dim - len(rows))
        for dim in range(len(rows + columns))
    }

    def turn(placement: Placement) -> Placement:
        if isinstance(placement, (Shard, StridedShard, Tile)):
            return replace(placement, dim=turned[placement.dim])
        return placement

    folds = None if layout.folds is None else (columns, rows)
    return replace(layout, placements=tuple(map(turn, layout.placements)), folds=folds)


def problem_of(a: Matrix, b: Matrix, c: Layout, dtype: torch.dtype) -> UniversalProblem:
    """The product of two operands with the result in layout `c`. Raises LayoutError."""
    (m, k), (_, n) = a.shape, b.shape
    return UniversalProblem(m, n, k, a.layout, b.layout, c, DTYPES[dtype], (a.order, b.order, None))


def cheapest(
    a: Matrix,
    b: Matrix,
    layouts: Iterable[Layout],
    dtype: torch.dtype,
    rates: Rates,
    stationary: Operand | None,
) -> int:
    """Which of several layouts of the result costs least, by its number; the first of equals."""
    found = []
    for number, layout in enumerate(layouts):
        tuned = tune_universal(problem_of(a, b, layout, dtype), rates, stationary=stationary, slices=(4,))
        found.append((tuned.estimate.total_s, tuned.moved_bytes, number))
    return min(found)[2]


def run_product(
    problem: UniversalProblem,
    tuned: TunedUniversal,
    rank: int,
    a: Tensor,
    b: Tensor,
    transport: Transport,
    context: TorchContext,
) -> Tensor:
    """This rank's part of C, in new memory; every rank of the problem runs it.

    Raises:
        BindError: ranks are about to run different products; nothing has moved then.
        UnsupportedError: the transport is not available here.
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    if transport not in TRANSPORTS:
        raise UnsupportedError(f"there is no transport '{transport}'{nearest(str(transport), TRANSPORTS)}")
    choice = tuned.choice
    if tuned.moved_bytes == 0 and choice.a is None and choice.b is None:
        return _alone(problem, choice, rank, a, b)
    bound = _bound(problem, choice, rank, transport, context)
    bound.run({"a": a, "b": b})
    return bound.outputs["c"].clone()


_CACHE = "_meshweave_universal"


def _bound(
    problem: UniversalProblem, choice: Choice, rank: int, transport: Transport, context: TorchContext
) -> BoundProgram:
    """The bound program of a product, made at its first use. It lives as long as its context."""
    cache: dict[Any, Any] = context.__dict__.setdefault(_CACHE, {})
    key = problem, choice, transport
    if key not in cache:
        program = universal_program(problem, choice)
        if transport == "messages":
            program = lower_one_sided(program)
            agree(context, program)
            cache[key] = bind(program, rank, {}, context=context)
        else:
            if transport not in cache:
                cache[transport] = open_memory(transport, context)
            memory: RemoteMemory = cache[transport]
            cache[key] = bind(program, rank, {}, context=context, memory=memory)
    found: BoundProgram = cache[key]
    return found


# --- products that need no other rank ---------------------------------------------------------------------------


def _alone(problem: UniversalProblem, choice: Choice, rank: int, a: Tensor, b: Tensor) -> Tensor:
    """What the program would compute if nothing has to move: without an executor there is nothing to set up."""
    slicing = Slicing(problem, replace(choice, slices=1))
    shape = problem.c.local_shape((problem.m, problem.n), rank)
    steps = slicing.steps(rank)
    if len(steps) == 1:
        panels = steps[0].panels
        target = panels["c"].blocks
        if len(target) == 1 and target[0].shape == shape:
            return torch.mm(_panel(panels["a"], a), _panel(panels["b"], b))
    out = torch.zeros(shape, dtype=a.dtype, device=a.device)
    for step in steps:
        left, right = _panel(step.panels["a"], a), _panel(step.panels["b"], b)
        if len(step.panels["c"].blocks) == 1:
            target_view = _part(out, step.panels["c"].blocks[0])
            torch.addmm(target_view, left, right, out=target_view)
            continue
        result = torch.mm(left, right)
        for block in step.panels["c"].blocks:
            _part(out, block).add_(_at(result, block))
    return out


def _part(whole: Tensor, block: Block) -> Tensor:
    return whole[block.rows[0] : block.rows[1], block.columns[0] : block.columns[1]]


def _at(panel: Tensor, block: Block) -> Tensor:
    (row, column), (rows, columns) = block.at, block.shape
    return panel[row : row + rows, column : column + columns]


def _panel(panel: Panel, local: Tensor) -> Tensor:
    if len(panel.blocks) == 1:
        return _part(local, panel.blocks[0])
    found = local.new_empty(panel.shape)
    for block in panel.blocks:
        _at(found, block).copy_(_part(local, block))
    return found
