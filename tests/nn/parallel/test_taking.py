"""Which models `parallelize` takes: what is refused leaves the model as it was; what does not work says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
pytest.importorskip("transformers", reason="transformers is not installed")

from shared_launch import SharedLaunch

HERE = {"PYTHONPATH": str(Path(__file__).parent)}
WORDS = {
    "push_to_hub": "push that folder",
    "resize_token_embeddings": "before parallelize",
    "add_adapter": "PEFT puts adapters into the model before parallelize",
    "past_key_values": "under torch.no_grad()",
    "inputs_embeds": "give input_ids",
    "use_cache": "under torch.no_grad()",
    "output_attentions": "not kept",
    "output_hidden_states": "hooks on .blocks",
    "states by the config": "output_hidden_states is not computed: take them from hooks on .blocks",
    "return_dict": "by these names",
    "unknown": "lables is not computed",
    "labels of another shape": "shape (2, 7)",
    "labels and targets": "give one of them",
    "deepcopy": "not copied",
    "deepcopy of the model": "not copied",
    "pickle": "not pickled",
    "save": "not pickled",
    "custom loss": "loss_function is not computed",
    "inner": "call the whole model",
    "inner save": "mw.save_weights",
    "ddp": "take FSDP2",
    "ddp around": "take FSDP2",
    "fsdp around": "take its .module",
    "taken for a module": "has no parameters: take its .module",
    "lora": "merge_and_unload() others and parallelize the result",
    "lora around": "take its .module",
    "again": "a forward of its own",
    "another norm": "model.norm is a Sequential that was put there after parallelize",
}
TOLERANCE = 1e-12
FEW = dict.fromkeys(("mamba", "inkling2_text"), "refused")
FEW |= dict.fromkeys(("gpt2", "granite", "phi3", "bloom", "mixtral", "youtu"), "exact")


@pytest.fixture(scope="module")
def ranks(launch_once: SharedLaunch) -> list[dict[str, Any]]:
    names = ("refusals", "features", "harmless", "meta", "meta_activation", "plain_words", "one_optimizer")
    folder = launch_once.folder / "taken"
    folder.mkdir(exist_ok=True)
    payload = {"names": names, "kinds": list(FEW), "folder": str(folder)}
    return launch_once("taking_rank_functions:tried", 2, payload, timeout_s=300, env=HERE)


@pytest.mark.gloo
def test_a_refused_model_is_as_it_was(ranks: list[dict[str, Any]]) -> None:
    assert [answer["refusals"] for answer in ranks] == [[], []]


@pytest.mark.gloo
def test_features_that_are_not_there_say_what_to_use(ranks: list[dict[str, Any]]) -> None:
    for answer in ranks:
        said = answer["features"]
        assert said.keys() == WORDS.keys()
        for name, words in WORDS.items():
            assert words in said[name], (name, said[name])
            assert "RAW" not in said[name] and "\n" not in said[name], (name, said[name])


@pytest.mark.gloo
def test_arguments_that_change_nothing_and_checkpointing(ranks: list[dict[str, Any]]) -> None:
    for answer in ranks:
        off = answer["harmless"]
        calls = [off.pop(f"calls {of}") for of in ("of a layer", "without", "of a wrapped layer")]
        assert calls == [2, 1, 2]
        assert max(off.values()) < TOLERANCE, off


@pytest.mark.gloo
def test_buffers_that_no_checkpoint_has_are_computed_anew(ranks: list[dict[str, Any]]) -> None:
    for answer in ranks:
        meta = answer["meta"]
        assert all(abs(loss - meta["expected"]) < 1e-5 for loss in meta["losses"]), meta
        before, after = answer["meta_activation"]
        assert "model.layers.0.mlp.act_fn.slope was made on the meta device" in before
        assert after == ""


@pytest.mark.gloo
def test_architectures_are_exact_or_refused(ranks: list[dict[str, Any]]) -> None:
    for answer in ranks:
        for kind, outcomes in answer["few"].items():
            assert {said[0] for said in outcomes.values()} == {FEW[kind]}, (kind, outcomes)


@pytest.mark.gloo
def test_only_plain_models_are_recognised_by_names(ranks: list[dict[str, Any]]) -> None:
    around, plain = ranks[0]["plain_words"]
    assert "a LlamaModel of transformers, in a class of its own" in around
    assert plain == "nanoGPT"


@pytest.mark.gloo
def test_models_of_one_optimizer_are_compared_in_one_order(ranks: list[dict[str, Any]]) -> None:
    assert [answer["one_optimizer"] for answer in ranks] == ["", ""]
