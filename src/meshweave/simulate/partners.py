"""Which partner an op of a simulation waited for."""

from __future__ import annotations

import numpy as np

from meshweave.ir.program import BoundOp
from meshweave.simulate.result import Simulation


class Partners:
    """The partners of a simulation's ops, which are numbered as there.

    It keeps the ops of ranks it was used for.
    """

    def __init__(self, run: Simulation) -> None:
        self.run = run
        self.issued, self.ended = run.outputs["issued_ps"], run.outputs["ended_ps"]
        self._known: dict[int, tuple[BoundOp, ...]] = {}

    def last_partner(self, op: int) -> int | None:
        """Return the partner that came last, if it came after this op was issued."""
        partner = int(self.run.outputs["last_partner"][op])
        return None if partner < 0 else partner

    def wait_ps(self, op: int) -> int:
        """Return how long the op waited for that partner, in picoseconds."""
        partner = self.last_partner(op)
        return 0 if partner is None else int(min(self.issued[partner], self.ended[op]) - self.issued[op])

    def rank_and_index(self, op: int) -> tuple[int, int]:
        """Return the global rank of an op and its index in the rank's ops."""
        position = int(np.searchsorted(self.run.starts, op, side="right")) - 1
        return int(self.run.ranks[position]), op - int(self.run.starts[position])

    def op(self, op: int) -> BoundOp:
        """Return the op of a number."""
        rank, index = self.rank_and_index(op)
        return self.ops(rank)[index]

    def ops(self, rank: int) -> tuple[BoundOp, ...]:
        """Return the ops of a rank in program order."""
        if rank not in self._known:
            self._known[rank] = self.run.program.on_rank(rank)
        return self._known[rank]
