"""Seeded faults of what is computed, and of shapes and names: each error names op, rank and buffer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from builders import golden, listed, with_ops
from seeding import WINDOW, changed, dropped, fault, find, shifted, text_fault

from meshweave.ir.program.ops import Op, Put, Zero
from meshweave.ir.program.parse import parse
from meshweave.ir.program.views import Range, View

# --- what is computed -----------------------------------------------------------------------------------


def test_doubled_slice() -> None:
    program = golden("tapered_meshslice")
    ops = listed(program)
    at = find(ops, "matmul", 2, 1)
    ops.insert(at, ops[at])
    error = fault(with_ops(program, ops))
    assert (error.rank, error.buffer) == (2, "c")
    assert "C[4, 0] has k = 1, 2, 5, 6 and 6 more more than once" in error.message


def test_missing_k() -> None:
    error = fault(dropped("tapered_meshslice", "matmul", 1, 2))
    assert (error.rank, error.buffer) == (1, "c")
    assert "C[0, 3] lacks k = 3, 7, 11, 15" in error.message


def test_wrong_pairing_of_k() -> None:
    program = changed(
        "packetised_summa", "matmul", 0, 1, lambda op: replace(op, b=replace(op.b, slot=1 - op.b.slot))
    )
    error = fault(program)
    assert error.rank == 0 and error.op is not None and error.op.startswith("matmul")
    assert "multiplies k = 3 of A by k = 0 of B" in error.message


def test_unwritten_read() -> None:
    error = fault(dropped("t3_ring", "zero", 3))
    assert error.buffer == "acc" and "never written" in error.message and error.op is not None


def test_unwritten_output() -> None:
    error = fault(dropped("uneven_wang", "copy", 5))
    assert (error.rank, error.buffer) == (5, "c") and "never written" in error.message


def test_call_on_unfinished_sums() -> None:
    program = golden("chunked_atp")
    ops = [pair for pair in listed(program) if getattr(pair[1], "over", None) not in ((0, 1), (2, 3))]
    error = fault(with_ops(program, ops))
    assert (
        error.buffer == "y" and error.rank == 0 and "unfinished sums of Y: lacks k = 3, 4, 5" in error.message
    )


def test_accumulate_twice() -> None:
    program = golden("universal_b")
    ops = listed(program)
    at = find(ops, "accumulate", 2, 3)
    ops.insert(at, ops[at])
    error = fault(with_ops(program, ops))
    assert error.buffer == "c" and "more than once" in error.message


def test_slice_from_the_wrong_place() -> None:
    program = changed("universal_c", "get", 3, 0, lambda op: replace(op, src=shifted(op.src, 0, -1)))
    error = fault(program)
    assert error.rank == 3 and error.buffer is not None


# --- shapes and names -----------------------------------------------------------------------------------


def test_mismatched_sizes_of_an_all_gather() -> None:
    error = text_fault("uneven_wang", "sizes=4 - peer", "sizes=3 + peer")
    assert (error.rank, error.buffer) == (0, "b") and error.op == "all_gather 0.0"
    assert "has shape (4, 3), should have (3, 3)" in error.message


def test_too_few_sizes() -> None:
    error = text_fault("uneven_wang", "sizes=4 - peer", "sizes=(7,)")
    assert error.rank == 0 and "each of 2 members" in error.message


def test_members_of_other_shapes() -> None:
    error = fault(
        changed(
            "chunked_atp",
            "all_reduce",
            3,
            0,
            lambda op: replace(op, out=trimmed(op.out), src=trimmed(op.src)),
        )
    )
    assert error.rank == 3 and error.buffer == "y" and "should have (4, 4)" in error.message


def trimmed(view: View) -> View:
    first: Any = view.selectors[0]
    return replace(view, selectors=(Range(first.start, first.stop - 1), *view.selectors[1:]))


def test_copy_that_numpy_would_broadcast() -> None:
    error = fault(changed("uneven_wang", "copy", 0, 0, lambda op: replace(op, src=one_row(op.src))))
    assert (error.rank, error.buffer) == (0, "c") and "should have (1, 3)" in error.message


def one_row(view: View) -> View:
    return replace(view, selectors=(Range(0, 1), *view.selectors[1:]))


def test_product_whose_inner_sizes_differ() -> None:
    error = text_fault(
        "packetised_summa", "matmul(c, a_panel(p % 2)[:, :min(3, 11 - 3 * p)],", "matmul(c, a_panel(p % 2),"
    )
    assert error.op == "matmul 0.0.3.2" and error.rank == 0 and "inner sizes differ" in error.message


def test_view_out_of_bounds() -> None:
    error = text_fault(
        "t3_ring", "copy(c, acc[3 * tp.x:min(10, 3 * tp.x + 3), :]", "copy(c, acc[3 * tp.x:3 * tp.x + 3, :]"
    )
    assert (error.rank, error.buffer) == (3, "acc") and "selects [9, 12) of a dim of size 10" in error.message


def test_slot_that_is_not_there() -> None:
    error = text_fault("uneven_wang", "add(part(s % 2)", "add(part(s % 3)")
    assert error.buffer == "part" and "slot 2 of 2" in error.message and error.op == "add 0.1.2.1.0"


def test_root_that_is_no_member() -> None:
    error = text_fault("packetised_summa", 'over="tp.col", root=p // 2', 'over="tp.col", root=p // 2 + 2')
    assert error.op == "broadcast 0.0.0.0" and "root 2 is none of the 2 members" in error.message


def test_remote_view_in_an_op_that_cannot_reach() -> None:
    error = fault(
        changed("t3_ring", "zero", 0, 0, lambda op: Zero(out=replace(op.out, rank=1), lane="compute"))
    )
    assert (error.rank, error.buffer) == (0, "acc") and "cannot reach" in error.message


def test_output_that_is_partly_an_input() -> None:
    error = text_fault("uneven_wang", "permute(inbox((s + 1) % 2)", "permute(part(s % 2)")
    assert (error.rank, error.buffer) == (0, "part") and "while it reads" in error.message
    error = text_fault("t3_ring", "copy(c, acc[", "copy(acc[1:4, :], acc[")
    assert error.buffer == "acc" and "while it reads" in error.message


def test_put_of_another_dtype() -> None:
    text = WINDOW.replace('inbox = scratch((2, 2), "float32"', 'inbox = scratch((2, 2), "float64"')
    error = fault(parse(text))
    assert error.op == "put 0.0" and "moves float32 of x into float64" in error.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda op: replace(op, lane="comput"), "unknown lane 'comput' (did you mean 'compute'?)"),
        (
            lambda op: replace(op, out=replace(op.out, buffer="ac")),
            "unknown buffer 'ac' (did you mean 'acc'?)",
        ),
    ],
)
def test_unknown_names(change: Callable[[Any], Op], message: str) -> None:
    error = fault(changed("t3_ring", "zero", 0, 0, change))
    assert error.op == "zero" and message in error.message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("tp = mesh((2, 3)", "tp = mesh((2, 4)", "shape"),
        ('product(A, B, transpose_b=True)', "product(A, B)", "cannot be the product"),
        ("C = tensor((5, 7)", "C = tensor((5, -7)", "tensor C has shape (5, -7)"),
        ("part = scratch((3 - tp.row, 3), \"float32\", on=tp, slots=2)",
         "part = scratch((0 - tp.row, 3), \"float32\", on=tp, slots=2)", "has shape (-1, 3)"),
        ("c = output(C, tp[S(0), S(1)])", "c = output(C, tp[S(0), S(2)])", "does not have"),
        ("slots=2)\ninbox", "slots=0)\ninbox", "has 0 slots"),
        ("slots=2)\ninbox", "slots=2, order=(0, 0))\ninbox", "order (0, 0)"),
        ('over="tp.row"', 'over="tp.raw"', "names no axis"),
        ('over="tp.row"', 'over="tq.row"', "unknown mesh 'tq'"),
        ("with tp:", "with ranks(0, 6):", "no mesh has rank 6"),
    ],
)  # fmt: skip
def test_declarations_that_make_no_sense(old: str, new: str, message: str) -> None:
    assert message in text_fault("uneven_wang", old, new).message


def test_put_is_checked_on_the_rank_that_it_reaches() -> None:
    error = fault(
        changed("t3_ring", "put", 0, 0, lambda op: Put(out=replace(op.out, rank=7), src=op.src, lane="dma"))
    )
    assert (error.rank, error.buffer) == (0, "acc") or error.rank == 7
    assert "no rank 7" in error.message
