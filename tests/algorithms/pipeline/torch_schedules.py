"""The schedules of `torch.distributed.pipelining` as the CSV texts that torch dumps, without process groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SINGLE = ("GPipe", "1F1B")
LOOPED = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble")
FOLDED = ("ZBVZeroBubble", "DualPipeV")
ALL = (*SINGLE, *LOOPED, *FOLDED)


class _Stage:
    """What a schedule of torch asks of a stage before it runs."""

    submod = None
    is_first = is_last = False

    def __init__(self, index: int, num_stages: int, num_ranks: int) -> None:
        self.stage_index, self.num_stages = index, num_stages
        self.group_size, self.group_rank = num_ranks, index % num_ranks
        self.stage_index_to_group_rank: dict[int, int] = {}


def torch_schedule(name: str, num_ranks: int, per_rank: int, num_micro_batches: int) -> Any:
    """Return an instance of one of torch's schedule classes. Raises ValueError for numbers that it refuses."""
    num_stages = num_ranks * per_rank
    stages = [_Stage(rank, num_stages, num_ranks) for rank in range(0, num_stages, num_ranks)]
    from torch.distributed.pipelining import schedules  # seconds, and only some workers run these tests

    made = schedules.get_schedule_class(name)
    if name in SINGLE:
        return made(stages[0], num_micro_batches, loss_fn=lambda *_: None)
    return made(stages, num_micro_batches, loss_fn=lambda *_: None)


def _is_of_one_stage(schedule: Any) -> bool:
    from torch.distributed.pipelining import schedules

    return isinstance(schedule, schedules.PipelineScheduleSingle)


def compute_only(schedule: Any, folder: Path) -> str:
    """Return what torch dumps without communication, idle steps among it."""
    path = folder / "compute.csv"
    if _is_of_one_stage(schedule):
        order = schedule._get_pipeline_order()
        return "".join(",".join(map(str, order[rank])) + "\r\n" for rank in sorted(order))
    schedule._dump_csv(str(path), format="compute_only")
    return path.read_bytes().decode()


def with_transfers(schedule: Any, folder: Path) -> str:
    """Return what torch dumps with communication. Raises TypeError for schedules of one stage a rank."""
    if _is_of_one_stage(schedule):
        raise TypeError("torch does not list the transfers of schedules of one stage a rank")
    path = folder / "transfers.csv"
    schedule._dump_csv(str(path), format="compute_comms")
    return path.read_bytes().decode()


def cases() -> Iterator[tuple[str, Any, tuple[int, int, int]]]:
    """Yield name, schedule and (ranks, stages per rank, micro-batches) of each class over many sizes."""
    for name in ALL:
        for num_ranks in (1, 2, 3, 4, 8):
            for per_rank in (1,) if name in SINGLE else (2,) if name in FOLDED else (1, 2, 3):
                for count in (1, 2, 3, 4, 6, 8, 12, 16, 17):
                    with contextlib.suppress(ValueError):
                        sizes = (num_ranks, per_rank, count)
                        yield name, torch_schedule(name, *sizes), sizes
