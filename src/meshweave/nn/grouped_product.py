"""A product for each group of rows, with a matrix of its own: what experts compute with the rows that they get."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshweave.base.errors import LayoutError, printable
from meshweave.nn.dtensor import kind_text


def grouped_product(rows: Tensor, weights: Tensor, rows_per_group: Sequence[int]) -> Tensor:
    """Return (rows, n): the rows of each group times the matrix of that group, in the order of `rows`.

    One kernel computes it where torch has one (`torch.nn.functional.grouped_mm`: floats of at most 32 bits,
    matrices whose rows are multiples of 16 bytes), else one product per group. The result has the dtype of the
    rows: `torch.autocast` casts nothing.

    Args:
        rows: (rows, k), the rows of group 0 first, then those of group 1, and so on.
        weights: (groups, k, n).
        rows_per_group: the number of rows of each group; their sum is the number of rows.

    Raises LayoutError where these do not fit each other.
    """
    _check_groups(rows, weights, rows_per_group)
    _, k, n = weights.shape
    is_aligned = all(size and size * rows.element_size() % 16 == 0 for size in (k, n))
    if rows.shape[0] and is_aligned and rows.dtype in (torch.float32, torch.bfloat16, torch.float16):
        ends = torch.tensor(rows_per_group, device=rows.device).cumsum(0).to(torch.int32)
        product = torch.nn.functional.grouped_mm(rows.contiguous(), weights.contiguous(), offs=ends)
        if product.requires_grad:  # its gradient reads no expanded tensor
            product.register_hook(Tensor.contiguous)
        return product
    with torch.autocast(rows.device.type, enabled=False):
        if not len(rows_per_group):
            return rows @ rows.new_zeros(k, n)
        parts = zip(rows.split(list(rows_per_group)), weights, strict=True)
        return torch.cat([part @ matrix for part, matrix in parts])


def _check_groups(rows: Tensor, weights: Tensor, rows_per_group: Sequence[int]) -> None:
    """Raise LayoutError where groups of rows do not fit their matrices: some rows would have no product."""
    if (
        rows.ndim != 2
        or weights.ndim != 3
        or rows.shape[1] != weights.shape[1]
        or rows.dtype != weights.dtype
    ):
        raise LayoutError(
            f"rows are {kind_text(rows)} and matrices {kind_text(weights)}; rows are (rows, k) and matrices "
            "(groups, k, n) of one dtype"
        )
    sizes = list(rows_per_group)
    if len(sizes) != weights.shape[0] or any(size < 0 for size in sizes) or sum(sizes) != rows.shape[0]:
        raise LayoutError(
            f"groups of {printable(sizes)} rows are not {rows.shape[0]} rows for {weights.shape[0]} matrices"
        )
