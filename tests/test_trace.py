"""Traces in the form of Chrome and Perfetto."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from meshweave.report.timeline import timeline_svg
from meshweave.trace import Span, Trace, to_chrome


def span(index: int, start: int, end: int, rank: int = 0, lane: str = "dma") -> Span:
    return Span(rank, index, lane, "permute", f"op {index}", start, end)


def test_no_op_of_a_thread_begins_within_another() -> None:
    """Perfetto drops it (slice_drop_overlapping_complete_event); a lane of width 2 has two threads."""
    spans = (
        span(0, 0, 10),
        span(1, 4, 12),
        span(2, 10, 20),
        span(3, 4, 12, rank=1),
        span(4, 0, 20, lane="x"),
    )
    events = to_chrome([Trace("p", "simulate", spans), Trace("p", "torch", spans[:1])])["traceEvents"]
    drawn = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in drawn] == ["op 0", "op 1", "op 2", "op 3", "op 4", "op 0"]
    threads = defaultdict(list)
    for event in drawn:
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for times in threads.values():
        assert all(first[1] <= then[0] for first, then in pairwise(sorted(times)))
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    assert [names[event["pid"], event["tid"]] for event in drawn] == [
        "dma",
        "dma 2",
        "dma",
        "dma",
        "x",
        "dma",
    ]


def test_a_timeline_of_ranks_that_do_not_begin_at_0_is_drawn() -> None:
    drawn = timeline_svg([("here", Trace("p", "simulate", (span(0, 0, 10, rank=5), span(0, 0, 9, rank=4))))])
    assert "<title>op 0: 0.009 ns</title>" in drawn and drawn.count("<title>") == 1
