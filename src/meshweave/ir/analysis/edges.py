"""Derived edges: which earlier ops an op must wait for, from overlapping views alone.

Within a rank: read after write, write after read, write after write, whatever the lanes; what a call stashes
counts as memory that each of its parts changes. Across ranks only fences and released writes order one-sided
accesses; `ir.analysis.races` finds what they leave unordered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from meshweave.ir.analysis.matching import MatchedProgram, Node
from meshweave.ir.program import BoundOp, Program
from meshweave.ir.program.ops import READ, UPDATE, WRITE, Add, Call, Copy, Fence, Matmul, Mode, Op, Put
from meshweave.ir.program.views import View


def exposed_buffers(program: Program) -> frozenset[str]:
    """Return the names of the buffers that some op accesses on another rank; fences order accesses to them.

    Ops inside included sub-programs are not seen: give the expanded program for these.
    """
    return frozenset(
        view.buffer for op in program.ops() for _, view in op.accesses() if view.rank is not None
    )


def is_one_sided(op: Op) -> bool:
    """Return whether the op has a remote view: one of another rank's memory."""
    return any(view.rank is not None for _, view in op.accesses())


def reads_in_place(op: Op) -> bool:
    """Return whether the op is a product, sum or copy that reads an operand in another rank's memory."""
    return isinstance(op, (Matmul, Add, Copy)) and any(view.rank is not None for view in op.reads)


def is_tracked(op: Op) -> bool:
    """Return whether the op releases its writes (`Release`): later readers wait for them without a fence."""
    return isinstance(op, (Matmul, Copy, Put)) and op.release is not None


_FEW = 24
"""Up to so many accesses are looked at one by one; boxes of more are compared all at once."""


class _BufferAccesses:
    """Accesses to one buffer slot that a later op may still conflict with."""

    def __init__(self) -> None:
        self.live: list[tuple[int, Mode, View]] = []
        self._boxes = np.empty((0, 0, 2), dtype=np.int64)
        """Of each live access, [start, stop) per dim."""

    def conflicts(self, mode: Mode, view: View) -> list[int]:
        """Return the indices of ops with an overlapping access, unless both accesses read or both update."""
        return [
            index
            for index, other_mode, other in map(self.live.__getitem__, self._near(view))
            if not (mode == other_mode and mode in (READ, UPDATE)) and view.overlaps(other)
        ]

    def add(self, index: int, mode: Mode, view: View) -> None:
        """Add an access of op number `index`. A write replaces the accesses that it covers."""
        if mode == WRITE:
            covered = {at for at in self._near(view) if view.covers(self.live[at][2])}
            if covered:
                self.live = [entry for at, entry in enumerate(self.live) if at not in covered]
                self._boxes = np.delete(self._boxes, sorted(covered), axis=0)
        count = len(self.live)
        if count >= len(self._boxes):
            more = np.zeros((max(2 * count, 8), len(view.selectors), 2), dtype=np.int64)
            more[:count] = self._boxes[:count] if count else 0
            self._boxes = more
        self._boxes[count] = _ends(view)
        self.live.append((index, mode, view))

    def _near(self, view: View) -> Iterable[int]:
        """Return a superset of the positions in `live` of the accesses that overlap `view`."""
        count = len(self.live)
        if count <= _FEW:
            return range(count)
        ends = _ends(view)
        boxes = self._boxes[:count]
        near = ((boxes[:, :, 0] < ends[:, 1]) & (boxes[:, :, 1] > ends[:, 0])).all(axis=1)
        positions: list[int] = np.flatnonzero(near).tolist()
        return positions


def _ends(view: View) -> NDArray[np.int64]:
    """Return [start, stop) of each dim."""
    listed = [(selector.start, selector.stop) for selector in view.selectors]
    return np.array(listed, dtype=np.int64).reshape(-1, 2)


Conflicts = list[list[tuple[Mode, list[int]]]]
"""For each op of one rank, by local access: its mode, and the earlier ops whose accesses conflict with it."""


