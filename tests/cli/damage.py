"""Good descriptions of small things, and random changes that mostly spoil them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

CLUSTER = """
name = "small"
source = "made up"
[host]
kernel_s = 1e-6
layer_s = 1e-4
[chip]
name = "chip"
peak_flops_per_s = { bfloat16 = 1e12, float32 = 5e11 }
effective_flops_per_s = 9e11
memory_bytes = 16_000_000_000
memory_bytes_per_s = 1e11
[network]
kind = "torus"
shape = [2, 2]
[[network.axes]]
name = "row"
link_bytes_per_s = 5e9
link_latency_s = 1e-6
ways = 2
[network.axes.constants]
all_gather = { bytes_per_s = 6e9, sync_s = 6e-6, launch_s = 1e-5 }
[[network.axes]]
name = "col"
link_bytes_per_s = 5e9
"""

HOSTS = """
name = "hosts"
source = "made up"
[chip]
name = "chip"
peak_flops_per_s = { bfloat16 = 1e12 }
memory_bytes = 16e9
memory_bytes_per_s = 1e11
[network]
kind = "hosts"
num_hosts = 2
chips_per_host = 2
nics_per_host = 1
intra = { name = "nvlink", link_bytes_per_s = 1e11 }
nic = { name = "nic", link_bytes_per_s = 1e9, link_latency_s = 1e-5 }
"""

TREE = """
name = "tree"
source = "made up"
[chip]
name = "chip"
peak_flops_per_s = { bfloat16 = 1e12 }
memory_bytes = 16e9
memory_bytes_per_s = 1e11
[network]
kind = "tree"
[[network.levels]]
fanout = 2
axis = { name = "leaf", link_bytes_per_s = 1e10, ways = 2 }
[[network.levels]]
fanout = 2
links = 2
[network.levels.axis]
name = "spine"
link_bytes_per_s = 2e9
link_latency_s = 1e-5
"""

MODEL = """
name = "small"
source = "made up"
num_layers = 2
hidden = 256
num_heads = 4
num_kv_heads = 2
head_dim = 64
ffn_hidden = 512
vocab_size = 1000
gated_ffn = true
"""

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

_EXPERTS = CONFIG | {"num_experts_per_tok": 2, "intermediate_size": 128}
EXPERTS_CONFIGS = (
    _EXPERTS | {"model_type": "mixtral", "num_local_experts": 8},
    _EXPERTS | {"model_type": "gpt_oss", "num_local_experts": 8, "head_dim": 64, "sliding_window": 16},
    _EXPERTS | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 128, "head_dim": 64},
    _EXPERTS
    | {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    },
)
"""Models of experts: whole layers, with windows, and with latent attention, groups and dense layers before."""

NUMBERS = (
    "-1",
    "0",
    "1",
    "3",
    "7",
    "1e400",
    "-1e400",
    "nan",
    "inf",
    "1.5",
    "1" + "0" * 30,
    "1e300",
    "5e-324",
)
WORDS = ('"x"', "true", "[]", "{}", "[1, 2]", '""', '"\\u0000"', "null", '"' + "y" * 300 + '"')
NESTED = "[" * 2000 + "]" * 2000
RUBBISH = (
    b"",
    b" \n",
    b"\xff\xfe\x00\x01",
    b"\x00" * 100,
    b"{",
    b"[[[",
    b"=",
    NESTED.encode(),
    b"x = " + NESTED.encode(),
)


def changed_lines(rng: random.Random, text: str) -> str:
    """One or two lines of `key = value` text left out, doubled, misspelt, or given another value."""
    lines = text.strip().splitlines()
    for _ in range(rng.choice((1, 1, 2))):
        i = rng.randrange(len(lines))
        kind = rng.randrange(7)
        key, equals, _ = lines[i].partition("=")
        if kind == 0:
            lines[i] = ""
        elif kind == 1:
            lines.insert(i, lines[rng.randrange(len(lines))])
        elif kind == 2:
            at = rng.randrange(len(lines[i]) + 1)
            lines[i] = lines[i][:at] + rng.choice("xe_-[]{}=\"'.,\x00\né") + lines[i][at + rng.randrange(2) :]
        elif kind == 3 and len(lines[i]) > 2:
            at = rng.randrange(len(lines[i]) - 1)
            lines[i] = lines[i][:at] + lines[i][at + 1] + lines[i][at] + lines[i][at + 2 :]
        elif equals:
            lines[i] = f"{key}= {rng.choice(NUMBERS + WORDS)}"
    return "\n".join(lines)


def changed_json(rng: random.Random, data: Any) -> str:
    """One or two values somewhere in JSON data replaced, left out, renamed or doubled; or the text cut."""
    data = json.loads(json.dumps(data))
    for _ in range(rng.choice((1, 1, 2))):
        parent, key = rng.choice(list(_places(data)))
        kind = rng.randrange(5)
        if kind == 0:
            del parent[key]
        elif kind == 1 and isinstance(parent, dict):
            parent[str(key)[:-1] + "x"] = parent.pop(key)
        elif kind == 2 and isinstance(parent, list):
            parent.append(parent[key])
        elif isinstance(parent[key], int | float) and kind == 3:
            parent[key] = rng.choice((parent[key] * 2, parent[key] + 1, -parent[key], 10**30, 1e300))
        else:
            parent[key] = rng.choice(
                (None, -1, 0, 1, 3, 1.5, 10**30, float("inf"), float("nan"), "", "x", [], {}, [1, 2], True)
            )
        if not data:
            break
    text = json.dumps(data)
    return text[: rng.randrange(len(text))] if rng.random() < 0.1 else text


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in JSON data."""
    for key in list(data) if isinstance(data, dict) else range(len(data)):
        yield data, key
        if isinstance(data[key], dict | list) and data[key]:
            yield from _places(data[key])


def changed_program(rng: random.Random, text: str) -> str:
    lines = text.splitlines()
    i = rng.randrange(len(lines))
    kind = rng.randrange(6)
    if kind == 0:
        del lines[i]
    elif kind == 1:
        lines.insert(i, lines[rng.randrange(len(lines))])
    elif kind == 2:
        j = rng.randrange(len(lines))
        lines[i], lines[j] = lines[j], lines[i]
    elif kind == 3:
        words = lines[i].split(" ")
        words[rng.randrange(len(words))] = rng.choice((*NUMBERS, "a", "tp.row", "range(3)", "(", "None"))
        lines[i] = " ".join(words)
    elif kind == 4:
        digits = [at for at, letter in enumerate(lines[i]) if letter.isdigit()]
        if digits:
            at = rng.choice(digits)
            lines[i] = (
                lines[i][:at] + rng.choice(("-1", "0", "9", "1" + "0" * 30, "9999999")) + lines[i][at + 1 :]
            )
    else:
        at = rng.randrange(len(lines[i]) + 1)
        lines[i] = lines[i][:at] + rng.choice("()[]{},:=*+x7 \"'\x00é") + lines[i][at + rng.randrange(2) :]
    return "\n".join(lines) + "\n"
