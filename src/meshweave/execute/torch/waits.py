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
    """Times the runs of all programs that are bound in a context after `TorchContext.count_waits`.

    A `call` op may run another program, such as a pipeline stage: waits in it count once, in that inner program.
    Times of compute ops that run in several lanes at once add up, so then the waits are a lower bound.

    Attributes:
        run_ns: nanoseconds of all runs; the time of a run inside a `call` op of another run counts in both.
        compute_ns: nanoseconds of compute ops, with all that runs inside `call` ops.
        num_runs: number of runs, those inside `call` ops included.
    """

    def __init__(self) -> None:
        self.run_ns, self.compute_ns, self.num_runs = 0, 0, 0

    @property
    def waits_s(self) -> float:
        """Return the seconds of all runs so far in which this rank computed nothing: `run_ns` - `compute_ns`.

        That is exposed communication and pipeline bubbles.
        """
        return max(self.run_ns - self.compute_ns, 0) / 1e9

    def around_run(self, run: Callable[[], Result]) -> Callable[[], Result]:
        """Return a function that calls `run`, returns its result, adds its time to `run_ns`, 1 to `num_runs`."""

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
