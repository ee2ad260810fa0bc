"""Write a step as one Program with the programs of its layers included: `block_stage` writes a stage.

A layer's program is that of the strategy on the whole mesh of its pipeline rank: data parallelism is an axis that
shares the batch, context parallelism one that shares sequences. One include is then all replicas, and says over
which axes gradients are still to be summed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

from meshweave.algorithms.block import BlockProblem
from meshweave.algorithms.block.parts import BlockParts
from meshweave.algorithms.block.pieces import Piece
from meshweave.algorithms.block.problem import AXES
from meshweave.algorithms.block.roles import BATCH, RING
from meshweave.algorithms.pipeline.actions import ActionKind, Schedule
from meshweave.algorithms.pipeline.boundary import Boundary
from meshweave.algorithms.pipeline.by_name import ScheduleRequest, schedule_by_name
from meshweave.algorithms.pipeline.problem import Edge, PartCost, PipelineProblem, Stage
from meshweave.algorithms.pipeline.program import Transfers, pipeline_program
from meshweave.algorithms.pipeline.slots import Stashes
from meshweave.algorithms.step.block_stage import BlockStage
from meshweave.algorithms.step.buckets import StageSettings
from meshweave.algorithms.step.laid import LaidStep
from meshweave.algorithms.step.layers import (
    best_config,
    eager_logits_s,
    extra_s,
)
from meshweave.algorithms.step.memory import residual_is_whole
from meshweave.algorithms.step.placement import replica_groups, sharding_groups
from meshweave.algorithms.step.result import Step
from meshweave.algorithms.step.strategies import StrategyAround, strategy_of
from meshweave.algorithms.step.units import Unit, local_shape
from meshweave.base.errors import UnsupportedError
from meshweave.base.units import to_ps
from meshweave.cost.calls import flops_per_s
from meshweave.cost.folded import FoldedMachine
from meshweave.cost.machine import Machine
from meshweave.describe.layout import Replicate, Shard
from meshweave.describe.layout.layouts import Placement
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.network import HostsNetwork
from meshweave.describe.model.workload import Workload
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Call, Op
from meshweave.ir.program.statements import rewrite

REPLICAS = "r"
"""What the names of meshes of replicas begin with, before the pipeline rank."""


def lay_block_step(step: Step, *, folds: bool = True) -> LaidStep:
    """Return the program of a step with the programs of its layers inside, and its machine.

    Args:
        folds: whether one of several replicas that are alike stands for them: those in hosts of their own.

    Raises:
        UnsupportedError: products in another dtype, layers of several kinds,
            layers whose sites run one by one, or sizes that tensor-parallel ranks do not share evenly.
    """
    copies = replica_copies(step) if folds else 1
    whole = _StepWriter(step, 1)
    cluster = step.problem.priced_cluster
    if copies == 1:
        program = whole.program()
        return LaidStep(program, Machine.of(cluster, program, logical=True), 1)
    folded = _StepWriter(step, copies)
    program = folded.program()
    known = {mesh.name: mesh for mesh in whole.meshes()}
    meshes = program.expanded.meshes
    full = tuple(known.get(mesh.name) or folded.unfolded(mesh) for mesh in meshes)
    axes = tuple((f"{mesh.name}.replica0", copies) for mesh in meshes if mesh.name.startswith(REPLICAS))
    part = cluster.with_chips(cluster.num_chips // copies)
    machine = FoldedMachine(part, meshes, True, whole=Machine(cluster, full, True), folded=axes)
    return LaidStep(program, machine, copies)


def replica_copies(step: Step) -> int:
    """Return of how many replicas one can be simulated for all: those that lie alike in hosts of their own.

    Replicas one after the other in whole hosts are alike: a step along the data axis takes each host to another,
    with all its chips, NICs and groups. Where several replicas share a host, these stay.
    """
    p, cluster = step.parallelism, step.problem.cluster
    network = cluster.network
    if not isinstance(network, HostsNetwork) or p.data == 1 or p.zero_group is not None:
        return 1
    stride, chips = p.stride("data"), network.chips_per_host
    if p.context > 1 and p.stride("context") > stride:
        return 1
    if len(replica_groups(p)) > 1:
        return 1
    kept = 1 if stride % chips == 0 else chips // stride if chips % stride == 0 else 0
    return p.data // kept if kept and p.data % kept == 0 else 1


class _StepWriter:
    """Writes a step; of `copies` replicas that are alike the first one."""

    def __init__(self, step: Step, copies: int) -> None:
        self.step, self.problem, self.p = step, step.problem, step.parallelism
        self.copies = copies
        self.here = replace(self.p, data=self.p.data // copies, zero_group=None)
        p, stack = self.p, self.problem.stack
        if len(self.problem.kinds) > 1:
            raise UnsupportedError("the program of a step has layers of one kind, and not of several")
        if self.problem.overlap == "sites":
            raise UnsupportedError("the program of a step has layers whose sites overlap, and not one by one")
        if self.problem.product_dtype is not None:
            raise UnsupportedError(f"a block program has its products in {self.problem.dtype} alone")
        sharding, copies_of = sharding_groups(p) if p.zero else ((), replica_groups(p))
        self.groups = (*sharding, *copies_of)
        self.settings = StageSettings(
            self.problem.dtype,
            self.problem.gradient_dtype,
            tuple(f"replica{number}" for number in range(len(self.groups))),
            len(sharding),
            p.zero,
            stack.regathers,
            stack.overlap,
            0.0 if stack.waits_for_gathers else stack.overlap,
            stack.waits_for_tensor,
        )
        self.units: dict[Piece, Unit] = {}

    # --- pieces -----------------------------------------------------------------------------------------

    def _unit(self, piece: Piece) -> Unit:
        problem, p = self.problem, self.p
        rate = flops_per_s(problem.cluster.chip, "", problem.dtype)
        if piece == "layers":
            seconds = extra_s(problem, p)
        elif piece == "head":
            first, second = (eager_logits_s(problem, p, num_bytes) for num_bytes in problem.stack.logit_bytes)
            seconds = first, second, 0.0
        else:
            seconds = 0.0, 0.0, 0.0
        flops = round(seconds[0] * rate), round(seconds[1] * rate), round(seconds[2] * rate)
        name = "layer" if piece == "layers" else piece
        return Unit(name, self._parts(piece), flops, p.shards if self.settings.is_sharded else 1)

    def _parts(self, piece: Piece) -> BlockParts:
        problem, p = self.problem, self.p
        inner = strategy_of(problem, replace(p, context=1))
        entry = StrategyAround(inner, (BATCH, RING))
        data = self.here.data
        shape = data, p.context, *p.tensor_mesh
        work = Workload(p.micro_batch * data, problem.sequence, problem.dtype)
        block = BlockProblem.of(problem.model, work, shape)
        if piece != "layers":
            ranks = p.tensor_size
            block = replace(block, vocabulary=-(-(problem.model.vocab_size or 0) // ranks) * ranks)
        config = best_config(problem, p)
        recompute = p.recompute if piece == "layers" else "none"
        parts = entry.parts(block, config, piece=piece, recompute=recompute)
        if p.context > 1 and piece == "layers":
            parts = replace(parts, forward=_striped(parts.forward), backward=_striped(parts.backward))
        return parts

    # --- meshes -----------------------------------------------------------------------------------------

    def _mesh(self, rank: int) -> Mesh:
        """Return the mesh of a pipeline rank with the axes of a block."""
        p = self.here
        strides = (
            p.stride("data"),
            p.stride("context"),
            p.stride("tensor") * p.tensor_mesh[1],
            p.stride("tensor"),
        )
        shape = p.data, p.context, *p.tensor_mesh
        return _strided(f"p{rank}", shape, AXES, strides, rank * p.stride("pipeline"))

    def _replica_mesh(self, rank: int) -> Mesh:
        """Return the same ranks with an axis for each group of replicas, and one for tensor parallelism."""
        p = self.here
        groups = (replica_groups(p) or ((1, p.stride("data")),)) if self.copies > 1 else self.groups
        axes = [(f"replica{number}", *group) for number, group in enumerate(groups)]
        axes = sorted([*axes, ("tensor", p.tensor_size, p.stride("tensor"))], key=lambda axis: -axis[2])
        names, shape, strides = zip(*axes, strict=True)
        return _strided(f"{REPLICAS}{rank}", shape, names, strides, rank * p.stride("pipeline"))

    def meshes(self) -> Iterator[Mesh]:
        """Yield the meshes of all pipeline ranks."""
        for rank in range(self.p.pipeline):
            yield self._mesh(rank)
            yield self._replica_mesh(rank)

    def unfolded(self, mesh: Mesh) -> Mesh:
        """Return a mesh of the first replicas with the ranks that these have among all."""
        stride, size = self.here.stride("data"), self.here.data
        ranks = (
            rank // (stride * size) * stride * self.p.data + rank % (stride * size) for rank in mesh.ranks
        )
        return replace(mesh, ranks=tuple(ranks))

    # --- the pipeline -----------------------------------------------------------------------------------

    def program(self) -> Program:
        """Return the program."""
        self.units = {"layers": self._unit("layers")}
        if self.problem.model.vocab_size:
            self.units |= {"embedding": self._unit("embedding"), "head": self._unit("head")}
        step, p = self.step, self.p
        stages = tuple(self._stage(number) for number in range(p.num_stages))
        edges = tuple(self._edge(number) for number in range(p.num_stages - 1))
        rows = self._residual()[0] * self.here.data
        problem = PipelineProblem(stages, edges, step.num_micro_batches, rows=rows)
        schedule = self._schedule(problem)
        last = _last_micro_batches(schedule)
        split = {leaf.stage for leaf in schedule.leaves() if leaf.kind is ActionKind.WEIGHT_GRAD}

        def stage(
            number: int, mesh: Mesh, boundaries: Mapping[tuple[int, int, str], Boundary], stashes: Stashes
        ) -> BlockStage:
            replicas = self._replica_mesh(problem.stage_ranks[number])
            units = self._units_of(number)
            layers = ("layer",) * self.step.stage_layers[number]
            return BlockStage(
                number,
                mesh,
                replicas,
                units,
                layers,
                self.settings,
                boundaries,
                stashes,
                last.get(number, 0),
                is_split=number in split,
            )

        transfers: Transfers = "blocking" if self.problem.stack.blocks_transfers else "overlapped"
        return pipeline_program(problem, schedule, transfers, title="step", writes_stage=stage)

    def _units_of(self, number: int) -> tuple[tuple[Unit, int], ...]:
        count = self.step.stage_layers[number]
        units = [(self.units["layers"], count)] if count else []
        if "embedding" in self.units and number == 0:
            units.insert(0, (self.units["embedding"], 1))
        if "head" in self.units and number == self.p.num_stages - 1:
            units.append((self.units["head"], 1))
        return tuple(units)

    def _stage(self, number: int) -> Stage:
        """Return a stage with the durations of its parts by the estimate, for the order of transfers."""
        time = self.step.stages.times[number]
        forward, backward = max(to_ps(time.forward_s), 1), max(to_ps(time.backward_s), 2)
        mesh = self._mesh(self.step.stages.stage_ranks[number])
        costs = PartCost(forward), PartCost(backward // 2), PartCost(backward - backward // 2)
        return Stage(mesh, *costs, data_axes=(AXES[0],), dtype=self.problem.dtype)

    def _residual(self) -> tuple[int, ...]:
        """Return the shape of a rank's part of the residual."""
        program = self.units["layers"].parts.forward
        return local_shape(program, program.buffer_of["x"])

    def _edge(self, source: int) -> Edge:
        """Return the edge that carries the residual of a rank, or a part of it, to the next stage."""
        shape = self._residual()[1:]
        own: Placement = Replicate()
        if self.step.stages.sends_parts and residual_is_whole(self.problem, self.p):
            if shape[0] % self.p.tensor_size:
                raise UnsupportedError(f"{self.p.tensor_size} tensor-parallel ranks do not divide {shape[0]}")
            own = Shard(1)
        placements = tuple(
            Shard(0) if axis == AXES[0] else own if axis == AXES[2] else Replicate() for axis in AXES
        )
        return Edge(source, source + 1, shape, placements, placements, self.problem.dtype)

    def _schedule(self, problem: PipelineProblem) -> Schedule:
        p, step = self.p, self.step
        name = p.schedule_entry.name
        request = ScheduleRequest(p.num_stages, step.num_micro_batches, p.virtual_stages)
        whole = schedule_by_name(name, request, step.stages.action_times())
        return Schedule(problem.stage_ranks, whole.num_micro_batches, whole.actions)


def _striped(program: Program) -> Program:
    """Return a program whose rings attend to half of the keys in every turn, as the estimate has them."""

    def striped(op: Op) -> tuple[Op, ...]:
        if isinstance(op, Call) and op.work == "attention":
            op = replace(op, shape=(*op.shape[:3], op.shape[2] // 2 + 1, op.shape[4]))
        return (op,)

    return replace(program, body=rewrite(program.body, striped))


def _strided(
    name: str, shape: tuple[int, ...], axes: tuple[str, ...], strides: tuple[int, ...], base: int
) -> Mesh:
    """Return a mesh whose axes have these strides, from rank `base` on."""
    places = product(*(range(0, size * stride, stride) for size, stride in zip(shape, strides, strict=True)))
    return Mesh(name, tuple(shape), tuple(axes), tuple(base + sum(place) for place in places))


def _last_micro_batches(schedule: Schedule) -> dict[int, int]:
    """Return for each stage the micro-batch of its last backward part."""
    last: dict[int, int] = {}
    for action in schedule.leaves():
        if action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD) and action.micro_batch is not None:
            last[action.stage] = action.micro_batch
    return last
