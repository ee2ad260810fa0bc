"""What the proof on index labels accepts and refuses, beyond the faults of the golden programs."""

from __future__ import annotations

import pytest
from builders import dense, numbers_for, outputs_equal, run_numbers

from meshweave.base.errors import ProgramError
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program.parse import parse

PARTIAL = """
program("both axes hold terms")
tp = mesh((2, 2), ("row", "col"))
A = tensor((3, 8), "float32")
B = tensor((8, 5), "float32")
C = tensor((3, 5), "float32")
computes(C, product(A, B))
a = input(A, tp[S(1), S(1)])
b = input(B, tp[S(0), S(0)])
c = output(C, tp[P, P])
l = lane()
with tp:
    matmul(c, a, b, lane=l)
"""


def refusal(text: str) -> ProgramError:
    with pytest.raises(ProgramError) as caught:
        validate(parse(text))
    return caught.value


def test_output_of_terms_along_two_axes() -> None:
    validate(parse(PARTIAL))


def test_terms_along_two_axes_that_are_not_the_whole() -> None:
    error = refusal(PARTIAL.replace("with tp:", "with ranks(0, 1, 2):"))
    assert (error.rank, error.buffer) == (3, "c") and "never written" in error.message
    error = refusal(
        PARTIAL.replace("a = input(A, tp[S(1), S(1)])", "a = input(A, tp[S(1), R])").replace(
            "b = input(B, tp[S(0), S(0)])", "b = input(B, tp[S(0), R])"
        )
    )
    assert (error.rank, error.buffer) == (
        0,
        "c",
    ) and "k = 0, 1, 2, 3 and 4 more more than once" in error.message


def test_input_of_terms_is_reduced_once() -> None:
    text = """
program("reduce what comes in parts")
tp = mesh((2, 2), ("row", "col"))
X = tensor((4, 3), "float32")
Y = tensor((4, 3), "float32")
computes(Y, same(X))
x = input(X, tp[P, P])
half = scratch((4, 3), "float32", on=tp)
y = output(Y, tp[R, R])
l = lane()
with tp:
    all_reduce(half, x, over="tp.row", lane=l)
    all_reduce(y, half, over="tp.col", lane=l)
"""
    validate(parse(text))
    assert "more than once" in refusal(text.replace('over="tp.col"', 'over="tp"')).message
    assert (
        "lacks term 1, 3"
        in refusal(text.replace('all_reduce(y, half, over="tp.col"', "copy(y, half")).message
    )


OF_TERMS = """
program("a product of what is not summed yet")
tp = mesh((2, 3), ("x", "y"))
A = tensor((4, 3), "float32")
B = tensor((3, 5), "float32")
C = tensor((4, 5), "float32")
computes(C, product(A, B))
a = input(A, tp[P, R])
b = input(B, tp[R, R])
c = output(C, tp[P, R])
l = lane()
with tp:
    matmul(c, a, b, lane=l)
"""
WHOLE = OF_TERMS.replace("c = output(C, tp[P, R])", "c = output(C, tp[R, R])")
REDUCED = WHOLE + '    all_reduce(c, c, over="tp.x", lane=l)\n'
BOTH = OF_TERMS.replace("tp[R, R]", "tp[P, R]")
"""Both operands in terms along one axis, and each rank multiplies its own: A_0 B_0 + A_1 B_1 is not A B."""
CROSSED = BOTH.replace("input(B, tp[P, R])", "input(B, tp[R, P])").replace(
    "output(C, tp[P, R])", "output(C, tp[P, P])"
)
"""Along two axes each term of A meets each of B."""


@pytest.mark.parametrize("text", [OF_TERMS, REDUCED, CROSSED])
def test_a_product_of_terms_is_a_term_of_the_product(text: str) -> None:
    assert validate(parse(text)).skipped == ()


