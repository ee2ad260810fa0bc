"""Exports read by the code of what they are for, each installed by pip into a folder of its own.

Nothing of it is in this project's environment: `pip install --target` without dependencies, and of these those
that the parser imports. Where pip has no index to ask, a test says so and is skipped. Megatron-LM is for Python
3.12 and later: where this is an older one, EXPORT_PYTHON names one that has torch. What is accepted is added to
the file that EXPORTS_ACCEPTED names, validation/results/exports.json. Some degrees are drawn; EXPORT_SEED
draws others.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from foreign_code import PACKAGES, free_port, install, python_for
from test_exports import plan_of

from meshweave.base.errors import UnsupportedError
from meshweave.tune.exports import export

pytestmark = pytest.mark.slow

TORCHTITAN = """
import dataclasses, json, sys
from torchtitan.config.manager import ConfigManager
words = json.load(sys.stdin)["text"].replace("\\\\\\n", " ").split()
config = ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_8b", *words])
read = {name: dataclasses.asdict(getattr(config, name)) for name in ("parallelism", "training")}
print(json.dumps(read, default=str))
"""
DEEPSPEED = """
import json, os, sys
export = json.load(sys.stdin)
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(export["port"])}
import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
class Ranks:
    def get_data_parallel_world_size(self):
        return export["data"]
deepspeed.init_distributed("gloo")
config = DeepSpeedConfig(export["settings"], mpu=Ranks())
print(json.dumps({
    "micro_batch": config.train_micro_batch_size_per_gpu, "accumulated": config.gradient_accumulation_steps,
    "zero": config.zero_optimization_stage, "tensor": config.tensor_parallel_config.autotp_size,
    "bf16": config.bfloat16_config.enabled,
}))
"""
ACCELERATE = """
import json, os, sys
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
with open("plan.json", "w") as file:
    file.write(json.load(sys.stdin)["text"])
arguments = launch_command_parser().parse_args(["--config_file", "plan.json", "train.py"])
os.environ |= prepare_multi_gpu_env(_validate_launch_command(arguments)[0])
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
sizes, shards = ParallelismConfig(), FullyShardedDataParallelPlugin()
print(json.dumps({
    "sizes": [sizes.dp_shard_size, sizes.cp_size, sizes.tp_size, sizes.total_size],
    "reshard": shards.reshard_after_forward, "checkpointing": shards.activation_checkpointing,
    "version": shards.fsdp_version,
}))
"""
AXOLOTL = """
import json, sys
from axolotl.utils.dict import DictDefault
from axolotl.utils.schemas.config import AxolotlInputConfig
rest = dict(base_model="m", datasets=[{"path": "x", "type": "alpaca"}], learning_rate=1e-4,
            optimizer="adamw_torch", lr_scheduler="cosine", num_epochs=1, output_dir="o")
config = AxolotlInputConfig(**DictDefault(json.load(sys.stdin)["settings"] | rest))
print(json.dumps([config.dp_shard_size or config.dp_replicate_size or 1, config.sequence_len,
                  config.micro_batch_size, config.gradient_accumulation_steps,
                  bool(config.fsdp_config and config.fsdp_config.reshard_after_forward), config.bf16,
                  config.context_parallel_size]))
