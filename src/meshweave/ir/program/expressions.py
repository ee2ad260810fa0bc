"""Coordinate expressions: the integers of a program template.

An `Index` is an int or an `Expr` over mesh coordinates (`tp.row`), loop indices (`s`), the position of a
group member (`peer`) and the global `rank`. Operations are +, -, *, //, %, min, max, comparisons and
and / or; // and % round towards minus infinity as in Python. Truth values are 0 and 1.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshweave.base.errors import ProgramError, listed, printable
from meshweave.base.limits import EXPRESSION_DEPTH

MAX_INTEGER = 2**63 - 1
"""The largest integer that a program may write; the simulator counts in 64 bits."""


class Expr:
    """Base of expression nodes; arithmetic on them builds larger ones."""

    __slots__ = ()

    def __add__(self, other: Index) -> Index:
        return binary("+", self, other)

    def __radd__(self, other: Index) -> Index:
        return binary("+", other, self)

    def __sub__(self, other: Index) -> Index:
        return binary("-", self, other)

    def __rsub__(self, other: Index) -> Index:
        return binary("-", other, self)

    def __mul__(self, other: Index) -> Index:
        return binary("*", self, other)

    def __rmul__(self, other: Index) -> Index:
        return binary("*", other, self)

    def __floordiv__(self, other: Index) -> Index:
        return binary("//", self, other)

    def __mod__(self, other: Index) -> Index:
        return binary("%", self, other)

    def __lt__(self, other: Index) -> Index:
        return binary("<", self, other)

    def __le__(self, other: Index) -> Index:
        return binary("<=", self, other)

    def __gt__(self, other: Index) -> Index:
        return binary(">", self, other)

    def __ge__(self, other: Index) -> Index:
        return binary(">=", self, other)

    def __str__(self) -> str:
        return ast.unparse(to_ast(self))


Index = int | Expr


@dataclass(frozen=True, slots=True)
class Var(Expr):
    """A coordinate (`mesh.axis`), a loop index, `peer` or `rank`."""

    name: str

    __str__ = Expr.__str__


@dataclass(frozen=True, slots=True)
class Binary(Expr):
    """`left op right`, with one of the operators in the module docstring."""

    op: str
    left: Index
    right: Index

    __str__ = Expr.__str__


@dataclass(frozen=True, slots=True)
class Select(Expr):
    """Entry number `index` of a table: `(3, 5, 8)[tp.col]`.

    Evaluated outside of the table it raises ProgramError.
    """

    entries: tuple[Index, ...]
    index: Index

    __str__ = Expr.__str__


_EVALUATE: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "min": min,
    "max": max,
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "<": lambda a, b: int(a < b),
    "<=": lambda a, b: int(a <= b),
    ">": lambda a, b: int(a > b),
    ">=": lambda a, b: int(a >= b),
    "and": lambda a, b: int(bool(a) and bool(b)),
    "or": lambda a, b: int(bool(a) or bool(b)),
}

_AST_BINARY: dict[str, ast.operator] = {
    "+": ast.Add(),
    "-": ast.Sub(),
    "*": ast.Mult(),
    "//": ast.FloorDiv(),
    "%": ast.Mod(),
}
_AST_COMPARE: dict[str, ast.cmpop] = {
    "==": ast.Eq(),
    "!=": ast.NotEq(),
    "<": ast.Lt(),
    "<=": ast.LtE(),
    ">": ast.Gt(),
    ">=": ast.GtE(),
}
_AST_BOOL: dict[str, ast.boolop] = {"and": ast.And(), "or": ast.Or()}


def binary(op: str, left: Index, right: Index) -> Index:
    """Return `left op right`, or min or max of both: an int where both are ints, else an expression.

    Neutral operands are folded, as in x + 0. Raises ProgramError for a division by 0.
    """
    if right == 0 and op in ("//", "%"):
        raise ProgramError(f"division by zero in '{left} {op} 0'")
    if isinstance(left, int) and isinstance(right, int):
        return _EVALUATE[op](left, right)
    if right == 0 and op in "+-":
        return left
    if left == 0 and op == "+":
        return right
    if op == "*" and 0 in (left, right):
        return 0
    if op == "-" and isinstance(right, int) and right < 0:
        return binary("+", left, -right)
    if right == 1 and op in ("*", "//"):
        return left
    if left == 1 and op == "*":
        return right
    if right == 1 and op == "%":
        return 0
    return Binary(op, left, right)


def minimum(left: Index, right: Index) -> Index:
    """Return min(left, right) as an expression, or as an int where both are known."""
    return binary("min", left, right)


def maximum(left: Index, right: Index) -> Index:
    """Return max(left, right) as an expression, or as an int where both are known."""
    return binary("max", left, right)


def select(entries: Sequence[Index], index: Index) -> Index:
    """Return `entries[index]`: the entry itself if the index is known or all are equal, else an expression.

    Raises ProgramError for a known index outside of the entries, unless these are all equal.
    """
    if all(entry == entries[0] for entry in entries):
        return entries[0]
    if not isinstance(index, int):
        return Select(tuple(entries), index)
    if not 0 <= index < len(entries):
        raise ProgramError(f"'{Select(tuple(entries), index)}' has no entry {index}")
    return entries[index]


def number_of(index: Index) -> int:
    """Return `index` as the int that it is, as in a resolved op; it must not be an expression."""
    assert isinstance(index, int)
    return index


def substitute(index: Index, name: str, value: Index) -> Index:
    """Return `index` with `value` in place of the variable `name`."""
    return substitute_all(index, {name: value})


def substitute_all(index: Index, values: Mapping[str, Index]) -> Index:
    """Return `index` with a value in place of each variable that `values` names, all at once.

    Raises ProgramError where this makes a division by 0, or a known place outside of a table.
    """
    if isinstance(index, Var):
        return values.get(index.name, index)
    if isinstance(index, Binary):
        return binary(index.op, substitute_all(index.left, values), substitute_all(index.right, values))
    if isinstance(index, Select):
        entries = tuple(substitute_all(entry, values) for entry in index.entries)
        return select(entries, substitute_all(index.index, values))
    return index


def names_in(index: Index) -> Iterator[str]:
    """Yield the name of every variable in an index, as often as it stands there."""
    if isinstance(index, Var):
        yield index.name
    elif isinstance(index, Binary):
        yield from names_in(index.left)
        yield from names_in(index.right)
    elif isinstance(index, Select):
        yield from names_in(index.index)
        for entry in index.entries:
            yield from names_in(entry)


def equal(left: Index, right: Index) -> Index:
    """Return the test left == right as an expression (the Python operator compares the trees)."""
    return binary("==", left, right)


def evaluate(index: Index, env: Mapping[str, int]) -> int:
    """Return the value of an index, given the values of variables.

    Raises ProgramError for a name that `env` lacks, a division by 0, and a place outside of a table.
    """
    if isinstance(index, int):
        return int(index)
    if isinstance(index, Var):
        try:
            return env[index.name]
        except KeyError:
            raise ProgramError(f"unknown name '{index.name}'; known here: {listed(sorted(env))}") from None
    if isinstance(index, Select):
        at = evaluate(index.index, env)
        if not 0 <= at < len(index.entries):
            raise ProgramError(f"'{index}' has no entry {at}")
        return evaluate(index.entries[at], env)
    assert isinstance(index, Binary)
    left, right = evaluate(index.left, env), evaluate(index.right, env)
    if index.op in ("//", "%") and right == 0:
        raise ProgramError(f"division by zero in '{index}'")
    return _EVALUATE[index.op](left, right)


def to_ast(index: Index) -> ast.expr:
    """Return the Python syntax tree of an index; `ast.unparse` of it is its text form."""
    if isinstance(index, int):
        return ast.Constant(index) if index >= 0 else ast.UnaryOp(ast.USub(), ast.Constant(-index))
    if isinstance(index, Var):
        head, *attributes = index.name.split(".")
        node: ast.expr = ast.Name(head, ast.Load())
        for part in attributes:
            node = ast.Attribute(node, part, ast.Load())
        return node
    if isinstance(index, Select):
        table = ast.Tuple([to_ast(entry) for entry in index.entries], ast.Load())
        return ast.Subscript(table, to_ast(index.index), ast.Load())
    assert isinstance(index, Binary)
    left, right = to_ast(index.left), to_ast(index.right)
    if index.op in _AST_BINARY:
        return ast.BinOp(left, _AST_BINARY[index.op], right)
    if index.op in _AST_COMPARE:
        return ast.Compare(left, [_AST_COMPARE[index.op]], [right])
    if index.op in _AST_BOOL:
        return ast.BoolOp(_AST_BOOL[index.op], [left, right])
    return ast.Call(ast.Name(index.op, ast.Load()), [left, right], [])


def from_ast(node: ast.expr) -> Index:
    """Return an index from Python syntax.

    Raises ProgramError with line and column for anything else, for an integer over 2**63 - 1, and where over
    `base.limits.EXPRESSION_DEPTH` operations are nested: whatever reads an expression later recurses into it.
    """
    return _from_ast(node, EXPRESSION_DEPTH.most)


def _from_ast(node: ast.expr, depth: int) -> Index:
    """Return an index of at most `depth` nested operations."""
    if depth < 0:
        raise ProgramError(f"{_where(node)}: an expression here {EXPRESSION_DEPTH.refusal()}")
    inner = depth - 1
    match node:
        case ast.Constant(value=bool() as truth):
            return int(truth)
        case ast.Constant(value=int() as value):
            if value > MAX_INTEGER:
                raise ProgramError(f"{_where(node)}: an integer here is over 2**63 - 1")
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return binary("-", 0, _from_ast(operand, inner))
        case ast.Name(id=name):
            return Var(name)
        case ast.Attribute(value=ast.Name(id=head), attr=attr):
            return Var(f"{head}.{attr}")
        case ast.BinOp(left=left, op=op, right=right):
            for sign, kind in _AST_BINARY.items():
                if isinstance(op, type(kind)):
                    return binary(sign, _from_ast(left, inner), _from_ast(right, inner))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            for sign, test in _AST_COMPARE.items():
                if isinstance(op, type(test)):
                    return binary(sign, _from_ast(left, inner), _from_ast(right, inner))
        case ast.BoolOp(op=op, values=values):
            inner -= len(values) - 2  # read as nested pairs
            sign = "and" if isinstance(op, ast.And) else "or"
            result = _from_ast(values[0], inner)
            for term in values[1:]:
                result = binary(sign, result, _from_ast(term, inner))
            return result
        case ast.Subscript(value=ast.Tuple(elts=[_, *_] as entries), slice=place) if not isinstance(
            place, ast.Slice
        ):
            chosen = _from_ast(place, inner)
            if isinstance(chosen, int) and not 0 <= chosen < len(entries):
                raise ProgramError(f"line {node.lineno}: '{text_of(node)}' has no entry {chosen}")
            return select([_from_ast(item, inner) for item in entries], chosen)
        case ast.Call(func=ast.Name(id=("min" | "max") as name), args=[left, right], keywords=[]):
            return binary(name, _from_ast(left, inner), _from_ast(right, inner))
    raise ProgramError(f"{_where(node)}: '{text_of(node)}' is no coordinate expression")


def _where(node: ast.expr) -> str:
    return f"line {node.lineno}, column {node.col_offset + 1}"


def text_of(node: ast.expr) -> str:
    """Return the source text of a syntax tree for an error message, shortened."""
    try:
        return printable(ast.unparse(node))
    except RecursionError:
        return "an expression too deep to print"
