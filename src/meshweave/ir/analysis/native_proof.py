"""The proof of a program in the C++ core: from the columns of its template, without binding ops in Python.

The core says whether all holds. Where it does not, or where a program has what the core does not know, the
reference in Python decides and finds the words, so that a doubt of the core costs time and never a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from meshweave._core import prove
from meshweave.base.errors import MeshweaveError
from meshweave.base.limits import PROOF_ELEMENTS, PROOF_WORK
from meshweave.describe.layout import Layout, Partial
from meshweave.ir.analysis.proof import most_summands, num_buffer_elements, trust_notes
from meshweave.ir.analysis.terms import TermTable, partial_term_ranks
from meshweave.ir.columns.proof import ProofColumns
from meshweave.ir.program import Buffer, Program
from meshweave.ir.program.meanings import Function, Same, Sum, TensorPart
from meshweave.ir.program.ops import Call

# --- labels -----------------------------------------------------------------------------------------------

# What a program declares to compute, as columns of integers: tensors, terms, meanings, and shards of buffers.
#
# The core runs the program on index labels with them (`csrc/labels.hpp`), as `ir.analysis.proof` does.


def label_columns(program: Program, columns: ProofColumns) -> dict[str, NDArray[np.int64]]:
    """Return {name: integers} of what a program declares to compute, by the names that `csrc/labels.hpp` reads.

    Args:
        columns: gives functions and reductions their numbers; new ones are added to it.

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


# --- native proof -----------------------------------------------------------------------------------------


class Verdict(IntEnum):
    """What the C++ core says of a program; each value has its meaning below it."""

    UNKNOWN = 0
    """It does not hold, or only the reference can say."""
    HOLDS = 1
    UNLABELLED = 2
    """It holds but for what is computed, which would take too much work to prove."""


class CoreProof:
    """The proof of a program whose declarations are checked.

    Args:
        labels: whether to prove what is computed as well.

    Attributes:
        holds: True if the core proves the program sound; False if it does not, or if the core cannot say.
        skipped: what was not proved, and why; of use only where `holds` is True.
    """

    def __init__(self, program: Program, labels: bool) -> None:
        self.holds = False
        self.skipped: tuple[str, ...] = ()
        try:
            count = num_buffer_elements(program)
            is_small = count <= PROOF_ELEMENTS.most
            data = proof_columns(program, labels and is_small)
            verdict = Verdict(prove(data))
        except (MeshweaveError, OverflowError, ValueError):
            return
        self.holds = verdict is not Verdict.UNKNOWN
        if not labels:
            self.skipped = ("index labels: not asked for",)
        elif not is_small:
            self.skipped = (f"index labels: the program {PROOF_ELEMENTS.refusal(count)}",)
        elif verdict is Verdict.UNLABELLED:
            self.skipped = (f"index labels: the program {PROOF_WORK.refusal()}",)
        else:
            self.skipped = trust_notes(program)


def proof_columns(program: Program, labels: bool) -> dict[str, NDArray[np.int64]]:
    """Return {name: integers} that describe a program to the C++ core, for its proof.

    Args:
        labels: whether to prove what is computed as well.

    Raises:
        MeshweaveError: the program has what the core does not know, or an op names what is not declared.
    """
    columns = ProofColumns(program)
    data = dict(columns.data)
    data["labels"] = np.array([int(labels)])
    data["most_work"] = np.array([PROOF_WORK.most])
    data["summands"] = np.array([most_summands(program) if labels else 0])
    if labels:
        data |= label_columns(program, columns)
    return data
