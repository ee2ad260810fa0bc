"""Writes the ops of a block: buffers with layouts, loops over chunks, and what moves a tensor to another layout.

Ops are added one after another. Those of one chunk form the body of a loop over chunks, which ends after each
communication (`cut`): in the compute lane the products of all chunks then follow each other, and the communication
of a chunk runs beside the products of the next, and beside whatever the compute lane has after the loop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from meshweave.algorithms.block.problem import BlockConfig, BlockProblem
from meshweave.algorithms.block.roles import Dim, Dims, Side, Sides
from meshweave.algorithms.block.sides import extent, largest_extent, layout_of
from meshweave.base.errors import LayoutError
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program import (
    FULL,
    Add,
    AllGather,
    AllReduce,
    AllToAll,
    Buffer,
    Call,
    Copy,
    Lane,
    Matmul,
    Op,
    Range,
    ReduceScatter,
    Repeat,
    Statement,
    Var,
    View,
    Zero,
)
from meshweave.ir.program.expressions import Index, minimum

CHUNK = Var("k")
"""The number of the chunk, in loops over chunks."""
COMPUTE = "compute"


@dataclass(frozen=True)
class Stored:
    """A tensor, or terms of it, in a buffer on every rank: its sides, and how they lie on the mesh."""

    buffer: str
    tensor: str
    sides: Sides
    dims: Dims
    dtype: str
    slot: int = 0

    @property
    def has_tokens(self) -> bool:
        """Return whether its first dim is the batch, which is cut into chunks."""
        return self.sides[0].dim == "batch"


class BlockWriter:
    """The statements, buffers and lanes of a program on `mesh`, as they are written."""

    def __init__(self, problem: BlockProblem, config: BlockConfig, mesh: Mesh, batch_dims: Dims) -> None:
        self.problem, self.config, self.mesh = problem, config, mesh
        self.buffers: dict[str, Buffer] = {}
        self.statements: list[Statement] = []
        self._body: list[Statement] = []
        self._lanes: dict[str, None] = {COMPUTE: None}
        side = Side("batch", problem.batch)
        self._batch = extent(mesh, side, batch_dims)
        largest = largest_extent(mesh, side, batch_dims)
        self._chunk = -(-largest // config.chunks)
        self.num_chunks = -(-largest // self._chunk)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Return the lanes that ops use, compute first."""
        return tuple(Lane(name) for name in self._lanes)

    # --- memory -------------------------------------------------------------------------------------------------

    def new(
        self,
        name: str,
        tensor: str,
        sides: Sides,
        dims: Dims,
        dtype: str,
        kind: Literal["input", "output", "temp"] = "temp",
    ) -> Stored:
        """Declare a buffer for a tensor that lies on the mesh as `dims` says, and return it."""
        assert name not in self.buffers, name
        layout = layout_of(self.mesh, sides, dims)
        self.buffers[name] = Buffer(name, kind, self.mesh.name, dtype, tensor, layout)
        return Stored(name, tensor, sides, dims, dtype)

    def _like(self, stored: Stored, dims: Dims, suffix: str) -> Stored:
        """Return a new buffer for the same tensor that lies in another way."""
        name = f"{stored.tensor.lower()}_{suffix}"
        number = 2
        while name in self.buffers:
            name, number = f"{stored.tensor.lower()}_{suffix}{number}", number + 1
        return self.new(name, stored.tensor, stored.sides, dims, stored.dtype)

    def two_slots(self, name: str, stored: Stored, dims: Dims, slot: int) -> Stored:
        """Return slot number `slot` of a scratch buffer of two, which layers use by turns."""
        if name not in self.buffers:
            shape = tuple(extent(self.mesh, side, dims) for side in stored.sides)
            self.buffers[name] = Buffer(
                name, "scratch", self.mesh.name, stored.dtype, shape=shape, slots=min(2, self.problem.layers)
            )
        return Stored(name, stored.tensor, stored.sides, dims, stored.dtype, slot)

    # --- chunks -------------------------------------------------------------------------------------------------

    def _chunk_range(self) -> Range:
        """Return the sequences of chunk number `CHUNK` of those that a rank has."""
        if self.num_chunks == 1:
            return FULL
        start: Index = self._chunk * CHUNK
        stop: Index = start + self._chunk
        if not isinstance(self._batch, int):
            return Range(minimum(self._batch, start), minimum(self._batch, stop))
        if self._batch % self._chunk:
            stop = minimum(self._batch, stop)
        return Range(start, stop)

    def view(self, stored: Stored) -> View:
        """Return the part of a buffer that belongs to the chunk, or all of it where there are no tokens."""
        selectors = (self._chunk_range() if side.dim == "batch" else FULL for side in stored.sides)
        return View(stored.buffer, tuple(selectors), stored.slot)

    def extent(self, side: Side, dims: Dims) -> Index:
        """Return the elements of a side that a rank has, of the batch those of the chunk."""
        chunk = self._chunk_range()
        if side.dim != "batch" or chunk == FULL:
            return extent(self.mesh, side, dims)
        assert chunk.stop is not None
        return chunk.stop - chunk.start

    def do(self, op: Op) -> None:
        """Add an op of the chunk."""
        self._body.append(op)
        self._lanes[op.lane] = None

    def cut(self) -> None:
        """End the loop over chunks."""
        if not self._body:
            return
        if self.num_chunks > 1:
            self.statements.append(Repeat(str(CHUNK), self.num_chunks, tuple(self._body)))
        else:
            self.statements.extend(self._body)
        self._body = []

    @property
    def is_between_loops(self) -> bool:
        """Return whether no loop is being written."""
        return not self._body

    def once(self, op: Op) -> None:
        """Add an op before the loop that is being written."""
        self.statements.append(op)
        self._lanes[op.lane] = None

    # --- compute ------------------------------------------------------------------------------------------------

    def call(
        self,
        fn: str,
        outs: tuple[Stored, ...],
        ins: tuple[Stored, ...],
        work: str,
        shape: tuple[Index, ...],
        part: Literal["", "input_grad", "weight_grad"] = "",
    ) -> None:
        """Add a call of a function on the chunk."""
        views = tuple(map(self.view, outs)), tuple(map(self.view, ins))
        self.do(Call(fn=fn, outs=views[0], ins=views[1], work=work, shape=shape, part=part, lane=COMPUTE))

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
        """Add a product on the chunk; with `sums_chunks` one that is summed over chunks."""
        accumulate: Index = CHUNK > 0 if sums_chunks and self.num_chunks > 1 else 0
        views = self.view(out), self.view(a), self.view(b)
        self.do(
            Matmul(
                out=views[0],
                a=views[1],
                b=views[2],
                transpose_a=transpose_a,
                transpose_b=transpose_b,
                accumulate=accumulate,
                lane=COMPUTE,
            )
        )

    def add(self, out: Stored, term: Stored) -> None:
        """Add out += term on the chunk."""
        self.do(Add(out=self.view(out), src=self.view(term), lane=COMPUTE))

    def zero(self, out: Stored) -> None:
        """Set a buffer without tokens to zero, once."""
        self.once(Zero(out=self.view(out), lane=COMPUTE))

    # --- moving -------------------------------------------------------------------------------------------------

    def move(
        self, src: Stored, dims: Dims, suffix: str, lane: str = "", into: Stored | None = None
    ) -> Stored:
        """Move a tensor to where `dims` says, along one axis after another, and return where it is then.

        Gathers come first, from the last axis that shares a dim to the first, then sums, then cuts. An all-reduce
        is made in place. Without `into` the result is in `src` or a new buffer.

        Args:
            suffix: the end of names of new buffers.
            lane: what the names of lanes have after that of the axis.
        """
        axes = self._order(src.dims, dims)
        in_place = [axis for axis in axes if dims[axis] == "" and src.dims[axis] == "partial"]
        left = len(axes) - len(in_place)
        for axis in axes:
            after = (*src.dims[:axis], dims[axis], *src.dims[axis + 1 :])
            if axis in in_place:
                self._all_reduce(src, axis, lane)
                src = replace(src, dims=after)
                continue
            left -= 1
            if into is not None and not left:
                out = replace(into, dims=after)
            else:
                out = self._like(src, after, suffix)
            self._step(out, src, axis, lane)
            src = out
        if axes:
            self.cut()
        return src

    def move_once(self, src: Stored, dims: Dims, lane: str, into: Stored | None = None) -> Stored:
        """Move a tensor without tokens, between loops, and return where it is then."""
        assert self.is_between_loops
        chunks, self.num_chunks = self.num_chunks, 1
        out = self.move(src, dims, "whole", lane, into)
        self.num_chunks = chunks
        return out

    def gather_once(self, kept: Stored, into: Stored | None, dims: Dims, lane: str) -> Stored:
        """Gather a weight before the loop that is being written, and return where it is then."""
        body, self._body = self._body, []
        out = self.move_once(kept, dims, lane, into)
        self._body = body
        return out

    def part_of(self, out: Stored, dims: Dims) -> Stored:
        """Return a new buffer for terms of what `out` is to hold."""
        return self._like(out, dims, "part")

    def _order(self, before: Dims, after: Dims) -> list[int]:
        """Return the axes along which something moves: gathers from the last, then sums, then what remains."""
        changed = [axis for axis, dim in enumerate(before) if dim != after[axis]]
        gathers = [axis for axis in changed if before[axis] != "partial" and not after[axis]]
        sums = [axis for axis in changed if before[axis] == "partial" and not after[axis]]
        return [*reversed(gathers), *sums, *(axis for axis in changed if axis not in (*gathers, *sums))]

    def _step(self, out: Stored, src: Stored, axis: int, lane: str) -> None:
        """Move a tensor along one axis."""
        before, after = src.dims[axis], out.dims[axis]
        if before == "partial" and self.config.scatter == "all_reduce" and after == "inner":
            self._all_reduce(src, axis, lane)
            before = ""
        if before == "partial":
            self._reduce_scatter(out, src, axis, after, lane)
        elif not before:
            self._take(out, src, axis, after)
        elif not after:
            self._all_gather(out, src, axis, before, lane)
        else:
            self._all_to_all(out, src, axis, lane)

    def _over(self, axis: int) -> str:
        return f"{self.mesh.name}.{self.mesh.axes[axis]}"

    def _lane(self, axis: int, lane: str) -> str:
        return f"{self.mesh.axes[axis]}_{lane}" if lane else self.mesh.axes[axis]

    def _sizes(self, sides: Sides, number: int, dims: Dims, axis: int) -> Index | None:
        """Return what member `peer` has along a dim; None where all have the same."""
        own = extent(self.mesh, sides[number], dims)
        peers = extent(self.mesh, sides[number], dims, axis)
        return None if own == peers else peers

    @staticmethod
    def _place(sides: Sides, dim: Dim) -> int:
        for number, side in enumerate(sides):
            if side.dim == dim:
                return number
        raise LayoutError(f"a tensor with dims {[side.dim for side in sides]} has no dim '{dim}'")

    def _all_reduce(self, stored: Stored, axis: int, lane: str) -> None:
        both = self.view(stored)
        self.do(AllReduce(out=both, src=both, over=self._over(axis), lane=self._lane(axis, lane)))

    def _reduce_scatter(self, out: Stored, src: Stored, axis: int, dim: Dim, lane: str) -> None:
        at = self._place(src.sides, dim)
        sizes = self._sizes(src.sides, at, out.dims, axis)
        over, name = self._over(axis), self._lane(axis, lane)
        self.do(
            ReduceScatter(out=self.view(out), src=self.view(src), dim=at, sizes=sizes, over=over, lane=name)
        )

    def _all_gather(self, out: Stored, src: Stored, axis: int, dim: Dim, lane: str) -> None:
        at = self._place(src.sides, dim)
        sizes = self._sizes(src.sides, at, src.dims, axis)
        over, name = self._over(axis), self._lane(axis, lane)
        self.do(AllGather(out=self.view(out), src=self.view(src), dim=at, sizes=sizes, over=over, lane=name))

    def _all_to_all(self, out: Stored, src: Stored, axis: int, lane: str) -> None:
        split, joined = (self._place(src.sides, dims[axis]) for dims in (out.dims, src.dims))
        self.do(
            AllToAll(
                out=self.view(out),
                src=self.view(src),
                split_dim=split,
                concat_dim=joined,
                send_sizes=self._sizes(src.sides, split, out.dims, axis),
                recv_sizes=self._sizes(src.sides, joined, src.dims, axis),
                over=self._over(axis),
                lane=self._lane(axis, lane),
            )
        )

    def _take(self, out: Stored, src: Stored, axis: int, dim: Dim) -> None:
        """Copy this rank's part of what all ranks along an axis have."""
        at = self._place(src.sides, dim)
        side = src.sides[at]
        run = largest_extent(self.mesh, side, out.dims)
        start = minimum(run * Var(self._over(axis)), extent(self.mesh, side, src.dims))
        whole = self.view(src)
        part = Range(start, start + extent(self.mesh, side, out.dims))
        selectors = (*whole.selectors[:at], part, *whole.selectors[at + 1 :])
        self.do(Copy(out=self.view(out), src=replace(whole, selectors=selectors), lane=COMPUTE))


def elements(writer: BlockWriter, stored: Stored) -> Index:
    """Return the elements of a chunk of a buffer."""
    total: Index = 1
    for side in stored.sides:
        total = total * writer.extent(side, stored.dims)
    return total
