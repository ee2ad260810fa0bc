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
        """Add a mesh and return it under its new name. Meshes of equal shape, axes and ranks share one name."""
        key = mesh.shape, mesh.axes, mesh.ranks
        if key not in self._known:
            number = len(self._known) + 1
            self._known[key] = replace(mesh, name="mesh" if number == 1 else f"mesh_{number}")
        return self._known[key]

    def add_layout(self, layout: Layout) -> Layout:
        """Add the mesh of a layout and return the layout on the mesh under its new name."""
        return replace(layout, mesh=self.add(layout.mesh))

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """Return the meshes added so far, in order."""
        return tuple(self._known.values())
