"""The text form: prints and parses back to the same program, and refuses everything else in one line."""

from __future__ import annotations

import ast
import copy
import re

import pytest
from builders import NAMES, golden, golden_text
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from strategies import ops, programs

from meshweave.base.errors import MeshweaveError, ProgramError
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Lane, Program
from meshweave.ir.program.ops import OP_TYPES, Fence, Op
from meshweave.ir.program.parse import parse
from meshweave.ir.program.text import op_to_text, to_text
from sampling import examples

SHORT = [name for name in NAMES if not name.startswith("universal")]
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@examples(40, suppress_health_check=SLOW)
@given(programs())
def test_random_programs_round_trip(program: Program) -> None:
    text = to_text(program)
    assert parse(text) == program
    assert to_text(parse(text)) == text


@examples(100, suppress_health_check=SLOW)
@given(ops())
def test_each_op_with_any_field_round_trips(op: Op) -> None:
    """Ops alone, so that every type and field is met many times."""
    head = to_text(Program("p", *DECLARED, ()))
    assert parse(head + op_to_text(op) + "\n").body == (op,)


def _declared() -> tuple[object, ...]:
    text = """
program("p")
tp = mesh((2, 3), ("row", "col"))
A = tensor((4, 4), "float32")
B = tensor((4, 4, 4), "float32")
V = tensor((4,), "float32")
a = input(A, tp[R, R])
b = input(B, tp[R, R])
v = input(V, tp[R, R])
scratch2 = scratch((4, 4), "float32", on=tp)
scratch1 = scratch((4,), "float32", on=tp)
compute = lane()
row = lane()
col = lane()
"""
    program = parse(text)
    return program.meshes, program.tensors, program.buffers, program.lanes


DECLARED = _declared()


@pytest.mark.parametrize(
    "name", ["", "plain", 'quote " and \\', "line\nbreak\r\t\0", "mésh → 🕸", "\ud800x", "\u2028"]
)
def test_any_label_survives(name: str) -> None:
    program = Program(name, (), (), (), (Lane("compute"),), (Fence(over=(0,), lane="compute", name=name),))
    assert parse(to_text(program)) == program


# --- what it refuses ------------------------------------------------------------------------------------

_SIGNS = "()[],:=.+-*%<'\"{}\0\\#\n "
_WORDS = """
    // == ** 0 1 2 7 -1 (1,2) a x[0] tp s peer rank with for if in range ranks at blocked mesh tensor input
    lane scratch program computes product same order on S R P T None True lambda import not and é 🕸 sizes
    over dim out release update step else: yield =lane()
"""
TOKENS = [*_SIGNS, "    ", *_WORDS.split(), *sorted(OP_TYPES)]


