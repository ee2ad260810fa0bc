"""Peak memory: a buffer slot lives from its first write to its last read, inputs and outputs throughout.

A call of part "free" ends the life of what it reads; another begins with the next access. A stash grows with each
part of a stage that keeps something, and shrinks with those that free some.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from meshweave.ir.analysis.edges import exposed_buffers
from meshweave.ir.program import Program
from meshweave.ir.program.expressions import evaluate
from meshweave.ir.program.ops import Call, Op

Written = Sequence[tuple[Op, Mapping[str, int]]]

Slot = tuple[str, int]
"""A buffer and the number of one of its slots."""


def lifetimes(program: Program, rank: int) -> dict[Slot, list[tuple[int, int]]]:
    """Return the first and last op index of each life of each used scratch or temp slot of `rank`.

    Slots that one-sided ops of other ranks access live throughout, because those accesses may come at any time.
    """
    program = program.expanded
    return _lifetimes(program, rank, list(program.unbound_ops_on_rank(rank)))


def _lifetimes(program: Program, rank: int, ops: Written) -> dict[Slot, list[tuple[int, int]]]:
    """Return the lifetimes from unbound ops: only the slot of a view is evaluated, which is fast in a search."""
    local = {buffer.name for buffer in program.buffers if buffer.kind in ("scratch", "temp")}
    spans: dict[Slot, list[tuple[int, int]]] = {
        (name, slot): [(0, len(ops) - 1)]
        for name in sorted(exposed_buffers(program))
        for slot in range(program.buffer_of[name].slots)
        if name in local and ops and rank in program.mesh_of[program.buffer_of[name].mesh]
    }
    ended: set[Slot] = set()
    for index, (op, env) in enumerate(ops):
        frees = isinstance(op, Call) and op.part == "free"
        for _, view in op.accesses():
            if view.rank is None and view.buffer in local:
                key = view.buffer, evaluate(view.slot, env)
                lives = spans.setdefault(key, [])
                if not lives or key in ended:
                    lives.append((index, index))
                    ended.discard(key)
                else:
                    lives[-1] = lives[-1][0], max(index, lives[-1][1])
                if frees:
                    ended.add(key)
    return spans


def peak_bytes(program: Program, rank: int) -> int:
    """Return the most bytes that `rank` holds at once in program order, stashes of calls included."""
    program = program.expanded
    resident = sum(
        buffer.slots * program.buffer_bytes(buffer.name, rank)
        for buffer in program.buffers
        if buffer.kind in ("input", "output") and rank in program.mesh_of[buffer.mesh]
    )
    ops = list(program.unbound_ops_on_rank(rank))
    changes = list(_stash_changes(ops))
    for (name, _), lives in _lifetimes(program, rank, ops).items():
        size = program.buffer_bytes(name, rank)
        for first, last in lives:
            changes += [(first, size), (last + 1, -size)]
    return _peak(changes, resident)


def peak_stash_bytes(program: Program, rank: int) -> int:
    """Return the most bytes that the stashes of `rank` have at once in program order: its activation memory."""
    return _peak(_stash_changes(list(program.expanded.unbound_ops_on_rank(rank))), 0)


def _stash_changes(ops: Written) -> Iterator[tuple[int, int]]:
    """Yield (op index, bytes) for each change of the stashes.

    What a part keeps is there while it runs, and what it frees is free for the op after it. An input gradient
    makes what it keeps as it frees what it has used, which counts as one change, at its end.
    """
    sizes: dict[tuple[object, ...], int] = defaultdict(int)
    for index, (op, env) in enumerate(ops):
        if not isinstance(op, Call) or not op.stash:
            continue
        stash = (op.stash, *(evaluate(arg, env) for arg in op.args))
        added, freed = evaluate(op.stash_bytes, env), evaluate(op.freed_bytes, env)
        if op.part == "forward":
            yield index, -sizes[stash]
            sizes[stash] = 0
        sizes[stash] += added
        yield index + (op.part == "input_grad"), added
        freed = sizes[stash] if op.part == "weight_grad" else min(freed, sizes[stash])
        sizes[stash] -= freed
        yield index + 1, -freed


def _peak(changes: Iterable[tuple[int, int]], level: int) -> int:
    """Return the highest level that changes at op indices reach, from `level` on."""
    total: dict[int, int] = defaultdict(int)
    for index, change in changes:
        total[index] += change
    peak = level
    for index in sorted(total):
        level += total[index]
        peak = max(peak, level)
    return peak
