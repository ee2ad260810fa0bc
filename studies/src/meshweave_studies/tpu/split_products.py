"""Products in parts, so that communication of several steps has a product beside each step.

A ring of P - 1 permutes, of which each needs the one before it, runs beside a product only as far as an executor
can put the steps and the product side by side. One that keeps starts and ends of transfers between whole products,
as a compiler's schedule does, hides no more steps than there are products. The pass cuts each product into parts
along the longer dim of its result; parts share no element of the result.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from meshweave.base.errors import ProgramError
from meshweave.ir.program import Program, Statement
from meshweave.ir.program.expressions import Index
from meshweave.ir.program.ops import Matmul, Op
from meshweave.ir.program.statements import rewrite
from meshweave.ir.program.views import Range, View
from meshweave.lower.boxes import sub_view, view_extent

_GRAIN = 128
"""Parts begin at multiples of it where they can: tiles of matrix units stay whole."""


def split_products(program: Program, num_parts: int, *, along_sum: bool = False) -> Program:
    """Return the program with each product cut into so many parts, along the longer dim of its result or the sum.

    Products with batch dims, of views that are no boxes along that dim, or with tiles that are released one by one
    stay whole. Sub-programs that it includes are cut likewise.

    Raises:
        ProgramError: `num_parts` is not positive.
    """
    if num_parts < 1:
        raise ProgramError(f"a product is cut into 1 part or more, not {num_parts}")
    program = program.with_parts(lambda part: split_products(part, num_parts, along_sum=along_sum))
    if num_parts == 1:
        return program

    def parts(op: Op) -> list[Statement]:
        if not isinstance(op, Matmul):
            return [op]
        return (_terms if along_sum else _parts)(program, op, num_parts)

    return replace(program, body=rewrite(program.body, parts))


def _parts(program: Program, op: Matmul, num_parts: int) -> list[Statement]:
    if op.release is not None or any(len(view.selectors) != 2 for view in (op.out, op.a, op.b)):
        return [op]
    dim = 0 if _longest(program, op.out, 0) >= _longest(program, op.out, 1) else 1
    name, operand = ("a", op.a) if dim == 0 else ("b", op.b)
    transposed = op.transpose_a if dim == 0 else op.transpose_b
    operand_dim = 1 - dim if transposed else dim
    cut = (op.out.selectors[dim], operand.selectors[operand_dim])
    if not all(isinstance(selector, Range) for selector in cut):
        return [op]
    size = view_extent(program, op.out, dim)
    return [
        replace(
            op,
            out=sub_view(op.out, dim, start, stop),
            **{name: sub_view(operand, operand_dim, start, stop)},  # type: ignore[arg-type]
        )
        for start, stop in _bounds(size, num_parts)
    ]


def _terms(program: Program, op: Matmul, num_parts: int) -> list[Statement]:
    """Return the product as a sum of products of parts of the summed dim."""
    if op.release is not None or any(len(view.selectors) != 2 for view in (op.out, op.a, op.b)):
        return [op]
    dims = {"a": 0 if op.transpose_a else 1, "b": 1 if op.transpose_b else 0}
    views = {"a": op.a, "b": op.b}
    if not all(isinstance(views[name].selectors[dim], Range) for name, dim in dims.items()):
        return [op]
    bounds = _bounds(view_extent(program, op.a, dims["a"]), num_parts)
    return [
        replace(
            op,
            accumulate=1 if part else op.accumulate,
            **{name: sub_view(views[name], dim, *bounds[part]) for name, dim in dims.items()},  # type: ignore[arg-type]
        )
        for part in range(num_parts)
    ]


def _bounds(size: Index, num_parts: int) -> list[tuple[Index, Index]]:
    """Return [start, stop) of each part of a dim, at multiples of the grain where they fit."""
    grain = _GRAIN if isinstance(size, int) and size >= num_parts * _GRAIN else 1
    bounds = [size * part // num_parts // grain * grain for part in range(num_parts)] + [size]
    return list(pairwise(bounds))


def _longest(program: Program, view: View, dim: int) -> int:
    """Return the largest extent of a buffer along the dim of a view: slices of one dim are short of it."""
    selector = view.selectors[dim]
    extent = None
    if isinstance(selector, Range) and selector.stop is not None:
        extent = selector.stop - selector.start
    if isinstance(extent, int):
        return extent
    mesh = program.mesh_of[program.buffer_of[view.buffer].mesh]
    return max(program.local_shape(view.buffer, rank)[dim] for rank in mesh.ranks)
