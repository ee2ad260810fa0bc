"""Replaces the names in ops and statements: variables, buffers, meshes, ranks, lanes and stashes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from meshweave.base.errors import ProgramError
from meshweave.ir.program.expressions import Expr, Index, Var, names_in, select, substitute_all
from meshweave.ir.program.include import Include, Submesh
from meshweave.ir.program.ops import Op, Over
from meshweave.ir.program.release import CollectiveStep, Release
from meshweave.ir.program.statements import On, Repeat, Statement, When
from meshweave.ir.program.views import Blocked, Range, Selector, View

SomeOp = TypeVar("SomeOp", bound=Op)


def fresh_name(name: str, taken: Collection[str]) -> str:
    """Return `name` with as few underscores appended as make it none of `taken`: 0 where it is not taken."""
    while name in taken:
        name += "_"
    return name


@dataclass(frozen=True)
class RankMap:
    """Which rank of the including program (a global rank) stands for each rank of a sub-program.

    `ranks` maps ranks of the sub-program, ascending, to global ranks; the methods map expressions likewise.
    """

    ranks: Mapping[int, int]

    def outer(self, inner: Index) -> Index:
        """Return the global rank that stands for the sub-program's rank `inner`, which may be an expression.

        The result is not defined for a rank that the map lacks.
        """
        if isinstance(inner, int):
            return self.ranks.get(inner, -1)
        line = _line(self.ranks)
        if line is not None:
            scale, offset = line
            return inner * scale + offset
        return select([self.ranks.get(rank, -1) for rank in range(max(self.ranks) + 1)], inner)

    def inner(self, outer: Index) -> Index:
        """Return the sub-program's rank for which the global rank `outer`, or an expression of it, stands.

        The result is not defined for a global rank that stands for none.
        """
        line = _line(self.ranks)
        if line is not None and line[0] > 0:
            scale, offset = line
            return (outer - offset) // scale
        back = {outer_rank: rank for rank, outer_rank in self.ranks.items()}
        return select([back.get(rank, -1) for rank in range(max(back) + 1)], outer)


def _line(ranks: Mapping[int, int]) -> tuple[int, int] | None:
    """Return (scale, offset) if each rank r maps to r * scale + offset, else None."""
    pairs = list(ranks.items())
    (first, to), (last, end) = pairs[0], pairs[-1]
    scale = 1 if first == last else (end - to) // (last - first)
    offset = to - first * scale
    return (scale, offset) if all(outer == inner * scale + offset for inner, outer in pairs) else None


@dataclass(frozen=True)
class Renaming:
    """What stands for each name; a name that is not listed stays.

    Attributes:
        values: by variable, the expression in its place.
        views: by buffer, a function from a view of the buffer to the view in its place.
        meshes: by mesh, its new name and the new name of each axis.
        ranks: the new number of each rank; None where ranks stay.
        lanes: by lane, its new name.
        stash: returns the new name of a stash.
        prefix: what is put before the label of each op, "" for nothing.
    """

    values: Mapping[str, Index] = field(default_factory=dict)
    views: Mapping[str, Callable[[View], View]] = field(default_factory=dict)
    meshes: Mapping[str, tuple[str, Mapping[str, str]]] = field(default_factory=dict)
    ranks: RankMap | None = None
    lanes: Mapping[str, str] = field(default_factory=dict)
    stash: Callable[[str], str] = lambda name: name
    prefix: str = ""

    def body(self, statements: Iterable[Statement]) -> tuple[Statement, ...]:
        """Return statements with names replaced, also in nested ones.

        `values` may give the index of a loop another variable, and nothing else; this is not checked.
        """
        return tuple(map(self._statement, statements))

    def _statement(self, statement: Statement) -> Statement:
        match statement:
            case On(where=where):
                if isinstance(where, str):
                    where = self.meshes[where][0] if where in self.meshes else where
                else:
                    where = tuple(self._rank(rank) for rank in where)
                return On(where, self.body(statement.body))
            case Repeat(var=var, count=count):
                renamed = self.values.get(var)
                name = renamed.name if isinstance(renamed, Var) else var
                return Repeat(name, self.index(count), self.body(statement.body))
            case When(condition=condition):
                return When(self.index(condition), self.body(statement.body))
        return self.op(statement)

    def op(self, op: SomeOp) -> SomeOp:
        """Return an op with all names in it replaced: of variables, views, lane, group, peer and stash.

        With a `prefix` the label becomes `prefix > label`.
        """
        changes: dict[str, Any] = {}
        for item in fields(op):
            old = getattr(op, item.name)
            new = self._field(op, item.name, old)
            if new is not old:
                changes[item.name] = new
        return replace(op, **changes) if changes else op

    def _field(self, op: Op, name: str, value: Any) -> Any:
        match name:
            case "lane":
                return self.lanes.get(value, value)
            case "over":
                return self.over(value)
            case "peer" if self.ranks is not None:
                return self.ranks.outer(self.index(value))
            case "stash":
                return self.stash(value) if value else value
            case "name" if self.prefix:
                return f"{self.prefix} > {value or op.kind}"
        return self._value(value)

    def _value(self, value: Any) -> Any:
        if isinstance(value, Expr):
            return self.index(value)
        if isinstance(value, View):
            return self.view(value)
        if isinstance(value, Submesh):
            return replace(value, coordinates=self._value(value.coordinates))
        if isinstance(value, (Range, Blocked)):
            return self.selector(value)
        if isinstance(value, (Release, CollectiveStep)):
            changes = {item.name: self._value(getattr(value, item.name)) for item in fields(value)}
            if isinstance(value, CollectiveStep) and value.axis:
                changes["axis"] = self.over(value.axis)
            return replace(value, **changes)
        if isinstance(value, tuple):
            new = tuple(map(self._value, value))
            return new if any(a is not b for a, b in zip(new, value, strict=True)) else value
        return value

    def index(self, index: Index) -> Index:
        """Return an expression with the variables in `values` replaced."""
        return substitute_all(index, self.values) if isinstance(index, Expr) and self.values else index

    def over(self, over: Over) -> Over:
        """Return what a collective runs over, with the names of mesh and axis, or the listed ranks, replaced."""
        if not isinstance(over, str):
            return tuple(self._rank(rank) for rank in over)
        mesh, _, axis = over.partition(".")
        if mesh not in self.meshes:
            return over
        name, axes = self.meshes[mesh]
        return f"{name}.{axes.get(axis, axis)}" if axis else name

    def _rank(self, rank: int) -> int:
        return rank if self.ranks is None else self.ranks.ranks[rank]

    def view(self, view: View) -> View:
        """Return a view with its variables and owning rank replaced, then mapped by its entry of `views`."""
        selectors = tuple(self.selector(selector) for selector in view.selectors)
        rank = None if view.rank is None else self.index(view.rank)
        if rank is not None and self.ranks is not None:
            rank = self.ranks.outer(rank)
        renamed = View(view.buffer, selectors, self.index(view.slot), rank)
        stands = self.views.get(view.buffer)
        return renamed if stands is None else stands(renamed)

    def selector(self, selector: Selector) -> Selector:
        """Return a range or blocked selector with the variables in `values` replaced."""
        start, stop = self.index(selector.start), None if selector.stop is None else self.index(selector.stop)
        if isinstance(selector, Range):
            return Range(start, stop)
        first, block, stride = map(self.index, (selector.first, selector.block, selector.stride))
        return Blocked(first, block, stride, start, stop)


def region_of(actual: View, formal: str) -> Callable[[View], View]:
    """Return a function that turns a view of buffer `formal` into the same part of the region `actual`.

    `formal` is a buffer of a sub-program, `actual` the view of a buffer here that stands for it.

    Raises:
        ProgramError: by the function, for a view of another rank's memory where the region depends on coordinates:
            those of the owner would be meant.
    """
    bounds = [selector for selector in actual.selectors if selector != Range()]
    indices = [actual.slot, *(end for selector in bounds for end in (selector.start, selector.stop or 0))]
    coordinates = sorted(
        {name for index in indices for name in names_in(index) if "." in name or name == "rank"}
    )

    def region(view: View) -> View:
        if view.rank is not None and coordinates:
            raise ProgramError(
                f"{formal} is reached from other ranks, so that {actual} cannot stand for it: "
                f"it depends on {coordinates[0]}; give the whole buffer",
                buffer=actual.buffer,
            )
        pairs = zip(view.selectors, actual.selectors, strict=True)
        return View(
            actual.buffer, tuple(_within(inner, outer) for inner, outer in pairs), actual.slot, view.rank
        )

    return region


def _within(inner: Selector, outer: Selector) -> Selector:
    """Return a selector of the elements that `outer` selects, counted from the first of them."""
    assert isinstance(outer, Range)
    start = outer.start + inner.start
    stop = outer.stop if inner.stop is None else outer.start + inner.stop
    if isinstance(inner, Range):
        return Range(start, stop)
    return Blocked(outer.start + inner.first, inner.block, inner.stride, start, stop)


def must_unroll(statement: Repeat) -> bool:
    """Return whether a loop must be unrolled: the ranks of an include in it depend on the loop's index."""

    def depends(body: Iterable[Statement]) -> bool:
        for inner in body:
            if isinstance(inner, Include) and statement.var in inner.rank_variables:
                return True
            if isinstance(inner, (On, When)) and depends(inner.body):
                return True
            if isinstance(inner, Repeat) and inner.var != statement.var and depends(inner.body):
                return True
        return False

    return depends(statement.body)
