"""Layouts and meshes: the chunk rule, block-cyclic tiles, and agreement with PyTorch where it is there."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.base.errors import LayoutError
from meshweave.describe.layout import Layout, Partial, Placement, Replicate, Shard, Tile, chunk_bounds
from meshweave.describe.layout.mesh import Mesh
from sampling import examples


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple))
    ranks = draw(st.permutations(range(5, 5 + math.prod(shape))))
    return Mesh("m", shape, ("a", "b", "c")[: len(shape)], tuple(ranks))


tiles = st.integers(1, 6).flatmap(
    lambda size: st.builds(Tile, st.integers(0, 1), st.just(size), st.integers(0, size - 1))
)
placements: st.SearchStrategy[Placement] = st.one_of(
    st.builds(Shard, st.integers(0, 1)), tiles, st.just(Replicate()), st.just(Partial())
)


@st.composite
def layouts(draw: st.DrawFn, kinds: st.SearchStrategy[Placement] = placements) -> Layout:
    mesh = draw(meshes())
    return Layout(mesh, draw(st.tuples(*[kinds] * len(mesh.shape))))


shapes = st.tuples(st.integers(0, 13), st.integers(0, 13))


@examples(150)
@given(st.integers(0, 60), st.integers(1, 12))
def test_chunk_rule(size: int, parts: int) -> None:
    cuts = [chunk_bounds(size, parts, index) for index in range(parts)]
    assert cuts[0][0] == 0 and cuts[-1][1] == size
    assert all(before[1] == after[0] for before, after in itertools.pairwise(cuts))
    lengths = [stop - start for start, stop in cuts]
    assert lengths == sorted(lengths, reverse=True)
    assert all(
        length in (0, lengths[0]) or i == sum(map(bool, lengths)) - 1 for i, length in enumerate(lengths)
    )


@examples(50)
@given(st.integers(1, 60), st.integers(1, 12))
def test_chunk_rule_is_that_of_torch(size: int, parts: int) -> None:
    torch = pytest.importorskip("torch")
    theirs = [piece.tolist() for piece in torch.chunk(torch.arange(size), parts)]
    ours = [list(range(*chunk_bounds(size, parts, index))) for index in range(parts)]
    assert [piece for piece in ours if piece] == theirs


def sharding_axes(layout: Layout) -> list[bool]:
    return [isinstance(placement, (Shard, Tile)) for placement in layout.placements]


@examples(150)
@given(layouts(), shapes)
def test_every_element_is_held_once_per_replica(layout: Layout, shape: tuple[int, int]) -> None:
    mesh, cut = layout.mesh, sharding_axes(layout)
    held: dict[tuple[int, ...], np.ndarray] = {}
    for rank in mesh.ranks:
        replica = tuple(at for at, sharded in zip(mesh.coords(rank), cut, strict=True) if not sharded)
        counts = held.setdefault(replica, np.zeros(shape, int))
        counts[np.ix_(*layout.indices(shape, rank))] += 1
    assert len(held) == math.prod(size for size, sharded in zip(mesh.shape, cut, strict=True) if not sharded)
    for counts in held.values():
        assert (counts == 1).all()


@examples(80)
@given(layouts(), shapes)
def test_intervals_are_whole_disjoint_and_count_the_local_shape(
    layout: Layout, shape: tuple[int, int]
) -> None:
    for rank in layout.mesh.ranks:
        dims = layout.intervals(shape, rank)
        for dim, size in zip(dims, shape, strict=True):
            flat = [edge for piece in dim for edge in piece]
            assert all(start < stop for start, stop in dim)
            assert flat == sorted(flat) and all(0 <= edge <= size for edge in flat)
        assert layout.local_shape(shape, rank) == tuple(sum(hi - lo for lo, hi in dim) for dim in dims)
        assert [len(index) for index in layout.indices(shape, rank)] == list(layout.local_shape(shape, rank))


@examples(80)
@given(
    layouts(st.one_of(st.builds(Shard, st.integers(0, 1)), st.just(Replicate()))),
    st.tuples(st.integers(1, 13), st.integers(1, 13)),
)
def test_shards_are_those_of_dtensor(layout: Layout, shape: tuple[int, int]) -> None:
    pytest.importorskip("torch")
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import Shard as TorchShard
    from torch.distributed.tensor import _utils

    compute = getattr(_utils, "_compute_local_shape_and_global_offset", None)
    if compute is None:
        pytest.skip("this torch has no shape rule that works without processes")
    theirs = [TorchShard(p.dim) if isinstance(p, Shard) else TorchReplicate() for p in layout.placements]
    for rank in layout.mesh.ranks:
        at = layout.mesh.coords(rank)
        local, offset = compute(shape, layout.mesh.shape, lambda dim, at=at: at[dim], theirs)
        assert layout.local_shape(shape, rank) == tuple(local)
        for held, start in zip(layout.intervals(shape, rank), offset, strict=True):
            assert not held or held[0][0] == start


@examples(80)
@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 7), st.data())
def test_tiles_are_dealt_around_the_axis(size: int, parts: int, tile: int, data: st.DataObject) -> None:
    """Element i lies in block (i + offset) // tile, and block b belongs to rank b modulo the axis."""
    offset = data.draw(st.integers(0, tile - 1))
    layout = Layout(Mesh.of("m", (parts,), ("a",)), (Tile(0, tile, offset),))
    for rank in range(parts):
        mine = [at for at in range(size) if (at + offset) // tile % parts == rank]
        assert layout.indices((size,), rank)[0].tolist() == mine


def test_tile_of_a_shard_is_cut_from_what_the_axes_before_it_left() -> None:
    mesh = Mesh.of("m", (2, 2), ("row", "col"))
    layout = Layout(mesh, (Tile(0, 2), Shard(0)))
    assert layout.intervals((8,), 0) == (((0, 2),),)
    assert layout.intervals((8,), 1) == (((4, 6),),)
    assert Layout(mesh, (Shard(0), Tile(0, 1))).intervals((8,), 2) == (((4, 5), (6, 7)),)


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (Shard(1), "S(1)"),
        (Replicate(), "R"),
        (Partial(), "P"),
        (Partial("max"), 'P("max")'),
        (Tile(0, 4, 1), "T(0, 4, 1)"),
    ],
)
def test_placements_print_in_the_text_form(placement: Placement, text: str) -> None:
    layout = Layout(Mesh.of("tp", (2,), ("x",)), (placement,))
    assert str(layout) == f"tp[{text}]"
    assert layout.partial_axes == (("x",) if isinstance(placement, Partial) else ())


