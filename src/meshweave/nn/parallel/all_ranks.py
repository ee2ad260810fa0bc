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
    """Return the type of device of ranks: "cuda" where they communicate by NCCL, else "cpu"."""
    return "cuda" if dist.is_initialized() and "nccl" in dist.get_backend() else "cpu"


@dataclass(frozen=True)
class AllRanks:
    """All ranks of the world, in a context that communicates between them.

    Attributes:
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
        """Return on all ranks what `make` returns on rank 0, where alone it is called. Collective.

        Args:
            make: returns a value that JSON can hold; a tuple arrives as a list.
            what: completes "waiting for ..." in errors.
        """
        own = json.dumps(make()) if self.context.rank in (0, None) else ""
        return json.loads(exchange(self.context, self.ranks, own, what)[0])

    def median_s(self, run: Callable[[], object], repeat: int = 3) -> float:
        """Return the median seconds of `repeat` calls of `run`, after one that is not counted: the greatest
        median of all ranks.

        Collective; all ranks begin each call together.
        """
        times = [self._taken_s(run) for _ in range(repeat + 1)]
        return self.most(statistics.median(times[1:]))

    def median_more_s(self, run: Callable[[], object], than: Callable[[], object], repeat: int) -> float:
        """Return the median of the seconds that a call of `run` takes more than the call of `than` after it.

        It is that of `repeat` such pairs, after one that is not counted, and may be negative: a machine that
        becomes slower does so for both. The result is the least median of all ranks, since what waits for other
        ranks ends at one time, and on the slowest rank what does not wait takes longest. Collective; all ranks
        begin each call together.
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
