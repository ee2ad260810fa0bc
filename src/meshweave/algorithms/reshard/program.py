"""A reshard plan as a program: local copies first, then one multicast after another."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from meshweave.algorithms.reshard.multicast import HostHop
from meshweave.algorithms.reshard.plan import ReshardPlan
from meshweave.algorithms.reshard.writer import ReshardWriter
from meshweave.ir.program import Program
from meshweave.ir.program.views import View


def reshard_program(plan: ReshardPlan) -> Program:
    """Return the program that carries out a plan: local copies first, then one multicast after another.

    Buffers "x{i}" and "y{i}" hold tensor i of the problem on its source mesh and on its destination mesh.
    """
    writer = ReshardWriter(plan.problem, plan.sender_lanes)
    for task in plan.tasks:
        for rank in task.destinations:
            if rank in task.sources:
                for piece in task.pieces:
                    writer.copy_locally(piece, rank)
    handovers = _nic_handovers(plan)
    waits: dict[int, list[tuple[View, str, int, str]]] = defaultdict(list)
    for number, scheduled in enumerate(plan.multicasts):
        for signal, dtype, rank, lane in waits.pop(number, ()):
            writer.wait_for(signal, dtype, rank, lane)
        writer.begin_multicast()
        plan.strategy.write(writer, scheduled.multicast, scheduled.chunks)
        signals: dict[tuple[int, int], View] = {}
        for handover in handovers.get(number, ()):
            last = writer.completion_piece(handover.receiver)
            if last is None:
                continue
            ends = handover.receiver, handover.sender
            if ends not in signals:
                signals[ends] = writer.send_completion(last, *ends)
            wait = signals[ends], writer.dtype_of(last), handover.sender, handover.lane
            waits[handover.multicast].append(wait)
    return writer.program(f"reshard by {plan.strategy.name}, order {plan.order}")


@dataclass(frozen=True)
class _NicHandover:
    """A NIC passes from one multicast to another, number `multicast` of the schedule.

    Before `sender` sends for the latter in `lane`, `receiver` signals it that the NIC is free.
    """

    multicast: int
    receiver: int
    sender: int
    lane: str


def _nic_handovers(plan: ReshardPlan) -> dict[int, list[_NicHandover]]:
    """Return the handovers by the number of the multicast that is waited for.

    Hops from one sender to the same gateway need none: they are one stream. A sender that goes on to another
    gateway does wait, since its sends are done long before they have arrived.
    """
    nic = plan.network.nic
    last_hop: dict[object, tuple[int, HostHop]] = {}
    handovers: dict[int, dict[_NicHandover, None]] = defaultdict(dict)
    for number, scheduled in enumerate(plan.multicasts):
        hops = plan.strategy.host_hops(scheduled.multicast)
        for hop in hops:
            is_first = hop.upstream in scheduled.multicast.senders
            keys: list[object] = [("in", nic(hop.gateway)), ("out", nic(hop.upstream))]
            for key in ["everybody"] * is_first if plan.serial else keys:
                number_before, earlier = last_hop.get(key, (number, hop))
                has_all = earlier.gateway == hop.upstream
                is_stream = (earlier.upstream, earlier.gateway) == (hop.upstream, hop.gateway)
                if number_before != number and not is_stream and (plan.serial or not has_all):
                    handover = _NicHandover(number, earlier.gateway, hop.upstream, hop.lane)
                    handovers[number_before][handover] = None
        for hop in hops:
            last_hop["in", nic(hop.gateway)] = number, hop
            key = "out", nic(hop.upstream)
            if last_hop.get(key, (-1, hop))[0] != number:  # of several hops the first one leaves the sender
                last_hop[key] = number, hop
            last_hop["everybody"] = number, hop
    return {number: list(each) for number, each in handovers.items()}
