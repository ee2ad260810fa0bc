"""The proof on index labels in the C++ core, for programs of products, moves and sums of matrices.

The core says whether all is well. Where it is not, or where a program has what the core does not know (calls,
includes, batch dims, reductions other than sums), `ir.analysis.proof` decides and finds the words. An op that
ranks and turns share is described once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshweave import _core
from meshweave.base.errors import ProgramError
from meshweave.describe.layout import Partial
from meshweave.ir.analysis.dataflow import Dataflow, Event
from meshweave.ir.analysis.terms import TermTable, partial_term_ranks
from meshweave.ir.program import Buffer, Program
from meshweave.ir.program.meanings import Product, Same, Sum
from meshweave.ir.program.ops import (
    OP_TYPES,
    Accumulate,
    Add,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Call,
    Matmul,
    Op,
    Permute,
    Recv,
    Reduce,
    ReduceScatter,
    Send,
)
from meshweave.ir.program.views import Blocked, View

_KINDS = tuple(OP_TYPES)
_KNOWN = frozenset(_KINDS) - {"call"}


def labels_hold(flow: Dataflow, order: Sequence[Event]) -> bool:
    """Return whether the program surely computes what it declares; False where only the reference can tell."""
    program = flow.program
    if not _is_known(program):
        return False
    try:
        columns = _columns(flow, order)
    except (OverflowError, ProgramError, _UnknownError):
        return False
    return _core.labels_hold(columns)


class _UnknownError(Exception):
    """What the core does not know."""


def _is_known(program: Program) -> bool:
    ops = {type(op): op for op in program.ops()}
    if any(kind.kind not in _KNOWN for kind in ops) or Call in ops:
        return False
    return all(isinstance(meaning, (Product, Same, Sum)) for meaning in program.computes)


def _columns(flow: Dataflow, order: Sequence[Event]) -> dict[str, NDArray[np.int64]]:
    program = flow.program
    table = TermTable(program)
    tensors = {tensor.name: number for number, tensor in enumerate(program.tensors)}
    at = {rank: position for position, rank in enumerate(program.ranks)}
    buffers = {buffer.name: number for number, buffer in enumerate(program.buffers)}
    described = _Ops(program, buffers, at)
    columns: dict[str, Iterable[int]] = {
        "tensors": _tensors(program, table),
        "finished": _finished(table, tensors),
        "products": _products(table, tensors),
        "areas": _areas(program, at),
        "inputs": _inputs(program, table, tensors, at),
        "outputs": _outputs(program, table, tensors, at),
        "events": described.events(flow, order),
        "ops": described.rows,
    }
    return {name: np.fromiter(values, np.int64) for name, values in columns.items()}


# --- tensors ------------------------------------------------------------------------------------------------


def _tensors(program: Program, table: TermTable) -> Iterable[int]:
    for tensor in program.tensors:
        *outer, inner = tensor.shape or (1,)
        arrived = table.arrived.get(tensor.name)
        if arrived is not None and arrived.op != "sum":
            raise _UnknownError
        yield from (math.prod(outer), inner, arrived.count if arrived else 0)


def _finished(table: TermTable, tensors: dict[str, int]) -> Iterable[int]:
    for name in tensors:
        term = table.terms[table.finished(name)]
        assert term is not None
        yield len(term.parts)
        for basis, counts in term.parts:
            counted = np.frombuffer(counts, np.int32)
            yield from (tensors[basis], len(counted), int(counted[0]) if len(counted) else 0)


def _products(table: TermTable, tensors: dict[str, int]) -> Iterable[int]:
    for product in table.products.values():
        if table.shape_of(product).batch:
            raise _UnknownError
        yield from (tensors[product.out], tensors[product.a], tensors[product.b])
        yield from (int(product.transpose_a), int(product.transpose_b))


# --- memory -------------------------------------------------------------------------------------------------


def _areas(program: Program, at: dict[int, int]) -> Iterable[int]:
    yield from (len(at), len(program.buffers))
    for number, buffer in enumerate(program.buffers):
        for rank in program.mesh_of[buffer.mesh].ranks:
            shape = program.local_shape(buffer.name, rank)
            yield from (at[rank] * len(program.buffers) + number, buffer.slots, len(shape), *shape)


def _shard(program: Program, buffer: Buffer, rank: int) -> Iterable[int]:
    """Yield per dim the distance between neighbours, and the positions that a rank holds."""
    assert buffer.tensor is not None and buffer.layout is not None
    shape = program.tensor_of[buffer.tensor].shape
    indices = buffer.layout.indices(shape, rank)
    for dim, listed in enumerate(indices):
        yield math.prod(shape[dim + 1 :])
        yield from np.asarray(listed).tolist()


def _inputs(program: Program, table: TermTable, tensors: dict[str, int], at: dict[int, int]) -> Iterable[int]:
    for number, buffer in enumerate(program.buffers):
        if buffer.kind != "input":
            continue
        assert buffer.tensor is not None and buffer.layout is not None
        axes = [i for i, p in enumerate(buffer.layout.placements) if isinstance(p, Partial)]
        mesh = buffer.layout.mesh
        for rank in mesh.ranks:
            coords = mesh.coords(rank)
            place = (
                int(np.ravel_multi_index([coords[i] for i in axes], [mesh.shape[i] for i in axes]))
                if axes
                else -1
            )
            yield from (at[rank] * len(program.buffers) + number, tensors[buffer.tensor], place)
            yield from _shard(program, buffer, rank)


def _outputs(
    program: Program, table: TermTable, tensors: dict[str, int], at: dict[int, int]
) -> Iterable[int]:
    for number, buffer in enumerate(program.buffers):
        if buffer.kind != "output":
            continue
        assert buffer.tensor is not None and buffer.layout is not None
        if any(isinstance(p, Partial) and p.op != "sum" for p in buffer.layout.placements):
            raise _UnknownError
        for rank in buffer.layout.mesh.ranks:
            holders = partial_term_ranks(buffer.layout, rank)
            if holders[0] != rank:
                continue
            yield from (tensors[buffer.tensor], len(holders))
            yield from (at[holder] * len(program.buffers) + number for holder in holders)
            yield from _shard(program, buffer, rank)
            yield int(buffer.tensor in table.meanings)


# --- ops ----------------------------------------------------------------------------------------------------


class _Ops:
    """The ops of a program as numbers, each form once, and the events that they take part in."""

    def __init__(self, program: Program, buffers: dict[str, int], at: dict[int, int]) -> None:
        self.rows: list[int] = []
        self._program, self._buffers, self._at = program, buffers, at
        self._numbers: dict[int, int] = {}
        self._views: dict[View, tuple[int, ...]] = {}

    def events(self, flow: Dataflow, order: Sequence[Event]) -> list[int]:
        """Return, event after event, how many ops it has and each one's number and rank."""
        form, ops, at = self._program.resolved_ops.form, flow.matched.ops, self._at
        listed: list[int] = []
        for event in order:
            listed.append(len(event))
            for rank, index in event:
                op = ops[rank][index].op
                known = form(op)
                number = self._numbers.get(known)
                if number is None:
                    number = self._numbers[known] = len(self._numbers)
                    self._describe(op)
                listed += (number, at[rank])
        return listed

    def _describe(self, op: Op) -> None:
        update, transposed, first, second = False, (0, 0), 0, 0
        sizes: Any = ()
        views: tuple[View, ...] = ()
        release = getattr(op, "release", None)
        update = release is not None and release.update
        match op:
            case Matmul():
                views, transposed = (op.out, op.a, op.b), (int(op.transpose_a), int(op.transpose_b))
                update = update or bool(op.accumulate)
            case Send():
                views = (op.src,)
            case Recv():
                views, update = (op.out,), op.update
            case Add() | Accumulate():
                views, update = (op.out, op.src), True
            case AllGather():
                first = op.dim
            case ReduceScatter():
                first, sizes = op.dim, op.sizes or ()
            case AllToAll():
                first, second, sizes = op.split_dim, op.concat_dim, op.send_sizes or ()
            case Broadcast() | Reduce():
                first = int(op.root)  # type: ignore[arg-type]
            case Permute():
                first = int(op.shift)  # type: ignore[arg-type]
        if isinstance(op, (ReduceScatter, AllReduce, Reduce)) and op.op != "sum":
            raise _UnknownError
        if not views:
            views = tuple(getattr(op, name) for name in ("out", "src") if hasattr(op, name))
        self.rows += (_KINDS.index(op.kind), int(update), *transposed, first, second, len(sizes), *sizes)
        self.rows.append(len(views))
        for view in views:
            self.rows += self._view(view)

    def _view(self, view: View) -> tuple[int, ...]:
        known = self._views.get(view)
        if known is None:
            rank = -1 if view.rank is None else self._at[view.rank]  # type: ignore[index]
            numbers: list[Any] = [self._buffers[view.buffer], view.slot, rank, len(view.selectors)]
            for selector in view.selectors:
                blocks = (
                    (selector.first, selector.block, selector.stride)
                    if isinstance(selector, Blocked)
                    else (0, 0, 0)
                )
                numbers += (selector.start, selector.stop, *blocks)
            known = self._views[view] = tuple(numbers)
        return known