"""
BRIDGE = """
import ast, importlib.util, json, shlex, sys
from pathlib import Path
import megatron.core
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from omegaconf import OmegaConf
folder = next(Path(p) / "megatron/bridge/training" for p in sys.path if (Path(p) / "megatron/bridge").is_dir())
spec = importlib.util.spec_from_file_location("overrides", folder / "utils/omegaconf_utils.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
body = ast.parse((folder / "config.py").read_text()).body
classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
def own(name):
    return [item.target.id for item in classes[name].body if isinstance(item, ast.AnnAssign)]
def core(config):
    return list(config.__dataclass_fields__)
provider = (folder.parent / "models/gpt_provider.py").read_text()
of_provider = [item.target.id for node in ast.parse(provider).body if isinstance(node, ast.ClassDef)
               for item in node.body if isinstance(item, ast.AnnAssign)]
sections = {
    "model": core(TransformerConfig) + of_provider, "train": own("TrainingConfig"),
    "ddp": core(DistributedDataParallelConfig), "dist": own("DistributedInitConfig"),
    "optimizer": core(OptimizerConfig), "dataset": own("GPTDatasetConfig") + ["seq_length"],
    "checkpoint": own("CheckpointConfig"),
}
empty = {name: dict.fromkeys(fields) for name, fields in sections.items()}
config = OmegaConf.create(empty | {"mixed_precision": None})
words = shlex.split(json.load(sys.stdin)["text"].replace("\\\\\\n", " "))
read = OmegaConf.to_container(module.parse_hydra_overrides(config, words))
if layout := read["model"]["pipeline_model_parallel_layout"]:
    layout = PipelineParallelLayerLayout.from_str(layout, read["model"]["pipeline_model_parallel_size"])
    layout.validate_layer_layout(32, None)
print(json.dumps(read))
"""
MEGATRON = """
import json, os, shlex, sys, types
export = json.load(sys.stdin)
os.environ |= {"WORLD_SIZE": str(export["chips"]), "RANK": "0"} | export["environment"]
import torch
torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=9, minor=0)  # as if there were a Hopper
torch.cuda.get_device_capability = lambda *_: (9, 0)
from megatron.training.arguments import parse_args, validate_args
sys.argv = ["pretrain_gpt.py", *shlex.split(export["text"].replace("\\\\\\n", " "))]
arguments = parse_args()
validate_args(arguments)
names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size", "global_batch_size",
         "context_parallel_size", "num_layers_per_virtual_pipeline_stage", "recompute_granularity",
         "use_megatron_fsdp")
print(json.dumps({name: getattr(arguments, name) for name in names}))
"""
MAXTEXT = """
import json, os, sys
export = json.load(sys.stdin)
count = f"--xla_force_host_platform_device_count={export['chips']}"
os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": count}
from maxtext.configs import pyconfig
from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR
words = export["text"].replace("\\\\\\n", " ").split()
own = ["run_name=x", "enable_checkpointing=false", "hardware=cpu", "skip_jax_distributed_system=true",
       "base_output_directory=out", "dataset_type=synthetic"]
config = pyconfig.initialize(["train", os.path.join(MAXTEXT_CONFIGS_DIR, "base.yml"), *words, *own])
names = ("ici_tensor_parallelism", "ici_fsdp_parallelism", "ici_data_parallelism", "ici_context_parallelism",
         "max_target_length", "global_batch_size_to_train_on", "shard_optimizer_over_data", "remat_policy")
print(json.dumps({name: getattr(config, name) for name in names}))
"""
HUGGING_FACE = """
import json, sys, torch
settings = json.load(sys.stdin)["settings"]
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import tensor_parallel
said = []
tensor_parallel.verify_tp_plan.__globals__["logger"].warning = said.append
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings["config"]))
plan = settings["tp_plan"]
known = set(plan.values()) <= set(tensor_parallel.ALL_PARALLEL_STYLES)
tensor_parallel.verify_tp_plan(list(model.state_dict()), plan)
print(json.dumps({"known": known, "unused": [text for text in said if "rules were not applied" in text]}))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {target: tmp_path_factory.mktemp(target) for target in (*PACKAGES, "accelerate", "hf")}


def chips_of(degrees: dict[str, Any]) -> int:
    """The chips of a plan of `plan_of`, whose defaults are those of `test_exports`."""
    count: int = plan_of(degrees).step.best.degrees.num_chips
    return count


