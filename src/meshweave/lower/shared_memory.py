"""Lowering of one-sided ops for ranks that share memory: no rank writes a buffer of another, sums have one order.

Four rewrites turn a program of gets, puts and accumulates into one for memory that all ranks reach equally fast:

1. A get whose target is only read becomes a read of the source (`read_in_place`), any other a copy.
2. A put or accumulate becomes a read by the owner. The product stays in scratch of the rank that computed it;
   after a fence the owner copies what is put and the first term of a sum, and adds the others in the order of
   ranks. So a sum has the same bits in every run, and no update needs a lock.
3. The parts of input and output buffers that other ranks read are copied into scratch first. The caller's own
   tensors are then local: an executor may use them in place as operands and results. Such a copy lies at the same
   place on every owner, so that a product reads it with the same strides and alignment from whomever.
4. A fence is left out unless a write to memory that other ranks read precedes it, or one follows their reads.
   All ops share one lane, because no communication remains to overlap.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from meshweave.base.errors import ProgramError
from meshweave.ir.analysis.edges import exposed_buffers
from meshweave.ir.program import BoundOp, Buffer, Lane, On, Program, Statement
from meshweave.ir.program.expressions import Index
from meshweave.ir.program.ops import Accumulate, Add, Copy, Fence, Get, Matmul, Op, Put, Zero
from meshweave.ir.program.renaming import fresh_name
from meshweave.ir.program.views import View
from meshweave.lower.in_place import read_in_place
from meshweave.lower.shared_parts import LANE, Epoch, copied_to_scratch


def lower_to_shared_memory(program: Program) -> Program:
    """Return the program for ranks that share memory, written out per rank; see the module docstring.

    Raises:
        ProgramError: a fence joins some ranks only, or ranks have different numbers of fences; an input or output
            that others read is read in blocks; puts or accumulates are in several epochs; what they give away is
            not one product of their rank, or is used otherwise; an accumulate is no sum; an op releases tiles or
            writes remotely itself; or one other than a product, add or copy reads remotely. No universal product
            has any of these.
    """
    program = read_in_place(program)
    epochs, buffers = _reduced_by_owners(program, _epochs(program))
    epochs, published = copied_to_scratch(program, epochs)
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
                _check_writes(bound, rank)
                if isinstance(op, Get):
                    op = Copy(out=op.out, src=op.src, lane=LANE, name=op.name)
                epochs[number][rank].append(replace(op, lane=LANE))
        if number != count - 1:
            raise ProgramError(f"has {number} fences, another rank {count - 1}", rank=rank)
    return epochs


def _check_writes(bound: BoundOp, rank: int) -> None:
    """Raise ProgramError for an op whose writes have no form here: released ones, remote ones, other sums."""
    op = bound.op
    if getattr(op, "release", None) is not None:
        raise ProgramError("releases its result: shared memory has fences alone", op=bound.label, rank=rank)
    if isinstance(op, Accumulate) and op.op != "sum":
        raise ProgramError(f"accumulates by '{op.op}': an owner adds", op=bound.label, rank=rank)
    if not isinstance(op, (Accumulate, Put)) and any(view.rank is not None for view in op.writes):
        raise ProgramError("writes to another rank's memory and is no put", op=bound.label, rank=rank)


def _with_fences(
    ranks: tuple[int, ...], epochs: Sequence[Epoch], exposed: frozenset[str]
) -> Iterator[Statement]:
    """Yield the statements, with a fence after an epoch that writes to an exposed buffer, and before one that does
    so where others have read the buffer since the last fence.
    """
    is_pending, read = False, set[str]()
    for epoch in epochs:
        ops = [(rank, op) for rank, listed in epoch.items() for op in listed]
        written = {view.buffer for _, op in ops for view in op.writes} & exposed
        if is_pending or written & read:
            yield On(ranks, (Fence(over=ranks, lane=LANE),))
            is_pending, read = False, set()
        yield from (On((rank,), (op,)) for rank, op in ops)
        is_pending = is_pending or bool(written)
        read |= {view.buffer for _, op in ops for view in op.reads if view.rank is not None}


# --- sums by owners ---------------------------------------------------------------------------------------------


@dataclass
class _OwedTerm:
    """A part of a product of `rank` that the owner of `out`, a view of the owner's memory, stores or adds there.

    `product` is the index of the product among the outgoing products of `rank`, `src` the part in scratch.
    `adds`: whether it is added. `is_local`: whether `rank` is the owner and the part is the whole product.
    """

    rank: int
    product: int
    src: View
    out: View
    adds: bool
    is_local: bool = False


@dataclass
class _OutgoingProducts:
    """The products of a rank that it puts or accumulates, each kept in a scratch slot of its own.

    `names` has, by the name of the buffer that they were written to, that of their scratch.
    """

    rank: int
    names: Mapping[str, str]
    slot_of: dict[tuple[str, int], int] = field(default_factory=dict)
    """The index of the product that (buffer, slot) holds now."""
    targets: list[View] = field(default_factory=list)
    """The view that each product was written to in the original program."""
    uses: Counter[int] = field(default_factory=Counter)
    """How many puts, accumulates and copies read a product, by its index."""
    direct: dict[int, View] = field(default_factory=dict)
    """The view of the rank's own result that a product is written to directly, by index of the product."""

    def product(self, view: View) -> int:
        """Return the index in `targets` of the product that wrote `view`. Raises ProgramError where none did."""
        assert isinstance(view.slot, int)
        product = self.slot_of.get((view.buffer, view.slot))
        if product is None or not self.targets[product].covers(view):
            raise ProgramError(
                "gives away what no product of this rank is", rank=self.rank, buffer=view.buffer
            )
        return product

    def check_uses(self, op: Op) -> None:
        """Raise ProgramError where an op writes or reads an outgoing product in a way that has no form here."""
        src = op.src if isinstance(op, (Accumulate, Put, Copy)) else None
        for view in (*op.reads, *op.writes):
            made = isinstance(op, Matmul) and view is op.out and not op.accumulate
            if view.buffer in self.names and not made and (view is not src or view.rank is not None):
                raise ProgramError(
                    f"is given away, and a {op.kind} uses it: only products write it, once, and copies read it",
                    rank=self.rank,
                    buffer=view.buffer,
                )

    def renamed(self, view: View) -> View:
        """Return the same view in the scratch buffer of outgoing products."""
        return replace(view, buffer=self.names[view.buffer], slot=self.product(view))


