"""The Program: the intermediate representation that algorithms produce and all other parts consume.

A program means what its sequential reading means: statement after statement, all ranks of a statement at
once. Lanes and derived edges say how much of that order an executor must keep. A regular program is a
template (expressions over mesh coordinates and loop indices); an irregular one is written per rank. Both
instantiate to the same per-rank list of ops with plain integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from meshweave.base.errors import ProgramError, require_kind
from meshweave.base.limits import RANK_STEPS, Limit
from meshweave.base.shown import Shown
from meshweave.ir.program.counts import CountValues, one_row_a_cell, with_counts
from meshweave.ir.program.expand import expand
from meshweave.ir.program.expressions import Index, evaluate
from meshweave.ir.program.include import Include, include_error
from meshweave.ir.program.ops import Collective, Op
from meshweave.ir.program.resolve import resolve_op
from meshweave.ir.program.resolved_ops import ResolvedOps
from meshweave.ir.program.statements import Block, Key, On, Repeat, When, rewrite, walk
from meshweave.ir.program.written import WrittenProgram

# --- steps of a program -----------------------------------------------------------------------------------

# The steps of a program, statements visited and turns of loops taken, counted while it is unrolled.
#
# A text of 18 loops of 10 turns each is a few lines long and unrolls to 10^18 steps, so that nothing may
# unroll a program without a `StepBudget`.


class StepsError(ProgramError):
    """A program has more steps than a limit allows."""


class StepBudget:
    """A counter of steps, which begins at `limit.most` and must not fall below 0."""

    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        self._left = limit.most

    def take(self, count: int = 1) -> None:
        """Count off `count` steps. Raises StepsError where fewer are left."""
        self._left -= count
        if self._left < 0:
            raise StepsError(f"the program {self._limit.refusal()}")


# --- program ----------------------------------------------------------------------------------------------

_MEMBERS_PER_STEP = 64
"""Members of a collective that cost as much as a step."""


@dataclass(frozen=True)
class BoundOp:
    """An op of one rank with plain integers, whose `over` lists global ranks.

    `key` is its position in the program: statement numbers and turns of loops, from the outside in.
    """

    key: Key
    op: Op

    @property
    def label(self) -> str:
        """Return the op's name, or else its kind, with its position: `gather_a 0.2.1`, `matmul 0.3.1`."""
        return f"{self.op.title} {'.'.join(map(str, self.key))}"


