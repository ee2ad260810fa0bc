"""Reads of remote operands in place, for memory that every rank reaches equally fast, such as that of one host.

A get is removed if only products, sums and copies read its target, each exactly the view that the get wrote. They
read the remote view instead. The remote memory must not change in between, so no fence may stand between the get
and a reader. An operand that several gets fill is still fetched, and so is one that other ranks reach.

A copy of a rank's own shard, where others read that shard, is removed in the same way, unless the rank writes to
the shard before they are done. Its readers read the shard as the others do, under the rank's own number: so they
all read it where it lies alike.
"""

from __future__ import annotations

from dataclasses import replace

from meshweave.ir.analysis.edges import exposed_buffers
from meshweave.ir.program import BoundOp, On, Program
from meshweave.ir.program.ops import READ, Add, Copy, Fence, Get, Matmul, Op
from meshweave.ir.program.views import View
from meshweave.lower.one_sided import in_sequential_order

_READERS = (Matmul, Add, Copy)


def read_in_place(program: Program) -> Program:
    """Return the program in which products, sums and copies read other ranks' memory without fetching it.

    The result is written out per rank. A get is removed if all ops that read what it fetches can read the remote
    memory instead; the module docstring says when they can. Copies of a rank's own shard into scratch, where
    others read that shard, are removed likewise, and so is scratch that no op uses any more.
    """
    program = program.expanded
    exposed = exposed_buffers(program)
    kept = {rank: _without_gets(program, rank, ops, exposed) for rank, ops in program.ops_by_rank.items()}
    listed = [
        (rank, kept[rank][bound.key])
        for rank, bound in in_sequential_order(program)
        if bound.key in kept[rank]
    ]
    used = {view.buffer for _, op in listed for _, view in op.accesses()}
    buffers = tuple(b for b in program.buffers if b.kind != "scratch" or b.name in used)
    body = tuple(On((rank,), (op,)) for rank, op in listed)
    return replace(program, body=body, buffers=buffers)


def _without_gets(
    program: Program, rank: int, ops: tuple[BoundOp, ...], exposed: frozenset[str]
) -> dict[tuple[int, ...], Op]:
    """Return the remaining ops of a rank, by position; readers of a removed get or copy read its source."""
    remaining: dict[tuple[int, ...], Op] = {bound.key: bound.op for bound in ops}
    for index, bound in enumerate(ops):
        get = bound.op
        if not isinstance(get, (Get, Copy)) or program.buffer_of[get.out.buffer].kind != "scratch":
            continue
        if get.out.buffer in exposed:  # other ranks may read what it fills
            continue
        src = get.src
        if isinstance(get, Copy):
            kind, dtype = program.buffer_of[src.buffer].kind, program.buffer_of[src.buffer].dtype
            if src.buffer not in exposed or kind not in ("input", "temp"):
                continue
            if get.release is not None or dtype != program.buffer_of[get.out.buffer].dtype:
                continue
            src = replace(src, rank=rank) if kind == "input" else src
        readers = _readers(ops[index + 1 :], get.out, get.src)
        if readers:
            del remaining[bound.key]
            for key in readers:
                remaining[key] = _redirected(remaining[key], get.out, src)
    return remaining


def _readers(later: tuple[BoundOp, ...], filled: View, source: View) -> list[tuple[int, ...]]:
    """Return the positions of the ops that read exactly `filled` before it is overwritten.

    Return none if an op reads or writes a part of it, or a fence or a write to `source` stands before a reader.
    """
    readers: list[tuple[int, ...]] = []
    fenced = False
    for bound in later:
        op = bound.op
        if isinstance(op, Fence):
            fenced = True
            continue
        fenced = fenced or any(view.rank == source.rank and view.overlaps(source) for view in op.writes)
        local = [(mode, view) for mode, view in op.accesses() if view.rank is None and view.overlaps(filled)]
        if not local:
            continue
        if any(mode != READ for mode, _ in local):
            covered = all(view.covers(filled) for mode, view in local if mode != READ)
            return readers if covered and all(mode != READ for mode, _ in local) else []
        if fenced or not isinstance(op, _READERS) or any(view != filled for _, view in local):
            return []
        readers.append(bound.key)
    return readers


def _redirected(op: Op, old: View, new: View) -> Op:
    changes = {name: new for name in ("a", "b", "src") if getattr(op, name, None) == old}
    return replace(op, **changes)  # type: ignore[arg-type]
