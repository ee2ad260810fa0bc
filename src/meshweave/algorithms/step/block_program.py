"""Write a step as one Program with the programs of its layers included: `block_stage` writes a stage.

A layer's program is that of the strategy on the whole mesh of its pipeline rank: data parallelism is an axis that
shares the batch, context parallelism one that shares sequences. One include is then all replicas, and says over
which axes gradients are still to be summed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from meshweave.algorithms.block.nodes import is_timed
from meshweave.algorithms.block.nodes.timed import REFUSAL
from meshweave.algorithms.pipeline.actions import ActionKind, Schedule
from meshweave.algorithms.pipeline.boundary import Boundary
from meshweave.algorithms.pipeline.problem import Edge, PartCost, PipelineProblem, Stage
from meshweave.algorithms.pipeline.program import pipeline_program
from meshweave.algorithms.pipeline.slots import Stashes
from meshweave.algorithms.step.block_stage import BlockStage
from meshweave.algorithms.step.data_parallel import sums_after
from meshweave.algorithms.step.memory import residual_is_whole
from meshweave.algorithms.step.pipeline import schedule_of
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.algorithms.step.program_host import program_host
from meshweave.algorithms.step.program_ranks import REPLICAS, STAGE_AXES, ProgramRanks, replica_copies
from meshweave.algorithms.step.stage_settings import StageSettings
from meshweave.algorithms.step.stages import Stages
from meshweave.algorithms.step.units import Unit, local_shape
from meshweave.algorithms.step.write_units import layer_names, write_units
from meshweave.base.errors import UnsupportedError
from meshweave.base.units import to_ps
from meshweave.cost.folded import FoldedMachine
from meshweave.cost.machine import Machine
from meshweave.describe.layout import Replicate, Shard
from meshweave.describe.layout.layouts import Placement
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program import Program


@dataclass(frozen=True)
class LaidStep:
    """The program of a step and the machine that it runs on.

    Attributes:
        fold: how many equal chips each rank of the program stands for; 1 where the program has all chips.
    """

    program: Program
    machine: Machine
    fold: int


def lay_step(step: Stages, *, folds: bool = True) -> LaidStep:
    """Return the program of a step with the programs of its layers inside, and its machine.

    Args:
        folds: whether the program has only some of the data-parallel replicas, which stand for all where
            replicas are equal (`replica_copies`).

    Raises:
        UnsupportedError: the step has products in a precision of their own, tensor-parallel collectives inside
            of products, ZeRO-1 sums of gradients after the last backward part (`SoftwareStack.sums_after`), sizes
            that tensor-parallel ranks do not divide evenly, a stage without layer, embedding and head, or, with
            experts, a `zero_group` or exchanges that overlap with another micro-batch.
    """
    copies = replica_copies(step) if folds else 1
    whole = _StepWriter(step, 1)
    host = program_host(step.problem, step.parallelism)
    cluster = replace(step.problem.priced_cluster, host=host)
    if copies == 1:
        program = whole.program()
        return LaidStep(program, Machine.of(cluster, program, logical=True), 1)
    folded = _StepWriter(step, copies)
    program = folded.program()
    known = {mesh.name: mesh for mesh in whole.ranks.meshes()}
    meshes = program.expanded.meshes
    full = tuple(known.get(mesh.name) or folded.ranks.unfolded(mesh) for mesh in meshes)
    axes = tuple((f"{mesh.name}.replica0", copies) for mesh in meshes if mesh.name.startswith(REPLICAS))
    axes += tuple(folded.ranks.copies_of_experts())
    part = cluster.with_chips(cluster.num_chips // copies)
    machine = FoldedMachine(part, meshes, True, whole=Machine(cluster, full, True), folded=axes)
    return LaidStep(program, machine, copies)


@dataclass(frozen=True)
class StagePlace:
    """The ranks and layers of a pipeline stage.

    Attributes:
        mesh: its ranks, on the axes data, context and two of tensor parallelism (`STAGE_AXES`).
        replicas: the same ranks, on one axis per group of replicas and one of tensor-parallel ranks
            (`ProgramRanks.replica_mesh`).
        layers: the numbers of its layers in the model, by the name of their unit; (0,) for embedding or head.
    """

    mesh: Mesh
    replicas: Mesh
    layers: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class WrittenStep:
    """The program of a step, and what its buckets (a rank's weights or gradients of a layer, as a vector) hold.

    Attributes:
        units: the pieces of the model (each kind of layer, embedding, head) by name.
        stages: the ranks and layers of each stage, by its number.
        settings: how its buckets are sharded and gathered.
        loss_copies: how many ranks of a pipeline rank compute the losses of the same tokens.
    """

    program: Program
    units: dict[str, Unit]
    stages: dict[int, StagePlace]
    settings: StageSettings
    loss_copies: int

    def mesh_of(self, rank: int) -> Mesh:
        """Return the mesh (`StagePlace.mesh`) of the pipeline rank to which global rank `rank` belongs."""
        return next(place.mesh for place in self.stages.values() if rank in place.mesh)


@dataclass(frozen=True)
class StepPieces:
    """The units, schedule and settings from which the program of a step is written.

    Attributes:
        units: for each stage (unit, how many of it the stage has) for each of its pieces of the model.
        layers: for each stage the names of the units of its layers, in order.
        schedule: the actions of each pipeline rank.
        settings: how buckets are sharded and gathered.
    """

    units: tuple[tuple[tuple[Unit, int], ...], ...]
    layers: tuple[tuple[str, ...], ...]
    schedule: Schedule
    settings: StageSettings


def step_pieces(step: Stages) -> StepPieces:
    """Return the units, schedule and settings of the program of a step, written for one data-parallel replica.

    Raises:
        UnsupportedError: no program is written for such a step (`lay_step`), or layers have experts or latent
            attention.
    """
    if has_timed_layers(step.problem):
        raise UnsupportedError(
            "programs of layers with experts or latent attention do not say what they hold"
        )
    return _StepWriter(step, step.parallelism.data).pieces()


def write_step(step: Stages) -> WrittenStep:
    """Return the program of a step on all chips, for execution, with what its buckets hold.

    Raises:
        UnsupportedError: no program is written for such a step (`lay_step`), or layers have experts or latent
            attention.
    """
    if has_timed_layers(step.problem):
        raise UnsupportedError(REFUSAL)
    return _StepWriter(step, 1).written()


def has_timed_layers(problem: StepProblem) -> bool:
    """Return whether the model has layers (experts, latent attention) whose programs state costs, no equations."""
    return problem.once("timed layers", "", lambda: any(is_timed(graph) for _, graph in problem.model.runs))


def _check_routed(problem: StepProblem, p: Parallelism) -> None:
    """Raise UnsupportedError for what programs of steps with experts do not have."""
    if p.zero_group is not None:
        raise UnsupportedError("a program with experts shards over all replicas; give zero_group=None")
    if problem.stack.overlaps_exchanges:
        raise UnsupportedError(
            "a program with experts has no exchange of one micro-batch beside the computing of another, as this "
            "stack has them; give a stack without"
        )


class _StepWriter:
    """Writes a step; of `copies` replicas that are alike the first one."""

    def __init__(self, step: Stages, copies: int) -> None:
        self.step, self.problem, self.p = step, step.problem, step.parallelism
        if self.problem.model.is_routed:
            _check_routed(self.problem, self.p)
        if self.problem.products is not None:
            raise UnsupportedError(f"a block program has its products in {self.problem.dtype} alone")
        if self.problem.hides_tensor and self.p.tensor_size > 1:
            raise UnsupportedError(
                "a block program has its collectives beside its products and not inside of them, as this stack "
                "has them; give a stack without, or no tensor ranks"
            )
        if sums_after(self.problem, self.p) and self.p.replicas > 1:
            raise UnsupportedError(
                "a block program sums gradients beside the last backward parts and not after them, as this stack "
                "does under ZeRO-1; give a stack without, or zero=0"
            )
        self.ranks = ProgramRanks(step, copies)
        self.settings = self.ranks.settings
        self.layers = layer_names(self.problem)
        self.units: dict[str, Unit] = {}

    def written(self) -> WrittenStep:
        """Return the program with its units, stages and settings, which say what its buckets hold."""
        program, stages, begin = self.program(), dict[int, StagePlace](), 0
        for number, rank in enumerate(self.step.stage_ranks):
            layers: dict[str, tuple[int, ...]] = {}
            for place, name in enumerate(self._layers_of(number)):
                layers[name] = (*layers.get(name, ()), begin + place)
            begin += self.step.layers[number]
            layers |= {unit.name: (0,) for unit, _ in self._units_of(number) if not unit.is_layer}
            stages[number] = StagePlace(self.ranks.mesh(rank), self.ranks.replica_mesh(rank), layers)
        mesh = stages[0].mesh
        sums = self.units["head"].parts.sums["loss"] if "head" in self.units else ()
        copies = mesh.num_ranks // prod(mesh.size(axis) for axis in sums)
        return WrittenStep(program, self.units, stages, self.settings, copies)

    # --- the pipeline -----------------------------------------------------------------------------------

    def _pipeline(self) -> PipelineProblem:
        """Write the units, and return the problem of their pipeline."""
        sharded = self.settings.is_sharded, self.ranks.expert_settings.is_sharded
        shards = self.p.shards if sharded[0] else 1, self.p.expert_replicas if sharded[1] else 1
        experts = self.ranks.experts_of_block()
        self.units = write_units(self.problem, self.p, self.ranks.here.data, shards, experts)
        stages = tuple(self._stage(number) for number in range(self.p.num_stages))
        edges = tuple(self._edge(number) for number in range(self.p.num_stages - 1))
        rows = self._residual()[0] * self.ranks.here.data
        return PipelineProblem(stages, edges, self.step.micro_batches, rows=rows)

    def pieces(self) -> StepPieces:
        """Return the units, schedule and settings of the program, without writing it."""
        schedule = self._schedule(self._pipeline())
        numbers = range(self.p.num_stages)
        counts = tuple(self._units_of(number) for number in numbers)
        return StepPieces(counts, tuple(map(self._layers_of, numbers)), schedule, self.settings)

    def program(self) -> Program:
        """Return the program of the step, on one replica in place of each `copies` equal ones."""
        problem = self._pipeline()
        schedule = self._schedule(problem)
        last = _last_micro_batches(schedule)
        split = {leaf.stage for leaf in schedule.leaves() if leaf.kind is ActionKind.WEIGHT_GRAD}

        def stage(
            number: int, mesh: Mesh, boundaries: Mapping[tuple[int, int, str], Boundary], stashes: Stashes
        ) -> BlockStage:
            return BlockStage(
                number,
                mesh,
                self.ranks.bucket_ranks(problem.stage_ranks[number]),
                self._units_of(number),
                self._layers_of(number),
                boundaries,
                stashes,
                last.get(number, 0),
                is_split=number in split,
            )

        waits = self.problem.stack.blocks_transfers
        return pipeline_program(problem, schedule, title="step", writes_stage=stage, awaits_sends=waits)

    def _layers_of(self, number: int) -> tuple[str, ...]:
        """Return the names of the units of a stage's layers."""
        begin = sum(self.step.layers[:number])
        return self.layers[begin : begin + self.step.layers[number]]

    def _units_of(self, number: int) -> tuple[tuple[Unit, int], ...]:
        counts = Counter(self._layers_of(number))
        units = [(self.units[name], counts[name]) for name in sorted(counts)]
        if "embedding" in self.units and number == 0:
            units.insert(0, (self.units["embedding"], 1))
        if "head" in self.units and number == self.p.num_stages - 1:
            units.append((self.units["head"], 1))
        return tuple(units)

    def _stage(self, number: int) -> Stage:
        """Return a stage with the durations of its parts by the estimate, for the order of transfers."""
        time = self.step.times[number]
        forward, backward = max(to_ps(time.forward_s), 1), max(to_ps(time.backward_s), 2)
        mesh = self.ranks.mesh(self.step.stage_ranks[number])
        costs = PartCost(forward), PartCost(backward // 2), PartCost(backward - backward // 2)
        return Stage(mesh, *costs, data_axes=(STAGE_AXES[0],), dtype=self.problem.dtype)

    def _residual(self) -> tuple[int, ...]:
        """Return the shape of a rank's part of the residual."""
        program = self.units[self.layers[0]].parts.forward
        return local_shape(program, program.buffer_of["x"])

    def _edge(self, source: int) -> Edge:
        """Return the edge that carries the residual of a rank, or a part of it, to the next stage."""
        shape = self._residual()[1:]
        own: Placement = Replicate()
        if self.step.sends_parts and residual_is_whole(self.p):
            if shape[0] % self.p.tensor_size:
                raise UnsupportedError(f"{self.p.tensor_size} tensor-parallel ranks do not divide {shape[0]}")
            own = Shard(1)
        placements: tuple[Placement, ...] = Shard(0), Replicate(), own, Replicate()
        return Edge(source, source + 1, shape, placements, placements, self.problem.dtype)

    def _schedule(self, problem: PipelineProblem) -> Schedule:
        p, step = self.p, self.step
        numbers = p.pipeline, p.virtual_stages, step.micro_batches
        whole = schedule_of(p.schedule, *numbers, step.action_times())
        return Schedule(problem.stage_ranks, whole.num_micro_batches, whole.actions)


def _last_micro_batches(schedule: Schedule) -> dict[int, int]:
    """Return for each stage the micro-batch of its last backward part."""
    last: dict[int, int] = {}
    for action in schedule.leaves():
        if action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD) and action.micro_batch is not None:
            last[action.stage] = action.micro_batch
    return last
