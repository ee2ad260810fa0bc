"""Ranks, coordinates, sets and groups of a program as columns of integers."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from meshweave.base.errors import ProgramError
from meshweave.ir.columns.op_fields import Column, flat
from meshweave.ir.program import Program
from meshweave.ir.program.expressions import Binary, Index, Select, Var
from meshweave.ir.program.ops import Over

# --- expressions ------------------------------------------------------------------------------------------

# Expressions of a program template as stack code in integers, for the C++ core (`csrc/expr.hpp`).

_CONSTANT, _VARIABLE = 0, 1
_OPERATORS = {
    sign: 2 + number
    for number, sign in enumerate(
        ("+", "-", "*", "//", "%", "min", "max", "==", "!=", "<", "<=", ">", ">=", "and", "or")
    )
}
_SELECT = 17


class _ExpressionNumbers(dict[Index, int]):
    """The numbers of expressions; a new one gets the number that `add` returns."""

    def __init__(self, add: Callable[[Index], int]) -> None:
        super().__init__()
        self.add = add

    def __missing__(self, index: Index) -> int:
        number = self[index] = self.add(index)
        return number


class ExpressionColumns:
    """The expressions of a program as integers for the C++ core; each has a number, which equal ones share.

    Attributes:
        code: pairs (instruction, operand) of all expressions, each in postfix order.
        starts: where the code of each expression starts, in pairs, and where the last one ends.
        tables: where the entries of each table of a `Select` start, and where the last one ends.
        entries: the entries of all tables, as numbers of expressions.
        number: returns the number of an expression.
    """

    def __init__(self) -> None:
        self.code = array("q")
        self.starts = array("q", [0])
        self.tables = array("q", [0])
        self.entries = array("q")
        self._numbers = _ExpressionNumbers(self._add)
        self._slots = {"rank": 0, "peer": 1}
        self.number: Callable[[Index], int] = self._numbers.__getitem__

    @property
    def num_slots(self) -> int:
        """Return the number of slots: one for each variable that expressions name, "rank" and "peer" included."""
        return len(self._slots)

    def slot(self, name: str) -> int:
        """Return the index (slot) at which the core keeps the value of a variable; a new one at its first use."""
        return self._slots.setdefault(name, len(self._slots))

    def _add(self, index: Index) -> int:
        """Return the number of a new expression."""
        code: list[int] = []
        self._emit(index, code)  # adds the entries of tables first
        self.code.extend(code)
        self.starts.append(len(self.code) // 2)
        return len(self.starts) - 2

    def _emit(self, index: Index, code: list[int]) -> None:
        if isinstance(index, Var):
            code += (_VARIABLE, self.slot(index.name))
        elif isinstance(index, Binary):
            self._emit(index.left, code)
            self._emit(index.right, code)
            code += (_OPERATORS[index.op], 0)
        elif isinstance(index, Select):
            self._emit(index.index, code)
            self.entries.extend([self.number(entry) for entry in index.entries])
            self.tables.append(len(self.entries))
            code += (_SELECT, len(self.tables) - 2)
        else:
            assert isinstance(index, int)
            code += (_CONSTANT, int(index))


# --- groups -----------------------------------------------------------------------------------------------

_UNDEFINED = np.iinfo(np.int64).min


class GroupColumns:
    """The ranks of a program as integers for the C++ core, sets of ranks of statements, and groups of ops.

    A column is a 1-D array of int64. A group is the members of a collective.

    Attributes:
        copies: by mesh axis ("p0.data") the factor by which its groups are larger than listed, where ranks that
            do the same are left out (`cost.folded`).
    """

    def __init__(self, program: Program, copies: Mapping[str, int] | None = None) -> None:
        program.require_counts()
        self.program, self.copies = program, dict(copies or {})
        self.ranks = np.array(program.ranks, dtype=np.int64)
        self.expressions = ExpressionColumns()
        self._coords: list[Column] = []
        self._sets: dict[Any, int] = {}
        self._set_ranks: list[Column] = []
        self._axes: dict[Over, int] = {}
        self._axis_groups: list[Column] = []
        self._groups: dict[tuple[bytes, str], int] = {}
        self._group_copies: list[int] = []
        self._members: list[Column] = []
        self._group_price: list[int] = []
        self._at = {mesh.name: np.searchsorted(self.ranks, mesh.ranks) for mesh in program.meshes}
        self._coordinates()

    def _coordinates(self) -> None:
        for mesh in self.program.meshes:
            places = np.unravel_index(np.arange(mesh.num_ranks), mesh.shape)
            for axis, place in zip(mesh.axes, places, strict=True):
                column = np.full(len(self.ranks), _UNDEFINED, dtype=np.int64)
                column[self._at[mesh.name]] = place
                self.expressions.slot(f"{mesh.name}.{axis}")
                self._coords.append(column)
        for index in self.program.indices:  # 0 where the program is not included
            self.expressions.slot(index)
            self._coords.append(np.zeros(len(self.ranks), dtype=np.int64))

    def _set(self, where: str | tuple[int, ...]) -> int:
        """Return the number of a set of ranks; -1 for all ranks."""
        if isinstance(where, str) and self.program.mesh_of[where].num_ranks == len(self.ranks):
            return -1
        known = self._sets.get(where)
        if known is None:
            known = self._sets[where] = len(self._set_ranks)
            listed = self._at[where] if isinstance(where, str) else self._positions(where)
            self._set_ranks.append(np.unique(listed))
        return known

    def _positions(self, ranks: Iterable[int]) -> Column:
        """Return the positions of global ranks; ranks that the program does not have are left out."""
        return np.flatnonzero(np.isin(self.ranks, list(ranks)))

    def _axis(self, over: Over) -> int:
        known = self._axes.get(over)
        if known is None:
            known = self._axes[over] = len(self._axes)
            rows = self._rows(over)
            column = np.full(len(self.ranks), -1, dtype=np.int64)
            for row in rows:
                column[row] = self._group(row, over if isinstance(over, str) and over in self.copies else "")
            self._axis_groups.append(column)
        return known

    def _rows(self, over: Over) -> Column:
        """Return the groups that `over` means, each a row of positions."""
        if not isinstance(over, str):
            listed = np.searchsorted(self.ranks, over)
            if not over or not np.isin(over, self.ranks).all() or len(set(over)) < len(over):
                raise ProgramError(f"'{over}' is no group of different ranks of the program")
            return flat(listed).reshape(1, -1)
        name, _, axis = over.partition(".")
        if name not in self._at or (axis and axis not in self.program.mesh_of[name].axes):
            self.program.group(over, self.program.ranks[0])  # says what there is instead
        at = self._at[name]
        if not axis:
            return at.reshape(1, -1)
        mesh = self.program.mesh_of[name]
        number = mesh.axis(axis)
        return np.moveaxis(at.reshape(mesh.shape), number, -1).reshape(-1, mesh.shape[number])

    def _group(self, row: Column, folded: str) -> int:
        """Return the number of a group; `folded` is its axis where it has copies."""
        key = row.astype(np.int64).tobytes(), folded
        known = self._groups.get(key)
        if known is None:
            known = self._groups[key] = len(self._members)
            self._members.append(row)
            self._group_price.append(self.price_index(folded) if folded else self.group_price_index(row))
            self._group_copies.append(self.copies.get(folded, 1))
        return known

    def group_price_index(self, row: Column) -> int:
        """Return the index of the cost constants of the group whose members are `ranks[row]`, global ranks.

        This default returns 0; a subclass with prices overrides it.
        """
        return 0

    def price_index(self, axis: str) -> int:
        """Return the index of the cost constants of a mesh axis ("tp.row"), "" for none.

        This default returns 0; a subclass with prices overrides it.
        """
        return 0
