"""Products in parts, and ops in the order of one queue."""

from __future__ import annotations

from itertools import pairwise

import pytest

import meshweave as mw
from meshweave.base.errors import ProgramError
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program.ops import Matmul, Permute
from meshweave.ir.work import work_of
from meshweave.lower import interleave, split_products

NAMES = ("collective", "meshslice", "wang", "summa", "cannon")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dataflow", ["os", "ls", "rs"])
def test_the_meaning_stays(name: str, dataflow: mw.Dataflow) -> None:
    """Uneven products in parts, rings and one queue: proved as the program is."""
    problem = mw.Matmul2dProblem(17, 23, 19, (2, 2), dataflow)
    program = mw.algorithm(name).program(problem, mw.Matmul2dConfig((1, 1), 2))
    parts = split_products(mw.lower_rings(program, 2), 3)
    flops = [
        sum(work_of(each, bound.op).flops for bound in each.ops_on_rank(0) if isinstance(bound.op, Matmul))
        for each in (program, parts)
    ]
    assert flops[0] == flops[1]
    validate(interleave(parts))


def meshslice(num_parts: int, rings: int = 1) -> mw.Program:
    problem = mw.Matmul2dProblem(1024, 1024, 1024, (4, 4))
    program = mw.algorithm("meshslice").program(problem, mw.Matmul2dConfig((1,) * 4))
    return interleave(split_products(mw.lower_rings(program, rings) if rings else program, num_parts))


def test_each_step_of_later_slices_has_a_product_beside_it() -> None:
    """After the ring of the first slice, no two steps of one lane stand without a product between them."""
    ops = list(meshslice(3).ops())
    first = next(at for at, op in enumerate(ops) if isinstance(op, Matmul))
    for lane in ("row", "col"):
        steps = [at for at, op in enumerate(ops) if isinstance(op, Permute) and op.lane == lane]
        assert (
            len([at for at in steps if at < first]) == 4
        )  # the ring of the first slice, a step of the second
        later = [at for at in steps if at > first]
        assert all(any(isinstance(op, Matmul) for op in ops[a:b]) for a, b in pairwise(later))
    products = [at for at, op in enumerate(ops) if isinstance(op, Matmul)]
    assert len(products) == 12 and products[-3:] == list(range(len(ops) - 3, len(ops)))


def test_parts_begin_at_whole_tiles() -> None:
    rows = [op.out.selectors[0] for op in meshslice(2, 0).ops() if isinstance(op, Matmul)]
    assert {str(selector) for selector in rows} == {":128", "128:256"}


def test_a_product_has_at_least_one_part() -> None:
    program = mw.algorithm("collective").program(mw.Matmul2dProblem(8, 8, 8, (2, 2)), mw.Matmul2dConfig())
    assert split_products(program, 1) is program
    with pytest.raises(ProgramError, match="not 0"):
        split_products(program, 0)
