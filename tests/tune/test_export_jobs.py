"""Exports start jobs: the software that each is for trains a small Llama by it, on CPUs, as one process does.

The launch files are run as written, on a port of their own. DeepSpeed and transformers run on CPUs by themselves;
accelerate takes CPUs for what has no FSDP, so its two questions for the device are answered here. Megatron-LM and
Bridge need CUDA; torchtitan's trainer asks gloo for a sum of scaled values, which gloo does not have.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from foreign_code import free_port, install
from test_exports import plan_of

from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.model import Transformer
from meshweave.describe.model.hugging_face import transformer_from_config
from meshweave.tune.exports import export, launch_file
from meshweave.tune.exports.row import Export

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.gloo]

BATCH, SEQUENCE, STEPS = 16, 16, 2
SMALL = """
import json, os, sys, torch, transformers
BATCH, SEQUENCE, STEPS, WORDS = 16, 16, 2, 96
FAMILY = os.environ.get("FAMILY", "Llama")
def model():
    torch.manual_seed(0)
    config = getattr(transformers, f"{FAMILY}Config")
    return getattr(transformers, f"{FAMILY}ForCausalLM")(config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, intermediate_size=128,
        vocab_size=WORDS, max_position_embeddings=64, head_dim=16))
def rows():
    torch.manual_seed(1)
    return torch.randint(0, WORDS, (BATCH * STEPS, SEQUENCE))
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return BATCH * STEPS
    def __getitem__(self, at):
        return {"input_ids": rows()[at], "labels": rows()[at]}
def tell(losses, norms):
    if torch.distributed.get_rank() == 0:
        print("TOLD", json.dumps([losses, norms]), flush=True)
    os._exit(0)  # now and then threads of gloo abort a busy interpreter as it ends
"""
TRAINER = """
import small, torch, transformers
(arguments,) = transformers.HfArgumentParser(transformers.TrainingArguments).parse_args_into_dataclasses()
class InOrder(transformers.Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)
trainer = InOrder(model=small.model(), args=arguments, train_dataset=small.Rows())
trainer.train()
steps = [row for row in trainer.state.log_history if "loss" in row]
small.tell([row["loss"] for row in steps], [row["grad_norm"] for row in steps])
"""
ACCELERATOR = """
import accelerate, small, torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
job = accelerate.Accelerator()
assert job.distributed_type == DistributedType.FSDP, job.distributed_type
model = small.model()
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
rank_rows = small.BATCH // job.num_processes
loader = torch.utils.data.DataLoader(small.Rows(), batch_size=rank_rows)
model, sgd, loader = job.prepare(model, sgd, loader)
losses, norms = [], []
for batch in loader:
    loss = model(**batch).loss
    job.backward(loss)
    norms.append(float(job.clip_grad_norm_(model.parameters(), 1e9)))
    sgd.step()
    sgd.zero_grad()
    losses.append(job.reduce(loss.detach(), "mean").item())
small.tell(losses, norms)
"""
OF_TRANSFORMERS = """
import pathlib, small, torch
from transformers import AutoConfig, AutoModelForCausalLM
name = f"saved-{small.FAMILY}"
exec(pathlib.Path("export.py").read_text())
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
losses, norms = [], []
for rows in small.rows().split(small.BATCH):
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    norms.append(float(torch.stack([(p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).norm()
                                    for p in model.parameters()]).norm()))
    sgd.step()
    sgd.zero_grad()
    losses.append(loss.item())
small.tell(losses, norms)
"""
ALONE = """
import small, torch
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = small.model()
model.save_pretrained(f"saved-{small.FAMILY}")
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
losses, norms = [], []
for rows in small.rows().split(small.BATCH):
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
    sgd.step()
    sgd.zero_grad()
    losses.append(loss.item())
