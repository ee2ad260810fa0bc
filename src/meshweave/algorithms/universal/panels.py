"""The steps of a rank in a universal product: local products, and the blocks of which their panels are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshweave.algorithms.universal.problem import Operand

Span = tuple[int, int]
"""[start, stop) in the memory of some rank."""


@dataclass(frozen=True, slots=True)
class OwnedBlock:
    """A block of the shard that one rank holds of a matrix.

    Attributes:
        owner: the global rank.
        rows, columns: the block's [start, stop) in the owner's shard.
        panel_offset: (row, column) of the block's first element in the panel that it is a part of.
    """

    owner: int
    rows: Span
    columns: Span
    panel_offset: tuple[int, int] = (0, 0)

    @property
    def shape(self) -> tuple[int, int]:
        """Return (number of rows, number of columns)."""
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @property
    def num_elements(self) -> int:
        """Return the number of elements, rows times columns."""
        rows, columns = self.shape
        return rows * columns


@dataclass(frozen=True, slots=True)
class OperandPanel:
    """The part of a matrix that one local product reads or writes, put together from blocks of several ranks.

    Attributes:
        operand: "a", "b" or "c".
        shape: (rows, columns) of the panel, in elements.
        blocks: where its elements are.
        is_copied: whether the product uses a copy in scratch even if the panel is one block of the rank's shard.
    """

    operand: Operand
    shape: tuple[int, int]
    blocks: tuple[OwnedBlock, ...]
    is_copied: bool = False

    def is_local_to(self, rank: int) -> bool:
        """Return whether a product on `rank` uses the panel where it lies: one block of that rank's own shard."""
        return not self.is_copied and len(self.blocks) == 1 and self.blocks[0].owner == rank


@dataclass(frozen=True, slots=True)
class ProductStep:
    """One local product: the A panel times the B panel, written to the C panel or added to it.

    Attributes:
        sizes: (m, n, k) of the product, in elements.
        panels: the panel of each matrix, by "a", "b" and "c".
    """

    sizes: tuple[int, int, int]
    panels: Mapping[Operand, OperandPanel]
