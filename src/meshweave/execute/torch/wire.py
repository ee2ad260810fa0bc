"""Transfers of dense tensors between ranks, with guarded waits.

Wire order. Dims travel in an order that both ends know without asking: for gathers and scatters the dim they
cut comes first, so that a member's part is one run of memory; otherwise it is the memory order of the buffers
that such ops of the lane use as written, where they agree, and row-major where they do not. A view that
already has that order is sent and received in place, any other through staging.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshweave.execute.torch.call_order import ENTRY_TAG, BoundCall, call_order, wire_tag
from meshweave.execute.torch.compute import Binder
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.views import (
    Action,
    Order,
    StridedView,
    chain_actions,
    row_major,
    to_wire,
)
from meshweave.ir.program import Program
from meshweave.ir.program.ops import DataCollective, Op, Recv, Send
from meshweave.ir.program.views import View

Message = tuple[Tensor, int]
"""A dense tensor, and the global rank it goes to or comes from."""

WireKey = tuple[str, str, int]


def wire_orders(program: Program) -> dict[WireKey, Order]:
    """Return the order of dims, outermost first, in which tensors are sent, by (lane, kind of op, number of dims).

    The kind is "message" for sends and receives, or "<kind> <name>" of a collective. The order is the memory order
    of the buffers that such ops of the lane read and write, or row-major where these differ. Ops that split a dim,
    such as an all-gather, do not use it: they send that dim first.
    """
    orders: dict[WireKey, Order] = {}
    for op in program.ops():
        if isinstance(op, (DataCollective, Send, Recv)):
            for _, view in op.accesses():
                num_dims = len(view.selectors)
                key, plain = _wire_key(op, num_dims), row_major(num_dims)
                order = program.buffer_of[view.buffer].order or plain
                orders[key] = order if orders.get(key, order) == order else plain
    return orders


def _wire_key(op: Op, num_dims: int) -> WireKey:
    kind = "message" if isinstance(op, (Send, Recv)) else f"{op.kind} {op.name}"
    return op.lane, kind, num_dims


class MessageExchange:
    """An action that sends and receives messages and waits for them; its receives may be posted earlier.

    If a receive is posted before its message is sent, the sender need not wait for it. A run that fails may leave
    a receive posted, but then the context is of no further use anyway.
    """

    __slots__ = ("_ahead", "_guard", "_order", "_peers", "_posted", "_recvs", "_sends", "_what")

    def __init__(
        self,
        wire: Wire,
        what: str,
        group: Any,
        tag: int,
        peers: Sequence[int],
        sends: Sequence[Message],
        recvs: Sequence[Message],
    ) -> None:
        self._guard, self._what, self._peers = wire.context.guard, what, tuple(peers)
        self._order = call_order(wire.context)
        self._sends = [partial(dist.isend, tensor, peer, group=group, tag=tag) for tensor, peer in sends]
        self._recvs = [partial(dist.irecv, tensor, peer, group=group, tag=tag) for tensor, peer in recvs]
        self._posted: list[Any] | None = None
        self._ahead: Callable[[], None] | None = None

    @property
    def receives(self) -> bool:
        """Return whether the exchange has a message that this rank receives."""
        return bool(self._recvs)

    def while_waiting(self, ahead: Callable[[], None]) -> None:
        """Have each run call `ahead` once this exchange's messages are posted, before it waits for them."""
        self._ahead = ahead

    def post_receives(self) -> None:
        """Post the receives now, before the action runs. Errors are ignored: the action then posts them itself."""
        if self._posted is None:
            with contextlib.suppress(RuntimeError):
                self._posted = [post() for post in self._recvs]

    def __call__(self) -> None:
        with self._guard(self._what, self._peers) as wait:
            try:
                works = self._posted
                if works is None:
                    works = [post() for post in self._recvs]
                self._posted = None
                works += [post() for post in self._sends]
                if self._ahead is not None:
                    self._ahead()
                for work in works:
                    work.wait(wait.timeout)
            except RuntimeError:
                self._order.explain_failure()
                raise


