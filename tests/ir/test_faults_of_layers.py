"""Seeded faults of what layers need: residuals, max, batch dims, and calls that depend on rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import golden, golden_text, listed, with_ops
from seeding import changed, dropped, fault, find, text_fault

from meshweave.base.errors import ProgramError
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse
from meshweave.ir.program.views import Range, View


def rows(view: View, start: int, stop: int, dim: int = 0) -> View:
    selectors: list[Any] = list(view.selectors)
    selectors[dim] = Range(start, stop)
    return replace(view, selectors=tuple(selectors))


# --- sums of tensors ------------------------------------------------------------------------------------


def test_residual_left_out() -> None:
    error = text_fault("residual_norm", "    add(z, x, lane=compute)\n", "")
    assert (error.rank, error.buffer) == (0, "z")
    assert error.message == "gives a call what is not Z, first at (0, 0) of the view"


def test_residual_left_out_of_an_output() -> None:
    text = (
        golden_text("residual_norm")
        .split('    call(fn="square_sum"')[0]
        .replace("    add(z, x, lane=compute)\n", "")
    )
    text = text.replace("n = output(N, tp[S(1)])\n", "")
    error = fault(parse(text))
    assert (error.rank, error.buffer) == (0, "z") and "Z[0, 0] lacks X (20 such elements)" in error.message


def test_residual_added_on_every_rank() -> None:
    error = text_fault(
        "grouped_attention", "    if tp.x == 0:\n        add(y", "    if tp.x >= 0:\n        add(y"
    )
    assert error.buffer == "y" and "adds a finished element of X to itself" in error.message


def test_residual_added_twice() -> None:
    line = "    add(z, x, lane=compute)\n"
    error = text_fault("residual_norm", line, line + line)
    assert (error.rank, error.buffer) == (
        0,
        "z",
    ) and "adds a finished element of X to itself" in error.message


def test_tensors_that_no_sum_declares() -> None:
    error = text_fault("residual_norm", "computes(Z, add(X, Y))\n", "computes(Z, add(X, X))\n")
    assert error.op is not None and error.op.startswith("add")
    assert "adds a term of Y to one of X" in error.message


def test_residual_in_any_order_of_a_chain() -> None:
    """Z = X + Y and U = Z + X + Y: the parts may be added in any order, and each as often as declared."""
    text = """
program("chain")
tp = mesh((1,), ("x",))
X = tensor((2, 3), "float32")
Y = tensor((2, 3), "float32")
Z = tensor((2, 3), "float32")
U = tensor((2, 3), "float32")
computes(Z, add(X, Y))
computes(U, add(Z, X, Y))
x = input(X, tp[R])
y = input(Y, tp[R])
u = output(U, tp[R])
part = scratch((2, 3), "float32", on=tp)
compute = lane()
with tp:
    copy(part, y, lane=compute)
    add(part, y, lane=compute)
    copy(u, x, lane=compute)
    add(u, part, lane=compute)
    add(u, x, lane=compute)
"""
    assert validate(parse(text)).skipped == ()
    last = "    add(u, x, lane=compute)\n"
    assert "U[0, 0] lacks X (6 such elements)" in fault(parse(text.replace(last, ""))).message
    assert "adds a finished element of X to itself" in fault(parse(text + last)).message


# --- max ------------------------------------------------------------------------------------------------


def test_max_taken_as_a_sum() -> None:
    error = text_fault("vocabulary_loss", ', op="max"', "")
    assert (error.rank, error.buffer) == (0, "m")
    assert error.message == "adds a term of M, whose terms are combined by 'max'"


def test_sum_taken_as_a_max() -> None:
    error = text_fault(
        "vocabulary_loss", 'all_reduce(s, s, over="tp.x"', 'all_reduce(s, s, over="tp.x", op="max"'
    )
    assert (
        error.buffer == "s" and "combines terms of S by 'max', which are combined by 'sum'" in error.message
    )


def test_max_of_one_rank_only() -> None:
    error = text_fault("vocabulary_loss", '    all_reduce(m, m, over="tp.x", op="max", lane=net)\n', "")
    assert error.buffer == "m" and "unfinished sums of M: lacks v = 4, 5, 6" in error.message


def test_max_may_be_taken_twice() -> None:
    line = '    all_reduce(m, m, over="tp.x", op="max", lane=net)\n'
    assert validate(parse(golden_text("vocabulary_loss").replace(line, line + line))).skipped == ()


def test_max_with_zeros() -> None:
    text = golden_text("vocabulary_loss").replace(
        '    call(fn="row_max"', '    zero(m, lane=compute)\n    if tp.x == 0:\n        call(fn="row_max"'
    )
    assert "takes the max of zeros" in fault(parse(text)).message


def test_max_of_different_tensors() -> None:
    text = """
