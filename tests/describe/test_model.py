"""Models and workloads: published sizes and FLOPs, Hugging Face configs."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshweave.base.errors import DescriptionError, UnsupportedError
from meshweave.describe.model import FcLayer, Transformer, load_model
from meshweave.describe.model.model_file import model_table, transformer_from
from meshweave.describe.model.workload import Workload

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "hidden_act": "silu",
    "vocab_size": 128256,
    "rope_theta": 500000.0,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "vocab_size": 50257,
}


def config(tmp_path: Path, data: dict[str, Any]) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize("name, flops, ms", [("gpt3", 1.113e13, 40.9), ("megatron-nlg", 3.092e13, 113.7)])
def test_flops_per_chip_and_block_at_256_chips(name: str, flops: float, ms: float) -> None:
    """Three products of each layer, of two FLOPs for each token and weight."""
    weights = sum(layer.in_features * layer.out_features for layer in load_model(name).fc_layers())
    per_chip = 3 * 2 * Workload(128, 2048).tokens * weights / 256
    assert per_chip == pytest.approx(flops, rel=5e-4)
    assert per_chip / 272e12 * 1e3 == pytest.approx(ms, abs=0.05)


@pytest.mark.parametrize(
    "name, billions",
    [
        ("gpt3", 175),
        ("mt-nlg", 530),
        ("palm", 540),
        ("t-nlg", 17),
        ("llama-2-7b", 6.74),
        ("llama-2-13b", 13.0),
        ("llama-2-70b", 69),
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.6),
        ("llama-3.1-405b", 405),
    ],
)
def test_published_parameter_counts(name: str, billions: float) -> None:
    assert load_model(name).num_parameters == pytest.approx(billions * 1e9, rel=6e-3)


def test_fc_layers_of_gpt3() -> None:
    h = 12288
    assert load_model("gpt3").fc_layers() == (
        FcLayer("qkv", h, 3 * h),
        FcLayer("out", h, h),
        FcLayer("ff1", h, 4 * h),
        FcLayer("ff2", 4 * h, h),
    )


def test_hugging_face_llama_is_the_catalog_entry(tmp_path: Path) -> None:
    ours, theirs = load_model("llama-3-8b"), load_model(config(tmp_path, LLAMA))
    assert theirs.fc_layers() == ours.fc_layers()
    assert theirs.num_parameters == ours.num_parameters
    assert load_model(str(tmp_path)) == theirs


@pytest.mark.parametrize(
    "data, expected",
    [
        (GPT2, (12, 768, 12, 12, 64, 3072, False, True)),
        ({**GPT2, "n_inner": 1000}, (12, 768, 12, 12, 64, 1000, False, True)),
        (
            {
                "model_type": "gpt_neox",
                "hidden_size": 6144,
                "num_hidden_layers": 44,
                "num_attention_heads": 64,
                "intermediate_size": 24576,
                "hidden_act": "gelu_fast",
                "tie_word_embeddings": False,
            },
            (44, 6144, 64, 64, 96, 24576, False, False),
        ),
        (
            {
                "model_type": "opt",
                "hidden_size": 768,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
                "ffn_dim": 3072,
                "activation_function": "relu",
            },
            (12, 768, 12, 12, 64, 3072, False, True),
        ),
        ({**LLAMA, "model_type": "mistral", "head_dim": 160}, (32, 4096, 32, 8, 160, 14336, True, False)),
        ({**LLAMA, "model_type": "qwen2"}, (32, 4096, 32, 8, 128, 14336, True, False)),
        ({**LLAMA, "model_type": "brand_new"}, (32, 4096, 32, 8, 128, 14336, True, False)),
        (
            {**LLAMA, "model_type": "brand_new", "hidden_act": "gelu"},
            (32, 4096, 32, 8, 128, 14336, False, False),
        ),
    ],
)
def test_hugging_face_families(data: dict[str, Any], expected: tuple[Any, ...], tmp_path: Path) -> None:
    m = load_model(config(tmp_path, data))
    assert expected == (
        m.num_layers,
        m.hidden,
        m.num_heads,
        m.num_kv_heads,
        m.head_dim,
        m.ffn_hidden,
        m.gated_ffn,
        m.tied_embeddings,
    )


# Keys and values as in the config.json of each model on the Hugging Face hub, with the published parameter count.
PUBLISHED_CONFIGS = {
    "bigscience/bloom": (
        {
            "model_type": "bloom",
            "n_embed": 14336,
            "n_layer": 70,
            "num_attention_heads": 112,
            "vocab_size": 250880,
        },
        (70, 14336, 112, 112, 128, 57344, False),
        176.2e9,
    ),
    "bigscience/bloom-7b1": (
        {"model_type": "bloom", "n_embed": 4096, "n_layer": 30, "n_head": 32, "vocab_size": 250880},
        (30, 4096, 32, 32, 128, 16384, False),
        7.07e9,
    ),
    "gpt2-xl": (
        {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "vocab_size": 50257},
        (48, 1600, 25, 25, 64, 6400, False),
        1.558e9,
    ),
    "EleutherAI/gpt-j-6b": (
        {
            "model_type": "gptj",
            "n_embd": 4096,
            "n_layer": 28,
            "n_head": 16,
            "n_inner": None,
            "vocab_size": 50400,
            "tie_word_embeddings": False,
        },
        (28, 4096, 16, 16, 256, 16384, False),
        6.05e9,
    ),
    "EleutherAI/gpt-neo-2.7B": (
        {
            "model_type": "gpt_neo",
            "hidden_size": 2560,
            "num_layers": 32,
            "num_heads": 20,
            "intermediate_size": None,
            "vocab_size": 50257,
        },
        (32, 2560, 20, 20, 128, 10240, False),
        2.65e9,
    ),
    "EleutherAI/gpt-neox-20b": (
        {
            "model_type": "gpt_neox",
            "hidden_size": 6144,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
            "intermediate_size": 24576,
            "vocab_size": 50432,
            "tie_word_embeddings": False,
        },
        (44, 6144, 64, 64, 96, 24576, False),
        20.55e9,
    ),
    "facebook/opt-66b": (
        {
            "model_type": "opt",
            "hidden_size": 9216,
            "num_hidden_layers": 64,
            "num_attention_heads": 72,
            "ffn_dim": 36864,
            "vocab_size": 50272,
        },
        (64, 9216, 72, 72, 128, 36864, False),
        65.7e9,
    ),
    "tiiuae/falcon-7b": (
        {
            "model_type": "falcon",
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "num_kv_heads": 71,
            "multi_query": True,
            "new_decoder_architecture": False,
            "vocab_size": 65024,
        },
        (32, 4544, 71, 1, 64, 18176, False),
        6.92e9,
    ),
    "tiiuae/falcon-40b": (
        {
            "model_type": "falcon",
            "hidden_size": 8192,
            "n_layer": 60,
            "n_head": 128,
            "n_head_kv": 8,
            "multi_query": True,
            "new_decoder_architecture": True,
            "vocab_size": 65024,
        },
        (60, 8192, 128, 8, 64, 32768, False),
        41.3e9,
    ),
    "mosaicml/mpt-30b": (
        {
            "model_type": "mpt",
            "d_model": 7168,
            "n_layers": 48,
            "n_heads": 64,
            "expansion_ratio": 4,
            "attn_config": {"attn_type": "multihead_attention"},
            "vocab_size": 50432,
        },
        (48, 7168, 64, 64, 112, 28672, False),
        29.96e9,
    ),
    "bigcode/starcoder": (
        {
            "model_type": "gpt_bigcode",
            "n_embd": 6144,
            "n_layer": 40,
            "n_head": 48,
            "n_inner": 24576,
            "vocab_size": 49152,
        },
        (40, 6144, 48, 1, 128, 24576, False),
        15.5e9,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED_CONFIGS)
def test_published_configs(name: str, tmp_path: Path) -> None:
    data, sizes, parameters = PUBLISHED_CONFIGS[name]
    m = load_model(config(tmp_path, data))
    assert sizes == (
        *(m.num_layers, m.hidden, m.num_heads, m.num_kv_heads, m.head_dim),
        *(m.ffn_hidden, m.gated_ffn),
    )
    assert m.num_parameters == pytest.approx(parameters, rel=5e-3)


def test_mpt_names_its_kv_heads_and_ffn_under_names_of_its_own(tmp_path: Path) -> None:
    mpt = PUBLISHED_CONFIGS["mosaicml/mpt-30b"][0]
    for attention, kv_heads in (({"kv_n_heads": 8}, 8), ({"attn_type": "multiquery_attention"}, 1), ({}, 64)):
        data = {**mpt, "attn_config": attention, "expansion_ratio": 2}
        m = load_model(config(tmp_path, data))
        assert (m.num_kv_heads, m.ffn_hidden) == (kv_heads, 2 * 7168)


@pytest.mark.parametrize(
    "extra",
    [
        {"num_local_experts": 8},
        {"num_experts": 60},
        {"n_routed_experts": 256},
        {"num_experts": 10**400},
        {"kv_lora_rank": 512},
        {"is_encoder_decoder": True},
    ],
)
def test_other_architectures_are_refused_by_name(extra: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(extra))) as caught:
        load_model(config(tmp_path, {**LLAMA, **extra}))
    assert "\n" not in str(caught.value)


def test_one_expert_is_dense(tmp_path: Path) -> None:
    assert load_model(config(tmp_path, {**LLAMA, "num_local_experts": 1})).num_layers == 32


@pytest.mark.parametrize(
    "change, says",
    [
        ({"hidden_size": None}, "hidden_size: missing; give the hidden size"),
        ({"hidden_size": -1}, "hidden_size: -1 is not valid; give a whole number"),
        ({"hidden_size": "4096"}, "hidden_size: '4096' is not valid"),
        ({"hidden_size": True}, "hidden_size: true is not valid"),
        ({"hidden_size": 4095}, "head_dim: missing, and 32 heads do not divide hidden 4095"),
        ({"num_key_value_heads": 5}, "num_key_value_heads: 5 does not divide the 32 heads"),
        ({"intermediate_size": None}, "intermediate_size: missing"),
    ],
)
def test_wrong_hugging_face_values(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(DescriptionError) as caught:
        load_model(config(tmp_path, {**LLAMA, **change}))
    assert f"config.json: {says}" in str(caught.value)


def test_all_problems_of_a_config_come_in_one_error(tmp_path: Path) -> None:
    path = config(tmp_path, {"model_type": "bloom", "n_head": "112", "vocab_size": 0})
    with pytest.raises(DescriptionError) as caught:
        load_model(path)
    assert str(caught.value).splitlines() == [
        f"{path}: 4 problems",
        "  num_hidden_layers: missing; give the number of blocks as num_hidden_layers or n_layer or n_layers "
        "or num_layers",
        "  hidden_size: missing; give the hidden size as hidden_size or n_embd or n_embed or d_model",
        "  n_head: '112' is not valid; give a whole number from 1 to 2147483648",
        "  vocab_size: 0 is not valid; give a whole number from 1 to 2147483648",
    ]


def test_all_problems_of_a_model_file_come_in_one_error(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "m"\nsource = "s"\nlayers = 2\nhidden = 62\nnum_heads = 4\ngated = 1\n')
    with pytest.raises(DescriptionError) as caught:
        load_model(path)
    headline, *problems = str(caught.value).splitlines()
    assert headline == f"{path}: 3 problems"
    assert [line.partition(";")[0] for line in problems] == [
        "  layers: unknown key (did you mean 'num_layers'?)",
        "  gated: unknown key (did you mean 'gated_ffn'?)",
        "  ffn_hidden: missing",
    ]


def test_own_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    good = (
        'name = "m"\nsource = "s"\nnum_layers = 2\nhidden = 64\n'
        "num_heads = 4\nffn_hidden = 256\ngated_ffn = false\n"
    )
    path.write_text(good)
    assert load_model(path) == Transformer("m", 2, 64, 4, 4, 16, 256, None, False, "s")
    for old, new, says in [
        ("hidden = 64", "hiden = 64", "hiden: unknown key (did you mean 'hidden'?)"),
        ("hidden = 64", "hidden = 62", "head_dim: missing, and 4 heads do not divide hidden 62"),
        ("gated_ffn = false", "", "gated_ffn: missing; give true for a gated FFN"),
        ('source = "s"', 'source = ""', "source: '' is not valid; give where the sizes are from"),
        ("num_heads = 4", "num_heads = 4\nnum_kv_heads = 3", "num_kv_heads: 3 does not divide the 4 heads"),
    ]:
        path.write_text(good.replace(old, new, 1))
        with pytest.raises(DescriptionError) as caught:
            load_model(path)
        assert f"mine.toml: {says}" in str(caught.value)


def test_wrong_workloads() -> None:
    for make in (
        lambda: Workload(0, 1),
        lambda: Workload(1, -1),
        lambda: Workload(1, 1, "bf16"),
        lambda: Transformer("t", 1, 8, 3, 2, 1, 8, None, False, "s"),
        lambda: Transformer("t", 0, 8, 2, 2, 1, 8, None, False, "s"),
    ):
        with pytest.raises(DescriptionError):
            make()


@pytest.mark.parametrize("text", ["nonsense", "[]", "3", "[" * 50_000])
def test_a_scaling_of_angles_is_a_table_of_json(text: str) -> None:
    model = load_model("llama-3-8b")
    table = model_table(model)
    table["architecture"] = {**table.get("architecture", {}), "rotary_scaling": text}
    with pytest.raises(DescriptionError, match=r"rotary_scaling: .* table of JSON"):
        transformer_from(table, "a model")
