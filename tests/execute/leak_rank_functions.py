"""What the ranks of test_leaks.py run, and what a process holds."""

import gc
import os
import threading
import time
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import meshweave as mw
from meshweave.execute.torch.context import TorchContext


def counts():
    """Return the threads, descriptors and resident bytes of this process."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "python_threads": threading.active_count(),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "resident": resident,
    }


def settled(before, patience_s=30.0):
    """Return the counts once they are no more than before, or time is up: threads take a moment to end."""
    until = time.monotonic() + patience_s
    while True:
        now = counts()
        is_flat = all(now[name] <= before[name] for name in ("threads", "descriptors"))
        if is_flat or time.monotonic() > until:
            return now
        time.sleep(0.05)


def contexts(context, payload):
    """Make and drop contexts that have multiplied over messages and in shared memory; return what is left."""
    mesh = init_device_mesh("cpu", (context.num_ranks,))
    a = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
    b = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])

    def use(transport):
        ours = TorchContext(deadline_s=30.0)
        mw.matmul(a, b, [Shard(0)], transport=transport, context=ours)
        mw.reshard(a, mesh, [Replicate()], context=ours)
        return weakref.ref(ours)

    listed = []
    for number in range(payload["num_contexts"]):
        dropped = use(("messages", "shared")[number % 2])
        gc.collect()
        assert dropped() is None, gc.get_referrers(dropped())
        dist.barrier()
        if number >= 1:
            listed.append(settled(listed[0]) if listed else counts())
    return listed


def sizes(context, payload):
    """Multiply and reshard ever new sizes; return what is held now and then, and how many were wrong."""
    ours = TorchContext(deadline_s=60.0, cache_bytes=payload["cache_bytes"])
    mesh = init_device_mesh("cpu", (2, 2))
    listed, errors = [], 0
    for number in range(payload["num_sizes"]):
        m, n, k = 4 + number % 97, 5 + number % 89, 3 + number % 101
        m += number // 97
        a = distribute_tensor(torch.ones(m, k), mesh, [Shard(0), Shard(1)])
        b = distribute_tensor(torch.ones(k, n), mesh, [Shard(1), Shard(0)])
        transport = payload["transports"][number % len(payload["transports"])]
        if transport == "reshard":
            c = mw.reshard(a, mesh, [Replicate(), Shard(0)], context=ours)
            errors += int((c.to_local() != 1).any())
        else:
            c = mw.matmul(a, b, [Shard(0), Shard(1)], transport=transport, context=ours)
            errors += int((c.to_local() != k).any())
        if number % payload["every"] == payload["every"] - 1:
            programs = ours.programs
            listed.append({**counts(), "programs": len(programs), "counted": programs.num_bytes(range(4))})
    ours.close()
    return {"counts": listed, "errors": errors}