program("max")
tp = mesh((2,), ("x",))
X = tensor((2, 3), "float32")
Y = tensor((2, 3), "float32")
x = input(X, tp[R])
y = input(Y, tp[R])
z = output(X, tp[R])
compute = lane()
with tp:
    copy(z, x, lane=compute)
    if tp.x == 1:
        copy(z, y, lane=compute)
    all_reduce(z, z, over="tp.x", op="max", lane=compute)
"""
    assert "takes the max of a term of X and one of Y" in fault(parse(text)).message
    same = text.replace("        copy(z, y, lane=compute)\n", "        copy(z, x, lane=compute)\n")
    assert "not declared" in validate(parse(same)).skipped[0]


# --- batch dims -----------------------------------------------------------------------------------------


def test_heads_of_another_batch() -> None:
    error = fault(changed("batched_products", "matmul", 0, 0, lambda op: replace(op, b=op.a)))
    assert (error.rank, error.op) == (0, "matmul 0.0") and "multiplies Q by Q" in error.message


def test_batches_that_do_not_belong_together() -> None:
    text = """
program("batches")
tp = mesh((1,), ("x",))
A = tensor((2, 3, 4), "float32")
B = tensor((2, 4, 5), "float32")
C = tensor((2, 3, 5), "float32")
computes(C, product(A, B))
a = input(A, tp[R])
b = input(B, tp[R])
c = output(C, tp[R])
compute = lane()
with tp:
    for i in range(2):
        matmul(c[i:i + 1, :, :], a[i:i + 1, :, :], b[i:i + 1, :, :], lane=compute)
"""
    assert validate(parse(text)).skipped == ()
    error = fault(parse(text.replace("b[i:i + 1", "b[1 - i:2 - i")))
    assert error.message == "multiplies other batches of A and of B"
    error = fault(parse(text.replace("c[i:i + 1", "c[1 - i:2 - i")))
    assert "C[0, 0, 0] holds another element of C" in error.message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("x = input(X, tp[S(0)])", "x = input(X, tp[R])", "batch dims differ"),
        ("matmul(dw, x, dy", "matmul(dw, x[1:, :, :], dy[1:, :, :]", "DW[0, 0] lacks k = 0, 1, 2, 6 and 2 more"),
        ("matmul(dw, x, dy", "matmul(dw, x, dy[:, :2, :]", "inner sizes differ"),
        ("    all_reduce(dw, dw,", "    all_reduce(dw, dw, op=\"max\",", "combines terms of DW by 'max'"),
    ],
)  # fmt: skip
def test_sum_over_a_batch(old: str, new: str, message: str) -> None:
    text = golden_text("batched_products")
    assert text.count(old) == 1
    assert message in fault(parse(text.replace(old, new))).message


def test_shapes_that_no_product_has() -> None:
    text = golden_text("batched_products")
    for old, new in [
        ("Q = tensor((2, 3, 4, 2)", "Q = tensor((2, 4, 4, 2)"),
        ("DW = tensor((5, 2)", "DW = tensor((2, 5)"),
    ]:
        assert "cannot be the product of" in fault(parse(text.replace(old, new))).message


# --- calls ----------------------------------------------------------------------------------------------


def test_micro_batch_doubled_and_another_skipped_forward() -> None:
    error = fault(changed("micro_batches", "matmul", 1, 1, lambda op: replace(op, a=rows(op.a, 0, 2))))
    assert (error.rank, error.op) == (1, "call 25.0")
    assert error.message == "gives call 'weight_grad' r = 4:6 of E with r = 6:8 of another input"


def test_micro_batch_doubled_and_another_skipped_in_a_gradient_sum() -> None:
    program = golden("micro_batches")
    ops = listed(program)
    at = find(ops, "add", 0, 3)
    ops[at] = (0, replace(ops[at][1], src=replace(ops[at][1].src, slot=0)))
    error = fault(with_ops(program, ops))
    assert error.buffer == "dw"
    assert "DW[0, 0] lacks r = 2, 3 and has r = 0, 1 more than once (12 such elements)" in error.message


@pytest.mark.parametrize("number", range(4))
def test_gradient_or_loss_of_a_micro_batch_left_out(number: int) -> None:
    error = fault(dropped("micro_batches", "add", 1, number))
    r = "4, 5" if number < 2 else "6, 7"
    assert f"lacks r = {r}" in error.message and error.buffer == ("dw" if number % 2 else "loss")


def test_micro_batch_twice_in_1f1b() -> None:
    """The first stage computes micro-batch 0 for 1 as well, everywhere: what it sends is not what is wanted."""
    error = fault(
        changed("one_f_one_b", "call", 0, 1, lambda op: replace(op, ins=(rows(op.ins[0], 0, 2), op.ins[1])))
    )
    assert error.rank in (0, 1) and error.buffer is not None


def test_stash_of_another_micro_batch_in_1f1b() -> None:
    error = fault(changed("one_f_one_b", "call", 1, 3, lambda op: replace(op, args=(1,))))
    assert error.rank == 1 and error.message == "reads a stash that no forward part has filled"


def test_gradient_of_another_micro_batch_in_1f1b() -> None:
    program = golden("one_f_one_b")
    ops = listed(program)
    grads = [
        at for at, (rank, op) in enumerate(ops) if rank == 1 and getattr(op, "part", "") == "weight_grad"
    ]
    ops[grads[1]] = (
        1,
        replace(ops[grads[1]][1], ins=(replace(ops[grads[1]][1].ins[0], slot=0), *ops[grads[1]][1].ins[1:])),
    )
    error = fault(with_ops(program, ops))
    assert error.rank == 1 and "r = 2:4 of H with r = 0:2 of another input" in error.message


def part_at(program: Program, rank: int, part: str, number: int) -> int:
    """The place in `listed(program)` of a rank's call number `number` of a part."""
    places = [
        at for at, (of, op) in enumerate(listed(program)) if of == rank and getattr(op, "part", "") == part
    ]
    return places[number]


