"""Seeds faults into golden programs and catches what `validate` says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from builders import Listed, golden, golden_text, listed, with_ops

from meshweave.base.errors import ProgramError
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Op
from meshweave.ir.program.parse import parse
from meshweave.ir.program.views import Blocked, Range, View

WINDOW = """
program("window")
tp = mesh((3,), ("x",))
X = tensor((6, 2), "float32")
Y = tensor((6, 2), "float32")
computes(Y, same(X))
x = input(X, tp[S(0)])
inbox = scratch((2, 2), "float32", on=tp)
y = output(Y, tp[S(0)])
compute = lane()
net = lane()
with tp:
    put(at((tp.x + 1) % 3, inbox), x, lane=net)
    fence(over="tp", lane=net)
    put(at((tp.x + 2) % 3, y), inbox, lane=net)
    fence(over="tp", lane=net)
"""


def fault(program: Program) -> ProgramError:
    with pytest.raises(ProgramError) as caught:
        validate(program)
    return caught.value


def text_fault(name: str, old: str, new: str) -> ProgramError:
    """The fault of a golden program in which `old`, which it has once, reads `new`."""
    text = golden_text(name)
    assert text.count(old) == 1
    return fault(parse(text.replace(old, new)))


def find(ops: Listed, kind: str, rank: int, number: int = 0) -> int:
    """Where the `number`-th op of a kind on a rank stands."""
    return [at for at, (owner, op) in enumerate(ops) if owner == rank and op.kind == kind][number]


def changed(name: str, kind: str, rank: int, number: int, change: Callable[[Any], Op]) -> Program:
    """A golden program in which one op of one rank is another."""
    program = golden(name)
    ops = listed(program)
    at = find(ops, kind, rank, number)
    ops[at] = (rank, change(ops[at][1]))
    return with_ops(program, ops)


def dropped(name: str, kind: str, rank: int, number: int = 0) -> Program:
    program = golden(name)
    ops = listed(program)
    del ops[find(ops, kind, rank, number)]
    return with_ops(program, ops)


def swapped(name: str, rank: int, first: tuple[str, int], second: tuple[str, int]) -> Program:
    program = golden(name)
    ops = listed(program)
    i, j = find(ops, first[0], rank, first[1]), find(ops, second[0], rank, second[1])
    ops[i], ops[j] = ops[j], ops[i]
    return with_ops(program, ops)


def shifted(view: View, dim: int, by: int) -> View:
    selectors = list(view.selectors)
    old: Any = selectors[dim]
    selectors[dim] = (
        replace(old, first=old.first + by)
        if isinstance(old, Blocked)
        else Range(old.start + by, old.stop + by)
    )
    return replace(view, selectors=tuple(selectors))
