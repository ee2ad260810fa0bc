"""What is particular to products of rotating matrices (Cannon, 2.5D) and to MeshSlice beside data parallelism."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.matmul2d.common.problem import Dataflow
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.base.errors import LayoutError
from meshweave.cost.machine import Machine
from meshweave.cost.price import price
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.estimate import skeleton_ps
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Permute
from meshweave.ir.work import Compute, Transfer, matmul_work, traffic, work_of
from meshweave.lower import lower_rings
from plain_simulator.reference import simulate
from sampling import examples

K = 1024
POD = load_cluster("tpu-v4-pod:128")

# Larger than those of the table's tests, so that layers have several turns and skews several hops.
LAYERED = [(3, 3, 3), (4, 4, 2), (4, 4, 4), (6, 6, 2)]


def end_ps(program: Program, contention: bool, cluster: Cluster = POD) -> int:
    spans = simulate(program, Machine.of(cluster, program), contention=contention).spans
    return max(span.end_ps for span in spans)


@st.composite
def layered(draw: st.DrawFn) -> Matmul2dProblem:
    size = st.integers(1, 30) | st.sampled_from([24, 36])
    shape = draw(st.sampled_from(LAYERED))
    return Matmul2dProblem(
        *draw(st.tuples(size, size, size)), shape, draw(st.sampled_from(["os", "ls", "rs"]))
    )


@examples(10, suppress_health_check=[HealthCheck.too_slow])
@given(layered(), st.integers(0, 2), st.integers(0, 10**6))
def test_25d_on_larger_meshes(problem: Matmul2dProblem, ways: int, seed: int) -> None:
    """The properties of the table on meshes that are too large for it."""
    entry = PRODUCTS_2D["25d"]
    made = entry.program(problem, Matmul2dConfig())
    for rank in made.ranks:
        assert traffic(made, rank) == entry.traffic(problem, Matmul2dConfig(), rank)
    program = lower_rings(made, ways) if ways else made  # type: ignore[arg-type]
    assert validate(program).skipped == ()
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-9, 9, problem.stored_shape(name)).astype("float32") for name in "ab")
    expected = (a.T if problem.dataflow == "rs" else a) @ (b.T if problem.dataflow == "ls" else b)
    np.testing.assert_array_equal(run_numpy(program, {"A": a, "B": b}, seed=seed).outputs["C"], expected)


@examples(10, suppress_health_check=[HealthCheck.too_slow])
@given(layered(), st.integers(1, 40))
def test_25d_skeleton_on_larger_meshes(problem: Matmul2dProblem, scale: int) -> None:
    """Exact on even shards, although rows and columns are skewed by different distances; else a bound."""
    entry = PRODUCTS_2D["25d"]
    for factor in (scale, scale * problem.num_chips):
        scaled = replace(problem, m=problem.m * factor, n=problem.n * factor, k=problem.k * factor)
        program = entry.program(scaled, Matmul2dConfig())
        machine = Machine.of(POD, program)
        skeleton = entry.skeleton(scaled, Matmul2dConfig())
        estimated = skeleton_ps(skeleton, lambda work, on=machine: price(work, on).total_ps)  # type: ignore[misc]
        simulated = end_ps(program, contention=False)
        assert estimated == simulated if factor > scale else estimated >= simulated


@pytest.mark.parametrize(("name", "shape"), [("cannon", (4, 4)), ("25d", (2, 2, 2)), ("25d", (4, 4, 2))])
@pytest.mark.parametrize("dataflow", ["os", "ls", "rs"])
def test_where_memory_is_slow_the_longest_skew_is_none(
    name: str, shape: tuple[int, ...], dataflow: Dataflow
) -> None:
    """What is skewed by no place is copied, which may take longer than the way over the most links."""
    slow = replace(POD, chip=replace(POD.chip, memory_bytes_per_s=1e7))
    problem, entry = Matmul2dProblem(64, 64, 64, shape, dataflow), PRODUCTS_2D[name]
    program = entry.program(problem, Matmul2dConfig())
    estimated = entry.estimate(problem, Matmul2dConfig(), Machine.of(slow, program)).total_s
    assert round(estimated * 1e12) == end_ps(program, contention=False, cluster=slow)


@pytest.mark.parametrize("sizes", [(8192, 12288, 12288), (512, 256, 128)], ids=["computes", "moves"])
def test_cannon_costs_skew_and_steady_state(sizes: tuple[int, int, int]) -> None:
    """The skew over P / 2 hops is its prologue; then every turn is the longer of product and shift."""
    problem = Matmul2dProblem(*sizes, (8, 8), "os", "bfloat16")
    program = PRODUCTS_2D["cannon"].program(problem, Matmul2dConfig())
    machine = Machine.of(POD, program)
    local = [size // 8 for size in sizes]
    product = price(matmul_work(*local, dtype="bfloat16"), machine).total_ps
    moves = {}
    for hops in (1, 4):
        parts = (Transfer("permute", "tp.col", 8, 2 * local[2] * side, hops=hops) for side in local[:2])
        moves[hops] = max(price(part, machine).total_ps for part in parts)
    assert end_ps(program, contention=False) == moves[4] + 7 * max(product, moves[1]) + product


def test_a_permute_that_goes_nowhere_is_a_copy() -> None:
    """Row 0 is not skewed: it moves no bytes, and takes a copy's time."""
    program = PRODUCTS_2D["cannon"].program(Matmul2dProblem(8, 8, 8, (4, 4)), Matmul2dConfig())
    for rank, hops in ((0, 0), (4, 1), (8, 2), (12, 1)):
        skew = next(bound.op for bound in program.ops_on_rank(rank) if bound.op.name == "skew_a")
        work = work_of(program, skew)
        assert isinstance(skew, Permute)
        if hops:
            assert isinstance(work, Transfer) and work.hops == hops
        else:
            assert work == Compute("copy", bytes=2 * 4 * 4)


