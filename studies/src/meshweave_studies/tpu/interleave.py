"""Ops in the order in which one queue should issue them: transfers before the products that run beside them.

A program is read statement after statement, and its lanes let an executor run ahead. A compiler that schedules one
list of ops, such as XLA, has no lanes. This pass writes the list for it. At each boundary between two products a
lane issues its next transfer, if all that it waits for is complete; what was issued before a product is taken as
complete after it. So each product has at most one transfer of each lane beside it, and no transfer is issued long
before its turn. Lanes and derived edges are those of the program, whose meaning stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from meshweave.base.errors import ProgramError, UnsupportedError
from meshweave.ir.analysis.dataflow import analyse
from meshweave.ir.program import On, Program
from meshweave.ir.program.ops import COMPUTE_KINDS, Matmul, Op
from meshweave.ir.program.renaming import Renaming


def interleave(program: Program, most_beside: int | None = None) -> Program:
    """Return the program with its loops written out and its ops in the order described in the module docstring.

    Args:
        most_beside: the most transfers that are issued before one product; None for one of each lane.

    Raises:
        UnsupportedError: ranks run different ops, or no mesh has all ranks of the program.
        ProgramError: the program deadlocks.
    """
    program = program.expanded
    ops = _common_ops(program)
    flow = analyse(program)
    waits: list[set[int]] = [set() for _ in ops]
    for before in flow.predecessors.values():
        for index, others in enumerate(before):
            waits[index].update(others)
    order = _Issue(program, ops, waits, len(ops) if most_beside is None else most_beside).order()
    mesh = next(mesh for mesh in program.meshes if mesh.num_ranks == len(program.ranks))
    return replace(program, body=(On(mesh.name, tuple(ops[index] for index in order)),))


def _common_ops(program: Program) -> list[Op]:
    """Return the ops that each rank runs, with loop indices as numbers and coordinates as they are."""
    if all(mesh.num_ranks != len(program.ranks) for mesh in program.meshes):
        raise UnsupportedError(f"no mesh of program {program.name} has all of its ranks")
    listed: list[Op] | None = None
    for rank in program.ranks:
        own = program.environment(rank)
        ops = []
        for op, env in program.unbound_ops_on_rank(rank):
            turns = {name: value for name, value in env.items() if name not in own}
            ops.append(Renaming(values=turns).op(op) if turns else op)
        if listed is not None and ops != listed:
            raise UnsupportedError(
                f"rank {rank} of program {program.name} runs other ops than the first rank"
            )
        listed = ops
    return listed or []


class _Issue:
    """The lanes of a program, and what has been issued, is under way and is complete."""

    def __init__(
        self, program: Program, ops: Sequence[Op], waits: Sequence[set[int]], most_beside: int
    ) -> None:
        self.ops, self.waits, self.most_beside = ops, waits, most_beside
        self.lanes: dict[str, deque[int]] = {}
        for index, op in enumerate(ops):
            self.lanes.setdefault(op.lane, deque()).append(index)
        self.width = {lane: program.lane_of[lane].width for lane in self.lanes}
        self.issued: list[int] = []
        self.complete: set[int] = set()
        self.under_way: dict[int, str] = {}
        self.beside = 0

    def order(self) -> list[int]:
        """Return the positions of the ops in the order in which they are issued."""
        while len(self.issued) < len(self.ops):
            self._issue_all_but_products()
            product = next((lane for lane in self.lanes if self._is_product(lane)), None)
            if product is not None:
                self.complete.add(self._take(product))
            elif not self.under_way:
                if len(self.issued) == len(self.ops):
                    break
                raise ProgramError("the program deadlocks: no op can be issued")
            self.complete.update(self.under_way)
            self.under_way.clear()
            self.beside = 0
        return self.issued

    def _issue_all_but_products(self) -> None:
        is_moving = True
        while is_moving:
            is_moving = False
            for lane in sorted(filter(self.lanes.get, self.lanes), key=lambda lane: self.lanes[lane][0]):
                if not self._can_issue(lane) or self._is_product(lane):
                    continue
                if self.ops[self.lanes[lane][0]].kind in COMPUTE_KINDS:
                    self.complete.add(self._take(lane))
                elif self.beside < self.most_beside:
                    self.beside += 1
                    index = self._take(lane)
                    self.under_way[index] = lane
                else:
                    continue
                is_moving = True

    def _can_issue(self, lane: str) -> bool:
        queue = self.lanes[lane]
        busy = sum(of == lane for of in self.under_way.values())
        return bool(queue) and busy < self.width[lane] and self.waits[queue[0]] <= self.complete

    def _is_product(self, lane: str) -> bool:
        return self._can_issue(lane) and isinstance(self.ops[self.lanes[lane][0]], Matmul)

    def _take(self, lane: str) -> int:
        index = self.lanes[lane].popleft()
        self.issued.append(index)
        return index