class GroupEntry:
    """An action in which all pairs of ranks of a group exchange a one-byte message, once in a run.

    It makes sure that the ranks run the same program before a torch collective: the tags of messages contain the
    number of the program, and torch's collectives have no tags.
    """

    __slots__ = ("_call", "_meet", "_seen")

    def __init__(self, wire: Wire, what: str, group: Any, over: Sequence[int], call: BoundCall) -> None:
        others = [rank for rank in over if rank != wire.rank]
        device = wire.context.device
        sends = [(torch.zeros(1, dtype=torch.uint8, device=device), rank) for rank in others]
        recvs = [(torch.zeros(1, dtype=torch.uint8, device=device), rank) for rank in others]
        tag = wire_tag(call.number, ENTRY_TAG)
        self._meet = MessageExchange(wire, what, group, tag, others, sends, recvs)
        self._call, self._seen = call, 0

    def __call__(self) -> None:
        """Exchange the messages and wait for them, unless this run has done so already."""
        count = self._call.sequence.count
        if self._seen != count:
            self._seen = count
            self._meet()


class GuardedCollective:
    """An action on a CPU that runs one torch collective and waits for it within the deadline.

    Args:
        what: completes "waiting for ..." in errors.
        peers: the global ranks waited for.
        post: begins the collective, and returns torch's handles (`Work`), which are waited for.
    """

    __slots__ = ("_guard", "_order", "_peers", "_post", "_what", "_works")

    def __init__(self, wire: Wire, what: str, peers: Sequence[int], post: Callable[[], list[Any]]) -> None:
        self._guard, self._order = wire.context.guard, call_order(wire.context)
        self._what, self._peers, self._post = what, peers, post
        self._works: list[Any] | None = None

    def post(self) -> None:
        """Begin the collective now; the action, run later, then only waits for it."""
        try:
            self._works = self._post()
        except RuntimeError:
            self._order.explain_failure()
            raise

    def __call__(self) -> None:
        with self._guard(self._what, self._peers) as wait:
            try:
                works, self._works = self._works, None
                for work in self._post() if works is None else works:
                    work.wait(wait.timeout)
            except RuntimeError:
                self._order.explain_failure()
                raise


