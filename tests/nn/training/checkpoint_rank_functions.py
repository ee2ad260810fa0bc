"""What the ranks of test_hostile_checkpoints and test_checkpoint_faults run."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hostile_checkpoints import harmed_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import meshweave as mw
from meshweave.base.errors import CheckpointError
from meshweave.nn.training import files


def _values(rank: int, step: float) -> dict[str, Any]:
    """Return a tensor that both ranks share, one that both have, and one of each rank."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(12.0).view(6, 2) + step
    own = {
        f"own.{rank}": torch.full((3,), step + rank, dtype=torch.float64),
        f"mask.{rank}": torch.tensor([True, False]),
    }
    return {"w": distribute_tensor(whole, mesh, [Shard(0)]), "both": torch.full((2,), step), **own}


def _refusal(act: Callable[[], object]) -> str:
    """Return the words of a refusal; "" where there is none."""
    try:
        act()
    except CheckpointError as error:
        return str(error)
    return ""


def loads_harmed_ones(context: Any, payload: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Save two steps, and load copies of them that are harmed, one after another. Return each refusal."""
    base = Path(payload["folder"])
    checkpoints = mw.Checkpoints(base / "pristine")
    for step in (2, 4):
        checkpoints.save(step, _values(context.rank, float(step)), {"said": step})
    checkpoints.wait()
    # Address space over what is mapped now: what asks for more than 3 GiB fails.
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (3 << 30), resource.RLIM_INFINITY))
    answers = []
    for seed in range(payload["num_cases"]):
        folder = base / "case" / "checkpoints"
        case = [""]
        if context.rank == 0:
            case = [harmed_checkpoint(base / "pristine", folder, seed)]
        dist.broadcast_object_list(case, 0)
        harmed, values = mw.Checkpoints(folder), _values(context.rank, 9.0)
        words = _refusal(lambda: harmed.load(4, values))  # noqa: B023 - called at once
        if "have been read" not in words:
            assert torch.equal(values["both"], torch.full((2,), 9.0)), case
        harmed.load(2, values)
        assert torch.equal(values[f"own.{context.rank}"], torch.full((3,), 2.0 + context.rank).double()), case
        answers.append((case[0], words))
        dist.barrier()
        if context.rank == 0:
            for path in base.iterdir():
                if path.name != "pristine":
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return answers


@contextlib.contextmanager
def _slow_disk(seconds: float) -> Iterator[None]:
    """Let each wait for the disk take longer."""
    real = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(seconds)
        real(descriptor)

    files.os.fsync = slow  # type: ignore[assignment]
    try:
        yield
    finally:
        files.os.fsync = real


def faults(context: Any, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Meet one fault after another on two ranks. Return what each was told, by fault."""
    base, rank = Path(payload["folder"]), context.rank
    short = mw.TorchContext(deadline_s=1.0)
    told: dict[str, Any] = {}
    # The first rank's folder is a file.
    if rank == 0:
        (base / "file").write_text("")
    start = time.monotonic()
    told["a file"] = _refusal(lambda: mw.Checkpoints(base / "file"))
    told["a file in time"] = time.monotonic() - start < 5.0
    torch.manual_seed(0)  # copies of one value are equal
    told["weights"] = _refusal(lambda: mw.save_weights(torch.nn.Linear(2, 2), base / "file"))
    # A disk that takes longer than the deadline, on either rank.
    for slow in (0, 1):
        checkpoints = mw.Checkpoints(base / f"slow{slow}", context=short)
        with _slow_disk(3.0) if rank == slow else contextlib.nullcontext():
            checkpoints.save(1, _values(rank, 1.0))
            checkpoints.wait()
        values = _values(rank, 0.0)
        checkpoints.load(1, values)
        told[f"slow {slow}"] = bool(torch.equal(values["both"], torch.ones(2)))
    # A rank cannot write: all are told, and what was whole stays whole.
    checkpoints = mw.Checkpoints(base / "full")
    checkpoints.save(1, _values(rank, 1.0))
    checkpoints.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
    checkpoints.save(2, _values(rank, 2.0))
    told["no room"] = _refusal(checkpoints.wait)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    told["after no room"] = (checkpoints.latest(), sorted(path.name for path in checkpoints.folder.iterdir()))
    checkpoints.save(3, _values(rank, 3.0))
    checkpoints.wait()
    told["again"] = checkpoints.latest()
    # Ranks that differ.
    told["steps"] = _refusal(lambda: checkpoints.save(4 + rank, _values(rank, 4.0)))
    told["notes"] = _refusal(lambda: checkpoints.save(4, _values(rank, 4.0), {"rank": rank}))
    told["shape"] = _refusal(lambda: checkpoints.save(4, {"x": torch.zeros(1 + rank)}))
    told["kind"] = _refusal(lambda: checkpoints.save(4, {"x": torch.zeros(1) if rank else [1]}))
    dist.barrier()
    told["left"] = sorted(path.name for path in checkpoints.folder.iterdir())
    told["missing"] = _refusal(
        lambda: checkpoints.load(3, _values(rank, 0.0) | ({"more": torch.zeros(1)} if rank else {}))
    )
    fewer = {name: each for name, each in _values(rank, 0.0).items() if name != "both"}
    told["extra"] = _refusal(lambda: checkpoints.load(3, fewer))
    told["allowed"] = _refusal(lambda: checkpoints.load(3, fewer, extra=True))
    # The folder is deleted while it is written.
    dist.barrier()
    with _slow_disk(1.0):
        checkpoints.save(5, _values(rank, 5.0))
        if rank == 0:
            time.sleep(0.3)
            shutil.rmtree(base / "full")
        told["deleted"] = _refusal(checkpoints.wait)
    checkpoints.save(6, _values(rank, 6.0))
    checkpoints.wait()
    told["made again"] = checkpoints.latest()
    return told
