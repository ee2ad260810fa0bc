"""Runs a program with all ranks in one process, one event after another.

An `Algebra` defines the elements of buffers: numbers (the oracle of `execute`), or index labels (the proof in
`ir.analysis.proof`). Buffers are numpy arrays of the dtype that the algebra uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshweave.base.errors import ProgramError
from meshweave.ir.analysis.dataflow import Dataflow, Event
from meshweave.ir.analysis.matching import Node
from meshweave.ir.analysis.shapes import part_sizes
from meshweave.ir.program import Buffer
from meshweave.ir.program import ops as op_types
from meshweave.ir.program.views import Range, View, selector_indices

Array = NDArray[Any]

NO_ELEMENTS = (
    "an exchange moves copies whose places routing decides, so that it is timed and neither run nor proved; "
    "run a dispatch of `meshweave.algorithms.experts`"
)


class Algebra(Protocol):
    """Arithmetic on the elements of buffers.

    Any method may raise ProgramError; the interpreter adds op and rank.
    """

    def matmul(self, a: Array, b: Array) -> Array:
        """Return the product of (..., M, K) and (..., K, N), as `numpy.matmul` does."""

    def add(self, x: Array, y: Array) -> Array:
        """Return x + y, element by element."""

    def reduce(self, op: str, terms: Sequence[Array]) -> Array:
        """Return the reduction `op` ("sum", ...) of arrays of one shape, element by element."""

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Return the zeros of `shape` that a `Zero` op writes; `dtype` is the program's name of a dtype."""

    def read(self, block: Array) -> Array:
        """Return the elements of `block` as an op reads them. May raise ProgramError, as for unwritten ones."""

    def write(self, block: Array) -> Array:
        """Return the elements to store when an op writes `block`; an algebra may mark them with that op."""

    def call(self, op: op_types.Call, rank: int, ins: list[Array]) -> list[Array]:
        """Return the outputs of a call on the global rank `rank`, in the order of `op.outs`, from its inputs."""


def numpy_index(view: View) -> tuple[Any, ...]:
    """Return the numpy index of a resolved view: slices, or `np.ix_` arrays where it is blocked."""
    if all(isinstance(selector, Range) for selector in view.selectors):
        return tuple(slice(selector.start, selector.stop) for selector in view.selectors)
    return np.ix_(*(selector_indices(selector) for selector in view.selectors))


def product_operands(op: op_types.Matmul, a: Array, b: Array) -> tuple[Array, Array]:
    """Return the operands (..., M, K) and (..., K, N) of a product from the arrays in its views `a` and `b`.

    Where the product is summed over a batch, the batch is put before k, which then runs over both.
    """
    a = a.swapaxes(-1, -2) if op.transpose_a else a
    b = b.swapaxes(-1, -2) if op.transpose_b else b
    if a.ndim > 2 and b.ndim > 2 and len(op.out.selectors) == 2:
        summed = math.prod(b.shape[:-1])
        a = np.moveaxis(a, -2, 0).reshape(a.shape[-2], summed)
        b = b.reshape(summed, b.shape[-1])
    return a, b


