"""All ranks in one process: the oracle, held against dense numpy and against itself in other orders."""

import subprocess
import sys

import numpy as np
import pytest
from backend_programs import CALLS, PROGRAMS, golden, inputs_for, ring

from meshweave.base.errors import BindError, ProgramError
from meshweave.execute.numpy import local_inputs, poisoned, run_numpy
from meshweave.ir.analysis.dataflow import analyse
from meshweave.ir.program.meanings import Product
from meshweave.ir.program.parse import parse
from meshweave.trace import check_order

GATHER = """
program("gather")
q = mesh((2,), ("x",))
X = tensor((5, 2), "float32")
x = input(X, q[S(0)])
y = output(X, q[R])
s = scratch((3, 2), "float32", on=q)
lane0 = lane()
with q:
    all_gather(y, x, over="q.x", dim=0, sizes=3 - peer, lane=lane0)
"""

HALVES = """
program("halves")
q = mesh((1,), ("x",))
A = tensor((1, 4096), "float16")
B = tensor((4096, 1), "float16")
C = tensor((1, 1), "float16")
a = input(A, q[R])
b = input(B, q[R])
c = output(C, q[R])
lane0 = lane()
with q:
    matmul(c, a, b, lane=lane0)
"""

PARTIAL = """
program("partial sums in, partial sums out")
p = mesh((2, 3), ("row", "col"))
X = tensor((4, 6), "int64")
M = tensor((4, 6), "int64")
Y = tensor((4, 6), "int64")
x = input(X, p[P, P])
m = input(M, p[S(0), P("max")])
y = output(Y, p[P, P])
z = output(M, p[S(0), P("max")])
lane0 = lane()
with p:
    copy(y, x, lane=lane0)
    copy(z, m, lane=lane0)
"""


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_legal_order_gives_the_same_numbers(name):
    program = PROGRAMS[name]()
    flow, values = analyse(program), inputs_for(program)
    first = run_numpy(program, values, calls=CALLS, flow=flow)
    for seed in range(4):
        other = run_numpy(program, values, calls=CALLS, flow=flow, seed=seed)
        assert first.outputs.keys() == other.outputs.keys()
        for tensor, value in first.outputs.items():
            np.testing.assert_array_equal(value, other.outputs[tensor])
    for product in program.computes:
        if not isinstance(product, Product):
            continue
        if {product.a, product.b} <= values.keys() and product.out in first.outputs:
            np.testing.assert_array_equal(first.outputs[product.out], values[product.a] @ values[product.b])
    assert check_order(first.trace, flow) > 0
    assert first.trace.source == "numpy"
    assert len(first.trace.spans) == sum(map(len, program.expanded.ops_by_rank.values()))


def test_uneven_products_on_six_ranks():
    program = golden("uneven_wang")
    values = inputs_for(program)
    np.testing.assert_array_equal(run_numpy(program, values).outputs["C"], values["A"] @ values["B"].T)


def test_partial_inputs_are_split_and_partial_outputs_reduced():
    program = parse(PARTIAL)
    values = inputs_for(program)
    terms = [local_inputs(program, values, rank)["x"] for rank in range(6)]
    assert all(term.any() for term in terms)
    result = run_numpy(program, values)
    np.testing.assert_array_equal(result.outputs["Y"], values["X"])
    np.testing.assert_array_equal(result.outputs["M"], values["M"])


def test_memory_nobody_wrote_is_poison():
    assert np.isnan(poisoned((2, 3), "bfloat16")).all()
    assert (poisoned((3,), "int16") == 0x5555).all()
    result = run_numpy(parse(GATHER), {"X": np.ones((5, 2), np.float32)})
    assert np.isnan(result.memory[0, "s", 0]).all()
    assert result.outputs["X"].dtype == np.float32


def test_bfloat16_is_computed_in_single_precision_and_halves_are_summed_in_it():
    program = ring(4, "bfloat16")
    assert run_numpy(program, inputs_for(program)).outputs["C"].dtype == np.float32
    ones = {"A": np.ones((1, 4096), np.float16), "B": np.ones((4096, 1), np.float16)}
    assert run_numpy(parse(HALVES), ones).outputs["C"] == 4096  # summed in halves it stays at 2048


def test_products_of_small_integers_fill_a_wider_result():
    text = HALVES.replace('C = tensor((1, 1), "float16")', 'C = tensor((1, 1), "int32")').replace(
        "float16", "int8"
    )
    assert "int32" in text
    threes = {"A": np.full((1, 4096), 3, np.int8), "B": np.full((4096, 1), 3, np.int8)}
    assert run_numpy(parse(text), threes).outputs["C"] == 9 * 4096


def test_replicas_that_differ_are_an_error():
    text = GATHER.replace(
        'all_gather(y, x, over="q.x", dim=0, sizes=3 - peer, lane=lane0)',
        "copy(y[:2, :], x[:2, :], lane=lane0)",
    ).replace("float32", "int32")
    with pytest.raises(ProgramError, match=r"other elements of X than a lower rank .*\(rank 1, buffer y\)"):
        run_numpy(parse(text), {"X": np.arange(10).reshape(5, 2)})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "tensor X is an input of program gather and was not given"),
        ({"X": np.zeros((2, 5))}, r"tensor X has shape \(5, 2\), not \(2, 5\)"),
        ({"X": np.zeros((5, 2), complex)}, "tensor X is float32, which complex128 does not become"),
        ({"X": np.zeros((5, 2)), "Z": np.zeros(1)}, "no input tensor 'Z'"),
    ],
)
def test_inputs_that_do_not_fit(values, message):
    with pytest.raises(BindError, match=message):
        run_numpy(parse(GATHER), values)


def test_calls_that_do_not_fit():
    program = PROGRAMS["messages"]()
    with pytest.raises(BindError, match=r"no function is bound to call 'mix' \(did you mean 'mi'\?\)"):
        run_numpy(program, inputs_for(program), calls={"mi": print})
    with pytest.raises(
        BindError, match=r"call 'mix' must return shapes \[\(6, 3\), \(6, 2\)\], not \[\(6, 3\)\]"
    ):
        run_numpy(program, inputs_for(program), calls={"mix": lambda first, second, factor: first})


def test_it_needs_no_torch():
    code = "import sys, meshweave.execute.numpy; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
