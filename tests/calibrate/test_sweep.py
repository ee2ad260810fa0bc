"""What is run: valid programs, rings cut to their first step, loops that end together."""

from dataclasses import replace

import pytest

from meshweave.base.errors import DescriptionError, LayoutError
from meshweave.calibrate import plan_sweep
from meshweave.calibrate.rank import _reader
from meshweave.calibrate.sweep import CHAINS, LEAST_PACKET_BYTES
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.links import NetworkAxis
from meshweave.describe.machine.network import TorusNetwork
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program.ops import Permute
from meshweave.simulate import simulate
from sampling import mostly_slow


def torus(rows, columns):
    axes = tuple(
        NetworkAxis(name, rate, num_directions=2 if size > 2 else 1)
        for name, rate, size in (("row", 6e6, rows), ("col", 3e6, columns))
    )
    chip = load_cluster("local-cpu").chip
    return Cluster("box", chip, TorusNetwork(axes, (rows, columns), rows * columns), "test")


@pytest.mark.parametrize("shape", mostly_slow([(1, 3), (2, 2), (4, 2)], 1))
def test_all_programs_are_valid(shape):
    sweep = plan_sweep(torus(*shape), shape, [1000], skip_bytes=0)
    for case in sweep.cases:
        validate(case.program, labels=False)
        assert all(0 < loop.warmup_iterations < loop.iterations for loop in case.loops)
    assert {loop.kind for case in sweep.cases for loop in case.loops} == {
        "all_gather",
        "reduce_scatter",
        "send_recv",
        "broadcast",
        "reduce",
        "compute",
    }


def test_chains_have_roots_in_turn_and_packets_that_are_not_small():
    sweep = plan_sweep(torus(4, 2), (4, 2), [16384, 65536, 262144])
    amounts = set()
    for case in sweep.cases:
        for loop in case.loops:
            if loop.kind not in CHAINS:
                continue
            count = {"row": 4, "col": 2}[loop.axis]
            amounts.add((loop.kind, loop.amount * loop.packets, loop.packets))
            assert loop.steps == count + loop.packets - 2 and loop.amount >= LEAST_PACKET_BYTES
            assert (loop.iterations - loop.warmup_iterations) % count == 0
            first = [op.op for op in case.program.ops_on_rank(0) if loop.axis in op.op.lane]
            assert {op.kind for op in first} >= {"send", "recv", "copy"}
    for kind in CHAINS:
        sizes = [(size, packets) for of, size, packets in amounts if of == kind]
        assert sorted(sizes) == [(16384, 1), (262144, 1), (262144, 4), (262144, 16)]


def test_a_reader_finds_the_turns_of_chains():
    sweep = plan_sweep(torus(2, 2), (2, 2), [65536, 131072])
    case = next(case for case in sweep.cases if "in 4 packets" in case.name)
    trace = simulate(case.program, Machine.of(sweep.cluster, case.program)).trace()
    own = replace(trace, spans=tuple(sorted((s for s in trace.spans if s.rank == 1), key=lambda s: s.index)))
    (row,), (col,), _ = _reader(case.program, 1, case.payload()["loops"])(own)
    assert 65536 / 6e6 <= row <= 2 * 65536 / 6e6 and 65536 / 3e6 <= col <= 2 * 65536 / 3e6


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
            more = "row_odd" if case.loops[0].kind in CHAINS else "row_back"
            assert lanes == {"row", more, "col", "compute"}, case.name
            row, col = (next(loop for loop in case.loops if loop.axis == name) for name in ("row", "col"))
            assert row.iterations >= 4 and col.iterations >= 2


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