@dataclass(frozen=True)
class Wire:
    """What binds the communication of one rank: its memory, its process groups, and the orders of sent dims.

    `channels` has the channel number of each lane, `orders` the result of `wire_orders`.
    """

    context: TorchContext
    binder: Binder
    program: Program
    orders: dict[WireKey, Order]
    channels: Mapping[str, int]
    call: BoundCall | None = None
    """The program as a call of its ranks; None where no others run it."""
    meets: bool = True
    """Whether ranks meet before the first of torch's own collectives in a run; see `GroupEntry`."""
    num_received: dict[str, Iterator[int]] = field(default_factory=dict)
    """By lane, the messages that have been bound to be received."""
    _entries: dict[Any, GroupEntry] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Return the global rank whose ops are bound."""
        return self.binder.rank

    def group(self, lane: str, ranks: Sequence[int]) -> Any:
        """Return the process group of the global `ranks` for the channel of `lane`."""
        return self.context.group(self.program, self.channels[lane], ranks)

    def collective(self, what: str, over: Sequence[int], group: Any, post: Callable[[], Any]) -> Action:
        """Return an action that runs one torch collective over the global ranks `over`, this rank included.

        On CPUs, with `meets` and a `call`, the ranks of a group first exchange a one-byte message, each with
        each, before the first collective of the group in a run. So collectives of two programs never match.

        Args:
            what: completes "waiting for ..." in errors.
            group: the process group of `over`.
            post: begins the collective, and returns torch's `Work`.
        """
        run = self._wait(what, over, lambda: [post()])
        if self.call is None or not self.meets or self.context.device.type == "cuda":
            return run
        if group not in self._entries:
            self._entries[group] = GroupEntry(self, what, group, over, self.call)
        return chain_actions([self._entries[group], run])

    def _wait(self, what: str, peers: Sequence[int], post: Callable[[], list[Any]]) -> Action:
        """Return what posts works and waits for them: a CPU within the deadline, a CUDA stream with no host."""
        if self.context.device.type == "cuda":

            def queue() -> None:
                for work in post():
                    work.wait()

            return queue
        return GuardedCollective(self, what, tuple(peer for peer in peers if peer != self.rank), post)

    def exchange(
        self, what: str, group: Any, tag: int, sends: Sequence[Message], recvs: Sequence[Message]
    ) -> list[Action]:
        """Return the actions that send and receive messages, (dense tensor, peer) pairs; [] where all are empty.

        Receives are posted before sends, and messages without elements are left out.

        Args:
            what: completes "waiting for ..." in errors.
            group: a process group that has this rank and all peers; peers are global ranks.
            tag: tells messages of this program between two ranks apart; unused on CUDA, where they match in order.
        """
        sends = [(tensor, peer) for tensor, peer in sends if tensor.numel()]
        recvs = [(tensor, peer) for tensor, peer in recvs if tensor.numel()]
        if not sends and not recvs:
            return []
        peers = sorted({peer for _, peer in (*sends, *recvs)})
        if self.context.device.type == "cuda":
            listed = [dist.P2POp(dist.irecv, t, p, group=group) for t, p in recvs]
            listed += [dist.P2POp(dist.isend, t, p, group=group) for t, p in sends]
            return [self._wait(what, peers, lambda: dist.batch_isend_irecv(listed))]
        if self.call is not None and dist.get_backend(group) == "gloo":
            tag = wire_tag(self.call.number, tag)
        return [MessageExchange(self, what, group, tag, peers, sends, recvs)]

    def order(self, op: Op, view: View) -> Order:
        """Return the dims of `view` in the order in which `op` sends them, outermost first; see `wire_orders`.

        Do not use it for ops that split a dim, such as an all-gather, which send that dim first.
        """
        num_dims = len(view.selectors)
        return self.orders.get(_wire_key(op, num_dims), row_major(num_dims))

    def outgoing(
        self, op: Op, view: View, order: Order, *, dtype: torch.dtype | None = None, own: bool = False
    ) -> tuple[Tensor, list[Action]]:
        """Return a dense tensor to send with the elements of `view`, and the actions that fill it.

        Its dims are those of the view permuted to `order`. There are no actions where it aliases the view.

        Args:
            order: the dims of the view in the order in which they are sent, outermost first.
            dtype: the dtype of the tensor; None for the view's.
            own: whether the tensor will be overwritten, and so must not alias the view.
        """
        bound_view = self.binder.view(view)
        dtype = dtype or bound_view.dtype
        if bound_view.direct is not None and dtype == bound_view.dtype and not own:
            wire = to_wire(bound_view.direct, order)
            if wire.is_contiguous():
                return wire, []
        packed = self.binder.staging.get(op.lane, "out", bound_view.shape, dtype, order)
        return to_wire(packed, order), self.binder.staging.transfer(
            op.lane, StridedView.of(packed), bound_view
        )

    def incoming(
        self,
        op: Op,
        view: View,
        order: Order,
        *,
        dtype: torch.dtype | None = None,
        update: bool = False,
        apart: bool = False,
        use: str = "in",
    ) -> tuple[Tensor, list[Action]]:
        """Return a dense tensor to receive into, and the actions that copy it, or add it, to `view` afterwards.

        The tensor has the view's dims permuted to `order`; there are no actions where it aliases the view.

        Args:
            order: the dims of the view in the order in which they are sent, outermost first.
            dtype: the dtype of the tensor; None for the view's.
            update: whether what arrives is added to the view.
            apart: whether the tensor must not alias the view.
            use: names the staging memory of the tensor, if any: equal names in a lane may share memory.
        """
        bound_view = self.binder.view(view)
        dtype = dtype or bound_view.dtype
        if bound_view.direct is not None and dtype == bound_view.dtype and not update and not apart:
            wire = to_wire(bound_view.direct, order)
            if wire.is_contiguous():
                return wire, []
        packed = self.binder.staging.get(op.lane, use, bound_view.shape, dtype, order)
        after = self.binder.staging.transfer(op.lane, bound_view, StridedView.of(packed), add=update)
        return to_wire(packed, order), after

    def native_dtype(self, view: View) -> torch.dtype:
        """Return the dtype in which collectives send a view's elements: int32 for int16, which gloo lacks, else
        the view's own dtype.
        """
        dtype = self.binder.view(view).dtype
        return torch.int32 if dtype == torch.int16 else dtype
