"""The Program: the intermediate representation that algorithms produce and all other parts consume.

A program means what its sequential reading means: statement after statement, all ranks of a statement at
once. Lanes and derived edges say how much of that order an executor must keep. A regular program is a
template (expressions over mesh coordinates and loop indices); an irregular one is written per rank. Both
instantiate to the same per-rank list of ops with plain integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

from meshweave.base.errors import LayoutError, ProgramError, listed
from meshweave.base.limits import RANK_STEPS, Limit
from meshweave.base.units import dtype_bytes
from meshweave.describe.layout import Layout
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program.expand import expand
from meshweave.ir.program.expressions import Index, evaluate
from meshweave.ir.program.include import Include, include_error
from meshweave.ir.program.meanings import Meaning
from meshweave.ir.program.ops import Collective, Op, Over
from meshweave.ir.program.resolve import resolve_op
from meshweave.ir.program.resolved_ops import ResolvedOps
from meshweave.ir.program.statements import Block, Key, On, Repeat, Statement, When, ops_of, rewrite, walk
from meshweave.ir.program.steps import StepBudget, StepsError
from meshweave.ir.program.views import View

_MEMBERS_PER_STEP = 64
"""Members of a collective that cost as much as a step."""


@dataclass(frozen=True)
class Tensor:
    """A logical, global tensor, of which buffers hold shards."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Buffer:
    """Memory of one rank; every rank of `mesh` has one of this name.

    An input, output or temp buffer holds the shard of `tensor` that `layout` gives its rank, so that each byte has
    a global index. Scratch has only a `shape` (expressions over mesh coordinates allowed).

    Attributes:
        slots: number of independent copies, for double buffering.
        order: the dims from outermost to innermost in memory; None for the order written.
    """

    name: str
    kind: Literal["input", "output", "temp", "scratch"]
    mesh: str
    dtype: str
    tensor: str | None = None
    layout: Layout | None = None
    shape: tuple[Index, ...] = ()
    slots: int = 1
    order: tuple[int, ...] | None = None

    def num_dims(self, tensors: Mapping[str, Tensor]) -> int:
        """Return the number of dims, given the tensors of the program."""
        return len(self.shape) if self.tensor is None else len(tensors[self.tensor].shape)


@dataclass(frozen=True)
class Lane:
    """An issue queue: `fifo` starts ops in program order, `ready` any that can start; `width` run at once."""

    name: str
    order: Literal["fifo", "ready"] = "fifo"
    width: int = 1


@dataclass(frozen=True)
class BoundOp:
    """An op of one rank with plain integers. Its `over` lists global ranks."""

    key: Key
    op: Op

    @property
    def label(self) -> str:
        """Return the op's name, or else its kind, with its position: `gather_a 0.2.1`, `matmul 0.3.1`."""
        return f"{self.op.title} {'.'.join(map(str, self.key))}"


