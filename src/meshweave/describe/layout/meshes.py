"""The meshes of one program: equal meshes get one name, different ones different names."""

from __future__ import annotations

from dataclasses import replace

from meshweave.describe.layout.layouts import Layout
from meshweave.describe.layout.mesh import Mesh


class ProgramMeshes:
    """Names meshes `mesh`, `mesh_2`, ... in the order in which they are added, whatever they were called."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Mesh] = {}

    def add(self, mesh: Mesh) -> Mesh:
        """Return the mesh under its name here; a mesh of the same shape, axes and ranks has the same name."""
        key = mesh.shape, mesh.axes, mesh.ranks
        if key not in self._known:
            number = len(self._known) + 1
            self._known[key] = replace(mesh, name="mesh" if number == 1 else f"mesh_{number}")
        return self._known[key]

    def add_layout(self, layout: Layout) -> Layout:
        """Return the layout on its mesh as that is named here."""
        return replace(layout, mesh=self.add(layout.mesh))

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """The meshes added so far, in order."""
        return tuple(self._known.values())