def read_by(target: str, script: str, degrees: dict[str, Any], folder: Path) -> Any:
    """What the target's own code makes of an export, in a process of its own; what it refuses fails the test."""
    python = python_for(target)
    install(target, python, folder)
    made = export(plan_of(degrees), target)
    of = {"data": degrees["data"], "chips": chips_of(degrees), "port": free_port()}
    given = json.dumps({"settings": made.settings, "text": made.text, "environment": made.environment} | of)
    done = subprocess.run(
        [python, "-c", script], input=given, capture_output=True, text=True, check=False, cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "TORCH_EXTENSIONS_DIR": str(folder / "built")}, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    note(target, python, degrees, made.text)
    return json.loads(done.stdout.strip().splitlines()[-1])


def reader_of(target: str) -> str:
    """The package whose code reads an export, with its version."""
    if target in PACKAGES:
        return next(word for word in PACKAGES[target].split() if "==" in word)
    name = {"hf": "transformers"}.get(target, target)
    return f"{name}=={version(name)}"


def note(target: str, python: str, degrees: dict[str, Any], text: str) -> None:
    """Add an accepted export to the file that EXPORTS_ACCEPTED names."""
    if "EXPORTS_ACCEPTED" not in os.environ:
        return
    file = Path(os.environ["EXPORTS_ACCEPTED"])
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    about = subprocess.run([python, "--version"], capture_output=True, text=True, check=True)
    row = {
        "target": target,
        "read_by": reader_of(target),
        "python": about.stdout.split()[1],
        "degrees": degrees,
    }
    rows = [each for each in rows if (each["target"], each["degrees"]) != (target, degrees)]
    rows.append(row | {"export": text})
    file.write_text(
        json.dumps({"rows": sorted(rows, key=lambda row: (row["target"], str(row["degrees"])))}, indent=1)
        + "\n"
    )


@pytest.mark.parametrize(
    "degrees",
    [
        {"pipeline": 2, "data": 2, "zero": 1, "tensor": 4},
        {"pipeline": 1, "data": 4, "zero": 3, "tensor": 2, "context": 2, "recompute": "full"},
        {"pipeline": 2, "virtual_stages": 2, "schedule": "interleaved-1f1b", "data": 2, "zero": 0},
    ],
)
def test_torchtitan_parses_it(degrees: dict[str, Any], folders: dict[str, Path]) -> None:
    read = read_by("torchtitan", TORCHTITAN, degrees, folders["torchtitan"])
    parallelism = read["parallelism"]
    assert parallelism["tensor_parallel_degree"] == degrees.get("tensor", 4)
    assert parallelism["pipeline_parallel_degree"] == degrees["pipeline"]
    assert parallelism["context_parallel_degree"] == degrees.get("context", 1)
    sharded = degrees["data"] if degrees["zero"] else 1
    assert parallelism["data_parallel_shard_degree"] == sharded
    assert read["training"]["seq_len"] == 8192 and read["training"]["global_batch_size"] == 64


@pytest.mark.parametrize(("zero", "tensor"), [(0, 1), (1, 2), (2, 4), (3, 1)])
def test_deepspeed_parses_it(zero: int, tensor: int, folders: dict[str, Path]) -> None:
    degrees = {"pipeline": 1, "data": 4, "zero": zero, "tensor": tensor, "micro_batch": 2}
    read = read_by("deepspeed", DEEPSPEED, degrees, folders["deepspeed"])
    of_tensor = 0 if tensor == 1 else tensor
    assert read == {"micro_batch": 2, "accumulated": 8, "zero": zero, "tensor": of_tensor, "bf16": True}


@pytest.mark.parametrize(("zero", "tensor", "context"), [(3, 2, 1), (3, 1, 2), (1, 1, 1)])
def test_accelerate_launches_by_it(zero: int, tensor: int, context: int, folders: dict[str, Path]) -> None:
    pytest.importorskip("accelerate")
    degrees = {
        "pipeline": 1,
        "data": 4,
        "zero": zero,
        "tensor": tensor,
        "context": context,
        "recompute": "full",
    }
    read = read_by("accelerate", ACCELERATE, degrees, folders["accelerate"])
    assert read["sizes"] == [4, context, tensor, 4 * context * tensor]
    assert read["reshard"] == (zero == 3) and read["checkpointing"] and read["version"] == 2


