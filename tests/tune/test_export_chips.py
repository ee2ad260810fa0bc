"""Exports of plans for TPUs and for AMD's GPUs, and `tp_plan`s of families whose layers are not Llama's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_exports import plan_of

import meshweave as mw
from meshweave.base.errors import UnsupportedError
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.model.hugging_face import transformer_from_config
from meshweave.tune.exports import TARGETS, export, launch_file
from meshweave.tune.exports.hugging_face import _FAMILIES, _WITH_HEAD_NORMS

SIZES = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 128, "vocab_size": 96,
}  # fmt: skip
SHARED = {"strategy": "megatron", "tensor": 2, "data": 1, "pipeline": 1, "zero": 0}


def test_a_plan_for_tpus_is_maxtexts() -> None:
    plan = mw.plan("llama-2-7b", "tpu-v5p:8", batch=8, sequence=2048)
    for target in TARGETS:
        if target == "maxtext":
            assert export(plan, target).settings["max_target_length"] == 2048
            continue
        with pytest.raises(
            UnsupportedError, match=f"{target} is for GPUs, and the plan for TPU v5p; export to maxtext"
        ):
            export(plan, target)


@pytest.mark.parametrize(
    ("cluster", "resource"), [("nd-mi300x-v5:16", "amd.com/gpu"), ("p5:16", "nvidia.com/gpu")]
)
def test_a_pod_asks_for_the_gpus_of_its_maker(cluster: str, resource: str) -> None:
    made = export(plan_of({"pipeline": 1, "data": 16, "tensor": 1}), "torchtitan")
    job = json.loads(launch_file(made, "jobset", load_cluster(cluster)))["spec"]["replicatedJobs"][0][
        "template"
    ]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert job["parallelism"] == 2 and container["resources"]["limits"] == {resource: 8}


def styles_of(config: dict[str, Any]) -> dict[str, str]:
    """The styles of the modules of layers, as an export to transformers has them."""
    made = export(plan_of(SHARED, model=transformer_from_config(config, "folder/config.json")), "hf")
    prefix = "model."
    return {
        name.removeprefix(prefix): style
        for name, style in made.settings["tp_plan"].items()
        if ".layers." in name
    }


@pytest.mark.parametrize("family", sorted({*_FAMILIES, *_WITH_HEAD_NORMS} - {""}))
def test_styles_are_those_of_the_family(family: str) -> None:
    config = pytest.importorskip("transformers").AutoConfig.for_model(family)
    assert styles_of(config.to_dict() | SIZES) == config.base_model_tp_plan


@pytest.mark.parametrize("family", ["phi3", "glm4", "olmo2", "stablelm"])
def test_families_with_other_modules_are_refused_by_name(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family).to_dict() | SIZES
    assert transformers.AutoConfig.for_model(family).base_model_tp_plan != styles_of(
        SIZES | {"model_type": "llama"}
    )
    with pytest.raises(UnsupportedError, match=f"no styles for the layers of model_type '{family}'"):
        styles_of(config)
