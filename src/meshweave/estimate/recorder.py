"""The issue and end times that both simulators in Python record."""

from __future__ import annotations

from meshweave.ir.analysis.dataflow import Dataflow, Issuer
from meshweave.ir.analysis.matching import Node
from meshweave.trace import Span, Trace


class TraceRecorder:
    """Base of simulators that drive a program's `Issuer`: it records the issue and end time of each op.

    With `hosted` an op also waits until the host of its rank, a CPU thread, has issued it (`Issuer.finish_all`).
    """

    def __init__(self, flow: Dataflow, *, hosted: bool = False) -> None:
        self.flow = flow
        self.issuer = Issuer(flow, hosted=hosted)
        self.now_ps = 0
        self.issued_ps: dict[Node, int] = {}
        self.ended_ps: dict[Node, int] = {}

    def trace(self) -> Trace:
        """Return a span from issue to end for each op of all ranks, in order of start.

        Raises:
            ProgramError: some ops have not ended, because the program deadlocks.
        """
        if any(node not in self.ended_ps for node in self.flow.nodes()):
            raise self.issuer.deadlock_error()
        spans = []
        for node in self.flow.nodes():
            op = self.flow.op(node)
            times = self.issued_ps[node], self.ended_ps[node]
            spans.append(Span(*node, op.lane, op.kind, self.flow.label(node), *times))
        spans.sort(key=lambda span: (span.start_ps, span.rank, span.lane, span.index))
        return Trace(self.flow.program.name, "simulate", tuple(spans))
