"""Meshes and layouts take values of their own kinds, and refuse others by name, such as torch's placements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch.distributed.tensor as torch_tensor
from torch.distributed.tensor import placement_types

from meshweave.base.errors import LayoutError
from meshweave.describe.layout import Layout, Partial, Replicate, Shard, StridedShard, Tile
from meshweave.describe.layout.mesh import Mesh

MESH = Mesh.of("m", (2,), ("x",))
TORCH = [
    torch_tensor.Shard(0), torch_tensor.Replicate(), torch_tensor.Partial(), placement_types.Placement(),
]  # fmt: skip
NO_NUMBERS: list[Any] = [0.0, True, None, "0", [0], float("nan"), 1j, np.float64(1), Shard]


@pytest.mark.parametrize(
    "other",
    [*TORCH, "S(0)", "R", "", None, 0, Shard, Replicate, object(), (Shard(0),)],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_placement_is_refused(other: Any) -> None:
    """Each was taken for `Replicate`."""
    with pytest.raises(LayoutError, match="no placement of meshweave"):
        Layout(MESH, (other,))
    with pytest.raises(LayoutError, match="no placement of meshweave"):
        Layout(Mesh.of("m", (2, 2), ("x", "y")), [Shard(0), other])  # type: ignore[arg-type]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: type(value).__name__)
def test_a_number_of_a_placement_is_whole(value: Any) -> None:
    for make in (
        lambda: Shard(value),
        lambda: Tile(0, value),
        lambda: Tile(value, 2),
        lambda: Tile(0, 2, value),
        lambda: StridedShard(0, value),
        lambda: Layout(MESH, (Shard(0),), ((2, value), (4,))),
    ):
        with pytest.raises(LayoutError, match="whole number"):
            make()


@pytest.mark.parametrize("value", [*NO_NUMBERS, -1], ids=lambda value: type(value).__name__)
def test_ranks_and_sizes_of_a_mesh_are_whole_and_not_negative(value: Any) -> None:
    for make in (
        lambda: Mesh("m", (2,), ("x",), (value, 5)),
        lambda: Mesh("m", (value, 2), ("x", "y"), (0, 1)),
        lambda: Mesh.of("m", (value, 2), ("x", "y")),
        lambda: Mesh.of("m", (2,), ("x",), value),
    ):
        with pytest.raises(LayoutError):
            make()


def test_names_of_a_mesh_are_text() -> None:
    for name, axes in ((3, ("x",)), ("m", (0,)), ("m", "x"), (None, ("x",)), ("m", None)):
        with pytest.raises(LayoutError, match="no names"):
            Mesh(name, (2,), axes, (0, 1))  # type: ignore[arg-type]


def test_a_reduction_is_one_that_programs_have() -> None:
    for op in ("mean", "avg", "", 3, None):
        with pytest.raises(LayoutError, match="no reduction"):
            Partial(op)  # type: ignore[arg-type]


def test_lists_and_numbers_of_numpy_are_taken_as_tuples_and_ints() -> None:
    mesh = Mesh("m", [np.int64(2)], ["x"], [np.int32(3), 4])  # type: ignore[arg-type]
    assert mesh == Mesh("m", (2,), ("x",), (3, 4)) and hash(mesh) == hash(Mesh("m", (2,), ("x",), (3, 4)))
    layout = Layout(mesh, [Shard(np.int64(1))])  # type: ignore[arg-type]
    assert layout == Layout(mesh, (Shard(1),)) and layout.local_shape((6, 4), 3) == (6, 2)
    assert all(type(value) is int for value in (*mesh.shape, *mesh.ranks))
