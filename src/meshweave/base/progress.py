"""The callback with which long-running functions report their progress: (steps done, steps in all)."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all), `done` never falling."""


def no_progress(done: int, total: int) -> None:
    """Report nothing: the default of functions that take a `Progress`."""
