"""Writes the steps of a pipeline as a Program: one body for each pipeline rank, its repeated steps folded
into loops.

Stages run in the lane "compute" in the order of the schedule. With overlap each edge has a lane for
activations and one for gradients, so that a transfer overlaps with the stages, and waits for nothing but its
value and a free slot where it arrives. Lanes are shared by edges that no pipeline rank has in common.

Every op carries the action that it is part of in its name, and the micro-batch in its `args` or `tag`, so
that the schedule can be read from the program again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, Protocol

from meshweave.algorithms.pipeline.actions import Action, ActionKind, Schedule
from meshweave.algorithms.pipeline.boundary import Boundary as Boundary
from meshweave.algorithms.pipeline.boundary import boundary_of
from meshweave.algorithms.pipeline.communication import Steps, communicating_steps
from meshweave.algorithms.pipeline.folding import Folded, StepLoop, fold
from meshweave.algorithms.pipeline.problem import Edge, PipelineProblem
from meshweave.algorithms.pipeline.slots import Stashes, num_slots, peer_of, stash_slots
from meshweave.algorithms.pipeline.stage_ops import StageOps
from meshweave.algorithms.pipeline.tensors import meanings, tensor_layouts, tensors
from meshweave.base.errors import LayoutError
from meshweave.cost.fabric import HostTopology
from meshweave.describe.layout import Layout
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program import Buffer, Include, Lane, On, Program, Repeat, Statement, Tensor
from meshweave.ir.program.expressions import Index, Var
from meshweave.ir.program.ops import Call
from meshweave.ir.program.statements import ops_of

Transfers = Literal["overlapped", "blocking", "paired", "signals"]


class StageWriter(Protocol):
    """Writes one stage on its mesh: its buffers and the statements of its actions.

    Attributes:
        number: of the stage, from 0.
    """

    number: int

    @property
    def meshes(self) -> Sequence[Mesh]:
        """Return the meshes that the stage's buffers need besides the mesh of the stage."""

    def tensors(self) -> Iterable[Tensor]:
        """Return the tensors of the stage's inputs and outputs."""

    def buffers(self, layouts: Mapping[str, Layout]) -> Iterable[Buffer]:
        """Return the buffers of the stage; `layouts` are those of the problem's tensors, by name."""

    def begin(self, *, gathers: bool) -> Iterable[Statement]:
        """Return the statements before the first action; `gathers`: whether these gather sharded parameters."""

    def end(self, *, reduces: bool) -> Iterable[Statement]:
        """Return the statements after the last action; `reduces`: whether these reduce gradients."""

    def action(self, kind: ActionKind, micro_batch: Index, label: str) -> Iterable[Statement]:
        """Return the statements of an action that is no transfer; `label` becomes the name of its main ops."""


StageFactory = Callable[[int, Mesh, Mapping[tuple[int, int, str], Boundary], Stashes], StageWriter]
"""Makes the writer of a stage from its number, its mesh, the boundaries of its edges, and the most micro-batches
of which something is kept between its parts."""

COMPUTE, PARAMETERS = "compute", "parameters"
TURNS = ("m", "n")
"""The indices of loops, from the outside in."""


