"""Which partner an op of a simulation waited for."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from meshweave.ir.ops import Broadcast, Collective, Permute, Reduce
from meshweave.ir.program import BoundOp
from meshweave.simulate.result import Simulation


class Partners:
    """Ops are numbered as in the simulation. Of the ranks that were asked about the ops are kept."""

    def __init__(self, run: Simulation) -> None:
        self.run = run
        self.issued, self.ended = run.found["issued_ps"], run.found["ended_ps"]
        self._known: dict[int, tuple[BoundOp, ...]] = {}
        self._listed: dict[int, dict[tuple[str, tuple[int, ...]], list[int]]] = {}

    def late(self, op: int) -> int | None:
        """The partner that came last, if that was after this op was issued."""
        held = int(self.run.found["held"][op])
        if held < 0 or self.issued[held] <= self.issued[op]:
            return None
        found = self.op(op).op
        if isinstance(found, Permute | Broadcast | Reduce):
            # Who came last need not be one that this member exchanges anything with.
            near = [one for one in self._near(op, found) if self.issued[one] <= self.ended[op]]
            held = max(near, key=lambda one: int(self.issued[one]), default=op)
        return held if self.issued[held] > self.issued[op] else None

    def wait_ps(self, op: int) -> int:
        """How long it waited for that partner, in picoseconds."""
        held = self.late(op)
        return 0 if held is None else int(min(self.issued[held], self.ended[op]) - self.issued[op])

    def place(self, op: int) -> tuple[int, int]:
        """Global rank, and index in the rank's ops."""
        position = int(np.searchsorted(self.run.starts, op, side="right")) - 1
        return int(self.run.ranks[position]), op - int(self.run.starts[position])

    def op(self, op: int) -> BoundOp:
        rank, index = self.place(op)
        return self.ops(rank)[index]

    def ops(self, rank: int) -> tuple[BoundOp, ...]:
        if rank not in self._known:
            self._known[rank] = self.run.program.on_rank(rank)
        return self._known[rank]

    def _near(self, op: int, found: Permute | Broadcast | Reduce) -> list[int]:
        """Both neighbours in a permute; in a chain all up to the one that this member sends to."""
        group, (rank, index) = found.over, self.place(op)
        assert isinstance(group, tuple)
        count, place = len(group), group.index(rank)
        if isinstance(found, Permute):
            assert isinstance(found.shift, int)
            places = [place + found.shift, place - found.shift]
        else:
            assert isinstance(found.root, int)
            first = found.root if isinstance(found, Broadcast) else found.root + 1
            along = (place - first) % count
            places = [first + other for other in range(min(along + 2, count)) if other != along]
        turn = self._collectives(rank)[found.lane, group].index(index)
        return [self._at(group[other % count], found.lane, group, turn) for other in places]

    def _at(self, rank: int, lane: str, group: tuple[int, ...], turn: int) -> int:
        return int(self.run.starts[self.run.position(rank)]) + self._collectives(rank)[lane, group][turn]

    def _collectives(self, rank: int) -> dict[tuple[str, tuple[int, ...]], list[int]]:
        """By lane and group: the collectives of a rank in order, which is how they are matched."""
        if rank not in self._listed:
            listed = self._listed[rank] = defaultdict(list)
            for index, bound in enumerate(self.ops(rank)):
                if isinstance(bound.op, Collective):
                    assert isinstance(bound.op.over, tuple)
                    listed[bound.op.lane, bound.op.over].append(index)
        return self._listed[rank]
