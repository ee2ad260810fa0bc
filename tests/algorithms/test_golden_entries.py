"""The golden program of a fused product is what the smallest entry writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshweave.algorithms.fused import RingReduceScatter, Tiles
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse

GOLDEN = Path(__file__).parent.parent / "golden"


def golden(name: str) -> Program:
    return parse((GOLDEN / f"{name}.txt").read_text())


def test_t3_ring() -> None:
    entry = RingReduceScatter()
    problem = replace(next(entry.examples()), n=5)
    assert entry.program(problem, Tiles(2, 3, "columns", 1)) == golden("t3_ring")
