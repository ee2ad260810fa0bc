"""One issue order that all ranks share.

A runtime that issues from one thread per rank (NCCL: a stream and a communicator per lane) deadlocks if ranks
issue communication in different orders. The events of an untimed run, each a whole collective or a send with its
recv, give an order without that problem: it respects every edge and lane, and ranks meet in one sequence.
"""

from __future__ import annotations

from meshweave.ir.analysis.dataflow import Dataflow, analyse, untimed_order
from meshweave.ir.program import Program


def linearise(program: Program | Dataflow) -> dict[int, tuple[int, ...]]:
    """Return {rank: indices of its ops in an order that cannot deadlock if a rank issues them in one queue}.

    The order of collectives and messages is the same on all ranks. Indices count the ops of a rank in program
    order, includes expanded.

    Raises ProgramError if messages or collectives do not match, or the program itself deadlocks.
    """
    flow = analyse(program) if isinstance(program, Program) else program
    order: dict[int, list[int]] = {rank: [] for rank in flow.matched.ops}
    for event in untimed_order(flow):
        for rank, index in event:
            order[rank].append(index)
    return {rank: tuple(listed) for rank, listed in order.items()}
