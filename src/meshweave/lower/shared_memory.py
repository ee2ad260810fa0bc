"""One-sided ops for ranks that share memory: nobody writes into a buffer of another rank, and sums have one order.

Four rewrites turn a program of gets, puts and accumulates into one for memory that is as near to every rank:

1. A get whose target is only read becomes a read of the source (`read_in_place`), any other a copy.
2. A put or accumulate becomes a read by the owner. The product stays in scratch of the rank that computed it;
   after a fence the owner copies the first term and adds the others in the order of ranks. So a sum has the same
   bits in every run, and no update needs a lock.
3. Of an input or output buffer, the part that other ranks read is copied into scratch first. The caller's own
   tensors are then local: an executor may read operands and write the result where the caller has them.
4. A fence that no write to memory read by other ranks stands before is left out, and all ops share one lane, for
   nothing is left to overlap.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from meshweave.base.errors import ProgramError
from meshweave.ir.analysis.edges import exposed_buffers
from meshweave.ir.program import Buffer, Lane, On, Program, Statement
from meshweave.ir.program.ops import Accumulate, Add, Copy, Fence, Get, Matmul, Op, Put, Zero
from meshweave.ir.program.views import Range, View
from meshweave.lower.in_place import read_in_place

LANE = "compute"

Box = tuple[tuple[int, int], ...]
"""[start, stop) of each dim of a buffer."""

Epoch = dict[int, list[Op]]
"""The ops of each rank between two fences."""


def lower_to_shared_memory(program: Program) -> Program:
    """Return the program for ranks that share memory, written out per rank; see the module docstring.

    Raises ProgramError for what no universal product has: fences of some ranks only, views that are no boxes, and
    results that are given away without a product that made them.
    """
    program = read_in_place(program)
    epochs, buffers = _summed_by_owners(program, _epochs(program))
    epochs, published = _published(program, epochs)
    lowered = replace(
        program,
        buffers=(*program.buffers, *buffers, *published),
        lanes=(Lane(LANE),),
        body=tuple(On((rank,), (op,)) for epoch in epochs for rank, ops in epoch.items() for op in ops),
    )
    used = {view.buffer for op in lowered.ops() for _, view in op.accesses()}
    kept = tuple(buffer for buffer in lowered.buffers if buffer.kind != "scratch" or buffer.name in used)
    return replace(
        lowered, buffers=kept, body=tuple(_fenced(program.ranks, epochs, exposed_buffers(lowered)))
    )


def _epochs(program: Program) -> list[Epoch]:
    """Return the ops between the fences of all ranks."""
    count = 1 + max(sum(isinstance(bound.op, Fence) for bound in ops) for ops in program.ops_by_rank.values())
    epochs: list[Epoch] = [{rank: [] for rank in program.ranks} for _ in range(count)]
    for rank, ops in program.ops_by_rank.items():
        number = 0
        for bound in ops:
            if isinstance(bound.op, Fence):
                if tuple(sorted(program.group(bound.op.over, rank))) != program.ranks:
                    raise ProgramError("is a fence of some ranks only", op=bound.label, rank=rank)
                number += 1
            else:
                op = bound.op
                if isinstance(op, Get):
                    op = Copy(out=op.out, src=op.src, lane=LANE, name=op.name)
                epochs[number][rank].append(replace(op, lane=LANE))
        if number != count - 1:
            raise ProgramError(f"has {number} fences, another rank {count - 1}", rank=rank)
    return epochs


def _fenced(ranks: tuple[int, ...], epochs: Sequence[Epoch], exposed: frozenset[str]) -> Iterator[Statement]:
    """Yield the statements with a fence wherever something was written that other ranks read afterwards."""
    is_pending = False
    for epoch in epochs:
        if is_pending:
            yield On(ranks, (Fence(over=ranks, lane=LANE),))
            is_pending = False
        for rank, ops in epoch.items():
            for op in ops:
                yield On((rank,), (op,))
                is_pending = is_pending or any(view.buffer in exposed for view in op.writes)


# --- sums by owners ---------------------------------------------------------------------------------------------


@dataclass
class _Term:
    """A part of a product that belongs into `out`, a local view of its owner; `product` is its place among the
    products that `rank` gives away."""

    rank: int
    product: int
    src: View
    out: View
    stays: bool = False
    """Whether the product is this part and nothing else, and the rank that computed it is the owner."""


@dataclass
class _Giver:
    """The products that a rank gives away, each kept in a scratch slot of its own."""

    rank: int
    slot_of: dict[tuple[str, int], int] = field(default_factory=dict)
    """The product that is in (buffer, slot) now."""
    targets: list[View] = field(default_factory=list)
    """Where each product was written."""
    direct: dict[int, View] = field(default_factory=dict)
    """Products that are written into the rank's own part of the result, and where."""

    def product(self, view: View) -> int:
        assert isinstance(view.slot, int)
        product = self.slot_of.get((view.buffer, view.slot))
        if product is None:
            raise ProgramError(
                "gives away what no product of this rank is", rank=self.rank, buffer=view.buffer
            )
        return product

    def renamed(self, view: View) -> View:
        """Return the view in the scratch of products that are given away."""
        return replace(view, buffer=_given(view.buffer), slot=self.product(view))


