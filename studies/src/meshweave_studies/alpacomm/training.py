"""AlpaComm's end-to-end runs (MLSys '23, sections 5.2 and 5.3.2), each simulated once.

Two hosts of four GPUs, a stage on each. What is sent between them is resharded; a host has one NIC. The variants,
from the paper's rival to its bound:

    all-gather   1F1B; a stage does nothing else while it sends or receives; resharding by all-gather
    broadcast    the same with resharding by broadcast
    overlap      1F1B with transfers beside the stages
    eager        eager-1F1B
    delayed      eager-1F1B with weight gradients delayed by the least that covers the transfers
    bound        the schedule of delayed with messages of one byte
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from meshweave.algorithms.pipeline import (
    DelayedWeights,
    EagerOneForwardOneBackward,
    Edge,
    OneForwardOneBackward,
    PartCost,
    PipelineAlgorithm,
    PipelineConfig,
    PipelineProblem,
    Stage,
    Stash,
)
from meshweave.algorithms.pipeline.delayed import least_delay
from meshweave.algorithms.pipeline.program import Transfers
from meshweave.algorithms.pipeline.timing import times_on
from meshweave.base.units import dtype_bytes
from meshweave.cost.fabric import HostTopology
from meshweave.cost.machine import Machine
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.network import HostsNetwork
from meshweave.ir.analysis.lifetimes import peak_stash_bytes
from meshweave.simulate import simulate
from meshweave_studies.alpacomm.models import ALL_CASES, GPUS, StageWork, TrainedCase

ALL_GATHER, BROADCAST, OVERLAP = "all-gather", "broadcast", "overlap"
EAGER, DELAYED, BOUND = "eager", "delayed", "bound"
VARIANTS = (ALL_GATHER, BROADCAST, OVERLAP, EAGER, DELAYED, BOUND)
CHIP_FLOPS_PER_S = 1e12
"""The rate at which the simulated chip runs: seconds of parts are given to it as FLOPs."""


@dataclass(frozen=True)
class TrainingStep:
    """A simulated step.

    Attributes:
        seconds: of the step.
        delay: of weight gradients, in micro-batches.
        stash_bytes: the most that a GPU of each stage keeps for backwards.
    """

    seconds: float
    delay: int
    stash_bytes: tuple[int, ...]


@dataclass
class TrainingStudy:
    """The end-to-end runs on hosts of a cluster.

    Attributes:
        cluster: hosts of four chips at least with one NIC each.
        advance: called after every simulation.
    """

    cluster: Cluster
    advance: Callable[[], None] = lambda: None
    _known: dict[tuple[str, str, int], TrainingStep] = field(default_factory=dict)

    @cached_property
    def hosts(self) -> Cluster:
        """Return two hosts whose chips run at the rate that parts are given in."""
        network = self.cluster.network
        assert isinstance(network, HostsNetwork)
        hosts = self.cluster.with_chips(2 * network.chips_per_host)
        return replace(hosts, chip=hosts.chip.with_flops_per_s(CHIP_FLOPS_PER_S))

    def step(self, case: str, variant: str, micro_batches: int = 0) -> TrainingStep:
        """Return a step of a case, with its own number of micro-batches or another one, simulated once."""
        count = micro_batches or ALL_CASES[case].micro_batches
        key = case, variant, count
        if key not in self._known:
            self._known[key] = self._simulate(self.problem(ALL_CASES[case], count), variant)
            self.advance()
        return self._known[key]

    def share_of_bound(self, case: str) -> float:
        """Return the throughput of eager-1F1B over that of the bound, in percent."""
        return 100 * self.faster(case, EAGER, BOUND)

    def faster(self, case: str, variant: str, than: str, micro_batches: int = 0) -> float:
        """Return the throughput of a variant over that of another one."""
        steps = [self.step(case, name, micro_batches) for name in (than, variant)]
        return steps[0].seconds / steps[1].seconds

    def tflops_per_s(self, case: str, variant: str, micro_batches: int = 0) -> float:
        """Return the TFLOP/s of all GPUs together, without recomputation."""
        of = ALL_CASES[case]
        count = micro_batches or of.micro_batches
        flops = 3 * of.rows * count * sum(stage.flops for stage in of.shape.stages)
        return flops / self.step(case, variant, count).seconds / 1e12

    def problem(self, case: TrainedCase, micro_batches: int) -> PipelineProblem:
        """Return the two stages of a case, and what crosses between them."""
        stages = tuple(self._stage(case, number, shape) for number, shape in enumerate(case.shape.stages))
        edge = Edge(0, 1, case.shape.boundary, dtype=case.dtype)
        return PipelineProblem(stages, (edge,), micro_batches, case.rows)

    def _stage(self, case: TrainedCase, number: int, shape: StageWork) -> Stage:
        network = self.hosts.network
        assert isinstance(network, HostsNetwork)
        first = number * network.chips_per_host
        mesh = Mesh(
            f"host{number}",
            (GPUS // case.operators, case.operators),
            ("data", "operator"),
            tuple(range(first, first + GPUS)),
        )
        part_s = case.part_s(shape, 1, network.intra.link_bytes_per_s)
        forward = PartCost(round(part_s * CHIP_FLOPS_PER_S))
        again = PartCost(2 * forward.flops)
        kept = case.rows * case.operators // GPUS * shape.kept * dtype_bytes(case.dtype)
        return Stage(
            mesh,
            forward,
            again,
            forward,
            parameters=shape.parameters // case.operators,
            stash=Stash(until_weight_grad=kept),
            data_axes=("data",),
        )

    def _simulate(self, problem: PipelineProblem, variant: str) -> TrainingStep:
        algorithm, config = self._schedule(problem, variant)
        program = algorithm.program(problem, config)
        seconds = simulate(program, Machine.of(self.hosts, program)).duration_s
        stashes = tuple(peak_stash_bytes(program, stage.mesh.ranks[0]) for stage in problem.stages)
        return TrainingStep(seconds, config.delay, stashes)

    def _schedule(self, problem: PipelineProblem, variant: str) -> tuple[PipelineAlgorithm, PipelineConfig]:
        network = HostTopology.of(self.hosts)
        one_by_one = OneForwardOneBackward()
        if variant == ALL_GATHER:
            return one_by_one, PipelineConfig("blocking", strategy="global_all_gather", network=network)
        if variant == BROADCAST:
            return one_by_one, PipelineConfig("blocking", network=network)
        overlapped = PipelineConfig(network=network)
        if variant == OVERLAP:
            return one_by_one, overlapped
        if variant == EAGER:
            return EagerOneForwardOneBackward(), overlapped
        delay = least_delay(problem, times_on(problem, self.hosts))
        transfers: Transfers = "signals" if variant == BOUND else "overlapped"
        return DelayedWeights(), replace(overlapped, transfers=transfers, delay=delay)
