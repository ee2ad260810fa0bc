"""Peak memory: a buffer slot lives from its first write to its last read, inputs and outputs throughout."""

from __future__ import annotations

from collections import defaultdict

from meshweave.ir.edges import exposed_buffers
from meshweave.ir.ops import Call
from meshweave.ir.program import Program


def lifetimes(program: Program, rank: int) -> dict[tuple[str, int], tuple[int, int]]:
    """First and last op index at which each used scratch or temp slot of `rank` is needed.

    What other ranks reach one-sided lives throughout: they may come at any time.
    """
    ops = program.on_rank(rank)
    spans: dict[tuple[str, int], tuple[int, int]] = {
        (name, slot): (0, len(ops) - 1)
        for name in sorted(exposed_buffers(program))
        for slot in range(program.buffer_of[name].slots)
        if program.buffer_of[name].kind in ("scratch", "temp")
        and ops
        and rank in program.mesh_of[program.buffer_of[name].mesh]
    }
    for index, bound in enumerate(ops):
        for _, view in bound.op.accesses():
            if view.rank is None and program.buffer_of[view.buffer].kind in ("scratch", "temp"):
                assert isinstance(view.slot, int)
                key = view.buffer, view.slot
                spans[key] = (spans.get(key, (index, index))[0], index)
    return spans


def peak_bytes(program: Program, rank: int) -> int:
    """Most bytes that `rank` holds at once in program order, stashes of calls included."""
    resident = sum(
        buffer.slots * program.buffer_bytes(buffer.name, rank)
        for buffer in program.buffers
        if buffer.kind in ("input", "output") and rank in program.mesh_of[buffer.mesh]
    )
    change: dict[int, int] = defaultdict(int)
    for (name, _), (first, last) in lifetimes(program, rank).items():
        change[first] += program.buffer_bytes(name, rank)
        change[last + 1] -= program.buffer_bytes(name, rank)
    stashed: dict[tuple[object, ...], int] = {}
    for index, bound in enumerate(program.on_rank(rank)):
        if isinstance(bound.op, Call) and bound.op.stash:
            if bound.op.part == "forward":
                assert isinstance(bound.op.stash_bytes, int)
                stashed[bound.op.stash, *bound.op.args] = bound.op.stash_bytes
                change[index] += bound.op.stash_bytes
            elif bound.op.part == "weight_grad":
                change[index + 1] -= stashed.pop((bound.op.stash, *bound.op.args), 0)
    peak = level = resident
    for index in sorted(change):
        level += change[index]
        peak = max(peak, level)
    return peak
