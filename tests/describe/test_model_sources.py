"""What `load_model` takes besides names and files: ids of a hub, and models of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import meshweave as mw
from meshweave.base.errors import DescriptionError
from meshweave.describe.model import load_model

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100,
    "intermediate_size": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 128,
}  # fmt: skip


@pytest.mark.parametrize(("name", "billions"), [("qwen3-8b", 8.19), ("qwen3-32b", 32.76)])
def test_entries_have_the_parameters_of_their_cards(name: str, billions: float) -> None:
    assert load_model(name).num_parameters / 1e9 == pytest.approx(billions, abs=0.005)


def test_a_model_of_transformers_is_its_config() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**{key: value for key, value in CONFIG.items() if key != "model_type"})
    model = transformers.LlamaForCausalLM(config)
    for source in (config, model):
        loaded = load_model(source)
        assert (loaded.num_layers, loaded.hidden, loaded.vocab_size) == (2, 64, 100)
        assert loaded.architecture.model_type == "llama" and not loaded.not_priced_at(64)
    assert load_model(model).name == "LlamaForCausalLM"
    step = mw.step(model, "dgx-h100:8", 8, 64, tp=1)
    assert step.time_s == mw.step(config, "dgx-h100:8", 8, 64, tp=1).time_s


@pytest.mark.parametrize("source", [3, None, SimpleNamespace(config=None), object()])
def test_what_describes_no_model_is_named_in_a_line(source: object) -> None:
    with pytest.raises(
        DescriptionError, match=f"a {type(source).__name__} is no description of a model"
    ) as error:
        load_model(source)  # type: ignore[arg-type]
    assert len(str(error.value)) < 200


def test_an_id_of_a_hub_is_read_from_the_cache_or_the_line_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    import json

    home = tmp_path / "models--some-one--a-model"
    (home / "refs").mkdir(parents=True)
    (home / "refs/main").write_text("abc")
    (home / "snapshots/abc").mkdir(parents=True)
    (home / "snapshots/abc/config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    model = load_model("some-one/a-model")
    assert (model.name, model.num_layers) == ("a-model", 2)
    for name in ("some-one/another-model", "a..b/c--d"):
        with pytest.raises(DescriptionError, match=r"no such file.*`hf download"):
            load_model(name)
    with pytest.raises(DescriptionError, match=r"no such file$"):
        load_model("folder/plan.toml")


def test_a_key_stands_once_in_a_table_of_json(tmp_path: Path) -> None:
    """As in TOML: of two values the last one counted, and nothing was said."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG)[:-1] + ', "hidden_size": 128}')
    with pytest.raises(DescriptionError, match="is not valid JSON: the key 'hidden_size' stands twice"):
        load_model(path)