def local_edges(
    ops: Sequence[BoundOp], exposed: frozenset[str] = frozenset(), conflicts: Conflicts | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return for each op of one rank the indices of the earlier ops of that rank that it must wait for.

    These are conflicts of local views, the order of calls that share a stash, and fences: a fence waits for
    every earlier access to an exposed buffer, and later accesses to these wait for the fence.

    Args:
        ops: the resolved ops of the rank, in program order.
        exposed: the names of buffers that ops access remotely (`exposed_buffers`).
        conflicts: the `access_conflicts` of `ops`; None to find them.
    """
    edges: list[tuple[int, ...]] = []
    last_fence: int | None = None
    touched: list[int] = []
    stashes: dict[tuple[object, ...], list[int]] = defaultdict(list)
    conflicts = access_conflicts(ops) if conflicts is None else conflicts
    for index, (bound, of_op) in enumerate(zip(ops, conflicts, strict=True)):
        op = bound.op
        before = {other for _, others in of_op for other in others}
        touches_exposed = is_one_sided(op) or any(view.buffer in exposed for _, view in op.accesses())
        if isinstance(op, Fence):
            before.update(touched)
            if last_fence is not None:
                before.add(last_fence)
            last_fence, touched = index, []
        elif touches_exposed:
            if last_fence is not None:
                before.add(last_fence)
            touched.append(index)
        if isinstance(op, Call) and op.stash:
            users = stashes[op.stash, *op.args]
            if op.part == "forward":
                before.update(users)
                users[:] = [index]
            else:
                before.update(users[-1:])
                users.append(index)
        before.discard(index)
        edges.append(tuple(sorted(before)))
    return tuple(edges)


def write_edges(conflicts: Conflicts) -> tuple[tuple[int, ...], ...]:
    """Return for each op of a rank the indices of the earlier ops that must end before its results are written.

    `conflicts` are those that `access_conflicts` returns. The edges are those of `local_edges` that come from
    what the op writes or updates, not from what it reads, without those of stashes and fences.
    """
    return tuple(
        tuple(sorted({other for mode, others in of_op if mode != READ for other in others} - {index}))
        for index, of_op in enumerate(conflicts)
    )


def access_conflicts(ops: Sequence[BoundOp]) -> Conflicts:
    """Return for each op of one rank (mode, indices of the earlier ops in conflict) for each access of its own.

    An access is a view of this rank's memory that the op reads, writes or updates (the mode). Accesses conflict
    if they share an element and do not both read or both update it. Those to buffers that none of `ops` writes
    are left out.
    """
    conflicts: Conflicts = []
    # What nobody writes orders nothing; keeping its readers would make this quadratic.
    written = {view.buffer for bound in ops for mode, view in bound.op.accesses() if mode != READ}
    memory: dict[tuple[str, int], _BufferAccesses] = defaultdict(_BufferAccesses)
    for index, bound in enumerate(ops):
        own: list[tuple[Mode, View, _BufferAccesses]] = []
        for mode, view in bound.op.accesses():
            if view.rank is None and view.buffer in written:
                assert isinstance(view.slot, int)
                own.append((mode, view, memory[view.buffer, view.slot]))
        conflicts.append([(mode, place.conflicts(mode, view)) for mode, view, place in own])
        for mode, view, place in own:
            place.add(index, mode, view)
    return conflicts


def tracked_edges(matched: MatchedProgram) -> dict[Node, tuple[Node, ...]]:
    """Return for each op the released remote writes that it must wait for (T3's track and trigger, section 4).

    Ops are (rank, index). Those that wait for none are left out.
    """
    arriving: dict[int, list[tuple[Node, Mode, View]]] = defaultdict(list)
    for rank, ops in matched.ops.items():
        for index, bound in enumerate(ops):
            if is_tracked(bound.op):
                for mode, view in bound.op.accesses():
                    if view.rank is not None and mode != READ:
                        assert isinstance(view.rank, int)
                        arriving[view.rank].append(((rank, index), mode, view))
    edges: dict[Node, tuple[Node, ...]] = {}
    for rank, writes in arriving.items():
        for index, bound in enumerate(matched.ops[rank]):
            before = {
                node
                for mode, view in bound.op.accesses()
                if view.rank is None
                for node, other_mode, other in writes
                if not (mode == UPDATE and other_mode == UPDATE)
                and matched.ops[node[0]][node[1]].key < bound.key
                and view.overlaps(other)
            }
            if before:
                edges[rank, index] = tuple(sorted(before))
    return edges
