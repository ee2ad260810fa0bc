"""What a program declares to compute, as columns of integers: tensors, terms, meanings, and shards of buffers.

The core runs the program on index labels with them (`csrc/labels.hpp`), as `ir.analysis.proof` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from meshweave.describe.layout import Layout, Partial
from meshweave.ir.analysis.terms import TermTable, partial_term_ranks
from meshweave.ir.columns.proof import ProofColumns
from meshweave.ir.program import Buffer, Program
from meshweave.ir.program.meanings import Function, Same, Sum, TensorPart
from meshweave.ir.program.ops import Call


def label_columns(program: Program, columns: ProofColumns) -> dict[str, NDArray[np.int64]]:
    """Return the columns for the proof of what a program computes, by the names that `csrc/labels.hpp` reads.

    Args:
        columns: numbers functions and reductions; those that it does not know yet are added to it.

    Raises ProgramError where input buffers hold terms of a tensor that is computed, or of one tensor twice, or for
    different reductions.
    """
    table = TermTable(program)
    tensors = {tensor.name: number for number, tensor in enumerate(program.tensors)}
    has_calls = any(isinstance(op, Call) for op in program.ops())
    written: dict[str, Iterable[int]] = {
        "tensors": _tensors(program, table, columns),
        "finished": _finished(table, tensors),
        "products": _products(table, tensors),
        "functions": _functions(program, table, columns, tensors),
        "held": _held(program, table, tensors),
        "outputs": _outputs(program, columns),
    }
    data = {name: np.fromiter(values, np.int64) for name, values in written.items()}
    return {**data, "shards": _shards(program, has_calls)}


# --- tensors and meanings -----------------------------------------------------------------------------------


def _tensors(program: Program, table: TermTable, columns: ProofColumns) -> Iterable[int]:
    for tensor in program.tensors:
        arrived = table.arrived.get(tensor.name)
        is_basis = not isinstance(table.meanings.get(tensor.name), (Same, Sum))
        yield from (len(tensor.shape), *tensor.shape)
        yield columns.reduction(table.reduction(tensor.name))
        yield math.prod(table.extents(tensor.name)) if is_basis else 1
        yield arrived.count if arrived else 0


def _finished(table: TermTable, tensors: Mapping[str, int]) -> Iterable[int]:
    for name in tensors:
        term = table.terms[table.finished(name)]
        assert term is not None
        yield len(term.parts)
        for basis, counts in term.parts:
            counted = np.frombuffer(counts, np.int32)
            yield from (tensors[basis], len(counted), int(counted[0]) if len(counted) else 0)


def _products(table: TermTable, tensors: Mapping[str, int]) -> Iterable[int]:
    for product in table.products.values():
        yield from (tensors[product.out], tensors[product.a], tensors[product.b])
        yield from (int(product.transpose_a), int(product.transpose_b))


def _functions(
    program: Program, table: TermTable, columns: ProofColumns, tensors: Mapping[str, int]
) -> Iterable[int]:
    for meaning in program.computes:
        if not isinstance(meaning, Function):
            continue
        names: dict[str, int] = {}
        running = table.running[meaning.out]

        def part(
            of: TensorPart, names: dict[str, int] = names, running: frozenset[str] = running
        ) -> Iterable[int]:
            yield from (tensors[of.tensor], int(of.tensor in running))
            yield from (-1 if name is None else names.setdefault(name, len(names)) for name in of.dims)

        yield columns.functions.setdefault(meaning.fn, len(columns.functions))
        yield meaning.output
        yield columns.reduction(meaning.reduce) if meaning.reduce else -1
        yield from part(meaning.part)
        for parts in (meaning.ins, meaning.stash):
            yield len(parts)
            for one in parts:
                yield from part(one)
        yield len(meaning.reduced)
        for name, extent in zip(meaning.reduced, table.extents(meaning.out), strict=True):
            yield from (names[name], extent)


# --- memory -------------------------------------------------------------------------------------------------


def _held(program: Program, table: TermTable, tensors: Mapping[str, int]) -> Iterable[int]:
    for buffer in program.buffers:
        has_partial = buffer.layout is not None and bool(buffer.layout.partial_axes)
        yield -1 if buffer.tensor is None else tensors[buffer.tensor]
        yield from (int(buffer.kind == "input"), int(has_partial), int(buffer.tensor in table.meanings))


def _shards(program: Program, has_calls: bool) -> NDArray[np.int64]:
    """Return, per buffer and rank, the part of the tensor that arrives there, and the positions along each dim."""
    rows: list[NDArray[np.int64]] = [np.arange(0)]
    at = {rank: position for position, rank in enumerate(program.ranks)}
    for number, buffer in enumerate(program.buffers):
        if buffer.tensor is None or (buffer.kind == "temp" and not has_calls):
            continue
        assert buffer.layout is not None
        shape, layout = program.tensor_of[buffer.tensor].shape, buffer.layout
        indices: dict[tuple[int, ...], tuple[NDArray[np.int64], ...]] = {}
        for key, rank in zip(layout.shard_keys, layout.mesh.ranks, strict=True):
            if key not in indices:
                indices[key] = layout.indices(shape, rank)
            rows.append(np.array((number, at[rank], _place(buffer, layout, rank))))
            rows += indices[key]
    return np.concatenate(rows)


def _place(buffer: Buffer, layout: Layout, rank: int) -> int:
    """Return which part of its tensor an input holds on a rank; -1 for finished elements."""
    axes = [i for i, p in enumerate(layout.placements) if isinstance(p, Partial)]
    if not axes or buffer.kind != "input":
        return -1
    coords = layout.mesh.coords(rank)
    return int(np.ravel_multi_index([coords[i] for i in axes], [layout.mesh.shape[i] for i in axes]))


def _outputs(program: Program, columns: ProofColumns) -> Iterable[int]:
    at = {rank: position for position, rank in enumerate(program.ranks)}
    for number, buffer in enumerate(program.buffers):
        if buffer.kind != "output":
            continue
        assert buffer.layout is not None
        op = next((p.op for p in buffer.layout.placements if isinstance(p, Partial)), "sum")
        for rank in buffer.layout.mesh.ranks:
            holders = partial_term_ranks(buffer.layout, rank)
            if holders[0] == rank:
                yield from (number, columns.reduction(op), len(holders), *(at[holder] for holder in holders))
