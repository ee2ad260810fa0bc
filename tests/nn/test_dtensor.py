"""DTensor placements in our words: what a rank holds is what `distribute_tensor` would give it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from layout_placements import placements_of

from meshweave.base.errors import LayoutError
from meshweave.describe.layout import Layout, Partial, Replicate, Shard, StridedShard, Tile
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program import Buffer, Program, Tensor
from meshweave.ir.program.parse import parse
from meshweave.ir.program.text import to_text
from sampling import examples

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import placement_types as theirs
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshweave.nn.dtensor import layout_of, layout_on, matrix_shape, mesh_of

WORLD = 8
MESHES = [(2, 2), (2, 3), (3, 2), (2, 2, 2)]
S, SS, R, P = theirs.Shard, theirs._StridedShard, theirs.Replicate, theirs.Partial


@pytest.fixture(scope="module", autouse=True)
def device_meshes() -> Iterator[dict[tuple[int, ...], Any]]:
    """DeviceMeshes over process groups that send nothing, in this one process."""
    assert not dist.is_initialized()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    BUILT.update(
        {shape: DeviceMesh("cpu", torch.randperm(math.prod(shape)).reshape(shape)) for shape in MESHES}
    )
    yield BUILT
    BUILT.clear()
    dist.destroy_process_group()


BUILT: dict[tuple[int, ...], Any] = {}


def placement(num_dims: int) -> st.SearchStrategy[Any]:
    dim = st.integers(0, num_dims - 1)
    strided = st.builds(lambda dim, factor: SS(dim, split_factor=factor), dim, st.integers(1, 6))
    return st.builds(S, dim) | strided | st.just(R()) | st.just(P())


@st.composite
def cases(draw: st.DrawFn, num_dims: st.SearchStrategy[int]) -> tuple[Any, tuple[Any, ...], tuple[int, ...]]:
    mesh = draw(st.sampled_from(MESHES))
    shape = draw(num_dims.flatmap(lambda count: st.tuples(*[st.integers(0, 9)] * count)))
    return BUILT[mesh], draw(st.tuples(*[placement(len(shape))] * len(mesh))), shape


def held(mesh: Any, placements: Any, shape: tuple[int, ...], rank: int, order: Any = None) -> Any:
    """The numbers that `rank` holds of arange(shape), by the functions with which DTensor cuts."""
    piece = torch.arange(math.prod(shape)).reshape(shape)
    coords = (mesh.mesh == rank).nonzero()[0].tolist()
    for axis in order if order is not None else range(len(placements)):
        cut = placements[axis]
        if isinstance(cut, (S, SS)):
            piece = cut._split_tensor(piece, mesh.size(axis), with_padding=False)[0][coords[axis]]
    return piece


def ours(layout: Layout, shape: tuple[int, ...], rank: int, side: Any = "left") -> Any:
    matrix = torch.arange(math.prod(shape)).reshape(matrix_shape(shape, side))
    rows, columns = (torch.from_numpy(i) for i in layout.indices(matrix.shape, rank))
    return matrix[rows][:, columns]


@examples(120)
@given(cases(st.integers(1, 4)), st.sampled_from(["left", "right"]))
def test_a_layout_holds_what_dtensor_cuts(case: tuple[Any, Any, tuple[int, ...]], side: Any) -> None:
    mesh, placements, shape = case
    layout = layout_on(mesh, placements, shape, side)
    assert layout is layout_on(mesh, placements, shape, side)
    assert set(layout.mesh.ranks) == set(mesh.mesh.flatten().tolist())
    for rank in layout.mesh.ranks:
        piece, matrix = held(mesh, placements, shape, rank), ours(layout, shape, rank, side)
        assert matrix.flatten().tolist() == piece.flatten().tolist()
        if len(shape) == 2:
            assert matrix.shape == piece.shape and layout.folds is None


@st.composite
def ordered(draw: st.DrawFn) -> tuple[Any, Any, tuple[int, ...], list[int], Any]:
    """Placements without strides, the axes in some order, and the shard order that this makes."""
    mesh = draw(st.sampled_from(MESHES))
    plain = st.builds(S, st.integers(0, 1)) | st.just(R()) | st.just(P())
    placements = draw(st.tuples(*[plain] * len(mesh)))
    shape = draw(st.tuples(st.integers(1, 17), st.integers(1, 17)))
    axes = draw(st.permutations(range(len(mesh))))
    order = tuple(
        ShardOrderEntry(dim, tuple(axis for axis in axes if placements[axis] == S(dim))) for dim in (0, 1)
    )
    return BUILT[mesh], placements, shape, axes, tuple(entry for entry in order if entry.mesh_dims)


def spec_of(mesh: Any, placements: Any, shape: tuple[int, ...], order: Any = None) -> Any:
    meta = TensorMeta(torch.Size(shape), torch.empty(shape).stride(), torch.float32)
    return DTensorSpec(mesh, placements, meta, shard_order=order)


@examples(120)
@given(ordered())
def test_a_shard_order_is_a_mesh_with_its_axes_in_that_order(case: tuple[Any, ...]) -> None:
    mesh, placements, shape, axes, order = case
    layout = layout_of(spec_of(mesh, placements, shape, order))
    assert layout == layout_of(spec_of(mesh, placements, shape, order))
    for rank in layout.mesh.ranks:
        assert ours(layout, shape, rank).tolist() == held(mesh, placements, shape, rank, axes).tolist()
    try:
        back = placements_of(layout, shape, mesh)
    except LayoutError as error:
        assert "cut a tensor of shape" in str(error) and any(size % 8 and size % 6 for size in shape)
        return
    for rank in layout.mesh.ranks:
        assert ours(layout, shape, rank).tolist() == held(mesh, back, shape, rank).tolist()


@examples(100)
@given(ordered(), st.integers(1, 3), st.integers(1, 3))
def test_even_shard_orders_come_back_as_strided_shards(case: tuple[Any, ...], m: int, n: int) -> None:
    mesh, placements, _, _, order = case
    shape = m * mesh.size(), n * mesh.size()
    strided = DTensorSpec._convert_shard_order_to_StridedShard(order, placements, mesh)
    layout = layout_of(spec_of(mesh, placements, shape, order))
    assert placements_of(layout, shape, mesh) == strided
    same = layout_of(spec_of(mesh, strided, shape))
    for rank in layout.mesh.ranks:
        assert layout.local_shape(shape, rank) == same.local_shape(shape, rank)
        assert ours(layout, shape, rank).tolist() == ours(same, shape, rank).tolist()


@examples(80)
@given(cases(st.integers(1, 4)))
def test_placements_come_back(case: tuple[Any, Any, tuple[int, ...]]) -> None:
    mesh, placements, shape = case
    layout = layout_on(mesh, placements, shape)
    assert placements_of(layout, matrix_shape(shape)) == placements
    assert placements_of(layout, matrix_shape(shape), mesh) == placements


@examples(60)
@given(st.integers(0, 20), st.integers(1, 4), st.integers(1, 8), st.integers(0, 7))
def test_a_tile_is_a_shard_where_it_holds_the_same(size: int, parts: int, tile: int, offset: int) -> None:
    assume(offset < tile)
    mesh = Mesh.of("m", (parts,), ("x",))
    tiled, shard = Layout(mesh, (Tile(0, tile, offset),)), Layout(mesh, (Shard(0),))
    same = all(
        tiled.indices((size,), r)[0].tolist() == shard.indices((size,), r)[0].tolist() for r in mesh.ranks
    )
    if same:
        assert placements_of(tiled, (size,)) == (S(0),)
    else:
        with pytest.raises(LayoutError, match=rf"axis x: T\(0, {tile}, {offset}\) .* is no Shard"):
            placements_of(tiled, (size,))


def test_strided_shards_that_torch_itself_reads_two_ways_are_refused() -> None:
    mesh = BUILT[3, 2]
    strided = (SS(0, split_factor=2), S(0))
    for even in (6, 12, 11):
        layout = layout_of(spec_of(mesh, strided, (even, 3)))
        assert layout.placements == (StridedShard(0, 2), Shard(0))
    with pytest.raises(LayoutError, match="do not say which rank holds what"):
        layout_of(spec_of(mesh, strided, (7, 3)))
    undecodable = (SS(0, split_factor=4), R())
    assert layout_of(spec_of(mesh, undecodable, (7, 3))).placements == (StridedShard(0, 4), Replicate())


def test_a_dtensor_itself_in_every_rank() -> None:
    """`distribute_tensor` in turn as each rank of a world, on fake groups that send nothing."""
    cuts = [
        [S(0), S(0)],
        [S(1), S(0)],
        [R(), S(1)],
        [SS(0, split_factor=2), S(1)],
        [SS(1, split_factor=3), R()],
    ]
    data = torch.arange(7 * 5).reshape(7, 5)
    dist.destroy_process_group()
    try:
        for rank in range(6):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=6)
            mesh = dist.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
            for placements in cuts:
                tensor = distribute_tensor(data, mesh, placements, src_data_rank=None)
                assert isinstance(tensor, DTensor)
                layout = layout_of(tensor)
                assert layout.mesh == Mesh.of("dp2_tp3", (2, 3), ("dp", "tp"))
                assert ours(layout, (7, 5), rank).tolist() == tensor.to_local().tolist()
            dist.destroy_process_group()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)


def test_activations_and_vectors_are_matrices() -> None:
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("dp", "tp"))
    spec = spec_of(mesh, (S(0), S(2)), (4, 6, 8))
    layout = layout_of(spec)
    assert layout == layout_on(mesh, (S(-3), S(-1)), (4, 6, 8))
    assert str(layout) == "fold(dp2_tp2[S(0), S(2)], (4, 6), (8,))"
    assert layout.intervals(matrix_shape(spec.shape), 3) == (((12, 24),), ((4, 8),))
    vector = spec_of(mesh, (S(0), R()), (6,))
    assert layout_of(vector).intervals((1, 6), 2) == (((0, 1),), ((3, 6),))
    assert layout_of(vector, "right").intervals((6, 1), 2) == (((3, 6),), ((0, 1),))
    assert layout_of(spec_of(mesh, (P(), S(1)), (4, 6))).placements == (Partial(), Shard(1))
    assert matrix_shape((2, 3, 4, 5)) == (24, 5) and matrix_shape((5,), "right") == (5, 1)


def test_meshes_are_equal_where_the_ranks_are_and_named_apart_where_not() -> None:
    grid = torch.arange(4).reshape(2, 2)
    one, two = (DeviceMesh("cpu", grid, mesh_dim_names=("dp", "tp")) for _ in range(2))
    assert one is not two and mesh_of(one) == mesh_of(two) and hash(mesh_of(one)) == hash(mesh_of(two))
    assert mesh_of(one) is mesh_of(one)
    assert mesh_of(DeviceMesh("cpu", grid)).axes == ("row", "col")
    assert mesh_of(DeviceMesh("cpu", torch.arange(8).reshape(2, 2, 2, 1))).axes == (
        "row",
        "col",
        "depth",
        "d3",
    )
    odd = DeviceMesh("cpu", grid, mesh_dim_names=("dp-shard", "in"))
    assert mesh_of(odd) == mesh_of(DeviceMesh("cpu", grid))
    meshes = [
        mesh_of(DeviceMesh("cpu", t, mesh_dim_names=("dp", "tp")))
        for t in (grid, grid + 4, grid.T, grid.flip(0), grid.reshape(4, 1))
    ]
    order = (ShardOrderEntry(0, (1, 0)),)
    meshes.append(layout_of(spec_of(one, (S(0), S(0)), (8, 8), order)).mesh)
    assert [mesh.name for mesh in meshes[:2]] == ["dp2_tp2", "dp2_tp2_at4"]
    assert len({mesh.name for mesh in meshes}) == len(set(meshes)) == len(meshes)
    assert meshes[-1].shape == (2, 2) and meshes[-1].axes == ("tp", "dp")
    layouts = [Layout(mesh, (Shard(0), Shard(1)), ((4, 2), (3,))) for mesh in meshes]
    program = Program(
        "p",
        tuple(meshes),
        (Tensor("A", (8, 3), "float32"),),
        tuple(Buffer(f"a{i}", "input", x.mesh.name, "float32", "A", x) for i, x in enumerate(layouts)),
        (),
        (),
    )
    assert parse(to_text(program)) == program


def test_what_has_no_counterpart_is_refused_by_axis() -> None:
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("dp", "tp"))
    refused = [P("max"), P("avg"), theirs._MaskPartial("sum"), _NormPartial(2), type("Ragged", (S,), {})(0)]
    for placement in refused:
        with pytest.raises(LayoutError, match=r"mesh axis tp: placement .* has no counterpart"):
            layout_on(mesh, (S(0), placement), (4, 4))
    with pytest.raises(LayoutError, match=r"mesh axis dp: .* names dim -?\d+ of a tensor of 2 dims"):
        layout_on(mesh, (S(2), R()), (4, 4))
    with pytest.raises(LayoutError, match="1 placements for the 2 dims"):
        layout_on(mesh, (S(0),), (4, 4))
    with pytest.raises(LayoutError, match="without dims"):
        layout_on(mesh, (R(), R()), ())
    with pytest.raises(LayoutError, match="'left' or 'right', not 'top'"):
        layout_on(mesh, (R(), R()), (4, 4), "top")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="do not all shard tensor dim 0"):
        layout_on(mesh, (S(0), S(1)), (4, 4), shard_order=((0, (1, 0)),))
    with pytest.raises(LayoutError, match="no tensor_meta"):
        layout_of(DTensorSpec(mesh, (R(), R())))
    other = Layout(Mesh.of("m", (2, 2), ("x", "y")), (Shard(0), Replicate()))
    with pytest.raises(LayoutError, match="is not mesh dp2_tp2 with axes dp, tp in any order"):
        placements_of(other, (4, 4), mesh)


def test_an_order_without_placements_names_its_axes() -> None:
    mesh = BUILT[3, 2]
    layout = layout_of(spec_of(mesh, (S(0), S(0)), (7, 3), (ShardOrderEntry(0, (1, 0)),)))
    with pytest.raises(LayoutError, match=r"axes row cut a tensor of shape \(7, 3\)"):
        placements_of(layout, (7, 3), mesh)
    assert placements_of(layout, (7, 3)) == (S(0), S(0))
