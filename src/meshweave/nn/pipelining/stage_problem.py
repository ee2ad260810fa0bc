"""What all ranks must know of a pipeline of modules before it is written: which rank has which stage, and
profiles.

A rank has the modules of its own stages alone. So ranks exchange, stage after stage, the profile of a stage run on
the shapes that the stages before it pass on; each then builds the same `PipelineProblem`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from meshweave.algorithms.pipeline.actions import ActionKind, Schedule
from meshweave.algorithms.pipeline.problem import Edge, PartCost, PipelineProblem, Recompute, Stage, Stash
from meshweave.base.errors import BindError, LayoutError, UnsupportedError, printable
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.ranks.agreement import exchange
from meshweave.execute.ranks.blame import ranks_text
from meshweave.execute.torch.buffers import torch_dtype
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.pipelining.gradients import num_loss_elements
from meshweave.nn.pipelining.missed_gradients import missed_gradient
from meshweave.nn.pipelining.profile import StageProfile, profile_stage, trained_elements
from meshweave.nn.pipelining.stage_functions import LossFunction, StageShape, TensorKind
from meshweave.nn.products import DTYPES

_TOPIC = "a pipeline"


@dataclass(frozen=True)
class StagePlaces:
    """Which ranks have which stage of a pipeline.

    Attributes:
        meshes: the mesh of each stage.
        data_axes: the names of mesh axes along which ranks share the rows of a micro-batch (data parallelism); a
            mesh need not have them all.
        edges: (source stage, target stage) of each tensor that is passed on.
    """

    meshes: tuple[Mesh, ...]
    data_axes: tuple[str, ...]
    edges: tuple[tuple[int, int], ...]

    @property
    def num_stages(self) -> int:
        """Return the number of stages."""
        return len(self.meshes)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Return the global ranks of all stages, ascending."""
        return tuple(sorted({rank for mesh in self.meshes for rank in mesh.ranks}))

    def sources(self, stage: int) -> tuple[int, ...]:
        """Return the numbers of the stages whose results a stage reads, in its inputs' order; () for the first."""
        return tuple(source for source, target in self.edges if target == stage)

    def targets(self, stage: int) -> tuple[int, ...]:
        """Return the numbers of the stages that read a stage's results, in its outputs' order; () for the last."""
        return tuple(target for source, target in self.edges if source == stage)

    def data_axes_of(self, stage: int) -> tuple[str, ...]:
        """Return the names of those of `data_axes` that the mesh of a stage has, in the order of the mesh."""
        return tuple(axis for axis in self.meshes[stage].axes if axis in self.data_axes)

    def data_parallelism(self, stage: int) -> int:
        """Return the number of data-parallel ranks of a stage, which share the rows of a micro-batch."""
        return math.prod(self.meshes[stage].size(axis) for axis in self.data_axes_of(stage))

    def data_index(self, stage: int, rank: int) -> int:
        """Return the index, from 0, of the part of a micro-batch's rows that global rank `rank` has at a stage.

        There are `data_parallelism` equal parts, numbered in row-major order of the data axes.
        """
        mesh, index = self.meshes[stage], 0
        for axis, size, coordinate in zip(mesh.axes, mesh.shape, mesh.coords(rank), strict=True):
            if axis in self.data_axes:
                index = index * size + coordinate
        return index


