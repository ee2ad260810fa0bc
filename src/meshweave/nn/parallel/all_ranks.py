"""Collectives of small values over all ranks of the world, each within the deadline of a context."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshweave.execute.ranks.agreement import exchange
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.counted import gathered


def device_type_here() -> str:
    """Return "cuda" where the default process group uses NCCL, else "cpu": the type of device that ranks train
    on.
    """
    return "cuda" if dist.is_initialized() and "nccl" in dist.get_backend() else "cpu"


@dataclass(frozen=True)
class AllRanks:
    """All ranks of the world, with collectives of small values among them.

    Attributes:
        context: communicates between the ranks.
        ranks: their global ranks, ascending.
    """

    context: TorchContext
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, context: TorchContext | None) -> AllRanks:
        """Return all ranks of the world, in `context` or, for None, in the default one of `device_type_here`."""
        if context is None:
            context = TorchContext.default(device_type_here())
        return cls(context, tuple(range(context.num_ranks)))

    def least(self, value: float) -> float:
        """Return the least `value` of all ranks. Collective."""
        own = torch.tensor([value], dtype=torch.float64, device=self.context.device)
        return float(gathered(own, self.context, self.ranks, "the times of all ranks").min())

    def most(self, value: float) -> float:
        """Return the greatest `value` of all ranks. Collective."""
        return -self.least(-value)

    def of_first(self, make: Callable[[], Any], what: str) -> Any:
        """Call `make` on rank 0 alone, and return its result on all ranks. Collective.

        Args:
            make: returns a value that JSON can hold; a tuple arrives as a list.
            what: completes "waiting for ..." in errors.
        """
        own = json.dumps(make()) if self.context.rank in (0, None) else ""
        return json.loads(exchange(self.context, self.ranks, own, what)[0])

    def median_s(self, run: Callable[[], object], repeat: int = 3) -> float:
        """Return the median time of `repeat` calls of `run`, in seconds, after one call that is not counted.

        Collective: all ranks begin each call together. It is the greatest of the medians of the ranks.
        """
        times = [self._taken_s(run) for _ in range(repeat + 1)]
        return self.most(statistics.median(times[1:]))

    def median_more_s(self, run: Callable[[], object], than: Callable[[], object], repeat: int) -> float:
        """Return by how many seconds a call of `run` takes longer than one of `than`; negative where shorter.

        Each rank calls `run`, then `than`, `repeat` times after one pair that is not counted, and takes the median
        of the differences: a machine that slows down does so for both calls. The result is the least median of all
        ranks, as the ranks that wait for the slowest one measure their waiting, too. Collective: all ranks begin
        each call together.
        """
        pairs = [(self._taken_s(run), self._taken_s(than)) for _ in range(repeat + 1)]
        return self.least(statistics.median(took_s - other_s for took_s, other_s in pairs[1:]))

    def _taken_s(self, run: Callable[[], object]) -> float:
        """Return the seconds of a call, which all ranks begin together."""
        self.least(0.0)
        began = time.monotonic()
        run()
        if self.context.device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic() - began
