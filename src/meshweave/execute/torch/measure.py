"""Helpers for timing runs: a common start of all ranks, and no garbage collection meanwhile."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from meshweave.execute.torch.context import TorchContext

LEAD_S = 0.03
"""From the broadcast of the start to the start; longer than a broadcast takes among ranks that share cores."""


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect garbage now, disable the collector in the block, and always enable it afterwards.

    A collection holds the GIL for long, and so would disturb a timing.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def start_together(
    context: TorchContext, offset_ns: int | None = 0, lead_s: float = LEAD_S
) -> tuple[int, int]:
    """Wait until an instant that rank 0 sets, and return (instant, lateness). Collective among all ranks.

    A barrier alone is not enough, since ranks leave it at slightly different times.

    Args:
        offset_ns: this rank's CLOCK_MONOTONIC minus rank 0's, in nanoseconds: 0 on one host, else see
            `meshweave_lab.fidelity.clocks`. None: do not wait for the instant, and return once it is known.
        lead_s: seconds from the broadcast of the instant to the instant.

    Returns:
        The instant in rank 0's CLOCK_MONOTONIC, and how long after it this rank returns (0 for an offset of
        None), both in nanoseconds.

    Raises:
        RankLostError, DeadlineError: another rank died, or did not come in time.
    """
    with context.guard("all ranks to start a run", range(context.num_ranks)):
        dist.barrier()
        instant = torch.tensor([time.monotonic_ns() + round(lead_s * 1e9)])
        dist.broadcast(instant, 0)
    start_ns = int(instant)
    if offset_ns is None:
        return start_ns, 0
    due_ns = start_ns + offset_ns
    time.sleep(max(due_ns - time.monotonic_ns(), 0) / 1e9)
    return start_ns, max(time.monotonic_ns() - due_ns, 0)