def test_a_product_of_terms_summed_first_or_in_part() -> None:
    """A is summed over x before it is multiplied, and its terms along y after."""
    text = OF_TERMS.replace("tp[P, R]", "tp[P, P]").replace("output(C, tp[P, P])", "output(C, tp[R, P])")
    text = text.replace(
        "l = lane()\nwith tp:\n",
        's = scratch((4, 3), "float32", on=tp)\nl = lane()\nwith tp:\n    all_reduce(s, a, over="tp.x", lane=l)\n',
    )
    text = text.replace("matmul(c, a,", "matmul(c, s,")
    assert validate(parse(text)).skipped == ()
    text = text.replace("output(C, tp[R, P])", "output(C, tp[R, R])").replace('over="tp.x"', 'over="tp"')
    assert validate(parse(text)).skipped == ()


@pytest.mark.parametrize(
    ("text", "story"),
    [
        (WHOLE, "C[0, 0] lacks k = 0, 1, 2 of term 1 of A (20 such elements)"),
        (
            REDUCED.replace('over="tp.x"', 'over="tp"'),
            "C[0, 0] has k = 0, 1, 2 of term 0 of A; k = 0, 1, 2 of term 1 of A more than once",
        ),
        (
            OF_TERMS.replace("matmul(c, a, b,", "matmul(c, a[:, :2], b[:2, :],"),
            "C[0, 0] lacks k = 2 of term 0 of A; k = 2 of term 1 of A",
        ),
        (
            BOTH,
            "C[0, 0] lacks k = 0, 1, 2 of term 0 of A and term 1 of B; k = 0, 1, 2 of term 1 of A and term 0",
        ),
        (
            OF_TERMS.replace("input(A, tp[P, R])", 'input(A, tp[P("max"), R])'),
            "unfinished sums of A: lacks term 1",
        ),
        (
            OF_TERMS.replace("l = lane()", "d = input(A, tp[R, P])\nl = lane()"),
            "holds terms of A, which arrives in terms twice",
        ),
        (
            OF_TERMS.replace("l = lane()", "d = input(C, tp[R, P])\nl = lane()"),
            "holds terms of C, which is computed, too",
        ),
    ],
)
def test_terms_missing_or_doubled(text: str, story: str) -> None:
    assert story in refusal(text).message


def test_one_term_multiplied_twice_and_the_other_never() -> None:
    """Rank 3 (x = 1, y = 0) fetches the term of rank 0 and multiplies that."""
    text = OF_TERMS.replace(
        "l = lane()\nwith tp:\n",
        's = scratch((4, 3), "float32", on=tp)\nl = lane()\nwith tp:\n'
        '    broadcast(s, a, over="tp.x", root=0, lane=l)\n',
    )
    error = refusal(text.replace("matmul(c, a,", "matmul(c, s,"))
    assert (
        "C[0, 0] lacks k = 0, 1, 2 of term 1 of A and has k = 0, 1, 2 of term 0 of A more than once"
        in error.message
    )


def test_a_block_of_different_terms_is_no_operand() -> None:
    text = OF_TERMS.replace(
        "l = lane()\nwith tp:\n",
        's = scratch((4, 3), "float32", on=tp)\nl = lane()\nwith tp:\n'
        '    broadcast(s, a, over="tp.x", root=0, lane=l)\n    copy(s[2:, :], a[2:, :], lane=l)\n',
    )
    assert "mixes different sums of A" in refusal(text.replace("matmul(c, a,", "matmul(c, s,")).message


CALL = """
program("calls")
tp = mesh((2,), ("x",))
G = tensor((4, 3), "float32")
g = output(G, tp[R])
part = scratch((4, 3), "float32", on=tp)
l = lane()
with tp:
    zero(g, lane=l)
    for m in range(3):
        call(fn="grad", outs=(part,), ins=(), args=(m,), lane=l)
        add(g, part, lane=l)
    all_reduce(g, g, over="tp", lane=l)
"""


def test_what_calls_make_can_be_added_up() -> None:
    validate(parse(CALL))