def test_axolotl_parses_it(folders: dict[str, Path]) -> None:
    degrees = {"pipeline": 1, "data": 4, "zero": 3, "tensor": 1}
    assert read_by("axolotl", AXOLOTL, degrees, folders["axolotl"]) == [4, 8192, 1, 16, True, True, 1]


@pytest.mark.parametrize(
    "degrees",
    [
        {"data": 2, "virtual_stages": 4, "recompute": "full"},
        {"data": 8, "pipeline": 1, "zero": 3},
        {"data": 1, "zero": 0},
        {"data": 2, "pipeline": 3},
    ],
)
def test_megatron_bridge_parses_it(degrees: dict[str, Any], folders: dict[str, Path]) -> None:
    """By Bridge's parser of overrides and the fields of its configs; importing it needs TransformerEngine."""
    read = read_by("megatron-bridge", BRIDGE, degrees, folders["megatron-bridge"])
    assert read["model"]["tensor_model_parallel_size"] == 4 and read["train"]["global_batch_size"] == 64
    assert read["model"]["virtual_pipeline_model_parallel_size"] == degrees.get("virtual_stages")
    assert read["ddp"]["use_megatron_fsdp"] == (degrees.get("zero") == 3)
    assert read["ddp"]["use_distributed_optimizer"] == (degrees.get("zero") != 0)


@pytest.mark.parametrize(
    "degrees",
    [
        {"data": 2, "zero": 1},
        {"data": 2, "pipeline": 4, "tensor": 2, "virtual_stages": 2, "schedule": "interleaved-1f1b",
         "recompute": "full"},
        {"data": 4, "pipeline": 1, "zero": 3, "context": 2},
        {"data": 2, "pipeline": 3, "zero": 1},
    ],
)  # fmt: skip
def test_megatron_lm_parses_and_validates_it(degrees: dict[str, Any], folders: dict[str, Path]) -> None:
    read = read_by("megatron-lm", MEGATRON, degrees, folders["megatron-lm"])
    assert read["tensor_model_parallel_size"] == degrees.get("tensor", 4)
    assert read["data_parallel_size"] == degrees["data"] and read["global_batch_size"] == 64
    assert read["recompute_granularity"] == degrees.get("recompute")
    assert read["use_megatron_fsdp"] == (degrees.get("zero") == 3)


@pytest.mark.parametrize(
    "degrees",
    [
        {"data": 4, "zero": 3, "tensor": 2, "recompute": "full"},
        {"data": 2, "zero": 1, "tensor": 2, "context": 2, "recompute": "selective"},
    ],
)
def test_maxtext_parses_it(degrees: dict[str, Any], folders: dict[str, Path]) -> None:
    """MaxText counts the batch anew from the axes; it is the plan's."""
    read = read_by("maxtext", MAXTEXT, degrees | {"pipeline": 1}, folders["maxtext"])
    assert read["ici_tensor_parallelism"] == degrees["tensor"]
    assert read["ici_context_parallelism"] == degrees.get("context", 1)
    of_fsdp = degrees["zero"] == 3
    assert read["ici_fsdp_parallelism" if of_fsdp else "ici_data_parallelism"] == degrees["data"]
    assert read["shard_optimizer_over_data"] == (degrees["zero"] == 1)
    assert read["max_target_length"] == 8192 and read["global_batch_size_to_train_on"] == 64


@pytest.mark.parametrize(
    "degrees", [{"strategy": "megatron", "tensor": 2}, {"strategy": "megatron", "tensor": 8}]
)
def test_transformers_takes_it(degrees: dict[str, Any], folders: dict[str, Path]) -> None:
    """Its own check of a tp_plan finds a module for every rule."""
    pytest.importorskip("transformers")
    degrees = {"data": 1, "pipeline": 1} | degrees
    assert read_by("hf", HUGGING_FACE, degrees, folders["hf"]) == {"known": True, "unused": []}


