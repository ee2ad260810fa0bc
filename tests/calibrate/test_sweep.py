"""What is run: valid programs, rings cut to their first step, loops that end together."""

import pytest

from meshweave.calibrate import plan_sweep
from meshweave.describe.cluster import Cluster, NetworkAxis, Torus, load_cluster
from meshweave.errors import DescriptionError, LayoutError
from meshweave.ir.ops import Permute
from meshweave.ir.validate import validate


def torus(rows, columns):
    axes = tuple(
        NetworkAxis(name, rate, ways=2 if size > 2 else 1)
        for name, rate, size in (("row", 6e6, rows), ("col", 3e6, columns))
    )
    chip = load_cluster("local-cpu").chip
    return Cluster("box", chip, Torus(axes, (rows, columns), rows * columns), "test")


@pytest.mark.parametrize("shape", [(2, 2), (1, 3), (4, 2)])
def test_all_programs_are_valid(shape):
    sweep = plan_sweep(torus(*shape), shape, [64, 1000], skip_bytes=0)
    for case in sweep.cases:
        validate(case.program, labels=False)
        assert all(0 < loop.warm < loop.turns for loop in case.loops)
    assert {loop.kind for case in sweep.cases for loop in case.loops} == {
        "all_gather",
        "reduce_scatter",
        "send_recv",
        "compute",
    }


def test_first_steps_are_what_tells_launch_from_sync():
    sweep = plan_sweep(torus(4, 2), (4, 2), [1024])
    steps = {loop.steps for case in sweep.cases for loop in case.loops if loop.axis == "row"}
    assert steps == {1, 3}
    for case in sweep.cases:
        if "first step" in case.name:
            permutes = [op for op in case.program.ops() if isinstance(op, Permute)]
            assert permutes and all(op.step.index == 0 for op in permutes)


def test_busy_cases_use_both_axes_both_ways_and_products():
    sweep = plan_sweep(torus(4, 2), (4, 2), [1024])
    for case in sweep.cases:
        if case.is_busy:
            lanes = {op.lane for op in case.program.ops()}
            assert lanes == {"row", "row_back", "col", "compute"}, case.name
            row, col = (next(loop for loop in case.loops if loop.axis == name) for name in ("row", "col"))
            assert row.turns >= 4 and col.turns >= 2


def test_default_sizes_follow_the_link():
    slow, fast = (plan_sweep(load_cluster("tpu-v4-pod:4"), (2, 2)), plan_sweep(torus(4, 4), (4, 4)))
    assert min(slow.sizes) > max(fast.sizes) / 8
    assert all(size % 64 == 0 for size in (*slow.sizes, *fast.sizes))


def test_what_cannot_be_measured():
    with pytest.raises(LayoutError, match="mesh 3x2 does not have the 4 ranks"):
        plan_sweep(torus(2, 2), (3, 2))
    with pytest.raises(LayoutError, match="does not carry"):
        plan_sweep(torus(4, 4), (2, 8))
    with pytest.raises(DescriptionError, match="a part of 8 bytes"):
        plan_sweep(torus(2, 2), (2, 2), [8, 4096])
