"""Functions of local tensors as ops: values, gradients and shapes, with and without a compiler."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
from torch import Tensor  # noqa: E402

from meshweave.base.errors import BindError, UnsupportedError  # noqa: E402
from meshweave.nn.custom_ops import LocalFunction, LocalOp, function_of, number_of, value_of  # noqa: E402

OP = LocalOp("test_layer")


class ScaledProduct(LocalFunction):
    """factor (x @ w), which keeps the transpose of x; numpy computes it, which no compiler can trace."""

    def __init__(self, factor: float) -> None:
        super().__init__("scaled product", str(factor))
        self.factor, self.num_runs = factor, 0

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        x, w = inputs
        self.num_runs += 1
        product = torch.from_numpy(x.detach().numpy() @ w.detach().numpy())
        return [product * self.factor, x.detach().t().contiguous()]

    def empty(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        x, w = inputs
        return [x.new_empty(x.shape[0], w.shape[1]), x.new_empty(x.shape[1], x.shape[0])]

    def backward(
        self,
        grads: Sequence[Tensor],
        inputs: Sequence[Tensor],
        kept: Sequence[Tensor],
        needed: Sequence[bool],
    ) -> list[Tensor]:
        gradients = grads[0] @ inputs[1].t() * self.factor, kept[0] @ grads[0] * self.factor
        return [gradient for gradient, is_needed in zip(gradients, needed, strict=True) if is_needed]


def test_an_op_has_the_values_and_gradients_of_its_function() -> None:
    function = ScaledProduct(2.0)
    x = torch.arange(6.0).reshape(2, 3)
    for needs in ((True, True), (True, False), (False, True)):
        leaves = [value.clone().requires_grad_(need) for value, need in zip((x, x.t()), needs, strict=True)]
        expected = [value.clone().requires_grad_(need) for value, need in zip((x, x.t()), needs, strict=True)]

        def layer(a: Tensor, b: Tensor) -> Tensor:
            return OP(function, [a.sin(), b])[0].cos()

        (2.0 * (expected[0].sin() @ expected[1])).cos().sum().backward()
        for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
            before = function.num_runs
            for leaf in leaves:
                leaf.grad = None
            run(*leaves).sum().backward()
            assert function.num_runs == before + 1
            for leaf, other in zip(leaves, expected, strict=True):
                assert (leaf.grad is None) == (other.grad is None)
                assert leaf.grad is None or torch.allclose(leaf.grad, other.grad)


def test_fake_tensors_get_shapes_and_run_nothing() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    function = ScaledProduct(3.0)
    with FakeTensorMode():
        (y,) = OP(function, [torch.ones(4, 3), torch.ones(3, 5)])
    assert y.shape == (4, 5) and function.num_runs == 0


def test_a_second_derivative_and_a_function_that_is_gone_are_refused() -> None:
    function = ScaledProduct(4.0)
    x = torch.ones(2, 2, requires_grad=True)
    (y,) = OP(function, [x, x])
    with pytest.raises(UnsupportedError, match="differentiable once"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    handle = function.handle
    assert function_of(handle) is function
    del function, y
    gc.collect()
    with pytest.raises(BindError, match="no function"):
        function_of(handle)


def test_equal_values_have_one_number() -> None:
    first, second = number_of(("a product", 4)), number_of(("another", 4))
    assert first != second and number_of(("a product", 4)) == first
    assert value_of(first, tuple) == ("a product", 4)
    with pytest.raises(AssertionError):
        value_of(first, list)