class Interpreter:
    """The memory of all ranks, and the execution of each op on it.

    Args:
        algebra: the arithmetic on elements.
        flow: the dataflow of the program.
        fresh: returns a new array for a slot (copy of a buffer), from its local shape and its dtype's name.

    Attributes:
        memory: the array of each (global rank, buffer, slot), in its local shape.
        current: the op that is being executed, as (rank, index).
    """

    def __init__(
        self, flow: Dataflow, algebra: Algebra, fresh: Callable[[tuple[int, ...], str], Array]
    ) -> None:
        self.flow, self.algebra = flow, algebra
        program = flow.program
        self.memory: dict[tuple[int, str, int], Array] = {
            (rank, buffer.name, slot): fresh(program.local_shape(buffer.name, rank), buffer.dtype)
            for buffer in program.buffers
            for rank in program.mesh_of[buffer.mesh].ranks
            for slot in range(buffer.slots)
        }
        self.current: Node = (-1, -1)

    def fill_inputs(self, values: Callable[[Buffer, int], Array]) -> None:
        """Set every slot of every input buffer to `values(buffer, rank)`, an array of its local shape."""
        program = self.flow.program
        for buffer in program.buffers:
            if buffer.kind == "input":
                for rank in program.mesh_of[buffer.mesh].ranks:
                    for slot in range(buffer.slots):
                        self.memory[rank, buffer.name, slot][...] = values(buffer, rank)

    def run(self, order: Iterable[Event]) -> None:
        """Execute the events in the given order; `untimed_order` returns all events of a program in a legal one.

        Raises ProgramError from the algebra, with op and rank, and for an `Exchange`, which cannot be run.
        """
        for event in order:
            self._event(event)

    def read_view(self, node: Node, view: View) -> Array:
        """Return the elements of a view that the op `node` reads, as the algebra's `read` gives them.

        Raises ProgramError, naming op, rank and buffer, where the algebra refuses to.
        """
        self.current = node
        rank = node[0] if view.rank is None else view.rank
        assert isinstance(rank, int) and isinstance(view.slot, int)
        try:
            return self.algebra.read(self.memory[rank, view.buffer, view.slot][numpy_index(view)])
        except ProgramError as error:
            raise self._named(error, node, view) from None

    def write_view(self, node: Node, view: View, value: Array, *, update: bool = False) -> None:
        """Store `value` in a view that the op `node` writes, or with `update` add it to what is there.

        Raises ProgramError, naming op, rank and buffer, where the algebra refuses to.
        """
        self.current = node
        rank = node[0] if view.rank is None else view.rank
        assert isinstance(rank, int) and isinstance(view.slot, int)
        target = self.memory[rank, view.buffer, view.slot]
        index = numpy_index(view)
        try:
            if update:
                value = self.algebra.add(self.algebra.read(target[index]), value)
            target[index] = self.algebra.write(value)
        except ProgramError as error:
            raise self._named(error, node, view) from None

    def _named(self, error: ProgramError, node: Node, view: View) -> ProgramError:
        return ProgramError(
            error.message,
            op=error.op or self.flow.label(node),
            rank=node[0],
            buffer=error.buffer or view.buffer,
        )

    def _event(self, event: Event) -> None:
        node = self.current = event[0]
        op = self.flow.op(node)
        if isinstance(op, op_types.Send):
            recv = self.flow.op(event[1])
            assert isinstance(recv, op_types.Recv)
            self.write_view(event[1], recv.out, self.read_view(node, op.src).copy(), update=recv.update)
        elif len(event) > 1 or op.is_joint:
            self._collective(event, op)
        else:
            self._local(node, op)

    def _local(self, node: Node, op: op_types.Op) -> None:
        match op:
            case op_types.Matmul():
                a, b = self.read_view(node, op.a), self.read_view(node, op.b)
                try:
                    value = self.algebra.matmul(*product_operands(op, a, b))
                except ProgramError as error:
                    raise self._named(error, node, op.out) from None
                released = op.release is not None and op.release.update
                self.write_view(node, op.out, value, update=bool(op.accumulate) or released)
            case op_types.Copy() | op_types.Put():
                update = op.release is not None and op.release.update
                self.write_view(node, op.out, self.read_view(node, op.src).copy(), update=update)
            case op_types.Get():
                self.write_view(node, op.out, self.read_view(node, op.src).copy())
            case op_types.Add() | op_types.Accumulate():
                self.write_view(node, op.out, self.read_view(node, op.src), update=True)
            case op_types.Zero():
                self.write_view(node, op.out, self.algebra.zeros(op.out.shape, self._dtype(op.out)))
            case op_types.Call():
                ins = [self.read_view(node, view) for view in op.ins]
                for view, value in zip(op.outs, self.algebra.call(op, node[0], ins), strict=True):
                    self.write_view(node, view, value)
            case _:
                raise AssertionError(op)

    def _dtype(self, view: View) -> str:
        return self.flow.program.buffer_of[view.buffer].dtype

    def _collective(self, event: Event, first: op_types.Op) -> None:
        if isinstance(first, op_types.Fence):
            return
        if isinstance(first, op_types.Exchange):
            raise self._named(ProgramError(NO_ELEMENTS), event[0], first.outs[0])
        ops: list[Any] = [self.flow.op(node) for node in event]
        count = len(event)
        out: Mapping[int, Array]
        match first:
            case op_types.Broadcast():
                root = int(first.root)  # type: ignore[arg-type]
                value = self.read_view(event[root], ops[root].src).copy()
                out = dict.fromkeys(range(count), value)
            case op_types.Reduce():
                out = {int(first.root): self._reduce(first.op, event, ops)}  # type: ignore[arg-type]
            case op_types.AllReduce():
                out = dict.fromkeys(range(count), self._reduce(first.op, event, ops))
            case op_types.AllGather():
                parts = [self.read_view(node, op.src) for node, op in zip(event, ops, strict=True)]
                out = dict.fromkeys(range(count), np.concatenate(parts, axis=first.dim))
            case op_types.ReduceScatter():
                total = self._reduce(first.op, event, ops)
                sizes = part_sizes(first.sizes, total.shape[first.dim], count)
                out = dict(enumerate(np.split(total, np.cumsum(sizes)[:-1], axis=first.dim)))
            case op_types.Permute():
                values = [self.read_view(node, op.src).copy() for node, op in zip(event, ops, strict=True)]
                out = {i: values[(i - int(first.shift)) % count] for i in range(count)}  # type: ignore[arg-type]
            case op_types.AllToAll():
                out = self._all_to_all(event, ops)
            case _:
                raise AssertionError(first)
        for member, value in out.items():
            self.write_view(event[member], ops[member].out, value)

    def _reduce(self, how: str, event: Event, ops: Sequence[Any]) -> Array:
        terms = [self.read_view(node, op.src) for node, op in zip(event, ops, strict=True)]
        try:
            return self.algebra.reduce(how, terms)
        except ProgramError as error:
            raise self._named(error, event[0], ops[0].src) from None

    def _all_to_all(self, event: Event, ops: Sequence[Any]) -> dict[int, Array]:
        count = len(event)
        pieces = []
        for node, op in zip(event, ops, strict=True):
            block = self.read_view(node, op.src)
            sizes = part_sizes(op.send_sizes, block.shape[op.split_dim], count)
            pieces.append(np.split(block, np.cumsum(sizes)[:-1], axis=op.split_dim))
        return {
            i: np.concatenate([pieces[j][i] for j in range(count)], axis=ops[i].concat_dim)
            for i in range(count)
        }