def test_a_switch_has_no_hops() -> None:
    program = PRODUCTS_2D["cannon"].program(Matmul2dProblem(8, 8, 8, (2, 2)), Matmul2dConfig())
    far, near = (Transfer("permute", "tp.col", 8, 1 << 20, hops=hops) for hops in (4, 1))
    switch, torus = (Machine.of(load_cluster(name), program) for name in ("dgx-h100", "tpu-v4-pod:4"))
    assert price(far, switch) == price(near, switch)
    assert price(far, torus).amount == 4 * price(near, torus).amount


@pytest.mark.parametrize("dataflow", ["os", "ls", "rs"])
def test_a_lone_message_is_no_faster_with_contention(dataflow: str) -> None:
    """With one chunk for four chips, no other message is on the links that a skew over two hops takes."""
    program = PRODUCTS_2D["cannon"].program(Matmul2dProblem(640, 512, 1, (4, 4), dataflow), Matmul2dConfig())  # type: ignore[arg-type]
    assert end_ps(program, contention=True) >= end_ps(program, contention=False)


def test_bytes_of_the_published_comparison() -> None:
    """GPT-3's (1024K, 12K, 48K) in bf16 on 1024 chips (MeshSlice, section 7): 1.6 GB against 336 MB a chip."""
    problem = Matmul2dProblem(1024 * K, 12 * K, 48 * K, (16, 16, 4), "os", "bfloat16")
    moved = traffic(PRODUCTS_2D["25d"].program(problem, Matmul2dConfig()), 0)
    shards = sum(2 * rows * columns // 256 for rows, columns in ((1024 * K, 48 * K), (48 * K, 12 * K)))
    assert moved["tp.row"] + moved["tp.col"] == 4 * shards  # P / c moves of both: the skew and three shifts
    assert round((moved["tp.row"] + moved["tp.col"]) / 1e9, 2) == 1.63

    weights, out = 2 * 12 * K * 48 * K // 256, 2 * 1024 * K * 12 * K // 1024
    entry = PRODUCTS_2D["meshslice_dp"]
    forward = traffic(
        entry.program(replace(problem, mesh_shape=(32, 8, 4), dataflow="ls"), Matmul2dConfig()), 0
    )
    assert forward == {"tp.row": 31 * weights, "tp.col": 7 * out}
    # The paper counts (c - 1) w for the gradients. An all-reduce in parts needs 2 (c - 1) w / c.
    gradient = Matmul2dProblem(12 * K, 48 * K, 1024 * K, (32, 8, 4), "rs", "bfloat16")
    assert traffic(entry.program(gradient, Matmul2dConfig()), 0)["tp.depth"] == 2 * 3 * weights // 4
    assert round((sum(forward.values()) + 3 * weights) / 1e6) == 337


def test_meshes_that_rotations_can_use() -> None:
    assert PRODUCTS_2D["cannon"].mesh_shapes(16) == ((4, 4),)
    assert PRODUCTS_2D["cannon"].mesh_shapes(8) == ()
    assert PRODUCTS_2D["25d"].mesh_shapes(1024) == ((16, 16, 4),)
    assert PRODUCTS_2D["25d"].mesh_shapes(16) == ()
    assert (2, 1, 2) in PRODUCTS_2D["meshslice_dp"].mesh_shapes(4)


@pytest.mark.parametrize(
    ("name", "mesh", "message"),
    [
        ("cannon", (2, 3), "square mesh"),
        ("cannon", (2, 2, 2), "square mesh"),
        ("25d", (4, 4, 3), "c > 1 divides P"),
        ("25d", (4, 4), "c > 1 divides P"),
        ("meshslice_dp", (2, 2), "third axis"),
    ],
)
def test_other_meshes_are_user_errors(name: str, mesh: tuple[int, ...], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        PRODUCTS_2D[name].program(Matmul2dProblem(8, 8, 8, mesh), Matmul2dConfig())
