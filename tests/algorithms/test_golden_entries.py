"""The golden programs of pipelines and fused products are what the smallest entries write."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshweave.algorithms.fused import RingReduceScatter, TileGranularity
from meshweave.algorithms.pipeline import MicroBatches, OneForwardOneBackward, PipelineProblem
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Call, Op
from meshweave.ir.program.parse import parse
from meshweave.ir.program.statements import rewrite

GOLDEN = Path(__file__).parent.parent / "golden"


def golden(name: str) -> Program:
    return parse((GOLDEN / f"{name}.txt").read_text())


def test_t3_ring() -> None:
    entry = RingReduceScatter()
    assert entry.program(next(entry.examples()), TileGranularity(2)) == golden("t3_ring")


def test_one_f_one_b() -> None:
    """The golden program declares a stash of 84 bytes for the first stage and 56 for the last."""
    program = OneForwardOneBackward().program(PipelineProblem(8, 3, 5, 2), MicroBatches(4))
    assert replace(without_stash(program), name="") == replace(without_stash(golden("one_f_one_b")), name="")


def without_stash(program: Program) -> Program:
    def strip(op: Op) -> tuple[Op, ...]:
        return (replace(op, stash_bytes=0),) if isinstance(op, Call) else (op,)

    return replace(program, body=rewrite(program.body, strip))
