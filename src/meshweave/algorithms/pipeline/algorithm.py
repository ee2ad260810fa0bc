"""The base of pipeline schedules: entries that say in which order each pipeline rank works on what.

A schedule is a pure function from a problem to the compute actions of each pipeline rank. All else is shared:
`communication` puts transfers between the actions, `program` writes them as a Program, `functions` says what
the stages compute.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from meshweave.algorithms.contract import Algorithm, Array, Arrays
from meshweave.algorithms.pipeline.action_times import ActionTimes
from meshweave.algorithms.pipeline.actions import Schedule, folded, looped
from meshweave.algorithms.pipeline.examples import chain_of_ranks, example_problems
from meshweave.algorithms.pipeline.functions import reference, stage_functions
from meshweave.algorithms.pipeline.least_makespan import whole_ticks
from meshweave.algorithms.pipeline.problem import PipelineProblem
from meshweave.algorithms.pipeline.program import Transfers, pipeline_program
from meshweave.algorithms.pipeline.tensors import tensor_layouts
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.base.limits import SCHEDULE_FORWARDS, Limit
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
            message is one byte: all dependencies stay, and the step shows what free transfers would gain.
        chunks: messages, at most, into which a transfer between equal layouts is cut. Reshards and "signals" do
            not read it.
        strategy: how a tensor is resharded between two stages whose layouts of it differ; a key of
            `algorithms.reshard.STRATEGIES`.
        delay: by how many micro-batches weight gradients are put off; read by `eager-1f1b-delayed` alone.
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


@dataclass(frozen=True)
class ScheduleRequest:
    """The sizes of a schedule that `schedule_by_name` makes.

    Attributes:
        num_stages: stages of the model.
        num_micro_batches: micro-batches of a step.
        per_rank: stages per rank; 0: one if the schedule accepts that, else two.
        delay: micro-batches by which weight gradients are put off, for `eager-1f1b-delayed`.
        stash_rest: share (0 to 1) of a micro-batch's stash that stays from the input gradient to the weight
            gradient; for the automatic schedules `zb-1p` and `zb-2p`.
    """

    num_stages: int
    num_micro_batches: int
    per_rank: int = 0
    delay: int = 0
    stash_rest: float = 1.0


def network_of(problem: PipelineProblem, cluster: Cluster | None) -> HostTopology | None:
    """Return the hosts and NICs that a problem's ranks have on `cluster`.

    None without a cluster, or if every stage is on a single chip.
    """
    if cluster is None or all(mesh.num_ranks == 1 for mesh in problem.meshes):
        return None
    return HostTopology.of(cluster, 1 + max(rank for mesh in problem.meshes for rank in mesh.ranks))


class PipelineAlgorithm(Algorithm[PipelineProblem, PipelineConfig]):
    """A schedule of the stages of a pipeline: subclasses write `schedule`, and may refuse problems.

    A rank is a pipeline rank here: the chips that hold the same stages. Ticks are integers in any unit of time,
    that of the given `ActionTimes`. Actions are computing alone: transfers follow from them, and programs, times
    and memory from both. Module `one_f_one_b` has `alternating` and the base `OneStageEach`, which most
    variants of 1F1B share. A planner of training steps asks further methods, which follow from the schedule unless
    a closed form is known.

    Attributes:
        is_searched: whether a plan tries the schedule where none is named.
        stages_per_rank: how many stages a rank has in plans that name no number.
        uses_times: whether the order of actions depends on what the stages take.
        repeats: whether each further round, of as many micro-batches as ranks, adds the same time to a step. Long
            steps are then extrapolated from shorter ones.
        waits_at_ends: whether the rank of the last stage is idle while the first micro-batch passes the first
            P - 1 stages of P ranks forward, and the last one backward (fill and drain). `step_bound_s` then
            adds that time.
        forwards_first: whether the last stage runs all forwards before its first backward, so that the outputs
            of all micro-batches are alive at once; else those of one are.
        names_elsewhere: what others call the schedule, by "torch" (torch.distributed.pipelining) or "megatron-lm";
            who does not have it is left out.
        most_forwards: the most forwards, stages times micro-batches, of a schedule that is written out.
    """

    problem_type = PipelineProblem
    is_searched: ClassVar[bool] = True
    stages_per_rank: ClassVar[tuple[int, ...]] = (1, 2)
    uses_times: ClassVar[bool] = False
    repeats: ClassVar[bool] = False
    waits_at_ends: ClassVar[bool] = False
    forwards_first: ClassVar[bool] = False
    names_elsewhere: ClassVar[Mapping[str, str]] = {}
    most_forwards: ClassVar[Limit] = SCHEDULE_FORWARDS

    @abstractmethod
    def schedule(self, problem: PipelineProblem, config: PipelineConfig) -> Schedule:
        """Return the compute actions of each pipeline rank in order; its `stage_ranks` are the problem's."""

    def requested(self, problem: PipelineProblem, request: ScheduleRequest, times: ActionTimes) -> Schedule:
        """Return the schedule that is asked for by name; by default that of the problem and `request.delay`.

        Args:
            problem: the sizes of the request, on one chip per rank; costs are those of `times`.
            times: the ticks of each stage's actions.
        """
        return self.schedule(problem, PipelineConfig(delay=request.delay))

    def require_writable(self, problem: PipelineProblem) -> None:
        """Raise UnsupportedError where the schedule of a problem has over `most_forwards` forwards."""
        num_forwards = problem.num_stages * problem.micro_batches
        if num_forwards > self.most_forwards.most:
            refusal = self.most_forwards.refusal(num_forwards)
            raise UnsupportedError(f"{self.name}: {refusal}; give fewer stages or micro-batches")

    def for_stages(self, per_rank: int) -> PipelineAlgorithm:
        """Return the variant of this schedule for `per_rank` stages on each rank; by default itself."""
        return self

    def place_stages(self, num_ranks: int, per_rank: int) -> tuple[int, ...] | None:
        """Return the rank of each stage; None if the schedule accepts no placement of `per_rank` stages per rank.

        The looped placement is tried first, then, for two stages a rank, the V-shaped one. A placement is accepted
        if `refusal` accepts it with 4 micro-batches per stage.
        """
        placements = [looped(num_ranks, per_rank), *([folded(num_ranks)] if per_rank == 2 else [])]
        many = 4 * num_ranks * per_rank
        fitting = (each for each in placements if self.refusal(chain_of_ranks(each, many)) is None)
        return next(fitting, None)

    def takes_stages(self, per_rank: int) -> bool:
        """Return whether the schedule accepts `per_rank` stages on each rank, as tried on two ranks."""
        return self.for_stages(per_rank).place_stages(2, per_rank) is not None

    def takes(self, num_ranks: int, per_rank: int, micro_batches: int) -> bool:
        """Return whether the schedule accepts these numbers of ranks, stages per rank and micro-batches.

        Some schedules check the number of micro-batches alone, so call it on what `for_stages` returns.
        """
        placement = self.place_stages(num_ranks, per_rank)
        return placement is not None and self.refusal(chain_of_ranks(placement, micro_batches)) is None

    def num_stashes(self, num_ranks: int, per_rank: int, micro_batches: int) -> tuple[int, ...] | None:
        """Return for each rank the most stashes that it holds at once; None where no closed form is known.

        A stash is what one stage keeps of one micro-batch for its backward. A rank has `per_rank` stages. Without
        a closed form stashes are counted in the schedule (`peak_stashes`).
        """
        return None

    def least_makespan(self, num_ranks: int, micro_batches: int, times: ActionTimes) -> int:
        """Return a lower bound of a step's makespan in the ticks of `times`; by default the mean work of a rank.

        Args:
            times: ticks of each stage and transfer, with no `saved` (`ActionTimes.joined`).
        """
        return micro_batches * sum(whole_ticks(times)) // num_ranks

    def ends(self, micro_batches: int, times: ActionTimes) -> tuple[int, ...] | None:
        """Return for each rank the tick at which it ends a step, by a recurrence faster than a graph.

        None, the default, where there is no such recurrence: then the graph of the schedule is timed.
        """
        return None

    def examples(self) -> Iterator[PipelineProblem]:
        """Yield those of `example_problems` that the schedule does not refuse."""
        return (problem for problem in example_problems() if self.refusal(problem) is None)

    def candidates(
        self, problem: PipelineProblem, cluster: Cluster | None = None
    ) -> Iterator[PipelineConfig]:
        """Yield a config with overlapped transfers, then one with blocking ones.

        Reshards between stages are planned for the hosts and NICs of `cluster`; without one, each chip counts as a
        host.
        """
        network = network_of(problem, cluster)
        yield PipelineConfig(network=network)
        yield PipelineConfig("blocking", network=network)

    def program(self, problem: PipelineProblem, config: PipelineConfig) -> Program:
        """Return the program of the schedule.

        Raises LayoutError where `refusal` has a reason, and UnsupportedError over `most_forwards`.
        """
        refusal = self.refusal(problem)
        if refusal is not None:
            raise LayoutError(f"{self.name}: {refusal}")
        self.require_writable(problem)
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
        """Return the outputs Y{i} and the gradients DW{i} of parameters, computed by numpy stage after stage.

        Each stage runs once, on the whole batch, and computes `functions`. `inputs` are the whole W{i}, X{i} and
        T{i} by name.
        """
        return reference(problem, inputs)

    def placements(self, problem: PipelineProblem) -> dict[str, Layout]:
        """Return the layouts of parameters W{i}, gradients DW{i}, inputs X{i}, outputs Y{i}, targets T{i} by name.

        {i} is the number of a stage.
        """
        return tensor_layouts(problem)

    def functions(self, problem: PipelineProblem) -> Mapping[str, Callable[..., Any]]:
        """Return by name the functions that the program's calls run in tests, on integers (`stage_functions`)."""
        return stage_functions(problem)