def _reduced_by_owners(program: Program, epochs: Sequence[Epoch]) -> tuple[list[Epoch], list[Buffer]]:
    """Return the epochs without puts and accumulates, and the new scratch buffers.

    An epoch that had any is followed by an epoch in which the owners reduce the terms.
    """
    updates = (
        op for epoch in epochs for ops in epoch.values() for op in ops if isinstance(op, (Accumulate, Put))
    )
    given = sorted({op.src.buffer for op in updates})
    names = {name: fresh_name(f"{name}_given", program.names) for name in given}
    outgoing_of = {rank: _OutgoingProducts(rank, names) for rank in program.ranks}
    summed: list[Epoch] = []
    for number, epoch in enumerate(epochs):
        has_updates = any(isinstance(op, (Accumulate, Put)) for ops in epoch.values() for op in ops)
        if has_updates and any(outgoing.targets for outgoing in outgoing_of.values()):
            raise ProgramError("has accumulates or puts in several epochs")
        terms = {rank: _collect_terms(outgoing_of[rank], epoch[rank]) for rank in program.ranks}
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
                (term.product, term.out)
                for term in by_owner[rank]
                if term.is_local and outgoing_of[rank].uses[term.product] == 1
            )
        sums: Epoch = {rank: [] for rank in program.ranks}
        kept: Epoch = {rank: [] for rank in program.ranks}
        for rank, ops in epoch.items():
            kept[rank] = list(_without_updates(outgoing_of[rank], ops))
        for owner, owned in by_owner.items():
            sums[owner] = list(_reduce_terms(outgoing_of[owner], owned, owner in tiled))
            later = [op.out for ops in epochs[number + 1 :] for op in ops[owner] if isinstance(op, Copy)]
            outs, before = [*(term.out for term in owned), *later], (*summed, kept)
            if (
                owner in tiled
                and _cover_buffer(program, owner, outs)
                and not _is_read(outs[0], before, owner)
            ):
                for earlier in before:
                    whole, ops = _slot_of(outs[0]), earlier[owner]
                    earlier[owner] = [o for o in ops if not isinstance(o, Zero) or _slot_of(o.out) != whole]
        for outgoing in outgoing_of.values():
            outgoing.slot_of.clear()
        summed.append(kept)
        if by_owner:
            summed.append(sums)
    count = max(len(outgoing.targets) for outgoing in outgoing_of.values())
    buffers = [
        replace(program.buffer_of[name], name=scratch, slots=max(count, 1)) for name, scratch in names.items()
    ]
    return summed, buffers


