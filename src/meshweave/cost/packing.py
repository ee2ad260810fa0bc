"""Price messages of strided views: each end packs into, or unpacks from, memory that is sent as one run.

A view is strided where it is not one run of its rank's memory (`View.is_strided`). An executor then copies it
(`execute.torch.wire`), in the lane of the message. One end takes

    pack_launch_s + bytes / pack_bytes_per_s

of its chip, before the bytes flow at the sender and after that at the receiver. The price of a message has both
before the flow, which ends at the same time. A chip with `pack_bytes_per_s` 0 packs for nothing, which
is the default. Steps of collectives and one-sided transfers pack nothing here.
"""

from __future__ import annotations

from dataclasses import replace

from meshweave.base.units import to_ps, work_ps
from meshweave.cost.machine import Machine
from meshweave.cost.price import Price, price
from meshweave.describe.machine.chip import Chip
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Accumulate, Get, Op, Put, Recv, Send
from meshweave.ir.program.views import View
from meshweave.ir.work import Work, work_of


def packing_ps(num_bytes: int, chip: Chip) -> int:
    """Return the picoseconds in which one end of a message packs or unpacks a strided view of `num_bytes`."""
    rate = int(chip.pack_bytes_per_s)
    return to_ps(chip.pack_launch_s) + work_ps(num_bytes, rate) if num_bytes and rate else 0


def message_price(
    program: Program,
    send: Send,
    recv: Recv,
    ends: tuple[int, int],
    machine: Machine,
    *,
    shares_links: bool = False,
) -> Price:
    """Return the price (a time in parts) of a message, the packing of strided views at both ends included.

    Args:
        send, recv: the two ops of the message in `program`, resolved: with integers for all expressions.
        ends: the global ranks (sender, receiver).
        shares_links: whether the caller simulates the sharing of links itself; see `price`.

    Raises:
        UnsupportedError: the machine has no meshes.
        LayoutError: a mesh does not fit the network.
    """
    cost = price(work_of(program, send), machine, shares_links=shares_links, endpoints=ends)
    if send.step is not None or not machine.cluster.chip.pack_bytes_per_s:
        return cost
    views = zip((send.src, recv.out), ends, strict=True)
    packed_ps = sum(_end_ps(program, view, rank, machine.cluster.chip) for view, rank in views)
    return replace(cost, pack_ps=packed_ps)


def op_price(work: Work, op: Op, rank: int, machine: Machine) -> Price:
    """Return the price (a time in parts) of an op, other than a send or recv, that global rank `rank` runs.

    A one-sided op on another rank's memory runs at the rate of the slowest links between the two ranks.

    Args:
        work: the FLOPs of the op, or its bytes and group: `work_of(program, op)`.
        op: the op as `rank` runs it, resolved: with integers for all expressions.

    Raises:
        UnsupportedError: the machine has no meshes, a call has neither FLOPs nor a known kind of work, or a
            product is outside the ranges of the chip's table of products.
        LayoutError: a mesh does not fit the network, or no mesh has the axis.
    """
    ends = None
    if isinstance(op, Get | Put | Accumulate):
        owner = op.src.rank if isinstance(op, Get) else op.out.rank
        assert owner is None or isinstance(owner, int)
        if owner is not None and owner != rank:
            ends = (owner, rank) if isinstance(op, Get) else (rank, owner)
    return price(work, machine, endpoints=ends)


def _end_ps(program: Program, view: View, rank: int, chip: Chip) -> int:
    order = program.buffer_of[view.buffer].order
    if not view.is_strided(program.local_shape(view.buffer, rank), order):
        return 0
    return packing_ps(program.view_bytes(view), chip)
