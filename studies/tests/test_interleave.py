"""Products in parts, and ops in the order of one queue."""

from __future__ import annotations

from itertools import pairwise

import pytest

import meshweave as mw
from meshweave.base.errors import ProgramError
from meshweave.execute.jax.source import jax_source
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program.ops import Matmul, Permute
from meshweave.ir.work import work_of
from meshweave_studies.tpu.interleave import interleave
from meshweave_studies.tpu.split_products import split_products

NAMES = ("collective", "meshslice", "wang", "summa", "cannon")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dataflow", ["os", "ls", "rs"])
@pytest.mark.parametrize("along_sum", [False, True])
def test_the_meaning_stays(name: str, dataflow: mw.Dataflow, along_sum: bool) -> None:
    """Uneven products in parts, rings and one queue: proved as the program is."""
    problem = mw.algorithms.Matmul2dProblem(17, 23, 19, (2, 2), dataflow)
    program = mw.algorithm(name).program(problem, mw.algorithms.Matmul2dConfig((1, 1), 2))
    parts = split_products(mw.lower.lower_rings(program, 2), 3, along_sum=along_sum)
    flops = [
        sum(work_of(each, bound.op).flops for bound in each.ops_on_rank(0) if isinstance(bound.op, Matmul))
        for each in (program, parts)
    ]
    assert flops[0] == flops[1]
    validate(interleave(parts))


def meshslice(num_parts: int, rings: int = 1) -> mw.Program:
    problem = mw.algorithms.Matmul2dProblem(1024, 1024, 1024, (4, 4))
    program = mw.algorithm("meshslice").program(problem, mw.algorithms.Matmul2dConfig((1,) * 4))
    return interleave(split_products(mw.lower.lower_rings(program, rings) if rings else program, num_parts))


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


def test_terms_of_a_sum_accumulate() -> None:
    """Each slice is summed in two terms of half its width; the first one of all does not accumulate."""
    problem = mw.algorithms.Matmul2dProblem(1024, 1024, 2048, (4, 4))
    program = mw.algorithm("meshslice").program(problem, mw.algorithms.Matmul2dConfig((1,) * 4))
    products = [op for op in split_products(program, 2, along_sum=True).ops() if isinstance(op, Matmul)]
    assert [str(op.a.selectors[1]) for op in products] == [":256", "256:512"]
    assert [str(op.b.selectors[0]) for op in products] == [":256", "256:512"]
    assert products[1].accumulate == 1 and products[0].accumulate not in (0, 1)
    assert (
        products[0].out == products[1].out == next(op for op in program.ops() if isinstance(op, Matmul)).out
    )


def test_transfers_are_issued_in_the_order_of_the_program() -> None:
    """One at a time, the first gathers of both axes come first: a product could start after them."""
    problem = mw.algorithms.Matmul2dProblem(1024, 1024, 1024, (4, 4))
    program = mw.algorithm("meshslice").program(problem, mw.algorithms.Matmul2dConfig((1,) * 4))
    ops = list(interleave(mw.lower.lower_rings(split_products(program, 6), 1), most_beside=1).ops())
    first = next(at for at, op in enumerate(ops) if isinstance(op, Matmul))
    lanes = [op.lane for op in ops[:first] if isinstance(op, Permute)]
    assert lanes == ["col"] * 3 + ["row"] * 3 + ["col"]
    gaps = [op for op in ops[first:] if isinstance(op, (Permute, Matmul))]
    assert not any(isinstance(a, Permute) and isinstance(b, Permute) for a, b in pairwise(gaps))


def test_a_product_has_at_least_one_part() -> None:
    program = mw.algorithm("collective").program(
        mw.algorithms.Matmul2dProblem(8, 8, 8, (2, 2)), mw.algorithms.Matmul2dConfig()
    )
    assert split_products(program, 1) is program
    with pytest.raises(ProgramError, match="not 0"):
        split_products(program, 0)


def body_of(source: str) -> list[str]:
    inside = source[source.index("def on_device") : source.index("def on_mesh")]
    return [line.strip() for line in inside.splitlines()[2:] if line.strip()]


def test_a_product_waits_before_its_operand_is_sliced() -> None:
    """So that the slice can be part of it; a piece that is read as it came waits too."""
    problem = mw.algorithms.Matmul2dProblem(64, 64, 64, (1, 4))
    for rings, operand in ((0, "after(a_g[0], *arrived, last)[:32]"), (1, "after(a_g_1, *arrived, last)")):
        program = mw.algorithm("wang" if rings else "meshslice").program(
            problem, mw.algorithms.Matmul2dConfig((1,) * 2, 4)
        )
        lowered = mw.lower.lower_rings(program, 1) if rings else program
        lines = body_of(jax_source(interleave(split_products(lowered, 1 + (not rings))), in_order=True))
        assert any(operand in line for line in lines if "product(" in line), lines


def test_parts_are_cast_before_they_are_joined() -> None:
    problem = mw.algorithms.Matmul2dProblem(64, 64, 64, (2, 2), dtype="bfloat16")
    program = mw.algorithm("meshslice").program(problem, mw.algorithms.Matmul2dConfig((1,) * 2))
    lines = body_of(jax_source(split_products(program, 2)))
    assert lines[-1] == 'return (jnp.concatenate([part.astype("bfloat16") for part in c], axis=0),)'
