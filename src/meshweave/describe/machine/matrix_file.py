"""Files of hierarchical communication matrices: layers without a cluster, and measured bandwidths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from meshweave.base.errors import DescriptionError
from meshweave.describe.files import (
    Count,
    FileModel,
    Name,
    Rate,
    check_table,
    fail,
    is_path,
    load_table,
)
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.hierarchy import (
    CommunicationMatrix,
    MatrixLayer,
    MeasuredBandwidth,
    communication_matrix,
)


class LayerTable(FileModel):
    """One layer of a matrix, the outermost first."""

    name: Name = Field(description="what joins the ranks of the layer, a string of printable characters")
    size: Count | None = Field(
        None, description="the number of ranks of the layer, at least 1 (left out: that of the lists below)"
    )
    p2p_bytes_per_s: Rate | list[list[float]] = Field(
        description="bytes per second between two ranks, a number for all pairs or a matrix of numbers"
    )
    group_bytes_per_s: Rate | list[Rate] = Field(
        description="bytes per second of a rank to all others, a number for all ranks or a list of numbers"
    )
    flow_bytes_per_s: Rate | None = Field(
        None, description="the most that one ring carries across the layer (left out: no limit)"
    )

    def layer(self) -> MatrixLayer:
        """Return the layer that this table describes. Raises DescriptionError if its values do not fit."""
        p2p, group = self.p2p_bytes_per_s, self.group_bytes_per_s
        sizes = {len(given) for given in (p2p, group) if isinstance(given, list)}
        sizes |= {self.size} if self.size else set()
        if len(sizes) != 1 or (size := sizes.pop()) > 4096:
            raise DescriptionError(
                f"layer {self.name}: give a size of at most 4096, or lists of numbers of one size"
            )
        if not isinstance(p2p, list):
            p2p = [[p2p if i != j else 0.0 for j in range(size)] for i in range(size)]
        groups = group if isinstance(group, list) else [group] * size
        rows = tuple(tuple(int(rate) for rate in row) for row in p2p)
        return MatrixLayer(self.name, rows, tuple(map(int, groups)), int(self.flow_bytes_per_s or 0))


class MeasuredTable(FileModel):
    """All-reduce bandwidths that were measured on a device mesh: bytes of the reduced tensor per second."""

    mesh: list[Count] = Field(
        description="a list of two sizes, d1 and d2 of the mesh", min_length=2, max_length=2
    )
    first_bytes_per_s: Rate | None = Field(
        None, description="along the first dimension (left out: it has 1 device)"
    )
    second_bytes_per_s: Rate | None = Field(
        None, description="along the second dimension (left out: it has 1 device)"
    )

    def bandwidth(self) -> MeasuredBandwidth:
        """Return what was measured. Raises DescriptionError where a dimension lacks its bandwidth."""
        first, second = self.first_bytes_per_s, self.second_bytes_per_s
        for size, given, name in (
            (self.mesh[0], first, "first_bytes_per_s"),
            (self.mesh[1], second, "second_bytes_per_s"),
        ):
            if (size > 1) != (given is not None):
                raise DescriptionError(
                    f"measured mesh {tuple(self.mesh)}: give {name} where that dimension has more than 1 device, "
                    "and only there"
                )
        return MeasuredBandwidth((self.mesh[0], self.mesh[1]), first and int(first), second and int(second))


class MatrixFile(FileModel):
    """A matrix by its layers, or a cluster whose network it is a view of, and what was measured."""

    name: Name = Field(description="the matrix's name, a string of printable characters")
    source: str = Field(description="where the numbers are from, a string", min_length=1)
    cluster: Name | None = Field(
        None, description="a cluster of the catalog or its file, of which this is a view (left out: layers)"
    )
    layers: list[LayerTable] = Field(
        default_factory=list,
        description="a list of tables, one per layer, the outermost first",
        max_length=16,
    )
    measured: list[MeasuredTable] = Field(
        default_factory=list, description="a list of tables of measured bandwidths, one per mesh"
    )


def load_machine(name_or_path: str | Path) -> tuple[CommunicationMatrix | Cluster, CommunicationMatrix]:
    """Return what a name stands for, and its matrix: a cluster and the view of it, or a matrix twice.

    A name is one of the catalog, or a file: that of a cluster if it has `network`, else that of a matrix.

    Raises:
        DescriptionError: there is no such entry or file, or it is wrong.
    """
    if is_path(str(name_or_path)) and "network" not in (data := load_table(name_or_path)):
        matrix = _matrix_from(data, name_or_path)
        return matrix, matrix
    cluster = load_cluster(name_or_path)
    return cluster, communication_matrix(cluster)


def load_matrix(name_or_path: str | Path) -> CommunicationMatrix:
    """Return the matrix of a file, or the view of a cluster; see `load_machine`."""
    return load_machine(name_or_path)[1]


def _matrix_from(data: dict[str, Any], file: str | Path) -> CommunicationMatrix:
    table = check_table(MatrixFile, data, file)
    if (table.cluster is None) == (not table.layers):
        fail(file, "layers", "give either layers or a cluster")
    try:
        measured = tuple(entry.bandwidth() for entry in table.measured)
        if table.cluster is not None:
            return communication_matrix(load_cluster(table.cluster)).with_measured(measured)
        return CommunicationMatrix(table.name, tuple(entry.layer() for entry in table.layers), measured)
    except DescriptionError as error:
        fail(file, "", str(error))
