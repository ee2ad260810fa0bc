"""Write a whole step as one Program and simulate it, with contention between all kinds of its traffic.

Stages include the programs of their layers (`block_program`), so that tensor, context, pipeline and data-parallel
traffic share links. Where such a program is not written, layers are calls that take as long as their estimate
(`call_program`), and the result says why.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshweave.algorithms.step.block_program import lay_block_step
from meshweave.algorithms.step.call_program import lay_call_step
from meshweave.algorithms.step.laid import LaidStep
from meshweave.algorithms.step.result import Step
from meshweave.base.errors import UnsupportedError
from meshweave.ir.program import Program
from meshweave.simulate import Simulation, simulate


@dataclass(frozen=True)
class StepSimulation:
    """A step and the simulation of its program.

    Attributes:
        fold: how many chips each simulated rank stands for.
        time_s: seconds of the simulation, and from the estimate those outside of the program (`outside_s`).
        calls_because: why layers are calls of their estimated time; "" where their programs are simulated.
    """

    step: Step
    simulation: Simulation
    fold: int
    time_s: float
    calls_because: str = ""


def simulate_step(step: Step, *, folds: bool = True, calls: bool | None = None) -> StepSimulation:
    """Return a step simulated with contention between all its messages and collectives.

    Args:
        folds: whether one of several ranks that are alike stands for all of them.
        calls: whether layers are calls that take as long as their estimate; None for those of which no program is
            written.

    Raises:
        UnsupportedError: `step_program` does not write a step of this kind.
    """
    laid = lay_step(step, folds=folds, calls=calls)
    simulation = simulate(laid.program, laid.machine)
    time_s = simulation.duration_s + outside_s(step, laid)
    return StepSimulation(step, simulation, laid.fold, time_s, laid.calls_because)


def lay_step(step: Step, *, folds: bool = True, calls: bool | None = None) -> LaidStep:
    """Return the program of a step and the machine it is on; the arguments are those of `simulate_step`.

    Raises UnsupportedError, as `step_program` does.
    """
    reason = "calls=True asks for them"
    if not calls:
        try:
            return lay_block_step(step, folds=folds)
        except UnsupportedError as error:
            if calls is not None:
                raise
            reason = str(error)
    return replace(lay_call_step(step, folds=folds), calls_because=reason)


def outside_s(step: Step, laid: LaidStep) -> float:
    """Return the seconds of a step outside its program: software, gradient of a shared table.

    Where layers are calls, the optimizer is outside, too.
    """
    optimizer_s = step.optimizer_s if laid.calls_because else 0.0
    return optimizer_s + step.problem.stack.step_s + step.stages.data_parallel.tied_s


def step_program(step: Step, *, calls: bool | None = None) -> Program:
    """Return the program of a step on all chips of its cluster; `calls` is as for `simulate_step`.

    Raises:
        UnsupportedError: ZeRO-2 or 3, ZeRO-1 over ranks that are not evenly apart, a share of overlap between 0
            and 1, or transfers that ranks wait for.
    """
    return lay_step(step, folds=False, calls=calls).program
