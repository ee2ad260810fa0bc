"""What the ranks of test_weights run: weights into modules of DTensors and out of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshweave.execute.torch import compat
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