def test_what_calls_make_is_no_declared_product() -> None:
    text = PARTIAL.replace(
        "    matmul(c, a, b, lane=l)\n", "    matmul(c, a, b, lane=l)\n    add(c, s, lane=l)\n"
    )
    text = text.replace(
        "l = lane()\nwith tp:\n",
        's = scratch((3, 5), "float32", on=tp)\nl = lane()\nwith tp:\n'
        '    call(fn="noise", outs=(s,), ins=(), lane=l)\n',
    )
    error = refusal(text)
    assert error.buffer == "c" and "what a call made" in error.message


@pytest.mark.parametrize(
    "kind", ["copy(y, x[2:, :]", "copy(y[:1, :], x[1:2, :], lane=l)\n    copy(y[1:, :], x[1:2, :]"]
)
def test_elements_in_the_wrong_place(kind: str) -> None:
    text = f"""
program("wrong place")
tp = mesh((1,), ("x",))
X = tensor((4, 3), "float32")
Y = tensor((2, 3), "float32")
x = input(X, tp[R])
W = tensor((2, 3), "float32")
w = output(W, tp[R])
y = temp(Y, tp[R])
A = tensor((2, 4), "float32")
a = input(A, tp[R])
computes(Y, product(A, X))
l = lane()
with tp:
    {kind}, lane=l)
    call(fn="f", outs=(w,), ins=(y,), lane=l)
"""
    error = refusal(text)
    assert (error.rank, error.buffer) == (0, "y") and "gives a call what is not Y" in error.message


def test_too_many_elements_are_said_not_to_be_proved() -> None:
    text = (
        PARTIAL.replace("(3, 8)", "(3000, 8)")
        .replace("(8, 5)", "(8, 5000)")
        .replace("(3, 5)", "(3000, 5000)")
    )
    (note,) = validate(parse(text)).skipped
    assert note.startswith("index labels: the program has 60") and "over the limit of 16,000,000" in note
    assert validate(parse(PARTIAL), labels=False).skipped == ("index labels: not asked for",)


def test_products_by_zeros_and_of_no_columns_count_for_nothing() -> None:
    text = PARTIAL.replace("(3, 8)", "(3, 3)").replace("(8, 5)", "(3, 5)")
    program = parse(
        text.replace("tp[P, P]", "tp[P, R]").replace("S(1), S(1)", "S(1), R").replace("S(0), S(0)", "S(0), R")
    )
    proof = validate(program)
    values = numbers_for(program)
    whole = dense(program, values)["C"]
    machine = run_numbers(proof.flow, proof.order, values)
    total = machine.memory[0, "c", 0] + machine.memory[2, "c", 0]
    assert (total == whole).all() and not outputs_equal(program, machine, {"C": whole})


def test_two_products_of_the_same_tensors() -> None:
    """C = A B and D = A B^T: each multiplication is recognised as its own."""
    program = parse("""
program("two")
tp = mesh((1,), ("x",))
A = tensor((3, 3), "float32")
B = tensor((3, 3), "float32")
C = tensor((3, 3), "float32")
D = tensor((3, 3), "float32")
computes(C, product(A, B))
computes(D, product(A, B, transpose_b=True))
a = input(A, tp[R])
b = input(B, tp[R])
c = output(C, tp[R])
d = output(D, tp[R])
compute = lane()
with tp:
    matmul(c, a, b, lane=compute)
    matmul(d, a, b, transpose_b=True, lane=compute)
""")
    assert validate(program).skipped == ()


def test_an_output_has_one_slot() -> None:
    text = """
program("slots")
tp = mesh((1,), ("x",))
C = tensor((3, 3), "float32")
c = output(C, tp[R], slots=2)
compute = lane()
with tp:
    zero(c, lane=compute)
"""
    with pytest.raises(ProgramError, match="more than one slot"):
        validate(parse(text))


def test_a_loop_without_end_is_a_mistake() -> None:
    text = """
program("long")
tp = mesh((1,), ("x",))
c = scratch((3, 3), "float32", on=tp)
compute = lane()
with tp:
    for i in range(10000000000):
        zero(c, lane=compute)
"""
    with pytest.raises(ProgramError, match="which is the limit"):
        validate(parse(text))
