"""Products for models in JAX: `matmul2d` of sharded arrays. It needs jax (the extra `jax`), and no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshweave.base.lazy import lazy_names

if TYPE_CHECKING:
    from meshweave.nn.jax.matmul2d import matmul2d as matmul2d

__all__ = lazy_names(__name__)
