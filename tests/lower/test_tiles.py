"""Products written out by tiles: the same results, every element once, in the order of the release."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.algorithms.fused import ENTRIES, Tiles
from meshweave.algorithms.fused.product import FusedProduct
from meshweave.algorithms.universal.problem import UniversalProblem
from meshweave.base.errors import LayoutError
from meshweave.describe.layout import Layout, Replicate
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import load_cluster
from meshweave.execute.numpy import run_numpy
from meshweave.execute.torch.counters import completion_counters
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program.ops import Matmul, Put
from meshweave.ir.program.parse import parse
from meshweave.ir.program.release import Release
from meshweave.lower import lower_one_sided, write_out_tiles
from meshweave.lower.tiles import tiles
from meshweave.tune.fused import fused_choices, tune_fused
from sampling import examples

TILED = [entry for entry in ENTRIES if entry.name.startswith("t3_") and entry.name != "t3_sequential"]
sizes = st.integers(1, 7)


@given(sizes, sizes, sizes, sizes, st.sampled_from(["", "rows", "columns"]), st.integers(0, 9), st.booleans())
def test_tiles_cover_a_region_once_and_begin_where_the_release_says(
    rows: int, columns: int, height: int, width: int, order: Any, first: int, is_sized: bool
) -> None:
    release = Release((height, width) if is_sized else (), order, first)
    boxes = tiles(rows, columns, release, 3)
    covered = [
        element
        for (top, bottom), (left, right) in boxes
        for element in itertools.product(range(top, bottom), range(left, right))
    ]
    assert sorted(covered) == list(itertools.product(range(rows), range(columns)))
    ordered = tiles(rows, columns, Release(release.tile, order), 3)
    start = first % len(boxes)
    assert boxes == ordered[start:] + ordered[:start]
    assert ordered == sorted(ordered, key=lambda box: box[::-1] if order == "columns" else box)


@pytest.mark.parametrize("entry", TILED, ids=lambda entry: entry.name)
@given(data=st.data())
@examples(8)
def test_tiles_compute_what_the_product_does(entry: FusedProduct[Tiles], data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 4), label="ranks")
    mesh = Mesh.of("tp", (count,), ("x",))
    placements = data.draw(st.sampled_from(entry.accepted), label="placements")
    m, n, k = (data.draw(sizes, label=name) * count for name in "mnk")
    problem = UniversalProblem(m, n, k, *(Layout(mesh, (placement,)) for placement in placements))
    config = data.draw(st.sampled_from(list(entry.candidates(problem))), label="config")
    program = entry.program(problem, config)
    written = write_out_tiles(program, data.draw(st.integers(1, 3), label="tiles"))
    validate(written)
    inputs = entry.random_inputs(problem)
    expected = entry.reference(problem, inputs)
    for one in (written, lower_one_sided(written)):
        outputs = run_numpy(one, inputs, seed=data.draw(st.integers(0, 9), label="seed")).outputs
        for tensor, value in expected.items():
            np.testing.assert_array_equal(outputs[tensor], value)


ADDING = """
program("adds to what is there")
q = mesh((4,), ("x",))
X = tensor((16, 6), "float32")
W = tensor((6, 3), "float32")
Y = tensor((16, 3), "float32")
x = input(X, q[S(0)])
w = input(W, q[R])
y = output(Y, q[S(0)])
compute = lane()
with q:
    matmul(y, x, w, lane=compute)
    matmul(y, x, w, accumulate=1, release=release(tile=(2, 2), update=True), lane=compute)
"""


def test_a_released_product_that_accumulates_adds_once() -> None:
    """Written out it goes by scratch, to which nothing is added."""
    program = parse(ADDING)
    draw = np.random.default_rng(3)
    shapes = {"X": (16, 6), "W": (6, 3)}
    inputs = {name: draw.integers(-4, 5, shape).astype("float32") for name, shape in shapes.items()}
    for one in (program, write_out_tiles(program, 2), lower_one_sided(program)):
        outputs = run_numpy(one, inputs, seed=1).outputs
        np.testing.assert_array_equal(outputs["Y"], 2 * inputs["X"] @ inputs["W"])


def test_a_region_counts_the_tiles_of_each_lane_that_writes_to_it() -> None:
    """Around a ring, what is passed on waits for as many tiles as the rank before stores and sends."""
    entry = next(entry for entry in ENTRIES if entry.name == "t3_ring")
    problem = UniversalProblem(12, 6, 6, *_ring_layouts(3, entry))
    written = write_out_tiles(entry.program(problem, Tiles(2, 6)))
    counters = completion_counters(written)
    for rank, ops in written.ops_by_rank.items():
        assert sum(isinstance(bound.op, Matmul) for bound in ops) == 3 * 2  # three regions of two tiles
        for index, bound in enumerate(ops):
            if isinstance(bound.op, Put) and bound.op.name == "dma_map":
                counts = counters.to_start[rank, index]
                assert {count.writer for count in counts} == {(rank + 2) % 3}
                assert {count.needed for count in counts} == {1} and "acc[" in counts[0].region
    copies = [
        counters.to_start[rank, len(ops) - 1]
        for rank, ops in written.ops_by_rank.items()
        if (rank, len(ops) - 1) in counters.to_start
    ]
    assert len(copies) == 3 and all(sum(count.needed for count in counts) == 2 for counts in copies)


def _ring_layouts(count: int, entry: FusedProduct[Any]) -> tuple[Layout, ...]:
    mesh = Mesh.of("tp", (count,), ("x",))
    return tuple(Layout(mesh, (placement,)) for placement in entry.accepted[0])


def test_the_tuner_takes_what_is_simulated_to_be_fastest() -> None:
    entry = next(entry for entry in ENTRIES if entry.name == "t3_ring")
    problem = UniversalProblem(64, 32, 32, *_ring_layouts(4, entry))
    cluster = load_cluster("local-cpu")
    choices = list(fused_choices(problem, cluster))
    names = {choice.algorithm for choice in choices}
    assert names == {"t3_ring", "t3_direct", "t3_copied", "t3_sequential", "looped_reduce_scatter"}
    assert tune_fused(problem, cluster).simulated_s == min(choice.simulated_s for choice in choices)
    mesh = Mesh.of("tp", (4,), ("x",))
    whole = Layout(mesh, (Replicate(),))
    with pytest.raises(LayoutError, match="no fused product takes"):
        tune_fused(UniversalProblem(8, 8, 8, whole, whole, whole), cluster)
