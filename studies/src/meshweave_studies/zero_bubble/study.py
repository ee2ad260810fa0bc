"""Steps of training under the schedules of Zero Bubble's table 4, each simulated once.

A GPU is a pipeline rank. Transfers between two GPUs run one after another, as NCCL runs those of one communicator,
and a stage waits for no transfer but the one that it needs. That holds for all four schedules.

1F1B and 1F1B-I end a step with a synchronous optimizer: the gradient's norm is needed by all GPUs, so that a step
takes from its first forward to its last gradient, and then the longest optimizer step. The zero-bubble schedules
validate after the step (section 4 of the paper): a GPU goes on with its optimizer and the next step as soon as its
own gradients are done. Steps then repeat after the longest time that a GPU takes from its own first forward to the
end of its optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from meshweave.algorithms.pipeline import (
    INTERLEAVED_1F1B,
    Edge,
    OneForwardOneBackward,
    PartCost,
    PipelineConfig,
    PipelineProblem,
    Schedule,
    Stage,
    pipeline_program,
)
from meshweave.algorithms.pipeline.action_times import ActionTimes
from meshweave.algorithms.pipeline.zb_auto import StashLimit, zb_auto
from meshweave.base.units import to_s
from meshweave.cost.machine import Machine
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.network import HostsNetwork
from meshweave.ir.analysis.lifetimes import peak_stash_bytes
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Call
from meshweave.simulate import Simulation, simulate
from meshweave_studies.zero_bubble.models import (
    BYTES_PER_PARAMETER,
    MODELS,
    OPTIMIZER_BYTES_PER_PARAMETER,
    SEQUENCE,
    TrainedModel,
)
from meshweave_studies.zero_bubble.readings import DTYPE, READINGS, ReadTimes

ONE_F_ONE_B, INTERLEAVED, ZB_1P, ZB_2P = "1F1B", "1F1B-I", "ZB-1p", "ZB-2p"
STASHES = {ZB_1P: 1, ZB_2P: 2}
"""The memory limit of a zero-bubble schedule, in stashes of a stage for each GPU."""
TICKS_PER_S = 1e9
CHIP_FLOPS_PER_S = 1e12
"""The rate at which the simulated chip runs: seconds of parts are given to it as FLOPs."""


@dataclass(frozen=True)
class TrainingRun:
    """A row of table 4: a model, a schedule, and the micro-batches of a step."""

    model: str
    schedule: str
    micro_batches: int


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step.

    Attributes:
        step_s: the time after which steps repeat.
        peak_bytes: the most bytes that a GPU has: parameters, gradients, optimizer states and stashes.
    """

    step_s: float
    peak_bytes: int


@dataclass
class ZeroBubbleStudy:
    """The runs of table 4 by each reading.

    Attributes:
        advance: called after every simulation.
    """

    advance: Callable[[], None] = lambda: None
    _known: dict[tuple[TrainingRun, str], SimulatedStep] = field(default_factory=dict)

    def step(self, run: TrainingRun, reading: str) -> SimulatedStep:
        """Return a run's step by a reading, simulated once."""
        key = run, reading
        if key not in self._known:
            self._known[key] = simulate_run(run, reading)
            self.advance()
        return self._known[key]

    def gain(self, run: TrainingRun, reading: str) -> float:
        """Return the throughput of a run over that of 1F1B with as many micro-batches."""
        base = TrainingRun(run.model, ONE_F_ONE_B, run.micro_batches)
        return self.step(base, reading).step_s / self.step(run, reading).step_s