@dataclass(frozen=True, repr=False)
class Program(Shown, WrittenProgram):
    """A communication and compute program over all ranks; the module docstring defines its meaning."""

    @staticmethod
    def given(program: object) -> Program:
        """Return an argument that is a program. Raises BindError for anything else."""
        require_kind(program, Program, "the program", "a Program, as `parse` and algorithms make them")
        assert isinstance(program, Program)
        return program

    def __repr__(self) -> str:
        """Return the name, the ranks and the ops as written, in a line. Its text has all of it."""
        return f"<Program {self.name}: {len(self.ranks)} ranks, {sum(1 for _ in self.ops())} ops as written>"

    @cached_property
    def includes(self) -> tuple[Include, ...]:
        """Return the includes, as written."""
        return tuple(op for op in self.ops() if isinstance(op, Include))

    @cached_property
    def parts(self) -> dict[str, Program]:
        """Return the sub-programs by name, those of sub-programs too; each after those that it includes itself.

        Raises:
            ProgramError: two different programs have one name.
        """
        parts: dict[str, Program] = {}
        distinct = {(op.part, id(op.program)): op for op in self.includes}
        for op in distinct.values():
            included = _included(op)
            for name, part in {**included.parts, op.part: included}.items():
                known = parts.setdefault(name, part)
                if known is not part and known != part:
                    raise ProgramError(f"'{name}' names two different programs that are included")
        return parts

    def with_parts(self, change: Callable[[Program], Program]) -> Program:
        """Return the program with `change(part)` in place of each program that it includes itself.

        `change` is called once for each program; those that a part includes in turn are left to it.
        """
        parts = {
            number: change(_included(op)) for number, op in {id(i.program): i for i in self.includes}.items()
        }

        def changed(op: Op) -> tuple[Op]:
            return (replace(op, program=parts[id(op.program)]) if isinstance(op, Include) else op,)

        return replace(self, body=rewrite(self.body, changed)) if parts else self

    def with_counts(self, values: CountValues) -> Program:
        """Return the program without tables of counts, in which each cell has as many rows as `values` says.

        Meanings that name a tensor of cells are dropped.

        Args:
            values: for each table, by name, integers in the table's shape.

        Raises:
            ProgramError: a table has no values, or others than it allows; the cells of a view do not follow one
                another in memory; or an op has no form for cells.
        """
        return with_counts(self, values)

    @cached_property
    def one_row_a_cell(self) -> Program:
        """Return the program without count tables, as if each of their cells held exactly one row.

        A cell stands for a number of rows known only at run time, such as the tokens from one rank to one
        expert (see `ir.program.counts`). `validate` proves this program in place of those with any counts. A
        program without counts is returned itself.
        """
        return one_row_a_cell(self)

    @cached_property
    def expanded(self) -> Program:
        """Return the program with the statements of sub-programs in place of includes; itself if there are none.

        Raises:
            ProgramError: an include does not fit: its ranks, or what it gives a view of.
        """
        return expand(self) if self.includes else self

    def ops_with_ranks(self) -> Iterator[tuple[Op, tuple[int, ...]]]:
        """Yield (op, ranks) for every op as written: the global ranks that are in all `On` blocks around it.

        Conditions and loops do not count, and an include is one op, whose meshes do not count.
        """

        def enter(block: Block, key: Key, ranks: tuple[int, ...]) -> Iterator[tuple[Key, tuple[int, ...]]]:
            if isinstance(block, On):
                outer = set(ranks)
                ranks = tuple(rank for rank in self._ranks_of(block) if rank in outer)
            yield key, ranks

        for _, statement, ranks in walk(self.body, self.ranks, enter):
            if isinstance(statement, Op):
                yield statement, ranks

    def _ranks_of(self, block: On) -> tuple[int, ...]:
        return self.mesh_of[block.where].ranks if isinstance(block.where, str) else block.where

    def ops_on_rank(self, rank: int) -> tuple[BoundOp, ...]:
        """Return the ops of one rank in program order, resolved, with loops unrolled.

        Blocks whose condition does not hold are left out. An include is one op: for those of sub-programs see
        `expanded`.

        Raises ProgramError where an expression has no value, a view does not fit its buffer, counts have no
        values, or the rank has more than `base.limits.RANK_STEPS` steps.
        """
        return tuple(self._bind(rank))

    def unbound_ops_on_rank(self, rank: int) -> Iterator[tuple[Op, Mapping[str, int]]]:
        """Yield (op, environment) for the ops of one rank in program order, loops unrolled, includes as one op.

        The op keeps its expressions; the environment has the integer of each variable: coordinates ("tp.row"),
        loop indices and "rank". Raises ProgramError as it goes: for conditions and counts of loops without a
        value, counts without values, and more than `base.limits.RANK_STEPS` steps.
        """
        return ((op, env) for _, op, env in self._unrolled(rank, StepBudget(RANK_STEPS)))

    def has_steps_within(self, limit: Limit, ranks: Iterable[int] | None = None) -> bool:
        """Return whether the program has at most `limit.most` steps on `ranks` (default: all) together.

        A rank counts as one step, and so do each statement that it comes to and each turn of a loop. A
        collective counts one more for every 64 members. Takes time in proportion to the limit, whatever the
        program. Raises ProgramError where an expression has no value or counts have none.
        """
        steps = StepBudget(limit)
        try:
            for rank in self.ranks if ranks is None else ranks:
                steps.take()
                for _, op, _ in self._unrolled(rank, steps):
                    if isinstance(op, Collective):
                        steps.take(self.group_size(op.over) // _MEMBERS_PER_STEP)
        except StepsError:
            return False
        return True

    @cached_property
    def ops_by_rank(self) -> dict[int, tuple[BoundOp, ...]]:
        """Return the ops of every rank, by global rank, as `ops_on_rank` has them.

        Raises ProgramError where an expression has no value, a view does not fit its buffer, counts have no
        values, or a rank has too many steps.
        """
        return {rank: self.ops_on_rank(rank) for rank in self.ranks}

    @cached_property
    def resolved_ops(self) -> ResolvedOps:
        """Return the cache of resolved ops, in which ranks and turns share the ops that are equal."""
        return ResolvedOps(self.resolve, self.local_shape, self.group)

    def resolve(self, op: Op, env: Mapping[str, int], rank: int) -> Op:
        """Return an op with plain integers, as the global rank `rank` runs it; its `over` lists global ranks.

        Args:
            env: the value of each variable: those of `environment` and of loop indices.

        Raises:
            ProgramError: an expression has no value, or a view or the ranks of an include do not fit.
        """
        if isinstance(op, Include):
            op = op.on_rank(rank, tuple(self.ranks_of_include(op, env)))
        return resolve_op(self, op, env, rank)

    def _bind(self, rank: int) -> Iterator[BoundOp]:
        for key, op, env in self._unrolled(rank, StepBudget(RANK_STEPS)):
            try:
                yield BoundOp(key, self.resolved_ops.get(op, env, rank))
            except ProgramError as error:
                raise ProgramError(
                    error.message,
                    op=error.op or f"{op.title} {'.'.join(map(str, key))}",
                    rank=rank,
                    buffer=error.buffer,
                ) from None

    def _unrolled(self, rank: int, steps: StepBudget) -> Iterator[tuple[Key, Op, dict[str, int]]]:
        """Yield (key, op, values of names) for the ops of one rank, loops unrolled.

        Raises StepsError where statements and turns of loops are more than `steps` allows.
        """
        self.require_counts()

        def enter(block: Block, key: Key, env: dict[str, int]) -> Iterable[tuple[Key, dict[str, int]]]:
            match block:
                case On(where=where):
                    runs = rank in (self.mesh_of[where] if isinstance(where, str) else where)
                    return ((key, env),) if runs else ()
                case When(condition=condition):
                    return ((key, env),) if _evaluate_at(key, condition, env, rank, "if") else ()
                case Repeat(var=var, count=count):
                    turns = _evaluate_at(key, count, env, rank, "for")
                    steps.take(max(turns, 0))
                    return (((*key, turn), {**env, var: turn}) for turn in range(turns))

        for key, statement, env in walk(self.body, self.environment(rank), enter):
            steps.take()
            if isinstance(statement, Op) and self._takes_part(statement, env, rank):
                yield key, statement, env

    def _takes_part(self, op: Op, env: Mapping[str, int], rank: int) -> bool:
        """Return whether a rank has an op that it comes upon; an include is for the ranks of its meshes alone."""
        return not isinstance(op, Include) or rank in self.ranks_of_include(op, env)

    def ranks_of_include(self, op: Include, env: Mapping[str, int]) -> dict[int, None]:
        """Return the global ranks that run an include, as the keys of a dict.

        They are in the order of its sub-program's ranks. `env` has the values of the variables on which the
        choice depends (`Include.rank_variables`).

        Raises ProgramError where the sub-meshes of the include do not fit its sub-program, or are outside of
        their meshes.
        """
        key = (id(op), *(env.get(name) for name in op.rank_variables))
        if key not in self._include_ranks:
            try:
                ranks = op.rank_map(self.mesh_of, env)
            except ProgramError as error:
                raise include_error(op.title, error) from None
            self._include_ranks[key] = dict.fromkeys(ranks.values())
        return self._include_ranks[key]

    @cached_property
    def _include_ranks(self) -> dict[tuple[int | None, ...], dict[int, None]]:
        return {}


def _included(op: Include) -> Program:
    assert isinstance(op.program, Program)
    return op.program


def _evaluate_at(key: Key, index: Index, env: Mapping[str, int], rank: int, statement_kind: str) -> int:
    try:
        return evaluate(index, env)
    except ProgramError as error:
        raise ProgramError(
            error.message, op=f"{statement_kind} {'.'.join(map(str, key))}", rank=rank
        ) from None
