"""What of a config is not priced is said, or the model refused; families as transformers has them."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshweave.base.errors import DescriptionError, MeshweaveError, UnsupportedError
from meshweave.describe.model import Transformer, load_model
from meshweave.describe.model.config_features import is_off
from meshweave.describe.model.hugging_face import transformer_from_config
from meshweave.describe.model.model_file import model_table, transformer_from
from meshweave.describe.model.model_types import known_model_type, known_model_types, model_type_table
from meshweave.describe.model.nodes import EdgeSum, Norm
from meshweave.describe.model.routed_config import FAMILIES
from meshweave.describe.model.window_rules import window_rule, with_layer_kinds

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "hidden_act": "silu",
    "max_position_embeddings": 131072,
}  # fmt: skip
LONG = 2**20


def read(tmp_path: Path, **changes: Any) -> Transformer:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, **changes}))
    return load_model(path)


def said(tmp_path: Path, sequence: int = 8192, **changes: Any) -> str:
    return "\n".join(read(tmp_path, **changes).not_priced_at(sequence))


def test_a_plain_config_leaves_nothing_to_say(tmp_path: Path) -> None:
    assert not said(tmp_path)
    assert "131,072 positions" in said(tmp_path, 131073)


def test_windows_are_those_of_some_layers_or_all(tmp_path: Path) -> None:
    def kinds(**changes: Any) -> list[tuple[int, int | None]]:
        model = read(tmp_path, **changes)
        assert "window" not in "\n".join(model.not_priced_at(LONG))
        return [(count, kind.layer.attentions[0].window) for count, kind in model.kinds]

    assert kinds(model_type="mistral", sliding_window=4096) == [(32, 4096)]
    assert kinds(model_type="mistral") == [(32, 4096)]  # the default of its class
    assert kinds(model_type="mistral", sliding_window=None) == [(32, None)]
    assert kinds(model_type="qwen2", sliding_window=4096, use_sliding_window=False) == [(32, None)]
    names = ["sliding_attention", "full_attention"] * 16
    gemma = {"model_type": "gemma2", "sliding_window": 4096, "layer_types": names, "head_dim": 256}
    assert kinds(**gemma) == [(16, 4096), (16, None)]
    assert kinds(**{**gemma, "layer_types": ["full_attention"] * 32}) == [(32, None)]
    assert kinds(model_type="gemma2", sliding_window=4096) == [(16, 4096), (16, None)]
    assert kinds(model_type="qwen2", sliding_window=64, max_window_layers=9) == [(32, None)]
    words = "keys of the config that are not understood: max_window_layers"
    assert words in said(tmp_path, model_type="mine", sliding_window=64, max_window_layers=9)


def test_a_list_of_kinds_is_of_the_layers_that_there_are() -> None:
    """A config whose number of layers was lowered kept the windows of all: each of its layers had one."""
    names = ["sliding_attention", "full_attention"] * 13
    gemma = {**LLAMA, "model_type": "gemma2", "sliding_window": 4096, "layer_types": names, "head_dim": 256}
    model = transformer_from_config({**gemma, "num_hidden_layers": 4}, "config.json")
    assert [(count, kind.architecture.window) for count, kind in model.kinds] == [(2, 4096), (2, None)]
    with pytest.raises(DescriptionError, match="layer_types: names the kinds of 26 layers, and there are 32"):
        transformer_from_config(gemma, "config.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tie_word_embeddings", "true"), ("attention_bias", 1), ("multi_query", "no"), ("sliding_window", "4096"),
        ("sliding_window", 4096.5), ("sliding_window", -2), ("sliding_window", True),
        ("max_position_embeddings", "8192"), ("n_ctx", float("inf")),
    ],
)  # fmt: skip
def test_values_of_a_wrong_type_do_not_count_as_left_out(key: str, value: object) -> None:
    with pytest.raises(DescriptionError, match=f"{key}: .* is not valid; give "):
        transformer_from_config({**LLAMA, key: value}, "config.json")


@pytest.mark.parametrize("heads", [{}, {"num_kv_heads": 4}, {"num_key_value_heads": 4}])
@pytest.mark.parametrize("name", ["gpt_bigcode", "falcon"])
def test_heads_of_keys_without_multi_query_are_all_heads(name: str, heads: dict[str, int]) -> None:
    sizes = {"n_embd": 768, "hidden_size": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, **heads}
    read = {
        flag: transformer_from_config({"model_type": name, "multi_query": flag, **sizes}, "config.json")
        for flag in (False, True)
    }
    assert (read[False].num_kv_heads, read[True].num_kv_heads) == (12, 1)


def test_a_vocabulary_left_out_is_that_of_the_class_or_missed() -> None:
    sizes = {key: value for key, value in LLAMA.items() if key != "vocab_size"}
    for name, vocabulary in (("llama", 32000), ("gemma3_text", 262208)):
        model = transformer_from_config({**sizes, "model_type": name}, "config.json")
        assert model.vocab_size == vocabulary
    with pytest.raises(DescriptionError, match="vocab_size: missing"):
        transformer_from_config({**sizes, "model_type": "mine"}, "config.json")


@given(count=st.integers(1, 90), number=st.integers(1, 40), data=st.data())
@settings(deadline=None)
def test_layers_without_a_list_of_kinds_have_the_windows_of_their_class(
    count: int, number: int, data: st.DataObject
) -> None:
    """Over all families of transformers whose layers differ, by each key of theirs that says how."""
    registry = pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    name = data.draw(st.sampled_from(sorted(model_type_table()["windows"])))
    rule = window_rule(name)
    assert rule is not None
    changes: dict[str, Any] = {"sliding_window": 64} | (
        {"use_sliding_window": True} if rule.is_optional else {}
    )
    keys = (key for key in ("no_rope_layers", rule.key) if rule.form == "without rotary" or key == rule.key)
    key = data.draw(st.sampled_from(("", *filter(None, keys))))
    flags = st.lists(st.integers(0, 1), min_size=count, max_size=count)
    if key:
        changes[key] = data.draw(flags) if key == "no_rope_layers" else number
    config = {"model_type": name, **changes}
    if rule.form == "other":
        with pytest.raises(UnsupportedError, match="layer_types"):
            with_layer_kinds(config, count, "config.json")
        return
    own = getattr(registry[name](num_hidden_layers=count, **changes), "layer_types", None)
    read = with_layer_kinds(config, count, "config.json")
    assert read["layer_types"] == (own or ["sliding_attention"] * count)


@pytest.mark.parametrize(
    ("change", "norms", "sums"),
    [
        ({}, 2, 2),
        ({"model_type": "gemma2"}, 4, 2),
        ({"model_type": "phi"}, 1, 1),
        ({"model_type": "gpt_neox"}, 2, 1),
        ({"model_type": "gpt_neox", "use_parallel_residual": False}, 2, 2),
        ({"model_type": "falcon", "parallel_attn": True}, 1, 1),
        ({"model_type": "falcon", "parallel_attn": True, "new_decoder_architecture": True}, 2, 1),
        ({"model_type": "falcon", "parallel_attn": False}, 2, 2),
    ],
)
def test_norms_and_sums_of_a_layer_are_those_of_its_family(
    change: dict[str, Any], norms: int, sums: int, tmp_path: Path
) -> None:
    nodes = read(tmp_path, **change).layer.nodes
    assert sum(isinstance(node, Norm) for node in nodes) == norms
    assert sum(isinstance(node, EdgeSum) for node in nodes) == sums


def test_positions_beyond_those_that_a_model_learns_are_said(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25}))
    assert load_model(path).not_priced_at(1024) == ()
    assert load_model(path).not_priced_at(16384) == (
        "the model learns 1,024 positions: a longer sequence is priced as if it had more",
    )


@pytest.mark.parametrize(
    "change, words",
    [
        ({"attn_logit_softcapping": 50.0}, "soft cap of 50.0 on attention scores"),
        ({"final_logit_softcapping": 30.0}, "soft cap of 30.0 on logits"),
        ({"num_nextn_predict_layers": 1}, "1 multi-token-prediction layers"),
        ({"vision_config": {"hidden_size": 64}}, "vision_config not priced"),
        ({"audio_config": {"d": 1}}, "audio_config not priced"),
        ({"add_cross_attention": True}, "cross attention"),
        ({"num_kv_shared_layers": 4}, "keys and values that 4 layers share"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"attention_chunk_size": 8192}, "chunks of 8192"),
        ({"use_attention_gate": True}, "gate of attention"),
        ({"word_embed_proj_dim": 512}, "embeddings of width 512"),
        ({"model_type": "brand_new"}, "model_type 'brand_new': not one that is known"),
        ({"model_type": None}, "model_type missing"),
        ({"hyper_loops": 3, "lora_r": 8}, "not understood: hyper_loops, lora_r"),
    ],
)
def test_what_has_no_price_is_said(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in said(tmp_path, **change)
    off = {key: False if key != "model_type" else "llama" for key in change}
    assert words not in said(tmp_path, **off)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model_type": "bert"}, "type_vocab_size|no causal language model"),
        ({"model_type": "albert"}, "no causal language model"),
        ({"model_type": "vit", "image_size": 224}, "image_size"),
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({"model_type": "new", "is_decoder": False}, "is_decoder"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"mamba_d_state": 128}, "mamba_d_state"),
        ({"layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8}, "linear_attention"),
        ({"layers_block_type": ["mamba", "attention"] * 16}, "layers of 'mamba'"),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, "per_layer_config"),
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input"),
    ],
)
def test_what_is_no_dense_decoder_is_refused_in_one_line(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    if change == {"model_type": "bert"}:
        change = {**change, "type_vocab_size": 2}
    with pytest.raises(UnsupportedError, match=words) as caught:
        read(tmp_path, **change)
    assert "\n" not in str(caught.value)


def test_the_name_is_that_of_the_folder(tmp_path: Path) -> None:
    for folder in ("gemma2", "models--google--gemma-2-2b/snapshots/0a1b"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text(json.dumps(LLAMA))
    assert load_model(tmp_path / "gemma2").name == "gemma2"
    assert load_model(tmp_path / "models--google--gemma-2-2b/snapshots/0a1b").name == "gemma-2-2b"
    (tmp_path / "mine.json").write_text(json.dumps(LLAMA))
    assert load_model(tmp_path / "mine.json").name == "mine"


def test_architecture_is_read(tmp_path: Path) -> None:
    own = read(tmp_path, rope_theta=5e5, attention_bias=True).architecture
    assert (own.norm, own.positions, own.rotary_base, own.qkv_bias, own.out_bias, own.ffn_bias) == (
        *("rms", "rotary", 5e5, True, True, False),
    )
    assert read(tmp_path, model_type="qwen2").architecture.qkv_bias is True
    assert read(tmp_path, model_type="gpt_neox", rotary_pct=0.25).architecture.rotary_share == 0.25
    scaled = read(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}).architecture
    assert json.loads(scaled.rotary_scaling) == {"type": "linear", "factor": 2.0}


def test_defaults_of_families_are_no_sizes() -> None:
    assert {"llama", "mistral", "gpt2", "gpt_neox", "gemma2", "falcon", "phi3"} <= set(known_model_types())
    for name in known_model_types():
        known = known_model_type(name)
        assert known is not None and not {"num_hidden_layers", "hidden_size"} & known.defaults.keys()
    assert is_off([]) and is_off(0) and not is_off(1)


NASTY: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        2,
        10**400,
        1e308,
        float("inf"),
        float("nan"),
        "",
        "x" * 500,
        "\x00\n",
        4096,
        1.5,
    ),
    *([], [1, "a", None], {}, {"a": 1}, {"rope_type": "yarn", "factor": [1]}, ["sliding_attention"] * 3),
]
KEYS = (
    *LLAMA, "rope_scaling", "rope_theta", "rope_parameters", "sliding_window", "num_experts", "vision_config",
    "zz\n" + "y" * 300, "text_config", "architectures", "attn_config", "rotary_pct", "rotary_dim", "layer_types",
    "attention_bias", "multi_query", "tie_word_embeddings", "head_dim", "initializer_range", "rms_norm_eps",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_damaged_configs_are_read_whole_or_refused(seed: int) -> None:
    """What is read survives the table of a plan, and says what it says in lines that print."""
    draw = random.Random(seed)
    for _ in range(60):
        config = LLAMA | {"model_type": draw.choice(known_model_types())}
        config |= {draw.choice(KEYS): draw.choice(NASTY) for _ in range(draw.randint(1, 4))}
        try:
            model = transformer_from_config(config, "folder/config.json")
        except MeshweaveError:
            continue
        assert transformer_from(json.loads(json.dumps(model_table(model))), "plan") == model
        assert all(text.isprintable() and len(text) < 1000 for text in model.not_priced_at(LONG))


def test_no_family_with_experts_is_written_as_a_dense_one() -> None:
    """`validation/model_types.py` wrote them as not gated, by which their configs without experts were read."""
    assert not FAMILIES.keys() & set(known_model_types())
    for name in FAMILIES:
        read = transformer_from_config(LLAMA | {"model_type": name, "num_local_experts": 0}, "config.json")
        assert read.gated_ffn and read.not_priced_at(1)


@pytest.mark.slow
def test_every_config_of_transformers_is_planned_rightly_said_or_refused() -> None:
    pytest.importorskip("transformers")
    path = Path(__file__).parents[2] / "validation/model_types.py"
    spec = importlib.util.spec_from_file_location("model_types_population", path)
    assert spec is not None and spec.loader is not None
    population = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = population  # where its dataclasses look
    spec.loader.exec_module(population)
    types = [population.read_type(name) for name in sorted(population.CONFIG_MAPPING)]
    assert len(types) > 300
    assert [each.name for each in types if each.outcome == "WRONG"] == []
    for each in types:
        if each.model is not None and each.model.architecture.model_type in known_model_types():
            assert abs(each.error) <= population.WITHIN or any("learns" in text for text in each.said)
    if population.transformers.__version__ == population.model_type_table()["transformers"]:
        assert population.TABLE.read_text() == population.table(types)
