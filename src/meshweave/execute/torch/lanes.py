"""Running bound ops: one thread per lane, or one thread for all lanes in one order.

A lane is a list of steps in program order. Edges within a lane hold by themselves; an edge from another lane
becomes "wait until that lane has completed n steps", and only the last such n per lane is kept, less what
an earlier wait already implies. So a step without such a wait costs a few hundred nanoseconds on top of its
work, and a handover between lanes one wake-up of a thread.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from meshweave.base.errors import DeadlineError, UnsupportedError
from meshweave.execute.torch.views import Action

BUSY = "a program already runs in this context: give each its own TorchContext"
_REPORT_S = 5.0  # from the deadline of a lane's wait to its error, at most: it listens to the other ranks
_TICK_S = 0.5
_GRACE_S = 1.0  # how long the other lanes have to stop after a failure before `run` raises without them

Waits = tuple[tuple[int, int], ...]
"""(lane number, steps it must have completed)."""

Modes = Callable[[], contextlib.AbstractContextManager[Any]]
"""Enters what the thread that runs a program has set for itself."""


def cross_lane_waits(lane_of: Sequence[int], before: Sequence[Sequence[int]], num_lanes: int) -> list[Waits]:
    """Return for each op what it must wait for in other lanes: (lane index, number of ops completed there) pairs.

    A pair that other waits already imply is left out.

    Args:
        lane_of: the lane index of each op, in program order.
        before: for each op the indices of the ops that must precede it, ascending.
        num_lanes: the number of lanes.
    """
    place: list[int] = []  # of an op in its lane, from 1
    implied: list[list[int]] = []  # steps per lane that are complete once an op is
    lane_end = [[0] * num_lanes for _ in range(num_lanes)]
    waits: list[Waits] = []
    for lane, earlier in zip(lane_of, before, strict=True):
        known = lane_end[lane].copy()
        needed: list[tuple[int, int]] = []
        for other in reversed(earlier):
            where = lane_of[other]
            if where != lane and known[where] < place[other]:
                needed.append((where, place[other]))
                known = [max(pair) for pair in zip(known, implied[other], strict=True)]
        known[lane] += 1
        place.append(known[lane])
        implied.append(known)
        lane_end[lane] = known
        waits.append(tuple(needed))
    return waits


class LaneRun:
    """The steps of a lane, one for each of its ops, and its progress `done`, the number of completed steps.

    In a run only the lane's thread writes it, except for `wanted`.
    """

    __slots__ = (
        "actions",
        "done",
        "indices",
        "labels",
        "progress",
        "spans",
        "stopped",
        "waits",
        "wanted",
    )

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.waits: list[tuple[tuple[LaneRun, int], ...]] = []
        self.labels: list[str] = []  # "matmul 0.1 of lane compute"
        self.indices: list[int] = []  # in the rank's op list
        self.spans: list[tuple[int, int]] = []  # nanoseconds, when traced
        self.done = 0
        self.wanted: float = math.inf  # the least number of completed steps that somebody sleeps for
        self.progress = threading.Condition()
        self.stopped = True

    def reset(self) -> None:
        """Set the number of completed steps to 0 and forget `spans`, for a new run."""
        self.done, self.stopped = 0, False
        self.spans = []

    def wake_waiters(self) -> None:
        """Wake all threads that sleep until this lane has completed more steps; they look again."""
        with self.progress:
            self.wanted = math.inf
            self.progress.notify_all()


@dataclass(frozen=True)
class EarlyPost:
    """A part of a later step that may run early, once each (lane, n) in `waits` has n completed steps."""

    waits: tuple[tuple[LaneRun, int], ...]
    action: Action

    def run_if_free(self) -> None:
        """Run the action if all of `waits` are complete; else do nothing."""
        for lane, count in self.waits:
            if lane.done < count:
                return
        self.action()


class LaneThreads:
    """The threads of a context: the caller's, and one for each further lane, which sleeps between runs.

    After a failure the lanes of the ranks are out of step, and the threads take no more work.
    """

    def __init__(self, deadline_s: float, check_lost: Callable[[], None] | None = None) -> None:
        self._deadline_s, self._check_lost = deadline_s, check_lost
        self._failures: list[BaseException] = []
        self._inboxes: list[SimpleQueue[Callable[[], None] | None]] = []
        self._process = os.getpid()
        self._busy = threading.Lock()
        self._failing = threading.Lock()
        self.error: BaseException | None = None

    def run(self, lanes: Sequence[LaneRun], *, trace: bool) -> None:
        """Run all lanes to their ends, `lanes[0]` in the calling thread; raise the first error of any lane.

        With `trace`, `spans` of each lane becomes the (start, end) of its steps in nanoseconds of CLOCK_MONOTONIC.
        Raises UnsupportedError where an earlier run failed, or another is under way, and RankLostError where
        ranks are known to be lost.
        """
        self.check()
        if not self._busy.acquire(blocking=False):
            raise UnsupportedError(BUSY)
        modes = _autocast_here()
        try:
            for lane in lanes:
                lane.reset()
            for number, lane in enumerate(lanes[1:]):
                self._inbox(number).put(lambda lane=lane: self._run_lane(lane, lanes, trace, modes))  # type: ignore[misc]
            self._run_lane(lanes[0], lanes, trace)
            for lane in lanes[1:]:
                if self.error is None and lane.done < len(lane.actions):
                    self._sleep(lane, len(lane.actions), "the end of the run")
        except BaseException as error:  # of this thread's own: a missed deadline, or Ctrl-C
            self._fail(error, lanes)
        finally:
            self._busy.release()
        if self.error is not None:
            until = time.monotonic() + _GRACE_S
            while not all(lane.stopped for lane in lanes) and time.monotonic() < until:
                time.sleep(0.002)
            raise self.error

    @contextlib.contextmanager
    def reserve(self) -> Iterator[None]:
        """Reserve the context for a run in the calling thread during the block; an error in it breaks the context.

        Raises UnsupportedError where an earlier run failed, or another is under way, and RankLostError where
        ranks are known to be lost.
        """
        self.check()
        if not self._busy.acquire(blocking=False):
            raise UnsupportedError(BUSY)
        try:
            yield
        except BaseException as error:
            self.error = error
            self._failures.append(error)
            raise
        finally:
            self._busy.release()

    def fail_with(self, other: LaneThreads) -> None:
        """Share failures with `other` from now on: once a run of either has failed, `check` raises for both."""
        self._failures = other._failures

    def check(self) -> None:
        """Raise UnsupportedError after a failed run, RankLostError where ranks are known to be lost."""
        if self._check_lost is not None:
            self._check_lost()
        if self._failures:
            words = " ".join(str(self._failures[0]).split()) or type(self._failures[0]).__name__
            raise UnsupportedError(
                f"this context is broken: an earlier run in it failed, so that ranks are out of step: {words}"
            )

    def check_free(self) -> None:
        """Raise UnsupportedError where a run is under way."""
        if self._busy.locked():
            raise UnsupportedError(BUSY)

    def close(self) -> None:
        """Tell the threads to end, and do not wait for them."""
        for inbox in self._inboxes:
            inbox.put(None)
        self._inboxes.clear()

    def _inbox(self, number: int) -> SimpleQueue[Callable[[], None] | None]:
        if self._process != os.getpid():  # a fork has none of the threads
            self._process, self._inboxes = os.getpid(), []
        if number == len(self._inboxes):
            inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
            threading.Thread(
                target=_work, args=(inbox,), name=f"meshweave-lane-{number + 1}", daemon=True
            ).start()
            self._inboxes.append(inbox)
        return self._inboxes[number]

    def _run_lane(
        self, lane: LaneRun, lanes: Sequence[LaneRun], trace: bool, modes: Modes = contextlib.nullcontext
    ) -> None:
        try:
            with modes(), torch.no_grad():
                self._run_steps(lane, trace)
        except BaseException as error:
            if not isinstance(error, _Abandoned):
                if lane.done < len(lane.labels):
                    error.add_note(f"in {lane.labels[lane.done]}")
                self._fail(error, lanes)
        finally:
            lane.stopped = True

    def _run_steps(self, lane: LaneRun, trace: bool) -> None:
        actions: Sequence[Action] = lane.actions
        if trace:
            actions = [partial(_timed, action, lane.spans) for action in actions]
        for done, (action, waits) in enumerate(zip(actions, lane.waits, strict=True), 1):
            for other, count in waits:
                if other.done < count:
                    self._sleep(other, count, lane.labels[done - 1])
            if self.error is not None:
                return
            action()
            lane.done = done
            if done >= lane.wanted:
                lane.wake_waiters()

    def _sleep(self, lane: LaneRun, count: int, what: str) -> None:
        """Until `lane` has completed `count` steps.

        The deadline is twice that of a wait for other ranks, and what it takes to find out why such a wait failed.
        It starts anew with each step that the lane completes: where that is stuck in such a wait itself, it is the
        one to report.
        """
        seen, waited_s = -1, 0.0
        limit_s = 2 * self._deadline_s + min(self._deadline_s, _REPORT_S)
        with lane.progress:
            while lane.done < count and self.error is None:
                if lane.done != seen:
                    seen, waited_s = lane.done, 0.0
                lane.wanted = min(lane.wanted, count)  # before `done` is looked at once more
                if lane.done >= count:
                    return
                begin = time.monotonic()
                if not lane.progress.wait(min(_TICK_S, limit_s - waited_s)) and lane.done == seen:
                    # No more than that: a signal may have stopped this process, and no clock.
                    waited_s += min(time.monotonic() - begin, 2 * _TICK_S)
                    if waited_s >= limit_s:
                        raise DeadlineError(
                            f"{what} gave up after {limit_s:g} s: {lane.labels[seen]} does not end"
                        )
        if lane.done < count:
            raise _Abandoned

    def _fail(self, error: BaseException, lanes: Sequence[LaneRun]) -> None:
        with self._failing:
            if self.error is None and not isinstance(error, _Abandoned):
                self.error = error
                self._failures.append(error)
        for lane in lanes:
            lane.wake_waiters()


def _timed(action: Action, spans: list[tuple[int, int]]) -> None:
    """Run a step, and append its start and end."""
    start = time.monotonic_ns()
    action()
    spans.append((start, time.monotonic_ns()))


def _autocast_here() -> Modes:
    """Return what enters the autocast of this thread on CPUs in another one."""
    if not torch.is_autocast_enabled("cpu"):
        return contextlib.nullcontext
    return partial(torch.autocast, "cpu", torch.get_autocast_dtype("cpu"))


class _Abandoned(Exception):
    """Another lane has failed."""


def _work(inbox: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := inbox.get()) is not None:
        job()
        del job
