"""Run by Python itself at its start: paces torch's products from the moment a program imports torch.

It then gives way to the `sitecustomize` that this one hides, if there is one.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


class _AfterTorch:
    """A finder that finds torch as everybody else would, and has its loader turn pacing on afterwards."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                from meshweave_lab.pace import pace_from_environment

                pace_from_environment()

            loader.exec_module = exec_module
        return spec


def _next_sitecustomize() -> None:
    here = Path(__file__).resolve().parent
    spec = PathFinder.find_spec("sitecustomize", [p for p in sys.path if Path(p or ".").resolve() != here])
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if os.environ.get("MESHWEAVE_PACE_FLOPS_PER_S"):
    sys.meta_path.insert(0, _AfterTorch())
_next_sitecustomize()
