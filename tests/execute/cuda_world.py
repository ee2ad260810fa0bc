"""Ranks that share one CUDA device: NCCL between them, and how to start them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshweave.execute.ranks.launch import RankPlace
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.world import adopt

HERE = Path(__file__).parent
ENV = {
    "PYTHONPATH": f"{HERE}:{HERE.parent / 'nn'}",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
}


def needs_cuda() -> None:
    """Skip a test where there is no CUDA device."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def places(num_ranks: int) -> list[RankPlace]:
    """Return where ranks run that share a device.

    NCCL refuses two ranks of one host on one device. It takes ranks whose NCCL_HOSTID differ for those of
    different hosts, and connects them by sockets.
    """
    return [RankPlace(env={"NCCL_HOSTID": f"rank{rank}"}) for rank in range(num_ranks)]


@contextmanager
def nccl_context(context: Any) -> Iterator[TorchContext]:
    """A context on the device `cuda:0` whose default process group is of NCCL, in a rank that `launch` started."""
    torch.cuda.set_device(0)
    dist.destroy_process_group()
    store = dist.PrefixStore("nccl", context.store)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=store, rank=context.rank, world_size=context.num_ranks
    )
    adopt(context.liveness)
    ours = TorchContext(liveness=context.liveness, deadline_s=60.0, device="cuda:0")
    yield ours
    torch.cuda.synchronize()
    dist.barrier()
    ours.close()
