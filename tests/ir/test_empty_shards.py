"""Ranks that have nothing of a tensor take part in calls, products and sums of it like all others."""

from __future__ import annotations

import numpy as np

from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program.parse import parse

ATTENTION = """
program("two groups of heads on three ranks")
tp = mesh((3,), ("x",))
X = tensor((2, 3, 4), "float32")
W = tensor((4, 6), "float32")
P = tensor((2, 3, 6), "float32")
Q = tensor((2, 3, 2, 3), "float32")
H = tensor((2, 3, 2, 3), "float32")
A = tensor((2, 3, 6), "float32")
D = tensor((4, 6), "float32")
computes(P, product(X, W))
computes(Q, same(P))
computes(H[b, :, g, :], call("heads", Q[b, :, g, :]))
computes(A, same(H))
computes(D, product(X, A, transpose_a=True))
x = input(X, tp[R])
w = input(W, tp[T(1, 3, 0)])
p = temp(P, tp[T(2, 3, 0)])
a = output(A, tp[T(2, 3, 0)])
d = output(D, tp[T(1, 3, 0)])
compute = lane()
with tp:
    matmul(p, x, w, lane=compute)
    call(fn="heads", outs=(a,), ins=(p,), lane=compute)
    matmul(d, x, a, transpose_a=True, lane=compute)
"""

SUMS = """
program("sums of squares of two tensors, of which the last of three ranks has nothing")
tp = mesh((3,), ("x",))
X = tensor((5, 2), "float32")
Y = tensor((5, 2), "float32")
S = tensor((5,), "float32")
T = tensor((5,), "float32")
computes(S[i], call("squares", X[i, j], reduce="sum"))
computes(T[i], call("squares", Y[i, j], reduce="sum"))
x = input(X, tp[S(1)])
y = input(Y, tp[S(1)])
s = output(S, tp[R])
t = output(T, tp[R])
compute = lane()
net = lane()
with tp:
    call(fn="squares", outs=(s,), ins=(x,), lane=compute)
    call(fn="squares", outs=(t,), ins=(y,), lane=compute)
    all_reduce(s, s, over="tp.x", lane=net)
    all_reduce(t, t, over="tp.x", lane=net)
"""


def test_a_call_on_no_groups_of_heads_is_proved() -> None:
    """The batch that a weight gradient sums over is there on a rank that has none of its columns."""
    program = parse(ATTENTION)
    assert validate(program).skipped == ()
    draw = np.random.default_rng(0)
    inputs = {"X": draw.integers(-3, 4, (2, 3, 4)), "W": draw.integers(-3, 4, (4, 6))}
    outputs = run_numpy(program, inputs, calls={"heads": lambda q: [q * 2]}).outputs
    expected = 2 * (inputs["X"] @ inputs["W"])
    np.testing.assert_array_equal(outputs["A"], expected)
    np.testing.assert_array_equal(outputs["D"], inputs["X"].reshape(6, 4).T @ expected.reshape(6, 6))


def test_a_sum_over_nothing_is_zero_of_the_tensor_that_is_written() -> None:
    """Empty inputs do not tell which of two meanings of a function is meant; the output does."""
    program = parse(SUMS)
    assert validate(program).skipped == ()
    inputs = {"X": np.arange(10).reshape(5, 2), "Y": -np.arange(10).reshape(5, 2) - 1}
    outputs = run_numpy(program, inputs, calls={"squares": lambda z: [(z * z).sum(1)]}).outputs
    np.testing.assert_array_equal(outputs["S"], (inputs["X"] ** 2).sum(1))
    np.testing.assert_array_equal(outputs["T"], (inputs["Y"] ** 2).sum(1))
