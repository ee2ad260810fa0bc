"""Exports of models with experts read by Megatron-LM's own parser, as in test_export_parsers.py."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_export_parsers import PACKAGES, python_for
from test_exports import plan_of

from meshweave.describe.model import load_model
from meshweave.tune.exports import export

pytestmark = pytest.mark.slow

READ = """
import json, os, shlex, sys, types
given = json.load(sys.stdin)
os.environ |= {"WORLD_SIZE": str(given["chips"]), "RANK": "0"} | given["environment"]
import torch
torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=9, minor=0)  # as if there were a Hopper
torch.cuda.get_device_capability = lambda *_: (9, 0)
from megatron.training.arguments import parse_args, validate_args
sys.argv = ["pretrain_gpt.py", *shlex.split(given["text"].replace("\\\\\\n", " "))]
arguments = parse_args()
validate_args(arguments)
from megatron.training.argument_utils import core_transformer_config_from_args
arguments.apply_rope_fusion = False  # a kernel of Transformer Engine, which is not installed
config = core_transformer_config_from_args(arguments)
names = given["names"]
print(json.dumps({name: getattr(config, name) for name in names}))
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron-lm")
    command = [python_for("megatron-lm"), "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    done = subprocess.run(
        [*command, *PACKAGES["megatron-lm"].split()], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"pip could not install it: {done.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"])
@pytest.mark.parametrize(
    "degrees",
    [
        {"data": 8, "pipeline": 1, "tensor": 1, "expert": 8},
        {"data": 4, "pipeline": 1, "tensor": 2, "expert": 4},
    ],
)
def test_its_own_parser_reads_the_model(name: str, degrees: dict[str, Any], core: Path) -> None:
    config = json.loads(load_model(name).config)
    made = export(plan_of(degrees, model=name), "megatron-lm")
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    counts = ("n_routed_experts", "num_local_experts", "num_experts")
    experts = next(config[key] for key in counts if key in config)
    expected: dict[str, Any] = {
        "num_moe_experts": experts, "moe_router_topk": config["num_experts_per_tok"], "moe_ffn_hidden_size": inner,
        "ffn_hidden_size": config["intermediate_size"], "normalization": "RMSNorm", "gated_linear_unit": True,
        "layernorm_epsilon": config["rms_norm_eps"], "add_bias_linear": False, "moe_grouped_gemm": True,
        "moe_router_pre_softmax": False, "moe_aux_loss_coeff": config.get("router_aux_loss_coef", 0.0),
        "expert_model_parallel_size": degrees["expert"], "expert_tensor_parallel_size": 1,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_score_function": config.get("scoring_func", "softmax"),
        "moe_router_topk_scaling_factor": config.get("routed_scaling_factor"),
        "moe_router_num_groups": config.get("n_group"), "moe_router_group_topk": config.get("topk_group"),
    }  # fmt: skip
    if "kv_lora_rank" in config:
        dense, scaling = config["first_k_dense_replace"], config["rope_scaling"]
        expected |= {
            "moe_layer_freq": [0] * dense + [1] * (config["num_hidden_layers"] - dense),
            "moe_shared_expert_intermediate_size": inner * config["n_shared_experts"],
            "moe_router_enable_expert_bias": True, "multi_latent_attention": True,
            "kv_lora_rank": config["kv_lora_rank"], "q_lora_rank": config["q_lora_rank"],
            "qk_head_dim": config["qk_nope_head_dim"], "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
            "v_head_dim": config["v_head_dim"], "rope_type": "yarn", "rotary_scaling_factor": scaling["factor"],
            "mscale": scaling["mscale"], "mscale_all_dim": scaling["mscale_all_dim"],
            "beta_fast": scaling["beta_fast"], "beta_slow": scaling["beta_slow"],
            "original_max_position_embeddings": scaling["original_max_position_embeddings"],
            "rotary_base": config["rope_theta"],
        }  # fmt: skip
    given = {"text": made.text, "environment": made.environment, "chips": 8, "names": list(expected)}
    done = subprocess.run(
        [python_for("megatron-lm"), "-c", READ], input=json.dumps(given), capture_output=True, text=True,
        check=False, cwd=core, env=os.environ | {"PYTHONPATH": str(core)}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert json.loads(done.stdout.strip().splitlines()[-1]) == expected
