"""Writes a block as a program: a template in mesh coordinates and the number of the chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from meshweave.algorithms.block.problem import BlockConfig, BlockProblem
from meshweave.algorithms.block.products import product_program
from meshweave.algorithms.block.roles import AxisDims, Side, Sides
from meshweave.algorithms.block.sides import extent, largest_extent, layout_of
from meshweave.algorithms.block.timed_ops import TIMED_LANES, timed_op
from meshweave.algorithms.block.writer import (
    COMPUTE,
    NEXT_SITE,
    BlockWriter,
    Kind,
    Part,
    SequenceWindow,
    Stored,
    Tensors,
    TimedWork,
    WeightTensors,
)
from meshweave.algorithms.matmul2d import Matmul2dProblem
from meshweave.base.errors import UnsupportedError
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir import program as ir
from meshweave.ir.program.expressions import Index, minimum

CHUNK = ir.Var("k")
"""The number of the chunk, in loops over chunks."""
TURN = ir.Var("t")
"""The number of the turn, in loops of a ring."""
ARRIVES = ""
"""In place of a lane: what the first ops of a program wait for."""


class ProgramWriter(BlockWriter):
    """Writes a block as the statements, buffers and lanes of a program for all ranks.

    Sizes and positions are expressions in a rank's mesh coordinates and the number of the chunk.

    Attributes:
        buffers: every buffer by name.
        statements: all statements before the loop over chunks that is being written.
    """

    def __init__(self, problem: BlockProblem, config: BlockConfig, mesh: Mesh, batch_dims: AxisDims) -> None:
        super().__init__(problem, config, mesh, batch_dims)
        self.buffers: dict[str, ir.Buffer] = {}
        self.statements: list[ir.Statement] = []
        self._lanes: dict[str, None] = {COMPUTE: None}
        self._batch = extent(mesh, Side("batch", problem.batch), batch_dims)
        self._awaited: dict[str, tuple[ir.View, ...]] = {}
        self._written: dict[str, tuple[ir.View, ...]] = {}
        self._begun: set[str] = set()
        self._fresh: set[str] = set()

    @property
    def lanes(self) -> tuple[ir.Lane, ...]:
        """Return the lanes that ops written so far use, "compute" first."""
        return tuple(map(ir.Lane, self._lanes))

    def _declare(self, stored: Stored, kind: Kind) -> None:
        layout = layout_of(self.mesh, stored.sides, stored.dims)
        self.buffers[stored.buffer] = ir.Buffer(
            stored.buffer, kind, self.mesh.name, stored.dtype, stored.tensor, layout
        )

    def _declare_slots(self, stored: Stored, slots: int) -> None:
        is_largest = stored.window is not None  # it holds what any rank has
        shape = tuple(
            largest_extent(self.mesh, side, stored.dims)
            if is_largest
            else extent(self.mesh, side, stored.dims)
            for side in stored.sides
        )
        self.buffers[stored.buffer] = ir.Buffer(
            stored.buffer, "scratch", self.mesh.name, stored.dtype, shape=shape, slots=slots
        )

    # --- chunks -------------------------------------------------------------------------------------------------

    def _chunk_range(self, unit: int) -> ir.Range:
        """Return the part of a batch dim that is chunk number `CHUNK` of what a rank has; `unit` is a sequence."""
        if self.num_chunks == 1:
            return ir.FULL
        start: Index = self.chunk * CHUNK
        stop: Index = start + self.chunk
        if not isinstance(self._batch, int):
            start = minimum(self._batch, start)
        if not isinstance(self._batch, int) or self._batch % self.chunk:
            stop = minimum(self._batch, stop)
        return ir.Range(start * unit, stop * unit)

    def _view(self, stored: Stored) -> ir.View:
        """Return the part of a buffer that belongs to the chunk, or all of it where there are no tokens."""
        return ir.View(
            stored.buffer, tuple(self._selector(side, stored.window) for side in stored.sides), stored.slot
        )

    def _selector(self, side: Side, window: SequenceWindow | None) -> ir.Range:
        if side.dim == "batch":
            return self._chunk_range(side.unit)
        if side.dim != "sequence" or window is None:
            return ir.FULL
        first: Index = 0
        if window.is_whole:
            run = largest_extent(self.mesh, side, window.dims)
            first = minimum(run * self._turned(window), side.size)
        return ir.Range(first, first + self._extent_in(side, window))

    def _turned(self, window: SequenceWindow) -> Index:
        """Return the coordinate of the rank that a window belongs to."""
        return (ir.Var(self._over(window.axis)) + window.turn) % self.mesh.shape[window.axis]

    def _extent_in(self, side: Side, window: SequenceWindow) -> Index:
        return extent(self.mesh, side, window.dims, window.axis, self._turned(window))

    def extent(self, side: Side, dims: AxisDims) -> Index:
        """Return how many elements of a side a rank has in layout `dims`; of the batch, the current chunk's."""
        chunk = self._chunk_range(side.unit)
        if side.dim != "batch" or chunk.stop is None:
            return extent(self.mesh, side, dims)
        return chunk.stop - chunk.start

    def _do(self, op: ir.Op) -> None:
        self._wait(op.lane, op.reads)
        self._body.append(op)
        self._note(op.lane, op.writes)

    def _end_loop(self) -> None:
        if self._body and self.num_chunks > 1:
            self.statements.append(ir.Repeat(CHUNK.name, self.num_chunks, tuple(self._body)))
        else:
            self.statements.extend(self._body)
        self._body = []

    # --- sites --------------------------------------------------------------------------------------------------

    def begin_part(self, arriving: Iterable[Stored]) -> None:
        """Begin the ops of another program, such as the backward one: they wait for no op written before.

        If `is_by_sites`, the first op in each lane waits for the `arriving` tensors.
        """
        self._begin_site({ARRIVES: tuple(map(self._view, arriving))})

    def end_site(self) -> None:
        """End the loop over chunks; if `is_by_sites`, let all later ops wait for all ops before.

        The first op of a site in each lane waits for the last ops of the site before in other lanes. An op that
        reads neither all their outputs nor something of its own site gets an empty call before it, which reads
        those outputs. The transfers of ring attention need no such call, since the compute lane reads all of them
        before attention ends.
        """
        self.cut()
        if self._written:
            self._begin_site(self._written)

    def _begin_site(self, awaited: dict[str, tuple[ir.View, ...]]) -> None:
        self._awaited, self._written, self._begun, self._fresh = awaited, {}, set(), set()

    def _wait(self, lane: str, reads: Iterable[ir.View]) -> None:
        """Let an op wait for the site before, where it is the first of its own site in a lane."""
        if not self.is_by_sites or lane in self._begun:
            return
        self._begun.add(lane)
        views = {view: None for other, views in self._awaited.items() if other != lane for view in views}
        read = dict.fromkeys(reads)
        if views.keys() <= read.keys() or any(view.buffer in self._fresh for view in read):
            return
        self.statements.append(ir.Call(fn=NEXT_SITE, outs=(), ins=tuple(views), lane=lane, name="next site"))

    def _note(self, lane: str, writes: Iterable[ir.View]) -> None:
        """Note what the op that was written last in a lane writes."""
        self._lanes[lane] = None
        if self.is_by_sites:
            self._written[lane] = tuple(map(self._all_chunks, writes))
            self._fresh.update(view.buffer for view in self._written[lane])

    def _all_chunks(self, view: ir.View) -> ir.View:
        if self.num_chunks == 1:
            return view
        return replace(view, selectors=(ir.FULL, *view.selectors[1:]))

    # --- compute ------------------------------------------------------------------------------------------------

    def call(
        self, fn: str, outs: Tensors, ins: Tensors, work: str, shape: tuple[Index, ...], part: Part = ""
    ) -> None:
        """Write a call of function `fn` on `ins` for the current chunk, priced as `work` with sizes `shape`.

        `work` is a key of `CALL_DIMS`, which names the sizes. `part` is "" or the gradient that the call computes:
        "input_grad" or "weight_grad".
        """
        written, read = tuple(map(self._view, outs)), tuple(map(self._view, ins))
        self._do(ir.Call(fn=fn, outs=written, ins=read, work=work, shape=shape, part=part, lane=COMPUTE))

    def timed(
        self, lane: str, work_of: TimedWork, outs: Tensors, ins: Tensors, beside: WeightTensors
    ) -> None:
        """Write an op that computes no values and whose cost on a rank is `work_of(tokens)`.

        If the ranks that share experts have unequal loads, computing costs each rank the work of its own load; an
        exchange costs all of them the work of the rank with the most copies of tokens (one copy for each expert of
        a token).

        Args:
            lane: the lane of the op; for exchanges of experts the name of their mesh.
            work_of: the work of a rank by its tokens: the product of the local sizes of `ins[0]` but the last.
            outs, ins: what the op writes and reads.
            beside: (parameters that it also reads, gradients of parameters that it also writes).

        Raises:
            UnsupportedError: ranks have different numbers of tokens.
        """
        tokens: Index = 1
        for number in range(len(ins[0].sides) - 1):
            tokens = tokens * self.extent_of(ins[0], number)
        if not isinstance(tokens, int):
            raise UnsupportedError("ranks of a layer with experts or latent attention have different tokens")
        ranks = self.problem.experts
        works = [work_of(tokens, load=load) for load in ranks.loads] if ranks is not None else []
        parameters, gradients = beside
        written, read = (tuple(map(self._view, each)) for each in (outs + gradients, ins + parameters))
        self._do(timed_op(works or [work_of(tokens)], TIMED_LANES.get(lane, lane), written, read))

    def _matmul(
        self, out: Stored, a: Stored, b: Stored, transposed: tuple[bool, bool], sums_chunks: bool
    ) -> None:
        self._do(
            ir.Matmul(
                out=self._view(out),
                a=self._view(a),
                b=self._view(b),
                transpose_a=transposed[0],
                transpose_b=transposed[1],
                accumulate=CHUNK > 0 if sums_chunks and self.num_chunks > 1 else 0,
                lane=COMPUTE,
            )
        )

    def _include(self, name: str, problem: Matmul2dProblem, out: Stored, a: Stored, b: Stored) -> None:
        program = product_program(name, problem, self.config.slices, self.config.packets)
        part = f"{name}_{problem.dataflow}_{problem.m}x{problem.n}x{problem.k}"
        mesh = self.mesh.name
        views = tuple((formal, self._view(stored)) for formal, stored in (("a", a), ("b", b), ("c", out)))
        lanes = tuple((lane.name, lane.name) for lane in program.lanes)
        for lane, _ in lanes:
            self._wait(lane, ())
        for lane, _ in lanes:
            self._note(lane, (self._view(out),))
        own: tuple[Index, ...] = tuple(ir.Var(f"{mesh}.{axis}") for axis in self.mesh.axes[:-2])
        here = (*own, ir.FULL, ir.FULL)
        meshes = ((program.meshes[0].name, ir.Submesh(mesh, here)),)
        self._body.append(ir.Include(part=part, program=program, meshes=meshes, buffers=views, lanes=lanes))

    def add(self, out: Stored, term: Stored) -> None:
        """Write the op out += term for the current chunk."""
        self._do(ir.Add(out=self._view(out), src=self._view(term), lane=COMPUTE))

    def zero(self, out: Stored) -> None:
        """Write an op that zeroes a buffer: for the current chunk; once before the loop if it has no tokens."""
        op = ir.Zero(out=self._view(out), lane=COMPUTE)
        self._wait(COMPUTE, ())
        (self._body if out.has_tokens else self.statements).append(op)
        self._note(COMPUTE, op.writes)

    def copy(self, out: Stored, src: Stored) -> None:
        """Write the op out = src for the current chunk."""
        self._do(ir.Copy(out=self._view(out), src=self._view(src), lane=COMPUTE))

    def turns(self, count: int) -> Iterator[Index]:
        """Write a loop of `count` turns (steps of ring attention); yield its variable once, for its body."""
        outer, self._body = self._body, []
        yield TURN
        inner, self._body = self._body, outer
        self._body.append(ir.Repeat(TURN.name, count, tuple(inner)))

    def pass_on(self, out: Stored, src: Stored, axis: int, lane: str = "", *, when: Index = 1) -> None:
        """Write a shift round mesh axis number `axis`: `src` goes to the rank before this one.

        `out` comes from the rank after. `lane` ends the name of the lane. `when` is a condition on the turn of a
        loop of `turns`: in turns in which it is 0 nothing is sent.
        """
        name = self._lane(axis, lane)
        op = ir.Permute(out=self._view(out), src=self._view(src), over=self._over(axis), shift=-1, lane=name)
        self._lanes[name] = None
        self._body.append(op if when == 1 else ir.When(when, (op,)))

    # --- moving -------------------------------------------------------------------------------------------------

    def _sizes(self, sides: Sides, dim: int, dims: AxisDims, axis: int) -> Index | None:
        """Return what member `peer` has along a dim; None where all have the same."""
        own = extent(self.mesh, sides[dim], dims)
        peers = extent(self.mesh, sides[dim], dims, axis)
        return None if own == peers else peers

    def _all_reduce(self, stored: Stored, axis: int, lane: str, op: str = "sum") -> None:
        both = self._view(stored)
        self._do(ir.AllReduce(out=both, src=both, op=op, over=self._over(axis), lane=lane))

    def _reduce_scatter(
        self, out: Stored, src: Stored, axis: int, dim: int, lane: str, op: str = "sum"
    ) -> None:
        sizes = self._sizes(src.sides, dim, out.dims, axis)
        self._do(
            ir.ReduceScatter(
                out=self._view(out), src=self._view(src), dim=dim, sizes=sizes, over=self._over(axis), lane=lane,
                op=op,
            )
        )  # fmt: skip

    def _all_gather(self, out: Stored, src: Stored, axis: int, dim: int, lane: str) -> None:
        sizes = self._sizes(src.sides, dim, src.dims, axis)
        written, read = self._view(out), self._view(src)
        self._do(ir.AllGather(out=written, src=read, dim=dim, sizes=sizes, over=self._over(axis), lane=lane))

    def _all_to_all(self, out: Stored, src: Stored, axis: int, dims: tuple[int, int], lane: str) -> None:
        split, joined = dims
        self._do(
            ir.AllToAll(
                out=self._view(out),
                src=self._view(src),
                split_dim=split,
                concat_dim=joined,
                send_sizes=self._sizes(src.sides, split, out.dims, axis),
                recv_sizes=self._sizes(src.sides, joined, src.dims, axis),
                over=self._over(axis),
                lane=lane,
            )
        )

    def _take(self, out: Stored, src: Stored, axis: int, dim: int) -> None:
        side = src.sides[dim]
        run = largest_extent(self.mesh, side, out.dims)
        start = minimum(run * ir.Var(self._over(axis)), extent(self.mesh, side, src.dims))
        whole = self._view(src)
        part = ir.Range(start, start + extent(self.mesh, side, out.dims))
        selectors = (*whole.selectors[:dim], part, *whole.selectors[dim + 1 :])
        self._do(ir.Copy(out=self._view(out), src=replace(whole, selectors=selectors), lane=COMPUTE))
