"""How the tensors of a block are moved from layout to layout: the base of what writes programs and skeletons.

Ops are added one after another. Those of one chunk form the body of a loop over chunks, which ends after each
communication (`cut`): in the compute lane the products of all chunks then follow each other, and the communication
of a chunk runs beside the products of the next, and beside whatever the compute lane has after the loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from meshweave.algorithms.block.problem import BlockConfig, BlockProblem
from meshweave.algorithms.block.roles import AxisDims, Dim, Side, Sides
from meshweave.algorithms.block.sides import largest_extent, within
from meshweave.algorithms.matmul2d import Matmul2dProblem
from meshweave.algorithms.matmul2d.common.problem import Dataflow
from meshweave.base.errors import LayoutError
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program.expressions import Index
from meshweave.ir.work import Work

COMPUTE = "compute"
"""The lane of everything that is no communication."""
NEXT_SITE = "next_site"
"""The name of a call that does nothing but wait for what it reads."""

Kind = Literal["input", "output", "temp"]
Part = Literal["", "input_grad", "weight_grad"]


@dataclass(frozen=True)
class SequenceWindow:
    """The positions of a sequence that belong to the rank `turn` places further along a mesh axis, cyclically.

    Attributes:
        dims: layout of the sequence on the mesh.
        axis: index of the mesh axis.
        turn: how many places further the rank is; 0 is this rank.
        is_whole: whether the buffer holds all positions; else only those of the window.
    """

    dims: AxisDims
    axis: int
    turn: Index = 0
    is_whole: bool = False


@dataclass(frozen=True)
class Stored:
    """A tensor, or partial sums of it, in a buffer on every rank: its sides (dims), and its layout on the mesh.

    `slot` is the number of a scratch buffer's copy. With a `window` it is the part for the positions of one rank.
    """

    buffer: str
    tensor: str
    sides: Sides
    dims: AxisDims
    dtype: str
    slot: Index = 0
    window: SequenceWindow | None = None

    @property
    def has_tokens(self) -> bool:
        """Return whether the tensor's first dim is the batch, which is cut into chunks."""
        return self.sides[0].dim == "batch"


Tensors = tuple[Stored, ...]
"""What an op reads, or writes."""


WeightTensors = tuple[Tensors, Tensors]
"""Parameters, and gradients of parameters."""


class TimedWork(Protocol):
    """Says what an op costs a rank, from the tokens that the rank has."""

    def __call__(self, tokens: int, *, load: float | None = None) -> Work:
        """Return the work of a rank with `tokens` tokens, counted before they are sent to experts.

        `load` is the copies of tokens at its experts over the mean of all ranks; None for `problem.experts.load`.
        """


