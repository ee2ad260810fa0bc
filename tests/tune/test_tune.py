"""The tuner: the paper's rule for dataflows, exhaustive search, and plans that survive a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshweave.algorithms.matmul2d import Matmul2dProblem
from meshweave.algorithms.matmul2d.common.problem import AXES, MESH
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.base.errors import DescriptionError
from meshweave.cost.machine import mesh_machine
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.model import load_model
from meshweave.describe.model.workload import Workload
from meshweave.estimate import estimate_skeleton
from meshweave.tune import load_plan, plan_model
from meshweave.tune.plan import Plan
from meshweave.tune.search import choose_stationary, choose_transposed, tune_product

POD = load_cluster("tpu-v4-pod:16")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_model(load_model("gpt3"), POD, Workload(8, 2048))


@pytest.mark.parametrize("model", ["gpt3", "megatron-nlg"])
def test_dataflows_are_those_of_the_paper(model: str) -> None:
    """qkv Y, out X, ff1 Y, ff2 X stationary (os, ls, os, ls forward) at 256 chips, where batch is 128."""
    chosen = [
        choose_stationary(128 * 2048, layer.in_features, layer.out_features)[0]
        for layer in load_model(model).fc_layers()
    ]
    assert chosen == ["y", "x", "y", "x"]


def test_few_tokens_keep_the_weights_in_place() -> None:
    assert choose_stationary(64, 12288, 49152)[0] == "w"


def test_search_finds_the_best_configuration_there_is() -> None:
    problem = Matmul2dProblem(16384, 12288, 12288, (4, 4), "ls", "bfloat16")
    machine = mesh_machine(POD, (4, 4), AXES[:2], MESH)
    entry = PRODUCTS_2D["meshslice"]
    best = tune_product(entry, problem, machine)
    times = {
        config: estimate_skeleton(entry.skeleton(problem, config), machine).total_s
        for config in entry.candidates(problem)
    }
    assert best.estimate.total_s == min(times.values())
    assert len(times) > 5


def test_meshslice_is_never_slower_than_collective(plan: Plan) -> None:
    """It may always take one slice."""
    assert plan.candidate("meshslice").block_s < plan.candidate("collective").block_s
    for layer, other in zip(
        plan.candidate("meshslice").layers, plan.candidate("collective").layers, strict=True
    ):
        for mine, theirs in zip(layer.passes, other.passes, strict=True):
            assert mine.total_s <= theirs.total_s


def test_plan_is_ranked_and_explained(plan: Plan) -> None:
    assert [c.block_s for c in plan.candidates] == sorted(c.block_s for c in plan.candidates)
    with_a_choice = [
        c for c in plan.candidates if c.entry_name in ("collective", "meshslice", "wang", "summa")
    ]
    assert len(with_a_choice) == 6  # two of them also at MeshSlice's slice counts
    assert all("slower" in c.runner_up for c in with_a_choice)
    assert all(layer.reason for layer in plan.best.layers)
    assert 0 < plan.best.utilisation < 1


def test_plan_survives_a_file(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    assert load_plan(path) == plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batsh": 3}, "batsh"),
        ({"batch": -1}, "batch"),
        ({"candidates": []}, "candidates"),
        ({"format": "other"}, "format"),
    ],
)
def test_a_broken_plan_is_one_line(
    plan: Plan, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**plan.model_dump(mode="json"), **change}))
    with pytest.raises(DescriptionError, match=message) as caught:
        load_plan(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_transposed_layers_keep_activations_as_they_are_stored() -> None:
    """Following the chain, each layer takes its input as the one before gave it."""
    for chain in (["y", "x", "y", "x"], ["w", "y", "w", "x"], ["w", "w", "w"], ["x", "w", "x"]):
        turned = False  # activations stored (tokens, features)
        for which, transposed in zip(chain, choose_transposed(chain), strict=True):  # type: ignore[arg-type]
            assert turned == ((which == "w") != transposed)
            turned = transposed  # the plain version gives Y stored (tokens, features)


def test_a_plan_for_few_tokens_has_transposed_layers_and_survives_a_file(tmp_path: Path) -> None:
    few = plan_model(load_model("gpt3"), POD, Workload(1, 512), ("meshslice",))
    assert [layer.stationary for layer in few.best.layers] == ["w"] * 4
    assert [layer.transposed for layer in few.best.layers] == [True, False, True, False]
    few.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == few