small.tell(losses, norms)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the scripts and the model."""
    made = tmp_path_factory.mktemp("jobs")
    scripts = {
        "small": SMALL,
        "trainer_job": TRAINER,
        "fsdp_job": ACCELERATOR,
        "sharded_job": OF_TRANSFORMERS,
    }
    for name, text in (scripts | {"alone": ALONE}).items():
        (made / f"{name}.py").write_text(text)
    return made


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[float]]:
    """Return losses and norms of gradients of two steps on one process, which saves the weights before them."""
    return run(folder, [sys.executable, "alone.py"])


def run(folder: Path, command: list[str], **environment: str) -> list[list[float]]:
    """Return the losses and norms that a job prints."""
    own = {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=folder, env=os.environ | own | environment, capture_output=True, text=True, check=False,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    told = next(line for line in done.stdout.splitlines() if "TOLD" in line)
    losses_and_norms: list[list[float]] = json.loads(told.partition("TOLD")[2])
    return losses_and_norms


def exported(target: str, degrees: dict[str, Any], family: str = "Llama") -> Export:
    """Return the export of a plan for the small model of a family, in single precision."""
    return export(
        plan_of(
            {"pipeline": 1} | degrees,
            model=small_model(family),
            batch=BATCH,
            sequence=SEQUENCE,
            dtype="float32",
        ),
        target,
    )


def small_model(family: str) -> Transformer:
    """Return what the scripts train."""
    config = getattr(transformers, f"{family}Config")(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, intermediate_size=128,
        vocab_size=96, max_position_embeddings=64, head_dim=16,
    )  # fmt: skip
    return transformer_from_config(config.to_dict(), "small")


def started(made: Export, train: str, folder: Path, **environment: str) -> list[list[float]]:
    """Return what the exported step's launch file comes to on this machine."""
    script = launch_file(made, "torchrun", load_cluster("4 x H100, 4 a host"))
    assert script.count("29500") == 1
    return run(folder, ["bash", "-c", script.replace("29500", str(free_port()))], TRAIN=train, **environment)


@pytest.mark.parametrize("zero", [1, 3])
def test_deepspeed_trains_by_its_launch_file(
    zero: int, folder: Path, alone: list[list[float]], tmp_path: Path
) -> None:
    install("deepspeed", sys.executable, tmp_path)
    made = exported("deepspeed", {"data": 4, "zero": zero, "tensor": 1, "micro_batch": 2})
    words = (
        f"--output_dir out --max_steps {STEPS} --logging_steps 1 --per_device_train_batch_size 2 --use_cpu "
        "--gradient_accumulation_steps 2 --optim sgd --learning_rate 0.1 --lr_scheduler_type constant "
        "--report_to none --save_strategy no --max_grad_norm 1e9"
    )
    extensions = str(tmp_path / "built")
    got = started(
        made, f"trainer_job.py {words}", folder, DS_ACCELERATOR="cpu", PYTHONPATH=str(tmp_path),
        TORCH_EXTENSIONS_DIR=extensions,
    )  # fmt: skip
    assert got == [pytest.approx(values, rel=1e-4) for values in alone]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_accelerate_trains_by_its_launch_file(recompute: str, folder: Path, alone: list[list[float]]) -> None:
    pytest.importorskip("accelerate")
    degrees = {"data": 4, "zero": 3, "tensor": 1, "micro_batch": 4, "recompute": recompute}
    got = started(exported("accelerate", degrees), "fsdp_job.py", folder)
    assert got == [pytest.approx(values, rel=1e-4) for values in alone]


@pytest.mark.parametrize(("family", "tensor"), [("Llama", 2), ("Llama", 4), ("Qwen3", 2)])
def test_transformers_trains_by_its_tp_plan(family: str, tensor: int, folder: Path) -> None:
    """Norms of a head, as Qwen 3 has them, get the gradients of all ranks' heads."""
    degrees = {"strategy": "megatron", "tensor": tensor, "data": 1, "zero": 0}
    (folder / "export.py").write_text(exported("hf", degrees, family).text)
    alone = run(folder, [sys.executable, "alone.py"], FAMILY=family)
    launched = [
        "torchrun",
        "--nproc-per-node",
        str(tensor),
        "--master-port",
        str(free_port()),
        "sharded_job.py",
    ]
    got = run(folder, launched, FAMILY=family)
    assert got == [pytest.approx(values, rel=1e-4) for values in alone]
