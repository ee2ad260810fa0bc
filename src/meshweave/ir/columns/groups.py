"""Ranks, coordinates, sets and groups of a program as columns of integers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from meshweave.base.errors import ProgramError
from meshweave.ir.columns.expressions import ExpressionColumns
from meshweave.ir.columns.op_fields import Column, flat
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Over

_UNDEFINED = np.iinfo(np.int64).min


class GroupColumns:
    """The ranks of a program, the sets of them that statements are for, and the groups that ops run over.

    Attributes:
        copies: by mesh axis ("p0.data") the factor by which its groups are larger than listed, where alike ranks
            are left out (`cost.folded`).
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
        """Return the index of the cost constants of a group; its members are at positions `row` of `ranks`.

        This one returns 0: nothing has a price.
        """
        return 0

    def price_index(self, axis: str) -> int:
        """Return the index of the cost constants of a mesh axis, "" for none.

        This one returns 0: nothing has a price.
        """
        return 0
