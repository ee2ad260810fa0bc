"""A plan straight from `plan` trains a model: `parallelize` refuses none of its own library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
pytest.importorskip("transformers", reason="transformers is not installed")

from planned_rank_functions import BATCH, SEQUENCE
from reference_models import make

import meshweave as mw
from meshweave.execute.ranks.launch import launch

HERE = {"PYTHONPATH": str(Path(__file__).parent)}
KINDS = ("llama", "mistral", "qwen2", "gpt2", "seed_oss")
FIXED: dict[str, dict[str, Any]] = {
    "": {},
    " by tensor ranks": {"tp": 4},
    " by a mesh": {"tp": (2, 2), "strategy": ["meshslice_block", "collective_block"]},
}
"""What a plan is told beside model, cluster, batch and sequence: nothing, and for one model some more."""


def made_plans(folder: Path, kinds: tuple[str, ...]) -> dict[str, mw.Plan]:
    """Write the plans of small models into a folder, and return them by file."""
    made = {}
    for kind in kinds:
        make(kind).config.save_pretrained(folder / kind)
        for name, fixed in FIXED.items() if kind == "llama" else [("", {})]:
            file = f"{kind}{name}.json"
            made[file] = mw.plan(folder / kind, "dgx-h100:4", batch=BATCH, sequence=SEQUENCE, **fixed)
            made[file].save(folder / file)
    return made


@pytest.mark.gloo
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "kinds", [KINDS[3:4], pytest.param(KINDS, marks=pytest.mark.slow)], ids=["one model", "all models"]
)
def test_a_plan_without_a_flag_trains_as_one_process_does(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    folder, made = tmp_path, made_plans(tmp_path, kinds)
    assert all(plan.step.overlap == "sites" for plan in made.values())
    payload = {"folder": str(folder), "plans": {name: name.split()[0].removesuffix(".json") for name in made}}
    for answer in launch("planned_rank_functions:trained", 4, payload, timeout_s=300, env=HERE):
        assert answer.keys() == made.keys()
        for name, of in answer.items():
            assert of["loss"] < 1e-10, (name, of)
            assert of["weights"] < 1e-9, (name, of)
            has_pipeline = made[name].step.best.degrees.pipeline > 1
            assert ["which mw.pipeline runs" in text for text in of["said"]] == [True] * has_pipeline


@pytest.mark.gloo
def test_the_order_of_a_plan_says_which_ranks_share_a_layer() -> None:
    """Replicas are neighbours where the plan has data inside tensor, and a mesh that lies otherwise is refused."""
    payload = {"order": ("data", "tensor", "context", "pipeline")}
    for answer in launch("planned_rank_functions:in_order", 4, payload, timeout_s=100, env=HERE):
        assert answer["ranks"] == [[0, 2], [1, 3]]
        assert answer["loss"] < 1e-10 and answer["weights"] < 1e-9
        assert "the plan's order is data-tensor-context-pipeline" in answer["refused"]
        assert "it is tensor-data" in answer["refused"] and "step by 1, 2 ranks" in answer["refused"]
