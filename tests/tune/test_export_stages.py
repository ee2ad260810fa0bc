"""Exports of pipelines whose stages have unequal numbers of layers: Megatron Core is told those of the price."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import Any

import pytest
from test_exports import plan_of

from meshweave.algorithms.step import Parallelism, StepProblem
from meshweave.algorithms.step.stacks import load_stack
from meshweave.algorithms.step.stages import stages_of
from meshweave.base.errors import UnsupportedError
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.model import load_model
from meshweave.tune.exports import LAUNCHERS, export, launch_file

OPTIONS = {
    "megatron-lm": "--pipeline-model-parallel-layout",
    "megatron-bridge": "model.pipeline_model_parallel_layout",
}


def counted(layout: str) -> list[int]:
    """Layers of each stage of a layout, whose first has the embedding and whose last has the loss."""
    unrolled = re.sub(r"(.)\*(\d+)", lambda match: match[1] * int(match[2]), layout)
    assert unrolled[0] == "E" and unrolled[-1] == "L" and set(unrolled[1:-1]) <= {"t", "|"}
    return [stage.count("t") for stage in unrolled.split("|")]


def priced(degrees: dict[str, Any], model: str, stack: str) -> tuple[int, ...]:
    """Layers of each stage, as a step on a stack is priced."""
    parallelism = Parallelism(**degrees)
    cluster = load_cluster("dgx-h100").with_chips(parallelism.num_ranks)
    problem = StepProblem(load_model(model), cluster, batch=64, sequence=8192, stack=load_stack(stack))
    return stages_of(problem, parallelism).layers


@pytest.mark.parametrize("target", sorted(OPTIONS))
@pytest.mark.parametrize(
    ("degrees", "model", "stack"),
    [
        ({"pipeline": 3, "data": 2, "tensor": 4}, "llama-3-8b", "megatron-core"),
        ({"pipeline": 4, "data": 2, "tensor": 2, "virtual_stages": 3, "schedule": "interleaved-1f1b"},
         "llama-3-8b", "megatron-core"),
        ({"pipeline": 4, "data": 1, "tensor": 2}, "llama-3-8b", "nanotron"),
    ],
)  # fmt: skip
def test_unequal_stages_are_those_of_the_price(
    target: str, degrees: dict[str, Any], model: str, stack: str
) -> None:
    layers = priced(degrees, model, stack)
    made = export(plan_of(degrees, model=model, settings={"stack": stack}), target)
    assert len(set(layers)) > 1 and counted(made.settings[OPTIONS[target]]) == list(layers)
    assert not any("evenly" in sentence for sentence in made.left_out)
    assert "--num-layers-per-virtual-pipeline-stage" not in made.settings
    if target == "megatron-bridge":
        virtual = degrees.get("virtual_stages")
        assert made.settings["model.virtual_pipeline_model_parallel_size"] == virtual


@pytest.mark.parametrize("target", sorted(OPTIONS))
@pytest.mark.parametrize("launcher", sorted(LAUNCHERS))
def test_a_layout_is_one_word_of_a_shell(target: str, launcher: str) -> None:
    made = export(plan_of({"pipeline": 3, "data": 2, "tensor": 4}), target)
    words = shlex.split(made.text.replace("\\\n", " "))
    assert any(word.endswith("Et*11|t*11|t*10L") for word in words)
    text = launch_file(made, launcher, load_cluster("dgx-h100:24"))
    assert "|t*11|t*10L'" in text


def test_equal_stages_need_no_layout() -> None:
    made = export(plan_of({"pipeline": 4}), "megatron-lm")
    assert OPTIONS["megatron-lm"] not in made.settings
    settings = export(plan_of({"pipeline": 4}), "megatron-bridge").settings
    assert settings[OPTIONS["megatron-bridge"]] is None  # a recipe may have one


def test_torchtitan_is_not_told_equal_stages_where_the_price_has_others() -> None:
    degrees = {"pipeline": 4, "data": 1, "tensor": 2}
    made = export(plan_of(degrees, model="llama-3-8b", settings={"stack": "nanotron"}), "torchtitan")
    assert "pipeline_parallel_layers_per_stage" not in made.settings["parallelism"]
    assert any("not shared out evenly" in sentence for sentence in made.left_out)


def test_torchtitan_makes_as_many_stages_as_the_plan() -> None:
    """It makes two a rank where it is told none, and else as many as layers a stage make."""
    degrees = {"pipeline": 4, "virtual_stages": 4, "schedule": "interleaved-1f1b", "data": 1, "tensor": 2}
    model = replace(load_model("llama-3-8b"), num_layers=46)
    made = export(plan_of(degrees, model=model), "torchtitan")
    each = made.settings["parallelism"]["pipeline_parallel_layers_per_stage"]
    assert -(-46 // each) == 16
    theirs = f"torchtitan gives them {', '.join(['3'] * 14 + ['2'] * 2)} unless"
    assert any(theirs in sentence for sentence in made.left_out)
    with pytest.raises(UnsupportedError, match="3 of 40 make 14 stages, and not 16"):
        export(plan_of(degrees, model=replace(model, num_layers=40)), "torchtitan")
    made = export(plan_of(degrees | {"virtual_stages": 2}, model=replace(model, num_layers=44)), "torchtitan")
    assert "pipeline_parallel_layers_per_stage" not in made.settings["parallelism"]
