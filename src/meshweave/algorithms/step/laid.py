"""The program of a step on its machine."""

from __future__ import annotations

from dataclasses import dataclass

from meshweave.cost.machine import Machine
from meshweave.ir.program import Program


@dataclass(frozen=True)
class LaidStep:
    """The program of a step and the machine that it is on.

    Attributes:
        fold: how many chips each simulated rank stands for.
        calls_because: why its layers are calls; "" where their programs are included.
    """

    program: Program
    machine: Machine
    fold: int
    calls_because: str = ""
