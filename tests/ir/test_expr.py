"""Coordinate expressions: printed, read back, evaluated."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.base.errors import ProgramError
from meshweave.ir.program.expressions import (
    Expr,
    Index,
    Var,
    binary,
    equal,
    evaluate,
    from_ast,
    maximum,
    minimum,
    select,
    substitute,
)
from sampling import examples

ENV = {"tp.row": 3, "tp.col": 1, "s": 5, "peer": 2, "rank": 7}
OPS = ("+", "-", "*", "//", "%", "min", "max", "==", "!=", "<", "<=", ">", ">=", "and", "or")

leaves = st.integers(-20, 20) | st.sampled_from([Var(name) for name in ENV])


def _combine(op: str, left: Index, right: Index) -> Index:
    try:
        return binary(op, left, right)
    except ProgramError:  # a constant division by zero
        return left


def _select(entries: list[Index], index: Index) -> Index:
    try:
        return select(entries, index)
    except ProgramError:  # a constant place outside of the table
        return index


indices = st.recursive(
    leaves,
    lambda inner: (
        st.builds(_combine, st.sampled_from(OPS), inner, inner)
        | st.builds(_select, st.lists(inner, min_size=1, max_size=3), inner)
    ),
    max_leaves=12,
)


def read(text: str) -> Index:
    return from_ast(ast.parse(text, mode="eval").body)


@examples(250)
@given(indices)
def test_round_trip(index: Index) -> None:
    assert read(str(index)) == index


@examples(250)
@given(indices)
def test_means_what_python_means(index: Index) -> None:
    scope = {"tp": SimpleNamespace(row=3, col=1), "s": 5, "peer": 2, "rank": 7, "min": min, "max": max}
    try:
        ours = evaluate(index, ENV)
    except ProgramError as error:
        assert "division by zero" in str(error) or "has no entry" in str(error)
        return
    tree = ast.fix_missing_locations(_Truths().visit(ast.parse(str(index), mode="eval")))
    try:
        theirs = eval(compile(tree, "index", "eval"), {**scope, "int": int, "bool": bool})
    except (IndexError, ZeroDivisionError):  # in an entry of a table that ours need not look at
        return
    assert ours == theirs


class _Truths(ast.NodeTransformer):
    """Makes `a and b` 0 or 1, as ours is, where Python's gives an operand back."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        return ast.Call(ast.Name("int", ast.Load()), [ast.Call(ast.Name("bool", ast.Load()), [node], [])], [])


@examples(100)
@given(leaves, leaves)
def test_operators_build_what_they_say(left: Index, right: Index) -> None:
    x, y = evaluate(left, ENV), evaluate(right, ENV)
    if isinstance(left, Expr) or isinstance(right, Expr):
        assert evaluate(left + right, ENV) == x + y
        assert evaluate(left - right, ENV) == x - y
        assert evaluate(left * right, ENV) == x * y
        assert evaluate(left < right, ENV) == (x < y)
        assert evaluate(left >= right, ENV) == (x >= y)
    assert evaluate(equal(left, right), ENV) == (x == y)
    assert evaluate(minimum(left, right), ENV) == min(x, y)
    assert evaluate(maximum(left, right), ENV) == max(x, y)


@examples(150)
@given(indices, leaves)
def test_substituting_is_evaluating_with_another_value(index: Index, value: Index) -> None:
    try:
        wanted = evaluate(index, {**ENV, "s": evaluate(value, ENV)})
        got = evaluate(substitute(index, "s", value), ENV)
    except ProgramError:  # a division by zero, or an entry that is not there, may be folded away
        return
    assert got == wanted


def test_table() -> None:
    table = select([3, Var("s"), 8], Var("tp.col"))
    assert str(table) == "(3, s, 8)[tp.col]" and evaluate(table, ENV) == 5
    assert select([4, 4], Var("s")) == 4 and select([1, 2], 1) == 2
    for place in (-1, 3):
        with pytest.raises(ProgramError, match=f"has no entry {place}"):
            evaluate(table, {"s": 0, "tp.col": place})
        with pytest.raises(ProgramError, match=f"has no entry {place}"):
            select([1, 2, 3], place)


def test_floor_division_and_remainder_round_down() -> None:
    s = Var("s")
    assert evaluate((s - 12) // 2, ENV) == -4
    assert evaluate((s - 12) % 4, ENV) == 1


def test_neutral_operands_fold() -> None:
    s = Var("s")
    assert (s + 0, 0 + s, s - 0, s * 1, 1 * s, s // 1) == (s,) * 6
    assert (s * 0, s % 1) == (0, 0)


@pytest.mark.parametrize("text", ["1 // 0", "s % 0", "(s + 1) // (2 - 2)"])
def test_constant_division_by_zero(text: str) -> None:
    with pytest.raises(ProgramError, match="division by zero"):
        read(text)


def test_division_by_what_turns_out_zero() -> None:
    with pytest.raises(ProgramError, match="division by zero in '7 // s'"):
        evaluate(read("7 // s"), {"s": 0})


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(ProgramError, match="unknown name 't'; known here: s, u"):
        evaluate(Var("t"), {"u": 1, "s": 2})


@pytest.mark.parametrize(
    "text", ["s ** 2", "f(s)", "s.a.b", "'s'", "1.5", "a < b < c", "min(s)", "not s", "s[0]"]
)
def test_anything_else_is_no_expression(text: str) -> None:
    with pytest.raises(ProgramError, match=r"line 1, column 1: .* is no coordinate expression"):
        read(text)
