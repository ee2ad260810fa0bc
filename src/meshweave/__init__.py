"""meshweave: weave communication into computation across a device mesh.

The public names. Each is imported at its first use, so that `import meshweave` is quick and planning works
without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Cluster": "describe.machine.cluster",
    "Layout": "describe.layout",
    "Mesh": "describe.layout.mesh",
    "MeshweaveError": "base.errors",
    "Machine": "cost.machine",
    "Plan": "tune",
    "Program": "ir.program",
    "Trace": "trace",
    "Transformer": "describe.model",
    "Workload": "describe.model.workload",
    "bind": "execute.torch.bind",
    "load_cluster": "describe.machine.cluster",
    "load_model": "describe.model",
    "load_plan": "tune",
    "lower_rings": "lower",
    "matmul": "nn.matmul",
    "matmul2d": "nn.matmul2d",
    "parse": "ir.program.parse",
    "plan_model": "tune",
    "reshard": "nn.reshard",
    "reshard_state_dict": "nn.reshard_state",
    "run_numpy": "execute.numpy",
    "to_text": "ir.program.text",
    "universal_linear": "nn.linear",
    "validate": "ir.analysis.validate",
}

if TYPE_CHECKING:
    from meshweave.base.errors import MeshweaveError as MeshweaveError
    from meshweave.cost.machine import Machine as Machine
    from meshweave.describe.layout import Layout as Layout
    from meshweave.describe.layout.mesh import Mesh as Mesh
    from meshweave.describe.machine.cluster import Cluster as Cluster
    from meshweave.describe.machine.cluster import load_cluster as load_cluster
    from meshweave.describe.model import Transformer as Transformer
    from meshweave.describe.model import load_model as load_model
    from meshweave.describe.model.workload import Workload as Workload
    from meshweave.execute.numpy import run_numpy as run_numpy
    from meshweave.execute.torch.bind import bind as bind
    from meshweave.ir.analysis.validate import validate as validate
    from meshweave.ir.program import Program as Program
    from meshweave.ir.program.parse import parse as parse
    from meshweave.ir.program.text import to_text as to_text
    from meshweave.lower import lower_rings as lower_rings
    from meshweave.nn.linear import universal_linear as universal_linear
    from meshweave.nn.matmul import matmul as matmul
    from meshweave.nn.matmul2d import matmul2d as matmul2d
    from meshweave.nn.reshard import reshard as reshard
    from meshweave.nn.reshard_state import reshard_state_dict as reshard_state_dict
    from meshweave.trace import Trace as Trace
    from meshweave.tune import Plan as Plan
    from meshweave.tune import load_plan as load_plan
    from meshweave.tune import plan_model as plan_model

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'meshweave' has no attribute '{name}'")
    value = getattr(import_module(f"meshweave.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
