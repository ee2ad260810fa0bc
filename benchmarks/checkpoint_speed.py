"""Seconds to save and load a checkpoint of 1 GiB, beside torch's own `torch.distributed.checkpoint`, in turns.

    python benchmarks/checkpoint_speed.py [--ranks 2] [--mib 1024] [--rounds 5] [--save NAME]

The tensors are DTensors of float32, sharded over the ranks, which write and read their parts. Each round saves and
loads with both in an order that alternates, into new folders; the medians are of the slowest rank. Both wait until
bytes are on the disk (fsync), and read them from the cache of the system. meshweave reads bytes twice: once for
their checksums, which torch's files have not. "Blocked" is what the training waits for where the rest is written
beside it: `Checkpoints.save`, and torch's `async_save`, each without what waits for the end. The disk alone is one
file of all bytes, written by each rank's share and synced.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from machine import save
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import meshweave as mw

TENSORS = 16


def rounds(context: mw.RankContext, payload: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return what each round took on this rank, in seconds, by what was done; the first one warms up."""
    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    rows = payload["mib"] * (1 << 20) // (4 * 1024 * TENSORS * ranks)
    generator = torch.Generator().manual_seed(dist.get_rank())
    parts = [torch.randn(rows, 1024, generator=generator) for _ in range(TENSORS)]
    given = {f"weight.{n}": DTensor.from_local(each, mesh, [Shard(0)]) for n, each in enumerate(parts)}
    taken = {name: DTensor.from_local(torch.empty_like(p), mesh, [Shard(0)]) for (name, p) in _local(given)}
    listed = []
    for number in range(payload["rounds"] + 1):
        works = [_ours, _torchs, _torchs_beside, _disk]
        took: dict[str, float] = {}
        for work in works if number % 2 else works[::-1]:
            folder = Path(payload["folder"]) / f"{work.__name__}-{number}"
            for each in taken.values():
                each.to_local().zero_()
            work(folder, given, taken, took)
            if work is not _disk:
                same = all(
                    torch.equal(a, b) for (_, a), (_, b) in zip(_local(given), _local(taken), strict=True)
                )
                assert same, work.__name__
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(folder)
        listed.append(took)
    return listed[1:]


def _local(tensors: Mapping[str, DTensor]) -> list[tuple[str, Tensor]]:
    return [(name, each.to_local()) for name, each in tensors.items()]


def _timed(act: Callable[[], Any]) -> tuple[float, Any]:
    dist.barrier()
    began = time.perf_counter()
    result = act()
    return time.perf_counter() - began, result


def _ours(folder: Path, given: Any, taken: Any, took: dict[str, float]) -> None:
    checkpoints = mw.Checkpoints(folder)
    blocked, _ = _timed(lambda: checkpoints.save(1, given))
    began = time.perf_counter()
    checkpoints.wait()
    took["meshweave save, blocked"] = blocked
    took["meshweave save"] = blocked + time.perf_counter() - began
    took["meshweave load"], _ = _timed(lambda: checkpoints.load(1, taken))


def _torchs(folder: Path, given: Any, taken: Any, took: dict[str, float]) -> None:
    took["torch save"], _ = _timed(lambda: dcp.save(dict(given), checkpoint_id=folder))
    took["torch load"], _ = _timed(lambda: dcp.load(dict(taken), checkpoint_id=folder))


def _torchs_beside(folder: Path, given: Any, taken: Any, took: dict[str, float]) -> None:
    blocked, written = _timed(lambda: dcp.async_save(dict(given), checkpoint_id=folder))
    began = time.perf_counter()
    written.result()
    took["torch async_save, blocked"] = blocked
    took["torch async_save"] = blocked + time.perf_counter() - began
    dist.barrier()
    dcp.load(dict(taken), checkpoint_id=folder)


def _disk(folder: Path, given: Any, taken: Any, took: dict[str, float]) -> None:
    folder.mkdir(exist_ok=True)

    def write() -> None:
        with (folder / str(dist.get_rank())).open("wb") as file:
            for _, part in _local(given):
                file.write(memoryview(part.numpy()).cast("B"))
            file.flush()
            os.fsync(file.fileno())

    took["disk alone, save"], _ = _timed(write)


def main() -> None:
    """Print the measurements, and save them where asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save")
    given = parser.parse_args()
    here = {"PYTHONPATH": str(Path(__file__).resolve().parent)}
    with tempfile.TemporaryDirectory() as folder:
        payload = {"mib": given.mib, "rounds": given.rounds, "folder": folder}
        of_ranks = mw.launch("checkpoint_speed:rounds", given.ranks, payload, timeout_s=3000, env=here)
    names = list(of_ranks[0][0])
    slowest = {name: [max(rank[n][name] for rank in of_ranks) for n in range(given.rounds)] for name in names}
    result = {
        "ranks": given.ranks, "mib": given.mib, "rounds": given.rounds, "load_average": os.getloadavg(),
        "median_s": {name: round(statistics.median(slowest[name]), 3) for name in sorted(names)},
        "least_and_most_s": {name: [round(min(v), 3), round(max(v), 3)] for name, v in sorted(slowest.items())},
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if given.save is not None:
        print(f"saved {save(given.save, result)}")


if __name__ == "__main__":
    main()
