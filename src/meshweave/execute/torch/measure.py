"""What every measurement of a run needs: ranks that begin together, and no garbage collection meanwhile."""

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
def quiet() -> Iterator[None]:
    """Collect garbage now and none in the block: a collection visits all of torch's objects, holding the GIL."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def start_together(context: TorchContext, offset_ns: int | None = 0) -> tuple[int, int]:
    """Return at an instant that rank 0 sets, for ranks leave a barrier at slightly different times.

    Collective among all ranks. `offset_ns` is this rank's CLOCK_MONOTONIC less rank 0's: 0 on one host, see
    `clocks.clock_offsets` for others; with None the barrier has to do.

    Returns:
        That instant in rank 0's clock, and by how much this rank missed it, both in nanoseconds.

    Raises:
        RankLostError, DeadlineError: as `TorchContext.guard` has them.
    """
    with context.guard("all ranks to start a run", range(context.num_ranks)):
        dist.barrier()
        instant = torch.tensor([time.monotonic_ns() + round(LEAD_S * 1e9)])
        dist.broadcast(instant, 0)
    start_ns = int(instant)
    if offset_ns is None:
        return start_ns, 0
    due_ns = start_ns + offset_ns
    time.sleep(max(due_ns - time.monotonic_ns(), 0) / 1e9)
    return start_ns, max(time.monotonic_ns() - due_ns, 0)