Read = Any
"""What a script of this module prints."""
SIZES: dict[str, tuple[str, Any]] = {
    "torchtitan": (TORCHTITAN, lambda read, _: _of_torchtitan(**read)),
    "deepspeed": (DEEPSPEED, lambda read, own: (
        max(read["tensor"], 1), 1, 1, own["data"], read["micro_batch"] * read["accumulated"] * own["data"])),
    "accelerate": (ACCELERATE, lambda read, own: (
        read["sizes"][2], read["sizes"][1], 1, read["sizes"][0] if own["zero"] else own["data"], 64)),
    "axolotl": (AXOLOTL, lambda read, _: (1, read[6], 1, read[0], read[0] * read[2] * read[3])),
    "megatron-bridge": (BRIDGE, lambda read, own: (
        *(read["model"][f"{name}_size"] for name in _OF_CORE), own["data"], read["train"]["global_batch_size"])),
    "megatron-lm": (MEGATRON, lambda read, _: (
        *(read[f"{name}_size"] for name in _OF_CORE), read["data_parallel_size"], read["global_batch_size"])),
    "maxtext": (MAXTEXT, lambda read, _: (
        read["ici_tensor_parallelism"], read["ici_context_parallelism"], 1,
        max(read["ici_fsdp_parallelism"], read["ici_data_parallelism"]), read["global_batch_size_to_train_on"])),
}  # fmt: skip
"""By target the script that reads its exports, and what of that are the ranks of tensor, context, pipeline and
data parallelism and the batch; the degrees say what an export leaves to the number of ranks."""
_OF_CORE = ("tensor_model_parallel", "context_parallel", "pipeline_model_parallel")


def _of_torchtitan(parallelism: Read, training: Read) -> tuple[int, ...]:
    sizes = (parallelism[f"{kind}_parallel_degree"] for kind in ("tensor", "context", "pipeline"))
    data = (parallelism[f"data_parallel_{kind}_degree"] for kind in ("shard", "replicate"))
    return *sizes, max(data), training["global_batch_size"]


def drawn(target: str) -> Iterator[dict[str, Any]]:
    """Degrees on at most 64 chips that can be exported to a target, drawn by EXPORT_SEED."""
    draw = random.Random(f"{target} {os.environ.get('EXPORT_SEED', '0')}")
    while True:
        degrees = {
            "pipeline": draw.choice((1, 1, 2, 4)), "data": draw.choice((1, 2, 4, 8)), "zero": draw.randrange(4),
            "tensor": draw.choice((1, 1, 2, 4, 8)), "context": draw.choice((1, 1, 2, 4)),
            "micro_batch": draw.choice((1, 2, 4)), "recompute": draw.choice(("none", "selective", "full")),
            "strategy": draw.choice(("megatron", "megatron_sp")), "virtual_stages": draw.choice((1, 2, 4)),
        }  # fmt: skip
        inside = degrees["virtual_stages"] > 1
        degrees["schedule"] = "interleaved-1f1b" if inside else draw.choice(("1f1b", "gpipe", "zb-h1"))
        rounds = 64 // (degrees["data"] * degrees["micro_batch"])
        if target == "axolotl" and degrees["context"] > 1:
            continue  # its check imports ring-flash-attn, which needs CUDA
        if (degrees["pipeline"] == 1 and inside) or rounds % degrees["pipeline"] or chips_of(degrees) > 64:
            continue
        try:
            export(plan_of(degrees), target)
        except UnsupportedError:
            continue
        yield degrees


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("target", sorted(SIZES))
def test_drawn_degrees_are_read_as_they_are(target: str, number: int, folders: dict[str, Path]) -> None:
    """What the target reads has the degrees and the batch of the plan."""
    script, sizes_of = SIZES[target]
    degrees = next(islice(drawn(target), number, None))
    read = sizes_of(read_by(target, script, degrees, folders[target]), degrees)
    expected = [degrees[name] for name in ("tensor", "context", "pipeline", "data")]
    assert list(read) == [*expected, 64], degrees
