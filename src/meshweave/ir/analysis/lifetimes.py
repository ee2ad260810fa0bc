"""Peak memory: a buffer slot lives from its first write to its last read, inputs and outputs throughout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from meshweave.ir.analysis.edges import exposed_buffers
from meshweave.ir.program import Program
from meshweave.ir.program.expressions import evaluate
from meshweave.ir.program.ops import Call, Op

Written = Sequence[tuple[Op, Mapping[str, int]]]


def lifetimes(program: Program, rank: int) -> dict[tuple[str, int], tuple[int, int]]:
    """Return the first and last op index at which each used scratch or temp slot of `rank` is needed.

    Slots that one-sided ops of other ranks access live throughout, because those accesses may come at any time.
    """
    program = program.expanded
    return _lifetimes(program, rank, list(program.unbound_ops_on_rank(rank)))


def _lifetimes(program: Program, rank: int, ops: Written) -> dict[tuple[str, int], tuple[int, int]]:
    """Return the lifetimes from unbound ops: only the slot of a view is evaluated, which is fast in a search."""
    local = {buffer.name for buffer in program.buffers if buffer.kind in ("scratch", "temp")}
    spans: dict[tuple[str, int], tuple[int, int]] = {
        (name, slot): (0, len(ops) - 1)
        for name in sorted(exposed_buffers(program))
        for slot in range(program.buffer_of[name].slots)
        if name in local and ops and rank in program.mesh_of[program.buffer_of[name].mesh]
    }
    for index, (op, env) in enumerate(ops):
        for _, view in op.accesses():
            if view.rank is None and view.buffer in local:
                key = view.buffer, evaluate(view.slot, env)
                spans[key] = (spans.get(key, (index, index))[0], index)
    return spans


def peak_bytes(program: Program, rank: int) -> int:
    """Return the most bytes that `rank` holds at once in program order, stashes of calls included."""
    program = program.expanded
    resident = sum(
        buffer.slots * program.buffer_bytes(buffer.name, rank)
        for buffer in program.buffers
        if buffer.kind in ("input", "output") and rank in program.mesh_of[buffer.mesh]
    )
    change: dict[int, int] = defaultdict(int)
    ops = list(program.unbound_ops_on_rank(rank))
    for (name, _), (first, last) in _lifetimes(program, rank, ops).items():
        change[first] += program.buffer_bytes(name, rank)
        change[last + 1] -= program.buffer_bytes(name, rank)
    stashed: dict[tuple[object, ...], int] = {}
    for index, (op, env) in enumerate(ops):
        if isinstance(op, Call) and op.stash:
            stash = (op.stash, *(evaluate(arg, env) for arg in op.args))
            if op.part == "forward":
                stashed[stash] = evaluate(op.stash_bytes, env)
                change[index] += stashed[stash]
            elif op.part == "weight_grad":
                change[index + 1] -= stashed.pop(stash, 0)
    peak = level = resident
    for index in sorted(change):
        level += change[index]
        peak = max(peak, level)
    return peak