def test_weight_gradient_before_the_input_gradient_of_its_micro_batch() -> None:
    program = golden("delayed_weights")
    ops = listed(program)
    early, late = part_at(program, 2, "input_grad", 0), part_at(program, 2, "weight_grad", 0)
    ops.insert(early, ops.pop(late))
    error = fault(with_ops(program, ops))
    assert error.rank == 2 and error.message == "reads a stash of 3 inputs, declared with 5"


def test_weight_gradient_of_a_micro_batch_twice() -> None:
    program = golden("delayed_weights")
    ops = listed(program)
    at = part_at(program, 1, "weight_grad", 1)
    ops[at] = (1, replace(ops[at][1], args=(0,)))
    error = fault(with_ops(program, ops))
    assert error.rank == 1 and error.message == "reads a stash that no forward part has filled"


def test_input_gradient_of_another_micro_batch() -> None:
    program = golden("delayed_weights")
    ops = listed(program)
    at = part_at(program, 1, "input_grad", 0)
    ops[at] = (1, replace(ops[at][1], args=(1,)))
    error = fault(with_ops(program, ops))
    assert error.rank == 1 and "of another input" in error.message


def test_part_of_a_row_that_is_needed_whole() -> None:
    error = text_fault(
        "batched_products", "outs=(s,), ins=(s,)", "outs=(s[:, :, :, :2],), ins=(s[:, :, :, :2],)"
    )
    assert error.message == "gives call 'softmax' 0:2 along dim 3 of S, and it needs all of 0:4"
    error = text_fault("grouped_attention", "k[b:b + 1, :, :], v[b", "k[b:b + 1, :2, :], v[b")
    assert "gives call 'attention' 0:2 along dim 1 of K, and it needs all of 0:3" in error.message
    error = text_fault("grouped_attention", "k[b:b + 1, :, :], v[b", "k[b:b + 1, :0, :], v[b")
    assert "gives call 'attention' nothing of K" in error.message


def test_heads_that_do_not_belong_together() -> None:
    program = golden("grouped_attention")
    ops = listed(program)
    at = find(ops, "call", 0, 0)
    op: Any = ops[at][1]
    ops[at] = (0, replace(op, ins=(rows(op.ins[0], 0, 4, 2), *op.ins[1:]), outs=(rows(op.outs[0], 0, 4, 2),)))
    error = fault(with_ops(program, ops))
    assert error.message == "gives call 'attention' g = 0:2 of K with g = 0:1 of another input"


