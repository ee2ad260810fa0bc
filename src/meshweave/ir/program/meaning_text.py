"""The text form of meanings: `computes(C, product(A, B))`, `computes(Y[i, :], call("norm", X[i, :]))`."""

from __future__ import annotations

import ast
from functools import partial

from meshweave.ir.program.literals import (
    fault_at,
    read_flag,
    read_int,
    read_items,
    read_name,
    read_string,
    read_subscript,
)
from meshweave.ir.program.meanings import Function, Meaning, Product, Same, Sum, TensorPart
from meshweave.ir.program.written import Tensor


def read_meaning(out: ast.expr, call: ast.Call, tensors: dict[str, Tensor]) -> Meaning:
    """Return the meaning that `computes(out, call)` declares; `tensors` are the declared ones by name.

    Raises ProgramError where it is in none of the forms, or names an unknown tensor.
    """
    if isinstance(call.func, ast.Name) and call.func.id == "call":
        return _function(out, call, tensors)
    if not isinstance(out, ast.Name):
        raise fault_at(out, "only what a call makes is declared by parts: computes(Y[i, :], call(...))")
    names = [read_name(item, tensors, "tensor") for item in call.args]
    flags = {item.arg: read_flag(item.value) for item in call.keywords}
    are_known = set(flags) <= {"transpose_a", "transpose_b"} and len(flags) == len(call.keywords)
    match call.func:
        case ast.Name(id="product") if len(names) == 2 and are_known:
            return Product(out.id, names[0], names[1], **flags)  # type: ignore[arg-type]
        case ast.Name(id="same") if len(names) == 1 and not flags:
            return Same(out.id, names[0])
        case ast.Name(id="add") if len(names) >= 2 and not flags:
            return Sum(out.id, tuple(names))
    raise fault_at(
        call,
        "a tensor computes product(A, B, transpose_a=, transpose_b=), same(A), add(A, B, ...) or "
        'call("fn", A[i, :], ..., stash=, reduce=, output=)',
    )


def _function(out: ast.expr, call: ast.Call, tensors: dict[str, Tensor]) -> Function:
    values = {item.arg: item.value for item in call.keywords}
    is_known = set(values) <= {"stash", "reduce", "output"} and len(values) == len(call.keywords)
    if not call.args or not is_known:
        raise fault_at(call, 'expected call("fn", A[i, :], ..., stash=, reduce=, output=)')
    part = partial(_tensor_part, tensors)
    stash = read_items(values["stash"]) if "stash" in values else []
    return Function(
        part(out),
        read_string(call.args[0]),
        tuple(map(part, call.args[1:])),
        tuple(map(part, stash)),
        read_string(values["reduce"]) if "reduce" in values else "",
        read_int(values["output"]) if "output" in values else 0,
    )


def _tensor_part(tensors: dict[str, Tensor], node: ast.expr) -> TensorPart:
    node, chosen = read_subscript(node)
    name = read_name(node, tensors, "tensor")
    num_dims = len(tensors[name].shape)
    if chosen is None:
        return TensorPart(name, (None,) * num_dims)
    dims: list[str | None] = []
    for item in chosen:
        match item:
            case ast.Name(id=index):
                dims.append(index)
            case ast.Slice(lower=None, upper=None, step=None):
                dims.append(None)
            case _:
                raise fault_at(item, "a part of a tensor is written X[i, :], a name or ':' per dim")
    if len(dims) != num_dims:
        raise fault_at(node, f"tensor {name} has {num_dims} dims, its part names {len(dims)}")
    return TensorPart(name, tuple(dims))
