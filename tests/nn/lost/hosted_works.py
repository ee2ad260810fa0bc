"""What ranks of `lost_world` do with models of transformers that run by their own code."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import small_models
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshweave as mw

KINDS = ("gemma2", "granite", "olmo2", "phi", "qwen3")


class Moments(Protocol):
    """What is told of each phase that a rank comes to."""

    def come(self, phase: str) -> None: ...


Work = Callable[[Moments], None]


def preload() -> None:
    """Import, before forking, what ranks would import after the signal."""
    import peft  # noqa: F401
    import transformers.generation.utils  # noqa: F401

    for kind in KINDS:
        small_models.classes(kind)


def _made(kind: str, strategy: str, sizes: tuple[int, ...], deadline_s: float, moment: Moments) -> Any:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("x", "y")[: len(sizes)])
    context = mw.TorchContext(deadline_s=deadline_s)
    model = small_models.make_model(kind)
    moment.come("parallelize")
    return mw.parallelize(model, strategy, mesh, context=context), context


def _left_padded(tokens: torch.Tensor) -> torch.Tensor:
    return (torch.arange(tokens.shape[1])[None] >= torch.tensor([0, 2, 5, 3])[:, None]).long()


def _steps(module: Any, moment: Moments) -> Callable[[], None]:
    """Return a step of training on rows that are padded on the left."""
    own = [each for each in module.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=1e-3)
    tokens, targets = small_models.batch()
    mask = _left_padded(tokens)
    targets = targets.masked_fill(mask == 0, -100)

    def step() -> None:
        optimizer.zero_grad()
        moment.come("forward")
        loss = module(tokens, attention_mask=mask, targets=targets).loss
        moment.come("backward")
        loss.backward()
        moment.come("clip")
        nn.utils.clip_grad_norm_(own, 1.0)
        moment.come("optimizer")
        optimizer.step()

    return step


def trained(kind: str, strategy: str, *sizes: int, deadline_s: float) -> Work:
    """Return a training with masks."""

    def work(moment: Moments) -> None:
        parallel, _ = _made(kind, strategy, sizes, deadline_s, moment)
        step = _steps(parallel.module, moment)
        while True:
            step()

    return work


def generating(kind: str, strategy: str, *sizes: int, deadline_s: float) -> Work:
    """Return a training that is asked for tokens after each step."""

    def work(moment: Moments) -> None:
        parallel, _ = _made(kind, strategy, sizes, deadline_s, moment)
        step, (tokens, _) = _steps(parallel.module, moment), small_models.batch()
        while True:
            step()
            moment.come("generate")
            mask = _left_padded(tokens)
            parallel.module.generate(
                tokens, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0
            )

    return work


def adapted(kind: str, strategy: str, *sizes: int, deadline_s: float) -> Work:
    """Return a training of adapters of low rank."""

    def work(moment: Moments) -> None:
        import peft

        mesh, context = init_device_mesh("cpu", sizes), mw.TorchContext(deadline_s=deadline_s)
        targets = ["q_proj", "v_proj", "down_proj"]
        config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, lora_dropout=0.0)
        torch.manual_seed(0)
        model = peft.get_peft_model(small_models.make_model(kind), config).double()
        moment.come("parallelize")
        parallel = mw.parallelize(model.get_base_model(), strategy, mesh, context=context)
        step = _steps(parallel.module, moment)
        while True:
            step()

    return work


def saved(kind: str, strategy: str, *sizes: int, deadline_s: float) -> Work:
    """Return a training that saves checkpoints and files of transformers, and resumes, in turns."""

    def work(moment: Moments) -> None:
        parallel, context = _made(kind, strategy, sizes, deadline_s, moment)
        optimizer = torch.optim.AdamW(parallel.module.parameters(), lr=1e-3)
        state = mw.nn.TrainingState([parallel.module], optimizer, rank=dist.get_rank())
        folder = Path(os.environ["LOST_FOLDER"])
        checkpoints = mw.Checkpoints(folder / "steps", context=context)
        for number in range(1, 10**6):
            optimizer.zero_grad()
            parallel.loss(*small_models.batch()).backward()
            optimizer.step()
            moment.come("save")
            state.save(checkpoints, number)
            moment.come("wait")
            checkpoints.wait()
            moment.come("files")
            parallel.module.save_pretrained(folder / "files", max_shard_size="30KB")
            moment.come("load")
            latest = checkpoints.latest()
            assert latest is not None
            state.load(checkpoints, latest)
            mw.load_weights(parallel.module, folder / "files")

    return work


def piped(kind: str, deadline_s: float) -> Work:
    """Return a training of two stages of two ranks each."""

    def work(moment: Moments) -> None:
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
        context, number = mw.TorchContext(deadline_s=deadline_s), dist.get_rank() // 2
        moment.come("parallelize")
        model = mw.parallelize(small_models.make_model(kind), "megatron_sp", mesh["tp"], context=context)
        stage = mw.nn.ParallelStage(model, number, number + 1, 16)
        pipeline = mw.pipeline(
            {number: stage}, "1f1b", micro_batches=2, meshes=mesh, context=context,
            loss_fn=stage.loss if number else None, outputs={number: [stage.example(2)]},
        )  # fmt: skip
        optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
        while True:
            optimizer.zero_grad()
            moment.come("forward")
            pipeline.step(*small_models.batch())
            moment.come("clip")
            nn.utils.clip_grad_norm_(list(stage.parameters()), 1.0)
            moment.come("optimizer")
            optimizer.step()

    return work


def works(
    phases: tuple[str, ...], of_stages: tuple[str, ...], deadline_s: float
) -> dict[str, tuple[int, tuple[str, ...], Work]]:
    """Return the kinds of work as `lost_world` lists them: ranks, phases, and what they do."""
    return {
        "hosted megatron, masks": (2, phases, trained("qwen3", "megatron", 2, deadline_s=deadline_s)),
        "hosted megatron_sp, masks": (4, phases, trained("gemma2", "megatron_sp", 4, deadline_s=deadline_s)),
        "hosted zero3, masks": (2, phases, trained("gemma2", "zero3", 2, deadline_s=deadline_s)),
        "hosted atp, masks": (4, phases, trained("granite", "atp", 2, 2, deadline_s=deadline_s)),
        "hosted generate": (
            2, (*phases, "generate", "generate"), generating("olmo2", "megatron", 2, deadline_s=deadline_s)
        ),
        "hosted LoRA": (2, phases, adapted("qwen3", "megatron", 2, deadline_s=deadline_s)),
        "hosted LoRA of zero3": (2, phases, adapted("granite", "zero3", 2, deadline_s=deadline_s)),
        "hosted saves": (
            2, ("save", "wait", "files", "load"), saved("qwen3", "zero3", 2, deadline_s=deadline_s)
        ),
        "hosted saves of atp": (
            4, ("save", "wait", "files", "load"), saved("phi", "atp", 2, 2, deadline_s=deadline_s)
        ),
        "hosted 1f1b": (4, of_stages, piped("granite", deadline_s)),
    }  # fmt: skip
