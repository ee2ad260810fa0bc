"""The step of a plan as a case to simulate."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from meshweave.algorithms.step import Parallelism, Step, step_of
from meshweave.algorithms.step.block_program import lay_step
from meshweave.algorithms.step.program import outside_s
from meshweave.algorithms.step.stack_checks import check_parallelism, check_problem
from meshweave.algorithms.step.stacks import load_stack
from meshweave.base.errors import DescriptionError
from meshweave.describe.machine.cluster import load_cluster
from meshweave.tune.cases import SimulationCase
from meshweave.tune.plan import Plan
from meshweave.tune.plan_description import planned_problem


def planned_step(plan: Plan, cluster: str | None = None, place: int = 1, stack: str | None = None) -> Step:
    """Return a configuration of the plan of a step, priced again with the plan's own settings.

    Args:
        cluster: name or file of a cluster; None for the plan's own, with as many chips as it had.
        place: the place of the configuration in the ranking, from 1.
        stack: name of the software stack that executes it; None for the plan's own.

    Raises:
        DescriptionError: it is a plan of products, there is no such cluster or stack, or the ranking has no such
            place.
        LayoutError: the configuration does not fit the cluster.
        UnsupportedError: the stack does not execute it.
    """
    ranked = plan.step.ranked
    if not 1 <= place <= len(ranked):
        raise DescriptionError(f"the plan has no place {place}; give one from 1 to {len(ranked)}")
    problem = planned_problem(plan, None if cluster is None else load_cluster(cluster))
    parallelism = Parallelism(**ranked[place - 1].degrees.model_dump())
    if stack is not None:
        problem = replace(problem, stack=load_stack(stack))
        check_problem(problem)
        check_parallelism(problem.stack, parallelism)
    return step_of(problem, parallelism)


def step_case(plan: Plan, cluster: str | None = None, place: int = 1) -> SimulationCase:
    """Return a configuration of the plan of a step as a case to be simulated.

    Args:
        cluster: name or file of a cluster; None for the plan's own.
        place: the place of the configuration in the ranking, from 1.

    Raises:
        DescriptionError: it is a plan of products, there is no such cluster, or the ranking has no such place.
        LayoutError: the configuration does not fit the cluster.
        UnsupportedError: no program is written for steps of this kind.
    """
    step = planned_step(plan, cluster, place)
    laid = lay_step(step.stages)
    p = step.parallelism
    degrees = ", ".join(f"{name} {p.size(name)}" for name in reversed(p.order))
    title = f"{plan.model}, a step: {degrees}"
    subject = (
        f"{step.num_micro_batches} micro-batches of {p.micro_batch} x {plan.sequence} tokens, {p.strategy}, "
        f"{p.schedule}, ZeRO-{p.zero}, on {p.num_ranks} chips of {step.problem.cluster.name}"
        + (f", of which one in {laid.fold} is simulated: the others do the same" if laid.fold > 1 else "")
    )
    return SimulationCase(title, title, "", subject, laid.program, laid.machine, partial(_inside_s, step))


def _inside_s(step: Step) -> float:
    """Return the seconds of the estimate that the program of a step takes."""
    return step.time_s - outside_s(step)