def agreed_places(
    context: TorchContext,
    ranks: Sequence[int],
    own: Sequence[int],
    meshes: Sequence[Mesh],
    data_axes: Sequence[str],
    skips: Sequence[tuple[int, int]],
) -> StagePlaces:
    """Return which ranks have which stage, after each of `ranks` has said which it has. Collective for them.

    Args:
        context: communicates between the ranks.
        ranks: global ranks, this one among them.
        own: the numbers of the stages of this rank.
        meshes: of the ranks that share a stage; a stage on one rank alone needs none.
        data_axes: the axes of meshes along which ranks share the rows of a micro-batch.
        skips: (source stage, target stage) of edges besides those to the next stage.

    Raises:
        LayoutError: stages are missing, the ranks of a stage are those of no mesh, or a skip does not lead over a
            stage.
        RankLostError, DeadlineError: another rank died, or did not come in time.
        BindError: another rank is in another call, or refuses this one.
    """
    said = exchange(
        context, ranks, json.dumps(sorted(own)), "all to say which stages they have", topic=_TOPIC
    )
    holders: dict[int, list[int]] = {}
    for rank, words in said.items():
        for stage in json.loads(words):
            holders.setdefault(stage, []).append(rank)
    if not holders:
        raise LayoutError("no rank has a stage; give each rank its modules by the number of their stage")
    missing = next((stage for stage in range(max(holders) + 1) if stage not in holders), None)
    if missing is not None:
        raise LayoutError(f"no rank has stage {missing}, and there is a stage {max(holders)}")
    if isinstance(data_axes, str):
        raise LayoutError(f"data_axes is '{printable(data_axes)}'; give a sequence of axes, such as ('dp',)")
    mesh_of: dict[frozenset[int], Mesh] = {}
    for each in meshes:
        if (first := mesh_of.setdefault(frozenset(each.ranks), each)) != each:
            raise LayoutError(
                f"meshes {first.name} and {each.name} have the same ranks; stages on them share one"
            )
    placed = []
    for stage in range(len(holders)):
        mesh = mesh_of.get(frozenset(holders[stage]))
        if mesh is None and len(holders[stage]) > 1:
            raise LayoutError(
                f"stage {stage} is on {ranks_text(holders[stage])}, and no mesh has just these; give `meshes`"
            )
        placed.append(mesh or Mesh.of(f"rank{holders[stage][0]}", (1,), ("x",), holders[stage][0]))
    chain = [(stage, stage + 1) for stage in range(len(placed) - 1)]
    for source, target in skips:
        if not 0 <= source < target - 1 < len(placed) - 1:
            raise LayoutError(
                f"a skip connection from stage {source} to stage {target}: it must lead over a stage, and there "
                f"are {len(placed)}"
            )
    return StagePlaces(tuple(placed), tuple(data_axes), (*chain, *map(tuple, skips)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class PipelineData:
    """What the first and the last stage are given for one micro-batch, over all ranks of a stage.

    Attributes:
        batch: the tensors of the batch; none on ranks without the first stage.
        target: what the loss compares the output with; None where there is no loss, or without the last stage.
    """

    batch: tuple[TensorKind, ...]
    target: TensorKind | None

    @property
    def num_rows(self) -> int:
        """Return the samples of a micro-batch over all ranks of a stage: dim 0 of the first batch tensor.

        Only for ranks of the first stage; others have no batch tensors.
        """
        return self.batch[0].shape[0]


def local_kind(kind: TensorKind, num_parts: int) -> TensorKind:
    """Return the shape and dtype of one part of a tensor split into equal parts along dim 0.

    The caller checks that `num_parts` divides the rows.
    """
    return TensorKind((kind.shape[0] // num_parts, *kind.shape[1:]), kind.dtype)


def profile_all(
    context: TorchContext,
    places: StagePlaces,
    modules: Mapping[int, nn.Module],
    data: PipelineData | None,
    loss_fn: LossFunction | None,
    *,
    trains: bool,
    outputs: Mapping[int, Sequence[torch.Tensor]],
) -> tuple[list[StageProfile], int]:
    """Return (profiles by stage, rows of a micro-batch over all data-parallel ranks of a stage).

    Each rank runs copies of its own stages on the meta device, and tells the others what they cost and pass on.
    Collective among the ranks of `places`.

    Args:
        modules: those of this rank, by stage.
        data: shapes for one micro-batch over all ranks of a stage: on ranks of the first stage with the batch, on
            those of the last with the target; else None.
        loss_fn: the loss, (output, target) -> scalar, run with the last stage; None for none.
        trains: whether backwards are profiled too; else only the forward.
        outputs: by stage of this rank that does not run on the meta device, examples of what it passes on: one
            tensor for each stage that reads it, with this rank's part of the rows of a micro-batch as dim 0. Such
            profiles have no FLOPs and no bytes.

    Raises:
        LayoutError: a stage does not run on what those before it make, rows are not dim 0 of what it passes on, or
            its data-parallel ranks do not divide the rows.
        BindError: ranks of one stage differ; another rank is in another call, or refuses this.
        RankLostError, DeadlineError: another rank died, or did not come in time.
    """
    profiles: list[StageProfile] = []
    made: dict[tuple[int, int], TensorKind] = {}
    rows = 0
    for stage in range(places.num_stages):
        words = ""
        if stage in modules:
            profile = _profile(places, stage, modules[stage], data, made, loss_fn, trains, outputs.get(stage))
            words = json.dumps({**profile.to_json(), "rows": data.num_rows if data and not stage else rows})
        said = exchange(
            context, places.ranks, words, f"the ranks of stage {stage} to run it on shapes", topic=_TOPIC
        )
        own = {rank: json.loads(said[rank]) for rank in places.meshes[stage].ranks}
        kept = [answer.pop("kept_bytes") for answer in own.values()]  # of uneven shards some ranks keep more
        first, answer = next(iter(own.items()))
        different = [rank for rank, each in own.items() if each != answer]
        if different:
            raise BindError(
                f"stage {stage} is another on {ranks_text(different)} than on rank {first}: shapes or dtypes of "
                "the module or the batch differ"
            )
        rows = answer.pop("rows")
        profiles.append(StageProfile.from_json(answer | {"kept_bytes": map(max, *kept, kept[0])}))
        parts = places.data_parallelism(stage)
        for target, kind in zip(places.targets(stage), profiles[-1].outs, strict=True):
            if not kind.shape or kind.shape[0] * parts != rows:
                raise LayoutError(
                    f"stage {stage} passes on {kind} of {rows // parts} rows: rows must come first"
                )
            made[stage, target] = TensorKind((rows, *kind.shape[1:]), kind.dtype)
    return profiles, rows


def _profile(
    places: StagePlaces,
    stage: int,
    module: nn.Module,
    data: PipelineData | None,
    made: Mapping[tuple[int, int], TensorKind],
    loss_fn: LossFunction | None,
    trains: bool,
    outputs: Sequence[torch.Tensor] | None,
) -> StageProfile:
    parts, sources, targets = places.data_parallelism(stage), places.sources(stage), places.targets(stage)
    if outputs is not None:
        kinds = tuple(map(TensorKind.of, outputs)) if targets else ()
        return StageProfile(kinds, (0, 0, 0), 0, (0, 0), 0, *trained_elements(module))
    whole = [made[source, stage] for source in sources] if sources else list(data.batch if data else ())
    for kind in whole:
        if kind.shape[0] % parts:
            raise LayoutError(
                f"stage {stage}: {parts} data-parallel ranks do not divide {kind.shape[0]} rows"
            )
    inputs = [local_kind(kind, parts) for kind in whole]
    target = local_kind(data.target, parts) if data and data.target and not targets else None
    return profile_stage(module, stage, inputs, sources, targets, loss_fn, target, trains=trains)


def stage_shape(places: StagePlaces, stage: int, profiles: Sequence[StageProfile], rows: int) -> StageShape:
    """Return the shapes and dtypes of what stage number `stage` takes and passes on, on one rank.

    Args:
        places: which ranks have which stage.
        profiles: by stage number, up to this stage at least.
        rows: the rows (samples) of a micro-batch over all ranks of the stage.
    """
    sources, targets, parts = places.sources(stage), places.targets(stage), places.data_parallelism(stage)
    ins = []
    for source in sources:
        kind = profiles[source].outs[places.targets(source).index(stage)]
        ins.append(TensorKind((rows // parts, *kind.shape[1:]), kind.dtype))
    return StageShape(stage, rows // parts, tuple(ins), profiles[stage].outs, sources, targets)


def pipeline_problem(
    places: StagePlaces,
    profiles: Sequence[StageProfile],
    micro_batches: int,
    rows: int,
    recomputes: frozenset[int],
    *,
    trains: bool,
) -> PipelineProblem:
    """Return the problem of a pipeline of modules, for schedules and the cost model.

    Args:
        places: which ranks have which stage.
        profiles: by stage number.
        micro_batches: the number of micro-batches of a step.
        rows: the rows (samples) of a micro-batch, over all ranks of a stage.
        recomputes: the numbers of the stages that run their forward again before the backward.
        trains: whether there are gradients; else data-parallel ranks sum the loss alone.

    Raises:
        UnsupportedError: a dtype is passed on that programs do not have.
    """
    stages = [
        _stage(places, number, profile, recomputes, trains=trains) for number, profile in enumerate(profiles)
    ]
    edges = []
    for source, target in places.edges:
        kind = profiles[source].outs[places.targets(source).index(target)]
        if kind.dtype not in DTYPES:
            raise UnsupportedError(
                f"stage {source} passes on {kind} to stage {target}; programs have "
                f"{', '.join(DTYPES.values())}"
            )
        edges.append(Edge(source, target, kind.shape[1:], dtype=DTYPES[kind.dtype]))
    return PipelineProblem(tuple(stages), tuple(edges), micro_batches, rows)


def _stage(
    places: StagePlaces, number: int, profile: StageProfile, recomputes: frozenset[int], *, trains: bool
) -> Stage:
    kept, later = profile.kept_bytes
    forward, input_grad, weight_grad = (PartCost(flops, profile.bytes) for flops in profile.flops)
    freed = max(kept - later, 0)
    stash = Stash(freed, kept - freed, max(later - kept, 0))
    ranks = places.data_parallelism(number)
    vector_dtype = profile.dtype if trains and profile.dtype else "float64"
    size = (profile.num_parameters if trains else 0) + num_loss_elements(torch_dtype(vector_dtype), ranks)
    recomputes_here = number in recomputes and trains
    again = Recompute(forward, min(profile.recomputed_bytes, kept)) if recomputes_here else None
    return Stage(
        places.meshes[number],
        forward,
        input_grad,
        weight_grad,
        size if ranks > 1 else 1,
        stash,
        again,
        places.data_axes_of(number),
        dtype=profile.dtype or "float32",
        parameter_dtype=vector_dtype if ranks > 1 else "float32",
    )


def require_all_parameters(number: int, profile: StageProfile, schedule: Schedule) -> None:
    """Raise UnsupportedError where a schedule splits the backward passes of stage `number` and that fails.

    It does not where the split would miss the gradient of a parameter, or does not run, as the profile says.
    """
    splits = any(leaf.kind is ActionKind.WEIGHT_GRAD and leaf.stage == number for leaf in schedule.leaves())
    if splits and profile.missed_gradient:
        raise missed_gradient(profile.missed_gradient, number)
    if splits and profile.unsplit:
        raise UnsupportedError(
            f"stage {number}: torch computes no backward in two parts of it, as where a module is called twice or "
            f"a checkpoint enters anew ({profile.unsplit}); take a schedule with whole backwards"
        )


def whole_backwards(schedule: Schedule, stage: int) -> frozenset[int]:
    """Return the numbers of the micro-batches whose input and weight gradients are one action at a stage."""
    return frozenset(
        leaf.micro_batch
        for leaf in schedule.leaves()
        if leaf.kind is ActionKind.BACKWARD and leaf.stage == stage and leaf.micro_batch is not None
    )


def last_backward_first(schedule: Schedule, stages: Iterable[int]) -> list[int]:
    """Return the given stages of one rank in the order of the last backward action of each, the latest first.

    A parameter that several of them share is to be reduced with the gradients of the first stage returned: a
    reduction waits for the backward passes of its own stage, and those of the others have run by then.
    """
    parts = ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD, ActionKind.BACKWARD
    last = dict.fromkeys(stages, -1)
    for rank in {schedule.stage_ranks[stage] for stage in last}:
        leaves = (leaf for action in schedule.actions[rank] for leaf in action.leaves)
        last |= {leaf.stage: at for at, leaf in enumerate(leaves) if leaf.kind in parts}
    return sorted(last, key=last.__getitem__, reverse=True)
