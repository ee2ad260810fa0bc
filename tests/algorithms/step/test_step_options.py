"""The typed keywords of `mw.step` and `mw.plan` are the attributes that they stand for."""

from __future__ import annotations

from dataclasses import fields

from meshweave.algorithms.step import Parallelism, StepProblem
from meshweave.algorithms.step.options import PlanOptions, ProblemOptions, StepOptions
from meshweave.algorithms.step.user_names import SHORT_NAMES


def test_every_attribute_has_its_keyword() -> None:
    given = {"model", "cluster", "batch", "sequence"}
    of_problem = {each.name for each in fields(StepProblem)} - given
    degrees = {each.name for each in fields(Parallelism)} | set(SHORT_NAMES)
    assert set(ProblemOptions.__annotations__) == of_problem
    assert set(StepOptions.__annotations__) == of_problem | degrees
    assert set(PlanOptions.__annotations__) == of_problem | degrees - {"zero_group"}