class BlockWriter(ABC):
    """Writes the ops of a block on `mesh`, as a loop over chunks of a rank's batch where ops have tokens.

    Attributes:
        batch_dims: the layout of the batch on the mesh.
        chunk: the most sequences of a chunk on any rank; `num_chunks` is how many chunks there are.
        is_by_sites: whether ops of one site wait for the site before: a site is a product with its communication,
            a sum of statistics, or attention.
    """

    def __init__(self, problem: BlockProblem, config: BlockConfig, mesh: Mesh, batch_dims: AxisDims) -> None:
        self.problem, self.config, self.mesh, self.batch_dims = problem, config, mesh, batch_dims
        self.largest_batch = largest_extent(mesh, Side("batch", problem.batch), batch_dims)
        self.chunk = -(-self.largest_batch // config.chunks)
        self.num_chunks = -(-self.largest_batch // self.chunk)
        self.is_by_sites = config.overlap == "sites"
        self._names: set[str] = set()
        self._multiplied: set[tuple[str, Index]] = set()
        self._body: list[Any] = []
        """What is written of the loop over chunks."""

    # --- memory -------------------------------------------------------------------------------------------------

    def new(
        self, name: str, tensor: str, sides: Sides, dims: AxisDims, dtype: str, kind: Kind = "temp"
    ) -> Stored:
        """Declare a buffer `name`, which must be new, for `tensor` in layout `dims`, and return it."""
        assert name not in self._names, name
        self._names.add(name)
        stored = Stored(name, tensor, sides, dims, dtype)
        self._declare(stored, kind)
        return stored

    def scratch(self, stored: Stored, slots: int = 1) -> Stored:
        """Declare a scratch buffer with `slots` copies for `stored`, unless the buffer exists; return `stored`."""
        if stored.buffer not in self._names:
            self._names.add(stored.buffer)
            self._declare_slots(stored, slots)
        return stored

    def partial_buffer(self, out: Stored, dims: AxisDims) -> Stored:
        """Return a new buffer for partial sums of the tensor of `out`, in layout `dims`."""
        return self._like(out, dims, "part")

    def _like(self, stored: Stored, dims: AxisDims, suffix: str) -> Stored:
        """Return a new buffer for the same tensor in another layout."""
        base = name = f"{stored.tensor.lower()}_{suffix}"
        number = 2
        while name in self._names:
            name, number = f"{base}{number}", number + 1
        return self.new(name, stored.tensor, stored.sides, dims, stored.dtype)

    @abstractmethod
    def _declare(self, stored: Stored, kind: Kind) -> None: ...

    @abstractmethod
    def _declare_slots(self, stored: Stored, slots: int) -> None: ...

    @abstractmethod
    def extent(self, side: Side, dims: AxisDims) -> Index:
        """Return how many elements of a side a rank has in layout `dims`; of the batch, the current chunk's."""

    def extent_of(self, stored: Stored, number: int) -> Index:
        """Return a rank's elements along dim `number`; of the batch the current chunk's, of a window its own."""
        side, window = stored.sides[number], stored.window
        if window is not None and side.dim == "sequence":
            return self._extent_in(side, window)
        return self.extent(side, stored.dims)

    @abstractmethod
    def _extent_in(self, side: Side, window: SequenceWindow) -> Index: ...

    def elements(self, stored: Stored) -> Index:
        """Return the number of elements of the current chunk in a rank's buffer; of all if it has no tokens."""
        total: Index = 1
        for number in range(len(stored.sides)):
            total = total * self.extent_of(stored, number)
        return total

    # --- compute ------------------------------------------------------------------------------------------------

    @property
    def is_between_loops(self) -> bool:
        """Return whether no loop over chunks is open."""
        return not self._body

    def cut(self) -> None:
        """End the loop over chunks that is open; ops written later form a new loop."""
        self._multiplied.clear()
        self._end_loop()

    @abstractmethod
    def _end_loop(self) -> None: ...

    @abstractmethod
    def end_site(self) -> None:
        """Let all later ops wait for all ops written so far; to be called only if `is_by_sites`."""

    @abstractmethod
    def call(
        self, fn: str, outs: Tensors, ins: Tensors, work: str, shape: tuple[Index, ...], part: Part = ""
    ) -> None:
        """Write a call of function `fn` on `ins` for the current chunk, priced as `work` with sizes `shape`.

        `work` is a key of `CALL_DIMS`, which names the sizes. `part` is "" or, if the price depends on it, the
        gradient that the call computes: "input_grad" or "weight_grad".
        """

    @abstractmethod
    def timed(
        self, lane: str, work_of: TimedWork, outs: Tensors, ins: Tensors, beside: WeightTensors
    ) -> None:
        """Write an op that computes no values and costs `work_of(tokens)`, with a rank's tokens of `ins[0]`.

        `lane` is the op's lane; for exchanges of experts, the name of their mesh. `beside` is (parameters that it
        also reads, gradients of parameters that it also writes).
        """

    def matmul(
        self,
        out: Stored,
        a: Stored,
        b: Stored,
        *,
        transpose_a: bool = False,
        transpose_b: bool = False,
        sums_chunks: bool = False,
    ) -> None:
        """Write out = a b for the current chunk; with `sums_chunks`, `out` gets the sum over all chunks."""
        self._multiplied.add((b.buffer, b.slot))
        self._matmul(out, a, b, (transpose_a, transpose_b), sums_chunks)

    @abstractmethod
    def _matmul(
        self, out: Stored, a: Stored, b: Stored, transposed: tuple[bool, bool], sums_chunks: bool
    ) -> None: ...

    def product_2d(self, name: str, dataflow: Dataflow, out: Stored, a: Stored, b: Stored) -> None:
        """Write out = a b ("os"), a b^T ("ls") or a^T b ("rs") by the algorithm `name` of `matmul2d`.

        It communicates along the last two mesh axes; each coordinate along other axes has a product of its own.
        The batch must be in one chunk, and other axes must divide the dims evenly.
        """
        assert self.num_chunks == 1
        sizes = [[within(side, self.mesh, x.dims, 2) for side in x.sides] for x in (a, b)]
        (rows, columns), (b_rows, b_columns) = ([size or 0 for size in of_operand] for of_operand in sizes)
        m, k = (columns, rows) if dataflow == "rs" else (rows, columns)
        n = b_rows if dataflow == "ls" else b_columns
        problem = Matmul2dProblem(m, n, k, self.mesh.shape[-2:], dataflow, out.dtype)
        self._include(name, problem, out, a, b)
        self.cut()

    @abstractmethod
    def _include(self, name: str, problem: Matmul2dProblem, out: Stored, a: Stored, b: Stored) -> None: ...

    @abstractmethod
    def add(self, out: Stored, term: Stored) -> None:
        """Write the op out += term for the current chunk."""

    @abstractmethod
    def zero(self, out: Stored) -> None:
        """Write an op that zeroes a buffer: for the current chunk; once before the loop if it has no tokens."""

    @abstractmethod
    def copy(self, out: Stored, src: Stored) -> None:
        """Write the op out = src for the current chunk."""

    @abstractmethod
    def turns(self, count: int) -> Iterator[Index]:
        """Write a loop of `count` turns (steps of ring attention); yield each turn, or one variable for all."""

    @abstractmethod
    def pass_on(self, out: Stored, src: Stored, axis: int, lane: str = "", *, when: Index = 1) -> None:
        """Write a shift round a mesh axis: `src` goes to the rank before, and `out` comes from the rank after.

        `axis` is the axis's index; `lane` ends the name of the lane, which begins with the axis. `when` is a
        condition on the turn of a loop of `turns`: in turns in which it is 0 nothing is sent.
        """

    # --- moving -------------------------------------------------------------------------------------------------

    def move(
        self,
        src: Stored,
        dims: AxisDims,
        suffix: str,
        lane: str = "",
        into: Stored | None = None,
        op: str = "sum",
    ) -> Stored:
        """Write the communication that brings a tensor into layout `dims`, axis by axis; return the result.

        All-gathers come first, from the last mesh axis to the first, then all-reduces, then the rest. All-reduces
        are in place: if there is nothing else to do, the result is in the buffer of `src`.

        Args:
            suffix: what the names of new buffers end in.
            lane: what the names of lanes end in, after the mesh axis; "" for the axis alone.
            into: the buffer of the result, None for a new one; unused if all-reduces are enough.
            op: the reduction of partial values, such as "sum".
        """
        axes = _order(src.dims, dims)
        left = sum(src.dims[axis] != "partial" or bool(dims[axis]) for axis in axes)
        for axis in axes:
            after = (*src.dims[:axis], dims[axis], *src.dims[axis + 1 :])
            if src.dims[axis] == "partial" and not dims[axis]:
                self._all_reduce(src, axis, self._lane(axis, lane), op)
                src = replace(src, dims=after)
                continue
            left -= 1
            out = (
                replace(into, dims=after) if into is not None and not left else self._like(src, after, suffix)
            )
            self._step(out, src, axis, lane, op)
            src = out
        if axes:
            self.cut()
        return src

    def move_once(self, src: Stored, dims: AxisDims, lane: str, into: Stored | None = None) -> Stored:
        """Write `move` for a tensor without tokens, outside a loop over chunks; return it in layout `dims`.

        No loop may be open. `lane` and `into` are those of `move`.
        """
        assert self.is_between_loops and not src.has_tokens
        chunks, self.num_chunks = self.num_chunks, 1
        out = self.move(src, dims, "whole", lane, into)
        self.num_chunks = chunks
        return out

    def gather_once(self, kept: Stored, into: Stored | None, dims: AxisDims, lane: str) -> Stored:
        """Write an all-gather of the weight `kept` before the open loop over chunks; return it in layout `dims`.

        If that loop already multiplies by the contents of `into`, it is ended first. `lane` and `into` are those
        of `move`.
        """
        if into is not None and (into.buffer, into.slot) in self._multiplied:
            self.cut()
        with self._before_loop():
            return self.move_once(kept, dims, lane, into)

    @contextmanager
    def _before_loop(self) -> Iterator[None]:
        """Write, while it is entered, before the loop that is being written."""
        body, self._body = self._body, []
        multiplied, self._multiplied = self._multiplied, set()
        yield
        self._body, self._multiplied = body, multiplied

    def _step(self, out: Stored, src: Stored, axis: int, lane: str, op: str) -> None:
        """Move a tensor along one axis."""
        before, after = src.dims[axis], out.dims[axis]
        name = self._lane(axis, lane)
        if (
            before == "partial"
            and after == "inner"
            and src.has_tokens
            and self.config.scatter == "all_reduce"
        ):
            self._all_reduce(src, axis, name, op)
            before = ""
        if before == "partial":
            self._reduce_scatter(out, src, axis, _place(src.sides, after), name, op)
        elif not before:
            self._take(out, src, axis, _place(src.sides, after))
        elif not after:
            self._all_gather(out, src, axis, _place(src.sides, before), name)
        else:
            self._all_to_all(out, src, axis, (_place(src.sides, after), _place(src.sides, before)), name)

    def _over(self, axis: int) -> str:
        return f"{self.mesh.name}.{self.mesh.axes[axis]}"

    def _lane(self, axis: int, lane: str) -> str:
        return f"{self.mesh.axes[axis]}_{lane}" if lane else self.mesh.axes[axis]

    @abstractmethod
    def _all_reduce(self, stored: Stored, axis: int, lane: str, op: str = "sum") -> None: ...

    @abstractmethod
    def _reduce_scatter(
        self, out: Stored, src: Stored, axis: int, dim: int, lane: str, op: str = "sum"
    ) -> None: ...

    @abstractmethod
    def _all_gather(self, out: Stored, src: Stored, axis: int, dim: int, lane: str) -> None: ...

    @abstractmethod
    def _all_to_all(self, out: Stored, src: Stored, axis: int, dims: tuple[int, int], lane: str) -> None:
        """Send parts along the first of two dims, and join what arrives along the second."""

    @abstractmethod
    def _take(self, out: Stored, src: Stored, axis: int, dim: int) -> None:
        """Copy this rank's part of what all ranks along an axis have."""


def _order(before: AxisDims, after: AxisDims) -> list[int]:
    """Return the axes along which something moves: gathers from the last, then sums, then what remains."""
    changed = [axis for axis, dim in enumerate(before) if dim != after[axis]]
    gathers = [axis for axis in changed if before[axis] != "partial" and not after[axis]]
    sums = [axis for axis in changed if before[axis] == "partial" and not after[axis]]
    return [*reversed(gathers), *sums, *(axis for axis in changed if axis not in (*gathers, *sums))]


def _place(sides: Sides, dim: Dim) -> int:
    for number, side in enumerate(sides):
        if side.dim == dim:
            return number
    raise LayoutError(f"a tensor of {', '.join(side.dim for side in sides)} has no dim '{dim}'")
