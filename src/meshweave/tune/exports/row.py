"""What is exported, and what an export is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from meshweave.algorithms.block.roles import IDLE, INNER, SEQUENCE_INNER
from meshweave.algorithms.pipeline import PipelineAlgorithm
from meshweave.algorithms.step.software_stack import SoftwareStack
from meshweave.algorithms.step.stage_layers import model_costs, stage_layers
from meshweave.algorithms.table import SCHEDULES, STRATEGIES
from meshweave.base.errors import UnsupportedError
from meshweave.describe.model import Transformer
from meshweave.describe.model.experts import Experts
from meshweave.describe.model.nodes import Linear
from meshweave.tune.plan import Plan
from meshweave.tune.plan_description import planned_stack
from meshweave.tune.plan_records import DegreesRecord


@dataclass(frozen=True, repr=False)
class Export:
    """Settings of other software.

    Attributes:
        target: the other software, by its name in `TARGETS`.
        settings: the settings by name, as JSON values.
        text: the settings as the software takes them: arguments of a command line, JSON, or Python.
        left_out: what of the plan the settings do not express, a sentence each.
        environment: variables that each process is to have; launch files set them.
        priced: in words, the stack that the configuration was priced for, where that is not the target's, and
            what it takes on the target; "" else.
    """

    target: str
    settings: dict[str, Any]
    text: str
    left_out: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    priced: str = ""

    def __repr__(self) -> str:
        """Return the target and how much is said and left out, in a line; `text` has the settings."""
        return (
            f"<Export to {self.target}: {len(self.text.splitlines())} lines, {len(self.left_out)} left out>"
        )

    def __str__(self) -> str:
        """Return the text."""
        return self.text


@dataclass(frozen=True)
class PlannedRow:
    """One configuration of a plan, with the model that it is for."""

    plan: Plan
    model: Transformer
    degrees: DegreesRecord

    @property
    def settings(self) -> dict[str, Any]:
        """Return the attributes of the plan's `StepProblem` that are not the defaults, by name, as JSON values.

        {} for a plan of an older format.
        """
        return self.plan.description.settings if self.plan.description else {}

    @property
    def stack(self) -> SoftwareStack:
        """Return the software stack that the row is priced for. Raises DescriptionError if it is not known."""
        return planned_stack(self.plan)

    @property
    def tensor(self) -> int:
        """Return the tensor-parallel degree.

        Raises:
            UnsupportedError: the tensor ranks are a mesh with more than one rank along both axes.
        """
        tensor = self.degrees.tensor
        first, second = (tensor, 1) if isinstance(tensor, int) else tensor
        if min(first, second) > 1:
            raise UnsupportedError(
                f"{self.degrees.strategy} on {first}x{second} ranks needs tensor parallelism of two axes"
            )
        return first * second

    @property
    def accumulated(self) -> int:
        """Return the number of micro-batches that each replica runs in a step."""
        return self.plan.batch // (self.degrees.micro_batch * self.degrees.data)

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Return the number of layers of each of the `pipeline * virtual_stages` stages, in the model's order.

        Layers are shared out as the plan's software stack does it.
        """
        stages = self.degrees.pipeline * self.degrees.virtual_stages
        return stage_layers(self.model.num_layers, stages, model_costs(self.model, self.stack))

    @property
    def num_layers_per_stage(self) -> int | None:
        """Return the number of layers of a pipeline stage; None where stages differ in it."""
        first, *others = self.stage_layers
        return first if all(each == first for each in others) else None

    @property
    def schedule(self) -> PipelineAlgorithm:
        """Return the schedule for the row's stages per rank. Raises UnsupportedError if it is unknown."""
        return SCHEDULES.named(self.degrees.schedule).for_stages(self.degrees.virtual_stages)

    @property
    def is_sequence_parallel(self) -> bool:
        """Return whether tensor-parallel ranks shard activations by tokens between products, as in Megatron-LM.

        Raises UnsupportedError where they are a mesh of two axes, or the strategy is unknown.
        """
        return self.tensor > 1 and SEQUENCE_INNER in STRATEGIES.named(self.degrees.strategy).roles

    def require_megatron(self, target: str) -> None:
        """Raise UnsupportedError if tensor parallelism is of another kind than Megatron-LM's along one axis.

        `target` is the software that is exported to, for the error.
        """
        strategy = STRATEGIES.named(self.degrees.strategy)
        if self.tensor > 1 and not set(strategy.roles) <= {INNER, SEQUENCE_INNER, IDLE}:
            raise UnsupportedError(
                f"{target} shares layers as Megatron-LM does, along one axis, and not as {strategy.name}; "
                "mw.parallelize runs that"
            )

    def require_even_shares(self, target: str) -> None:
        """Raise UnsupportedError if ranks get unequal shares of heads of keys and values, or of a sequence.

        A sequence is cut into 2 parts for each context-parallel rank, which takes one from either end; with one
        such rank it is whole. With sequence parallelism tensor ranks divide each part. `target` is the software
        that is exported to, for the error.
        """
        attentions = [node for _, graph in self.model.runs for node in graph.attentions]
        if uneven := {node.groups for node in attentions if node.groups % self.tensor}:
            raise UnsupportedError(
                f"{target} gives each tensor rank as many heads, and {min(uneven)} heads of keys and values do "
                f"not divide among {self.tensor} ranks"
            )
        context = self.degrees.context
        parts = (self.tensor if self.is_sequence_parallel else 1) * (2 * context if context > 1 else 1)
        if self.plan.sequence % parts:
            raise UnsupportedError(
                f"{target} takes sequences of a multiple of {parts} tokens by {self.degrees.strategy} on context "
                f"{context} x tensor {self.tensor}, and not of {self.plan.sequence}"
            )

    def require_even_features(self, target: str) -> None:
        """Raise UnsupportedError if ranks get unequal shares of the inner features of feed-forward parts.

        Tensor ranks share those of dense parts, and `expert_tensor` ranks those of an expert. `target` is the
        software that is exported to, for the error.
        """
        nodes = [node for _, graph in self.model.runs for node in graph.nodes]
        dense = [node.operand for node in nodes if isinstance(node, Linear) and node.group == "feed_forward"]
        shared = {(features.size, self.tensor) for features in dense if features.dim == "inner"}
        shared |= {(node.inner, self.degrees.expert_tensor) for node in nodes if isinstance(node, Experts)}
        for size, ranks in sorted(shared):
            if size % ranks:
                raise UnsupportedError(
                    f"{target} gives each rank as many inner features, and {size} of a feed-forward part do not "
                    f"divide among {ranks} ranks; mw.parallelize runs that"
                )

    def require_no_pipeline(self, target: str) -> None:
        """Raise UnsupportedError if layers are divided into stages, for software `target` without pipelines."""
        if self.degrees.pipeline > 1:
            raise UnsupportedError(
                f"{target} has no pipelines of stages; mw.pipeline runs {self.degrees.schedule}"
            )

    def require_dense(self, target: str) -> None:
        """Raise UnsupportedError if a degree of experts (`expert`, `expert_tensor`) is above 1.

        A model with experts passes if all ranks have all of them. `target` is the software, without expert
        parallelism, that is exported to, for the error.
        """
        if self.degrees.expert > 1 or self.degrees.expert_tensor > 1:
            raise UnsupportedError(f"the settings of {target} written here have no degrees of experts")
