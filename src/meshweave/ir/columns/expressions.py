"""Expressions of a program template as stack code in integers, for the C++ core (`csrc/expr.hpp`)."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from meshweave.ir.program.expressions import Binary, Index, Select, Var

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
    """The expressions of a program, numbered; equal ones share a number.

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
        """Return the number of slots, one for each different name, "rank" and "peer" included."""
        return len(self._slots)

    def slot(self, name: str) -> int:
        """Return the slot in which the core keeps the value of a name, a new one at its first use."""
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