def _given(buffer: str) -> str:
    return f"{buffer}_given"


def _summed_by_owners(program: Program, epochs: Sequence[Epoch]) -> tuple[list[Epoch], list[Buffer]]:
    """Return the epochs with an epoch of sums after each one in which something was given, and the new buffers."""
    givers = {rank: _Giver(rank) for rank in program.ranks}
    given = (
        op for epoch in epochs for ops in epoch.values() for op in ops if isinstance(op, (Accumulate, Put))
    )
    names = {op.src.buffer for op in given}
    summed: list[Epoch] = []
    for number, epoch in enumerate(epochs):
        if any(giver.targets for giver in givers.values()) and _gives(epoch):
            raise ProgramError("has accumulates or puts in several epochs")
        terms = {rank: _collect_terms(givers[rank], epoch[rank], names) for rank in program.ranks}
        by_owner: dict[int, list[_Term]] = defaultdict(list)
        for rank in program.ranks:
            for owner, term in terms[rank]:
                by_owner[owner].append(term)
        tiled = {rank for rank in by_owner if _is_tiled(by_owner[rank])}
        for rank in tiled:
            givers[rank].direct.update((term.product, term.out) for term in by_owner[rank] if term.stays)
        sums: Epoch = {rank: [] for rank in program.ranks}
        kept: Epoch = {rank: [] for rank in program.ranks}
        for rank, ops in epoch.items():
            kept[rank] = list(_without_gives(givers[rank], ops, names))
        for owner, owned in by_owner.items():
            sums[owner] = list(_sums(givers[owner], owned, owner in tiled))
            later = [op.out for ops in epochs[number + 1 :] for op in ops[owner] if isinstance(op, Copy)]
            if owner in tiled and _fill(program, owner, [*(term.out for term in owned), *later]):
                for earlier in (*summed, kept):
                    earlier[owner] = [op for op in earlier[owner] if not _clears(op, owned[0].out.buffer)]
        for giver in givers.values():
            giver.slot_of.clear()
        summed.append(kept)
        if by_owner:
            summed.append(sums)
    count = max(len(giver.targets) for giver in givers.values())
    buffers = [
        replace(program.buffer_of[name], name=_given(name), slots=max(count, 1)) for name in sorted(names)
    ]
    return summed, buffers


def _gives(epoch: Epoch) -> bool:
    return any(isinstance(op, (Accumulate, Put)) for ops in epoch.values() for op in ops)


def _collect_terms(giver: _Giver, ops: Sequence[Op], names: set[str]) -> list[tuple[int, _Term]]:
    """Return (owner, term) for everything that a rank gives away in an epoch."""
    terms: list[tuple[int, _Term]] = []
    slot_of: dict[tuple[str, int], int] = {}
    for op in ops:
        if isinstance(op, Matmul) and op.out.buffer in names:
            assert isinstance(op.out.slot, int)
            slot_of[op.out.buffer, op.out.slot] = len(giver.targets)
            giver.targets.append(op.out)
        if isinstance(op, (Accumulate, Put)):
            giver.slot_of = slot_of
            owner = giver.rank if op.out.rank is None else op.out.rank
            assert isinstance(owner, int)
            product = giver.product(op.src)
            stays = owner == giver.rank and op.src == giver.targets[product]
            term = _Term(giver.rank, product, giver.renamed(op.src), replace(op.out, rank=None), stays)
            terms.append((owner, term))
    return terms


def _is_tiled(terms: Sequence[_Term]) -> bool:
    """Return whether the terms of an owner fall into boxes that are equal or disjoint. Then the first term of each
    box can be copied instead of added, and the owner's own products can be written where they belong."""
    boxes = {_box(term.out): term.out for term in terms}
    return not any(a.overlaps(b) for a, b in combinations(boxes.values(), 2))


def _sums(owner: _Giver, terms: Sequence[_Term], is_tiled: bool) -> Iterator[Op]:
    """Yield what an owner adds up: its own products first, then those of the others in the order of ranks."""
    begun: set[Box] = set()
    for term in sorted(terms, key=lambda term: (term.rank != owner.rank, term.rank, term.product)):
        box = _box(term.out)
        if term.rank == owner.rank and term.product in owner.direct:
            begun.add(box)
            continue
        src = term.src if term.rank == owner.rank else replace(term.src, rank=term.rank)
        if is_tiled and box not in begun:
            yield Copy(out=term.out, src=src, lane=LANE)
        else:
            yield Add(out=term.out, src=src, lane=LANE)
        begun.add(box)


