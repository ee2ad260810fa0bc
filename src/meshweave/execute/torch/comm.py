"""Communication ops as bound actions over `torch.distributed`.

Messages and ring steps post the receive before the send. A gather or scatter of unequal or empty parts goes as
messages between all pairs, and so does one, or an all-to-all, whose members are not in ascending order; no padding
is sent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshweave.base.errors import BindError, UnsupportedError, require_known
from meshweave.execute.torch.call_order import ENTRY_TAG
from meshweave.execute.torch.views import Action, Order, StridedView, chain_actions, from_wire
from meshweave.execute.torch.wire import Wire
from meshweave.ir.analysis.shapes import part_sizes
from meshweave.ir.program import BoundOp, ops
from meshweave.ir.program.expressions import number_of
from meshweave.ir.program.views import View

RING_TAG = 0  # of ring steps and exchanges; messages have 1 + their own tag

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


def bind_communication(wire: Wire, bound: BoundOp) -> Action:
    """Return a function without arguments that runs a communication op on this rank, and waits for it on a CPU.

    Raises:
        UnsupportedError: the op is one-sided, or has a reduction other than sum, prod, max and min.
        BindError: a tag is negative or above 65,533, a peer is this rank or no rank of the program, or
            a collective does not include this rank.
    """
    op = bound.op
    wire.binder.refuse_remote(bound)
    what = f"{bound.label} in lane {op.lane}"
    if isinstance(op, ops.Collective) and wire.rank not in op.over:
        raise BindError(f"{what}: runs over ranks {op.over}, rank {wire.rank} is none of them")
    match op:
        case ops.Send() | ops.Recv():
            return _message(wire, op, what)
        case ops.Permute():
            return _permute(wire, op, what)
        case ops.Collective(over=over) if len(over) == 1:
            return chain_actions([] if isinstance(op, ops.Fence) else _copy_for_one_rank(wire, op))
        case ops.AllGather() | ops.ReduceScatter() | ops.AllReduce() | ops.Reduce() | ops.Broadcast() if (
            _is_empty(op)
        ):
            return chain_actions([])
        case ops.Fence():
            group = wire.group(op.lane, _members(op))
            return wire.collective(
                what, _members(op), group, lambda: dist.barrier(group=group, async_op=True)
            )
        case ops.AllGather():
            return _all_gather(wire, op, what)
        case ops.ReduceScatter():
            return _reduce_scatter(wire, op, what)
        case ops.AllReduce() | ops.Reduce():
            return _reduce(wire, op, what)
        case ops.Broadcast():
            return _broadcast(wire, op, what)
        case ops.AllToAll():
            return _all_to_all(wire, op, what)
    raise UnsupportedError(f"{bound.label}: the torch backend has no '{op.kind}'; lower one-sided ops first")


# --- messages and ring steps --------------------------------------------------------------------------


def _message(wire: Wire, op: ops.Send | ops.Recv, what: str) -> Action:
    peer, tag = op.peer, op.tag
    assert isinstance(peer, int) and isinstance(tag, int)
    if not 0 <= tag < ENTRY_TAG - 1:
        raise BindError(f"{what}: a tag is at least 0 and below {ENTRY_TAG - 1}, {tag} is not")
    if peer == wire.rank or peer not in wire.program.ranks:
        raise BindError(f"{what}: peer {peer} is no other rank of the program")
    group, tag = wire.group(op.lane, wire.program.ranks), 1 + tag
    if isinstance(op, ops.Send):
        box, before = wire.outgoing(op, op.src, wire.order(op, op.src))
        return chain_actions([*before, *wire.exchange(what, group, tag, [(box, peer)], [])])
    # Two in turns, so that one can be received into while the other is taken from.
    use = f"in {next(wire.num_received.setdefault(op.lane, itertools.count())) % 2}"
    box, after = wire.incoming(op, op.out, wire.order(op, op.out), update=op.update, use=use)
    return chain_actions([*wire.exchange(what, group, tag, [], [(box, peer)]), *after])


def _permute(wire: Wire, op: ops.Permute, what: str) -> Action:
    over, me = _members(op), _members(op).index(wire.rank)
    assert isinstance(op.shift, int)
    to, source = over[(me + op.shift) % len(over)], over[(me - op.shift) % len(over)]
    if to == wire.rank:
        return chain_actions(_copy_for_one_rank(wire, op))
    order = wire.order(op, op.src)
    send, before = wire.outgoing(op, op.src, order)
    recv, after = wire.incoming(op, op.out, order, apart=wire.binder.overlap(op.out, op.src))
    moved = wire.exchange(
        what, wire.group(op.lane, wire.program.ranks), RING_TAG, [(send, to)], [(recv, source)]
    )
    return chain_actions([*before, *moved, *after])


# --- collectives --------------------------------------------------------------------------------------


def _ends(
    wire: Wire, op: ops.AllGather | ops.ReduceScatter, sizes: Sequence[int]
) -> tuple[bool, Tensor, list[Action], Tensor, list[Action]]:
    """Return whether the transport's own collective can, then what is sent and what fills it, and what is
    received and what takes it out."""
    order, native = _dim_first(op.dim, op.src), _is_native(_members(op), sizes)
    dtype = wire.native_dtype(op.src) if native else None
    send, before = wire.outgoing(op, op.src, order, dtype=dtype)
    recv, after = wire.incoming(op, op.out, order, dtype=dtype, apart=wire.binder.overlap(op.out, op.src))
    return native, send, before, recv, after


def _all_gather(wire: Wire, op: ops.AllGather, what: str) -> Action:
    over = _members(op)
    sizes = part_sizes(op.sizes, op.out.shape[op.dim], len(over))
    native, send, before, recv, after = _ends(wire, op, sizes)
    group, me = wire.group(op.lane, over), over.index(wire.rank)
    if native:
        gather = _renamed("all_gather_single", "all_gather_into_tensor")
        moved = [wire.collective(what, over, group, lambda: gather(recv, send, group=group, async_op=True))]
    else:
        parts = _split(recv, sizes)
        sends = [(send, peer) for peer in over if peer != wire.rank]
        recvs = [(part, peer) for part, peer in zip(parts, over, strict=True) if peer != wire.rank]
        moved = [lambda: parts[me].copy_(send), *wire.exchange(what, group, RING_TAG, sends, recvs)]
    return chain_actions([*before, *moved, *after])


def _reduce_scatter(wire: Wire, op: ops.ReduceScatter, what: str) -> Action:
    over = _members(op)
    combine, how = _reduction(op.op, what)
    sizes = part_sizes(op.sizes, op.src.shape[op.dim], len(over))
    native, send, before, recv, after = _ends(wire, op, sizes)
    group, me = wire.group(op.lane, over), over.index(wire.rank)
    if native and wire.context.device.type == "cuda":
        scatter = _renamed("reduce_scatter_single", "reduce_scatter_tensor")
        post = partial(scatter, recv, send, op=how, group=group, async_op=True)
        return chain_actions([*before, wire.collective(what, over, group, post), *after])
    parts = _split(send, sizes)
    terms = wire.binder.staging.get(op.lane, "terms", (len(over), *recv.shape), recv.dtype)
    if native:  # gloo's own sums all parts on every rank: here each goes to where it is summed, in one call
        flat, box, counts = terms.view(-1), send.reshape(-1), [recv.numel()] * len(over)
        post = partial(_begun_all_to_all, flat, box, counts, counts, group)
        exchanged = [wire.collective(what, over, group, post)]
    else:
        sends = [(part, peer) for part, peer in zip(parts, over, strict=True) if peer != wire.rank]
        recvs = [(term, peer) for term, peer in zip(terms, over, strict=True) if peer != wire.rank]
        exchanged = [lambda: terms[me].copy_(parts[me]), *wire.exchange(what, group, RING_TAG, sends, recvs)]

    def total() -> None:  # in the order of members, whatever order they came in
        recv.copy_(terms[0])
        for term in terms[1:]:
            combine(recv, term, out=recv)

    return chain_actions([*before, *exchanged, total, *after])


def _begun_all_to_all(out: Tensor, src: Tensor, counts: list[int], splits: list[int], group: Any) -> Any:
    """Begin to exchange flat tensors of `splits` elements for each member, `counts` from each; return the work."""
    return dist.all_to_all_single(out, src, counts, splits, group=group, async_op=True)


def _reduce(wire: Wire, op: ops.AllReduce | ops.Reduce, what: str) -> Action:
    over, order, group = _members(op), wire.order(op, op.src), wire.group(op.lane, _members(op))
    how, dtype = _reduction(op.op, what)[1], wire.native_dtype(op.src)
    root = None if isinstance(op, ops.AllReduce) else over[number_of(op.root)]
    if root not in (None, wire.rank):  # its memory is scribbled on
        box, before = wire.outgoing(op, op.src, order, dtype=dtype, own=True)
        after: list[Action] = []
    else:
        box, after = wire.incoming(op, op.out, order, dtype=dtype)
        src, target = wire.binder.view(op.src), StridedView.of(from_wire(box, order))
        in_place = op.out == op.src and not after
        before = [] if in_place else wire.binder.staging.transfer(
            op.lane, target, src, apart=not after and op.out.overlaps(op.src)
        )  # fmt: skip
    if root is None:
        post = partial(dist.all_reduce, box, op=how, group=group, async_op=True)
    else:
        post = partial(dist.reduce, box, root, op=how, group=group, async_op=True)
    moved = wire.collective(what, over, group, post)
    return chain_actions([*before, moved, *after])


def _broadcast(wire: Wire, op: ops.Broadcast, what: str) -> Action:
    over, order, group = _members(op), wire.order(op, op.src), wire.group(op.lane, _members(op))
    root, dtype = over[number_of(op.root)], wire.native_dtype(op.src)
    if root == wire.rank:
        box, before = wire.outgoing(op, op.src, order, dtype=dtype)
        after = wire.binder.move(op.lane, op.out, op.src)
    else:
        before = []
        box, after = wire.incoming(op, op.out, order, dtype=dtype)
    moved = wire.collective(what, over, group, partial(dist.broadcast, box, root, group=group, async_op=True))
    return chain_actions([*before, moved, *after])


def _all_to_all(wire: Wire, op: ops.AllToAll, what: str) -> Action:
    over, order, group = _members(op), _dim_first(op.split_dim, op.src), wire.group(op.lane, _members(op))
    native = list(over) == sorted(over)
    dtype = wire.native_dtype(op.src) if native else wire.binder.view(op.src).dtype
    send, before = wire.outgoing(op, op.src, order, dtype=dtype)
    sends = [part.reshape(-1) for part in _split(send, part_sizes(op.send_sizes, send.shape[0], len(over)))]
    out_sizes = part_sizes(op.recv_sizes, op.out.shape[op.concat_dim], len(over))
    shapes = [tuple(s if d == op.concat_dim else n for d, n in enumerate(op.out.shape)) for s in out_sizes]
    counts = [math.prod(shape) for shape in shapes]
    flat = wire.binder.staging.get(op.lane, "parts", (sum(counts),), dtype)
    recvs = list(flat.split(counts))
    if native:
        box = send.reshape(-1)
        splits = [part.numel() for part in sends]
        post = partial(_begun_all_to_all, flat, box, counts, splits, group)
        moved = [wire.collective(what, over, group, post)]
    else:
        me = over.index(wire.rank)
        away = [i for i in range(len(over)) if i != me]
        out, into = [(sends[i], over[i]) for i in away], [(recvs[i], over[i]) for i in away]
        moved = [lambda: recvs[me].copy_(sends[me]), *wire.exchange(what, group, RING_TAG, out, into)]
    whole = wire.binder.view(op.out)
    target, after = whole.direct, []
    if target is None:
        target = wire.binder.staging.get(op.lane, "whole", whole.shape, whole.dtype)
        after = wire.binder.staging.transfer(op.lane, whole, StridedView.of(target))
    places = target.split(list(out_sizes), op.concat_dim)
    for place, part, shape in zip(places, recvs, shapes, strict=True):
        arrived = from_wire(part.view([shape[dim] for dim in order]), order)
        after[:0] = [_copy(place, arrived)] if arrived.numel() else []
    return chain_actions([*before, *moved, *after])


def _copy_for_one_rank(wire: Wire, op: ops.Collective) -> list[Action]:
    assert isinstance(op, ops.DataCollective)
    return wire.binder.move(op.lane, op.out, op.src)


def _copy(into: Tensor, value: Tensor) -> Action:
    return lambda: into.copy_(value)


def _members(op: ops.Collective) -> tuple[int, ...]:
    assert isinstance(op.over, tuple)
    return op.over


def _dim_first(dim: int, view: View) -> Order:
    return (dim, *(other for other in range(len(view.selectors)) if other != dim))


def _is_native(over: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether the transport's own collective can: equal parts, none empty, and members in order."""
    return len(set(sizes)) == 1 and sizes[0] > 0 and list(over) == sorted(over)


def _is_empty(op: ops.DataCollective) -> bool:
    """Whether no member has anything to give or to take; all members find the same.

    A broadcast does not read what others than the root have as `src`, nor does a reduce write their `out`: such a
    view may have elements where nothing moves.
    """
    if isinstance(op, ops.AllGather | ops.Broadcast):
        return op.out.num_elements == 0
    return op.src.num_elements == 0


def _split(wire: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    ends = itertools.accumulate(sizes)
    return [wire[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _reduction(op: str, what: str) -> tuple[Callable[..., Tensor], Any]:
    require_known(op, _COMBINE, f"{what}: there is no reduction", UnsupportedError)
    kinds = {
        "sum": dist.ReduceOp.SUM,
        "prod": dist.ReduceOp.PRODUCT,
        "max": dist.ReduceOp.MAX,
        "min": dist.ReduceOp.MIN,
    }
    return _COMBINE[op], kinds[op]


def _renamed(new: str, old: str) -> Callable[..., Any]:
    """A collective that later releases of torch call by another name."""
    collective: Callable[..., Any] = getattr(dist, new, None) or getattr(dist, old)
    return collective
