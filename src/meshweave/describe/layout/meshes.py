"""The meshes of one program: equal ones under one name, different ones under different names."""

from __future__ import annotations

from dataclasses import replace

from meshweave.describe.layout.layouts import Layout
from meshweave.describe.layout.mesh import Mesh


class ProgramMeshes:
    """Gives meshes names of its own, in the order in which they are added; what they were called does not
    count."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Mesh] = {}

    def add(self, mesh: Mesh) -> Mesh:
        key = mesh.shape, mesh.axes, mesh.ranks
        if key not in self._known:
            number = len(self._known) + 1
            self._known[key] = replace(mesh, name="mesh" if number == 1 else f"mesh_{number}")
        return self._known[key]

    def add_layout(self, layout: Layout) -> Layout:
        """The layout on the mesh as it is named here."""
        return replace(layout, mesh=self.add(layout.mesh))

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        return tuple(self._known.values())
