"""What a software stack can execute, as data. A plan for a stack searches only that."""

from __future__ import annotations

from dataclasses import dataclass

from meshweave.algorithms.block.roles import DATA_ROLES
from meshweave.describe.model.memory import RECOMPUTES, Recompute

ALL_DEGREES = ("tensor", "context", "data", "pipeline")
ZERO_LEVELS = tuple(range(len(DATA_ROLES)))
"""The levels of ZeRO: as many as the axis of data parallelism has roles."""


@dataclass(frozen=True)
class StackRuns:
    """What a stack executes. The default is all that the table of algorithms has.

    Attributes:
        degrees: the degrees that may be above 1.
        strategies: names of strategies of tensor ranks; None for all of the table.
        schedules: names of schedules; None for all of the table.
        zero: levels of ZeRO.
        recompute: what it can compute again.
        precisions: names of recipes below 16 bits; None for all.
        experts: whether layers may have experts.
    """

    degrees: tuple[str, ...] = ALL_DEGREES
    strategies: tuple[str, ...] | None = None
    schedules: tuple[str, ...] | None = None
    zero: tuple[int, ...] = ZERO_LEVELS
    recompute: tuple[Recompute, ...] = RECOMPUTES
    precisions: tuple[str, ...] | None = None
    experts: bool = True

    def values_of(self, kind: str) -> tuple[object, ...] | None:
        """Return the values that attribute `kind`, such as "schedules", lists; None if all are executed."""
        values: tuple[object, ...] | None = getattr(self, kind)
        return values
