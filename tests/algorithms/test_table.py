"""Properties that every entry of the table of algorithms must have. A new entry needs no new test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.table import ALGORITHMS, PRODUCTS_2D
from meshweave.base.errors import LayoutError
from meshweave.cost.machine import Machine
from meshweave.cost.price import price
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.estimate import skeleton_ps
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse
from meshweave.ir.program.text import to_text
from meshweave.ir.work import traffic
from meshweave.lower import lower_rings
from plain_simulator.reference import simulate
from sampling import examples, mostly_slow, scaled

TPU = load_cluster("tpu-v4-pod:16")
POD = replace(TPU, chip=replace(TPU.chip, gemm_tile=None))
"""Where a product that wraps around the end of a matrix takes as long in two pieces as in one."""
TILED = replace(POD, chip=replace(POD.chip, gemm_tile=(24, 40, 16), memory_bytes_per_s=3e11, launch_s=1e-6))
"""Where small products are bound by memory, and tiles are seldom whole."""
NAMES = sorted(PRODUCTS_2D)

quick = examples(60, suppress_health_check=[HealthCheck.too_slow])


MESHES = {
    name: [shape for n in range(1, 17) for shape in entry.mesh_shapes(n) if max(shape) <= 8]
    for name, entry in PRODUCTS_2D.items()
}


@st.composite
def cases(
    draw: st.DrawFn, dtypes: tuple[str, ...] = ("int64",), names: tuple[str, ...] = tuple(NAMES)
) -> tuple[str, Matmul2dProblem, Matmul2dConfig]:
    """An algorithm, a product of uneven sizes on one of its meshes, and slices of any widths."""
    entry = PRODUCTS_2D[draw(st.sampled_from(names))]
    size = st.integers(1, 40) | st.sampled_from([16, 32, 48, 64])
    problem = Matmul2dProblem(
        *draw(st.tuples(size, size, size)),
        draw(st.sampled_from(MESHES[entry.name])),
        draw(st.sampled_from(entry.dataflows)),
        draw(st.sampled_from(dtypes)),
    )
    widths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=min(6, problem.sliced_size)))
    if draw(st.booleans()):
        widths = [1] * len(widths)
    config = Matmul2dConfig(
        tuple(widths),
        draw(st.sampled_from([1, 2, 3, 8])),
        draw(st.sampled_from([1, 2, 5])),
        draw(st.sampled_from(["row", "col"])),
    )
    return entry.name, problem, config


def dense(problem: Matmul2dProblem, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Random operands as they are stored, and their product."""
    rng = np.random.default_rng(seed)
    kind = "float32" if problem.dtype == "bfloat16" else problem.dtype
    a, b = (rng.integers(-9, 9, problem.stored_shape(name)).astype(kind) for name in "ab")
    left = a.T if problem.dataflow == "rs" else a
    right = b.T if problem.dataflow == "ls" else b
    return {"A": a, "B": b}, left @ right


def lowered(program: Program, ways: int) -> Program:
    return program if ways == 0 else lower_rings(program, ways)  # type: ignore[arg-type]


@quick
@given(
    cases(dtypes=("int32", "int64", "float32", "float64", "bfloat16")),
    st.integers(0, 2),
    st.integers(0, 10**6),
)
def test_runs_equal_the_dense_product(
    case: tuple[str, Matmul2dProblem, Matmul2dConfig], ways: int, seed: int
) -> None:
    """At every level of lowering, in program order and in any other legal order, exactly."""
    name, problem, config = case
    program = lowered(PRODUCTS_2D[name].program(problem, config), ways)
    inputs, expected = dense(problem, seed)
    for order in (None, seed):
        result = run_numpy(program, inputs, seed=order).outputs["C"]
        np.testing.assert_array_equal(result, expected)  # small integers: exact in every dtype


@quick
@given(cases(), st.integers(0, 2))
def test_validates_and_round_trips(case: tuple[str, Matmul2dProblem, Matmul2dConfig], ways: int) -> None:
    name, problem, config = case
    program = lowered(PRODUCTS_2D[name].program(problem, config), ways)
    assert parse(to_text(program)) == program
    assert validate(program).skipped == ()


@quick
@given(cases())
def test_bytes_equal_the_closed_form(case: tuple[str, Matmul2dProblem, Matmul2dConfig]) -> None:
    name, problem, config = case
    entry = PRODUCTS_2D[name]
    program = entry.program(problem, config)
    for rank in program.ranks:
        assert traffic(program, rank) == entry.traffic(problem, config, rank)


def times_ps(
    name: str, problem: Matmul2dProblem, config: Matmul2dConfig, cluster: Cluster = POD
) -> tuple[int, int, int]:
    """Skeleton and simulated time without contention, and the most ops that a rank has."""
    entry = PRODUCTS_2D[name]
    program = entry.program(problem, config)
    machine = Machine.of(cluster, program)
    simulated = simulate(program, machine, contention=False)
    estimated = skeleton_ps(entry.skeleton(problem, config), lambda work: price(work, machine).total_ps)
    num_ops = max(len(ops) for ops in program.ops_by_rank.values())
    return estimated, max(span.end_ps for span in simulated.spans), num_ops


def enlarged(problem: Matmul2dProblem, factor: int) -> Matmul2dProblem:
    return replace(problem, m=problem.m * factor, n=problem.n * factor, k=problem.k * factor)


