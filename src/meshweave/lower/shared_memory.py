"""Lowering of one-sided ops for ranks that share memory: no rank writes a buffer of another, sums have one order.

Four rewrites turn a program of gets, puts and accumulates into one for memory that all ranks reach equally fast:

1. A get whose target is only read becomes a read of the source (`read_in_place`), any other a copy.
2. A put or accumulate becomes a read by the owner. The product stays in scratch of the rank that computed it;
   after a fence the owner copies the first term and adds the others in the order of ranks. So a sum has the same
   bits in every run, and no update needs a lock.
3. The parts of input and output buffers that other ranks read are copied into scratch first. The caller's own
   tensors are then local: an executor may use them in place as operands and results. Such a copy lies at the same
   place on every owner, so that a product reads it with the same strides and alignment from whomever.
4. A fence is left out if no write to memory that other ranks read precedes it. All ops share one lane, because
   no communication remains to overlap.
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

    Raises:
        ProgramError: a fence joins some ranks only, or ranks have different numbers of fences; a view is no box;
            puts or accumulates are in several epochs or have a source that no product of their rank wrote; or an
            op other than a product, add or copy reads remotely. No universal product has any of these.
    """
    program = read_in_place(program)
    epochs, buffers = _reduced_by_owners(program, _epochs(program))
    epochs, published = _copied_to_scratch(program, epochs)
    lowered = replace(
        program,
        buffers=(*program.buffers, *buffers, *published),
        lanes=(Lane(LANE),),
        body=tuple(On((rank,), (op,)) for epoch in epochs for rank, ops in epoch.items() for op in ops),
    )
    used = {view.buffer for op in lowered.ops() for _, view in op.accesses()}
    kept = tuple(buffer for buffer in lowered.buffers if buffer.kind != "scratch" or buffer.name in used)
    return replace(
        lowered, buffers=kept, body=tuple(_with_fences(program.ranks, epochs, exposed_buffers(lowered)))
    )


def _epochs(program: Program) -> list[Epoch]:
    """Return the ops of each epoch: the ops between two fences of all ranks."""
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


def _with_fences(
    ranks: tuple[int, ...], epochs: Sequence[Epoch], exposed: frozenset[str]
) -> Iterator[Statement]:
    """Yield the statements, with a fence between epochs after a write to an exposed buffer."""
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
class _OwedTerm:
    """A part of a product of `rank` that the owner of `out`, a view of the owner's memory, adds to it.

    `product` is the index of the product among the outgoing products of `rank`, `src` the part in scratch.
    `is_local`: whether `rank` is the owner and the part is the whole product.
    """

    rank: int
    product: int
    src: View
    out: View
    is_local: bool = False


@dataclass
class _OutgoingProducts:
    """The products of a rank that it puts or accumulates, each kept in a scratch slot of its own."""

    rank: int
    slot_of: dict[tuple[str, int], int] = field(default_factory=dict)
    """The index of the product that (buffer, slot) holds now."""
    targets: list[View] = field(default_factory=list)
    """The view that each product was written to in the original program."""
    direct: dict[int, View] = field(default_factory=dict)
    """The view of the rank's own result that a product is written to directly, by index of the product."""

    def product(self, view: View) -> int:
        """Return the index in `targets` of the product that wrote `view`. Raises ProgramError where none did."""
        assert isinstance(view.slot, int)
        product = self.slot_of.get((view.buffer, view.slot))
        if product is None:
            raise ProgramError(
                "gives away what no product of this rank is", rank=self.rank, buffer=view.buffer
            )
        return product

    def renamed(self, view: View) -> View:
        """Return the same view in the scratch buffer of outgoing products."""
        return replace(view, buffer=_outgoing_buffer(view.buffer), slot=self.product(view))


def _outgoing_buffer(buffer: str) -> str:
    return f"{buffer}_given"


def _reduced_by_owners(program: Program, epochs: Sequence[Epoch]) -> tuple[list[Epoch], list[Buffer]]:
    """Return the epochs without puts and accumulates, and the new scratch buffers.

    An epoch that had any is followed by an epoch in which the owners reduce the terms.
    """
    outgoing_of = {rank: _OutgoingProducts(rank) for rank in program.ranks}
    updates = (
        op for epoch in epochs for ops in epoch.values() for op in ops if isinstance(op, (Accumulate, Put))
    )
    names = {op.src.buffer for op in updates}
    summed: list[Epoch] = []
    for number, epoch in enumerate(epochs):
        has_updates = any(isinstance(op, (Accumulate, Put)) for ops in epoch.values() for op in ops)
        if has_updates and any(outgoing.targets for outgoing in outgoing_of.values()):
            raise ProgramError("has accumulates or puts in several epochs")
        terms = {rank: _collect_terms(outgoing_of[rank], epoch[rank], names) for rank in program.ranks}
        by_owner: dict[int, list[_OwedTerm]] = defaultdict(list)
        for rank in program.ranks:
            for owner, term in terms[rank]:
                by_owner[owner].append(term)
        tiled = {
            rank
            for rank, owned in by_owner.items()
            if _is_tiled(owned) and not _is_begun(owned, (*summed, epoch), rank)
        }
        for rank in tiled:
            outgoing_of[rank].direct.update(
                (term.product, term.out) for term in by_owner[rank] if term.is_local
            )
        sums: Epoch = {rank: [] for rank in program.ranks}
        kept: Epoch = {rank: [] for rank in program.ranks}
        for rank, ops in epoch.items():
            kept[rank] = list(_without_updates(outgoing_of[rank], ops, names))
        for owner, owned in by_owner.items():
            sums[owner] = list(_reduce_terms(outgoing_of[owner], owned, owner in tiled))
            later = [op.out for ops in epochs[number + 1 :] for op in ops[owner] if isinstance(op, Copy)]
            if owner in tiled and _cover_buffer(program, owner, [*(term.out for term in owned), *later]):
                for earlier in (*summed, kept):
                    buffer, ops = owned[0].out.buffer, earlier[owner]
                    earlier[owner] = [o for o in ops if not isinstance(o, Zero) or o.out.buffer != buffer]
        for outgoing in outgoing_of.values():
            outgoing.slot_of.clear()
        summed.append(kept)
        if by_owner:
            summed.append(sums)
    count = max(len(outgoing.targets) for outgoing in outgoing_of.values())
    buffers = [
        replace(program.buffer_of[name], name=_outgoing_buffer(name), slots=max(count, 1))
        for name in sorted(names)
    ]
    return summed, buffers


