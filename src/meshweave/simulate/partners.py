"""The partner for which each op of a simulation waited."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from meshweave.ir.program import BoundOp
from meshweave.ir.program.expressions import Index
from meshweave.ir.program.ops import Recv, Send
from meshweave.simulate.result import Simulation


class Partners:
    """Lookup of partners: the ops of other ranks that an op exchanges messages with.

    Ops are given by their number in the `Simulation`. The ops of a rank are cached at first use.
    """

    def __init__(self, run: Simulation) -> None:
        self.run = run
        self.issued, self.ended = run.outputs["issued_ps"], run.outputs["ended_ps"]
        self._known: dict[int, tuple[BoundOp, ...]] = {}
        self._streams: dict[int, dict[tuple[type, str, Index, Index], list[int]]] = {}

    def last_partner(self, op: int) -> int | None:
        """Return the number of the partner that was issued last; None if no partner was issued after `op`."""
        partner = int(self.run.outputs["last_partner"][op])
        return None if partner < 0 else partner

    def wait_ps(self, op: int) -> int:
        """Return the picoseconds from an op's issue to that of its last partner, or to its own end if sooner.

        It is 0 for an op that did not wait.
        """
        partner = self.last_partner(op)
        return 0 if partner is None else int(min(self.issued[partner], self.ended[op]) - self.issued[op])

    def rank_and_index(self, op: int) -> tuple[int, int]:
        """Return the global rank of an op, and its position among the rank's ops."""
        position = int(np.searchsorted(self.run.starts, op, side="right")) - 1
        return int(self.run.ranks[position]), op - int(self.run.starts[position])

    def op(self, op: int) -> BoundOp:
        """Return the op that has the number `op`, bound to its rank."""
        rank, index = self.rank_and_index(op)
        return self.ops(rank)[index]

    def other_end(self, op: int) -> int:
        """Return the op number of the recv of a send, or of the send of a recv.

        Messages of one lane and tag between two ranks match in the order in which they are issued.
        """
        rank, index = self.rank_and_index(op)
        bound = self.op(op).op
        assert isinstance(bound, (Send, Recv)) and isinstance(bound.peer, int)
        place = self._stream(rank, type(bound), bound.lane, bound.peer, bound.tag).index(index)
        other = Recv if isinstance(bound, Send) else Send
        position = int(np.searchsorted(self.run.ranks, bound.peer))
        return (
            int(self.run.starts[position])
            + self._stream(bound.peer, other, bound.lane, rank, bound.tag)[place]
        )

    def _stream(self, rank: int, kind: type, lane: str, peer: int, tag: Index) -> list[int]:
        """Return the ops of a rank, by index, that send to a peer, or receive from it, in a lane with a tag."""
        if rank not in self._streams:
            streams = self._streams[rank] = defaultdict(list)
            for index, bound in enumerate(self.ops(rank)):
                if isinstance(bound.op, (Send, Recv)):
                    streams[type(bound.op), bound.op.lane, bound.op.peer, bound.op.tag].append(index)
        return self._streams[rank][kind, lane, peer, tag]

    def ops(self, rank: int) -> tuple[BoundOp, ...]:
        """Return the ops of a rank in program order."""
        if rank not in self._known:
            self._known[rank] = self.run.program.ops_on_rank(rank)
        return self._known[rank]
