"""Parts of inputs and outputs that other ranks read, copied into scratch before: a part of `shared_memory`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from meshweave.base.errors import ProgramError
from meshweave.ir.program import Buffer, Program
from meshweave.ir.program.ops import Add, Copy, Matmul, Op
from meshweave.ir.program.renaming import fresh_name
from meshweave.ir.program.views import Range, View

LANE = "compute"
"""The one lane of a program for shared memory."""

Box = tuple[tuple[int, int], ...]
"""[start, stop) of each dim of a buffer."""

Epoch = dict[int, list[Op]]
"""The ops of each rank between two fences."""


def copied_to_scratch(program: Program, epochs: Sequence[Epoch]) -> tuple[list[Epoch], list[Buffer]]:
    """Return (epochs in which other ranks read copies of inputs and outputs, the scratch buffers of the copies).

    An epoch is the ops of each rank between two fences. If there is any such read, the result has one epoch more
    than `epochs`, at the front: a copy is made by its owner one epoch before the first read of it. Inputs are
    copied once for all epochs, outputs for each epoch that reads them.
    """
    boxes: dict[tuple[str, int], dict[int, set[Box]]] = defaultdict(lambda: defaultdict(set))
    first: dict[str, int] = {}
    callers = {b.name for b in program.buffers if b.kind in ("input", "output")}
    inputs = {b.name for b in program.buffers if b.kind == "input"}
    for number, epoch in enumerate(epochs):
        for view in _remote_reads(epoch):
            if view.buffer in callers:
                assert isinstance(view.rank, int)
                start = first.setdefault(view.buffer, number) if view.buffer in inputs else number
                boxes[view.buffer, start][view.rank].add(_box(view))
    if not boxes:
        return list(epochs), []
    listed: list[Epoch] = [{rank: [] for rank in program.ranks}, *({**epoch} for epoch in epochs)]
    names: dict[tuple[str, int], str] = {}
    origins: dict[tuple[str, int], tuple[int, ...]] = {}
    buffers = []
    for (buffer, start), of_owner in sorted(boxes.items(), key=lambda entry: (entry[0][1], entry[0][0])):
        name = f"{buffer}_shared" + ("" if buffer in inputs else f"_{start}")
        name = names[buffer, start] = fresh_name(name, program.names)
        bounds = _bounding_box(box for parts in of_owner.values() for box in parts)
        origin = origins[buffer, start] = tuple(lo for lo, _ in bounds)
        shape = tuple(hi - lo for lo, hi in bounds)
        for owner, parts in sorted(of_owner.items()):
            for part in _disjoint_boxes(parts):
                src = _view(buffer, part)
                out = _rebased(src, name, origin)
                listed[start][owner] = [*listed[start][owner], Copy(out=out, src=src, lane=LANE)]
        buffers.append(
            replace(
                program.buffer_of[buffer],
                name=name,
                kind="scratch",
                tensor=None,
                layout=None,
                shape=shape,
                slots=1,
            )
        )
    for number, epoch in enumerate(listed[1:]):
        for rank, ops in epoch.items():
            for at, op in enumerate(ops):
                changes = {}
                for operand in ("a", "b", "src"):
                    read: View | None = getattr(op, operand, None)
                    if read is None or not isinstance(read.rank, int) or read.buffer not in callers:
                        continue
                    start = first.get(read.buffer, number)
                    moved = _rebased(read, names[read.buffer, start], origins[read.buffer, start])
                    changes[operand] = replace(moved, rank=None if read.rank == rank else read.rank)
                if changes:
                    ops[at] = replace(op, **changes)  # type: ignore[arg-type]
    return listed, buffers


def _remote_reads(epoch: Epoch) -> Iterator[View]:
    """Yield the views that are read under a rank's number, which may be the reader's own."""
    for rank, ops in epoch.items():
        for op in ops:
            for view in op.reads:
                if view.rank is not None:
                    if not isinstance(op, (Matmul, Add, Copy)):
                        raise ProgramError(f"has a {op.kind} that shared memory has no form for", rank=rank)
                    yield view


def _box(view: View) -> Box:
    box = []
    for selector in view.selectors:
        if not isinstance(selector, Range):
            raise ProgramError(f"is read or written in blocks, {selector}: not a box", buffer=view.buffer)
        assert isinstance(selector.start, int) and isinstance(selector.stop, int)
        box.append((selector.start, selector.stop))
    return tuple(box)


def _view(buffer: str, box: Box) -> View:
    return View(buffer, tuple(Range(lo, hi) for lo, hi in box), 0)


def _rebased(view: View, buffer: str, origin: tuple[int, ...]) -> View:
    """Return the local view of the same box in a buffer that begins at `origin`."""
    box = tuple((lo - first, hi - first) for (lo, hi), first in zip(_box(view), origin, strict=True))
    return _view(buffer, box)


def _bounding_box(boxes: Iterable[Box]) -> Box:
    """Return the smallest box that contains all boxes."""
    return tuple(
        (min(lo for lo, _ in spans), max(hi for _, hi in spans)) for spans in zip(*boxes, strict=True)
    )


def _disjoint_boxes(boxes: set[Box]) -> list[Box]:
    """Return the boxes themselves if no two overlap, else their bounding box."""
    views = [_view("", box) for box in sorted(boxes)]
    if any(a.overlaps(b) for a, b in combinations(views, 2)):
        return [_bounding_box(boxes)]
    return sorted(boxes)
