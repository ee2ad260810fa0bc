"""Files of hierarchical communication matrices: layers without a cluster, and measured bandwidths."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from meshweave.base.errors import DescriptionError
from meshweave.describe.files import (
    Count,
    FileModel,
    Name,
    Rate,
    check_table,
    fail,
    load_table,
)
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave_studies.matrix.hierarchy import (
    MOST_MEMBERS,
    CommunicationMatrix,
    GivenPairs,
    MatrixLayer,
    MeasuredBandwidth,
    UniformPairs,
    communication_matrix,
)

PairRate = Annotated[float, Field(ge=0.0, le=1e24, allow_inf_nan=False)]


class LayerTable(FileModel):
    """One layer of a matrix, the outermost first.

    Pairs and groups have one rate for all, with `size`, or a rate each.
    """

    name: Name = Field(description="what joins the members of the layer, a string of printable characters")
    size: Count | None = Field(
        None, description="the number of members of the layer, at least 1 (left out: that of a list below)"
    )
    p2p_bytes_per_s: PairRate | None = Field(
        None, description="bytes per second between any two members, a number of at least 0"
    )
    p2p_matrix_bytes_per_s: list[list[PairRate]] | None = Field(
        None, description="the same from each member to each, a list of lists of numbers of at least 0"
    )
    group_bytes_per_s: Rate | None = Field(
        None, description="bytes per second of each member to all others, a number of at least 1"
    )
    group_list_bytes_per_s: list[Rate] | None = Field(
        None, description="the same of each member, a list of numbers of at least 1"
    )
    flow_bytes_per_s: Rate | None = Field(
        None, description="the most that one ring carries across the layer (left out: no limit)"
    )

    def layer(self) -> MatrixLayer:
        """Return the layer that this table describes. Raises DescriptionError if its values do not fit."""
        rows, groups = self.p2p_matrix_bytes_per_s, self.group_list_bytes_per_s
        for one, many, key in (
            (self.p2p_bytes_per_s, rows, "p2p_bytes_per_s or p2p_matrix_bytes_per_s"),
            (self.group_bytes_per_s, groups, "group_bytes_per_s or group_list_bytes_per_s"),
        ):
            if (one is None) == (many is None):
                raise DescriptionError(f"layer {self.name}: give either {key}")
        sizes = {len(given) for given in (rows, groups) if given is not None}
        sizes |= {self.size} if self.size else set()
        if len(sizes) != 1 or (size := sizes.pop()) > MOST_MEMBERS:
            raise DescriptionError(
                f"layer {self.name}: give a size of at most {MOST_MEMBERS}, or lists of numbers of one size"
            )
        pairs: UniformPairs | GivenPairs = UniformPairs(size, int(self.p2p_bytes_per_s or 0))
        if rows is not None:
            try:
                pairs = GivenPairs(tuple(tuple(int(rate) for rate in row) for row in rows))
            except DescriptionError as error:
                raise DescriptionError(f"layer {self.name}: {error}") from None
        group = int(self.group_bytes_per_s or 0)
        of_groups = (group,) * size if groups is None else tuple(map(int, groups))
        return MatrixLayer(self.name, pairs, of_groups, int(self.flow_bytes_per_s or 0))


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
        rates = (None if rate is None else int(rate) for rate in (first, second))
        return MeasuredBandwidth((self.mesh[0], self.mesh[1]), *rates)


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


def load_cluster_or_matrix(
    name_or_path: str | Path,
) -> tuple[CommunicationMatrix | Cluster, CommunicationMatrix]:
    """Return what a name stands for, and its matrix: a cluster and the view of it, or a matrix twice.

    A name is one of the catalog, or a file: that of a cluster if it has `network`, else that of a matrix. The file
    of a matrix may name a cluster: then the matrix is the view of that, with what the file has as measured.

    Raises:
        DescriptionError: there is no such entry or file, or it is wrong.
    """
    exists = os.path.exists(name_or_path)  # noqa: PTH110  (unlike Path's, never raises)
    if exists and "network" not in (data := load_table(name_or_path)):
        return _from_matrix_file(data, name_or_path)
    cluster = load_cluster(name_or_path)
    return cluster, communication_matrix(cluster)


def load_matrix(name_or_path: str | Path) -> CommunicationMatrix:
    """Return the matrix of a file, or the view of a cluster; see `load_cluster_or_matrix`."""
    return load_cluster_or_matrix(name_or_path)[1]


def _from_matrix_file(
    data: dict[str, Any], file: str | Path
) -> tuple[CommunicationMatrix | Cluster, CommunicationMatrix]:
    table = check_table(MatrixFile, data, file)
    if (table.cluster is None) == (not table.layers):
        fail(file, "layers", "give either layers or a cluster")
    try:
        measured = tuple(entry.bandwidth() for entry in table.measured)
        if table.cluster is not None:
            cluster = load_cluster(table.cluster)
            return cluster, replace(communication_matrix(cluster), name=table.name, measured=measured)
        matrix = CommunicationMatrix(table.name, tuple(entry.layer() for entry in table.layers), measured)
        return matrix, matrix
    except DescriptionError as error:
        fail(file, "", str(error))
