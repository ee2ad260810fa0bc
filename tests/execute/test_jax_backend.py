"""Programs on jax devices beside dense results, and the collectives that their modules have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from jax_world import assert_equals_reference, lowered, needs_jax, prepare_jax, run_jax

import meshweave as mw
from meshweave.algorithms import block
from meshweave.algorithms.table import PRODUCTS_2D
from sampling import mostly_slow

pytestmark = needs_jax

MESHES = ((2, 2), (2, 3), (2, 4), (4, 4))
DTYPES = ("int32", "int64", "float32", "float64", "bfloat16", "float16")


def program_of(
    name: str, problem: mw.algorithms.Matmul2dProblem, rings: int = 0, slices: int = 3
) -> mw.Program:
    program = mw.algorithm(name).program(problem, mw.algorithms.Matmul2dConfig((1,) * slices, 2))
    return mw.lower.lower_rings(program, rings) if rings else program  # type: ignore[arg-type]


def cases() -> Iterator[tuple[str, mw.algorithms.Matmul2dProblem, int]]:
    """Yield 2D algorithms on the meshes that they know, dataflows, rings and dtypes in turn; sizes are uneven."""
    number = 0
    for name, entry in sorted(PRODUCTS_2D.items(), key=lambda item: item[0] != "meshslice"):
        for shape in MESHES:
            for dataflow in ("os", "ls", "rs"):
                for rings in (0, 1, 2):
                    dtype = DTYPES[number % len(DTYPES)]
                    problem = mw.algorithms.Matmul2dProblem(13, 18, 22, shape, dataflow, dtype)  # type: ignore[arg-type]
                    if entry.refusal(problem) is None:
                        number += 1
                        yield name, problem, rings


@pytest.mark.parametrize("case", mostly_slow(cases(), 1))
def test_every_algorithm_equals_the_dense_product(
    case: tuple[str, mw.algorithms.Matmul2dProblem, int],
) -> None:
    name, problem, rings = case
    try:
        program = program_of(name, problem, rings)
    except mw.errors.LayoutError:
        pytest.skip("it has no such mesh")
    draw = np.random.default_rng(5)
    inputs = {  # sums of 22 products stay exact in halves
        tensor: draw.integers(-1, 2, problem.stored_shape(tensor.lower())).astype(np.float32)
        for tensor in "AB"
    }
    if problem.dtype.startswith("int"):
        inputs = {name: value.astype(problem.dtype) for name, value in inputs.items()}
    assert_equals_reference(mw.algorithm(name), problem, program, inputs)


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        [
            (name, flow)
            for name in ("meshslice", "meshslice_tapered", "meshslice_tiled", "summa")
            for flow in ("ls", "os", "rs")
        ],
        1,
    ),
)
def test_rolled_loops_give_what_unrolled_ones_do(case: tuple[str, Any]) -> None:
    from meshweave.execute.jax.source import jax_source

    entry = mw.algorithm(case[0])
    for dtype in ("int32", "bfloat16"):
        problem = mw.algorithms.Matmul2dProblem(32, 48, 64, (2, 4), case[1], dtype)
        program = entry.program(problem, mw.algorithms.Matmul2dConfig((1,) * 4, 2))
        assert "lax.fori_loop(1, " in jax_source(program, loops="rolled")
        inputs = {
            tensor: np.random.default_rng(6)
            .integers(-1, 2, problem.stored_shape(tensor.lower()))
            .astype(kind)
            for tensor in "AB"
            for kind in ["int32" if dtype == "int32" else "float32"]
        }
        assert_equals_reference(entry, problem, program, inputs, loops="rolled")


@pytest.mark.slow
@pytest.mark.parametrize("name", PRODUCTS_2D)
def test_examples_of_every_algorithm(name: str) -> None:
    entry = mw.algorithm(name)
    for problem in entry.examples():
        for config, _ in zip(entry.candidates(problem), range(3), strict=False):
            assert_equals_reference(
                entry, problem, entry.program(problem, config), entry.random_inputs(problem, seed=3)
            )


@pytest.mark.parametrize(
    "name", mostly_slow(sorted((entry.name for entry in block.ENTRIES), key="data_parallel".__ne__), 1)
)
def test_layers_of_every_strategy(name: str) -> None:
    """Functions of integers show every element that is missing, twice there, or filling of a short shard."""
    entry = mw.algorithm(name)
    for problem in islice(entry.examples(), 2):
        for config in islice(entry.candidates(problem), 2):
            program = entry.program(problem, config)
            assert_equals_reference(entry, problem, program, entry.random_inputs(problem, seed=7))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("name", ["megatron_sp", "meshslice_block", "ring_attention"])
def test_layers_with_the_functions_of_models(name: str, family: Any) -> None:
    jax = prepare_jax()
    entry = mw.algorithm(name)
    problem = replace(next(iter(entry.examples())), exact=False, dtype="float64", family=family)
    program = entry.program(problem, next(iter(entry.candidates(problem))))
    inputs = entry.random_inputs(problem, seed=7)
    with jax.enable_x64(True):
        outputs = run_jax(program, inputs, calls=entry.functions(problem))
    for tensor, expected in entry.reference(problem, inputs).items():
        np.testing.assert_allclose(outputs[tensor], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        [(name, flow, rings) for name in ("meshslice", "collective", "wang", "summa", "cannon")
         for flow in ("rs", "ls", "os") for rings in (1, 0, 2)],
        1,
    ),
)  # fmt: skip
def test_the_module_has_the_collectives_of_the_program(case: tuple[str, Any, int]) -> None:
    name, dataflow, rings = case
    from jax_lowered import lowered_collectives, program_collectives

    for sizes in ((64, 32, 96), (33, 14, 21)):
        program = program_of(name, mw.algorithms.Matmul2dProblem(*sizes, (4, 4), dataflow), rings)
        assert lowered_collectives(lowered(program)) == program_collectives(program)


def test_equal_shards_move_what_the_program_says() -> None:
    from jax_lowered import lowered_collectives

    problem = mw.algorithms.Matmul2dProblem(32, 48, 64, (2, 4))
    program = mw.algorithm("meshslice").program(problem, mw.algorithms.Matmul2dConfig((1,) * 4, 2))
    shard_bytes = {"A": 32 * 64 // 8 * 4, "B": 64 * 48 // 8 * 4}
    assert lowered_collectives(lowered(program)) == {
        ("all_gather", shard_bytes["A"] // 4): 4,
        ("all_gather", shard_bytes["B"] // 4): 4,
    }


def test_too_few_devices_are_named() -> None:
    prepare_jax()
    program = program_of("collective", mw.algorithms.Matmul2dProblem(8, 8, 8, (4, 8)))
    with pytest.raises(mw.errors.BindError, match="runs on 32 devices, and jax has 16"):
        run_jax(program, {})


def test_a_reduce_leaves_what_other_members_hold() -> None:
    prepare_jax()
    program = mw.parse("""
