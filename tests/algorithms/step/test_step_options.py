"""The typed keywords of `mw.step` and `mw.plan` are the attributes that they stand for."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

import meshweave as mw
from meshweave.algorithms.step import Parallelism, StepProblem
from meshweave.algorithms.step.options import PlanOptions, ProblemOptions, StepOptions
from meshweave.algorithms.step.space import SpaceOptions, StepSpace
from meshweave.algorithms.step.user_names import SHORT_NAMES
from meshweave.base.errors import LayoutError, MeshweaveError


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


def test_an_option_by_two_names_is_refused() -> None:
    with pytest.raises(LayoutError, match="dp and data are the same option; give one of them"):
        mw.step("llama-2-7b", "dgx-a100:8", 8, 512, dp=4, data=8)
    with pytest.raises(LayoutError, match="tensor and tp are the same option; give one of them"):
        mw.plan("llama-2-7b", "dgx-a100:8", batch=8, sequence=512, tensor=2, tp=[1, 4])


def test_a_mesh_of_one_column_is_the_number_of_its_rows() -> None:
    problem = StepProblem(mw.load_model("llama-2-7b"), mw.load_cluster("dgx-a100:8"), 16, 512)
    space = StepSpace(problem, SpaceOptions(tensor=((4, 1),), strategies=("megatron_sp",)))
    assert list(space.tensors(4)) == [("megatron_sp", 4)]


@pytest.mark.parametrize("ask", [mw.step, mw.plan])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tp": "2"}, "tensor is '2'; give a whole number"),
        ({"tp": (2, 2, 2)}, r"tensor is \(2, 2, 2\); give a number of ranks or a mesh"),
        ({"tp": (2, -2)}, "tensor is -2; give at least 1"),
        ({"pp": 2.0}, "pipeline is 2.0; give a whole number"),
        ({"micro_batch": "2"}, "'2'; give a whole number"),
        ({"strategy": 3}, "'3'; there are"),
        ({"schedule": 3}, "'3'; there are"),
        ({"stack": 3}, "no stack '3'"),
        ({"stack": ["ideal"]}, "stack is"),
        ({"batch": 8.0}, "batch is 8.0; give a whole number"),
        ({"sequence": "512"}, "sequence is '512'; give a whole number"),
        ({"reserve": "5%"}, "reserve is 5%; give a share"),
        ({"attention_share": "0.5"}, "attention_share is 0.5; give a positive number"),
        ({"imbalance": None}, "imbalance is None; give at least 0"),
        ({"dropout": "no"}, "dropout is 'no'; give True, False or None"),
        ({"order": 5}, "order is 5; give"),
        ({"vp": "2"}, "virtual_stages is '2'; give a whole number"),
        ({"zero": "1"}, "zero is '1'; give"),
        ({"gradient_dtype": "int8"}, "unknown gradient_dtype 'int8'"),
    ],
    ids=str,
)
def test_values_of_another_type_are_refused_in_words(ask: Any, given: dict[str, Any], words: str) -> None:
    with pytest.raises(MeshweaveError, match=words):
        ask("llama-2-7b", "dgx-a100:8", **{"batch": 8, "sequence": 512, **given})


@pytest.mark.parametrize("ask", [mw.step, mw.plan])
@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint16])
def test_integers_of_numpy_are_integers(ask: Any, kind: Any) -> None:
    sizes = {"batch": 8, "sequence": 512, "tp": 2, "cp": 2, "micro_batch": 2, "zero": 1}
    taken = ask("llama-2-7b", "dgx-a100:8", **{name: kind(size) for name, size in sizes.items()}, dp=2)
    made = ask("llama-2-7b", "dgx-a100:8", **sizes, dp=2)
    assert str(taken) == str(made) and repr(taken) == repr(made)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"margin": "x"}, "margin is x; give a share"),
        ({"num_exact": 2.5}, "num_exact is 2.5; give a whole number"),
        ({"memory_bytes": "80GB"}, "memory_bytes is 80GB; give bytes"),
    ],
    ids=str,
)
def test_options_of_a_search_are_numbers(given: dict[str, Any], words: str) -> None:
    with pytest.raises(MeshweaveError, match=words):
        mw.plan("llama-2-7b", "dgx-a100:8", batch=8, sequence=512, **given)
