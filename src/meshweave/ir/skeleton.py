"""Skeletons: the tasks, sizes and dependences of a program on its busiest rank, for fast closed-form estimates.

A skeleton describes the rank with the largest shards. It is a list of phases, and each phase repeats its tasks
for a number of turns (iterations). A task starts after the task before it in its lane and after the tasks that
`after` names: ("matmul", 2) is the matmul of two turns ago, counted across phases. Prologue, steady state and
epilogue of a software pipeline follow from these dependences.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshweave.base.errors import UnsupportedError
from meshweave.ir.analysis.edges import is_one_sided, local_edges
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Recv, Send
from meshweave.ir.work import Work, work_of


@dataclass(frozen=True, slots=True)
class Task:
    """An op of a skeleton, in a lane, that runs after the tasks named in `after`.

    `times` equal ops that follow each other in the lane, such as the steps of a ring, count as one task.
    """

    name: str
    lane: str
    work: Work
    after: tuple[tuple[str, int], ...] = ()
    times: int = 1


@dataclass(frozen=True, slots=True)
class Phase:
    """The same tasks, repeated for a number of turns."""

    turns: int
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The phases of a program in order; the module docstring defines their meaning."""

    phases: tuple[Phase, ...]

    @classmethod
    def of_turns(cls, turns: Iterable[tuple[Task, ...]]) -> Skeleton:
        """Return a skeleton from its turns one by one; equal neighbours become one phase."""
        return cls.of_runs((1, tasks) for tasks in turns)

    @classmethod
    def of_runs(cls, runs: Iterable[tuple[int, tuple[Task, ...]]]) -> Skeleton:
        """Return a skeleton from (number of turns, tasks of each); equal neighbours become one phase."""
        phases: list[Phase] = []
        last: tuple[Task, ...] | None = None
        count = 0
        for number, tasks in runs:
            if tasks is last or tasks == last:
                count += number
                continue
            if last is not None:
                phases.append(Phase(count, last))
            last, count = tasks, number
        if last is not None:
            phases.append(Phase(count, last))
        return cls(tuple(phases))


def skeleton_of(program: Program) -> Skeleton:
    """Return a skeleton of one turn: the ops of the first rank, with its local edges as dependences.

    It is exact where all ranks do the same work on shards of equal size, and slower to make than a skeleton that
    an algorithm writes itself.

    Raises:
        UnsupportedError: there are messages from rank to rank, whose partners a skeleton does not hold.
    """
    program = program.expanded
    ops = program.ops_on_rank(program.ranks[0])
    for bound in ops:
        if isinstance(bound.op, (Send, Recv)) or is_one_sided(bound.op):
            raise UnsupportedError(
                f"{program.name}: {bound.label} has a partner; its algorithm must write a skeleton"
            )
    names = [f"{number} {bound.op.name or bound.op.kind}" for number, bound in enumerate(ops)]
    edges = local_edges(ops)
    tasks = (
        Task(name, bound.op.lane, work_of(program, bound.op), tuple((names[other], 0) for other in before))
        for name, bound, before in zip(names, ops, edges, strict=True)
    )
    return Skeleton((Phase(1, tuple(tasks)),))
