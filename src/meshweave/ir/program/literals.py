"""Reads names, numbers and other small parts of the text form of a program from its syntax tree.

Each function takes a node and returns a value, or raises ProgramError that says line, column and what is right.
"""

from __future__ import annotations

import ast
from typing import Any

from meshweave.base.errors import ProgramError, did_you_mean
from meshweave.base.limits import DIMS, SLOTS
from meshweave.base.units import DTYPES
from meshweave.describe.layout import Partial, Placement, Replicate, Shard, StridedShard, Tile
from meshweave.ir.program.expressions import from_ast, text_of
from meshweave.ir.program.views import Blocked, Range, Selector


def fault_at(node: ast.AST, message: str) -> ProgramError:
    """Return the error with this message, after the line and column of `node` in the text."""
    return ProgramError(
        f"line {getattr(node, 'lineno', '?')}, column {getattr(node, 'col_offset', 0) + 1}: {message}"
    )


def read_slots(name: str, node: ast.expr | None) -> int:
    """Return the number of slots that `node` gives buffer `name`; 1 where `node` is None.

    Raises ProgramError where it is no integer or over the limit.
    """
    slots = 1 if node is None else read_int(node)
    if slots > SLOTS.most:
        raise fault_at(node or ast.Pass(), f"buffer {name} {SLOTS.refusal(slots)}")
    return slots


def read_dims(what: str, node: ast.expr) -> tuple[int, ...]:
    """Return the sizes that `node`, a tuple of integers, gives a tensor or mesh.

    `what` names it in errors. Raises ProgramError where `node` is no such tuple, or has too many dims.
    """
    sizes = read_ints(node)
    if len(sizes) > DIMS.most:
        raise fault_at(node, f"{what} {DIMS.refusal(len(sizes))}")
    return sizes


def read_placement(node: ast.expr) -> Placement:
    """Return the placement that a node says; else raise ProgramError.

    It is `S(dim)`, `R` for replicate, `P` or `P(op)` for partial, `T(dim, size, offset)` for a tile, or `SS(dim,
    factor)` for a strided shard.
    """
    match node:
        case ast.Name(id="R"):
            return Replicate()
        case ast.Name(id="P"):
            return Partial()
        case ast.Call(func=ast.Name(id="P"), args=[op], keywords=[]):
            return Partial(read_string(op))
        case ast.Call(func=ast.Name(id="S"), args=[dim], keywords=[]):
            return Shard(read_int(dim))
        case ast.Call(func=ast.Name(id="T"), args=[dim, size, offset], keywords=[]):
            return Tile(read_int(dim), read_int(size), read_int(offset))
        case ast.Call(func=ast.Name(id="SS"), args=[dim, split_factor], keywords=[]):
            return StridedShard(read_int(dim), read_int(split_factor))
    raise fault_at(
        node, "a placement is S(dim), R, P, P(op) or T(dim, size, offset), or SS(dim, split_factor)"
    )


def read_arguments(call: ast.Call, names: tuple[str, ...], optional: int = 0) -> list[Any]:
    """Return the argument nodes of a call in the order of `names`; None for optional ones that are left out.

    The last `optional` names may be left out. Raises ProgramError where the call has others, lacks one or gives
    one twice.
    """
    values: dict[str, ast.expr] = dict(zip(names, call.args, strict=False))
    for keyword in call.keywords:
        if keyword.arg in values:
            raise fault_at(call, f"argument '{keyword.arg}' is given twice")
        if keyword.arg not in names:
            raise fault_at(call, f"no argument '{keyword.arg}' here{did_you_mean(keyword.arg or '', names)}")
        values[keyword.arg] = keyword.value
    if len(call.args) > len(names) or any(name not in values for name in names[: len(names) - optional]):
        raise fault_at(call, f"expected ({', '.join(names)})")
    return [values.get(name) for name in names]


def read_name(node: ast.expr | None, table: dict[str, Any], noun: str) -> str:
    """Return the name that `node` is. Raises ProgramError ("is no `noun`") unless it is a key of `table`."""
    name = node.id if isinstance(node, ast.Name) else None
    if name is None or name not in table:
        shown = text_of(node) if node is not None else "nothing"
        raise fault_at(node or ast.Pass(), f"'{shown}' is no {noun}{did_you_mean(name or '', table)}")
    return name


def read_subscript(node: ast.expr) -> tuple[ast.expr, list[ast.expr] | None]:
    """Return the subscripted node and the index nodes, one per dim; (node, None) for one without a subscript."""
    match node:
        case ast.Subscript(value=inner, slice=ast.Tuple(elts=chosen)):
            return inner, chosen
        case ast.Subscript(value=inner, slice=only):
            return inner, [only]
    return node, None


def read_sizes(node: ast.expr) -> Any:
    """Return the sizes of parts that `node` gives: a tuple of integers, or one expression in `peer`.

    Raises ProgramError for another node.
    """
    return read_ints(node) if isinstance(node, ast.Tuple) else from_ast(node)


def read_over(node: ast.expr) -> str | tuple[int, ...]:
    """Return what a collective runs over: a string ("mesh.axis"), or a tuple of global ranks.

    Raises ProgramError for another node.
    """
    return read_ints(node) if isinstance(node, ast.Tuple) else read_string(node)


def read_items(node: ast.expr | None) -> list[ast.expr]:
    """Return the nodes in a tuple. Raises ProgramError for another node."""
    if isinstance(node, ast.Tuple):
        return node.elts
    raise fault_at(node or ast.Pass(), "expected a tuple (a, b, ...)")


def read_ints(node: ast.expr | None) -> tuple[int, ...]:
    """Return the integers in a tuple of them. Raises ProgramError for another node."""
    return tuple(map(read_int, read_items(node)))


def read_int(node: ast.expr) -> int:
    """Return the integer that a node is. Raises ProgramError for another node."""
    value = from_ast(node)
    if not isinstance(value, int):
        raise fault_at(node, f"expected an integer, not '{value}'")
    return value


def read_number(node: ast.expr) -> float:
    """Return the unsigned number that a node is, as a float. Raises ProgramError for another node."""
    value = node.value if isinstance(node, ast.Constant) else None
    if isinstance(value, int | float) and not isinstance(value, bool) and value == value:
        return float(value)
    raise fault_at(node, "expected a number")


def read_flag(node: ast.expr) -> bool:
    """Return the True or False that a node is. Raises ProgramError for another node."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return node.value
    raise fault_at(node, "expected True or False")


def read_string(node: ast.expr | None) -> str:
    """Return the string that a node is. Raises ProgramError for another node."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise fault_at(node or ast.Pass(), "expected a string in quotes")


def read_dtype(node: ast.expr | None) -> str:
    """Return the name of a dtype that a node is, as a string. Raises ProgramError for an unknown one."""
    name = read_string(node)
    if name not in DTYPES:
        raise fault_at(node or ast.Pass(), f"unknown dtype '{name}'{did_you_mean(name, DTYPES)}")
    return name


def read_selector(node: ast.expr) -> Selector:
    """Return the selector that a node is, start:stop or blocked(...). Raises ProgramError for another node."""
    match node:
        case ast.Slice(lower=lower, upper=upper, step=None):
            return Range(0 if lower is None else from_ast(lower), None if upper is None else from_ast(upper))
        case ast.Call(func=ast.Name(id="blocked"), args=args, keywords=[]) if 3 <= len(args) <= 5:
            return Blocked(*map(from_ast, args))
    raise fault_at(node, "a selector is start:stop or blocked(first, block, stride, start, stop)")