def test_rows_in_another_shape_are_no_rows() -> None:
    """One row of six as two rows of three: a function of rows would take them for two."""
    text = """
program("rows")
tp = mesh((1,), ("x",))
X = tensor((2, 6), "float32")
N = tensor((2, 6), "float32")
computes(N[i, :], call("norm", X[i, :]))
x = input(X, tp[R])
flat = scratch((1, 6), "float32", on=tp)
n = output(N, tp[R])
compute = lane()
with tp:
    for i in range(2):
        call(fn="norm", outs=(n[i:i + 1, :],), ins=(x[i:i + 1, :],), lane=compute)
"""
    assert validate(parse(text)).skipped == ()
    cut = text.replace("flat = scratch((1, 6)", "flat = scratch((2, 3)").replace(
        '        call(fn="norm", outs=(n[i:i + 1, :],), ins=(x[i:i + 1, :],), lane=compute)\n',
        "        copy(flat[:1, :], x[i:i + 1, :3], lane=compute)\n"
        "        copy(flat[1:, :], x[i:i + 1, 3:], lane=compute)\n"
        '        call(fn="norm", outs=(n[i:i + 1, :],), ins=(flat,), lane=compute)\n',
    )
    assert "gives call 'norm' what is no block of X" in fault(parse(cut)).message


def test_block_of_keys_twice_in_ring_attention() -> None:
    error = text_fault(
        "ring_attention",
        "kv(t % 2)[:(3, 3, 1)[(cp.x + t) % 3], :2], kv",
        "kv(0)[:(3, 3, 1)[(cp.x + t) % 3], :2], kv",
    )
    assert error.rank is not None and error.op is not None and error.op.startswith("call")


def test_last_block_of_keys_left_out() -> None:
    error = text_fault("ring_attention", "    for t in range(3):\n", "    for t in range(2):\n")
    assert (error.buffer, error.rank) == ("o", 0) and "unfinished sums of O: lacks t = 6" in error.message


def test_sum_so_far_of_another_step() -> None:
    """The greatest score is one step behind the weights."""
    program = golden("ring_attention")
    ops = listed(program)
    at = find(ops, "call", 0, 1)
    op: Any = ops[at][1]
    ops.insert(at, (0, replace(next(o for r, o in ops if o.kind == "zero" and o.out.buffer == "m"))))
    error = fault(with_ops(program, ops))
    assert error.message == "continues different reductions of O, M, L" and op.fn == "attend"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (", SS[i], G[j]))", ", SS[i]))", "has 3 inputs; call 'scale' is declared with 2"),
        ("SS[i], G[j]))", "SS[i], G[i]))", "takes 'i' of size 7 and of size 5 for one position"),
        ("SS[i], G[j]))", "N[i, j], G[j]))", "'N' is computed from itself"),
        (", reduce=\"sum\"))", "))", "has no position j: say how it is reduced"),
        ("computes(N[i, j]", "computes(N[i, i]", "names a position of N twice"),
        ("computes(Z, add(X, Y))", "computes(Z, add(X, A))", "cannot be a sum with 'A' of shape (5, 4)"),
    ],
)  # fmt: skip
def test_meanings_that_make_no_sense(old: str, new: str, message: str) -> None:
    assert message in text_fault("residual_norm", old, new).message


@pytest.mark.parametrize(
    ("meaning", "message"),
    [
        ("computes(N[i, j], add(X, Y))", "only what a call makes is declared by parts"),
        ("computes(N, add(X))", "a tensor computes product"),
        ("computes(N[i], call(\"scale\", Z))", "tensor N has 2 dims, its part names 1"),
        ("computes(N[i, 1], call(\"scale\", Z))", "a part of a tensor is written X[i, :]"),
        ("computes(N, call(\"scale\", Q))", "'Q' is no tensor"),
        ("computes(N, call(\"scale\", Z, redu=\"sum\"))", "expected call("),
    ],
)  # fmt: skip
def test_meanings_that_do_not_parse(meaning: str, message: str) -> None:
    text = golden_text("residual_norm")
    line = next(line for line in text.split("\n") if line.startswith("computes(N"))
    with pytest.raises(ProgramError) as caught:
        parse(text.replace(line, meaning))
    assert message in caught.value.message and caught.value.message.startswith("line ")


def test_undeclared_calls_are_said_to_be_trusted() -> None:
    text = golden_text("chunked_atp").replace('computes(H[i, j], call("square", Y[i, j]))\n', "")
    assert validate(parse(text)).skipped == ("calls of square: not declared what they make",)
    lines = [line for line in golden_text("one_f_one_b").split("\n") if not line.startswith("computes")]
    skipped = validate(parse("\n".join(lines))).skipped
    assert skipped[0] == "values of Y, DX, DW0, DW1: not declared what they are computed from"
    assert skipped[1].startswith("calls of stage, ")