program("reduce")
q = mesh((4,), ("x",))
X = tensor((4, 3), "int32")
x = input(X, q[S(0)])
Y = tensor((4, 3), "int32")
y = output(Y, q[S(0)])
net = lane()
with q:
    copy(y, x, lane=net)
    reduce(y, x, over="q.x", root=1, lane=net)
    reduce(y[:, :2], x[:, :2], over=(3, 2, 1, 0), root=0, op="max", lane=net)
""")
    x = np.arange(12).reshape(4, 3)
    expected = mw.run_numpy(program, {"X": x}).outputs["Y"]
    assert expected[0].tolist() == [0, 1, 2] and expected[1].tolist() == [18, 22, 26]
    np.testing.assert_array_equal(run_jax(program, {"X": x})["Y"], expected)


@pytest.mark.parametrize(
    ("operands", "result"), [("int8", "int32"), ("uint8", "int16"), ("float16", "float32")]
)
def test_products_have_the_dtype_of_their_result(operands: str, result: str) -> None:
    prepare_jax()
    program = mw.parse(f"""
program("wider")
q = mesh((2,), ("x",))
A = tensor((2, 100), "{operands}")
B = tensor((100, 2), "{operands}")
C = tensor((2, 2), "{result}")
a = input(A, q[S(0)])
b = input(B, q[R])
c = output(C, q[S(0)])
compute = lane()
with q:
    matmul(c, a, b, lane=compute)
    matmul(c, a, b, accumulate=1, lane=compute)
""")
    found = run_jax(program, {"A": np.full((2, 100), 3), "B": np.full((100, 2), 5)})["C"]
    assert found.dtype == result and (found == 3000).all()


def test_blocks_of_arrays_without_elements() -> None:
    prepare_jax()
    program = mw.parse("""
program("no elements")
q = mesh((2,), ("x",))
X = tensor((0, 6, 2), "int32")
x = input(X, q[R])
Y = tensor((0, 4, 2), "int32")
y = output(Y, q[R])
w = scratch((0, 6, 2), "int32", on=q)
Z = tensor((0, 6, 4), "int32")
z = output(Z, q[R])
net = lane()
with q:
    copy(y, x[:, blocked(0, 2, 3), :], lane=net)
    copy(w[:, blocked(0, 2, 3), :], y, lane=net)
    all_gather(z, x, over="q.x", dim=2, lane=net)
""")
    found = run_jax(program, {"X": np.zeros((0, 6, 2))})
    assert found["Y"].shape == (0, 4, 2) and found["Z"].shape == (0, 6, 4)


def test_truths_that_are_added_count() -> None:
    """jax takes the sum of two truths for "or"."""
    prepare_jax()
    program = mw.parse("""
