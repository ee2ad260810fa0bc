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


def test_a_configuration_has_no_attributes_but_its_fields() -> None:
    """Others send it as `vars`, and make it anew by these."""
    parallelism = Parallelism(data=2, tensor=(2, 2), pipeline=2)
    assert (parallelism.tensor_size, parallelism.stride("pipeline"), parallelism.num_ranks) == (4, 8, 16)
    assert Parallelism(**vars(parallelism)) == parallelism
