"""Positions of blocks: which part of a tensor a call reads, and whether its inputs belong together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshweave.base.errors import ProgramError
from meshweave.ir.program.meanings import TensorPart

LABEL = np.dtype([("term", np.int32), ("index", np.int64), ("writer", np.int32)])
Labels = NDArray[Any]
Positions = NDArray[np.int64]


class CallPositions:
    """The positions that the names in a call's meaning (`i` in `X[i, :]`) stand for, found from its inputs.

    Attributes:
        of: the positions along the named dim, by name.
        untold: (part, buffer) of the inputs that are empty and have merged dims, so that it is not known which
            of the part's dims is empty.
    """

    def __init__(self, fn: str) -> None:
        self.fn = fn
        self.of: dict[str, Positions] = {}
        self.untold: list[tuple[TensorPart, str]] = []

    def bind(self, part: TensorPart, shape: tuple[int, ...], block: Labels, buffer: str) -> None:
        """Note the positions of `block`, an input that the meaning describes as `part`.

        Args:
            shape: the shape of the part's tensor.
            buffer: the name of the buffer that is read, for errors.

        Raises ProgramError where the elements are no block of the tensor, where they lack positions of a whole
        dim, and where a name stands for other positions in another input.
        """
        tensor = part.tensor
        if not block.size and block.ndim != len(shape):
            self.untold.append((part, buffer))
            return
        for dim, (name, size, listed) in enumerate(
            zip(part.dims, shape, self._lists(tensor, shape, block, buffer), strict=True)
        ):
            if listed is None:
                continue
            known = np.arange(size) if name is None else self.of.setdefault(name, listed)
            if np.array_equal(known, listed):
                continue
            if name is None:
                raise ProgramError(
                    f"gives call '{self.fn}' {_span(listed)} along dim {dim} of {tensor}, and it needs all of "
                    f"0:{size}",
                    buffer=buffer,
                )
            raise ProgramError(
                f"gives call '{self.fn}' {name} = {_span(listed)} of {tensor} with {name} = {_span(known)} of "
                "another input",
                buffer=buffer,
            )

    def _lists(
        self, tensor: str, shape: tuple[int, ...], block: Labels, buffer: str
    ) -> Sequence[Positions | None]:
        """Return the positions of a block per dim of its tensor; of an empty block those that are none.

        None stands for the other dims of an empty block, of which it does not tell.
        """
        if not block.size:
            return [None if extent else np.arange(0) for extent in block.shape]
        lists = positions_of(block["index"], shape)
        if lists is None or not merges(block.shape, [len(listed) for listed in lists]):
            raise ProgramError(f"gives call '{self.fn}' what is no block of {tensor}", buffer=buffer)
        return lists


def _span(listed: Positions) -> str:
    """Return positions in words: `4:8`, or the first few."""
    if not len(listed):
        return "nothing"
    if (np.diff(listed) == 1).all():
        return f"{listed[0]}:{listed[-1] + 1}"
    return ", ".join(map(str, listed[:4].tolist())) + (
        f" and {len(listed) - 4} more" if len(listed) > 4 else ""
    )


def positions_of(index: Positions, shape: tuple[int, ...]) -> list[Positions] | None:
    """Return the positions of a block along each dim of its tensor of `shape`: [4, 5] of (2, 4) -> [[1], [0, 1]].

    `index` lists the block's elements by their row-major numbers in the tensor. It must be the Cartesian product
    of the returned positions in row-major order, else the result is None. The shape of `index` does not matter,
    so that rows of a matrix can be read as rows of heads.
    """
    flat = index.reshape(-1)
    coords = np.unravel_index(flat, shape) if shape else ()
    lists: list[Positions] = []
    stride = 1
    for dim in range(len(shape) - 1, -1, -1):
        outer = [coords[other][::stride] for other in range(dim)]
        changes = [np.flatnonzero(other != other[0])[:1] for other in outer]
        own = coords[dim][::stride]
        length = min((int(at[0]) for at in changes if len(at)), default=len(own))
        lists.append(own[:length])
        stride *= length
    lists.reverse()
    product = np.ravel_multi_index(np.ix_(*lists), shape).reshape(-1) if lists else np.zeros(1, np.int64)
    return lists if np.array_equal(product, flat) else None


def merges(shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether `shape` is `sizes` with neighbouring dims merged, and dims of size 1 added or dropped.

    It is False where `shape` has a dim of size 0.
    """
    left = list(sizes)
    for extent in shape:
        merged = 1
        while merged < extent and left:
            merged *= left.pop(0)
        if merged != extent:
            return False
    return all(size == 1 for size in left)
