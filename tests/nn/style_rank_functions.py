"""What the ranks of test_parallel_style run: torch's `parallelize_module` with universal products."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from meshweave.base.errors import MeshweaveError
from meshweave.nn.parallel import local_steps
from meshweave.nn.parallel_style import UniversalParallel


def two_layers(context: Any, payload: Mapping[str, Any]) -> list[str]:
    """A feed-forward part on a mesh of two dims: result and gradients are those of one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 7)).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    expected = model(x)
    expected.square().sum().backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    up = UniversalParallel(
        weight=[Shard(0), Shard(1)], output=[Shard(1), Replicate()], use_local_output=False
    )
    down = UniversalParallel(weight=[Shard(1), Shard(0)], output=[Replicate(), Replicate()])
    parallelize_module(model, mesh, {"0": up, "2": down})
    y = model(x)
    y.square().sum().backward()
    wrong = [] if torch.allclose(y, expected) else ["result"]
    for (name, parameter), grad in zip(model.named_parameters(), wanted, strict=True):
        if not torch.allclose(parameter.grad.full_tensor(), grad):
            wrong.append(name)
    for module, style in ((nn.GELU(), up), (nn.Linear(2, 2), UniversalParallel(weight=[Shard(0)]))):
        try:
            parallelize_module(module, mesh, style)
            wrong.append(f"{module} is taken")
        except MeshweaveError:
            pass
    return wrong + copied(mesh) + permuted()


def copied(mesh: DeviceMesh) -> list[str]:
    """A deep copy of a layer, as for averaged weights, has its own; dims of placements may be negative."""
    layer = nn.Linear(8, 4).double()
    x = torch.randn(3, 8, dtype=torch.float64)
    expected = layer(x)
    style = UniversalParallel(weight=[Shard(-2), Shard(-1)], output=[Replicate(), Replicate()])
    parallelize_module(layer, mesh, style)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    wrong = [] if torch.allclose(layer(input=x), expected) else ["result of the layer"]
    return wrong if torch.equal(other(x), torch.zeros_like(expected)) else [*wrong, "result of a copy"]


def permuted() -> list[str]:
    """Ranks that do not ascend along a mesh dim have the parts of their places, as in steps on whole matrices."""
    mesh, places, wrong = DeviceMesh("cpu", [[3, 1], [0, 2]]), [Shard(0), Shard(1)], []
    layer = nn.Linear(8, 4).double()
    x = torch.randn(3, 8, dtype=torch.float64)
    expected = layer(x)
    style = UniversalParallel(weight=[Shard(1), Shard(0)], output=[Replicate(), Replicate()])
    parallelize_module(layer, mesh, style)
    if not torch.allclose(layer(x), expected):
        wrong.append("result of a permuted mesh")
    value, grad = torch.randn(4, 6), torch.randn(4, 6)
    own, whole = nn.Parameter(_cut(value, mesh, places)), nn.Parameter(value.clone())
    own.grad, whole.grad = _cut(grad, mesh, places), grad
    local_steps._step_on_whole(torch.optim.Adafactor([own], lr=0.1))
    torch.optim.Adafactor([whole], lr=0.1).step()
    if not torch.allclose(own.to_local(), _cut(whole.detach(), mesh, places).to_local()):
        wrong.append("step on a permuted mesh")
    return wrong


def _cut(whole: torch.Tensor, mesh: DeviceMesh, placements: Any) -> Any:
    """A DTensor of a global value, by the places of ranks in the mesh."""
    return distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)
