"""Products for models in JAX: `matmul2d` of sharded arrays. It needs jax (the extra `jax`), and no torch."""

from meshweave.nn.jax.matmul2d import matmul2d

__all__ = ["matmul2d"]
