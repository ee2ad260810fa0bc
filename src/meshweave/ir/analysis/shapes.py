"""Which shapes, dtypes and member numbers fit together, op by op.

numpy would broadcast a block of one row over many rows, and its errors name no op. So all shapes are checked
here. `check_op` looks at one op alone, `check_joint` at the members of a collective side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from meshweave.base.errors import ProgramError, did_you_mean
from meshweave.base.units import DTYPES
from meshweave.ir.program import BoundOp, Program
from meshweave.ir.program import ops as op_types
from meshweave.ir.program.call_dims import CALL_DIMS, CALL_PARTS
from meshweave.ir.program.expressions import Index
from meshweave.ir.program.product_shapes import product_shape
from meshweave.ir.program.release import TILE_ORDERS, Release
from meshweave.ir.program.views import View

Shape = tuple[int, ...]


def part_sizes(sizes: Any, total: int, count: int) -> tuple[int, ...]:
    """Return how many elements of a dim each of `count` members has: `sizes`, or for None total // count each."""
    return (total // count,) * count if sizes is None else sizes


class _Check:
    """Raises with op, rank and buffer named."""

    def __init__(self, program: Program, bound: BoundOp, rank: int) -> None:
        self.program, self.bound, self.rank = program, bound, rank

    def error(self, message: str, buffer: str | None = None) -> ProgramError:
        """Return an error that names the op, the rank and a buffer."""
        return ProgramError(message, op=self.bound.label, rank=self.rank, buffer=buffer)

    def require(self, condition: bool, message: str, buffer: str | None = None) -> None:
        """Raise an error with this message unless a condition holds."""
        if not condition:
            raise self.error(message, buffer)

    def shape(self, view: View, expected: Sequence[int]) -> None:
        """Raise ProgramError unless `view` has the shape `expected`."""
        self.require(
            view.shape == tuple(expected),
            f"{view} has shape {view.shape}, should have {tuple(expected)}",
            view.buffer,
        )

    def dim(self, dim: int, view: View) -> None:
        """Raise ProgramError unless `dim` is the number of a dim of `view`, from 0."""
        dims = len(view.selectors)
        self.require(0 <= dim < dims, f"{view} has {dims} dims, and no dim {dim}", view.buffer)

    def same_dtype(self, out: View, src: View) -> None:
        """Raise ProgramError unless the buffers of both views have one dtype."""
        out_dtype, src_dtype = (self.program.buffer_of[view.buffer].dtype for view in (out, src))
        self.require(
            out_dtype == src_dtype, f"moves {src_dtype} of {src.buffer} into {out_dtype}", out.buffer
        )


def check_op(program: Program, bound: BoundOp, rank: int) -> None:
    """Check one resolved op on the global rank `rank` by itself.

    Raises ProgramError, naming op, rank and mostly a buffer, where shapes or dtypes do not fit each other, a
    remote view is not allowed, an output overlaps an input, tiles or the part or work of a call are unknown, or
    an accumulate is no sum.
    """
    check, op = _Check(program, bound, rank), bound.op
    _check_remote(check, op)
    _check_overlaps(check, op)
    match op:
        case op_types.Matmul():
            for view in (op.out, op.a, op.b):
                check.require(len(view.selectors) >= 2, f"multiplies {view}, which is no matrix", view.buffer)
            shape = product_shape(
                op.a.shape, op.b.shape, op.transpose_a, op.transpose_b, len(op.out.selectors)
            )
            if isinstance(shape, str):
                raise check.error(shape, op.b.buffer)
            check.shape(op.out, shape.out)
        case op_types.Copy() | op_types.Add():
            check.shape(op.out, op.src.shape)
        case op_types.Get() | op_types.Put() | op_types.Accumulate():
            check.shape(op.out, op.src.shape)
            check.same_dtype(op.out, op.src)
            if isinstance(op, op_types.Accumulate):
                check.require(op.op == "sum", f"accumulates by 'sum' only, not '{op.op}'", op.out.buffer)
        case op_types.Call():
            check.require(
                op.part in CALL_PARTS,
                f"part is one of {', '.join(CALL_PARTS[1:])}, not '{op.part}'",
            )
            _check_work(check, op)
    if isinstance(op, (op_types.Matmul, op_types.Copy, op_types.Put)) and op.release is not None:
        _check_release(check, op.release, op.out)


def _check_release(check: _Check, release: Release, out: View) -> None:
    """Raise ProgramError for tiles of no elements or of more dims than `out`, or in an unknown order."""
    tile, dims = release.tile, len(out.selectors)
    check.require(len(tile) <= dims, f"releases tiles of {len(tile)} dims of a view of {dims}", out.buffer)
    check.require(all(int(size) >= 1 for size in tile), "releases tiles of no elements", out.buffer)  # type: ignore[arg-type]
    known = " or ".join(f"'{order}'" for order in TILE_ORDERS[1:])
    check.require(
        release.order in TILE_ORDERS, f"releases tiles by {known}, not '{release.order}'", out.buffer
    )


def _check_work(check: _Check, op: op_types.Call) -> None:
    """Raise ProgramError for work of an unknown kind, or in sizes that are not those of its kind."""
    if not op.work:
        check.require(not op.shape, f"has a shape {op.shape} and names no work")
    else:
        known = ", ".join(CALL_DIMS)
        check.require(op.work in CALL_DIMS, f"work is one of {known}, not '{op.work}'")
        dims = CALL_DIMS[op.work]
        fits = len(op.shape) in (0, len(dims)) and all(int(size) >= 0 for size in op.shape)  # type: ignore[arg-type]
        check.require(fits, f"shape of {op.work} is ({', '.join(dims)}), not {op.shape}")
    check.require(
        not op.dtype or op.dtype in DTYPES, f"unknown dtype '{op.dtype}'{did_you_mean(op.dtype, DTYPES)}"
    )


def _check_remote(check: _Check, op: op_types.Op) -> None:
    """Raise ProgramError for a remote view that this op may not have.

    Remote are the views of one-sided ops, operands of products, copies and sums, and outputs with a release.
    """
    allowed: tuple[View, ...] = ()
    if isinstance(op, (op_types.Get, op_types.Add)):
        allowed = (op.src,)
    elif isinstance(op, (op_types.Put, op_types.Accumulate)):
        allowed = (op.out,)
    elif isinstance(op, op_types.Matmul):
        allowed = (op.out, op.a, op.b)
    elif isinstance(op, op_types.Copy):
        allowed = (op.out, op.src)
    for _, view in op.accesses():
        if view.rank is not None:
            reaches = any(view is other for other in allowed)
            check.require(reaches, f"{op.kind} cannot reach {view} on another rank", view.buffer)


def _check_overlaps(check: _Check, op: op_types.Op) -> None:
    """Raise ProgramError for an output that overlaps an input: the result would depend on the executor's order.

    Elementwise ops may work in place, on exactly the same elements. A call reads all its inputs first.
    """
    outs = [replace(view, rank=_owner(view, check.rank)) for view in op.writes]
    ins = [replace(view, rank=_owner(view, check.rank)) for view in op.reads]
    if isinstance(op, (op_types.Call, op_types.Exchange)):
        pairs = list(combinations(outs, 2))
    else:
        in_place = isinstance(
            op,
            (
                op_types.AllReduce,
                op_types.Broadcast,
                op_types.Reduce,
                op_types.Add,
                op_types.Copy,
                op_types.Recv,
                op_types.Accumulate,
            ),
        )
        accumulates = (
            isinstance(op, op_types.Matmul) and op.accumulate
        )  # then `out` is among what is read, last
        pairs = [
            (out, view)
            for out in outs
            for view in (ins[:2] if accumulates else ins)
            if not (in_place and out == view)
        ]
    for out, read in pairs:
        overlap = out.rank == read.rank and out.overlaps(read)
        check.require(
            not overlap, f"writes {out.buffer} while it reads or writes part of the same", out.buffer
        )


def _owner(view: View, rank: int) -> Index:
    return rank if view.rank is None else view.rank


def check_joint(program: Program, members: Sequence[tuple[int, BoundOp]]) -> None:
    """Check that shapes, sizes, dims and root of one collective fit together over its members, each (rank, op).

    Each member's `out` must have the dtype of its `src`; dtypes of different members are not compared here. A
    collective that moves no data passes. Raises ProgramError naming a member that does not fit.
    """
    ops: list[Any] = [bound.op for _, bound in members]
    if not isinstance(ops[0], op_types.DataCollective):
        return
    checks = [_Check(program, bound, rank) for rank, bound in members]
    for check, op in zip(checks, ops, strict=True):
        check.same_dtype(op.out, op.src)
        for name in ("dim", "split_dim", "concat_dim"):
            if hasattr(op, name):
                check.dim(getattr(op, name), op.src)
                check.dim(getattr(op, name), op.out)
        if isinstance(op, (op_types.Broadcast, op_types.Reduce)):
            root, packets = int(op.root), int(op.packets)  # type: ignore[arg-type]
            check.require(0 <= root < len(ops), f"root {root} is none of the {len(ops)} members")
            check.require(packets >= 1, f"cuts into {packets} packets")
        for name in ("sizes", "send_sizes", "recv_sizes"):
            sizes = getattr(op, name, None)
            fits = sizes is None or (len(sizes) == len(ops) and min(sizes) >= 0)
            check.require(fits, f"{name} {sizes} do not say what each of {len(ops)} members has")
    for check, op, expected in zip(checks, ops, _expected(checks, ops), strict=True):
        if expected is not None:
            check.shape(op.out, expected)


def _expected(checks: Sequence[_Check], ops: Sequence[Any]) -> list[Shape | None]:
    """Return the shape that each member's `out` must have; None for a member whose `out` is not written."""
    first, count = ops[0], len(ops)
    src: list[Shape] = [op.src.shape for op in ops]
    match first:
        case op_types.AllGather():
            sizes = part_sizes(first.sizes, src[0][first.dim] * count, count)
            for check, op, size in zip(checks, ops, sizes, strict=True):
                check.shape(op.src, _with(src[0], first.dim, size))
            return [_with(src[0], first.dim, sum(sizes))] * count
        case op_types.ReduceScatter():
            _alike(checks, ops)
            total = src[0][first.dim]
            sizes = part_sizes(first.sizes, total, count)
            checks[0].require(
                sum(sizes) == total, f"sizes {sizes} do not sum to the {total} of src", first.src.buffer
            )
            return [_with(src[0], first.dim, size) for size in sizes]
        case op_types.AllReduce():
            _alike(checks, ops)
            return list(src)
        case op_types.Broadcast():
            return [src[int(first.root)]] * count  # type: ignore[arg-type]
        case op_types.Reduce():
            _alike(checks, ops)
            return [src[0] if member == first.root else None for member in range(count)]
        case op_types.Permute():
            return [src[(member - int(first.shift)) % count] for member in range(count)]  # type: ignore[arg-type]
        case op_types.AllToAll():
            return [_all_to_all(checks, ops, member) for member in range(count)]
    raise AssertionError(first)


def _all_to_all(checks: Sequence[_Check], ops: Sequence[Any], member: int) -> Shape:
    op, count = ops[member], len(ops)
    recv = part_sizes(op.recv_sizes, op.out.shape[op.concat_dim], count)
    pieces: list[Shape] = []
    for check, sender_op in zip(checks, ops, strict=True):
        total = sender_op.src.shape[op.split_dim]
        send = part_sizes(sender_op.send_sizes, total, count)
        check.require(
            sum(send) == total, f"send_sizes {send} do not sum to the {total} of src", sender_op.src.buffer
        )
        pieces.append(_with(sender_op.src.shape, op.split_dim, send[member]))
    for check, piece, size in zip(checks, pieces, recv, strict=True):
        expected = _with(pieces[0], op.concat_dim, size)
        check.require(
            piece == expected,
            f"gives member {member} a part of shape {piece}, which takes {expected}",
            check.bound.op.accesses()[0][1].buffer,
        )
    return _with(pieces[0], op.concat_dim, sum(recv))


def _alike(checks: Sequence[_Check], ops: Sequence[Any]) -> None:
    for check, op in zip(checks, ops, strict=True):
        check.shape(op.src, ops[0].src.shape)


def _with(shape: Sequence[int], dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])
