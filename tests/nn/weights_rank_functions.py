"""What the ranks of test_weights run: weights into modules of DTensors and out of them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshweave.base.errors import MeshweaveError
from meshweave.execute.ranks.job import RankContext
from meshweave.execute.torch import compat
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.dtensor import layout_on
from meshweave.nn.weights import StoredTensor, load_weights, save, save_weights

LAYOUTS = {
    "even": (Shard(0), Shard(1)),
    "uneven": (Shard(1), Shard(1)),
    "fused": (compat.strided_shard(1, 3), Replicate()),
    "copies": (Replicate(), Replicate()),
    "turned": (Shard(0), Replicate()),
}
MAPPING = {"turned": StoredTensor("h.turned", is_transposed=True), "even": "h.even"}


class Weights(nn.Module):
    """One parameter per layout, and a tied one."""

    def __init__(self, parts: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.register_parameter(name, nn.Parameter(part))
        self.tied = self.even


def load_and_save(context: Any, payload: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Each rank gets its part of what is stored, reads no more than that, and together they write the same.

    Return what is wrong, and which files this rank wrote.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    folder = Path(payload["folder"])
    stored = {
        name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    parts, expected = {}, {}
    for name, placements in LAYOUTS.items():
        where = MAPPING.get(name, name)
        whole = stored[where.name].t() if isinstance(where, StoredTensor) else stored[where]
        layout = layout_on(mesh, placements, whole.shape, None)
        rows, columns = layout.indices(tuple(whole.shape), context.rank)
        expected[name] = whole[rows][:, columns]
        local = torch.empty(expected[name].shape, device="meta" if name == "even" else "cpu")
        parts[name] = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=whole.shape, stride=(whole.shape[1], 1)
        )
    module = Weights(parts)
    report = load_weights(module, folder, mapping=MAPPING)
    wrong = [
        f"{name} on rank {context.rank}"
        for name, part in expected.items()
        if not torch.equal(getattr(module, name).to_local(), part)
    ]
    if module.tied is not module.even:
        wrong.append("tied parameters came apart")
    if report.bytes_read != sum(part.numel() * 4 for part in expected.values()):
        wrong.append(f"{report.bytes_read} bytes read")
    if report.unused != ["extra"]:
        wrong.append(f"unused {report.unused}")
    written_here: list[str] = []
    write = save._write
    save._write = lambda where, name, tensors: (written_here.append(name), write(where, name, tensors))
    save_weights(module, folder / "again", mapping=MAPPING, file_bytes=200)
    if context.rank == 0:
        written = {
            n: t for path in (folder / "again").glob("*.safetensors") for n, t in load_file(path).items()
        }
        del stored["extra"]
        wrong += [name for name, one in stored.items() if not torch.equal(written.pop(name), one)]
        wrong += [f"{name} is extra" for name in written]
    return wrong, written_here


def outside_of_a_mesh(context: Any, payload: Mapping[str, Any]) -> list[float | str]:
    """Load and save two tensors that the last rank alone has; return what all of them have then, summed.

    And what is said where each rank saves a parameter of its own under one name.
    """
    mesh, folder = DeviceMesh("cpu", [dist.get_world_size() - 1]), Path(payload["folder"])
    module = nn.Module()
    module.scale = nn.Parameter(distribute_tensor(torch.zeros(()), mesh, [Replicate()]))
    module.weight = nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)]))
    assert not load_weights(module, folder).missing
    save_weights(module, folder / "again")
    dist.barrier()
    stored = load_file(folder / "again" / "model.safetensors")
    said: list[float | str] = [float(stored["scale"]), float(stored["weight"].sum())]
    module.weight = nn.Parameter(torch.full((2,), float(context.rank)))
    try:
        save_weights(module, folder / "again")
    except MeshweaveError as error:
        said.append(f"{type(error).__name__}: {error}")
    return said


def save_with_a_lost_rank(context: RankContext, payload: Mapping[str, Any]) -> None:
    """Save while rank 1 ends or stops itself, or raises, and write down what the others are told."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (context.num_ranks,), mesh_dim_names=("a",))
    module = torch.nn.Linear(8, 8 * context.num_ranks)
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    torch_context = TorchContext(liveness=context.liveness, deadline_s=payload["deadline_s"])
    began = time.monotonic()
    if context.rank == 1:
        save._gathered = lambda *given: _end_as(payload["how"])  # type: ignore[assignment]
    try:
        save_weights(module, payload["folder"], context=torch_context)
    except MeshweaveError as error:
        missing, seconds = list(getattr(error, "missing", ())), time.monotonic() - began
        said = [type(error).__name__, missing, str(error), seconds]
        Path(payload["folder"], f"{context.rank}.json").write_text(json.dumps(said))
        raise


def _end_as(how: str) -> None:
    if how == "raise":
        raise OSError("the disk of this rank is full")
    os.kill(os.getpid(), getattr(signal, how))
