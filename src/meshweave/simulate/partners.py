"""Which partner an op of a simulation waited for."""

from __future__ import annotations

import numpy as np

from meshweave.ir.program import BoundOp
from meshweave.simulate.result import Simulation


class Partners:
    """Ops are numbered as in the simulation. Of the ranks that were asked about the ops are kept."""

    def __init__(self, run: Simulation) -> None:
        self.run = run
        self.issued, self.ended = run.outputs["issued_ps"], run.outputs["ended_ps"]
        self._known: dict[int, tuple[BoundOp, ...]] = {}

    def last_partner(self, op: int) -> int | None:
        """The partner that came last, if that was after this op was issued."""
        partner = int(self.run.outputs["last_partner"][op])
        return None if partner < 0 else partner

    def wait_ps(self, op: int) -> int:
        """How long it waited for that partner, in picoseconds."""
        partner = self.last_partner(op)
        return 0 if partner is None else int(min(self.issued[partner], self.ended[op]) - self.issued[op])

    def rank_and_index(self, op: int) -> tuple[int, int]:
        """Global rank, and index in the rank's ops."""
        position = int(np.searchsorted(self.run.starts, op, side="right")) - 1
        return int(self.run.ranks[position]), op - int(self.run.starts[position])

    def op(self, op: int) -> BoundOp:
        rank, index = self.rank_and_index(op)
        return self.ops(rank)[index]

    def ops(self, rank: int) -> tuple[BoundOp, ...]:
        if rank not in self._known:
            self._known[rank] = self.run.program.on_rank(rank)
        return self._known[rank]
