"""Models with experts from their configs: parameters, FLOPs, and what is refused."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.base.errors import DescriptionError, MeshweaveError, UnsupportedError
from meshweave.describe.model.architecture import Architecture
from meshweave.describe.model.hugging_face import transformer_from_config
from meshweave.describe.model.memory import step_flops
from meshweave.describe.model.model_file import model_table, transformer_from
from meshweave.describe.model.model_types import model_type_table
from meshweave.describe.model.routed_architecture import routing_of
from meshweave.describe.model.routed_config import FAMILIES
from meshweave.describe.model.transformer import Transformer
from meshweave.describe.model.workload import Workload
from sampling import examples

_LATENT = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip


def config(model_type: str, *sizes: int, **more: Any) -> dict[str, Any]:
    """Return a config of so many layers, hidden features, heads, heads of keys, and tokens of the vocabulary."""
    names = "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size"
    return {"model_type": model_type, **dict(zip(names, sizes, strict=True)), **more}


MIXTRAL = config("mixtral", 32, 4096, 32, 8, 32000, intermediate_size=14336, num_local_experts=8,
                 num_experts_per_tok=2)  # fmt: skip
DEEPSEEK = config("deepseek_v3", 61, 7168, 128, 128, 129280, intermediate_size=18432, moe_intermediate_size=2048,
                  n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3,
                  n_group=8, topk_group=4, **_LATENT)  # fmt: skip
QWEN = config("qwen3_moe", 48, 2048, 32, 4, 151936, head_dim=128, intermediate_size=6144,
              moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8)  # fmt: skip
GPT_OSS = config("gpt_oss", 36, 2880, 64, 8, 201088, head_dim=64, intermediate_size=2880, num_local_experts=128,
                 num_experts_per_tok=4, sliding_window=128)  # fmt: skip

PUBLISHED = {
    "Mixtral 8x7B (Mistral, 2024: 46.7 and 12.9)": (MIXTRAL, 46.7, 12.9),
    "DeepSeek-V3 (report, 2024: 671 and 37)": (DEEPSEEK, 671, 37.5),
    "Qwen3-30B-A3B (report, 2025: 30.5 and 3.3)": (QWEN, 30.5, 3.3),
    "Qwen3-235B-A22B (235 and 22)": (
        {**QWEN, "num_hidden_layers": 94, "hidden_size": 4096, "num_attention_heads": 64,
         "moe_intermediate_size": 1536}, 235, 22.1),
    "gpt-oss-120b (card, 2025: 116.8 and 5.1, unembedding in, embedding out)": (GPT_OSS, 116.8, 5.7),
    "Kimi K2 (report, 2025: 1040 and 32.6)": (
        {**DEEPSEEK, "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64,
         "vocab_size": 163840, "n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1,
         "topk_group": 1}, 1026, 32.9),
    "Moonlight-16B-A3B (report, 2025: 16 and 3)": (
        config("deepseek_v3", 27, 2048, 16, 16, 163840, intermediate_size=11264, moe_intermediate_size=1408,
               n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1,
               **{**_LATENT, "q_lora_rank": None}), 16.0, 2.9),
    "Llama 4 Scout (card, 2025: text 108 and 17)": (
        config("llama4_text", 48, 5120, 40, 8, 202048, head_dim=128, intermediate_size=8192,
               intermediate_size_mlp=16384, num_local_experts=16, num_experts_per_tok=1), 107.8, 17.2),
    "Llama 4 Maverick (card, 2025: 400 and 17)": (
        config("llama4_text", 48, 5120, 40, 8, 202048, head_dim=128, intermediate_size=8192,
               intermediate_size_mlp=16384, num_local_experts=128, num_experts_per_tok=1,
               interleave_moe_layer_step=2), 400, 17.2),
    "OLMoE-1B-7B (2024: 6.9 and 1.3)": (
        config("olmoe", 16, 2048, 16, 16, 50304, intermediate_size=1024, num_experts=64,
               num_experts_per_tok=8), 6.9, 1.3),
    "Phi-3.5-MoE (card: 41.9 and 6.6)": (
        config("phimoe", 32, 4096, 32, 8, 32064, intermediate_size=6400, num_local_experts=16,
               num_experts_per_tok=2), 41.9, 6.6),
    "Granite-3.0-3B-A800M (card: 3.3 and 0.8)": (
        config("granitemoe", 32, 1536, 24, 8, 49155, intermediate_size=512, num_local_experts=40,
               num_experts_per_tok=8, tie_word_embeddings=True), 3.3, 0.88),
    "GLM-4.5 (report, 2025: 355 and 32)": (
        config("glm4_moe", 92, 5120, 96, 8, 151552, head_dim=128, intermediate_size=12288,
               moe_intermediate_size=1536, n_routed_experts=160, n_shared_experts=1, num_experts_per_tok=8,
               first_k_dense_replace=3, attention_bias=True), 353, 33.0),
}  # fmt: skip


def read(data: dict[str, Any]) -> Transformer:
    """Return the model of a config."""
    return transformer_from_config(data, "config.json")


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_were_published(name: str) -> None:
    data, total, active = PUBLISHED[name]
    model = read(data)
    assert model.num_parameters / 1e9 == pytest.approx(total, rel=0.01)
    assert model.num_active_parameters / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"kimi_k2"}))
def test_parameters_equal_those_of_transformers(name: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers has no {name}")
    sizes: dict[str, Any] = {"num_hidden_layers": 5}
    if name == "deepseek_v2":
        sizes["num_experts_per_tok"] = 6
    made = transformers.CONFIG_MAPPING[name](**sizes)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(made)
    data = json.loads(made.to_json_string(use_diff=False))
    assert read(data).num_parameters == sum(each.numel() for each in module.parameters())


def test_layers_come_in_the_order_of_the_config() -> None:
    assert [count for count, _ in read(DEEPSEEK).layers] == [3, 58]
    windows = [graph.attentions[0].window for _, graph in read(GPT_OSS).layers]
    assert windows == [128, None] * 18
    maverick = PUBLISHED["Llama 4 Maverick (card, 2025: 400 and 17)"][0]
    assert [graph.num_experts for _, graph in read(maverick).layers][:4] == [1, 128, 1, 128]


def test_the_first_layer_may_be_the_last_with_experts() -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100, "num_hidden_layers": 1}
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_interval": 1}
    first_alone = {"moe_layer_start_index": 0, "moe_layer_end_index": 0}
    assert read({"model_type": "ernie4_5_moe", **sizes, **experts, **first_alone}).is_routed


@pytest.mark.parametrize(("name", "biased"), [("solar_open", {"qkv"}), ("qwen3_moe", {"qkv", "out"})])
def test_products_of_attention_add_biases_as_in_the_class(name: str, biased: set[str]) -> None:
    sizes = {"hidden_size": 64, "vocab_size": 100, "num_hidden_layers": 1, "moe_intermediate_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
    graph = read({"model_type": name, **sizes, **heads, **experts, "attention_bias": True}).layer
    assert {node.name for node in graph.linears if node.bias} == biased


def test_a_step_counts_the_weights_that_a_token_meets() -> None:
    model, work = read(MIXTRAL), Workload(4, 128)
    active = model.num_active_parameters - 2 * 32000 * 4096 - 65 * 4096
    attention = 4 * 32 * 12 * (128 * 129 // 2) * 4096
    assert step_flops(model, work) == 6 * 512 * active + 6 * 512 * 32000 * 4096 + attention


def test_a_table_of_a_model_is_read_as_that_model() -> None:
    model = read(DEEPSEEK)
    assert transformer_from(model_table(model), "plan").layers == model.layers
    for config in (DEEPSEEK, GPT_OSS, MIXTRAL):
        alone = replace(read(config), config="", architecture=Architecture(), not_priced=())
        table = json.loads(json.dumps(model_table(alone)))
        assert transformer_from(table, "plan") == alone
        for key, value, said in (
            ("type", "Nrm", r"runs.0.nodes.0: there is no type 'Nrm' \(did you mean 'Norm'\?\)"),
            ("gian", "G", r"runs.0.nodes.0: unknown key 'gian' \(did you mean 'gain'\?\)"),
            ("ins", "X", r"runs.0.nodes.0: ins: "),
        ):
            wrong = json.loads(json.dumps(table))
            wrong["runs"][0]["nodes"][0][key] = value
            with pytest.raises(DescriptionError, match=said):
                transformer_from(wrong, "plan")
        with pytest.raises(DescriptionError, match=f"runs: they have {alone.num_layers} layers"):
            transformer_from({**table, "num_layers": 1}, "plan")


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"model_type": "afmoe"}, UnsupportedError, "a family that is not known"),
        ({"layer_types": ["linear_attention"] * 32}, UnsupportedError, "linear_attention"),
        ({"num_experts_per_tok": 9}, DescriptionError, "9 of 8 experts"),
        ({"num_experts_per_tok": None}, DescriptionError, "missing"),
        ({"num_key_value_heads": 5}, DescriptionError, "does not divide"),
        ({"num_local_experts": "many"}, DescriptionError, "not valid"),
        ({"num_local_experts": None}, DescriptionError, "n_routed_experts: missing"),
        ({"mlp_layer_types": ["sparse"] * 3}, DescriptionError, "mlp_layer_types: names 3 layers"),
        (
            {"layer_types": ["full_attention"] * 3},
            DescriptionError,
            "names the kinds of 3 layers, and there are 32",
        ),
        ({"tie_word_embeddings": "false"}, DescriptionError, "tie_word_embeddings: 'false' is not valid"),
    ],
)
def test_what_is_not_known_is_refused_by_name(changed: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        read({**MIXTRAL, **changed})


def test_keys_left_out_are_those_of_the_class() -> None:
    """A config of deepseek_v3 without `first_k_dense_replace` had three times its parameters in four layers."""
    registry = pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    for name, defaults in model_type_table()["routed"].items():
        own = json.loads(registry[name]().to_json_string(use_diff=False))
        own["num_experts_per_tok"] = own.get("num_experts_per_tok") or 2  # deepseek_v2 has no default
        whole = transformer_from_config(own, name)
        for key in {"mlp_layer_types", *defaults}:
            read = transformer_from_config({each: own[each] for each in own if each != key}, name)
            assert read.layers == whole.layers, (name, key)
            assert read.num_parameters == whole.num_parameters, (name, key)


def test_a_plan_of_a_model_with_a_long_config_is_read_again() -> None:
    names = [f"model.layers.{number}.block_sparse_moe.gate" for number in range(5000)]
    model = read({**MIXTRAL, "quantization_config": {"modules_to_not_convert": names}})
    assert len(model.config) > 100_000
    assert transformer_from(model_table(model), "plan") == model


def test_a_table_has_the_layers_of_a_model_that_was_changed() -> None:
    """A model that is cut short keeps the config that it was read from, which says another number of layers."""
    model = read(DEEPSEEK)
    short = replace(model, num_layers=3, layers=model.layers[:1], vocab_size=1000)
    again = transformer_from(json.loads(json.dumps(model_table(short))), "plan")
    assert (again.layers, again.num_layers, again.vocab_size) == (short.layers, 3, 1000)
    with pytest.raises(DescriptionError, match="runs: they have 61 layers, and num_layers is 4"):
        replace(model, num_layers=4)
    with pytest.raises(DescriptionError, match="begins or ends in 7168 hidden, and hidden is 64"):
        replace(model, hidden=64)


def test_what_has_no_price_is_said() -> None:
    said = read({**GPT_OSS, "quantization_config": {"bits": 4}, "strange": 3}).not_priced_at(2**20)
    assert any("sinks" in text for text in said)
    assert any("quantised" in text for text in said)
    assert any("strange" in text for text in said)


_RUBBISH: tuple[Any, ...] = (
    [], [1], [-1, 0], ["x"], "", "x", {}, {"a": 1}, -1, 0, 1, 1.5, 2**70, 1e400, float("nan"), True, False, None,
)  # fmt: skip
_KEYS = {
    "routed_scaling_factor", "scoring_func", "topk_method", "norm_topk_prob", "seq_aux", "aux_loss_alpha",
    "router_aux_loss_coef", "router_jitter_noise", "mlp_only_layers", "mlp_layer_types", "moe_layers",
    "moe_layer_interval", "moe_layer_start_index", "moe_layer_end_index", "decoder_sparse_step", "layer_types",
    "interleave_moe_layer_step", "num_shared_experts", "shared_expert_intermediate_size", "sliding_window",
    "attention_bias", "qkv_bias", "use_qk_norm", "rope_parameters", "rope_scaling", "hidden_act",
    "n_shared_experts",
}  # fmt: skip


@examples(200)
@given(st.data())
def test_rubbish_under_any_key_of_a_config_is_refused_or_read(data: st.DataObject) -> None:
    """A list for a number of shared experts ended in a TypeError."""
    own = dict(data.draw(st.sampled_from([MIXTRAL, DEEPSEEK, QWEN, GPT_OSS])))
    for key in data.draw(st.lists(st.sampled_from(sorted(_KEYS | own.keys())), min_size=1, max_size=2)):
        own[key] = data.draw(st.sampled_from(_RUBBISH))
    own["num_hidden_layers"] = (
        min(own["num_hidden_layers"], 4)
        if own["num_hidden_layers"] in range(100)
        else own["num_hidden_layers"]
    )
    for read in (lambda: transformer_from_config(own, "rubbish"), lambda: routing_of(own)):
        with contextlib.suppress(MeshweaveError):
            read()
