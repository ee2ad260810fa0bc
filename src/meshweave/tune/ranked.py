"""One config of an algorithm for a problem, with its estimate."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshweave.algorithms.contract import Algorithm
from meshweave.estimate import Estimate
from meshweave.ir.program import Program


def num_ops(program: Program) -> int:
    """Return an estimate of the number of ops of a program: those of its lowest rank, times its ranks."""
    return len(program.ranks) * sum(1 for _ in program.expanded.unbound_ops_on_rank(program.ranks[0]))


@dataclass(frozen=True)
class RankedConfig:
    """One config of one algorithm for a problem, with its estimated time on a cluster.

    Attributes:
        simulated: seconds with contention, and those of them in which the first rank runs no product and no call;
            None where it was not simulated.
    """

    algorithm: Algorithm[Any, Any]
    problem: Hashable
    config: Any
    estimate: Estimate
    simulated: tuple[float, float] | None = None

    @property
    def seconds(self) -> float:
        """Return the simulated seconds, or the estimated ones if it was not simulated."""
        return self.simulated[0] if self.simulated else self.estimate.total_s

    @property
    def exposed_s(self) -> float:
        """Return the seconds in which neither products nor calls run on the first rank, simulated or estimated."""
        return self.simulated[1] if self.simulated else self.estimate.exposed_s

    @cached_property
    def program(self) -> Program:
        """Return the program that the algorithm writes for the config."""
        return self.algorithm.program(self.problem, self.config)

    @cached_property
    def traffic_bytes(self) -> dict[str, int]:
        """Return the logical bytes that the first rank moves, by mesh axis ("tp.row") or mesh ("tp").

        "" has those of messages and one-sided ops. What is received counts in an all-gather, broadcast, recv,
        get and permute; what is sent in a reduce-scatter, reduce, put, accumulate and all-to-all; both halves of
        an all-reduce.
        """
        return self.algorithm.traffic(self.problem, self.config, self.program.ranks[0])

    @cached_property
    def peak_bytes(self) -> int:
        """Return the most bytes that the first rank holds at once, operands and results included."""
        return self.algorithm.peak_bytes(self.problem, self.config, self.program.ranks[0])
