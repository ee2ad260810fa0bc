"""The jax mesh that a program runs on, and what its meshes, axes and groups are there.

Its axes are those of the first mesh of the program that has all ranks; device number i, row-major, is that mesh's
rank number i. An axis of another mesh is an axis, or several, of this one where groups and order agree; what is
not, is a list of groups.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations

from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Over


def quoted(names: str | Sequence[str]) -> str:
    """Return Python source of a string literal, or of a tuple of them: "tp" -> '"tp"', ["tp"] -> '("tp",)'."""
    if isinstance(names, str):
        return json.dumps(names)
    return f"({', '.join(map(quoted, names))}{',' if len(names) == 1 else ''})"


@dataclass(frozen=True)
class DeviceGroup:
    """The groups of devices in which a collective runs.

    Attributes:
        axes: the jax mesh axes along which a group's members differ; () for groups of one device.
        size: the number of devices in each group.
        groups: the device numbers of each group, where the groups are not those of mesh axes; `axes` are then all
            axes of the mesh. None where `axes` define the groups.
    """

    axes: tuple[str, ...]
    size: int
    groups: tuple[tuple[int, ...], ...] | None = None

    @property
    def text(self) -> str:
        """Return Python source of `axes` as `jax.lax` takes them: one name, or a tuple of names."""
        return quoted(self.axes[0] if len(self.axes) == 1 else self.axes)


class DeviceMesh:
    """The jax mesh of a program: the first mesh of the program that has all ranks.

    Args:
        names: one name for each axis of the jax mesh; by default those of the program's mesh.

    Attributes:
        mesh: the mesh of the program that became the jax mesh.
        axes: the names of the axes of the jax mesh.
        sizes: the size of each axis by its name in `axes`.

    Raises:
        UnsupportedError: no mesh of the program has all ranks.
        LayoutError: there are more or fewer names than axes.
    """

    def __init__(self, program: Program, names: Sequence[str] | None = None) -> None:
        self.program = program
        whole = (mesh for mesh in program.meshes if mesh.num_ranks == len(program.ranks))
        mesh = next(whole, None)
        if mesh is None:
            raise UnsupportedError(
                f"no mesh of program {program.name} has all of its {len(program.ranks)} ranks"
            )
        self.mesh: Mesh = mesh
        self.axes = tuple(names or mesh.axes)
        if len(self.axes) != len(mesh.shape):
            raise LayoutError(f"mesh {mesh.name} has {len(mesh.shape)} axes, and {len(self.axes)} are named")
        self.sizes = dict(zip(self.axes, mesh.shape, strict=True))
        self._number = {rank: number for number, rank in enumerate(mesh.ranks)}

    def number(self, rank: int) -> int:
        """Return the device number of a global rank: its row-major index in the jax mesh."""
        return self._number[rank]

    def coordinate(self, rank: int, axis: str) -> int:
        """Return the coordinate of a global rank's device along an axis of the jax mesh, given by its name."""
        return self._coordinates[rank][axis]

    @cached_property
    def _coordinates(self) -> dict[int, dict[str, int]]:
        return {r: dict(zip(self.axes, self.mesh.coords(r), strict=True)) for r in self.mesh.ranks}

    def index_along(self, rank: int, axes: Sequence[str]) -> int:
        """Return the row-major index of a rank's device along jax `axes`, the first of which varies slowest."""
        index = 0
        for axis in axes:
            index = index * self.sizes[axis] + self.coordinate(rank, axis)
        return index

    def members(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the global ranks that share the coordinates of `rank` on all jax axes but `axes`.

        They are sorted by `index_along(rank, axes)`: the first of `axes` varies slowest.
        """
        fixed = [axis for axis in self.axes if axis not in axes]
        same = (
            other
            for other in self.mesh.ranks
            if all(self.coordinate(other, axis) == self.coordinate(rank, axis) for axis in fixed)
        )
        return tuple(sorted(same, key=lambda other: self.index_along(other, axes)))

    @cached_property
    def _axes_of(self) -> dict[str, tuple[str, ...] | None]:
        return {}

    def axes_of(self, over: str) -> tuple[str, ...] | None:
        """Return the jax axes that group the ranks as a program's mesh axis ("tp.row") or mesh ("tp") does.

        The first varies slowest, and axes of size 1 are left out. Return None where no jax axes give these groups
        with their members in the same order.
        """
        if over not in self._axes_of:
            mesh = self.program.mesh_of[over.partition(".")[0]]
            groups = {rank: self.program.group(over, rank) for rank in mesh.ranks}
            self._axes_of[over] = self._axes_with(groups)
        return self._axes_of[over]

    def _axes_with(self, groups: dict[int, tuple[int, ...]]) -> tuple[str, ...] | None:
        count = len(next(iter(groups.values())))
        wide = [axis for axis, size in self.sizes.items() if size > 1]
        for number in range(len(wide) + 1):
            for axes in permutations(wide, number):
                if math.prod(self.sizes[axis] for axis in axes) == count and all(
                    self.members(rank, axes) == group for rank, group in groups.items()
                ):
                    return axes
        return None

    def axes_of_coordinate(self, name: str) -> tuple[str, ...] | None:
        """Return the jax axes, slowest first, whose row-major index on a device equals a program's coordinate.

        `name` is a coordinate ("tp.row") or "rank". Return None where no jax axes give that coordinate.
        """
        if name == "rank":
            is_number = self.mesh.ranks == tuple(range(len(self.mesh.ranks)))
            return tuple(axis for axis, size in self.sizes.items() if size > 1) if is_number else None
        return self.axes_of(name)

    def group(self, over: Over) -> DeviceGroup:
        """Return the groups of devices in which a collective of the program runs.

        Args:
            over: a mesh ("tp"), an axis of one ("tp.row"), or the global ranks of one group. Ranks that are in no
                group are put into further groups of the same size, since jax wants every device in one.

        Raises UnsupportedError where that size does not divide the number of these ranks.
        """
        if isinstance(over, str):
            axes = self.axes_of(over)
            mesh = self.program.mesh_of[over.partition(".")[0]]
            if axes is not None:
                return DeviceGroup(axes, math.prod(self.sizes[axis] for axis in axes))
            return self.group_of(tuple(dict.fromkeys(self.program.group(over, rank) for rank in mesh.ranks)))
        return self.group_of((over,))

    def group_of(self, groups: Sequence[tuple[int, ...]]) -> DeviceGroup:
        """Return the groups of devices of a collective that runs in `groups` of global ranks, all of one size.

        Ranks that are in no group are put into further groups of this size. Raises UnsupportedError where the
        size does not divide the number of these ranks.
        """
        listed = list(groups)
        size = len(listed[0])
        by_rank = {rank: group for group in listed for rank in group}
        axes = self._axes_with(by_rank) if len(by_rank) == len(self.mesh.ranks) else None
        if axes is not None:
            return DeviceGroup(axes, size)
        covered = {rank for group in listed for rank in group}
        rest = [rank for rank in self.mesh.ranks if rank not in covered]
        if len(rest) % size:
            raise UnsupportedError(
                f"{len(rest)} devices are in no group of a collective, and groups of {size} do not divide them"
            )
        listed += [tuple(rest[at : at + size]) for at in range(0, len(rest), size)]
        numbers = tuple(tuple(self.number(rank) for rank in group) for group in listed)
        return DeviceGroup(self.axes, size, numbers)
