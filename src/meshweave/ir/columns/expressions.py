"""Expressions of a program template as stack code in integers, for the C++ core (`csrc/expr.hpp`)."""

from __future__ import annotations

from meshweave.ir.program.expressions import Binary, Index, Select, Var

_CONSTANT, _VARIABLE = 0, 1
_OPERATORS = {
    sign: 2 + number
    for number, sign in enumerate(
        ("+", "-", "*", "//", "%", "min", "max", "==", "!=", "<", "<=", ">", ">=", "and", "or")
    )
}
_SELECT = 17


class ExpressionColumns:
    """The expressions of a program, numbered; equal ones share a number.

    Attributes:
        code: pairs (instruction, operand) of all expressions, each in postfix order.
        starts: where the code of each expression starts, in pairs, and where the last one ends.
        tables: where the entries of each table of a `Select` start, and where the last one ends.
        entries: the entries of all tables, as numbers of expressions.
    """

    def __init__(self) -> None:
        self.code: list[int] = []
        self.starts = [0]
        self.tables = [0]
        self.entries: list[int] = []
        self._numbers: dict[Index, int] = {}
        self._slots = {"rank": 0, "peer": 1}

    @property
    def num_slots(self) -> int:
        """Return the number of different names."""
        return len(self._slots)

    def slot(self, name: str) -> int:
        """Return the slot in which the core keeps the value of a name."""
        return self._slots.setdefault(name, len(self._slots))

    def number(self, index: Index) -> int:
        """Return the number of an expression."""
        known = self._numbers.get(index)
        if known is None:
            code: list[int] = []
            self._emit(index, code)  # adds the entries of tables first
            self.code += code
            self.starts.append(len(self.code) // 2)
            known = self._numbers[index] = len(self.starts) - 2
        return known

    def number_or_none(self, index: Index | None) -> int:
        """Return the number of an expression, -1 for None."""
        return -1 if index is None else self.number(index)

    def _emit(self, index: Index, code: list[int]) -> None:
        if isinstance(index, Var):
            code += (_VARIABLE, self.slot(index.name))
        elif isinstance(index, Binary):
            self._emit(index.left, code)
            self._emit(index.right, code)
            code += (_OPERATORS[index.op], 0)
        elif isinstance(index, Select):
            self._emit(index.index, code)
            self.entries += [self.number(entry) for entry in index.entries]
            self.tables.append(len(self.entries))
            code += (_SELECT, len(self.tables) - 2)
        else:
            assert isinstance(index, int)
            code += (_CONSTANT, int(index))
