"""What ranks do in tests of parallel models: compare losses, logits and gradients with one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import reference_models
import torch
import torch.distributed as dist
from small_models import KeepDoubles
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from wire_count import WireCount

from meshweave.algorithms.block import BlockConfig
from meshweave.algorithms.step import Parallelism
from meshweave.execute.ranks.job import RankContext
from meshweave.nn.parallel.parallelize import parallelize

NAMES = {1: ("tp",), 2: ("row", "col"), 3: ("depth", "row", "col")}


def compare(context: RankContext, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return for each case the largest differences of loss, logits and gradients from those of the whole model.

    A case: model, strategy, mesh, and options of the model; `config` of the strategy.
    """
    torch.set_num_threads(1)
    count = WireCount()
    return [_compare(case, count) for case in payload["cases"]]


def _compare(case: Mapping[str, Any], count: WireCount) -> dict[str, Any]:
    torch.manual_seed(0)
    model = reference_models.make(case["model"], **case.get("options", {}))
    batch, sequence = case.get("tokens", (4, 8))
    words = reference_models.words(model)
    tokens, targets = (torch.randint(0, words, (batch, sequence)) for _ in range(2))
    targets[0, 0] = -100
    whole = copy.deepcopy(model)
    logits = reference_models.logits(whole, tokens)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    mesh = init_device_mesh("cpu", tuple(case["mesh"]), mesh_dim_names=NAMES[len(case["mesh"])])
    if dist.get_rank() >= math.prod(case["mesh"]):
        return {}
    degrees = {
        key: tuple(given) if isinstance(given, list) else given
        for key, given in case.get("degrees", {}).items()
    }
    plan = Parallelism(strategy=case["strategy"], **degrees) if degrees else case["strategy"]
    check = case.get("check", False)
    made = parallelize(model, plan, mesh, config=BlockConfig(**case.get("config", {})), check=check)
    with KeepDoubles():
        count.num_bytes = 0
        own = made.loss(tokens, targets)
        own.backward()
        moved = count.num_bytes
        with torch.no_grad():
            own_logits = made.logits(tokens)
    expected = dict(whole.named_parameters())
    parameters = dict(made.module.named_parameters())
    worst, where = 0.0, ""
    for name, parameter in parameters.items():
        assert isinstance(parameter.grad, DTensor), name
        assert parameter.shape == expected[name].shape, name
        assert parameter.grad.placements == parameter.placements, name
        for found, wanted in ((parameter, expected[name]), (parameter.grad, expected[name].grad)):
            wanted = wanted.detach()
            difference = float((found.full_tensor().detach() - wanted).abs().max() / wanted.abs().max())
            if difference > worst:
                worst, where = difference, name
    return {
        "case": f"{case['model']} {case['strategy']} {case['mesh']}",
        "loss": abs(own.item() - loss.item()),
        "logits": float((own_logits - logits).abs().max()),
        "gradients": worst,
        "where": where,
        "bytes": moved,
        "names": list(parameters) == list(expected),
    }
