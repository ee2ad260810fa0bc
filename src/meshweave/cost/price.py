"""The time of ONE op on an otherwise idle machine.

A collective on a ring of P chips costs t_launch + (P - 1) (t_sync + shard / bw) (MeshSlice, section 3.2.2). A
local product costs what its shape says, or its FLOPs over the chip's rate for its dtype, or its memory
traffic where that takes longer (`compute`). A call is counted by its kind (`calls`). A copy costs its bytes
over memory bandwidth. A chain of D packets (broadcast, reduce) takes P + D - 2 steps. Messages and chains
travel in one direction, so that their rate is at most that of one link. A chain with measured constants of
its own may have a higher rate, but takes at least part / link rate.

Where groups of one mesh axis share links, as those that leave a host do, each has its share of them: all
groups of an axis are taken to communicate at once (ATP, equation 3).

A price keeps the latency apart from the amount, so that a simulator can let amounts share a link.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshweave.base.units import to_ps, work_ps
from meshweave.cost.calls import with_counts
from meshweave.cost.compute import engine_amount, tile_traffic
from meshweave.cost.exchange import as_all_to_all, exchange_s
from meshweave.cost.flows import least_rate, step_rates
from meshweave.cost.libraries import sized_price
from meshweave.cost.machine import Machine
from meshweave.describe.machine.links import NetworkAxis
from meshweave.describe.machine.network import RingNetwork, TorusNetwork
from meshweave.ir.program.release import CollectiveStep
from meshweave.ir.work import Compute, CopyExchange, Transfer, Work


@dataclass(frozen=True, slots=True)
class Price:
    """The time of one op: launch, synchronisation and packing, then `amount` flows at up to `rate_per_s`.

    `amount` is bytes of communication, else FLOPs; `rate_per_s` is that unit per second. The memory traffic of a
    product takes `stream_ps` at the same time as its FLOPs, and `fill_drain_ps` before and after them, when the
    first tiles are loaded and the last one is stored. `pack_ps` is the packing of a message's strided views at
    both ends.
    """

    launch_ps: int
    sync_ps: int
    amount: int
    rate_per_s: int
    stream_ps: int = 0
    fill_drain_ps: int = 0
    pack_ps: int = 0

    @property
    def fixed_ps(self) -> int:
        """Return the picoseconds before bytes or FLOPs flow: launch, synchronisation and packing."""
        return self.launch_ps + self.sync_ps + self.pack_ps

    @property
    def flow_ps(self) -> int:
        """Return the picoseconds in which bytes or FLOPs flow at the full rate."""
        return work_ps(self.amount, self.rate_per_s) if self.amount else 0

    @property
    def total_ps(self) -> int:
        """Return the picoseconds of the op on an idle machine."""
        return self.fixed_ps + max(self.flow_ps, self.stream_ps) + self.fill_drain_ps


def price(
    work: Work, machine: Machine, *, shares_links: bool = False, endpoints: tuple[int, int] | None = None
) -> Price:
    """Return the price (a time in parts) of one op on an otherwise idle machine.

    Args:
        work: the FLOPs of the op, or its bytes and group.
        endpoints: the ranks (sender, receiver) of a message or of a one-sided transfer, whose price then has the
            slowest links between them. Without endpoints, and for a step of a collective, it has the constants of
            the mesh axis.
        shares_links: whether the caller simulates the sharing of links itself. In a permute over h hops of a ring
            each link carries h messages. By default the amount is h times the message. With `shares_links` it is
            the message alone, and the rate a share of 1 / h; groups of an axis then have their links whole.

    Raises:
        UnsupportedError: the machine has no meshes; a call has neither FLOPs nor a known kind of work; a product
            is outside the ranges of the chip's table of products, and no constants may price it; or there is no
            such library of dispatch.
        LayoutError: a mesh does not fit the network, or no mesh has the axis.
    """
    if isinstance(work, Compute):
        chip = machine.cluster.chip
        memory = int(chip.memory_bytes_per_s)
        work = with_counts(work)
        if not work.flops:
            return Price(0, 0, work.bytes, memory)
        tiles = tile_traffic(work, chip)
        ends_ps = work_ps(tiles.fill_bytes, memory) + work_ps(tiles.drain_bytes, memory)
        return Price(
            0 if work.joins else to_ps(chip.launch_s),
            0,
            engine_amount(work, chip),
            int(chip.effective_flops_per_s),
            work_ps(tiles.stream_bytes, memory),
            ends_ps,
        )
    if endpoints is not None and work.step is None:
        known = machine.one_sided_constants(*endpoints, adds=work.kind == "accumulate")
        return Price(known.launch_ps, known.sync_ps, work.part_bytes, known.rate)
    return _transfer(work, machine, shares_links)


def _transfer(work: Transfer, machine: Machine, shares_links: bool) -> Price:
    if isinstance(work, CopyExchange):
        seconds = exchange_s(work, machine)
        if seconds is not None:
            return Price(to_ps(seconds), 0, 0, 1)
        work = as_all_to_all(work)
    count, part = work.num_ranks, work.part_bytes
    kind = work.step.collective if work.step else CONSTANTS_OF.get(work.kind, work.kind)
    moves_bytes = work.kind != "fence" and work.num_ranks > 1
    shared = moves_bytes and not shares_links
    sized = None if work.step else sized_price(machine, work.axis, work.kind, count, part, shared)
    if sized is not None:
        steps = (count - 1) * (2 if work.kind == "all_reduce" else 1)
        each = -(-part // count) if work.kind == "all_reduce" else part
        return Price(sized.launch_ps, steps * sized.sync_ps, steps * each, sized.rate)
    constants = machine.constants(work.axis, kind, shared)
    launch, sync = to_ps(constants.launch_s), to_ps(constants.sync_s)
    rate = machine.rate(work.axis, kind, shared)
    if work.step:
        launch = 0 if work.step.index != 0 else launch
        rate = max(rate // _num_shares(work.step, machine.num_directions(work.axis)), 1)
    if count == 1:
        steps, amount = 0, 0
    elif work.kind in ("all_gather", "reduce_scatter"):
        steps, amount = count - 1, (count - 1) * part
    elif work.kind == "all_reduce":  # a reduce-scatter and an all-gather of parts of 1 / P
        steps, amount = 2 * (count - 1), 2 * (count - 1) * -(-part // count)
    elif work.kind in ("broadcast", "reduce"):  # D packets over P - 1 hops take P + D - 2 steps
        steps = count + work.packets - 2
        amount = steps * -(-part // work.packets)
        axis = machine.axis(work.axis, shared, one_way=True)
        if axis.has_own_constants(kind):
            # These are of chains that follow and overlap each other, maybe beyond a link's rate in one direction;
            # but all of a part crosses one link, and no chain is faster than that.
            amount = max(amount, part * rate // int(axis.link_bytes_per_s))
        else:
            rate = _one_direction_rate(rate, machine.axis(work.axis, shared, one_way=True))
    elif work.kind == "all_to_all":
        rate = machine.rate(work.axis, kind)  # the bytes say already who shares a link
        steps, amount = count - 1, _all_to_all_bytes(work, machine, rate)
    elif work.kind == "fence":
        steps, amount = count - 1, 0
    else:
        steps = (
            work.hops if isinstance(machine.cluster.network, (TorusNetwork, RingNetwork)) else 1
        )  # a switch has no ring
        amount = steps * part
        if shares_links and steps > 1:  # the links themselves hold it back there
            return Price(launch, steps * sync, part, max(rate // steps, 1))
        rate = _one_direction_rate(rate, machine.axis(work.axis, shared, one_way=True))
        if shared and work.axis and work.step and work.step.num_directions == 2:
            rate = max(min(rate, int(least_rate(*machine.counted(work.axis), both=True))), 1)
        if shared and work.hops > 1 and work.axis:
            rate = _one_direction_rate(machine.rate(work.axis, kind), machine.axis(work.axis))
            least = least_rate(*machine.counted(work.axis), work.hops)
            amount = int(part * max(steps, rate / least))
    return Price(launch, steps * sync, amount, rate)


def _all_to_all_bytes(work: Transfer, machine: Machine, rate: int) -> int:
    """Return the bytes in an all-to-all that take as long at a rate into a chip as its steps do.

    Each member sends a part straight to the one a place on, then to the one two places on, and so forth. Links
    are full duplex, and a part takes the shorter way round a ring, whether its collectives run in one direction or
    two. The fullest link sets the pace of a step.
    """
    if not work.axis or work.num_ranks == 1:  # one direction of a link takes a part
        return (work.num_ranks - 1) * work.part_bytes * machine.num_directions(work.axis)
    each = [max(1.0, rate / least) for least in step_rates(*machine.counted(work.axis))]
    return int(work.part_bytes * (work.num_ranks - 1) * sum(each) / len(each))


def _num_shares(step: CollectiveStep, axis_directions: int) -> int:
    """Return how many directions share a rate. The rate of send_recv is already that of one direction."""
    if step.collective == "send_recv":
        return max(step.num_directions // axis_directions, 1)
    return step.num_directions


def _one_direction_rate(rate: int, axis: NetworkAxis) -> int:
    """Return a rate limited to that of one link, for transfers in one direction."""
    return min(rate, max(int(axis.link_bytes_per_s), 1))


CONSTANTS_OF = {
    "permute": "send_recv",
    "send": "send_recv",
    "recv": "send_recv",
    "get": "send_recv",
    "put": "send_recv",
    "fence": "all_gather",
}
