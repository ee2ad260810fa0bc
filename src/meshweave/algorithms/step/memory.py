"""Count what a chip has of the weights of a model, and of their gradients and optimizer states, under ZeRO.

These follow Rajbhandari et al. (SC '20, section 3.1 and 5). Outside of the allocator there are the context of the
process and the buffers of communicators, one for each group of ranks that a step communicates in, by constants of
the runtime (`describe.machine.chip`). `step_memory` counts the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshweave.algorithms.block.roles import AxisRole
from meshweave.algorithms.step.pipeline import ranks_of_stages
from meshweave.algorithms.step.problem import OPTIMIZERS, Parallelism, StepProblem
from meshweave.algorithms.step.stage_layers import layer_costs, stage_kinds, stage_layers
from meshweave.algorithms.step.strategies import strategy_of

ADAM_STEP_BYTES = 50
"""Bytes through memory per parameter. Adam reads gradient, fp32 weight, momentum and variance, and writes the last
three (28; Kingma and Ba, 2015, algorithm 1); the 16-bit weight is copied from the fp32 one (6); the norm of
gradients reads them (4), clipping scales them (8), and they are set to zero (4)."""
_WHOLE_GRADIENT_BYTES, _SLICED_WEIGHT_BYTES = 16, 12
"""Bytes through memory per parameter, whole and not of a shard: those of norm, clipping and zeros; and of a 16-bit
weight that is copied to the list of gathered buffers, out of NCCL's buffer and back into its tensor (4 each)."""
GATHERED_LAYERS = 2
"""Layers whose weights ZeRO-3 has whole at a time: the one in use, and the next."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on each chip of one pipeline rank.

    Attributes:
        weights, gradients, optimizer: of weights, their gradients and the optimizer's states, as ZeRO shards
            them.
        activations: activations that are kept at the peak.
        buffers: other temporary tensors that are alive then.
        fragmentation: what the allocator cannot use.
        context: the context of the process.
        communication: the buffers of communicators.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    fragmentation: int
    context: int
    communication: int

    @property
    def total(self) -> int:
        """Return the bytes of all fields together."""
        return self.allocated + self.context + self.communication

    @property
    def allocated(self) -> int:
        """Return the bytes of a framework's allocator: `total` less `context` and `communication`."""
        states = self.weights + self.gradients + self.optimizer
        return states + self.activations + self.buffers + self.fragmentation


