"""Stages that run whole and not in two parts, or hold computed tensors: what ranks do with them."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from pipeline_rank_functions import Check
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import meshweave as mw


class Odd(nn.Module):
    """A linear layer that is called twice, in a checkpoint that enters anew, or keeps what it computes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner, self.kept = kind, nn.Linear(6, 6).double(), None
        if kind == "normed weight":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.inner = nn.utils.weight_norm(self.inner)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "enters anew":
            return x + checkpoint(self.inner, x, use_reentrant=True)
        y: Tensor = self.inner(x).tanh()
        if self.kind == "kept result":
            self.kept: Any = y.square().mean()
        return self.inner(y) if self.kind == "called twice" else y


def odd_stages(check: Check) -> None:
    rank = dist.get_rank()
    if rank >= 2:
        return
    kinds = ("called twice", "enters anew", "normed weight", "kept result")
    for kind, plan in [*((kind, "1f1b") for kind in kinds), ("called twice", "zb-h1")]:
        torch.manual_seed(4)
        stages, data = [nn.Linear(6, 6).double(), Odd("plain"), Odd(kind)], torch.randn(4, 6).double()
        first = nn.Sequential(*stages[:2])
        given = {0: first, 1: stages[2]}
        whole = nn.functional.mse_loss(stages[2](first(data)), data)
        whole.backward()
        right = [p.grad for p in given[rank].parameters()]
        for parameter in given[rank].parameters():
            parameter.grad = None
        options = {
            "micro_batches": 2,
            "loss_fn": nn.functional.mse_loss,
            "context": check.context,
            "ranks": (0, 1),
        }
        loss = mw.pipeline({rank: given[rank]}, plan, **options).step(data, data)
        if rank:
            check.near(f"{kind}: loss", loss, whole)
        for parameter, wanted in zip(given[rank].parameters(), right, strict=True):
            check.near(f"{kind}: gradient", parameter.grad, wanted)


def refused_in_parts(check: Check) -> None:
    rank = dist.get_rank()
    if rank >= 2:
        return
    for kind, words in (("enters anew", "no backward in two parts"), ("hooked", "post-accumulate")):
        stage = Odd(kind) if rank else nn.Linear(6, 6).double()
        if kind == "hooked" and rank:
            stage.inner.weight.register_post_accumulate_grad_hook(lambda p: None)
        data = torch.ones(4, 6).double()
        options = {
            "micro_batches": 2,
            "loss_fn": nn.functional.mse_loss,
            "context": check.context,
            "ranks": (0, 1),
        }
        pipeline = mw.pipeline({rank: stage}, "zb-h1", **options)
        kinds = "BindError" if kind == "hooked" and not rank else "UnsupportedError"
        check.refused(kind, kinds, words, partial(pipeline.step, data, data))


class Partly(nn.Module):
    """A linear layer, and parameters that rows of `reached` reach, that none does, and whose gradient is zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6).double()
        self.some, self.never, self.zero = (nn.Parameter(torch.ones(6).double()) for _ in range(3))
        self.reached: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        if self.reached is not None:
            y = torch.where(self.reached, y * self.some, y)
        return y - 0.0 * self.zero  # of which every element is -0.0 or 0.0


def missing_gradients(check: Check) -> None:
    """A parameter that no row of any rank reaches has no gradient; one that rows of one rank reach has theirs."""
    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("pp", "dp"))
    of_second = torch.arange(8)[:, None] // 2 % 2 == 1  # of two ranks, in micro-batches of four rows
    for plan in ("1f1b", "gpipe", "zb-h1"):
        torch.manual_seed(7)
        stages, data = [Partly(), Partly()], torch.randn(8, 6).double()
        own, whole = copy.deepcopy(stages[rank // 2]), nn.Sequential(*stages)
        options = {"micro_batches": 2, "loss_fn": nn.functional.mse_loss, "context": check.context}
        pipeline = mw.pipeline({rank // 2: own}, plan, meshes=mesh, **options)
        for step in range(3):  # each adds to those before; the second reaches more
            own.reached = torch.tensor(True) if step == 1 and rank % 2 else None
            for stage in stages:
                stage.reached = of_second if step == 1 else None
            pipeline.step(data, data)
            nn.functional.mse_loss(whole(data), data).backward()
            for (name, parameter), wanted in zip(
                own.named_parameters(), stages[rank // 2].parameters(), strict=True
            ):
                title = f"{plan}, step {step}: {name}"
                check.that(f"{title} has none", (parameter.grad is None) == (wanted.grad is None))
                if wanted.grad is not None:
                    check.near(title, parameter.grad, wanted.grad)