@dataclass(frozen=True)
class Program:
    """A communication and compute program over all ranks; the module docstring defines its meaning.

    Fields stand in the order of the text form (`ir.program.text`).

    Attributes:
        body: the statements.
        computes: the meaning of each output tensor, which `ir.analysis.validate` proves.
        indices: names that an including program gives a value (a micro-batch, say) and that only the `args` of
            calls may use. They are 0 where the program is not included.
    """

    name: str
    meshes: tuple[Mesh, ...]
    tensors: tuple[Tensor, ...]
    buffers: tuple[Buffer, ...]
    lanes: tuple[Lane, ...]
    body: tuple[Statement, ...]
    computes: tuple[Meaning, ...] = ()
    indices: tuple[str, ...] = ()

    @cached_property
    def mesh_of(self) -> dict[str, Mesh]:
        """Return the meshes by name."""
        return {mesh.name: mesh for mesh in self.meshes}

    @cached_property
    def tensor_of(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def buffer_of(self) -> dict[str, Buffer]:
        """Return the buffers by name."""
        return {buffer.name: buffer for buffer in self.buffers}

    @cached_property
    def lane_of(self) -> dict[str, Lane]:
        """Return the lanes by name."""
        return {lane.name: lane for lane in self.lanes}

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Return the global ranks of all meshes, ascending."""
        return tuple(sorted({rank for mesh in self.meshes for rank in mesh.ranks}))

    @cached_property
    def includes(self) -> tuple[Include, ...]:
        """Return the includes, as written."""
        return tuple(op for op in self.ops() if isinstance(op, Include))

    @cached_property
    def parts(self) -> dict[str, Program]:
        """Return the sub-programs by name, each after those that it includes itself.

        Raises:
            ProgramError: two different programs have one name.
        """
        parts: dict[str, Program] = {}
        distinct = {(op.part, id(op.program)): op for op in self.includes}
        for op in distinct.values():
            for name, part in {**op.program.parts, op.part: op.program}.items():
                known = parts.setdefault(name, part)
                if known is not part and known != part:
                    raise ProgramError(f"'{name}' names two different programs that are included")
        return parts

    def with_parts(self, change: Callable[[Program], Program]) -> Program:
        """Return the program with `change` made to each program that it includes, once."""
        parts = {
            id(op.program): change(op.program) for op in {id(i.program): i for i in self.includes}.values()
        }

        def changed(op: Op) -> tuple[Op]:
            return (replace(op, program=parts[id(op.program)]) if isinstance(op, Include) else op,)

        return replace(self, body=rewrite(self.body, changed)) if parts else self

    @cached_property
    def expanded(self) -> Program:
        """Return the program with the statements of sub-programs in place of includes; itself if there are none.

        Raises:
            ProgramError: an include does not fit.
        """
        return expand(self) if self.includes else self

    def ops(self) -> Iterator[Op]:
        """Yield every op once, as written, whatever repeats it."""
        return ops_of(self.body)

    def placed_ops(self) -> Iterator[tuple[Op, tuple[int, ...]]]:
        """Yield (op, ranks) for every op as written: its ranks are those in all `On` blocks around it."""

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

    def environment(self, rank: int) -> dict[str, int]:
        """Return the coordinates of `rank` in every mesh that it belongs to ("tp.row"), `rank`, and indices."""
        env = {"rank": rank, **dict.fromkeys(self.indices, 0)}
        for mesh in self.meshes:
            if rank in mesh:
                env.update(
                    (f"{mesh.name}.{axis}", at) for axis, at in zip(mesh.axes, mesh.coords(rank), strict=True)
                )
        return env

    @cached_property
    def _shapes(self) -> dict[tuple[str, int], tuple[int, ...]]:
        return {}

    def local_shape(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the shape of one slot of a buffer on `rank`.

        Raises:
            ProgramError: there is no such buffer, or its mesh has no such rank.
        """
        shape = self._shapes.get((name, rank))
        if shape is not None:
            return shape
        buffer = self.buffer_of.get(name)
        if buffer is None:
            raise ProgramError(f"there is no buffer '{name}'; declared are {listed(self.buffer_of)}")
        if rank not in self.mesh_of[buffer.mesh]:
            raise ProgramError(f"mesh {buffer.mesh} has no rank {rank}", rank=rank, buffer=name)
        if buffer.tensor is not None:
            assert buffer.layout is not None
            try:
                shape = buffer.layout.local_shape(self.tensor_of[buffer.tensor].shape, rank)
            except LayoutError as error:
                raise ProgramError(str(error), rank=rank, buffer=name) from None
        else:
            env = self.environment(rank)
            try:
                shape = tuple(evaluate(size, env) for size in buffer.shape)
            except ProgramError as error:
                raise ProgramError(error.message, rank=rank, buffer=name) from None
        if any(size < 0 for size in shape):
            raise ProgramError(f"has shape {shape}", rank=rank, buffer=name)
        self._shapes[name, rank] = shape
        return shape

    @cached_property
    def _shapes_of_all(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        return {}

    def local_shapes(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of one slot of a buffer on all ranks of its mesh, in their order.

        Raises:
            ProgramError: as `local_shape` does.
        """
        shapes = self._shapes_of_all.get(name)
        if shapes is None:
            buffer = self.buffer_of[name]
            mesh = self.mesh_of[buffer.mesh]
            keys: Sequence[object] = mesh.ranks
            if buffer.layout is not None:
                assert buffer.tensor is not None
                self.local_shape(name, mesh.ranks[0])  # raises what is wrong with the layout
                is_even = buffer.layout.has_equal_shards(self.tensor_of[buffer.tensor].shape)
                keys = [None] * mesh.num_ranks if is_even else buffer.layout.shard_keys
            elif all(isinstance(extent, int) for extent in buffer.shape):
                keys = [None] * mesh.num_ranks
            known: dict[object, tuple[int, ...]] = {}
            for key, rank in zip(keys, mesh.ranks, strict=True):
                if key not in known:
                    known[key] = self.local_shape(name, rank)
            shapes = self._shapes_of_all[name] = tuple(known[key] for key in keys)
        return shapes

    def buffer_bytes(self, name: str, rank: int) -> int:
        """Return the bytes of one slot of a buffer on `rank`."""
        return math.prod(self.local_shape(name, rank)) * dtype_bytes(self.buffer_of[name].dtype)

    def view_bytes(self, view: View) -> int:
        """Return the bytes of a resolved view."""
        return view.num_elements * dtype_bytes(self.buffer_of[view.buffer].dtype)

    def ops_on_rank(self, rank: int) -> tuple[BoundOp, ...]:
        """Return the ops of one rank in program order. Raises ProgramError where an expression does not fit."""
        return tuple(self._bind(rank))

    def unbound_ops_on_rank(self, rank: int) -> Iterator[tuple[Op, Mapping[str, int]]]:
        """Yield (op, environment) for the ops of one rank in program order, loops unrolled.

        The op keeps its expressions; the environment maps their variables to integers.
        """
        return ((op, env) for _, op, env in self._unrolled(rank, StepBudget(RANK_STEPS)))

    def has_steps_within(self, limit: Limit, ranks: Iterable[int] | None = None) -> bool:
        """Return whether ranks (default: all), and the statements and turns of loops they run, are within a limit.

        Takes time in proportion to the limit, whatever the program; a collective of many members counts as several
        steps. Raises ProgramError as `ops_on_rank` does.
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

    def group_size(self, over: Over) -> int:
        """Return the number of members of each group that `over` means; 0 where it names none."""
        if not isinstance(over, str):
            return len(over)
        mesh = self.mesh_of.get(over.partition(".")[0])
        axis = over.partition(".")[2]
        if mesh is None or (axis and axis not in mesh.axes):
            return 0
        return mesh.size(axis) if axis else mesh.num_ranks

    @cached_property
    def ops_by_rank(self) -> dict[int, tuple[BoundOp, ...]]:
        """Return the ops of every rank. Raises ProgramError as `ops_on_rank` does."""
        return {rank: self.ops_on_rank(rank) for rank in self.ranks}

    @cached_property
    def resolved_ops(self) -> ResolvedOps:
        """Return the ops with plain integers that ranks and turns share."""
        return ResolvedOps(partial(resolve_op, self), self.local_shape, self.group)

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
        """Return the ranks of an include in the order of those of its sub-program."""
        key = (id(op), *(env.get(name) for name in op.placing_names))
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

    def group(self, over: Over, rank: int) -> tuple[int, ...]:
        """Return the global ranks that `over` means for `rank`, in the order of the coordinate."""
        if not isinstance(over, str):
            return over
        mesh_name, _, axis = over.partition(".")
        mesh = self.mesh_of.get(mesh_name)
        if mesh is None:
            raise ProgramError(f"'{over}' names no mesh; declared are {listed(self.mesh_of)}")
        if axis and axis not in mesh.axes:
            raise ProgramError(f"'{over}' names no axis; mesh {mesh_name} has {listed(mesh.axes)}")
        if axis and rank not in mesh:
            raise ProgramError(f"runs over '{over}', and mesh {mesh_name} has no rank {rank}")
        return mesh.group(rank, axis) if axis else mesh.ranks


def _evaluate_at(key: Key, index: Index, env: Mapping[str, int], rank: int, statement_kind: str) -> int:
    try:
        return evaluate(index, env)
    except ProgramError as error:
        raise ProgramError(
            error.message, op=f"{statement_kind} {'.'.join(map(str, key))}", rank=rank
        ) from None
