"""The backward part of a piece cut in two: what leads to the gradient of the residual, and all that is left.

Schedules that fill bubbles with gradients of weights (Qi et al., Zero Bubble Pipeline Parallelism, ICLR '24) run
the second part later. What it reads of the first one is an output there and an input of the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from meshweave.algorithms.block.parts import BlockParts, calls_writing, cut_program, read_first
from meshweave.algorithms.block.writer import NEXT_SITE
from meshweave.base.errors import UnsupportedError
from meshweave.ir.program import On, Program, Statement
from meshweave.ir.program.ops import Call
from meshweave.ir.program.statements import ops_of


@dataclass(frozen=True)
class SplitBackward:
    """The backward program of a piece of a model as two programs, of which the second may run later.

    Attributes:
        input_grad: the first program, for the gradient of the piece's input; None if the input is no activation.
        weight_grad: the second program, for the gradients of weights.
        passed: names of the buffers that are outputs of the first program and inputs of the second.
        early: names of the buffers of gradients of weights that the first program computes, since one op computes
            them together with a gradient that the first program needs.
    """

    input_grad: Program | None
    weight_grad: Program
    passed: tuple[str, ...]
    early: tuple[str, ...] = ()


def split_backward(parts: BlockParts) -> SplitBackward:
    """Return a piece's backward program as two: for the gradient of its input, then for those of its weights.

    If the piece has no activation as input, as an embedding has none, the first is None, and the second is the
    whole backward program.

    Raises:
        UnsupportedError: the second part reads scratch that no `call` op of the first writes, or writes to a
            buffer that the first passes on to it.
    """
    whole = parts.backward
    (on,) = whole.body
    assert isinstance(on, On)
    outputs = {buffer.name for buffer in whole.buffers if buffer.kind == "output"}
    wanted = outputs - parts.sums.keys()
    if not wanted:
        return SplitBackward(None, whole, ())
    first, second = _cut(on.body, wanted, outputs - wanted)
    made = {view.buffer for op in ops_of(first) for view in op.writes}
    scratch = {name for name in read_first(second) if whole.buffer_of[name].kind == "scratch"} & made
    second = (*calls_writing(scratch, first, "gradients of weights read"), *second)
    passed = tuple(name for name in read_first(second) if name in made)
    if changed := {view.buffer for op in ops_of(second) for view in op.writes} & set(passed):
        raise UnsupportedError(f"gradients of weights change {min(changed)}, which the residual's has left")
    early = tuple(sorted((outputs - wanted) & made))
    input_grad = cut_program(whole, f"{whole.name}, input gradient", first, (), (*passed, *wanted, *early))
    weight_grad = cut_program(whole, f"{whole.name}, weight gradients", second, passed, outputs - wanted)
    return SplitBackward(input_grad, weight_grad, passed, early)


def _cut(
    statements: Sequence[Statement], residual: Iterable[str], weights: Iterable[str]
) -> tuple[tuple[Statement, ...], tuple[Statement, ...]]:
    """Return the statements that lead to buffers of weights but not to those of the residual last, others first.

    What leads to neither, as the end of a forward part that is computed again, stays in the first part. So do
    calls that only wait (`next_site`): there they wait for what the first part makes.
    """
    of_residual, of_weights = _leading_to(statements, residual), _leading_to(statements, weights)
    second = of_weights - of_residual
    numbered = list(enumerate(statements))
    kept, left = (
        tuple(statement for number, statement in numbered if (number in second) == is_second)
        for is_second in (False, True)
    )
    elsewhere = _written(left) - _written(kept)
    first = [_waiting_less(each, elsewhere) if isinstance(each, Call) else each for each in kept]
    return tuple(each for each in first if each is not None), left


def _written(statements: Iterable[Statement]) -> set[str]:
    return {view.buffer for op in ops_of(statements) for view in op.writes}


def _waiting_less(call: Call, elsewhere: set[str]) -> Call | None:
    """Return a call, of those that only wait without what is written elsewhere; None for one with nothing left."""
    if call.fn != NEXT_SITE:
        return call
    ins = tuple(view for view in call.ins if view.buffer not in elsewhere)
    return replace(call, ins=ins) if ins else None


def _leading_to(statements: Sequence[Statement], wanted: Iterable[str]) -> set[int]:
    """Return the numbers of the statements that some buffers depend on."""
    needed, numbers = set(wanted), set[int]()
    for number, statement in reversed(list(enumerate(statements))):
        ops = list(ops_of((statement,)))
        if any(view.buffer in needed for op in ops for view in op.writes):
            needed |= {view.buffer for op in ops for view in op.reads}
            numbers.add(number)
    return numbers