def _without_gives(giver: _Giver, ops: Sequence[Op], names: set[str]) -> Iterator[Op]:
    """Yield the ops of a rank with products where the owner of their sum, or the sum itself, finds them."""
    slot_of: dict[tuple[str, int], int] = {}
    giver.slot_of = slot_of
    count = sum(isinstance(op, Matmul) and op.out.buffer in names for op in ops)
    product = len(giver.targets) - count
    begun: set[Box] = set()
    for op in ops:
        if isinstance(op, (Accumulate, Put)):
            continue
        if isinstance(op, Matmul) and op.out.buffer in names:
            assert isinstance(op.out.slot, int)
            slot_of[op.out.buffer, op.out.slot] = product
            target = giver.direct.get(product)
            if target is None:
                yield replace(op, out=giver.renamed(op.out))
            else:
                yield replace(op, out=target, accumulate=int(_box(target) in begun))
                begun.add(_box(target))
            product += 1
            continue
        if isinstance(op, Copy) and op.src.buffer in names:
            op = replace(op, src=giver.renamed(op.src))
        yield op


def _fill(program: Program, rank: int, views: Sequence[View]) -> bool:
    """Return whether boxes, of which no two overlap unless they are equal, are all of the first one's buffer."""
    boxes = {_box(view): view for view in views if view.buffer == views[0].buffer}
    if any(a.overlaps(b) for a, b in combinations(boxes.values(), 2)):
        return False
    shape = program.local_shape(views[0].buffer, rank)
    return sum(view.num_elements for view in boxes.values()) == math.prod(shape)


def _clears(op: Op, buffer: str) -> bool:
    return isinstance(op, Zero) and op.out.buffer == buffer


# --- parts of buffers of the caller that others read ------------------------------------------------------------


def _published(program: Program, epochs: Sequence[Epoch]) -> tuple[list[Epoch], list[Buffer]]:
    """Return the epochs in which remote reads of inputs and outputs are of copies in scratch, made an epoch
    earlier, and these scratch buffers. Inputs have one copy for all epochs."""
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
    origins: dict[tuple[str, int, int], tuple[int, ...]] = {}
    buffers = []
    for (buffer, start), of_owner in sorted(boxes.items(), key=lambda entry: (entry[0][1], entry[0][0])):
        name = names[buffer, start] = f"{buffer}_shared" + ("" if buffer in inputs else f"_{start}")
        shape = (0,) * len(next(iter(of_owner.values())).copy().pop())
        for owner, parts in sorted(of_owner.items()):
            bounds = _bounds(parts)
            origins[buffer, start, owner] = tuple(lo for lo, _ in bounds)
            shape = tuple(max(size, hi - lo) for size, (lo, hi) in zip(shape, bounds, strict=True))
            for part in _disjoint(parts):
                src = _view(buffer, part)
                out = _moved(src, name, origins[buffer, start, owner])
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
        for ops in epoch.values():
            for at, op in enumerate(ops):
                changes = {}
                for operand in ("a", "b", "src"):
                    read: View | None = getattr(op, operand, None)
                    if read is None or not isinstance(read.rank, int) or read.buffer not in callers:
                        continue
                    start = first.get(read.buffer, number)
                    moved = _moved(read, names[read.buffer, start], origins[read.buffer, start, read.rank])
                    changes[operand] = replace(moved, rank=read.rank)
                if changes:
                    ops[at] = replace(op, **changes)  # type: ignore[arg-type]
    return listed, buffers


def _remote_reads(epoch: Epoch) -> Iterator[View]:
    for rank, ops in epoch.items():
        for op in ops:
            for view in op.reads:
                if view.rank is not None:
                    if view.rank == rank or not isinstance(op, (Matmul, Add, Copy)):
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


def _moved(view: View, buffer: str, origin: tuple[int, ...]) -> View:
    """Return the local view of the same box in a buffer that begins at `origin`."""
    box = tuple((lo - first, hi - first) for (lo, hi), first in zip(_box(view), origin, strict=True))
    return _view(buffer, box)


def _bounds(boxes: Iterable[Box]) -> Box:
    """Return the least box that all are in."""
    return tuple(
        (min(lo for lo, _ in spans), max(hi for _, hi in spans)) for spans in zip(*boxes, strict=True)
    )


def _disjoint(boxes: set[Box]) -> list[Box]:
    """Return the boxes themselves where no two overlap, else the one that they are in."""
    views = [_view("", box) for box in sorted(boxes)]
    if any(a.overlaps(b) for a, b in combinations(views, 2)):
        return [_bounds(boxes)]
    return sorted(boxes)
