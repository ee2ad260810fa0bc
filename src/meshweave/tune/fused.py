"""Choosing how a fused product overlaps: its algorithm and tiles, by simulating what runs over messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshweave.algorithms.fused import ENTRIES, Tiles
from meshweave.algorithms.universal.problem import UniversalProblem
from meshweave.base.errors import LayoutError
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import Cluster
from meshweave.ir.program import Program
from meshweave.lower import lower_one_sided, lower_rings, write_out_tiles
from meshweave.simulate import simulate

TILE_COUNTS = (1, 2, 4, 8, 16)
"""Tiles of a part that are tried, each of whole rows."""


@dataclass(frozen=True)
class FusedChoice:
    """An algorithm of a fused product, with its tiles.

    Attributes:
        algorithm: its name in `ALGORITHMS`.
        tiles: for algorithms that have them, else None.
        program: in messages and ring steps, as it runs over a network.
        simulated_s: seconds on the cluster.
    """

    algorithm: str
    tiles: Tiles | None
    program: Program
    simulated_s: float


def fused_choices(problem: UniversalProblem, cluster: Cluster) -> Iterator[FusedChoice]:
    """Yield each algorithm that takes a product, with tiles of several sizes, simulated on `cluster`."""
    part = -(-problem.m // len(problem.ranks))
    for entry in ENTRIES:
        if entry.refusal(problem) is not None:
            continue
        if not isinstance(next(entry.candidates(problem)), Tiles):
            program = lower_rings(entry.program(problem, next(entry.candidates(problem))))  # type: ignore[arg-type]
            yield FusedChoice(entry.name, None, program, _simulated_s(program, cluster))
            continue
        for rows in dict.fromkeys(-(-part // count) for count in TILE_COUNTS):
            tiles = Tiles(rows, problem.n, "rows")
            written = entry.program(problem, tiles)  # type: ignore[arg-type]
            program = lower_rings(lower_one_sided(write_out_tiles(written)))
            yield FusedChoice(entry.name, tiles, program, _simulated_s(program, cluster))


def tune_fused(problem: UniversalProblem, cluster: Cluster) -> FusedChoice:
    """Return the algorithm and tiles with the least simulated time; of equals the first.

    Raises LayoutError where no fused product takes the layouts.
    """
    choices = list(fused_choices(problem, cluster))
    if not choices:
        raise LayoutError(f"no fused product takes {problem}")
    return min(choices, key=lambda choice: choice.simulated_s)


def _simulated_s(program: Program, cluster: Cluster) -> float:
    return float(simulate(program, Machine.of(cluster, program)).duration_s)