program("truths")
q = mesh((3, 3), ("row", "col"))
X = tensor((9, 36), "int32")
x = input(X, q[S(0), S(1)])
Y = tensor((9, 9), "int32")
y = output(Y, q[S(0), S(1)])
net = lane()
with q:
    copy(y[:, 0:1], x[:, (q.row > 0) + (q.col > 0):(q.row > 0) + (q.col > 0) + 1], lane=net)
    copy(y[:, 1:2], x[:, min(q.row > 0, 2) + (q.col > 0):min(q.row > 0, 2) + (q.col > 0) + 1], lane=net)
    copy(y[:, 2:3], x[:, (7, 4)[q.row > 0] + q.col:(7, 4)[q.row > 0] + q.col + 1], lane=net)
""")
    x = np.arange(9 * 36).reshape(9, 36)
    expected = mw.run_numpy(program, {"X": x}).outputs["Y"]
    np.testing.assert_array_equal(run_jax(program, {"X": x})["Y"], expected)


def test_groups_of_two_that_share_a_rank_take_turns() -> None:
    prepare_jax()
    program = mw.parse("""
program("turns")
q = mesh((4,), ("x",))
X = tensor((16, 2), "int32")
x = input(X, q[S(0)])
Y = tensor((16, 2), "int32")
y = output(Y, q[S(0)])
one = lane()
two = lane()
with q:
    copy(y, x, lane=one)
with ranks(0, 1):
    all_reduce(y[0:1, :], x[0:1, :], over=(0, 1), lane=one)
with ranks(1, 2):
    all_reduce(y[1:2, :], x[1:2, :], over=(1, 2), lane=two)
with ranks(2, 3):
    all_reduce(y[2:3, :], x[2:3, :], over=(2, 3), lane=one)
""")
    x = np.arange(32).reshape(16, 2)
    expected = mw.run_numpy(program, {"X": x}).outputs["Y"]
    np.testing.assert_array_equal(run_jax(program, {"X": x})["Y"], expected)


def test_names_of_python_and_of_the_source_are_free_for_buffers_and_tensors() -> None:
    prepare_jax()
    program = mw.parse("""
program("names")
q = mesh((2,), ("x",))
local = tensor((3, 4), "int32")
collect = tensor((3, 4), "int32")
sum = input(local, q[S(0)])
sum_ = scratch((2, 4), "int32", on=q)
y = output(collect, q[S(0)])
net = lane()
with q:
    zero(sum_, lane=net)
    copy(y, sum, lane=net)
    add(y, sum_[0:2 - q.x, :], lane=net)
""")
    x = np.arange(12).reshape(3, 4)
    np.testing.assert_array_equal(run_jax(program, {"local": x})["collect"], x)


@pytest.mark.parametrize("dtype", ["int64", "float64"])
def test_numbers_of_64_bits_are_not_taken_for_narrower_ones(dtype: str) -> None:
    jax = prepare_jax()
    from meshweave.execute.jax.run import device_mesh, load_source
    from meshweave.execute.jax.source import jax_source

    program = mw.parse(f"""
program("wide")
q = mesh((2,), ("x",))
X = tensor((4, 2), "{dtype}")
x = input(X, q[S(0)])
Y = tensor((4, 2), "{dtype}")
y = output(Y, q[S(0)])
net = lane()
with q:
    copy(y, x, lane=net)
""")
    function, wide = load_source(jax_source(program), device_mesh(program)), np.full((4, 2), 2**40, dtype)
    with jax.enable_x64(False), pytest.raises(ValueError, match=f"has {dtype}, for which jax needs"):
        function(wide)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(function(wide), wide)


def test_reductions_to_a_root_are_parts_of_no_list() -> None:
    """A device that is no root keeps what it has, and it has nothing yet."""
    prepare_jax()
    program = mw.parse("""
program("roots")
q = mesh((2,), ("x",))
X = tensor((8, 2), "int32")
x = input(X, q[S(0)])
Y = tensor((8, 2), "int32")
y = output(Y, q[S(0)])
s = scratch((4, 2), "int32", on=q)
net = lane()
with q:
    reduce(s[0:2, :], x[0:2, :], over="q.x", root=0, lane=net)
    reduce(s[2:4, :], x[2:4, :], over="q.x", root=1, lane=net)
    broadcast(y[0:2, :], s[0:2, :], over="q.x", root=0, lane=net)
    broadcast(y[2:4, :], s[2:4, :], over="q.x", root=1, lane=net)
""")
    x = np.arange(16).reshape(8, 2)
    expected = mw.run_numpy(program, {"X": x}).outputs["Y"]
    np.testing.assert_array_equal(run_jax(program, {"X": x})["Y"], expected)
