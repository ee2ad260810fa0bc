"""From plans to torch and jax: `meshweave.matmul2d`, `meshweave.jax`. The package itself imports neither."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshweave.nn import fused as fused
    from meshweave.nn import jax as jax


def __getattr__(name: str) -> ModuleType:
    """Return `fused` or `jax`, imported at its first use."""
    if name not in ("fused", "jax"):
        raise AttributeError(f"module 'meshweave.nn' has no attribute '{name}'")
    return import_module(f"meshweave.nn.{name}")