def _collect_terms(
    outgoing: _OutgoingProducts, ops: Sequence[Op], names: set[str]
) -> list[tuple[int, _OwedTerm]]:
    """Return (owner, term) for every put and accumulate of a rank in an epoch."""
    terms: list[tuple[int, _OwedTerm]] = []
    slot_of: dict[tuple[str, int], int] = {}
    for op in ops:
        if isinstance(op, Matmul) and op.out.buffer in names:
            assert isinstance(op.out.slot, int)
            slot_of[op.out.buffer, op.out.slot] = len(outgoing.targets)
            outgoing.targets.append(op.out)
        if isinstance(op, (Accumulate, Put)):
            outgoing.slot_of = slot_of
            owner = outgoing.rank if op.out.rank is None else op.out.rank
            assert isinstance(owner, int)
            product = outgoing.product(op.src)
            is_local = owner == outgoing.rank and op.src == outgoing.targets[product]
            term = _OwedTerm(
                outgoing.rank, product, outgoing.renamed(op.src), replace(op.out, rank=None), is_local
            )
            terms.append((owner, term))
    return terms


def _is_tiled(terms: Sequence[_OwedTerm]) -> bool:
    """Return whether the boxes of an owner's terms are pairwise equal or disjoint.

    Then the first term of each box can be copied instead of added, and the owner's own products can be written to
    the result directly.
    """
    boxes = {_box(term.out): term.out for term in terms}
    return not any(a.overlaps(b) for a, b in combinations(boxes.values(), 2))


def _is_begun(terms: Sequence[_OwedTerm], epochs: Iterable[Epoch], owner: int) -> bool:
    """Return whether `owner` has written more than zeros where terms are added: none may be copied there."""
    ops = (op for epoch in epochs for op in epoch[owner] if not isinstance(op, Zero))
    own = [view for op in ops for view in op.writes if view.rank is None]
    return any(view.overlaps(term.out) for view in own for term in terms)


def _reduce_terms(owner: _OutgoingProducts, terms: Sequence[_OwedTerm], is_tiled: bool) -> Iterator[Op]:
    """Yield the copies and additions of an owner: its own products first, then those of other ranks in order."""
    begun: set[Box] = set()
    for term in sorted(terms, key=lambda term: (term.rank != owner.rank, term.rank, term.product)):
        box = _box(term.out)
        if term.rank == owner.rank and term.product in owner.direct:
            begun.add(box)
            continue
        src = term.src if term.rank == owner.rank else replace(term.src, rank=term.rank)
        kind = Copy if is_tiled and box not in begun else Add
        yield kind(out=term.out, src=src, lane=LANE)
        begun.add(box)


def _without_updates(outgoing: _OutgoingProducts, ops: Sequence[Op], names: set[str]) -> Iterator[Op]:
    """Yield the ops of a rank without puts and accumulates.

    Outgoing products are written to scratch, where their owner reads them, or directly to the result.
    """
    slot_of: dict[tuple[str, int], int] = {}
    outgoing.slot_of = slot_of
    count = sum(isinstance(op, Matmul) and op.out.buffer in names for op in ops)
    product = len(outgoing.targets) - count
    begun: set[Box] = set()
    for op in ops:
        if isinstance(op, (Accumulate, Put)):
            continue
        if isinstance(op, Matmul) and op.out.buffer in names:
            assert isinstance(op.out.slot, int)
            slot_of[op.out.buffer, op.out.slot] = product
            target = outgoing.direct.get(product)
            if target is None:
                yield replace(op, out=outgoing.renamed(op.out))
            else:
                yield replace(op, out=target, accumulate=int(_box(target) in begun))
                begun.add(_box(target))
            product += 1
            continue
        if isinstance(op, Copy) and op.src.buffer in names:
            op = replace(op, src=outgoing.renamed(op.src))
        yield op


def _cover_buffer(program: Program, rank: int, views: Sequence[View]) -> bool:
    """Return whether the views of the first view's buffer cover it, with no overlap between different boxes."""
    boxes = {_box(view): view for view in views if view.buffer == views[0].buffer}
    if any(a.overlaps(b) for a, b in combinations(boxes.values(), 2)):
        return False
    shape = program.local_shape(views[0].buffer, rank)
    return sum(view.num_elements for view in boxes.values()) == math.prod(shape)


# --- parts of buffers of the caller that others read ------------------------------------------------------------


def _copied_to_scratch(program: Program, epochs: Sequence[Epoch]) -> tuple[list[Epoch], list[Buffer]]:
    """Return the epochs with remote reads of inputs and outputs redirected to copies in scratch, and that scratch.

    A copy is made one epoch before its first reader. Inputs have one copy for all epochs.
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
        name = names[buffer, start] = f"{buffer}_shared" + ("" if buffer in inputs else f"_{start}")
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
