"""What is exported, and what an export is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshweave.base.errors import UnsupportedError
from meshweave.describe.model import Transformer
from meshweave.tune.plan import Plan
from meshweave.tune.plan_records import DegreesRecord


@dataclass(frozen=True)
class Export:
    """Settings of other software.

    Attributes:
        target: whose they are.
        settings: as its configuration has them, for JSON.
        text: as one writes them: arguments of a command line, or Python.
        left_out: what of the plan they do not say, a sentence each.
    """

    target: str
    settings: dict[str, Any]
    text: str
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class PlannedRow:
    """One configuration of a plan, with the model that it is for."""

    plan: Plan
    model: Transformer
    degrees: DegreesRecord

    @property
    def settings(self) -> dict[str, Any]:
        """Return what the step was priced with where that is not the default."""
        return self.plan.description.settings if self.plan.description else {}

    @property
    def tensor(self) -> int:
        """Return how many ranks share a layer. Raises UnsupportedError where they are a mesh of two axes."""
        tensor = self.degrees.tensor
        first, second = (tensor, 1) if isinstance(tensor, int) else tensor
        if min(first, second) > 1:
            raise UnsupportedError(
                f"{self.degrees.strategy} on {first}x{second} ranks needs tensor parallelism of two axes"
            )
        return first * second

    @property
    def num_layers_per_stage(self) -> int | None:
        """Return the layers of a stage of the pipeline, or None where stages differ."""
        stages = self.degrees.pipeline * self.degrees.virtual_stages
        return None if self.model.num_layers % stages else self.model.num_layers // stages

    def require_megatron(self, target: str) -> None:
        """Raise UnsupportedError where layers are shared otherwise than Megatron does it along one axis."""
        if self.tensor > 1 and self.degrees.strategy not in ("megatron", "megatron_sp"):
            raise UnsupportedError(
                f"{target} shares layers as megatron and megatron_sp do, and not as {self.degrees.strategy}; "
                "mw.parallelize runs that"
            )
