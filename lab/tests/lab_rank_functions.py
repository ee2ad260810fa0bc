"""What the ranks of a lab run; needs torch."""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist


def sent_bytes(interface):
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def exchange(context, payload):
    """Rank 0 sends to rank 1: how fast, and over which interface. Then two products, and one of DTensors."""
    data = torch.ones(payload["num_bytes"] // 4)
    warm = torch.ones(payload["num_bytes"] // 16)
    before = {name: sent_bytes(name) for name in ("eth0", "mgmt0")}
    rates = []
    for tensor in (warm, data, data):
        dist.barrier()
        begin = time.perf_counter()
        if context.rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
            rates.append(tensor.nbytes / (time.perf_counter() - begin))
    dist.barrier()  # what is sent may still be in a buffer
    sent = {name: sent_bytes(name) - before[name] for name in before}
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x = torch.ones(20, 20)
    mesh = init_device_mesh("cpu", (2,))
    product = distribute_tensor(x, mesh, [Shard(0)]) @ distribute_tensor(x, mesh, [Replicate()])
    assert float(product.to_local().sum()) == 10 * 20 * 20
    assert float((x @ x @ x).sum()) == 20**4
    names = ["RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"]
    return {"rates": rates, "sent": sent, "env": [os.environ[name] for name in names]}


def die(context, payload):
    """Rank 1 kills itself while the others wait for it."""
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with context.liveness.guard("word from rank 1"):
        dist.recv(torch.zeros(1), 1)
