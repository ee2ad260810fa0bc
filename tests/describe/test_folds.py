"""Strided shards as PyTorch has them, and tensors seen with some of their dims folded into one."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.base.errors import LayoutError, ProgramError
from meshweave.describe.layout import Layout, Partial, Placement, Replicate, Shard, StridedShard, Tile
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program import Buffer, Program, Tensor
from meshweave.ir.program.parse import parse
from meshweave.ir.program.text import to_text
from sampling import examples


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple))
    ranks = draw(st.permutations(range(math.prod(shape))))
    return Mesh("tp", shape, ("a", "b", "c")[: len(shape)], tuple(ranks))


def kinds(dims: int, tiles: bool = True) -> st.SearchStrategy[Placement]:
    dim = st.integers(0, dims - 1)
    some = st.builds(Shard, dim) | st.builds(StridedShard, dim, st.integers(1, 9)) | st.just(Replicate())
    return some | st.builds(Tile, dim, st.integers(3, 5), st.integers(0, 2)) if tiles else some


@st.composite
def cases(draw: st.DrawFn, tiles: bool = True, folds: bool = True) -> tuple[Layout, tuple[int, ...]]:
    """A layout, with folds or without, and the shape that is seen."""
    mesh = draw(meshes())
    shape = draw(st.lists(st.integers(0, 7), min_size=1, max_size=4).map(tuple))
    placed = draw(st.tuples(*[kinds(len(shape), tiles)] * len(mesh.shape)))
    if not folds:
        return Layout(mesh, placed), shape
    cuts = sorted(draw(st.lists(st.integers(0, len(shape)), max_size=3)))
    folded = tuple(shape[lo:hi] for lo, hi in itertools.pairwise([0, *cuts, len(shape)]))
    return Layout(mesh, placed, folded), tuple(map(math.prod, folded))


def lists(layout: Layout, shape: tuple[int, ...], rank: int) -> list[list[int]]:
    return [index.tolist() for index in layout.indices(shape, rank)]


@examples(150)
@given(cases(tiles=False, folds=False))
def test_strided_shards_hold_what_dtensor_holds(case: tuple[Layout, tuple[int, ...]]) -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.tensor import placement_types as theirs

    layout, shape = case
    for rank in layout.mesh.ranks:
        for dim, ours in enumerate(lists(layout, shape, rank)):
            held = torch.arange(shape[dim])
            coords = layout.mesh.coords(rank)
            for placement, parts, at in zip(layout.placements, layout.mesh.shape, coords, strict=True):
                if getattr(placement, "dim", None) != dim:
                    continue
                if isinstance(placement, StridedShard):
                    cut = theirs._StridedShard(0, split_factor=placement.split_factor)
                else:
                    cut = theirs.Shard(0)
                held = cut._split_tensor(held, parts, with_padding=False)[0][at]
            assert ours == held.tolist()


@examples(150)
@given(cases())
def test_a_fold_holds_the_same_elements_in_the_same_order(case: tuple[Layout, tuple[int, ...]]) -> None:
    """Numbering the elements, cutting the original and reshaping the piece: the fold indexes just that."""
    layout, shape = case
    original = layout.original_shape(shape)
    plain = Layout(layout.mesh, layout.placements)
    elements = np.arange(math.prod(shape)).reshape(original)
    for rank in layout.mesh.ranks:
        piece = elements[np.ix_(*plain.indices(original, rank))]
        seen = elements.reshape(shape)[np.ix_(*layout.indices(shape, rank))]
        local = layout.local_shape(shape, rank)
        assert seen.shape == local and piece.size == math.prod(local)
        assert seen.ravel().tolist() == piece.ravel().tolist()


@examples(100)
@given(cases(tiles=False))
def test_intervals_are_whole_ascending_and_apart(case: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = case
    for rank in layout.mesh.ranks:
        for pieces, size in zip(layout.intervals(shape, rank), shape, strict=True):
            assert all(0 <= start < stop <= size for start, stop in pieces)
            if layout.folds is not None:
                assert all(before[1] < after[0] for before, after in itertools.pairwise(pieces))


@examples(60)
@given(st.integers(1, 6), st.integers(0, 9), st.integers(1, 4))
def test_a_flattened_sharded_dim_is_a_strided_shard(batch: int, length: int, parts: int) -> None:
    mesh = Mesh.of("tp", (parts,), ("x",))
    folded = Layout(mesh, (Shard(1),), ((batch, length),))
    strided = Layout(mesh, (StridedShard(0, batch),))
    for rank in mesh.ranks:
        assert folded.intervals((batch * length,), rank) == strided.intervals((batch * length,), rank)


def test_an_activation_seen_as_a_matrix() -> None:
    mesh = Mesh.of("tp", (2, 2), ("row", "col"))
    folds = ((4, 8), (16,))
    assert Layout(mesh, (Shard(0), Shard(2)), folds).intervals((32, 16), 3) == (((16, 32),), ((8, 16),))
    assert Layout(mesh, (Replicate(), Shard(1)), folds).intervals((32, 16), 1) == (
        ((4, 8), (12, 16), (20, 24), (28, 32)),
        ((0, 16),),
    )
    vector = Layout(mesh, (Shard(0), Replicate()), ((), (6,)))
    assert vector.intervals((1, 6), 2) == (((0, 1),), ((3, 6),))


def test_a_factor_or_a_fold_of_millions_costs_what_is_held() -> None:
    mesh = Mesh.of("tp", (2,), ("x",))
    assert Layout(mesh, (StridedShard(0, 10**15),)).intervals((3,), 0) == (((0, 3),),)
    whole = Layout(mesh, (Shard(0),), ((10**12, 4), (5,)))
    assert whole.intervals((4 * 10**12, 5), 1) == (((2 * 10**12, 4 * 10**12),), ((0, 5),))


def test_what_does_not_fit_is_refused() -> None:
    mesh = Mesh.of("tp", (2,), ("x",))
    folded = Layout(mesh, (Shard(1),), ((4, 8), (16,)))
    with pytest.raises(LayoutError, match=r"folds to a tensor of shape \(32, 16\), not \(16, 16\)"):
        folded.intervals((16, 16), 0)
    with pytest.raises(LayoutError, match="must not be negative"):
        Layout(mesh, (Shard(0),), ((-4, 8),))
    with pytest.raises(LayoutError, match=r"S\(3\) names a dim that a tensor of shape \(4, 8, 16\)"):
        Layout(mesh, (Shard(3),), ((4, 8), (16,))).local_shape((32, 16), 0)
    with pytest.raises(LayoutError, match="split factor must be at least 1"):
        Layout(mesh, (StridedShard(0, 0),))


# --- the text form --------------------------------------------------------------------------------------


@examples(100)
@given(cases(), st.booleans())
def test_programs_with_folds_round_trip(case: tuple[Layout, tuple[int, ...]], partial: bool) -> None:
    layout, shape = case
    if partial:
        layout = Layout(layout.mesh, (Partial(), *layout.placements[1:]), layout.folds)
    program = Program(
        "p",
        (layout.mesh,),
        (Tensor("A", shape, "float32"),),
        (Buffer("a", "input", layout.mesh.name, "float32", "A", layout),),
        (),
        (),
    )
    text = to_text(program)
    assert parse(text) == program
    assert to_text(parse(text)) == text


def test_the_text_of_a_fold() -> None:
    layout = Layout(
        Mesh.of("tp", (2, 2), ("row", "col")), (Shard(0), StridedShard(1, 2)), ((4, 8), (16,), ())
    )
    assert str(layout) == "fold(tp[S(0), SS(1, 2)], (4, 8), (16,), ())"


@pytest.mark.parametrize(
    "layout",
    [
        "fold(tp[R], 4)",
        "fold(tp, (4,))",
        "fold(fold(tp[R], (4,)), (4,))",
        "fold(tp[R], (-4, -1))",
        "fold(tp[R], sizes=(4,))",
        "fold(tp[SS(0, 0)], (4,))",
        "tp[SS(0)]",
    ],
)
def test_broken_folds_are_refused_in_one_line(layout: str) -> None:
    head = 'program("p")\ntp = mesh((2,), ("x",))\nA = tensor((4,), "float32")\n'
    with pytest.raises(ProgramError, match="line 4") as error:
        parse(f"{head}a = input(A, {layout})\n")
    assert "\n" not in str(error.value)
