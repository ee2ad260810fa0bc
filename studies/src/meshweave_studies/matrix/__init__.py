"""Hierarchical communication matrices (ATP, section 3.4), their files, and the device meshes that they rank.

A matrix is a view of a described cluster, or comes from a file. `meshweave tune mesh` prints it, and what
equations 2 to 4 make of it.
"""

from meshweave_studies.matrix.device_meshes import MeshBandwidth, MeshTime, mesh_bandwidth, rank_meshes
from meshweave_studies.matrix.hierarchy import (
    CommunicationMatrix,
    MatrixLayer,
    MeasuredBandwidth,
    communication_matrix,
)
from meshweave_studies.matrix.matrix_file import load_matrix

__all__ = [
    "CommunicationMatrix",
    "MatrixLayer",
    "MeasuredBandwidth",
    "MeshBandwidth",
    "MeshTime",
    "communication_matrix",
    "load_matrix",
    "mesh_bandwidth",
    "rank_meshes",
]
