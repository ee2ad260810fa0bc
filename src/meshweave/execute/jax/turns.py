"""What the numbers of a template are on every rank and in every turn of its loops, and Python text for them.

Emitted code keeps the loops of the program as Python loops, which jax unrolls when it traces the function. So a
number that depends on loop indices alone is a Python integer there; one that depends on coordinates is a traced
scalar. A number is written as the program's expression, or as a table of its values where that is shorter.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from meshweave.base.errors import ProgramError, UnsupportedError
from meshweave.execute.jax.devices import DeviceMesh
from meshweave.ir.program.expressions import Binary, Expr, Index, Select, Var, evaluate, names_in
from meshweave.ir.program.statements import Repeat, statements_of

_TRUTHS = ("==", "!=", "<", "<=", ">", ">=", "and", "or")
Point = tuple[int, int]
"""(number of a turn, rank)"""


@dataclass(frozen=True)
class Turn:
    """One iteration of all loops around a statement, with the ranks that run the statement in it.

    Attributes:
        loops: the value of each loop index by name, outermost first.
        ranks: for each rank that runs the statement, the value of each variable there by name: coordinates, "rank"
            and loop indices.
    """

    loops: Mapping[str, int]
    ranks: Mapping[int, Mapping[str, int]]

    def having(self, condition: Index) -> Turn:
        """Return this turn with only those of its ranks on which `condition` is not 0."""
        return Turn(self.loops, {r: env for r, env in self.ranks.items() if evaluate(condition, env)})

    def on(self, ranks: Sequence[int]) -> Turn:
        """Return this turn with only those of its ranks that are in `ranks`."""
        listed = set(ranks)
        return Turn(self.loops, {rank: env for rank, env in self.ranks.items() if rank in listed})

    def repeated(self, var: str, count: Index) -> Iterator[Turn]:
        """Yield a turn for each iteration `var` = 0 .. count - 1 of a loop inside this turn.

        Raises UnsupportedError where the number of iterations differs between ranks.
        """
        counts = {evaluate(count, env) for env in self.ranks.values()}
        if len(counts) > 1:
            raise UnsupportedError(f"the loop over {var} has different numbers of turns on different ranks")
        for turn in range(counts.pop() if counts else 0):
            ranks = {rank: {**env, var: turn} for rank, env in self.ranks.items()}
            yield Turn({**self.loops, var: turn}, ranks)


@dataclass(frozen=True)
class Number:
    """Python text of a number in emitted code; `traced`: it is a jax scalar there, not a Python integer."""

    text: str
    traced: bool

    def __str__(self) -> str:
        return self.text


class NumberTexts:
    """Writes integers that may differ between devices and loop iterations as Python text of the emitted function.

    Attributes:
        reserved: maps a loop index or coordinate of the program to its emitted variable, a name used by no other.
        coordinates: for each emitted variable of a coordinate that texts use, the jax axes it is the index along.
        tables_only: whether numbers are written as tables of their values, because the ops that share a text have
            no expression in common.
        rolled: the index of the loop that is written as `lax.fori_loop`, a traced scalar; None where none is.
    """

    def __init__(self, devices: DeviceMesh, reserved: Callable[[str], str]) -> None:
        self.devices, self.reserved = devices, reserved
        self.coordinates: dict[str, tuple[str, ...]] = {}
        self.tables_only = False
        self.rolled: str | None = None
        repeats = (each for each in statements_of(devices.program.body) if isinstance(each, Repeat))
        self._loops = {reserved(each.var) for each in repeats}

    def coordinate(self, axes: tuple[str, ...]) -> str:
        """Return the emitted variable for a device's row-major index along jax `axes`, the first of them slowest.

        Add the variable to `coordinates`.
        """
        name = re.sub(r"\W", "_", "_".join(axes))
        name = self.reserved(name if name.isidentifier() else f"at_{name}")
        while name in self._loops or self.coordinates.get(name, axes) != axes:
            name += "_"
        self.coordinates[name] = axes
        return name

    def has(self, name: str) -> bool:
        """Return whether `name` is a variable of the emitted function for a loop index or a coordinate."""
        return name in self._loops or name in self.coordinates

    def text(
        self,
        turns: Sequence[Turn],
        value: Callable[[int, int], int],
        index: Index | None = None,
        *,
        static: bool = False,
    ) -> Number:
        """Return Python text for an integer that may differ between ranks and turns.

        Args:
            turns: the turns of the statement that uses the integer.
            value: returns the integer for (index into `turns`, global rank).
            index: the program's expression for the integer, None where there is none.
            static: whether the integer must be known while a rolled loop (`lax.fori_loop`) is traced.

        Raises:
            UnsupportedError: the integer depends on more than loop indices and coordinates, or is static and
                changes in a rolled loop.
        """
        points = [(t, rank) for t, turn in enumerate(turns) for rank in turn.ranks]
        values = {point: value(*point) for point in points}
        distinct = set(values.values())
        if len(distinct) <= 1:
            return Number(str(distinct.pop() if distinct else 0), traced=False)
        per_turn = {t: {values[t, rank] for rank in turn.ranks} for t, turn in enumerate(turns)}
        is_rolled = self._changes_in_rolled(turns, per_turn)
        if is_rolled and static:
            raise UnsupportedError(f"a number that must be known beforehand depends on {self.rolled}")
        is_traced = is_rolled or any(len(of_turn) > 1 for of_turn in per_turn.values())
        table = self._table(turns, values, is_traced)
        has_none = index is None or self.tables_only or (not is_traced and _is_coordinate(index))
        expression = None if has_none or index is None else self.expression(index)
        if expression is None or (table is not None and len(table) < len(expression.text)):
            if table is None:
                raise UnsupportedError("a number depends on more than loop indices and coordinates")
            return Number(table, is_traced)
        return Number(expression.text, is_traced)

    def _changes_in_rolled(self, turns: Sequence[Turn], per_turn: Mapping[int, set[int]]) -> bool:
        """Return whether a number changes with the index of the rolled loop alone."""
        if self.rolled is None:
            return False
        by_others: dict[tuple[tuple[str, int], ...], set[int]] = {}
        for t, values in per_turn.items():
            others = tuple((name, at) for name, at in turns[t].loops.items() if name != self.rolled)
            if by_others.setdefault(others, values) != values:
                return True
        return False

    def _table(self, turns: Sequence[Turn], values: Mapping[Point, int], is_traced: bool) -> str | None:
        """Return a table of values by the fewest loop indices, then coordinates, that tell them apart."""
        loops = tuple(turns[0].loops)
        axes = tuple(axis for axis, size in self.devices.sizes.items() if size > 1) if is_traced else ()
        for chosen_loops in _subsets(loops):
            for chosen_axes in _subsets(axes):
                entries: dict[tuple[int, ...], int] = {}
                for (t, rank), value in values.items():
                    at = (
                        *(turns[t].loops[name] for name in chosen_loops),
                        *(self.devices.coordinate(rank, axis) for axis in chosen_axes),
                    )
                    if entries.setdefault(at, value) != value:
                        break
                else:
                    if self.rolled in chosen_loops:
                        return self._picked(entries, chosen_loops, chosen_axes)
                    text = _nested(entries, len(chosen_loops) + len(chosen_axes))
                    text += "".join(f"[{name}]" for name in chosen_loops)
                    if not chosen_axes:
                        return text
                    at_text = ", ".join(self.coordinate((axis,)) for axis in chosen_axes)
                    return f"pick({text}, {at_text if len(chosen_axes) == 1 else f'({at_text})'})"
        return None

    def _picked(
        self, entries: Mapping[tuple[int, ...], int], loops: Sequence[str], axes: Sequence[str]
    ) -> str:
        """Return the text of an entry of a table by traced and other indices."""
        at = [*map(self.reserved, loops), *(self.coordinate((axis,)) for axis in axes)]
        return f"pick({_nested(entries, len(at))}, {at[0] if len(at) == 1 else '(' + ', '.join(at) + ')'})"

    def expression(self, index: Index) -> Number | None:
        """Return the expression `index` as Python text of the emitted variables of loop indices and coordinates.

        Return None where a coordinate is no index along jax axes, or entries of a `Select` depend on coordinates.
        """
        try:
            node, is_traced = self._integer(index)
        except ProgramError:
            return None
        return Number(ast.unparse(node), is_traced)

    def _integer(self, index: Index) -> tuple[ast.expr, bool]:
        """Return the syntax tree of an index as an integer, and whether it is traced: jax adds truths as sets."""
        node, is_traced = self._node(index)
        if is_traced and isinstance(index, Binary) and index.op in _TRUTHS:
            node = ast.BinOp(node, ast.Mult(), ast.Constant(1))
        return node, is_traced

    def _node(self, index: Index) -> tuple[ast.expr, bool]:
        if isinstance(index, int):
            return ast.parse(str(index), mode="eval").body, False
        if isinstance(index, Var):
            return self._variable(index.name)
        if isinstance(index, Select):
            at, is_traced = self._integer(index.index)
            entries = [self._integer(entry) for entry in index.entries]
            if any(traced for _, traced in entries):
                raise ProgramError("a table has traced entries")
            table = ast.Tuple([node for node, _ in entries], ast.Load())
            if not is_traced:
                return ast.Subscript(table, at, ast.Load()), False
            return _call("pick", table, at), True
        assert isinstance(index, Binary)
        node = self._node if index.op in _TRUTHS else self._integer
        (left, left_traced), (right, right_traced) = node(index.left), node(index.right)
        is_traced = left_traced or right_traced
        if index.op in ("min", "max"):
            name = index.op if not is_traced else f"jnp.{index.op}imum"
            return _call(name, left, right), is_traced
        if index.op in ("and", "or") and is_traced:
            return _call(f"jnp.logical_{index.op}", left, right), True
        if index.op in ("and", "or"):
            text = f"bool({ast.unparse(left)}) {index.op} bool({ast.unparse(right)})"
            return ast.parse(text, mode="eval").body, False
        text = f"({ast.unparse(left)}) {index.op} ({ast.unparse(right)})"
        return ast.parse(text, mode="eval").body, is_traced

    def _variable(self, name: str) -> tuple[ast.expr, bool]:
        if name != "rank" and "." not in name:
            return ast.Name(self.reserved(name), ast.Load()), name == self.rolled
        axes = self.devices.axes_of_coordinate(name)
        if axes is None:
            raise ProgramError(f"{name} is no index along mesh axes")
        if not axes:
            return ast.Constant(0), False
        return ast.Name(self.coordinate(axes), ast.Load()), True


def _is_coordinate(index: Index) -> bool:
    return isinstance(index, Expr) and any("." in name or name == "rank" for name in names_in(index))


def _call(name: str, *args: ast.expr) -> ast.expr:
    return ast.Call(ast.parse(name, mode="eval").body, list(args), [])


def _subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for count in range(len(names) + 1):
        yield from combinations(names, count)


def _nested(entries: Mapping[tuple[int, ...], int], depth: int) -> str:
    """Return the text of a table in tables; entries that nothing asks for are 0."""
    if depth == 0:
        return str(next(iter(entries.values())))
    sizes = [max(at[d] for at in entries) + 1 for d in range(depth)]

    def table(prefix: tuple[int, ...]) -> Any:
        if len(prefix) == depth:
            return entries.get(prefix, 0)
        return tuple(table((*prefix, at)) for at in range(sizes[len(prefix)]))

    return str(table(()))