def _collect_terms(outgoing: _OutgoingProducts, ops: Sequence[Op]) -> list[tuple[int, _OwedTerm]]:
    """Return (owner, term) for every put and accumulate of a rank in an epoch."""
    terms: list[tuple[int, _OwedTerm]] = []
    slot_of = outgoing.slot_of
    for op in ops:
        outgoing.check_uses(op)
        if isinstance(op, Matmul) and op.out.buffer in outgoing.names:
            assert isinstance(op.out.slot, int)
            slot_of[op.out.buffer, op.out.slot] = len(outgoing.targets)
            outgoing.targets.append(op.out)
        if isinstance(op, (Accumulate, Put, Copy)) and op.src.buffer in outgoing.names:
            outgoing.uses[outgoing.product(op.src)] += 1
        if isinstance(op, (Accumulate, Put)):
            owner = outgoing.rank if op.out.rank is None else op.out.rank
            assert isinstance(owner, int)
            product = outgoing.product(op.src)
            is_local = owner == outgoing.rank and op.src == outgoing.targets[product]
            src, out, adds = outgoing.renamed(op.src), replace(op.out, rank=None), isinstance(op, Accumulate)
            terms.append((owner, _OwedTerm(outgoing.rank, product, src, out, adds, is_local)))
    return terms


def _is_tiled(terms: Sequence[_OwedTerm]) -> bool:
    """Return whether the views that an owner's terms go to are pairwise equal or disjoint.

    Then the first term of each can be copied instead of added, and the owner's own products can be written to the
    result directly.
    """
    return not any(a.overlaps(b) for a, b in combinations({term.out for term in terms}, 2))


def _is_begun(terms: Sequence[_OwedTerm], epochs: Iterable[Epoch], owner: int) -> bool:
    """Return whether `owner` has written more than zeros where terms are added: none may be copied there."""
    ops = (op for epoch in epochs for op in epoch[owner] if not isinstance(op, Zero))
    own = [view for op in ops for view in op.writes if view.rank is None]
    return any(view.overlaps(term.out) for view in own for term in terms)


def _is_read(out: View, epochs: Iterable[Epoch], owner: int) -> bool:
    """Return whether an op reads the slot of `out` in the memory of `owner`, other than to add to it."""
    ops = ((rank, op) for epoch in epochs for rank, listed in epoch.items() for op in listed)
    reads = ((rank, view) for rank, op in ops for view in op.reads if view not in op.writes)
    here = (view for rank, view in reads if (rank if view.rank is None else view.rank) == owner)
    return any(_slot_of(view) == _slot_of(out) for view in here)


def _reduce_terms(owner: _OutgoingProducts, terms: Sequence[_OwedTerm], is_tiled: bool) -> Iterator[Op]:
    """Yield the copies and additions of an owner: its own products first, then those of other ranks in order."""
    begun = set(owner.direct.values())
    for term in sorted(terms, key=lambda term: (term.rank != owner.rank, term.rank, term.product)):
        if term.rank != owner.rank or term.product not in owner.direct:
            src = term.src if term.rank == owner.rank else replace(term.src, rank=term.rank)
            is_first = is_tiled and term.out not in begun
            yield (Add if term.adds and not is_first else Copy)(out=term.out, src=src, lane=LANE)
            begun.add(term.out)


def _without_updates(outgoing: _OutgoingProducts, ops: Sequence[Op]) -> Iterator[Op]:
    """Yield the ops of a rank without puts and accumulates.

    Outgoing products are written to scratch, where their owner reads them, or directly to the result.
    """
    slot_of: dict[tuple[str, int], int] = {}
    outgoing.slot_of = slot_of
    names = outgoing.names
    count = sum(isinstance(op, Matmul) and op.out.buffer in names for op in ops)
    product = len(outgoing.targets) - count
    begun: set[View] = set()
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
                yield replace(op, out=target, accumulate=int(target in begun))
                begun.add(target)
            product += 1
            continue
        if isinstance(op, Copy) and op.src.buffer in names:
            op = replace(op, src=outgoing.renamed(op.src))
        yield op


def _cover_buffer(program: Program, rank: int, views: Sequence[View]) -> bool:
    """Return whether the views of the first view's slot cover it, with no overlap between different ones."""
    distinct = {view for view in views if _slot_of(view) == _slot_of(views[0])}
    if any(a.overlaps(b) for a, b in combinations(distinct, 2)):
        return False
    shape = program.local_shape(views[0].buffer, rank)
    return sum(view.num_elements for view in distinct) == math.prod(shape)


def _slot_of(view: View) -> tuple[str, Index]:
    return view.buffer, view.slot
