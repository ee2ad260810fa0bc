"""The clocks of ranks on different hosts, aligned by round trips, so that their spans share one axis of time.

Rank 0 asks every other rank for its time. What the answer took is known to rank 0's clock, so the answer was
given half of that ago, give or take the other half. The quickest of many exchanges is kept (as NTP does):
it is the one that queued least. Measured before and after a run, drift between is taken to be linear.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from meshweave.trace import Trace

if TYPE_CHECKING:
    from meshweave.execute.torch.context import TorchContext

ROUNDS = 32
"""Exchanges per rank: a few milliseconds in all on a quiet link."""


@dataclass(frozen=True)
class ClockOffset:
    """`offset_ns`: how far this rank's clock is ahead of rank 0's, at `at_ns` of this rank's clock.

    The true offset is within `uncertainty_ns` of it: half of the round trip, whichever way was the slower one.
    """

    at_ns: int
    offset_ns: int
    uncertainty_ns: int


def clock_offsets(
    context: TorchContext, *, rounds: int = ROUNDS, clock: Callable[[], int] = time.monotonic_ns
) -> ClockOffset:
    """Return how far this rank's clock is ahead of rank 0's. Collective: all ranks give the same `rounds`.

    Rank 0 serves one rank after another over the default group; nothing else should be on the links.

    Args:
        rounds: exchanges with each rank, of which the quickest counts.
        clock: gives this rank's time in nanoseconds.

    Raises RankLostError, DeadlineError: other ranks are missing or late, see `TorchContext`.
    """
    assert rounds > 0
    if context.num_ranks == 1:
        return ClockOffset(clock(), 0, 0)
    if context.rank:
        with context.guard("rank 0 to compare clocks", (0,)):
            return _answer_exchanges(rounds, clock)
    for rank in range(1, context.num_ranks):
        with context.guard(f"rank {rank} to compare clocks", (rank,)):
            _measure_rank(rank, rounds, clock)
    return ClockOffset(clock(), 0, 0)


def _measure_rank(rank: int, rounds: int, clock: Callable[[], int]) -> None:
    """Rank 0's side. One exchange more than wanted comes first: it opens the connection."""
    import torch
    import torch.distributed as dist

    # Tensors are reused, so that the ways there and back cost the same.
    answer = torch.zeros(2, dtype=torch.int64)
    question = torch.zeros(1, dtype=torch.int64)
    best: tuple[int, int, int] | None = None
    for number in range(rounds + 1):
        sent = clock()
        dist.send(question, rank)
        dist.recv(answer, rank)
        back = clock()
        came, went = answer.tolist()
        trip = (back - sent) - (went - came)
        if number and (best is None or trip < best[0]):
            best = trip, ((came - sent) + (went - back)) // 2, went
    assert best is not None
    trip, offset, at = best
    # Rounded up, and one for the halved sum; a reading of the clock may be a nanosecond old.
    dist.send(torch.tensor([at, offset, max(trip, 0) // 2 + 2]), rank)


def _answer_exchanges(rounds: int, clock: Callable[[], int]) -> ClockOffset:
    import torch
    import torch.distributed as dist

    answer = torch.zeros(2, dtype=torch.int64)
    question = torch.zeros(1, dtype=torch.int64)
    for _ in range(rounds + 1):
        dist.recv(question, 0)
        answer[0] = clock()
        answer[1] = clock()
        dist.send(answer, 0)
    measured = torch.zeros(3, dtype=torch.int64)
    dist.recv(measured, 0)
    return ClockOffset(*measured.tolist())


def offset_at(at_ns: int, offsets: Sequence[ClockOffset]) -> int:
    """Return the offset in nanoseconds at `at_ns` of a rank's clock, from measurements in ascending order of time.

    Linear between two measurements; before the first and after the last that one holds.
    """
    before = offsets[0]
    for after in offsets:
        if at_ns <= after.at_ns:
            span = after.at_ns - before.at_ns
            if span <= 0:
                return after.offset_ns
            gone = max(at_ns - before.at_ns, 0)
            return before.offset_ns + (after.offset_ns - before.offset_ns) * gone // span
        before = after
    return before.offset_ns


def align(trace: Trace, *offsets: ClockOffset) -> Trace:
    """Return a rank's trace in the time of rank 0's clock, by its offsets measured before and after.

    `trace` is as `BoundProgram.run` returns it, in that rank's CLOCK_MONOTONIC. The order of spans is kept.
    """

    def moved(at_ps: int) -> int:
        return at_ps - 1000 * offset_at(at_ps // 1000, offsets)

    return replace(
        trace,
        spans=tuple(
            replace(span, start_ps=moved(span.start_ps), end_ps=moved(span.end_ps)) for span in trace.spans
        ),
    )