def pipeline_program(
    problem: PipelineProblem,
    schedule: Schedule,
    transfers: Transfers = "overlapped",
    *,
    chunks: int = 1,
    strategy: str = "broadcast",
    network: HostTopology | None = None,
    title: str = "pipeline",
    writes_stage: StageFactory | None = None,
    awaits_sends: bool = False,
) -> Program:
    """Return the program that runs a schedule of a pipeline, one body for each pipeline rank.

    Args:
        problem: stages and edges.
        schedule: the actions; sends and receives are added unless it lists some. `stage_ranks` must be those of
            the problem.
        transfers: "overlapped", "blocking" (in the lane of the stages), "paired" (one lane for each two
            pipeline ranks, both directions, as NCCL orders them), or "signals" (overlapped, of one byte
            each).
        chunks: messages, at most, into which a transfer between equal layouts is cut.
        strategy: how transfers between unlike layouts are resharded; a key of
            `algorithms.reshard.STRATEGIES`.
        network: hosts and NICs for which reshards are planned; None where each chip is a host of its own.
        title: the beginning of the program's name.
        writes_stage: makes the writer of each stage; None for one call for each part of a stage. Where it is
            given, inputs of a stage and arriving gradients are alive until its weight gradient.
        awaits_sends: whether a rank's stages wait for the end of each send, by a call `sent`, which changes
            nothing. Receives overlap with the stages.

    Raises:
        LayoutError: `check_schedule` refuses the schedule, an action waits for one that never runs or that
            itself waits for it, or a listed transfer is along no edge.
    """
    check_schedule(problem, schedule)
    writer = _PipelineWriter(
        problem, schedule, transfers, chunks, strategy, network, writes_stage, awaits_sends
    )
    return writer.program(title)


def check_schedule(problem: PipelineProblem, schedule: Schedule) -> None:
    """Raise LayoutError unless a schedule has the stages, pipeline ranks and micro-batches of a problem.

    Also raise it where a stage that lists UNSHARD or RESHARD reads its sharded parameters while they are not
    gathered; without UNSHARD they are gathered at the begin.
    """
    if schedule.stage_ranks != problem.stage_ranks:
        raise LayoutError(
            f"the schedule has its stages on pipeline ranks {schedule.stage_ranks}, the problem on "
            f"{problem.stage_ranks}"
        )
    if schedule.num_ranks != problem.num_ranks:
        raise LayoutError(
            f"the schedule has {schedule.num_ranks} pipeline ranks, the problem {problem.num_ranks}"
        )
    if schedule.num_micro_batches != problem.micro_batches:
        raise LayoutError(
            f"the schedule has {schedule.num_micro_batches} micro-batches, "
            f"the problem {problem.micro_batches}"
        )
    _check_gathered(problem, schedule)


def _check_gathered(problem: PipelineProblem, schedule: Schedule) -> None:
    """Raise LayoutError where an action reads sharded parameters that are freed there, or not yet gathered."""
    gathers, frees = (
        {
            leaf.stage
            for leaf in schedule.leaves()
            if leaf.kind is kind and problem.stages[leaf.stage].is_sharded
        }
        for kind in (ActionKind.UNSHARD, ActionKind.RESHARD)
    )
    listed, gathered = gathers | frees, frees - gathers
    reading = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRAD)
    for action in schedule.leaves() if listed else ():
        if action.kind is ActionKind.UNSHARD:
            gathered.add(action.stage)
        elif action.kind is ActionKind.RESHARD:
            gathered.discard(action.stage)
        elif action.kind in reading and action.stage in listed - gathered:
            raise LayoutError(
                f"{action} reads the parameters of stage {action.stage}, which are freed there; put "
                f"{action.stage}{ActionKind.UNSHARD.value} before it"
            )


def stage_flops(problem: PipelineProblem) -> list[tuple[int, int, int]]:
    """Return (forward, input gradient with recomputation, weight gradient) of each stage, in FLOPs.

    They are of one micro-batch on one rank; each is at least 1, so that it can stand for a duration.
    """
    durations = []
    for stage in problem.stages:
        again = 0 if stage.recompute is None else stage.recompute.cost.flops
        parts = stage.forward.flops, stage.input_grad.flops + again, stage.weight_grad.flops
        durations.append((max(parts[0], 1), max(parts[1], 1), max(parts[2], 1)))
    return durations


