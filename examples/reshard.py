"""A tensor from the ranks of one mesh to those of another, its gradient back, and a small state dict.

    python examples/reshard.py

Four processes on gloo. Ranks 0 and 1 hold activations cut by rows, ranks 2 and 3 want them cut by columns: the two
stages of a pipeline, each with placements of its own. Nobody ever holds the whole tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, empty

from meshweave import launch, reshard
from meshweave.nn import RankContext, reshard_state_dict

ROWS, COLUMNS = 4, 6


def main() -> None:
    here = {"PYTHONPATH": str(Path(__file__).parent)}
    for rank, lines in enumerate(launch("reshard:on_a_rank", 4, {}, timeout_s=100, env=here)):
        print(f"rank {rank}")
        for line in lines:
            print(f"  {line}")
    print("values and gradients are the dense ones")


def on_a_rank(context: RankContext, payload: dict[str, Any]) -> list[str]:
    """Return in words what this rank held, got, and got back."""
    sources, targets = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])  # all ranks make all meshes
    dense = torch.arange(1.0, ROWS * COLUMNS + 1).reshape(ROWS, COLUMNS)
    lines = []

    # Ranks outside a mesh have the same DTensor there, without elements.
    if context.rank in (0, 1):
        x = distribute_tensor(dense, sources, [Shard(0)])
    else:
        x = empty(ROWS, COLUMNS, device_mesh=sources, placements=[Shard(0)])
    x.requires_grad_()
    lines.append(f"holds {part(x)}")

    y = reshard(x, targets, [Shard(1)])
    lines.append(f"gets {part(y)}")
    assert torch.equal(y.to_local(), distribute_tensor(dense, targets, [Shard(1)]).to_local())

    # The loss of the second stage. The first one calls the same, and no arithmetic is done there.
    (y * y).sum().backward()
    lines.append(f"gradient {part(x.grad)}")
    assert torch.equal(x.grad.to_local(), distribute_tensor(2 * dense, sources, [Shard(0)]).to_local())

    # All tensors of a state dict in one schedule, such as from trainers to those that generate.
    state = {"weight": x.detach(), "step": distribute_tensor(torch.tensor(17), sources, [Replicate()])}
    moved = reshard_state_dict(state, targets, {"weight": [Replicate()], "step": [Replicate()]})
    lines += [f"{name}: {part(tensor)}" for name, tensor in moved.items()]
    assert context.rank in (0, 1) or torch.equal(moved["weight"].to_local(), dense)
    return lines


def part(tensor: DTensor) -> str:
    local = tensor.detach().to_local()
    return f"{list(local.shape)} of {list(tensor.shape)}, sum {local.sum():g}"


if __name__ == "__main__":
    main()