@dataclass(frozen=True)
class Memory:
    """Bytes on each chip of every pipeline rank."""

    ranks: tuple[RankMemory, ...]

    @property
    def peak_rank(self) -> int:
        """Return the pipeline rank whose chips hold the most bytes."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].total)

    @property
    def peak(self) -> RankMemory:
        """Return the memory of the pipeline rank whose chips hold the most bytes."""
        return self.ranks[self.peak_rank]

    @property
    def total(self) -> int:
        """Return the most bytes on any chip: those of `peak`."""
        return self.peak.total


@dataclass(frozen=True)
class ShardedParameters:
    """Numbers of weights on a chip before ZeRO: of experts, which have replicas of their own, and others."""

    others: int
    experts: int = 0

    @property
    def total(self) -> int:
        """Return the number of weights, those of experts included."""
        return self.others + self.experts

    def kept(self, parallelism: Parallelism, from_level: int) -> int:
        """Return how many of these weights a chip keeps: its shard, or all if ZeRO does not shard them.

        ZeRO shards them where `parallelism.zero` is at least `from_level`: 1 to count optimizer states, 2
        gradients, 3 the weights themselves.
        """
        if parallelism.zero < from_level:
            return self.total
        others = -(-self.others // parallelism.shards)
        return others + (-(-self.experts // parallelism.expert_shards) if self.experts else 0)

    def __add__(self, other: ShardedParameters) -> ShardedParameters:
        return ShardedParameters(self.others + other.others, self.experts + other.experts)

    def __rmul__(self, count: float) -> ShardedParameters:
        return ShardedParameters(round(count * self.others), round(count * self.experts))


def update_bytes(problem: StepProblem) -> int:
    """Return the bytes that the optimizer reads and writes in a chip's memory per weight that it updates.

    They are those of Adam (`ADAM_STEP_BYTES`), less 8 for each state that the optimizer does not keep: a state
    counts as read and written in 4 bytes, even where it is kept in fewer.
    """
    return ADAM_STEP_BYTES - 8 * (OPTIMIZERS["adam"].count - OPTIMIZERS[problem.optimizer].count)


def unsharded_update_bytes(problem: StepProblem, parallelism: Parallelism) -> int:
    """Return the bytes that a rank reads and writes in its memory per weight that another replica updates.

    They are for norm, clipping and zeroing of the whole gradient, and for copies of a weight that the stack slices
    for its collectives (`sliced_weights`). 0 unless several ranks shard by ZeRO-1 on a stack with `sums_after`.
    """
    if parallelism.zero != 1 or parallelism.shards == 1 or not problem.stack.sums_after:
        return 0
    return _WHOLE_GRADIENT_BYTES + (_SLICED_WEIGHT_BYTES if problem.stack.sliced_weights else 0)


def layer_parameters(problem: StepProblem, parallelism: Parallelism) -> ShardedParameters:
    """Return the number of weights of a layer on one rank before ZeRO; of several kinds of layers, the largest."""
    return max(kinds_parameters(problem, parallelism), key=lambda each: each.total)


def kinds_parameters(problem: StepProblem, parallelism: Parallelism) -> tuple[ShardedParameters, ...]:
    """Return the number of weights of a layer on one rank before ZeRO, for each of `problem.kinds`."""
    return tuple(_of_layer(kind, parallelism) for _, kind in problem.kinds)


def _of_layer(problem: StepProblem, parallelism: Parallelism) -> ShardedParameters:
    """Return the weights of a layer of the first kind on one rank."""
    layer, p = problem.model.layer, parallelism
    others = -(-layer.num_weights // p.tensor_size) + layer.num_whole_weights
    return ShardedParameters(others, -(-layer.num_expert_weights // (p.expert * p.expert_tensor)))


def table_parameters(problem: StepProblem, parallelism: Parallelism) -> int:
    """Return the number of weights of an embedding table (vocabulary x hidden) on one rank before ZeRO."""
    return -(-(problem.model.vocab_size or 0) * problem.model.hidden // parallelism.tensor_size)


def tables_parameters(problem: StepProblem, parallelism: Parallelism, rank: int) -> int:
    """Return the number of weights of embedding and head tables on a chip of pipeline rank `rank`, before ZeRO.

    A table that embedding and head share counts once on a rank that has both; 0 on ranks with neither.
    """
    head = rank_of_head(parallelism)
    has_own_head = rank == head and (head > 0 or not problem.model.tied_embeddings)
    return ((rank == 0) + has_own_head) * table_parameters(problem, parallelism)


def rank_of_head(parallelism: Parallelism) -> int:
    """Return the pipeline rank that has the last stage."""
    p = parallelism
    return ranks_of_stages(p.schedule, p.pipeline, p.virtual_stages)[-1]


def rank_parameters(
    problem: StepProblem, parallelism: Parallelism, layers: Sequence[int]
) -> tuple[ShardedParameters, ...]:
    """Return for each pipeline rank the number of weights on a chip before ZeRO, embedding and head included.

    `layers` has each rank's number of layers; it is not read where `rank_kinds` knows how many of each kind.
    """
    p = parallelism
    key = p.schedule, p.pipeline, p.virtual_stages, p.tensor_size, p.experts, tuple(layers)
    return problem.once("weights of ranks", key, lambda: _rank_parameters(problem, p, layers))


def _rank_parameters(
    problem: StepProblem, parallelism: Parallelism, layers: Sequence[int]
) -> tuple[ShardedParameters, ...]:
    if kinds := rank_kinds(problem, parallelism):
        own = kinds_parameters(problem, parallelism)
        nothing = ShardedParameters(0)
        pairs = (zip(counts, own, strict=True) for counts in kinds)
        counts = [sum((count * of for count, of in each), nothing) for each in pairs]
    else:
        of_layer = layer_parameters(problem, parallelism)
        counts = [count * of_layer for count in layers]
    for rank in {0, rank_of_head(parallelism)}:
        counts[rank] += ShardedParameters(tables_parameters(problem, parallelism, rank))
    return tuple(counts)


def rank_kinds(problem: StepProblem, parallelism: Parallelism) -> tuple[tuple[float, ...], ...]:
    """Return for each pipeline rank how many layers of each of `problem.kinds` it has.

    () where layers are of one kind, or their order is not known.
    """
    p = parallelism
    if not problem.model.layers:
        return ()

    def summed() -> tuple[tuple[float, ...], ...]:
        layers = stage_layers(problem.model.num_layers, p.num_stages, layer_costs(problem))
        return _summed_kinds(problem, p, stage_kinds(problem, layers))

    return problem.once("kinds of ranks", (p.schedule, p.pipeline, p.virtual_stages), summed)


def _summed_kinds(
    problem: StepProblem, parallelism: Parallelism, stages: Sequence[tuple[float, ...]]
) -> tuple[tuple[float, ...], ...]:
    """Return how many layers of each kind each pipeline rank has, from those of each stage; () for none."""
    p = parallelism
    if not stages:
        return ()
    out: list[tuple[float, ...]] = [tuple(0.0 for _ in problem.kinds)] * p.pipeline
    for rank, counts in zip(ranks_of_stages(p.schedule, p.pipeline, p.virtual_stages), stages, strict=True):
        out[rank] = tuple(map(sum, zip(out[rank], counts, strict=True))) if counts else out[rank]
    return tuple(out)


def num_parts_of(parallelism: Parallelism) -> Callable[[str], int]:
    """Return a function from a tensor's name (a field of `AxisRole`) to over how many ranks it is divided.

    These are context and tensor ranks; data ranks do not count. `num_parts_of(p)("residual")` is such a number.
    """
    roles: tuple[AxisRole, ...] = strategy_of(parallelism).roles[-2:]

    def num_parts(tensor: str) -> int:
        sizes = zip(roles, parallelism.tensor_mesh, strict=True)
        return math.prod(size for role, size in sizes if getattr(role, tensor)) * parallelism.context

    return num_parts


def boundary_bytes(problem: StepProblem, parallelism: Parallelism) -> int:
    """Return the bytes of one micro-batch's residual on one rank, which it sends to the next stage."""
    elements = parallelism.micro_batch * problem.sequence * problem.model.hidden
    return -(-problem.item_bytes * elements // num_parts_of(parallelism)("residual"))


def residual_is_whole(parallelism: Parallelism) -> bool:
    """Return whether every tensor-parallel rank holds the residual of all tokens that its group works on."""
    return num_parts_of(parallelism)("residual") == parallelism.context


def communicator_bytes(problem: StepProblem, parallelism: Parallelism) -> int:
    """Return the bytes of communicator buffers on a rank, for the groups in which a step communicates.

    The groups are the axes of tensor parallelism, the ring of context ranks, the ranks of a pipeline, and the
    ranks with equal weights; where ZeRO shards among some of the last alone, these, and the ranks with copies of a
    shard. Where ranks share experts, these ranks are groups too, and so are the replicas of a rank's experts.
    """
    p = parallelism
    groups = [*p.tensor_mesh, p.context, p.pipeline, p.shards, p.replicas // p.shards]
    if p.expert > 1:
        groups += [p.expert, p.expert_tensor, p.expert_replicas]
    return sum(map(problem.cluster.chip.driver.communicator_bytes, groups))


def state_bytes(
    problem: StepProblem, parallelism: Parallelism, parameters: ShardedParameters
) -> tuple[int, int, int]:
    """Return the bytes of (weights, gradients, optimizer states) on a rank, as the ZeRO level shards them.

    `parameters` are the numbers of weights on a rank before ZeRO.
    """

    def states(num_bytes: int, from_level: int) -> int:
        whole = ShardedParameters(parameters.others * num_bytes, parameters.experts * num_bytes)
        return whole.kept(parallelism, from_level)

    weight, optimizer = problem.item_bytes, problem.optimizer_bytes
    in_fp32 = problem.stack.sharding != "zero" and not problem.stack.runs_programs
    if parallelism.zero == 3 and in_fp32 and weight < 4:
        weight, optimizer = 4, optimizer - 4
    gradient = problem.gradient_bytes
    if problem.stack.buckets_gradients and parallelism.replicas > 1 and not parallelism.zero:
        gradient += problem.item_bytes
    return states(weight, 3), states(gradient, 2), states(optimizer, 1)
