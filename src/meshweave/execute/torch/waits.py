"""How long the runs of programs wait: the time of their runs in which this rank computes nothing.

It is measured around each run and around each compute op, and nothing else is recorded, so it may stay on during
training: two reads of a clock for each compute op.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class WaitClock:
    """Counts the runs of all programs that are bound in a context after `TorchContext.count_waits`.

    A call may run another program, as a stage of a pipeline does: its waits count once, in the program that
    waits. Compute ops in several lanes at once add up, so then the waits are a lower bound.

    Attributes:
        run_ns: nanoseconds of runs; the time of a run inside a call of another run counts twice, once for each.
        compute_ns: nanoseconds of compute ops and of calls, what runs inside a call included.
        num_runs: how many runs there were, those inside calls included.
    """

    def __init__(self) -> None:
        self.run_ns, self.compute_ns, self.num_runs = 0, 0, 0

    @property
    def waits_s(self) -> float:
        """Return the seconds of runs so far in which nothing was computed: exposed communication and bubbles."""
        return max(self.run_ns - self.compute_ns, 0) / 1e9

    def around_run(self, run: Callable[[], Result]) -> Callable[[], Result]:
        """Return a function that calls `run` and adds its time to `run_ns`, and 1 to `num_runs`."""

        def timed() -> Result:
            begin = time.monotonic_ns()
            result = run()
            self.run_ns += time.monotonic_ns() - begin
            self.num_runs += 1
            return result

        return timed

    def around_compute(self, action: Callable[[], object]) -> Callable[[], None]:
        """Return a function that calls `action` and adds its time to `compute_ns`."""

        def timed() -> None:
            begin = time.monotonic_ns()
            action()
            self.compute_ns += time.monotonic_ns() - begin

        return timed
