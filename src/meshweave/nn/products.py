"""Products of matrices on their ranks: tuned once, bound once per context, run on local shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from meshweave.algorithms.universal import Slicing, UniversalConfig, UniversalProblem, universal_program
from meshweave.algorithms.universal.panels import OperandPanel, OwnedBlock
from meshweave.algorithms.universal.problem import Operand, transposed_layout
from meshweave.base.errors import UnsupportedError, did_you_mean
from meshweave.cost.rates import RankRates
from meshweave.describe.layout import Layout
from meshweave.execute.memory import RemoteMemory, open_memory
from meshweave.execute.ranks.agreement import agree
from meshweave.execute.torch.bind import BoundProgram, bind
from meshweave.execute.torch.context import TorchContext
from meshweave.ir.program import Program
from meshweave.lower import lower_one_sided, read_in_place
from meshweave.tune.universal import Objective, TunedUniversal, tune_universal

DTYPES: dict[torch.dtype, str] = {
    getattr(torch, name): name
    for name in ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8")
}

Transport = Literal["messages", "shared", "mpi", "symmetric"]
TRANSPORTS = ("messages", "shared", "mpi", "symmetric")

Order = tuple[int, int] | None


@dataclass(frozen=True)
class Matrix:
    """An operand as a product sees it: a layout, global (rows, columns), and how dims lie in memory."""

    layout: Layout
    shape: tuple[int, int]
    order: Order

    @property
    def transposed(self) -> Matrix:
        order = (1, 0) if self.order is None else None
        return Matrix(transposed_layout(self.layout), self.shape[::-1], order)


def problem_of(a: Matrix, b: Matrix, c: Layout, dtype: torch.dtype) -> UniversalProblem:
    """The product of two operands with the result in layout `c`. Raises LayoutError."""
    (m, k), (_, n) = a.shape, b.shape
    return UniversalProblem(m, n, k, a.layout, b.layout, c, DTYPES[dtype], (a.order, b.order, None))


def cheapest(
    a: Matrix,
    b: Matrix,
    layouts: Iterable[Layout],
    dtype: torch.dtype,
    rates: RankRates,
    stationary: Operand | None,
    objective: Objective,
) -> int:
    """Which of several layouts of the result costs least, by its number; the first of equals."""
    found = []
    for number, layout in enumerate(layouts):
        problem = problem_of(a, b, layout, dtype)
        tuned = tune_universal(problem, rates, stationary=stationary, objective=objective, slices=(4,))
        cost = (tuned.moved_bytes, tuned.estimate.total_s)
        found.append((*(cost if objective == "bytes" else cost[::-1]), number))
    best: int = min(found)[2]
    return best


Product = Callable[[Tensor, Tensor], Tensor]
"""From this rank's parts of A and B to its part of C, in new memory; every rank runs it."""


class _Products(dict[Any, Product]):
    """The products that were prepared in a context, by problem, configuration and transport."""


class _Memories(dict[Transport, RemoteMemory]):
    """The remote memory that was opened in a context, by transport."""


def prepare(
    problem: UniversalProblem, tuned: TunedUniversal, rank: int, transport: Transport, context: TorchContext
) -> Product:
    """Binds a product; every rank of the problem does so.

    Raises:
        BindError: ranks are about to run different products; nothing has moved then.
        UnsupportedError: the transport is not available here.
        RankLostError, DeadlineError: other ranks are missing or late; so does the product.
    """
    if transport not in TRANSPORTS:
        raise UnsupportedError(
            f"there is no transport '{transport}'{did_you_mean(str(transport), TRANSPORTS)}"
        )
    choice = tuned.config
    products = context.cache(_Products)
    key = problem, choice, transport
    if key not in products:
        program = universal_program(problem, choice)
        # Before any of them sets up what the others may not want, and where nothing moves, too: they may.
        agree(context, replace(program, name=f"{program.name}, {transport}"))
        if tuned.moved_bytes == 0 and choice.summed_a is None and choice.summed_b is None:
            products[key] = _alone(problem, choice, rank)
        else:
            products[key] = _running(_bound(program, rank, transport, context))
    return products[key]


def _running(bound: BoundProgram) -> Product:

    def run(a: Tensor, b: Tensor) -> Tensor:
        bound.run({"a": a, "b": b})
        return bound.outputs["c"].clone()

    return run


def _bound(program: Program, rank: int, transport: Transport, context: TorchContext) -> BoundProgram:
    if transport == "messages":
        return bind(lower_one_sided(program), rank, {}, context=context)
    memories = context.cache(_Memories)
    if transport not in memories:
        memories[transport] = open_memory(transport, context)
    memory = memories[transport]
    if transport == "shared":
        program = read_in_place(program)
    return bind(program, rank, {}, context=context, memory=memory)


# --- products that need no other rank ---------------------------------------------------------------------------


def _alone(problem: UniversalProblem, choice: UniversalConfig, rank: int) -> Product:
    """What the program would compute if nothing has to move: without an executor there is nothing to set up."""
    steps = Slicing(problem, replace(choice, num_slices=1)).steps(rank)
    shape = problem.c.local_shape((problem.m, problem.n), rank)

    def one(a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(_panel(steps[0].panels["a"], a), _panel(steps[0].panels["b"], b))

    def several(a: Tensor, b: Tensor) -> Tensor:
        out = torch.zeros(shape, dtype=a.dtype, device=a.device)
        for step in steps:
            left, right = _panel(step.panels["a"], a), _panel(step.panels["b"], b)
            blocks = step.panels["c"].blocks
            if len(blocks) == 1:
                target = _part(out, blocks[0])
                torch.addmm(target, left, right, out=target)
                continue
            result = torch.mm(left, right)
            for block in blocks:
                _part(out, block).add_(_at(result, block))
        return out

    whole = len(steps) == 1 and [block.shape for block in steps[0].panels["c"].blocks] == [shape]
    return one if whole else several


def _part(whole: Tensor, block: OwnedBlock) -> Tensor:
    return whole[block.rows[0] : block.rows[1], block.columns[0] : block.columns[1]]


def _at(panel: Tensor, block: OwnedBlock) -> Tensor:
    (row, column), (rows, columns) = block.panel_offset, block.shape
    return panel[row : row + rows, column : column + columns]


def _panel(panel: OperandPanel, local: Tensor) -> Tensor:
    if len(panel.blocks) == 1:
        return _part(local, panel.blocks[0])
    found = local.new_empty(panel.shape)
    for block in panel.blocks:
        _at(found, block).copy_(_part(local, block))
    return found
