"""The steps of a rank in a universal product: local products, and the blocks of which their panels are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshweave.algorithms.universal.problem import Operand

Span = tuple[int, int]
"""[start, stop) in the memory of some rank."""


@dataclass(frozen=True, slots=True)
class OwnedBlock:
    """A block of what one rank holds of a matrix.

    Attributes:
        owner: the rank.
        rows, columns: where the block is in the owner's memory.
        panel_offset: row and column at which it lies in a panel.
    """

    owner: int
    rows: Span
    columns: Span
    panel_offset: tuple[int, int] = (0, 0)

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of rows and columns."""
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @property
    def num_elements(self) -> int:
        """Return the number of elements, rows times columns."""
        rows, columns = self.shape
        return rows * columns


@dataclass(frozen=True, slots=True)
class OperandPanel:
    """The part of a matrix that takes part in one local product, made of blocks of its owners.

    Attributes:
        is_copied: whether the product reads or writes it in scratch, wherever its blocks are.
    """

    operand: Operand
    shape: tuple[int, int]
    blocks: tuple[OwnedBlock, ...]
    is_copied: bool = False

    def is_local_to(self, rank: int) -> bool:
        """Return whether a product of `rank` takes the panel as one block in that rank's own shard."""
        return not self.is_copied and len(self.blocks) == 1 and self.blocks[0].owner == rank


@dataclass(frozen=True, slots=True)
class ProductStep:
    """One local product: the A panel times the B panel, written to the C panel or added to it.

    Attributes:
        sizes: its m, n, k.
        panels: the panel of each matrix.
    """

    sizes: tuple[int, int, int]
    panels: Mapping[Operand, OperandPanel]
