"""Simulate the program of a whole step, with contention between all kinds of its traffic."""

from __future__ import annotations

from dataclasses import dataclass

from meshweave.algorithms.step.block_program import LaidStep, lay_step
from meshweave.algorithms.step.result import Step
from meshweave.ir.program import Program
from meshweave.simulate import Simulation, simulate


@dataclass(frozen=True)
class StepSimulation:
    """A step and the simulation of its program.

    Attributes:
        fold: how many equal chips each simulated rank stands for.
        time_s: seconds of the simulation plus those outside of the program (`outside_s`).
    """

    step: Step
    simulation: Simulation
    fold: int
    time_s: float


def simulate_step(step: Step, *, folds: bool = True) -> StepSimulation:
    """Return a step simulated with contention between all its messages and collectives.

    Args:
        folds: whether only some data-parallel replicas are simulated, where replicas are equal.

    Raises:
        UnsupportedError: no program is written for a step of this kind (`lay_step`).
    """
    laid: LaidStep = lay_step(step.stages, folds=folds)
    simulation = simulate(laid.program, laid.machine)
    return StepSimulation(step, simulation, laid.fold, simulation.duration_s + outside_s(step))


def outside_s(step: Step) -> float:
    """Return the seconds of a step that no op of its program takes.

    They are `SoftwareStack.step_s`, and the sum of a tied embedding's gradient over the first and last pipeline
    rank.
    """
    return step.problem.stack.step_s + step.stages.data_parallel.tied_s


def step_program(step: Step) -> Program:
    """Return the program of a step on all chips of its cluster.

    Raises:
        UnsupportedError: no program is written for a step of this kind (`lay_step`).
    """
    return lay_step(step.stages, folds=False).program
