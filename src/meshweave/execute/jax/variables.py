"""Which buffers need no array that ops write into, but are the values that ops make.

An array that is written in parts costs XLA copies, and ties what comes later to all of its parts. Scratch that is
always read as it was last written is that value. A buffer that is written in fixed parts is a list of them.
"""

from __future__ import annotations

from collections import defaultdict

from meshweave.ir.program import Program
from meshweave.ir.program.expressions import number_of
from meshweave.ir.program.ops import READ, Call, Reduce
from meshweave.ir.program.statements import On, When, ops_of, statements_of
from meshweave.ir.program.views import Range, View, selector_bounds

Parts = tuple[int, tuple[tuple[int, int], ...]]
"""A dim, and the [start, stop) of each part of it."""


def rewritten_whole(program: Program) -> set[str]:
    """Return the names of scratch and temporary buffers of which each rank only reads the view last written.

    A plain value can then stand for each slot of such a buffer. All views of the buffer begin at 0 in every dim;
    none is of another rank. Buffers used in a block under a condition or for some ranks only are left out.
    """
    names = {buffer.name for buffer in program.buffers if buffer.kind in ("scratch", "temp")}
    names -= _written_by_some(program)
    for rank in program.ranks:
        last: dict[tuple[str, object], View] = {}
        for op, env in program.unbound_ops_on_rank(rank):
            resolved = program.resolved_ops.get(op, env, rank)
            for mode, view in resolved.accesses():
                if view.buffer not in names:
                    continue
                key = view.buffer, view.slot
                if view.rank is not None or not _begins_at_0(view):
                    names.discard(view.buffer)
                elif mode != READ:
                    last[key] = view
                elif last.get(key) != view:
                    names.discard(view.buffer)
    return names


def written_in_parts(program: Program) -> dict[str, Parts]:
    """Return {name: (dim, (start, stop) of each part)} of buffers that are written in fixed parts of one dim.

    They are read in these parts or whole. The parts are the same on all ranks and cover the dim. Left out are
    inputs, outputs of calls, outputs of reductions to a root for which other ranks have memory too, and buffers
    used in a block under a condition or for some ranks only.
    """
    views: dict[str, set[View]] = defaultdict(set)
    written: dict[str, set[View]] = defaultdict(set)
    left_out = _written_by_some(program) | {b.name for b in program.buffers if b.kind == "input"}
    left_out |= {v.buffer for op in program.ops() if isinstance(op, Call) for v in op.writes}
    first: dict[tuple[object, int], View] = {}
    for rank in program.ranks:
        for bound in program.ops_by_rank[rank]:
            op = bound.op
            if isinstance(op, Reduce) and program.group(op.over, rank)[number_of(op.root)] != rank:
                left_out |= {op.out.buffer} if op.out.num_elements else set()
            for number, (mode, view) in enumerate(bound.op.accesses()):
                if view.buffer in left_out:
                    continue
                (views if mode == READ else written)[view.buffer].add(_in_slot_0(view))
                if first.setdefault((bound.key, number), view) != view:
                    left_out.add(view.buffer)
    return {
        name: parts
        for name in written
        if name not in left_out
        and (parts := _parts(program, name, written[name])) is not None
        and all(part_number(view, parts) is not None or _is_all(program, view) for view in views[name])
    }


def part_number(view: View, parts: Parts) -> int | None:
    """Return the index of the part that a resolved view selects; None if the view is not exactly one part.

    `parts` is (dim, (start, stop) of each part along that dim).
    """
    selector = view.selectors[parts[0]]
    numbers = {bounds: number for number, bounds in enumerate(parts[1])}
    return numbers.get(selector_bounds(selector)) if isinstance(selector, Range) else None


def _in_slot_0(view: View) -> View:
    return View(view.buffer, view.selectors, 0, view.rank)


def _parts(program: Program, name: str, written: set[View]) -> Parts | None:
    shapes = set(program.local_shapes(name))
    if len(shapes) > 1 or any(view.rank is not None for view in written):
        return None
    shape = shapes.pop()
    cut = {dim for view in written for dim, size in enumerate(shape) if view.selectors[dim] != Range(0, size)}
    if len(cut) != 1:
        return None
    dim = cut.pop()
    ranges = {view.selectors[dim] for view in written}
    bounds = sorted(selector_bounds(selector) for selector in ranges if isinstance(selector, Range))
    ends = [0, *(stop for _, stop in bounds)]
    if len(bounds) < len(ranges) or [start for start, _ in bounds] != ends[:-1] or ends[-1] != shape[dim]:
        return None
    return dim, tuple(bounds)


def _is_all(program: Program, view: View) -> bool:
    shape = program.local_shapes(view.buffer)[0]
    return all(view.selectors[dim] == Range(0, size) for dim, size in enumerate(shape))


def _written_by_some(program: Program) -> set[str]:
    """Return the buffers that ops in a block for some ranks alone touch, or in one that depends on a condition."""
    touched: set[str] = set()
    everyone = set(program.ranks)
    for block in statements_of(program.body):
        if isinstance(block, When) or (isinstance(block, On) and _ranks(program, block) != everyone):
            touched |= {view.buffer for op in ops_of(block.body) for _, view in op.accesses()}
    return touched


def _ranks(program: Program, block: On) -> set[int]:
    return set(program.mesh_of[block.where].ranks if isinstance(block.where, str) else block.where)


def _begins_at_0(view: View) -> bool:
    return all(isinstance(selector, Range) and selector.start == 0 for selector in view.selectors)
