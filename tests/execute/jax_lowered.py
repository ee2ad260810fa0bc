"""The collectives of a lowered jax module, and those that its program says it must have.

Both count operands: what a device gives. jax has no broadcast or reduce to one
member; both are an all-reduce of as many bytes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from meshweave.base.errors import UnsupportedError
from meshweave.base.units import dtype_bytes
from meshweave.execute.jax.rank_steps import as_messages
from meshweave.ir.analysis.shapes import part_sizes
from meshweave.ir.program import Program
from meshweave.ir.program.ops import AllToAll, Collective, DataCollective, Permute, ReduceScatter, Send

Moved = Counter[tuple[str, int]]
"""How many collectives there are of each kind and operand bytes."""

_KINDS = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "broadcast": "all_reduce",
    "reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "permute": "collective_permute",
}
_TENSOR = re.compile(r"tensor<((?:\d+x)*)([a-z]+)(\d+)>")


def lowered_collectives(lowered: Any) -> Moved:
    """Return the collectives in what `jax.jit(...).lower(...)` returned, one for each time that it is written.

    Raises:
        UnsupportedError: an operand has a type that is no array of numbers.
    """
    kinds = set(_KINDS.values())
    moved: Moved = Counter()
    for op in _operations(lowered.compiler_ir("stablehlo").operation):
        kind = str(op.name).removeprefix("stablehlo.")
        if kind in kinds:
            for operand in op.operands:
                moved[kind, _bytes(str(operand.type))] += 1
    return moved


def lowered_messages(lowered: Any) -> Counter[int]:
    """Return the bytes of each message of a lowered module: a permute sends one for each of its pairs."""
    sizes: Counter[int] = Counter()
    for op in _operations(lowered.compiler_ir("stablehlo").operation):
        if str(op.name) == "stablehlo.collective_permute":
            pairs = np.asarray(op.attributes["source_target_pairs"])
            sizes[_bytes(str(op.operands[0].type))] += len(pairs)
    return sizes


def program_messages(program: Program) -> Counter[int]:
    """Return the bytes of each message that ranks of a program send, with one-sided ops and tiles as messages."""
    program = as_messages(program)
    return Counter(
        program.view_bytes(bound.op.src)
        for rank in program.ranks
        for bound in program.ops_by_rank[rank]
        if isinstance(bound.op, Send)
    )


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from _operations(inner.operation)


def _bytes(kind: str) -> int:
    match = _TENSOR.fullmatch(kind)
    if match is None:
        raise UnsupportedError(f"an operand of a collective has type {kind}")
    sizes = [int(size) for size in match[1].split("x") if size]
    return math.prod(sizes) * int(match[3]) // 8


def program_collectives(program: Program) -> Moved:
    """Return the collectives of a program, each joint op once.

    Operands count as jax has them: every dim, and every part of one that is cut, as large as the largest of all
    ranks. Where shards are equal that is what the program says. An op of a group of one, and a permute to oneself,
    move nothing and are left out.
    """
    program = program.expanded
    shapes: dict[tuple[int, ...], tuple[DataCollective, list[int]]] = {}
    for rank in program.ranks:
        for bound in program.ops_by_rank[rank]:
            op = bound.op
            if isinstance(op, DataCollective) and _moves(op):
                known = shapes.setdefault(bound.key, (op, [0] * len(op.src.selectors)))[1]
                known[:] = map(max, known, _operand_shape(op))
    return Counter(
        (_KINDS[op.kind], math.prod(shape) * dtype_bytes(program.buffer_of[op.src.buffer].dtype))
        for op, shape in shapes.values()
    )


def _operand_shape(op: DataCollective) -> list[int]:
    shape = list(op.src.shape)
    if isinstance(op, (ReduceScatter, AllToAll)):
        dim, sizes = (op.dim, op.sizes) if isinstance(op, ReduceScatter) else (op.split_dim, op.send_sizes)
        count = len(op.over)
        shape[dim] = count * max(part_sizes(sizes, shape[dim], count))
    return shape


def _moves(op: Collective) -> bool:
    count = len(op.over)
    if isinstance(op, Permute):
        assert isinstance(op.shift, int), "an op is not resolved"
        return op.shift % count != 0
    return count > 1
