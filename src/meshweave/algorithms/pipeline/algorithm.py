"""The base of pipeline schedules: entries that say in which order each pipeline rank works on what.

A schedule is a pure function from a problem to the compute actions of each pipeline rank. All else is shared:
`communication` puts transfers between the actions, `program` writes them as a Program, `functions` says what
the stages compute.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshweave.algorithms.contract import Algorithm, Array, Arrays
from meshweave.algorithms.pipeline.actions import Schedule
from meshweave.algorithms.pipeline.examples import example_problems
from meshweave.algorithms.pipeline.functions import reference, stage_functions
from meshweave.algorithms.pipeline.problem import PipelineProblem
from meshweave.algorithms.pipeline.program import Transfers, pipeline_program
from meshweave.algorithms.pipeline.tensors import tensor_layouts
from meshweave.base.errors import LayoutError
from meshweave.cost.fabric import HostTopology
from meshweave.describe.layout import Layout
from meshweave.describe.machine.cluster import Cluster
from meshweave.ir.program import Program


@dataclass(frozen=True)
class PipelineConfig:
    """How transfers are run, and what a schedule leaves open.

    Attributes:
        transfers: "overlapped": in lanes of their own, beside the stages. "blocking": in turn with the
            stages, which wait for them (AlpaComm's comparison without overlap). "paired": one lane for each
            two pipeline ranks, both directions, as NCCL orders them. "signals": as overlapped, but each
            message is one byte, which keeps all dependencies and costs nothing: the upper bound of any transfer.
        chunks: messages into which each transfer is cut.
        strategy: how a boundary is resharded whose two layouts differ; a key of
            `algorithms.reshard.STRATEGIES`.
        delay: by how many micro-batches weight gradients are put off, for schedules that choose it.
        network: hosts and NICs for which reshards are planned; None where each chip is a host of its own.
    """

    transfers: Transfers = "overlapped"
    chunks: int = 1
    strategy: str = "broadcast"
    delay: int = 0
    network: HostTopology | None = None

    def __str__(self) -> str:
        parts: list[str] = [self.transfers]
        parts += [f"{self.chunks} chunks"] if self.chunks > 1 else []
        parts += [self.strategy] if self.strategy != "broadcast" else []
        parts += [f"delay {self.delay}"] if self.delay else []
        return ", ".join(parts)


def network_of(problem: PipelineProblem, cluster: Cluster | None) -> HostTopology | None:
    """Return the hosts of a problem's ranks; None without a cluster, or if all stages are on one chip each."""
    if cluster is None or all(mesh.num_ranks == 1 for mesh in problem.meshes):
        return None
    return HostTopology.of(cluster, 1 + max(rank for mesh in problem.meshes for rank in mesh.ranks))


class PipelineAlgorithm(Algorithm[PipelineProblem, PipelineConfig]):
    """A schedule of the stages of a pipeline: subclasses write `schedule`, and may refuse problems."""

    problem_type = PipelineProblem

    @abstractmethod
    def schedule(self, problem: PipelineProblem, config: PipelineConfig) -> Schedule:
        """Return the compute actions of each pipeline rank. `stage_ranks` are those of the problem."""

    def examples(self) -> Iterator[PipelineProblem]:
        """Yield the small problems that the schedule solves."""
        return (problem for problem in example_problems() if self.refusal(problem) is None)

    def candidates(
        self, problem: PipelineProblem, cluster: Cluster | None = None
    ) -> Iterator[PipelineConfig]:
        """Yield transfers beside the stages, then in turn with them, with reshards planned for the cluster."""
        network = network_of(problem, cluster)
        yield PipelineConfig(network=network)
        yield PipelineConfig("blocking", network=network)

    def program(self, problem: PipelineProblem, config: PipelineConfig) -> Program:
        refusal = self.refusal(problem)
        if refusal is not None:
            raise LayoutError(f"{self.name}: {refusal}")
        return pipeline_program(
            problem,
            self.schedule(problem, config),
            config.transfers,
            chunks=config.chunks,
            strategy=config.strategy,
            network=config.network,
            title=self.title,
        )

    def reference(self, problem: PipelineProblem, inputs: Arrays) -> dict[str, Array]:
        return reference(problem, inputs)

    def placements(self, problem: PipelineProblem) -> dict[str, Layout]:
        return tensor_layouts(problem)

    def functions(self, problem: PipelineProblem) -> Mapping[str, Callable[..., Any]]:
        return stage_functions(problem)
