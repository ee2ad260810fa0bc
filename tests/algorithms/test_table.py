"""Properties that every entry of the table of algorithms must have. A new entry needs no new test."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshweave.algorithms.matmul import ALGORITHMS, Config, MatmulProblem
from meshweave.cost.machine import Machine
from meshweave.describe.cluster import load_cluster
from meshweave.errors import LayoutError
from meshweave.estimate import estimate
from meshweave.execute.numpy_backend import run_numpy
from meshweave.ir.parse import parse
from meshweave.ir.program import Program
from meshweave.ir.text import to_text
from meshweave.ir.validate import validate
from meshweave.ir.work import traffic
from meshweave.lower import lower_rings
from meshweave.simulate import simulate

POD = load_cluster("tpu-v4-pod:16")
NAMES = sorted(ALGORITHMS)

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[str, ...] = ("int64",)) -> tuple[str, MatmulProblem, Config]:
    """An algorithm, a product of uneven sizes on a mesh of up to 4x4, and slices of any widths."""
    entry = ALGORITHMS[draw(st.sampled_from(NAMES))]
    mesh_shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    size = st.integers(1, 40) | st.sampled_from([16, 32, 48, 64])
    problem = MatmulProblem(
        *draw(st.tuples(size, size, size)),
        mesh_shape,
        draw(st.sampled_from(entry.dataflows)),
        draw(st.sampled_from(dtypes)),
    )
    widths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=min(6, problem.sliced_size)))
    if draw(st.booleans()):
        widths = [1] * len(widths)
    return entry.name, problem, Config(tuple(widths), draw(st.sampled_from([1, 2, 3, 8])))


def dense(problem: MatmulProblem, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
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
def test_runs_equal_the_dense_product(case: tuple[str, MatmulProblem, Config], ways: int, seed: int) -> None:
    """At every level of lowering, in program order and in any other legal order, exactly."""
    name, problem, config = case
    program = lowered(ALGORITHMS[name].program(problem, config), ways)
    inputs, expected = dense(problem, seed)
    for order in (None, seed):
        result = run_numpy(program, inputs, seed=order).outputs["C"]
        np.testing.assert_array_equal(result, expected)  # small integers: exact in every dtype


@quick
@given(cases(), st.integers(0, 2))
def test_validates_and_round_trips(case: tuple[str, MatmulProblem, Config], ways: int) -> None:
    name, problem, config = case
    program = lowered(ALGORITHMS[name].program(problem, config), ways)
    assert parse(to_text(program)) == program
    assert validate(program).skipped == ()


@quick
@given(cases())
def test_bytes_equal_the_closed_form(case: tuple[str, MatmulProblem, Config]) -> None:
    name, problem, config = case
    entry = ALGORITHMS[name]
    program = entry.program(problem, config)
    for rank in program.ranks:
        assert traffic(program, rank) == entry.traffic(problem, config, rank)


@quick
@given(cases(dtypes=("bfloat16", "float32")), st.integers(1, 300))
def test_skeleton_time_equals_simulated_time(case: tuple[str, MatmulProblem, Config], scale: int) -> None:
    """To the picosecond, on a machine without contention."""
    name, small, config = case
    entry = ALGORITHMS[name]
    problem = MatmulProblem(
        small.m * scale, small.n * scale, small.k * scale, small.mesh_shape, small.dataflow, small.dtype
    )
    program = entry.program(problem, config)
    machine = Machine.of(POD, program)
    simulated = simulate(program, machine, contention=False)
    assert estimate(entry.skeleton(problem, config), machine).total_s == simulated.duration_s


@quick
@given(cases(dtypes=("bfloat16",)), st.integers(1, 300))
def test_simulation_with_contention_is_never_faster(
    case: tuple[str, MatmulProblem, Config], scale: int
) -> None:
    name, small, config = case
    problem = MatmulProblem(
        small.m * scale, small.n * scale, small.k * scale, small.mesh_shape, small.dataflow
    )
    program = ALGORITHMS[name].program(problem, config)
    machine = Machine.of(POD, program)
    free = simulate(program, machine, contention=False)
    assert simulate(program, machine).duration_s >= free.duration_s


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dataflow", ["os", "ls", "rs"])
def test_every_offered_configuration_works(name: str, dataflow: str) -> None:
    entry = ALGORITHMS[name]
    if dataflow not in entry.dataflows:
        return
    for sizes in ((64, 64, 128), (33, 70, 61)):
        problem = MatmulProblem(*sizes, (2, 4), dataflow, "int64")  # type: ignore[arg-type]
        offered = list(entry.configs(problem))
        assert offered
        for config in offered:
            validate(entry.program(problem, config))


def test_too_many_slices_is_a_user_error() -> None:
    with pytest.raises(LayoutError, match="5 slices of a dim of 3 elements"):
        ALGORITHMS["meshslice"].program(MatmulProblem(8, 8, 3, (2, 2)), Config((1,) * 5))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"m": 0}, "must be positive"),
        ({"mesh_shape": (2, 0)}, "two positive sizes"),
        ({"dataflow": "ws"}, "none of os, ls, rs"),
        ({"dtype": "float31"}, "did you mean 'float32'"),
    ],
)
def test_bad_problems_say_what_is_wrong(kwargs: dict[str, object], message: str) -> None:
    good = {"m": 4, "n": 4, "k": 4, "mesh_shape": (2, 2), "dataflow": "os", "dtype": "float32"}
    with pytest.raises(LayoutError, match=message):
        MatmulProblem(**{**good, **kwargs})  # type: ignore[arg-type]