def test_what_does_not_fit_is_refused() -> None:
    mesh = Mesh.of("tp", (2, 2), ("row", "col"))
    with pytest.raises(LayoutError, match="2 axes, layout has 1"):
        Layout(mesh, (Shard(0),))
    with pytest.raises(LayoutError, match="offset smaller"):
        Layout(mesh, (Tile(0, 3, 3), Replicate()))
    with pytest.raises(LayoutError, match=r"S\(2\) names a dim that a tensor of shape \(4, 4\)"):
        Layout(mesh, (Shard(2), Replicate())).intervals((4, 4), 0)
    with pytest.raises(LayoutError, match="different ranks"):
        Mesh("m", (2,), ("a",), (0, 0))
    with pytest.raises(LayoutError, match="axes row, col, not 'x'"):
        mesh.size("x")


@examples(50)
@given(meshes())
def test_groups_of_an_axis_part_the_mesh(mesh: Mesh) -> None:
    for position, axis in enumerate(mesh.axes):
        groups = list(mesh.groups(axis))
        assert sorted(rank for group in groups for rank in group) == sorted(mesh.ranks)
        for group in groups:
            assert [mesh.coords(rank)[position] for rank in group] == list(range(mesh.shape[position]))
            assert all(mesh.group(rank, axis) == group for rank in group)
    for rank in mesh.ranks:
        assert mesh.rank_at(mesh.coords(rank)) == rank
