"""The steps of a program, statements visited and turns of loops taken, counted while it is unrolled.

A text of 18 loops of 10 turns each is a few lines long and unrolls to 10^18 steps, so that nothing may unroll a
program without a `StepBudget`.
"""

from __future__ import annotations

from meshweave.base.errors import ProgramError
from meshweave.base.limits import Limit


class StepsError(ProgramError):
    """A program has more steps than a limit allows."""


class StepBudget:
    """The steps that are left of the `most` of a limit."""

    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        self._left = limit.most

    def take(self, count: int = 1) -> None:
        """Count off `count` steps. Raises StepsError where fewer are left."""
        self._left -= count
        if self._left < 0:
            raise StepsError(f"the program {self._limit.refusal()}")
