"""A reshard plan as a program: copies that stay where they are, then turn after turn."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from meshweave.algorithms.reshard.multicast import Crossing
from meshweave.algorithms.reshard.plan import ReshardPlan
from meshweave.algorithms.reshard.writer import Writer
from meshweave.ir.program import Program
from meshweave.ir.views import View


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
        writer.arrived.clear()
        plan.strategy.write(writer, turn.cast, turn.chunks)
        messages: dict[tuple[int, int], View] = {}
        for wait in waits.get(number, ()):
            last = writer.arrived.get(wait.at)
            if last is None:  # nothing but scalars, which delay nobody
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
    """By the turn that is waited for. Between turns of one sender there is nothing to tell: its lane has an
    order."""
    nic = plan.fabric.nic
    before: dict[object, tuple[int, Crossing]] = {}
    found: dict[int, dict[_Wait, None]] = defaultdict(dict)
    for number, turn in enumerate(plan.turns):
        crossings = plan.strategy.crossings(turn.cast)
        for place, crossing in enumerate(crossings):
            keys: list[object] = [("in", nic(crossing.gateway))]
            if crossing.upstream in turn.cast.senders:
                keys.append(("out", nic(crossing.upstream)))
            if plan.serial:
                keys = ["everybody"] if place == 0 else []
            for key in keys:
                earlier = before.get(key)
                if earlier is None or earlier[0] == number or earlier[1].gateway == crossing.upstream:
                    continue
                at = earlier[1]
                if at.upstream != crossing.upstream or plan.serial:
                    found[earlier[0]][_Wait(number, at.gateway, crossing.upstream, crossing.lane)] = None
        for place, crossing in enumerate(crossings):
            before["in", nic(crossing.gateway)] = number, crossing
            if crossing.upstream in turn.cast.senders and (
                ("out", nic(crossing.upstream)) not in before
                or before["out", nic(crossing.upstream)][0] != number
            ):
                before["out", nic(crossing.upstream)] = number, crossing
            if place == len(crossings) - 1:
                before["everybody"] = number, crossing
    return {number: list(waits) for number, waits in found.items()}
