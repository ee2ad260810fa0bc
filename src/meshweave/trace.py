"""Traces: when each op of a program ran, predicted or measured, in one form so that the two compare.

A `Span` is one op of one rank: what it was, in which lane, and from when to when. A `Trace` is the spans of one
run, from whatever `source` made it:

- "estimate": a skeleton followed turn by turn (`estimate.timeline`); its spans are tasks, of rank 0 alone.
- "simulate": the discrete-event simulator. A span starts when its op is issued, waiting for partners included.
- "numpy": the in-process executor. It runs one event at a time, so its times are those of numpy, not of a machine.
- "torch": a run on real ranks, timed by `execute.torch`; `merge` joins the traces that each rank made.

Times are integer picoseconds from the start of the run. All ranks of a simulation, and all of one host
(CLOCK_MONOTONIC), share a clock; those of several hosts are aligned first (the lab does).

Two traces of the same program are compared op by op: (rank, index in the rank's op list) names the same op in
both, as `a.span_of[rank, index]` and `b.span_of[rank, index]`. As a whole they are compared by `duration_s`, and
by how much of the communication is hidden (`overlap_s`) or not (`exposed_s`). Side by side they are drawn by
`to_chrome`, or by `report.timeline`. `check_order` proves that a trace, measured or simulated, is legal: every op
started after what it had to wait for had ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from meshweave.base.errors import ProgramError
from meshweave.base.shown import Shown
from meshweave.base.units import format_s, to_s
from meshweave.describe.layout.intervals import num_common, num_indices, union
from meshweave.ir.analysis.dataflow import Dataflow
from meshweave.ir.program.ops import COMPUTE_KINDS


@dataclass(frozen=True, slots=True)
class Span:
    """One op of one rank, from `start_ps` to `end_ps`.

    Attributes:
        index: its place in the rank's op list.
        kind: kind of the op, such as "matmul".
        label: its name, or else its kind, with its position in the program: "matmul 0.3.1".
    """

    rank: int
    index: int
    lane: str
    kind: str
    label: str
    start_ps: int
    end_ps: int

    @property
    def activity(self) -> Literal["compute", "move", "communicate"]:
        """Return "compute" for matmul and call ops, "move" for copy, add and zero ops, else "communicate"."""
        if self.kind in ("matmul", "call"):
            return "compute"
        return "move" if self.kind in COMPUTE_KINDS else "communicate"


@dataclass(frozen=True)
class Counter:
    """Values over time of one rank, such as GB/s of memory requests: each value holds from its time to the next.

    Attributes:
        name: what is counted.
        times_ps: when values change, ascending.
        values: by name of a series, one value for each of `times_ps`.
    """

    rank: int
    name: str
    times_ps: tuple[int, ...]
    values: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, repr=False)
class Trace(Shown):
    """The spans of one run of a program; `source` says who made it: "estimate", "simulate", "numpy", "torch".

    `counters` are what a simulation in detail counts over time; other traces have none, and JSON leaves them out.
    """

    program: str
    source: str
    spans: tuple[Span, ...]
    counters: tuple[Counter, ...] = ()

    def __repr__(self) -> str:
        """Return the program, the source, the ranks, their spans and the time, in a line."""
        ranks = len({span.rank for span in self.spans})
        return (
            f"<Trace of {self.program} by {self.source}: {ranks} ranks, {len(self.spans)} spans, "
            f"{format_s(self.duration_s)}>"
        )

    @cached_property
    def span_of(self) -> Mapping[tuple[int, int], Span]:
        """Return the spans by (rank, op index)."""
        return {(span.rank, span.index): span for span in self.spans}

    @property
    def duration_s(self) -> float:
        """Return the seconds from the first start to the last end."""
        if not self.spans:
            return 0.0
        return to_s(max(s.end_ps for s in self.spans) - min(s.start_ps for s in self.spans))

    def overlap_s(self, rank: int) -> float:
        """Return the seconds in which `rank` computes (products and calls) and communicates at the same time."""
        compute = union(
            (s.start_ps, s.end_ps) for s in self.spans if s.rank == rank and s.kind in ("matmul", "call")
        )
        communicate = union(
            (s.start_ps, s.end_ps) for s in self.spans if s.rank == rank and s.kind not in COMPUTE_KINDS
        )
        return to_s(num_common(compute, communicate))

    def exposed_s(self, rank: int) -> float:
        """Return the seconds in which `rank` communicates and runs no product or call; copies are neither."""
        communicate = union(
            (s.start_ps, s.end_ps) for s in self.spans if s.rank == rank and s.kind not in COMPUTE_KINDS
        )
        return to_s(num_indices(communicate)) - self.overlap_s(rank)

    def to_json(self) -> dict[str, Any]:
        """Return the trace as JSON values: "program", "source" and "spans", a list of the fields of each span.

        Counters are left out. `from_json` reads the rest back.
        """
        return {
            "program": self.program,
            "source": self.source,
            "spans": [asdict(span) for span in self.spans],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trace:
        """Return the trace that `to_json` wrote, without counters."""
        return cls(data["program"], data["source"], tuple(Span(**span) for span in data["spans"]))


def merge(traces: Sequence[Trace]) -> Trace:
    """Return one trace with the spans of all ranks, without counters, from the traces of each rank of a run."""
    spans = sorted((s for trace in traces for s in trace.spans), key=lambda s: (s.start_ps, s.rank, s.index))
    return Trace(traces[0].program, traces[0].source, tuple(spans))


def check_order(trace: Trace, flow: Dataflow) -> int:
    """Check that a trace obeys the edges and fifo lanes of its program; return how many checks were made.

    Each op must start after the ops that it waits for have ended. A fifo lane must start its ops in program
    order, at most as many at once as it is wide.

    Args:
        flow: the dataflow of the trace's program.

    Raises:
        ProgramError: two ops are out of order, or an op is missing; the error names them.
    """
    checked = 0

    def require(first: tuple[int, int], then: tuple[int, int]) -> None:
        nonlocal checked
        checked += 1
        a, b = trace.span_of[first], trace.span_of[then]
        if a.end_ps > b.start_ps:
            raise ProgramError(
                f"starts before {a.label} of rank {a.rank} ends, which it must wait for",
                op=b.label,
                rank=b.rank,
            )

    missing = [node for node in flow.nodes() if node not in trace.span_of]
    if missing:
        raise ProgramError("is not in the trace", op=flow.label(missing[0]), rank=missing[0][0])
    for node in flow.nodes():
        for other in flow.waits_for(node):
            require(other, node)
    for (rank, lane), queue in flow.queues.items():
        declared = flow.program.lane_of[lane]
        if declared.order != "fifo":
            continue
        if declared.width == 1:
            for first, then in pairwise(queue):
                require((rank, first), (rank, then))
            continue
        for number, index in enumerate(queue):  # started in order, and at most `width` at once
            checked += 1
            span = trace.span_of[rank, index]
            earlier = [trace.span_of[rank, other] for other in queue[:number]]
            late = [other for other in earlier if other.start_ps > span.start_ps]
            if late or sum(other.end_ps > span.start_ps for other in earlier) >= declared.width:
                raise ProgramError(f"is started out of turn in lane {lane}", op=span.label, rank=rank)
    return checked


def to_chrome(traces: Sequence[Trace]) -> dict[str, Any]:
    """Return a JSON object in Chrome's trace event format, which Perfetto reads too; times are in microseconds.

    A lane that runs several ops at once gets several threads, for viewers drop an op that begins within another
    of its thread.
    Counters are counter tracks of their rank's process.
    """
    events: list[dict[str, Any]] = []
    for number, trace in enumerate(traces):
        placed = _threads(trace.spans)
        lanes = sorted(set(placed))
        tids = {lane: tid for tid, lane in enumerate(lanes)}
        for rank in sorted({span.rank for span in trace.spans}):
            pid = rank * len(traces) + number
            events.append(
                {
                    "ph": "M",
                    "name": "process_name",
                    "pid": pid,
                    "args": {"name": f"rank {rank}: {trace.source}"},
                }
            )
            events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
            events += [
                {"ph": "M", "name": "thread_name", "pid": pid, "tid": tids[lane, row], "args": {"name": name}}
                for lane, row in lanes
                for name in (f"{lane} {row + 1}" if row else lane,)
            ]
        events += [
            {
                "ph": "X",
                "name": span.label,
                "cat": span.kind,
                "pid": span.rank * len(traces) + number,
                "tid": tids[lane],
                "ts": span.start_ps / 1e6,
                "dur": (span.end_ps - span.start_ps) / 1e6,
            }
            for span, lane in zip(trace.spans, placed, strict=True)
        ]
        events += [
            event for counter in trace.counters for event in _counter_events(counter, number, len(traces))
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _threads(spans: Sequence[Span]) -> list[tuple[str, int]]:
    """Return for each span its lane and a number, such that no two of a rank with both alike overlap."""
    ends: dict[tuple[int, str], list[int]] = {}
    out: list[tuple[str, int]] = [("", 0)] * len(spans)
    for place in sorted(range(len(spans)), key=lambda at: (spans[at].start_ps, spans[at].end_ps)):
        span = spans[place]
        free = ends.setdefault((span.rank, span.lane), [])
        row = next((row for row, end in enumerate(free) if end <= span.start_ps), len(free))
        free[row : row + 1] = [span.end_ps]
        out[place] = span.lane, row
    return out


def _counter_events(counter: Counter, number: int, num_traces: int) -> Iterator[dict[str, Any]]:
    """Yield a value where it differs from the one before."""
    before: tuple[float, ...] = ()
    for place, at_ps in enumerate(counter.times_ps):
        values = tuple(series[place] for series in counter.values.values())
        if values == before:
            continue
        before = values
        yield {
            "ph": "C",
            "name": counter.name,
            "pid": counter.rank * num_traces + number,
            "ts": at_ps / 1e6,
            "args": dict(zip(counter.values, values, strict=True)),
        }
