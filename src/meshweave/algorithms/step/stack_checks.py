"""Refuse what a software stack does not execute."""

from __future__ import annotations

from collections.abc import Iterator

from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.algorithms.step.software_stack import SoftwareStack
from meshweave.algorithms.step.stack_runs import ALL_DEGREES
from meshweave.algorithms.table import SCHEDULES
from meshweave.base.errors import DescriptionError, UnsupportedError, listed
from meshweave.base.limits import STEP_LAYERS


def check_runs(stack: SoftwareStack, kind: str, value: object) -> None:
    """Raise UnsupportedError if a stack does not execute `value`, such as "gpipe".

    `kind` is the attribute of `StackRuns` that lists the values executed of its kind, such as "schedules".
    """
    values = stack.runs.values_of(kind)
    if values is None or value in values:
        return
    what = listed(tuple(map(str, values))) if values else "none"
    raise UnsupportedError(
        f"stack {stack.name} does not run {_WORDS[kind]} {value}; it runs {what}. Stack ideal prices any"
    )


_WORDS = {
    "degrees": "the degree",
    "strategies": "the strategy",
    "schedules": "the schedule",
    "zero": "ZeRO level",
    "recompute": "recomputation",
    "precisions": "the precision",
}


def schedule_run(schedule: str, virtual_stages: int) -> str:
    """Return the name by which `StackRuns.schedules` lists a schedule with `virtual_stages` stages per rank.

    It is the name of the schedule's variant for them, such as "interleaved-1f1b". Where `stages_per_rank` lists
    one stage alone, a larger number is part of the name: "gpipe x 2 stages a rank".

    Raises:
        UnsupportedError: there is no such schedule.
    """
    entry = SCHEDULES.named(schedule).for_stages(virtual_stages)
    is_usual = virtual_stages == 1 or max(entry.stages_per_rank) > 1
    return entry.name if is_usual else f"{entry.name} x {virtual_stages} stages a rank"


def check_problem(problem: StepProblem) -> None:
    """Raise an error where a step of this problem cannot be priced on its stack.

    Raises:
        UnsupportedError: the stack does not execute the precision, or the model has experts and it runs none.
        DescriptionError: the model has more than `base.limits.STEP_LAYERS` layers.
    """
    if problem.model.num_layers > STEP_LAYERS.most:
        raise DescriptionError(f"model {problem.model.name} {STEP_LAYERS.refusal(problem.model.num_layers)}")
    if problem.model.is_routed and not problem.stack.runs.experts:
        raise UnsupportedError(
            f"{problem.model.name} has experts, on which the costs of stack {problem.stack.name} were not fitted; "
            "stack ideal prices them"
        )
    if problem.recipe is not None:
        check_runs(problem.stack, "precisions", problem.recipe.name)


def check_parallelism(stack: SoftwareStack, parallelism: Parallelism) -> None:
    """Raise UnsupportedError if a stack does not execute a configuration.

    Degrees of 1 are not checked, nor strategy, schedule and ZeRO level where only one rank would share.
    """
    for kind, value in _used(parallelism):
        check_runs(stack, kind, value)


def _used(p: Parallelism) -> Iterator[tuple[str, object]]:
    for degree in ALL_DEGREES:
        if p.size(degree) > 1:  # type: ignore[arg-type]
            yield "degrees", degree
    if p.tensor_size > 1:
        yield "strategies", p.strategy
    if p.pipeline > 1:
        yield "schedules", schedule_run(p.schedule, p.virtual_stages)
    if p.replicas > 1:
        yield "zero", p.zero
    yield "recompute", p.recompute
