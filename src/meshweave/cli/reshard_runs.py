"""The plans of one `meshweave reshard`, and their simulations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from meshweave.algorithms.reshard import Fabric, ReshardPlan, plan_reshard, reshard_program
from meshweave.algorithms.reshard.plan import MAX_MESSAGES
from meshweave.base.errors import UnsupportedError
from meshweave.cli.reshard_problem import Asked
from meshweave.cost.machine import Machine
from meshweave.ir.program import Program

if TYPE_CHECKING:
    from meshweave.simulate.result import Simulation

MAX_SIMULATED_OPS = 600_000
"""Some 10 s of simulation, and of writing the program before."""
MAX_SHOWN = 8


@dataclass(frozen=True)
class Run:
    """A plan; its simulation, or under `note` why there is none."""

    plan: ReshardPlan
    simulation: Simulation | None = None
    note: str = ""

    @property
    def title(self) -> str:
        return f"{self.plan.strategy.name}, order {self.plan.order}"

    @property
    def simulated_s(self) -> float | None:
        return None if self.simulation is None else self.simulation.duration_s

    @cached_property
    def program(self) -> Program:
        return self.simulation.program if self.simulation is not None else reshard_program(self.plan)

    @cached_property
    def peak(self) -> tuple[int, int, int]:
        """(rank, bytes before and after together, bytes of scratch) of the rank that needs most."""
        plan = self.plan
        each = ((plan.local_bytes(rank), plan.scratch_bytes(rank), rank) for rank in plan.problem.ranks)
        held, scratch, rank = max(each, key=lambda found: (found[0] + found[1], -found[2]))
        return rank, held, scratch

    def busiest_ranks(self) -> tuple[int, ...]:
        """Of each host the rank that moves most between hosts, of the busiest hosts, in the order of ranks."""
        moved: dict[int, int] = {}
        for turn in self.plan.turns:
            for crossing in self.plan.strategy.crossings(turn.cast):
                for rank in (crossing.upstream, crossing.gateway):
                    moved[rank] = moved.get(rank, 0) + turn.cast.num_bytes
        first: dict[int, int] = {}
        for rank in sorted(moved, key=lambda r: (-moved[r], r)):
            first.setdefault(self.plan.fabric.host_of[rank], rank)
        return tuple(sorted(list(first.values())[:MAX_SHOWN])) or self.plan.problem.ranks[:MAX_SHOWN]


def planned(asked: Asked, strategy: str, order: str) -> Run:
    """Raises UnsupportedError for more messages than anybody waits for."""
    plan = plan_reshard(asked.problem, Fabric.of(asked.cluster), strategy=strategy, order=order)
    at_least = sum(max(turn.chunks, len(turn.cast.pieces)) * len(turn.cast.receivers) for turn in plan.turns)
    if at_least > MAX_MESSAGES:
        raise UnsupportedError(
            f"by {strategy} this takes about {at_least:,} messages, more than the {MAX_MESSAGES:,} that are "
            "counted here; give a smaller problem"
        )
    return Run(plan)


def simulated(run: Run, asked: Asked) -> Run:
    """With its simulation, unless the program is too large. Raises MeshweaveError."""
    from meshweave.simulate import simulate

    if run.simulation is not None or run.note:
        return run
    ops = 2 * run.plan.num_messages
    if ops <= MAX_SIMULATED_OPS:
        ops = len(run.program.body)
    if ops > MAX_SIMULATED_OPS:
        return replace(run, note=f"{ops:,} ops, more than the {MAX_SIMULATED_OPS:,} that are simulated")
    found = simulate(run.program, Machine.of(asked.cluster, run.program, logical=True))
    return replace(run, simulation=found)


def best_of(runs: Sequence[Run]) -> Run:
    """The fastest in simulation where all are simulated, else by prediction; the first of equal ones."""
    if all(run.simulation is not None for run in runs):
        return min(runs, key=lambda run: run.simulated_s or 0.0)
    return min(runs, key=lambda run: run.plan.predicted_s)
