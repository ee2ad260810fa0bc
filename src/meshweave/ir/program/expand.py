"""What an include means: the statements of the sub-program, with what stands for its names in place of them.

Expansion works on templates: an include in a loop becomes the statements of its sub-program in that loop,
whatever the number of turns. A loop is unrolled only where the ranks of an include depend on its index, and an
include whose ranks depend on coordinates is written once for each set of ranks. Sub-programs are expanded first,
each once.

Names. What the sub-program declares for itself (scratch, temporaries, lanes, meshes that this program does not
have) gets the name of the sub-program as prefix. It is shared by all includes of that name on the same ranks. Ops
are labelled with the path of includes that leads to them: `stage 2 > block > matmul`.

Fences. A program begins and ends with a fence of its ranks, and so does an include of one with one-sided ops. A
fence is left out where nothing else touches the buffers that it would guard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from meshweave.base.errors import ProgramError
from meshweave.describe.layout import Layout
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program.expressions import Index, Var, evaluate
from meshweave.ir.program.include import Include, include_error
from meshweave.ir.program.ops import Fence, Op
from meshweave.ir.program.renaming import RankMap, Renaming, fresh_name, must_unroll, region_of
from meshweave.ir.program.statements import On, Repeat, Statement, When, ops_of, rewrite, statements_of
from meshweave.ir.program.views import View
from meshweave.ir.program.written import Buffer, WrittenProgram

ProgramT = TypeVar("ProgramT", bound=WrittenProgram)


def expand(program: ProgramT) -> ProgramT:
    """Return the program with the statements of sub-programs in place of includes.

    Raises:
        ProgramError: an include does not fit; the message begins with its path.
    """
    expansion = _Expansion(program)
    body = expansion.run()
    return replace(
        program,
        meshes=tuple(expansion.meshes),
        tensors=tuple(expansion.tensors),
        buffers=tuple(expansion.buffers),
        lanes=tuple(expansion.lanes),
        body=body,
    )


@dataclass(frozen=True)
class _Scope:
    """The names of what includes of one sub-program on the same ranks share."""

    meshes: Mapping[str, tuple[str, Mapping[str, str]]]
    buffers: Mapping[str, str]
    where: str | tuple[int, ...] | None
    """The ranks that take part; None for all ranks of the program."""


class _Expansion:
    def __init__(self, program: WrittenProgram) -> None:
        self.program = program
        self.meshes = list(program.meshes)
        self.tensors, self.buffers = list(program.tensors), list(program.buffers)
        self.lanes = list(program.lanes)
        self.taken = set(program.names)
        self.scopes: dict[tuple[object, ...], _Scope] = {}
        self.lane_names: dict[tuple[str, str], str] = {}
        self.touched_by: dict[str, set[int]] = defaultdict(set)
        self.guards: dict[int, tuple[int, Collection[str]]] = {}
        """By the identity of a fence around an include: the number of the include, and the buffers to guard."""
        self.repeated: set[int] = set()
        self.num_includes = 0

    def run(self) -> tuple[Statement, ...]:
        """Return the statements of the expanded program."""
        body = self._body(self.program.body, {}, ())
        return rewrite(body, lambda op: (op,) if self._is_needed(op) else ())

    def _is_needed(self, op: Op) -> bool:
        if id(op) not in self.guards:
            return True
        number, guarded = self.guards[id(op)]
        return number in self.repeated or any(self.touched_by[name] - {number} for name in guarded)

    # --- statements -----------------------------------------------------------------------------------

    def _body(
        self, body: tuple[Statement, ...], values: Mapping[str, Index], loops: tuple[str, ...]
    ) -> tuple[Statement, ...]:
        """Return a body expanded: in loops with the indices `loops`, for `values` of those of unrolled ones."""
        out: list[Statement] = []
        renaming = Renaming(values)
        for statement in body:
            match statement:
                case On():
                    out.append(On(statement.where, self._body(statement.body, values, loops)))
                case When():
                    out.append(
                        When(renaming.index(statement.condition), self._body(statement.body, values, loops))
                    )
                case Repeat(var=var) if must_unroll(statement):
                    for turn in range(_num_turns(statement, renaming)):
                        out += self._body(statement.body, {**values, var: turn}, loops)
                case Repeat(var=var, count=count):
                    inner = {name: value for name, value in values.items() if name != var}
                    repeated = self._body(statement.body, inner, (*loops, var))
                    out.append(Repeat(var, renaming.index(count), repeated))
                case Include():
                    out += self._include(renaming.op(statement), loops)
                case _:
                    self._note(statement, 0)
                    out.append(renaming.op(statement))
        return tuple(out)

    def _note(self, op: Op, owner: int) -> None:
        for _, view in op.accesses():
            self.touched_by[view.buffer].add(owner)

    # --- includes -------------------------------------------------------------------------------------

    def _include(self, op: Include, loops: tuple[str, ...]) -> Iterator[Statement]:
        try:
            for ranks in placements(self.program, op):
                body = self._on_ranks(op, ranks, loops)
                scope = self._scope(op, ranks)
                yield from body if scope.where is None else (On(scope.where, body),)
        except ProgramError as error:
            raise include_error(op.title, error) from None

    def _on_ranks(
        self, op: Include, ranks: Mapping[int, int], loops: tuple[str, ...]
    ) -> tuple[Statement, ...]:
        inner, scope, rank_map = op.program.expanded, self._scope(op, ranks), RankMap(ranks)
        values: dict[str, Index] = {"rank": rank_map.inner(Var("rank"))}
        for formal, (name, axes) in scope.meshes.items():
            values.update((f"{formal}.{axis}", Var(f"{name}.{other}")) for axis, other in axes.items())
        for statement in statements_of(inner.body):
            if isinstance(statement, Repeat) and statement.var in loops:
                values[statement.var] = Var(fresh_name(f"{op.part}_{statement.var}", loops))
        values.update(op.indices)
        stashes = dict(op.stashes)
        renaming = Renaming(
            values,
            self._views(op, scope),
            scope.meshes,
            rank_map,
            {lane.name: self._lane(op, lane.name) for lane in inner.lanes},
            lambda name: stashes.get(name, f"{op.part}_{name}"),
            op.title,
        )
        body = renaming.body(inner.body)
        self.num_includes += 1
        number = self.num_includes
        for inner_op in ops_of(body):
            self._note(inner_op, number)
        if loops:
            self.repeated.add(number)
        return self._guarded(body, scope, ranks, number)

    def _guarded(
        self, body: tuple[Statement, ...], scope: _Scope, ranks: Mapping[int, int], number: int
    ) -> tuple[Statement, ...]:
        remote = [
            (op, view.buffer) for op in ops_of(body) for _, view in op.accesses() if view.rank is not None
        ]
        if not remote:
            return body
        over = next((name for name, _ in scope.meshes.values() if self._covers(name, ranks)), None)
        fences = [
            Fence(
                lane=remote[0][0].lane, over=over or tuple(sorted(ranks.values())), name=f"{which} of include"
            )
            for which in ("begin", "end")
        ]
        for fence in fences:
            self.guards[id(fence)] = number, {name for _, name in remote}
        return (fences[0], *body, fences[1])

    def _covers(self, mesh: str, ranks: Mapping[int, int]) -> bool:
        return set(next(known for known in self.meshes if known.name == mesh).ranks) == set(ranks.values())

    def _views(self, op: Include, scope: _Scope) -> dict[str, Callable[[View], View]]:
        """Return for each buffer of the sub-program the function from its views to those that stand for them."""
        views = {formal: region_of(actual, formal) for formal, actual in op.buffers}
        slots = {buffer.name: buffer.slots for buffer in op.program.expanded.buffers}
        views.update(
            (formal, _copy_of(name, op.copy * slots[formal])) for formal, name in scope.buffers.items()
        )
        return views

    # --- what a sub-program declares ------------------------------------------------------------------

    def _name(self, name: str) -> str:
        fresh = fresh_name(name, self.taken)
        self.taken.add(fresh)
        return fresh

    def _lane(self, op: Include, formal: str) -> str:
        given = dict(op.lanes).get(formal)
        if given is not None:
            return given
        key = op.part, formal
        if key not in self.lane_names:
            self.lane_names[key] = self._name(f"{op.part}_{formal}")
            lane = op.program.expanded.lane_of[formal]
            self.lanes.append(replace(lane, name=self.lane_names[key]))
        return self.lane_names[key]

    def _scope(self, op: Include, ranks: Mapping[int, int]) -> _Scope:
        key = op.part, op.copies, tuple(ranks.items())
        if key not in self.scopes:
            self.scopes[key] = self._new_scope(op, ranks)
        return self.scopes[key]

    def _new_scope(self, op: Include, ranks: Mapping[int, int]) -> _Scope:
        inner = op.program.expanded
        meshes = {mesh.name: self._mesh(op, mesh, ranks) for mesh in inner.meshes}
        renaming = Renaming(
            {
                f"{formal}.{axis}": Var(f"{name}.{other}")
                for formal, (name, axes) in meshes.items()
                for axis, other in axes.items()
            }
            | {"rank": RankMap(ranks).inner(Var("rank"))}
        )
        mesh_of = {mesh.name: mesh for mesh in self.meshes}
        given = {formal for formal, _ in op.buffers}
        buffers: dict[str, str] = {}
        tensors: dict[str, str] = {}
        for buffer in inner.buffers:
            if buffer.name in given:
                continue
            buffers[buffer.name] = self._name(f"{op.part}_{buffer.name}")
            self.buffers.append(
                self._buffer(
                    op, buffer, buffers[buffer.name], mesh_of[meshes[buffer.mesh][0]], renaming, tensors
                )
            )
        taking_part = set(ranks.values())
        where: str | tuple[int, ...] | None = tuple(sorted(taking_part))
        if taking_part == set(self.program.ranks):
            where = None
        else:
            where = next((mesh.name for mesh in self.meshes if set(mesh.ranks) == taking_part), where)
        return _Scope(meshes, buffers, where)

    def _buffer(
        self, op: Include, buffer: Buffer, name: str, mesh: Mesh, renaming: Renaming, tensors: dict[str, str]
    ) -> Buffer:
        layout, tensor = buffer.layout, buffer.tensor
        if tensor is not None and layout is not None:
            layout = Layout(mesh, layout.placements, layout.folds)
            if tensor not in tensors:
                tensors[tensor] = self._name(f"{op.part}_{tensor}")
                declared = op.program.expanded.tensor_of[tensor]
                self.tensors.append(replace(declared, name=tensors[tensor]))
            tensor = tensors[tensor]
        shape = tuple(map(renaming.index, buffer.shape))
        slots = buffer.slots * op.copies
        return replace(
            buffer, name=name, mesh=mesh.name, tensor=tensor, layout=layout, shape=shape, slots=slots
        )

    def _mesh(self, op: Include, mesh: Mesh, ranks: Mapping[int, int]) -> tuple[str, dict[str, str]]:
        """Return the name of the mesh that stands for one of the sub-program, and those of its axes."""
        outer = tuple(ranks[rank] for rank in mesh.ranks)
        same = (known for known in self.meshes if (known.shape, known.ranks) == (mesh.shape, outer))
        known = next(same, None)
        if known is None:
            known = replace(mesh, name=self._name(f"{op.part}_{mesh.name}"), ranks=outer)
            self.meshes.append(known)
        return known.name, dict(zip(mesh.axes, known.axes, strict=True))


def placements(program: WrittenProgram, op: Include) -> Iterator[dict[int, int]]:
    """Yield every rank map of an include, {rank of the sub-program: global rank of `program`}.

    There is one map, or one for each set of ranks that runs the include where these depend on coordinates.

    Raises:
        ProgramError: the ranks depend on a loop index, or do not fit the sub-program's meshes.
    """
    if not op.rank_variables:
        yield op.rank_map(program.mesh_of, {})
        return
    seen: set[tuple[tuple[int, int], ...]] = set()
    for rank in program.ranks:
        ranks = op.rank_map(program.mesh_of, program.environment(rank))
        key = tuple(ranks.items())
        if rank in ranks.values() and key not in seen:
            seen.add(key)
            yield ranks


def _copy_of(name: str, first_slot: Index) -> Callable[[View], View]:
    """Return the function from views of a buffer to those of buffer `name`, slots counted from `first_slot`."""
    return lambda view: View(name, view.selectors, first_slot + view.slot, view.rank)


def _num_turns(statement: Repeat, renaming: Renaming) -> int:
    """Return the count of a loop that is unrolled."""
    try:
        return evaluate(renaming.index(statement.count), {})
    except ProgramError:
        raise ProgramError(
            f"the ranks of an include depend on '{statement.var}', so that the count of its loop must be "
            f"a number, not '{statement.count}'",
            op="for",
        ) from None
