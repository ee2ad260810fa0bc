"""A reshard plan as a program: copies that stay where they are, then turn after turn."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from meshweave.algorithms.reshard.multicast import Crossing
from meshweave.algorithms.reshard.plan import ReshardPlan
from meshweave.algorithms.reshard.writer import Writer
from meshweave.ir.program import Program
from meshweave.ir.program.views import View


def reshard_program(plan: ReshardPlan) -> Program:
    """The program; buffers "x{i}" and "y{i}" hold item i on its source and its destination mesh."""
    writer = Writer(plan.problem)
    for task in plan.tasks:
        for rank in task.needers:
            if rank in task.holders:
                for piece in task.pieces:
                    writer.keep(piece, rank)
    waits = _waits(plan)
    gates: dict[int, list[tuple[View, str, int, str]]] = defaultdict(list)
    for number, turn in enumerate(plan.turns):
        for told, dtype, rank, lane in gates.pop(number, ()):
            writer.gate(told, dtype, rank, lane)
        writer.begin()
        plan.strategy.write(writer, turn.cast, turn.chunks)
        messages: dict[tuple[int, int], View] = {}
        for wait in waits.get(number, ()):
            last = writer.told_by(wait.at)
            if last is None:
                continue
            if (wait.at, wait.to) not in messages:
                messages[wait.at, wait.to] = writer.turn(last, wait.at, wait.to)
            gates[wait.turn].append((messages[wait.at, wait.to], writer.dtype_of(last), wait.to, wait.lane))
    return writer.program(f"reshard by {plan.strategy.name}, order {plan.order}")


@dataclass(frozen=True)
class _Wait:
    """Before turn number `turn` sends in `lane`, rank `to` hears from rank `at` that the NIC is free."""

    turn: int
    at: int
    to: int
    lane: str


def _waits(plan: ReshardPlan) -> dict[int, list[_Wait]]:
    """By the turn that is waited for.

    Between crossings of one sender to one gateway there is nothing to tell: they are one stream. To another
    gateway a sender waits, too: it is done with a message long before that has arrived.
    """
    nic = plan.fabric.nic
    before: dict[object, tuple[int, Crossing]] = {}
    found: dict[int, dict[_Wait, None]] = defaultdict(dict)
    for number, turn in enumerate(plan.turns):
        crossings = plan.strategy.crossings(turn.cast)
        for crossing in crossings:
            is_first = crossing.upstream in turn.cast.senders
            keys: list[object] = [("in", nic(crossing.gateway)), ("out", nic(crossing.upstream))]
            for key in ["everybody"] * is_first if plan.serial else keys:
                number_before, earlier = before.get(key, (number, crossing))
                knows = earlier.gateway == crossing.upstream
                is_stream = (earlier.upstream, earlier.gateway) == (crossing.upstream, crossing.gateway)
                if number_before != number and not is_stream and (plan.serial or not knows):
                    wait = _Wait(number, earlier.gateway, crossing.upstream, crossing.lane)
                    found[number_before][wait] = None
        for crossing in crossings:
            before["in", nic(crossing.gateway)] = number, crossing
            key = "out", nic(crossing.upstream)
            if before.get(key, (-1, crossing))[0] != number:  # of several, the first: it leaves the sender
                before[key] = number, crossing
            before["everybody"] = number, crossing
    return {number: list(waits) for number, waits in found.items()}
