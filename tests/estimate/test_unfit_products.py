"""A product whose operands do not fit is refused with its name where its work is asked for."""

from __future__ import annotations

import pytest

from meshweave.base.errors import ProgramError
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import load_cluster
from meshweave.estimate import estimate
from meshweave.ir.program.parse import parse

TEXT = """program("operands that do not fit")
tp = mesh((1,), ("x",))
A = tensor((3, 8), "float32")
B = tensor((3, 5), "float32")
C = tensor((3, 5), "float32")
a = input(A, tp[R])
b = input(B, tp[R])
c = output(C, tp[R])
compute = lane()
with tp:
    matmul(c, a, b, lane=compute, name="product")
"""


def test_estimate_refuses_operands_that_do_not_fit() -> None:
    program = parse(TEXT)
    machine = Machine.of(load_cluster("dgx-h100:8"), program)
    with pytest.raises(ProgramError, match=r"multiplies \(3, 8\) by \(3, 5\): the inner sizes differ"):
        estimate(program, machine)
