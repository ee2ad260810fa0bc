"""Issuing the ops of all lanes from one thread, in one order that all ranks share.

What a run issues is flattened into a list of calls when it is bound: switches of streams, waits for events, the
ops themselves, events. So an op costs its call and nothing else, unless it is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import length_hint
from typing import Any

import torch

from meshweave.execute.torch.lanes import Waits
from meshweave.execute.torch.views import Action


class IssueList:
    """Functions to call one after another, each of which belongs to an op."""

    def __init__(self, labels: Sequence[str]) -> None:
        """Make an empty list. `labels[i]` names op number i in errors."""
        self._labels = labels
        self._calls: list[Callable[[], object]] = []
        self._owners: list[int] = []

    def add(self, owner: int, *calls: Callable[[], object]) -> None:
        """Append the functions `calls`, which belong to op number `owner`, whose label is `labels[owner]`."""
        self._calls += calls
        self._owners += [owner] * len(calls)

    def __call__(self) -> None:
        """Call all functions in order. An error is raised on with a note that names the op."""
        left = iter(self._calls)
        try:
            for call in left:
                call()
        except BaseException as error:
            error.add_note(f"in {self._labels[self._owners[len(self._calls) - length_hint(left) - 1]]}")
            raise


class Streams:
    """One thread issues the ops of all lanes, in one order that all ranks share; no op waits for a later one.

    On CUDA each lane has a stream, and an edge between lanes is an event. On a CPU each op runs when it is issued.
    `actions`, `labels`, `lane_of` (lane index) and `waits` (see `cross_lane_waits`) are in the order of issue.
    """

    def __init__(
        self,
        device: torch.device,
        actions: Sequence[Action],
        labels: Sequence[str],
        lane_of: Sequence[int],
        waits: Sequence[Waits],
        *,
        trace: bool,
    ) -> None:
        self._trace, self._device = trace, device
        self._clocks: list[int] = []  # before and after each op of a CPU, in nanoseconds, if traced
        self._issue = IssueList(labels)
        if device.type == "cuda":
            self._bind_streams(actions, lane_of, waits)
        elif trace:
            for place, action in enumerate(actions):
                self._issue.add(place, self._tick, action, self._tick)
        else:
            for place, action in enumerate(actions):
                self._issue.add(place, action)

    def _bind_streams(
        self, actions: Sequence[Action], lane_of: Sequence[int], waits: Sequence[Waits]
    ) -> None:
        streams = [torch.cuda.Stream(self._device) for _ in range(max(lane_of, default=-1) + 1)]
        self._streams = streams
        count = [0] * len(streams)
        at: dict[tuple[int, int], int] = {}  # from (lane, steps completed) to the op that completes them
        for place, lane in enumerate(lane_of):
            count[lane] += 1
            at[lane, count[lane]] = place
        recorded = set(at.values()) if self._trace else {at[wait] for needed in waits for wait in needed}
        self._end = {place: torch.cuda.Event(enable_timing=self._trace) for place in sorted(recorded)}
        self._begin = [torch.cuda.Event(enable_timing=True) for _ in lane_of] if self._trace else []
        current = None
        for place, (action, lane) in enumerate(zip(actions, lane_of, strict=True)):
            stream = streams[lane]
            if stream is not current:
                self._issue.add(place, partial(torch.cuda.set_stream, stream))
                current = stream
            for wait in waits[place]:
                self._issue.add(place, partial(stream.wait_event, self._end[at[wait]]))
            if self._trace:
                self._issue.add(place, partial(self._begin[place].record, stream))
            self._issue.add(place, action)
            if place in self._end:
                self._issue.add(place, partial(self._end[place].record, stream))

    def _tick(self) -> None:
        self._clocks.append(time.monotonic_ns())

    def run(self) -> list[tuple[int, int]]:
        """Issue all ops; return [] or, with `trace`, the (start, end) of each op in the order of issue.

        Times are in nanoseconds of CLOCK_MONOTONIC; with `trace` on CUDA the host waits for the device before and
        after.
        """
        with torch.no_grad():
            return self._run_cuda() if self._device.type == "cuda" else self._run_cpu()

    def _run_cpu(self) -> list[tuple[int, int]]:
        self._clocks = []
        self._issue()
        return list(zip(self._clocks[::2], self._clocks[1::2], strict=True))

    def _run_cuda(self) -> list[tuple[int, int]]:
        caller = torch.cuda.current_stream(self._device)
        zero, zero_ns = None, 0
        if self._trace:
            torch.cuda.synchronize(self._device)
            zero, zero_ns = torch.cuda.Event(enable_timing=True), time.monotonic_ns()
            zero.record(caller)
        for stream in self._streams:
            stream.wait_stream(caller)
        with torch.cuda.stream(caller):  # at the end the caller has its device and stream again
            self._issue()
        for stream in self._streams:
            caller.wait_stream(stream)
        if zero is None:
            return []
        torch.cuda.synchronize(self._device)

        def at(event: Any) -> int:
            return zero_ns + int(zero.elapsed_time(event) * 1e6)

        return [(at(begin), at(self._end[place])) for place, begin in enumerate(self._begin)]
