"""Logical device meshes.

A mesh names an array of ranks and its axes, as `torch.distributed.DeviceMesh` does. In a 2D mesh, axis 0 is
`row` and axis 1 is `col`. A group "of axis a" is the set of ranks that differ in coordinate a only: the
group of axis `row` is one mesh *column*, and communication in it runs between rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from meshweave.base.errors import LayoutError, printable, require_whole
from meshweave.base.limits import MESH_RANKS


@lru_cache(maxsize=64)
def _consecutive(first: int, count: int) -> tuple[int, ...]:
    """Return `count` ranks from `first`; cached, because a search lays hundreds of meshes over the same ranks."""
    return tuple(range(first, first + count))


def _wholes(values: object, what: str) -> tuple[int, ...]:
    """Return a tuple or list of whole numbers as a tuple of ints. Raises LayoutError for all else."""
    if type(values) is tuple and all(type(value) is int for value in values):
        return values
    if isinstance(values, tuple | list):
        return tuple(require_whole(value, f"an entry of {what}", LayoutError) for value in values)
    raise LayoutError(f"{what} is {printable(repr(values))}; give whole numbers")


@dataclass(frozen=True)
class Mesh:
    """A named array of global ranks.

    `shape` and `axes` have one entry per mesh axis; `ranks` lists the global ranks in row-major order
    (the last axis varies fastest).

    Raises:
        LayoutError: the three do not agree, a size is below 1, a rank is negative, a rank or axis name repeats, or
            a name is no text.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        names: object = self.axes
        if not isinstance(names, tuple | list) or not all(
            isinstance(name, str) for name in (self.name, *names)
        ):
            raise LayoutError(
                f"mesh {printable(repr(self.name))}: axes {printable(repr(names))} are no names"
            )
        object.__setattr__(self, "axes", tuple(names))
        object.__setattr__(self, "shape", _wholes(self.shape, f"mesh {self.name}: shape"))
        if not self._is_consecutive():
            object.__setattr__(self, "ranks", _wholes(self.ranks, f"mesh {self.name}: ranks"))
        if len(self.shape) != len(self.axes):
            raise LayoutError(f"mesh {self.name}: {len(self.shape)} sizes for {len(self.axes)} axes")
        if len(set(self.axes)) != len(self.axes):
            raise LayoutError(f"mesh {self.name}: axis names {self.axes} repeat")
        if any(size < 1 for size in self.shape):
            raise LayoutError(f"mesh {self.name}: every axis needs a size of at least 1, not {self.shape}")
        count = math.prod(self.shape)
        if len(self.ranks) != count or not (self._is_consecutive() or len(set(self.ranks)) == count):
            raise LayoutError(f"mesh {self.name}: {self.shape} needs {count} different ranks")
        if self.ranks[0] < 0 or (not self._is_consecutive() and min(self.ranks) < 0):
            raise LayoutError(f"mesh {self.name}: a rank is negative")

    def _is_consecutive(self) -> bool:
        """Return whether `ranks` is the cached tuple of consecutive ints, which needs no look at each of them."""
        ranks = self.ranks
        return bool(ranks) and type(ranks[0]) is int and ranks is _consecutive(ranks[0], len(ranks))

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], axes: tuple[str, ...], first_rank: int = 0) -> Mesh:
        """Return the mesh over consecutive ranks from `first_rank`.

        Raises:
            LayoutError: `shape` and `axes` do not agree, a size is below 1, an axis name repeats, or there are
                more ranks than `base.limits.MESH_RANKS`.
        """
        shape = _wholes(shape, f"mesh {printable(name)}: shape")
        (first_rank,) = _wholes((first_rank,), f"mesh {printable(name)}: the first rank")
        count = math.prod(shape)
        if count > MESH_RANKS.most:
            raise LayoutError(f"mesh {printable(name)}: {shape} {MESH_RANKS.refusal(count)}")
        return cls(name, shape, axes, _consecutive(first_rank, count))

    def __hash__(self) -> int:
        return hash((self.name, self.shape, self.axes, self.ranks[0], self.ranks[-1]))  # not of all ranks

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of the mesh: the product of its sizes."""
        return len(self.ranks)

    @cached_property
    def _index(self) -> Mapping[int, int] | range:
        """Return the position of each rank in `ranks`; for consecutive ranks their range."""
        first = self.ranks[0]
        if self.ranks == _consecutive(first, len(self.ranks)):
            return range(first, first + len(self.ranks))
        return {rank: index for index, rank in enumerate(self.ranks)}

    def __contains__(self, rank: int) -> bool:
        return rank in self._index

    def axis(self, name: str) -> int:
        """Return the position of the axis called `name`. Raises LayoutError if there is none."""
        if name not in self.axes:
            raise LayoutError(f"mesh {self.name} has axes {', '.join(self.axes)}, not '{name}'")
        return self.axes.index(name)

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis. Raises LayoutError if there is no such axis."""
        return self.shape[self.axis(axis)]

    def coords(self, rank: int) -> tuple[int, ...]:
        """Return the mesh coordinates of a global rank. Raises KeyError for a rank that is not in the mesh."""
        positions = self._index
        if rank not in positions:
            raise KeyError(rank)
        index = rank - positions.start if isinstance(positions, range) else positions[rank]
        out = []
        for size in reversed(self.shape):
            index, coordinate = divmod(index, size)
            out.append(coordinate)
        return tuple(reversed(out))

    def rank_at(self, coords: tuple[int, ...]) -> int:
        """Return the global rank at mesh coordinates; each coordinate wraps around its axis."""
        index = 0
        for coordinate, size in zip(coords, self.shape, strict=True):
            index = index * size + coordinate % size
        return self.ranks[index]

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return the global ranks that differ from `rank` in coordinate `axis` only, ordered by it.

        Raises:
            LayoutError: there is no such axis.
            KeyError: `rank` is not in the mesh.
        """
        position = self.axis(axis)
        stride = math.prod(self.shape[position + 1 :])
        coords = self.coords(rank)
        first = self._index.index(rank) if isinstance(self._index, range) else self._index[rank]
        first -= coords[position] * stride
        return self.ranks[first : first + stride * self.shape[position] : stride]

    def groups(self, axis: str) -> Iterator[tuple[int, ...]]:
        """Yield every group of `axis` once: its global ranks in the order of that coordinate.

        Raises LayoutError if there is no such axis.
        """
        position = self.axis(axis)
        stride = math.prod(self.shape[position + 1 :])
        length = stride * self.shape[position]
        for block in range(0, self.num_ranks, length):
            for first in range(block, block + stride):
                yield self.ranks[first : first + length : stride]
