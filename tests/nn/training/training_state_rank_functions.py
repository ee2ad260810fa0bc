"""What the ranks of test_training_state run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import meshweave as mw
from meshweave.nn.parallel.units import FeatureUnits


def on_more_ranks(context: Any, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Load what one rank saved; save and load what rank 1 has alone, and stages whose optimizers know names."""
    folder, model = Path(payload["folder"]), nn.Linear(2, 2)
    torch.manual_seed(0)
    state = mw.nn.TrainingState([model], torch.optim.AdamW(model.parameters()), rank=context.rank, places=1)
    state.load(mw.Checkpoints(folder / "one"), 1)
    drawn = torch.rand(1).item()

    mesh = DeviceMesh("cpu", [1])
    value = nn.Parameter(distribute_tensor(torch.full((), 3.0), mesh, [Replicate()]))
    checkpoints, whole = mw.Checkpoints(folder / "some"), torch.zeros(())
    checkpoints.save(1, {"value": value})
    checkpoints.load(1, {"value": whole})

    stage = nn.ModuleDict({f"layer{context.rank}": nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(stage.named_parameters())
    state = mw.nn.TrainingState([stage], optimizer, rank=context.rank)
    state.save(checkpoints, 2)
    wanted = torch.rand(2)
    state.load(checkpoints, 2)
    again = torch.equal(torch.rand(2), wanted)
    made = {"drawn": drawn, "value": float(whole), "again": again, "fused": _fused(context, checkpoints)}
    return made | {"stages": _stages_of_one_name(context, checkpoints)}


def _stages_of_one_name(context: Any, checkpoints: mw.Checkpoints) -> str:
    """What is said where each rank has a layer of its own under a name that all have."""
    torch.manual_seed(context.rank)
    stage = nn.Linear(2, 2)
    state = mw.nn.TrainingState([stage], torch.optim.SGD(stage.parameters()), rank=context.rank)
    try:
        state.save(checkpoints, 4)
    except mw.MeshweaveError as error:
        return str(error)
    return ""


def _fused(context: Any, checkpoints: mw.Checkpoints) -> list[bool]:
    """Whether a fused weight, and a state of it that is whole on all ranks, are saved as they are."""
    mesh = init_device_mesh("cpu", (context.num_ranks,))
    whole, units = nn.Linear(4, 24, bias=False), FeatureUnits(4, parts=3)
    with torch.no_grad():
        whole.weight.copy_(torch.arange(96.0).view(24, 4))
    made = mw.nn.ParallelLinear(whole, "megatron", mesh, place="in", units=units, is_attention=True)
    optimizer = torch.optim.SGD(made.parameters())
    rows = torch.arange(24.0)[:, None]
    optimizer.state[made.weight]["rows"] = distribute_tensor(rows, mesh, [Replicate()])
    mw.nn.TrainingState([made], optimizer, rank=context.rank).save(checkpoints, 3)
    names = {"model.weight": torch.zeros(24, 4), "optimizer.weight.rows": torch.zeros(24, 1)}
    checkpoints.load(3, names, extra=True)
    return [
        torch.equal(own, wanted) for own, wanted in zip(names.values(), (whole.weight, rows), strict=True)
    ]
