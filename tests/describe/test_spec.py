"""Spec strings, and the names of a program's meshes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.base.errors import LayoutError
from meshweave.describe.layout import Layout, Placement, Replicate, Shard, Tile
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.layout.meshes import ProgramMeshes
from meshweave.describe.layout.spec import layout_of_spec, spec_of
from sampling import examples

SQUARE = Mesh.of("tp", (2, 2), ("row", "col"))
AXES = "abc"


@st.composite
def plain_layouts(draw: st.DrawFn) -> tuple[Layout, int]:
    """Of plain shards, and how many dims the tensor has."""
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    num_dims = draw(st.integers(0, 4))
    each: st.SearchStrategy[Placement] = st.just(Replicate())
    if num_dims:
        each = st.one_of(each, st.builds(Shard, st.integers(0, num_dims - 1)))
    mesh = Mesh.of("m", shape, tuple(AXES[: len(shape)]))
    return Layout(mesh, tuple(draw(each) for _ in shape)), num_dims


@examples(150)
@given(plain_layouts())
def test_a_spec_is_read_back(case: tuple[Layout, int]) -> None:
    layout, num_dims = case
    spec = spec_of(layout, num_dims)
    assert layout_of_spec(spec, layout.mesh) == layout
    assert spec.count("R") + spec.count("S") == num_dims


@pytest.mark.parametrize(
    ("spec", "placements"),
    [
        ("S0R", (Shard(0), Replicate())),
        ("RS01", (Shard(1), Shard(1))),
        ("S^1 S^0", (Shard(1), Shard(0))),
        ("S^{01}R", (Shard(0), Shard(0))),
        ("R", (Replicate(), Replicate())),
        ("", (Replicate(), Replicate())),
    ],
)
def test_a_letter_for_each_dim_names_its_axes(spec: str, placements: tuple[Placement, ...]) -> None:
    assert layout_of_spec(spec, SQUARE) == Layout(SQUARE, placements)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("SR", "spec 'SR': give R .* or S and mesh axes"),
        ("S0,R", "give R"),
        ("s0R", "give R"),
        ("S10", "S10 lists mesh axes out of order; write the lower one first"),
        ("RS2", "S2 names mesh axis 2, and mesh tp has the axes 0 to 1"),
        ("S0S0", "two dims, or one twice, are sharded along mesh axis 0"),
        ("S00", "two dims, or one twice, are sharded along mesh axis 0"),
    ],
)
def test_what_is_no_spec_is_refused(spec: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message) as caught:
        layout_of_spec(spec, SQUARE)
    assert "\n" not in str(caught.value)


@examples(150)
@given(st.text("SR012^{} ", max_size=8))
def test_any_text_is_a_spec_or_refused_in_a_line(text: str) -> None:
    try:
        layout = layout_of_spec(text, SQUARE)
    except LayoutError as error:
        assert text in str(error) and "\n" not in str(error)
    else:
        num_dims = text.count("R") + text.count("S")
        assert layout_of_spec(spec_of(layout, num_dims), SQUARE) == layout


def test_a_layout_that_no_spec_says_is_refused() -> None:
    for layout in (Layout(SQUARE, (Tile(0, 2), Replicate())), Layout(SQUARE, (Replicate(), Shard(2)))):
        with pytest.raises(LayoutError, match="a spec string cannot say") as caught:
            spec_of(layout, 2)
        assert "\n" not in str(caught.value)


def test_equal_meshes_have_one_name_whatever_they_were_called() -> None:
    meshes = ProgramMeshes()
    first, again = meshes.add(Mesh.of("p", (2, 2), ("x", "y"))), meshes.add(Mesh.of("q", (2, 2), ("x", "y")))
    assert first is again and first.name == "mesh"
    others = [
        Mesh.of("p", (4, 1), ("x", "y")),
        Mesh.of("p", (2, 2), ("x", "z")),
        Mesh.of("p", (2, 2), ("x", "y"), 1),
        Mesh("p", (2, 2), ("x", "y"), (0, 2, 1, 3)),
    ]
    assert [meshes.add(mesh).name for mesh in others] == ["mesh_2", "mesh_3", "mesh_4", "mesh_5"]
    assert meshes.meshes[0] == first and len(meshes.meshes) == 5
    layout = Layout(others[0], (Shard(0), Replicate()))
    assert meshes.add_layout(layout) == Layout(meshes.meshes[1], layout.placements)
