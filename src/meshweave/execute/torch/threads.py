"""How many threads a product has that several ranks compute, each for itself: the same number on all of them.

A BLAS cuts a product up for its threads, and the cuts decide how sums are rounded: with MKL 2024.2 and oneDNN
3.12, up to 10 % of products have other bits with 2 threads than with 1, or with 3 than with 2, in float32, float64
and bfloat16. Ranks that copy results need not care. Ranks that recompute them use as many threads as the one that
has the fewest (`torch.set_num_threads`, OMP_NUM_THREADS), for as long as such a product runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from meshweave.execute.ranks.agreement import exchange
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.views import Action


class _AgreedThreads(dict[tuple[int, ...], int]):
    """The number of threads that ranks agreed on in a context, by these ranks."""


def agreed_num_threads(context: TorchContext, ranks: tuple[int, ...]) -> int | None:
    """Return the least number of threads that torch uses on any of `ranks`; None for a context not on a CPU.

    The first call for these ranks in a context is collective among them; the context remembers the number.

    Raises:
        BindError: another rank is in another call, or has raised an error in place of this call; or there is
            no process group.
        RankLostError, DeadlineError: another rank died, or did not come in time.
    """
    if context.device.type != "cpu":
        return None
    agreed = context.cache(_AgreedThreads)
    if ranks not in agreed:
        own = torch.get_num_threads()
        torch.set_num_threads(own)  # from the first call of this on, MKL takes the number as it is
        counts = exchange(context, ranks, str(own), "all ranks to agree on a number of threads")
        agreed[ranks] = min(map(int, counts.values()))
    return agreed[ranks]


@contextlib.contextmanager
def num_threads_set(count: int) -> Iterator[None]:
    """Have torch use `count` threads for each op of the calling thread in the block; then restore the number."""
    own = torch.get_num_threads()
    if own == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(own)


def with_num_threads(count: int | None, action: Action) -> Action:
    """Return a function that runs `action` with torch's number of threads at `count`; `action` if that is None."""
    if count is None:
        return action

    def run() -> None:
        with num_threads_set(count):
            action()

    return run
