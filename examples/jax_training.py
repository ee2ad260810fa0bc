"""A small model in JAX trained with 2D-parallel products on 8 devices, beside the same model with dense ones.

    python examples/jax_training.py

Activations and weights of both layers are sharded over a 2 x 4 mesh, and so are gradients. A scan runs the steps.
On a machine without accelerators jax makes 8 devices of the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
)

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import meshweave as mw

TOKENS, INS, HIDDEN, STEPS = 64, 32, 128, 6
Product = Callable[[jax.Array, jax.Array], jax.Array]
Weights = tuple[jax.Array, jax.Array]


def train(multiply: Product, weights: Weights, x: jax.Array, target: jax.Array) -> jax.Array:
    """Return the loss of each step of gradient descent on two layers."""

    @jax.checkpoint
    def model(weights: Weights) -> jax.Array:
        return multiply(jax.nn.gelu(multiply(x, weights[0])), weights[1])

    def step(weights: Weights, _: None) -> tuple[Weights, jax.Array]:
        loss, gradients = jax.value_and_grad(lambda w: jnp.square(model(w) - target).mean())(weights)
        return jax.tree.map(lambda w, g: w - 20 * g, weights, gradients), loss

    return jax.jit(lambda weights: jax.lax.scan(step, weights, length=STEPS)[1])(weights)


def main() -> None:
    """Train on eight host devices and print losses beside those of one device."""
    mesh = jax.make_mesh((2, 4), ("row", "col"), devices=jax.devices()[:8])
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((TOKENS, INS), (INS, HIDDEN), (HIDDEN, INS), (TOKENS, INS))
    whole = [
        jax.random.normal(key, shape) * shape[0] ** -0.5 for key, shape in zip(keys, shapes, strict=True)
    ]
    lying = NamedSharding(mesh, PartitionSpec("row", "col"))
    x, first, second, target = (jax.device_put(array, lying) for array in whole)

    losses = train(lambda x, w: mw.jax.matmul2d(x, w, mesh=mesh, slices=4), (first, second), x, target)
    dense = train(jnp.matmul, (whole[1], whole[2]), whole[0], whole[3])
    for number, (loss, other) in enumerate(zip(losses, dense, strict=True)):
        print(f"step {number}: loss {loss:.6f} on 8 devices, {other:.6f} dense")
    assert jnp.allclose(losses, dense, rtol=1e-5)
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