@st.composite
def broken_texts(draw: st.DrawFn) -> str:
    """A golden program with a few tokens cut, put in, or lines moved."""
    text = golden_text(draw(st.sampled_from(SHORT)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        cut = draw(st.sampled_from([0, 0, 1, 2, 5, 20]))
        text = text[:at] + draw(st.sampled_from([*TOKENS, ""])) + text[at + cut :]
    if draw(st.booleans()):
        lines = text.split("\n")
        lines.insert(draw(st.integers(0, len(lines))), lines.pop(draw(st.integers(0, len(lines) - 1))))
        text = "\n".join(lines)
    return text


def check_refusal(text: str) -> Program | None:
    try:
        program = parse(text)
    except MeshweaveError as error:
        assert "\n" not in str(error)
        return None
    assert parse(to_text(program)) == program
    return program


@examples(500, suppress_health_check=SLOW)
@given(broken_texts())
def test_broken_programs_raise_our_errors_only(text: str) -> None:
    program = check_refusal(text)
    if program is None or re.search(r"\d{3}", text):  # not to wait for a loop of a thousand turns
        return
    try:
        validate(program)
    except MeshweaveError as error:
        assert "\n" not in str(error)


_PIECES = """
    -1 0 3 True None 'sum' 'tp.row' (1,2) () (0,0) f(1) x.y a[0] tp.col s p//0 S(5) T(0,3,1) P tp[R,R] at(0,c)
    at(-1,acc) c acc release(tile=(0,)) release(tile=(1,2,3,4)) release(order="x")
    blocked(0,1,0) blocked(0,9,3) compute tp (0,1)[s] (1,)[4]
"""
PIECES = _PIECES.split()


class _Graft(ast.NodeTransformer):
    """Puts `piece` where the `number`-th expression stands."""

    def __init__(self, number: int, piece: ast.expr) -> None:
        self.left, self.piece = number, piece

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.expr) and not isinstance(getattr(node, "ctx", None), ast.Store):
            self.left -= 1
            if self.left == 0:
                return self.piece
        return self.generic_visit(node)


@st.composite
def grafted_texts(draw: st.DrawFn) -> str:
    """A golden program in which one or two expressions are others: good syntax, odd meaning."""
    text = golden_text(draw(st.sampled_from(SHORT)))
    tree, again = ast.parse(text), ast.parse(text)
    expressions = [node for node in ast.walk(again) if isinstance(node, ast.expr)]
    for _ in range(draw(st.integers(1, 2))):
        piece = ast.parse(draw(st.sampled_from(PIECES)), mode="eval").body
        if draw(st.booleans()):
            piece = copy.deepcopy(draw(st.sampled_from(expressions)))
        tree = _Graft(draw(st.integers(1, len(expressions))), piece).visit(tree)
    return ast.unparse(ast.fix_missing_locations(tree))


@examples(200, suppress_health_check=SLOW)
@given(grafted_texts())
def test_odd_programs_raise_our_errors_only(text: str) -> None:
    program = check_refusal(text)
    if program is None or re.search(r"\d{3}", text):
        return
    try:
        validate(program)
    except MeshweaveError as error:
        assert "\n" not in str(error)


@examples(300, suppress_health_check=SLOW)
@given(st.lists(st.sampled_from(TOKENS), max_size=30).map("".join) | st.text(max_size=60))
def test_token_soup_raises_our_errors_only(text: str) -> None:
    check_refusal(text)


@examples(200, suppress_health_check=SLOW)
@given(st.lists(st.sampled_from(TOKENS), max_size=12).map(" ".join))
def test_soup_in_a_statement_raises_our_errors_only(soup: str) -> None:
    check_refusal(to_text(Program("p", *DECLARED, ())) + f"with tp:\n    matmul(a, a, {soup})\n")


HEAD = """program("p")
tp = mesh((2, 2), ("row", "col"))
A = tensor((4, 4), "float32")
a = input(A, tp[R, R])
l = lane()
"""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("matmull(a, a, a, lane=l)", "line 6, column 1: there is no op 'matmull' (did you mean 'matmul'?)"),
        ("matmul(a, a, lane=l)", "line 6, column 1: matmul lacks b"),
        ("matmul(a, a, a, a, lane=l)", "line 6, column 1: matmul takes 3 views, not 4"),
        ("matmul(a, a, a, lane=l, transposea=True)", "(did you mean 'transpose_a'?)"),
        ("matmul(a, a, b, lane=l)", "line 6, column 14: 'b' is no buffer"),
        ("matmul(a, a, a[:], lane=l)", "line 6, column 14: buffer a has 2 dims, view has 1"),
        ("matmul(a, a, a, lane=m)", "line 6, column 22: 'm' is no lane"),
        ("matmul(a, a, a, lane=l, accumulate=f(1))", "'f(1)' is no coordinate expression"),
        ("b = inputs(A, tp[R, R])", "'inputs' declares nothing (did you mean 'input'?)"),
        ("a = lane()", "'a' is declared twice"),
        ("b = input(A, tp[R])", "line 6: mesh tp has 2 axes, layout has 1 placements"),
        ("b = input(A, tp[R, Q])", "a placement is S(dim), R, P, P(op) or T(dim, size, offset)"),
        ("b = input(A, tp[R, T(0, 2, 2)])", "tile size must be positive"),
        ('B = tensor((4,), "float31")', "unknown dtype 'float31' (did you mean 'float32'?)"),
        ("m = lane(width=0)", "width is at least 1"),
        ('m = mesh((4096, 4096, 4096), ("a", "b", "c"))', "ranks in its meshes, over the limit of 262,144"),
        ("while True:\n    zero(a, lane=l)", "expected an op"),
        ("zero(a, lane=l", "not in the text form"),
        ("__import__('os')", "there is no op '__import__'"),
        ("computes(A, product(A))", "a tensor computes product"),
        ("computes(A, product(A, A, transpose_a=True, transpose_a=False))", "a tensor computes product"),
        ('computes(A, call("f", A, output=0, output=1))', 'expected call("fn"'),
        ("zero(a[blocked(0, 1, 2, start=1), :], lane=l)", "a selector is start:stop or blocked("),
        ("b = input(A, tp[R, S(0, dim=1)])", "a placement is S(dim), R, P, P(op)"),
        ("zero(a(0, slot=1), lane=l)", "'a(0, slot=1)' is no buffer"),
        ("get(a, at(1, a, slot=1), lane=l)", "'at(1, a, slot=1)' is no buffer"),
        ("with ranks(0, rank=1):\n    zero(a, lane=l)", "expected an op, 'with mesh:'"),
        ("for i in range(2, stop=3):\n    zero(a, lane=l)", "expected an op, 'with mesh:'"),
        ('program("another")', "there is no op 'program'"),
    ],
)
def test_refusals_say_where_and_what(line: str, message: str) -> None:
    with pytest.raises(ProgramError) as caught:
        parse(HEAD + line + "\n")
    assert message in str(caught.value)


def test_a_refusal_is_one_line_whatever_it_quotes() -> None:
    quoted = ", lane=compute)\n    send(a, peer=1)\n        x"
    for text in (
        f"call(fn='f', outs=(a,), ins=(), dtype={quoted!r}, lane=l)",
        f"B = tensor((4,), {quoted!r})",
    ):
        with pytest.raises(ProgramError, match="unknown dtype") as caught:
            validate(parse(HEAD + text + "\n"))
        assert "\n" not in str(caught.value) and "\n" not in caught.value.message


def test_program_without_a_name() -> None:
    with pytest.raises(ProgramError, match="a program starts with program"):
        parse("l = lane()\n")


def test_names_that_python_would_change_are_refused() -> None:
    for name in ("for", "ﬁ", "a b", "é"):
        with pytest.raises(ProgramError, match="is no name"):
            validate(Program("p", (), (), (), (Lane(name),), ()))


def test_golden_programs_hold_every_kind_of_lane_and_view() -> None:
    texts = "".join(map(golden_text, NAMES))
    for part in (
        "blocked(",
        "at(",
        "release(",
        "slots=2",
        "sizes=",
        'order="ready"',
        "width=2",
        "packets=",
        "stash=",
    ):
        assert part in texts
    assert {op.kind for name in NAMES for op in golden(name).ops()} >= set(OP_TYPES) - {
        "reduce", "reduce_scatter", "all_to_all", "exchange",
    }  # fmt: skip