@quick
@given(cases(dtypes=("bfloat16", "float32")), st.integers(1, 300))
def test_skeleton_time_equals_simulated_time(
    case: tuple[str, Matmul2dProblem, Matmul2dConfig], scale: int
) -> None:
    """To the picosecond, on a machine without contention; an upper bound where an entry says so."""
    name, small, config = case
    estimated, simulated, num_ops = times_ps(name, enlarged(small, scale), config)
    if PRODUCTS_2D[name].estimate_accuracy == "exact":
        assert estimated == simulated
    else:
        assert estimated >= simulated - num_ops


@quick
@given(
    cases(
        ("bfloat16", "float32"),
        tuple(name for name in NAMES if PRODUCTS_2D[name].estimate_accuracy == "exact"),
    ),
    st.integers(1, 30),
)
def test_skeleton_time_equals_simulated_time_where_products_stream_through_memory(
    case: tuple[str, Matmul2dProblem, Matmul2dConfig], scale: int
) -> None:
    name, small, config = case
    estimated, simulated, _ = times_ps(name, enlarged(small, scale), config, TILED)
    assert estimated == simulated


@quick
@given(cases(dtypes=("bfloat16", "float32")), st.integers(1, 3))
def test_skeleton_time_equals_simulated_time_on_even_shards(
    case: tuple[str, Matmul2dProblem, Matmul2dConfig], scale: int
) -> None:
    """Products are cut in different places on different ranks, each part rounded up: a picosecond per op."""
    name, small, config = case
    even = enlarged(small, scale * small.num_chips * config.slice_count * config.block)
    estimated, simulated, num_ops = times_ps(name, even, config)
    assert abs(estimated - simulated) <= (0 if PRODUCTS_2D[name].estimate_accuracy == "exact" else num_ops)


@quick
@given(cases(("bfloat16",), tuple(name for name in NAMES if name != "summa")), st.integers(1, 3))
def test_simulation_with_contention_is_never_faster(
    case: tuple[str, Matmul2dProblem, Matmul2dConfig], scale: int
) -> None:
    """On even shards. Otherwise nobody has to wait for the largest one at every step, as the closed form does, and
    chains (SUMMA) begin before those from other roots have ended. What goes over several hops has half of 60 GB/s
    where its links are free, and in closed form half of the 50 GB/s that they carry."""
    name, small, config = case
    config = replace(config, slices=(1,) * config.slice_count)
    problem = enlarged(small, scale * small.num_chips * config.slice_count * config.block)
    program = PRODUCTS_2D[name].program(problem, config)
    machine = Machine.of(POD, program)
    free = simulate(program, machine, contention=False)
    several_hops = name in ("cannon", "25d") and max(problem.mesh_shape) > 3
    assert simulate(program, machine).duration_s >= free.duration_s * (5 / 6 if several_hops else 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", mostly_slow([(33, 70, 61), (64, 64, 128)], 1), ids=["uneven", "even"])
def test_every_offered_configuration_works(name: str, sizes: tuple[int, int, int]) -> None:
    entry = PRODUCTS_2D[name]
    mesh_shape = max(MESHES[name], key=lambda shape: (min(shape), sum(shape)))
    for dataflow in entry.dataflows:
        problem = Matmul2dProblem(*sizes, mesh_shape, dataflow, "int64")
        offered = list(entry.candidates(problem))
        assert offered
        for config in offered[:: max(len(offered) // scaled(6), 1)]:
            validate(entry.program(problem, config))


@pytest.mark.parametrize("name", PRODUCTS_2D)
def test_programs_depend_on_the_fields_that_the_entry_names(name: str) -> None:
    entry = PRODUCTS_2D[name]
    mesh = max(next(filter(None, map(entry.mesh_shapes, (16, 32)))), key=min)
    problem, usual = Matmul2dProblem(512, 512, 512, mesh), Matmul2dConfig((1,) * 4)
    others: dict[str, list[Any]] = {
        "slices": [(1,), (1,) * 8], "block": [1, 4], "packets": [2], "overlap": ["row"],
    }  # fmt: skip
    before = entry.program(problem, usual)
    read = {
        field
        for field, values in others.items()
        if any(
            entry.program(problem, replace(usual, **{field: value})).body != before.body for value in values
        )
    }
    assert read == set(entry.config_fields)


def test_too_many_slices_is_a_user_error() -> None:
    with pytest.raises(LayoutError, match="5 slices of a dim of 3 elements"):
        PRODUCTS_2D["meshslice"].program(Matmul2dProblem(8, 8, 3, (2, 2)), Matmul2dConfig((1,) * 5))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"m": 0}, "must be positive"),
        ({"k": 4.0}, "K is 4.0; give a whole number"),
        ({"mesh_shape": (2, 0)}, "two or three positive sizes"),
        ({"dataflow": "ws"}, "none of os, ls, rs"),
        ({"dtype": "float31"}, "did you mean 'float32'"),
    ],
)
def test_bad_problems_say_what_is_wrong(kwargs: dict[str, object], message: str) -> None:
    good = {"m": 4, "n": 4, "k": 4, "mesh_shape": (2, 2), "dataflow": "os", "dtype": "float32"}
    with pytest.raises(LayoutError, match=message):
        Matmul2dProblem(**{**good, **kwargs})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["collective", "universal", "megatron_sp"])
def test_sizes_of_numpy_do_not_overflow(name: str) -> None:
    problem = next(ALGORITHMS[name].examples())
    sizes = {key: size for key, size in vars(problem).items() if type(size) is int and size}
    if name != "megatron_sp":
        sizes |= {"m": 2**16, "n": 2**16, "k": 2**16}
    plain, of_numpy = (
        replace(problem, **{key: kind(size) for key, size in sizes.items()}) for kind in (int, np.int32)
    )
    assert plain == of_numpy and all(type(getattr(of_numpy, key)) is int for key in sizes)
