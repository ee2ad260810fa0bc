"""One linear layer trained with a 2D-parallel product, checked against one process.

    torchrun --nproc-per-node 4 examples/matmul2d_training.py

Each rank holds a quarter of X, W and Y. Three steps of gradient descent give the loss of the dense layer.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshweave.nn import matmul2d

TOKENS, INS, OUTS = 96, 64, 128


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "col"))
    generator = torch.Generator().manual_seed(0)
    x, w, target = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((TOKENS, INS), (INS, OUTS), (TOKENS, OUTS))
    )
    shards = [distribute_tensor(t, mesh, [Shard(0), Shard(1)]).to_local() for t in (x, w, target)]
    x_shard, w_shard, target_shard = shards[0], shards[1].requires_grad_(), shards[2]
    w.requires_grad_()
    for step in range(3):
        y = matmul2d(x_shard, w_shard, mesh=mesh, shape=(TOKENS, OUTS, INS), dataflow="os", slices=4)
        loss = (y - target_shard).square().sum()
        loss.backward()
        dense = (x @ w - target).square().sum()
        dense.backward()
        with torch.no_grad():
            for parameter in (w_shard, w):
                parameter -= 1e-3 * parameter.grad
                parameter.grad = None
        total = loss.detach().clone()
        dist.all_reduce(total)
        assert torch.allclose(total, dense.detach()), (total, dense)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {total.item():.6f}, dense {dense.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
