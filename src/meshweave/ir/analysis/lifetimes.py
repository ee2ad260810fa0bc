"""Peak memory in program order: a value lives from the write of its slot to its last read, inputs and outputs
throughout.

An op that writes all of a slot and does not read it begins a new life, and so do ops that write the runs of a
vector one after the other, with no read between them; other writes of a part do not. A call of part "free" ends
the life of what it reads; another begins with the next access. What a call of part "in_place" writes has no bytes
of its own: it lies in what the call reads, and keeps that alive. A stash grows with each part of a stage that
keeps something, and shrinks with those that free some.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshweave.ir.analysis.edges import exposed_buffers
from meshweave.ir.program import Program
from meshweave.ir.program.expressions import evaluate
from meshweave.ir.program.ops import READ, WRITE, Call, Op
from meshweave.ir.program.views import Range, View

Written = Sequence[tuple[Op, Mapping[str, int]]]

Slot = tuple[str, int]
"""A buffer and the number of one of its slots."""


LOCAL = frozenset({"scratch", "temp"})
"""Kinds of buffers that are there for a part of a program."""


def lifetimes(
    program: Program, rank: int, kinds: Collection[str] = LOCAL, times: int = 1
) -> dict[Slot, list[tuple[int, int]]]:
    """Return {(buffer, slot): [(first, last) op index of each life]} of the slots of `rank` that ops use.

    A slot is one of the copies of a buffer; a life is from the write of a value to its last read. Indices count
    the ops of the global rank `rank` in program order, includes expanded. Slots that one-sided ops of other ranks
    access live throughout, because those accesses may come at any time.

    Args:
        kinds: the kinds of buffers to list. By default those whose memory can be reused, scratch and temp.
        times: how often the program runs, one run after the other; op indices go on from run to run.
    """
    program = program.expanded
    return _lifetimes(program, rank, times * list(program.unbound_ops_on_rank(rank)), kinds)


def _lifetimes(
    program: Program, rank: int, ops: Written, kinds: Collection[str] = LOCAL
) -> dict[Slot, list[tuple[int, int]]]:
    """Return the lifetimes from unbound ops: only the slot of a view is evaluated, which is fast in a search."""
    local = {buffer.name for buffer in program.buffers if buffer.kind in kinds}
    exposed = exposed_buffers(program)
    spans: dict[Slot, list[tuple[int, int]]] = {
        (name, slot): [(0, len(ops) - 1)]
        for name in sorted(exposed)
        for slot in range(program.buffer_of[name].slots)
        if name in local and ops and rank in program.mesh_of[program.buffer_of[name].mesh]
    }
    shapes = {
        name: program.local_shape(name, rank)
        for name in local
        if name not in exposed and rank in program.mesh_of[program.buffer_of[name].mesh]
    }
    lives_of = {key: _Lives(lives) for key, lives in spans.items()}
    lies_in: dict[Slot, list[Slot]] = {}
    for index, (op, env) in enumerate(ops):
        call = op if isinstance(op, Call) else None
        local_views = ((mode, view) for mode, view in op.accesses() if view.rank is None)
        own = [(mode, view, (view.buffer, evaluate(view.slot, env))) for mode, view in local_views]
        kept = {key for mode, _, key in own if mode != WRITE}
        if call is not None and call.part == "in_place":
            _lay_in(lies_in, [(mode, key) for mode, _, key in own])
        for mode, view, key in own:
            shape = shapes.get(view.buffer)
            is_new = mode == WRITE and key not in kept
            begins = is_new and _is_whole(view, shape)
            if is_new and not begins and shape is not None and len(shape) == 1 and key not in lies_in:
                begins = lives_of.setdefault(key, _Lives()).completes(_run(view, shape[0], env), shape[0])
            for place in lies_in.get(key, [key]):
                if place[0] not in local:
                    continue
                lives = lives_of.setdefault(place, _Lives())
                is_read = mode != WRITE or key in kept or place != key
                lives.access(index, is_read=is_read, begins=begins and place == key)
                lives.is_ended |= call is not None and call.part == "free"
    return {key: lives.spans for key, lives in lives_of.items()}


@dataclass
class _Lives:
    """The lives of a slot so far.

    Attributes:
        spans: first and last op index of each.
        unread: index of the first write of a part since the last read or write of all; -1 for none.
        is_ended: whether the last life has ended.
    """

    spans: list[tuple[int, int]] = field(default_factory=list)
    unread: int = -1
    is_ended: bool = False
    _last_read: int = -1
    _runs: list[tuple[int, int]] = field(default_factory=list)

    def completes(self, run: tuple[int, int], size: int) -> bool:
        """Return whether `run`, with those written since the last read, covers a vector of `size` elements.

        A run is [start, stop) of the vector's elements; `run` is added to those written.
        """
        if self.unread < 0:
            self._runs = []
        self._runs.append(run)
        end = 0
        for start, stop in sorted(self._runs):
            end = max(end, stop) if start <= end else end
        return end >= size

    def access(self, index: int, *, is_read: bool, begins: bool) -> None:
        """Note an access by op `index`; `begins` says that it writes all of the slot."""
        if begins and self.spans and not self.is_ended:
            first = self.spans[-1][0]
            if self.unread < 0:
                self.is_ended = True
            elif self._last_read >= first:  # writes that nothing read belong to the new life
                self.spans[-1] = first, self._last_read
                self.spans.append((self.unread, index))
        if not self.spans or self.is_ended:
            self.spans.append((index, index))
            self.is_ended = False
        else:
            self.spans[-1] = self.spans[-1][0], max(index, self.spans[-1][1])
        if is_read:
            self.unread, self._last_read = -1, index
        elif begins:
            self.unread = -1
        elif self.unread < 0:
            self.unread = index


def _lay_in(lies_in: dict[Slot, list[Slot]], slots: Sequence[tuple[str, Slot]]) -> None:
    """Note that the slots which a call writes lie in those that it reads; `slots` are (mode, slot) of each."""
    ins = [place for mode, key in slots if mode != WRITE for place in lies_in.get(key, [key])]
    for mode, key in slots:
        if mode == WRITE:
            lies_in[key] = ins


def _is_whole(view: View, shape: tuple[int, ...] | None) -> bool:
    """Return whether a view is all of a slot of this shape, as its text says; expressions are not evaluated."""
    return shape is not None and all(
        isinstance(each, Range) and each.start == 0 and (each.stop is None or each.stop == size)
        for each, size in zip(view.selectors, shape, strict=True)
    )


def _run(view: View, size: int, env: Mapping[str, int]) -> tuple[int, int]:
    """Return the first element of a view of a vector, and that after the last."""
    (each,) = view.selectors
    if not isinstance(each, Range):
        return (0, 0)
    return evaluate(each.start, env), size if each.stop is None else evaluate(each.stop, env)


def peak_bytes(program: Program, rank: int) -> int:
    """Return the most bytes that the global rank `rank` holds at once in program order.

    Inputs and outputs count throughout, except buffers that only calls of part "in_place" write. Other slots
    count while they live, and so do stashes of calls.
    """
    program = program.expanded
    ops = list(program.unbound_ops_on_rank(rank))
    in_place = _written_in_place(ops)
    resident = sum(
        buffer.slots * program.buffer_bytes(buffer.name, rank)
        for buffer in program.buffers
        if buffer.kind in ("input", "output") and rank in program.mesh_of[buffer.mesh]
        if buffer.name not in in_place
    )
    changes = list(_stash_changes(ops))
    for (name, _), lives in _lifetimes(program, rank, ops).items():
        size = program.buffer_bytes(name, rank)
        for first, last in lives:
            changes += [(first, size), (last + 1, -size)]
    return _peak(changes, resident)


def _written_in_place(ops: Written) -> set[str]:
    """Return the buffers that nothing writes but calls of part "in_place"."""
    written: dict[bool, set[str]] = {True: set(), False: set()}
    for op, _ in ops:
        is_in_place = isinstance(op, Call) and op.part == "in_place"
        written[is_in_place] |= {view.buffer for mode, view in op.accesses() if mode != READ}
    return written[True] - written[False]


def peak_stash_bytes(program: Program, rank: int) -> int:
    """Return the most bytes that stashes on `rank` have at once in program order: its activation memory."""
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
