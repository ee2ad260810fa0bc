"""Skeletons: the tasks, sizes and dependences of a program on its busiest rank, for fast closed-form estimates.

A skeleton describes the rank with the largest shards. It is a list of phases, and each phase repeats its tasks
for a number of turns (iterations). A task starts after the task before it in its lane and after the tasks that
`after` names: ("matmul", 2) is the matmul of two turns ago, counted across phases. Prologue, steady state and
epilogue of a software pipeline follow from these dependences.

Broadcasts and reductions in packets are chains, in which a member is busy only while packets pass it. Chains that
follow each other on a ring overlap, the more so where their roots take turns. What a chain takes then depends on
where its root is, so that a task can list the roots of its chains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from meshweave.base.errors import UnsupportedError
from meshweave.ir.analysis.edges import is_one_sided, local_edges
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Broadcast, Recv, Reduce, Send
from meshweave.ir.work import Work, work_of


@dataclass(frozen=True, slots=True)
class Task:
    """An op of a skeleton, in a lane (issue queue), that runs after the tasks named in `after`.

    `times` equal ops that follow each other in the lane, such as the steps of a ring, count as one task. A turn
    is one iteration of the phase. A chain is a broadcast or reduce in packets, timed hop by hop.

    Attributes:
        after: (task name, turns ago) of each task that it waits for, besides the one before it in its lane.
        roots: the coordinate of the root of each chain, for a broadcast or reduce that is timed as chains:
            `times` for the first turn of the phase, then `times` for the next one, and so on. Without roots the
            members of an op begin together.
    """

    name: str
    lane: str
    work: Work
    after: tuple[tuple[str, int], ...] = ()
    times: int = 1
    roots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """The skeleton of an included program, in place of a task of a phase of one turn.

    Its lanes are those of the program around it. A task that waits for a part waits for the part's last task in
    each of its lanes.

    Attributes:
        after: (lane, names of the tasks of the same turn for which the part's first task in that lane waits).
    """

    name: str
    skeleton: Skeleton
    after: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Phase:
    """The same tasks, repeated for a number of turns; a single turn where there are parts among them."""

    turns: int
    tasks: tuple[Task | Part, ...]


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The phases of a program in order; the module docstring defines their meaning."""

    phases: tuple[Phase, ...]

    @classmethod
    def of_turns(cls, turns: Iterable[tuple[Task, ...]]) -> Skeleton:
        """Return a skeleton from the tasks of each turn (iteration).

        Neighbouring turns that are equal, or differ in roots alone, become one phase.
        """
        return cls.of_runs((1, tasks) for tasks in turns)

    @classmethod
    def of_runs(cls, runs: Iterable[tuple[int, tuple[Task, ...]]]) -> Skeleton:
        """Return a skeleton of `runs`, in order, each (number of turns, the tasks of each of its turns).

        The `roots` of a task are those of all turns of its run. Neighbouring runs whose tasks are equal, or
        differ in roots alone, become one phase.
        """
        joined: list[tuple[int, tuple[Task, ...]]] = []
        for number, tasks in runs:
            if joined and (both := _joined(joined[-1][1], tasks)) is not None:
                joined[-1] = joined[-1][0] + number, both
            else:
                joined.append((number, tasks))
        return cls(tuple(Phase(number, tasks) for number, tasks in joined))

    @property
    def lanes(self) -> tuple[str, ...]:
        """Return the lanes of all tasks, in order of use."""
        return tuple(dict.fromkeys(task.lane for _, task in self.counted_tasks()))

    def counted_tasks(self) -> Iterator[tuple[int, Task]]:
        """Yield (number of ops that it stands for in all turns, task) for every task, those of parts included."""
        for phase in self.phases:
            for task in phase.tasks:
                if isinstance(task, Part):
                    yield from task.skeleton.counted_tasks()
                else:
                    yield phase.turns * task.times, task


def _joined(tasks: tuple[Task, ...], others: tuple[Task, ...]) -> tuple[Task, ...] | None:
    """Return the tasks with the roots of both, None where they differ in more than roots."""
    if all(not task.roots for task in tasks):
        return tasks if tasks is others or tasks == others else None
    if len(tasks) != len(others):
        return None
    both = [replace(task, roots=task.roots + other.roots) for task, other in zip(tasks, others, strict=True)]
    same = all(replace(other, roots=one.roots) == one for one, other in zip(both, others, strict=True))
    return tuple(both) if same else None


def skeleton_of(program: Program) -> Skeleton:
    """Return a skeleton of one turn: the ops of the lowest rank, with its local edges as dependences.

    Includes are expanded. It is exact where all ranks do the same work on shards of equal size, and slower to
    make than a skeleton that an algorithm writes itself.

    Raises:
        UnsupportedError: there are messages or one-sided ops, whose partners a skeleton does not hold.
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
        Task(
            name,
            bound.op.lane,
            work_of(program, bound.op),
            tuple((names[other], 0) for other in before),
            roots=(int(bound.op.root),) if isinstance(bound.op, (Broadcast, Reduce)) else (),  # type: ignore[arg-type]
        )
        for name, bound, before in zip(names, ops, edges, strict=True)
    )
    return Skeleton((Phase(1, tuple(tasks)),))
