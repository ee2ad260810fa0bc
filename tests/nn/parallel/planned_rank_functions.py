"""What ranks do with plans straight from `plan`: a step of training, beside that of one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from reference_models import logits, make, words
from small_models import KeepDoubles
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import meshweave as mw
from meshweave.execute.ranks.job import RankContext

BATCH, SEQUENCE, RATE = 4, 8, 0.1


def trained(context: RankContext, payload: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return by plan file what a step by it was off by, and what was said."""
    torch.set_num_threads(1)
    folder = Path(payload["folder"])
    return {name: one_step(kind, mw.tune.load_plan(folder / name)) for name, kind in payload["plans"].items()}


def one_step(kind: str, plan: mw.Plan | mw.Parallelism) -> dict[str, Any]:
    """Return the differences of the loss and of the worst weight after a step of descent, and warnings."""
    torch.manual_seed(0)
    model = make(kind)
    whole = copy.deepcopy(model)
    tokens, targets = (torch.randint(0, words(model), (BATCH, SEQUENCE)) for _ in range(2))
    with warnings.catch_warnings(record=True) as said, KeepDoubles():
        warnings.simplefilter("always")
        made = mw.parallelize(model, plan)
        loss = made.loss(tokens, targets)
        loss.backward()
    torch.optim.SGD(made.module.parameters(), lr=RATE).step()
    expected = nn.functional.cross_entropy(logits(whole, tokens).flatten(0, 1), targets.flatten())
    expected.backward()
    torch.optim.SGD(whole.parameters(), lr=RATE).step()
    return {
        "strategy": made.report.strategy,
        "mesh": made.agreement.strategy.device_mesh.mesh.tolist(),
        "loss": abs(float(loss) - float(expected)),
        "weights": worst(made.module, whole),
        "said": [str(each.message) for each in said if each.category is UserWarning],
    }


def worst(own: nn.Module, whole: nn.Module) -> float:
    """Return the largest difference of a weight."""
    given = dict(own.named_parameters())
    return max(
        float((_whole(given[name]) - value.detach()).abs().max()) for name, value in whole.named_parameters()
    )


def _whole(value: Tensor) -> Tensor:
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def in_order(context: RankContext, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ranks that share layers by an order of degrees, what a step was off by, and a refusal."""
    torch.set_num_threads(1)
    order = tuple(payload["order"])
    plan = mw.Parallelism(data=2, tensor=2, strategy="megatron", order=order)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "col"))
    torch.manual_seed(0)
    try:
        mw.parallelize(make("plain gpt"), plan, mesh, check=False)
        refused = ""
    except mw.errors.LayoutError as error:
        refused = str(error)
    off = one_step("plain gpt", plan)
    return {"ranks": off.pop("mesh"), "refused": refused, **off}