def simulate_run(run: TrainingRun, reading: str) -> SimulatedStep:
    """Simulate a step of a run by a reading."""
    model = MODELS[run.model]
    per_gpu = model.most_stages_per_gpu if run.schedule == INTERLEAVED else 1
    times = READINGS[reading](model, per_gpu)
    problem = pipeline_problem(model, per_gpu, times, run.micro_batches)
    program = pipeline_program(problem, schedule_of(run, model, problem, times), "paired", title=run.schedule)
    chip = times.cluster.chip.with_flops_per_s(CHIP_FLOPS_PER_S)
    machine = Machine.of(replace(times.cluster, chip=chip), program)
    parameters = [
        sum(problem.stages[stage].parameters for stage in problem.stages_of(gpu)) for gpu in range(model.gpus)
    ]
    optimizer_s = [count * OPTIMIZER_BYTES_PER_PARAMETER / chip.memory_bytes_per_s for count in parameters]
    peak = max(
        count * BYTES_PER_PARAMETER + peak_stash_bytes(program, gpu) for gpu, count in enumerate(parameters)
    )
    step_s = _step_s(simulate(program, machine), program, optimizer_s, waits=run.schedule not in STASHES)
    return SimulatedStep(step_s, peak)


def pipeline_problem(
    model: TrainedModel, per_gpu: int, times: ReadTimes, micro_batches: int
) -> PipelineProblem:
    """Return the stages of a model, dealt out in turn, with their times as FLOPs."""
    meshes = [Mesh(f"gpu{gpu}", (1,), ("x",), (gpu,)) for gpu in range(model.gpus)]
    stages = []
    for number, (held, parts) in enumerate(zip(model.stages(per_gpu), times.parts, strict=True)):
        forward, input_grad, weight_grad = (
            PartCost(max(round(seconds * CHIP_FLOPS_PER_S), 1)) for seconds in parts
        )
        mesh, parameters = meshes[number % model.gpus], max(model.parameters(held), 1)
        stages.append(Stage(mesh, forward, input_grad, weight_grad, parameters, model.stash(held)))
    shape = (SEQUENCE, model.hidden)
    edges = tuple(Edge(number, number + 1, shape, dtype=DTYPE) for number in range(len(stages) - 1))
    return PipelineProblem(tuple(stages), edges, micro_batches, model.micro_batch)


def schedule_of(
    run: TrainingRun, model: TrainedModel, problem: PipelineProblem, times: ReadTimes
) -> Schedule:
    """Return the schedule of a run."""
    if run.schedule == ONE_F_ONE_B:
        return OneForwardOneBackward().schedule(problem, PipelineConfig())
    if run.schedule == INTERLEAVED:
        return INTERLEAVED_1F1B.schedule(problem, PipelineConfig())
    middle = problem.stages[1].stash
    whole, rest = middle.from_forward, middle.until_weight_grad + middle.from_input_grad
    limit = StashLimit(STASHES[run.schedule] * model.gpus * whole, whole, rest)
    ticks = [[round(seconds * TICKS_PER_S) for seconds in part] for part in zip(*times.parts, strict=True)]
    transfer = tuple(
        round(transfer_s(times.cluster, model, gpu) * TICKS_PER_S) for gpu in range(model.gpus - 1)
    )
    action_times = ActionTimes(tuple(ticks[0]), tuple(ticks[1]), tuple(ticks[2]), transfer)
    return zb_auto(run.micro_batches, action_times, limit)


def transfer_s(cluster: Cluster, model: TrainedModel, gpu: int) -> float:
    """Return the seconds of a transfer from a GPU to the next."""
    network = cluster.network
    assert isinstance(network, HostsNetwork)
    same_host = gpu // network.chips_per_host == (gpu + 1) // network.chips_per_host
    link = network.intra if same_host else network.nic
    return model.boundary_bytes / link.link_bytes_per_s


def _step_s(simulation: Simulation, program: Program, optimizer_s: list[float], *, waits: bool) -> float:
    """Return the time after which steps repeat; `waits` where all GPUs wait for one another at the end."""
    is_part = np.array([isinstance(op, Call) and op.flops != 0 for op in program.ops()], dtype=bool)
    begins, ends = [], []
    for position in range(len(simulation.ranks)):
        ops = slice(int(simulation.starts[position]), int(simulation.starts[position + 1]))
        parts = is_part[simulation.template_ops[ops]]
        begins.append(to_s(int(simulation.outputs["issued_ps"][ops][parts].min())))
        ends.append(to_s(int(simulation.outputs["ended_ps"][ops][parts].max())))
    if waits:
        return max(ends) - min(begins) + max(optimizer_s)
    return max(end - begin + own for begin, end, own in zip(begins, ends, optimizer_s, strict=True))
