"""`mw.jax.matmul2d`: equal to the dense product, forward and backward, whatever jax does to it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshweave as mw

sys.path.insert(0, str(Path(__file__).parents[1] / "execute"))
from jax_world import needs_jax, prepare_jax

pytestmark = needs_jax

DENSE = {
    "os": (lambda x, w: x @ w, (7, 13), (13, 5)),
    "ls": (lambda x, w: x @ w.T, (7, 13), (5, 13)),
    "rs": (lambda x, w: x.T @ w, (13, 7), (13, 5)),
}


def integers(jax: Any, seed: int, *shape: int) -> Any:
    return jax.numpy.asarray(np.random.default_rng(seed).integers(-3, 4, shape), "float32")


def mesh_of(jax: Any, *shape: int) -> Any:
    count = int(np.prod(shape))
    return jax.make_mesh(shape, ("x", "y"), devices=jax.devices()[:count])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["meshslice", "collective", "wang", "summa"])
@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (4, 2), (4, 4)])
@pytest.mark.parametrize("dataflow", DENSE)
def test_gradients_equal_those_of_the_dense_product(dataflow: Any, shape: Any, algorithm: str) -> None:
    jax = prepare_jax()
    dense, x_shape, w_shape = DENSE[dataflow]
    x, w = integers(jax, 1, *x_shape), integers(jax, 2, *w_shape)
    dy = integers(jax, 3, *dense(x, w).shape)
    mesh = mesh_of(jax, *shape)

    def value(multiply: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda x, w: (multiply(x, w) * dy).sum(), (0, 1)))(x, w)

    ours = value(
        lambda x, w: mw.jax.matmul2d(
            x, w, mesh=mesh, dataflow=dataflow, algorithm=algorithm, slices=2, block=2
        )
    )
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(value(dense)), strict=True):
        assert np.array_equal(one, other)


def test_in_a_scan_with_recomputation() -> None:
    jax = prepare_jax()
    x, w, mesh = integers(jax, 1, 4, 4), integers(jax, 2, 4, 4), mesh_of(jax, 2, 2)

    def gradient(multiply: Any) -> Any:
        def layer(h: Any, _: Any) -> Any:
            return jax.checkpoint(multiply)(h, w_of[0]) % 5, None

        w_of = [w]

        def loss(w: Any) -> Any:
            w_of[0] = w
            return jax.lax.scan(layer, x, None, length=3)[0].sum()

        return jax.jit(jax.grad(loss))(w)

    ours = gradient(lambda h, w: mw.jax.matmul2d(h, w, mesh=mesh, slices=2, block=1))
    assert np.array_equal(ours, gradient(lambda h, w: h @ w))


def test_the_result_and_gradients_lie_like_the_operands() -> None:
    jax = prepare_jax()
    mesh = mesh_of(jax, 2, 2)
    lying = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y"))
    x, w = (jax.device_put(integers(jax, seed, 4, 4), lying) for seed in (1, 2))
    y, pull = jax.vjp(lambda x, w: mw.jax.matmul2d(x, w, mesh=mesh, slices=1), x, w)
    for array in (y, *pull(y)):
        assert array.sharding.is_equivalent_to(lying, 2)


@pytest.mark.slow
def test_under_a_mesh_of_explicit_axes() -> None:
    jax = prepare_jax()
    mesh = mesh_of(jax, 2, 2)
    with jax.set_mesh(mesh):
        spec = jax.sharding.PartitionSpec("x", "y")
        x, w = (jax.device_put(integers(jax, seed, 6, 6), spec) for seed in (1, 2))
        y, pull = jax.vjp(jax.jit(lambda x, w: mw.jax.matmul2d(x, w, mesh=mesh, slices=2)), x, w)
        one, other, result = (np.asarray(array) for array in (x, w, y))
        assert np.array_equal(result, one @ other)
        assert np.array_equal(pull(y)[0], result @ other.T)


def test_operands_are_promoted_as_by_matmul() -> None:
    jax = prepare_jax()
    weak = jax.numpy.full((2, 2), 1.0)
    y = mw.jax.matmul2d(weak.astype("bfloat16"), weak, mesh=mesh_of(jax, 1, 1))
    assert weak.weak_type and y.dtype == "bfloat16"
    of_numpy = np.ones((2, 2))  # 64 bits, which jax does not have here
    assert mw.jax.matmul2d(of_numpy, of_numpy, mesh=mesh_of(jax, 1, 1)).dtype == "float32"


def test_what_does_not_fit_is_refused() -> None:
    jax = prepare_jax()
    x, mesh = integers(jax, 1, 4, 6), mesh_of(jax, 2, 2)
    with pytest.raises(mw.errors.LayoutError, match="have K = 6 and 4 for dataflow os"):
        mw.jax.matmul2d(x, x, mesh=mesh)
    with pytest.raises(mw.errors.LayoutError, match="shapes"):
        mw.jax.matmul2d(x[0], x, mesh=mesh)
    with pytest.raises(mw.errors.BindError, match="1000000000 slices are more than"):
        mw.jax.matmul2d(x, x.T, mesh=mesh, slices=10**9)
    with pytest.raises(mw.errors.BindError, match="one of"):
        mw.jax.matmul2d(x > 0, x.T > 0, mesh=mesh)
    with pytest.raises(mw.errors.LayoutError, match="2 axes"):
        mw.jax.matmul2d(x, x.T, mesh=jax.make_mesh((4,), ("x",), devices=jax.devices()[:4]))
    kinds = jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto
    mixed = jax.make_mesh((2, 2), ("x", "y"), kinds, devices=jax.devices()[:4])
    lying = jax.sharding.NamedSharding(mixed, jax.sharding.PartitionSpec("x"))
    with pytest.raises(mw.errors.LayoutError, match="all explicit or all automatic"):
        mw.jax.matmul2d(jax.device_put(x, lying), x.T, mesh=mixed)