class _PipelineWriter:
    def __init__(
        self,
        problem: PipelineProblem,
        schedule: Schedule,
        transfers: Transfers,
        chunks: int,
        strategy: str,
        network: HostTopology | None,
        writes_stage: StageFactory | None,
        awaits_sends: bool,
    ) -> None:
        self.problem, self.schedule, self.transfers = problem, schedule, transfers
        self.awaits_sends = awaits_sends
        pairs = [(edge.source, edge.target) for edge in problem.edges]
        self.steps: Steps = communicating_steps(schedule, pairs, stage_flops(problem))
        self.has_signals = transfers == "signals"
        self.meshes = [replace(mesh, name=f"p{rank}") for rank, mesh in enumerate(problem.meshes)]
        self.is_opaque = writes_stage is None
        spare = 0 if transfers == "blocking" else 1
        self.slots = num_slots(problem, self.steps, spare, keeps_inputs=not self.is_opaque)
        self.boundaries = {
            (edge.source, edge.target, kind): boundary_of(
                problem, edge, kind, (self.meshes[ends[0]], self.meshes[ends[1]]), self.slots,
                chunks=chunks, strategy=strategy, network=network, signals=self.has_signals,
            )
            for edge in problem.edges
            for ends in [(problem.stage_ranks[edge.source], problem.stage_ranks[edge.target])]
            for kind in ("h", "g")
        }  # fmt: skip
        self.colors = edge_colors(problem)
        leaves = [leaf for action in self.steps.templates for leaf in action.leaves]
        listed = {(action.stage, action.kind) for action in leaves}
        self.gathered = {stage for stage, kind in listed if kind is ActionKind.UNSHARD}
        self.reduced = {stage for stage, kind in listed if kind is ActionKind.REDUCE_GRAD}
        split = {stage for stage, kind in listed if kind in (ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)}
        self.joint = set(range(problem.num_stages)) - split
        self.stages: list[StageWriter] = [
            (writes_stage or self._opaque)(
                number,
                self.meshes[problem.stage_ranks[number]],
                {key: boundary for key, boundary in self.boundaries.items() if number in key[:2]},
                Stashes() if self.is_opaque else stash_slots(problem, self.steps, number),
            )
            for number in range(problem.num_stages)
        ]

    def _opaque(
        self, number: int, mesh: Mesh, boundaries: Mapping[tuple[int, int, str], Boundary], stashes: Stashes
    ) -> StageOps:
        return StageOps(
            self.problem, number, mesh, boundaries,
            COMPUTE, COMPUTE if self.transfers == "blocking" else PARAMETERS,
            is_joint=number in self.joint, has_signals=self.has_signals,
        )  # fmt: skip

    # --- lanes -------------------------------------------------------------------------------------------

    def _lane(self, edge: Edge, kind: str) -> str:
        """Return the lane of an edge's activations ("h") or gradients ("g")."""
        if self.transfers == "blocking":
            return COMPUTE
        if self.transfers == "paired":
            low, high = sorted(self.problem.stage_ranks[stage] for stage in (edge.source, edge.target))
            return f"pair{low}_{high}"
        return f"{'activations' if kind == 'h' else 'gradients'}{self.colors[edge.source, edge.target]}"

    # --- the program ---------------------------------------------------------------------------------------

    def program(self, title: str) -> Program:
        """Return the program; its name begins with `title`."""
        problem = self.problem
        body = tuple(On(mesh.name, tuple(self._rank_body(rank))) for rank, mesh in enumerate(self.meshes))
        count = problem.micro_batches
        layouts = tensor_layouts(problem)
        wanted = [tensor for tensor in tensors(problem) if not self.has_signals or tensor.name in layouts]
        if not self.is_opaque:
            wanted = [tensor for stage in self.stages for tensor in stage.tensors()]
        meshes, buffers = self._meshes_and_buffers(layouts)
        stages = f"{problem.num_stages} stage{'s' if problem.num_stages > 1 else ''}"
        return Program(
            f"{title}: {stages}, {count} micro-batch{'es' if count > 1 else ''}",
            tuple(meshes),
            tuple(wanted),
            tuple(buffers),
            tuple(map(Lane, dict.fromkeys((COMPUTE, *_lanes(body))))),
            body,
            tuple(meanings(problem, self.joint)) if self.is_opaque and not self.has_signals else (),
        )

    def _meshes_and_buffers(self, layouts: dict[str, Layout]) -> tuple[list[Mesh], list[Buffer]]:
        meshes = [*self.meshes, *dict.fromkeys(mesh for stage in self.stages for mesh in stage.meshes)]
        buffers = [buffer for stage in self.stages for buffer in stage.buffers(layouts)]
        for boundary in self.boundaries.values():
            buffers += boundary.buffers
            if boundary.mesh is not None:
                meshes.append(boundary.mesh)
        return meshes, buffers

    def _rank_body(self, rank: int) -> Iterator[Statement]:
        stages = [self.stages[number] for number in self.problem.stages_of(rank)]
        for stage in stages:
            yield from stage.begin(gathers=stage.number not in self.gathered)
        yield from self._statements(fold(self.steps.of_rank[rank]), 0, 0)
        for stage in stages:
            yield from stage.end(reduces=stage.number not in self.reduced)

    def _statements(self, folded: Folded, advance: Index, depth: int) -> Iterator[Statement]:
        for item in folded:
            if isinstance(item, StepLoop):
                turn = Var(TURNS[depth])
                inner = self._statements(item.body, advance + turn * item.increment, depth + 1)
                yield Repeat(turn.name, item.count, tuple(inner))
            else:
                number, first = item
                yield from self._action(self.steps.templates[number], advance + first)

    def _action(self, template: Action, micro_batch: Index) -> Iterator[Statement]:
        count = len(template.parts)
        for number, part in enumerate(template.leaves):
            label = f"{part.stage}{part.kind.value}"
            if count:
                label += f" overlap {number + 1}/{count}"
            at = micro_batch + (part.micro_batch or 0)
            if part.kind.communicates:
                yield from self._transfer(part, at)
            else:
                yield from self.stages[part.stage].action(part.kind, at, label)

    def _transfer(self, action: Action, micro_batch: Index) -> Iterator[Statement]:
        """Yield the statements of one end of a transfer."""
        peer = peer_of(action)
        source, target = sorted((action.stage, peer))
        forward = action.kind in (ActionKind.SEND_FORWARD, ActionKind.RECV_FORWARD)
        boundary = self.boundaries.get((source, target, "h" if forward else "g"))
        if boundary is None:
            raise LayoutError(f"action {action}: no edge joins stages {source} and {target}")
        sends = action.kind in (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)
        label = f"{action.stage}{action.kind.value}"
        if abs(peer - action.stage) != 1:
            label += f" with {peer}"
        lane = self._lane(boundary.edge, boundary.kind)
        one_lane = self.transfers in ("blocking", "paired")
        yield from boundary.statements(sends, micro_batch, lane, label, one_lane=one_lane)
        if sends and self.awaits_sends:
            sent = (boundary.out_view(micro_batch),)
            yield Call(fn="sent", outs=sent, ins=sent, lane=COMPUTE, name=f"{label} is sent")


def _lanes(body: Iterable[Statement]) -> Iterator[str]:
    """Yield the lanes of ops, and those that includes are given."""
    for op in ops_of(body):
        if isinstance(op, Include):
            yield from (lane for _, lane in op.lanes)
        else:
            yield op.lane


def edge_colors(problem: PipelineProblem) -> dict[tuple[int, int], int]:
    """Return a number, from 0 on, for each edge, by (source stage, target stage): equal numbers share a lane.

    Two edges that meet at a pipeline rank have different numbers, unless one of them is inside of a rank, where
    nothing is sent.
    """
    taken: dict[int, set[int]] = defaultdict(set)
    colors: dict[tuple[int, int], int] = {}
    for edge in problem.edges:
        ends: Sequence[int] = [problem.stage_ranks[stage] for stage in (edge.source, edge.target)]
        used = taken[ends[0]] | taken[ends[1]]
        color = next(number for number in range(len(used) + 1) if number not in used)
        if not problem.is_local(edge):
            for end in ends:
                taken[end].add(color)
        colors[edge.source, edge.target] = color
    return colors
