"""The bytes that training takes on a chip, by lifetimes: states for the whole step, activations while in flight.

Weights, gradients and optimizer states follow ZeRO (Rajbhandari et al., SC '20, section 3.1 and 5). What a layer
keeps for its backward part follows equation 1 and table 2 of Korthikanti et al. (MLSys '23), with each tensor
divided by the mesh axes along which the roles of the strategy split it (`algorithms.block.roles`). Per token, of
e bytes an element, h hidden, q and g features of queries and of keys, f inner features, a heads and s tokens:

    inputs of two norms              2 e h            as the residual lies
    operands of QKV and first FFN    2 e h            as the residual lies, or as they are multiplied if kept so
    masks of dropout                 2 h              as the residual lies, where there is dropout
    Q, K, V, result of attention     e (2 q + 2 g)    as attention lies
    scores and their dropout         a s (2 e + 1)    as attention lies; flash keeps 4 a of sums instead
    inner features                   2 e f, gated 4 e f

A pipeline rank keeps as many of these as micro-batches are in flight (`peak_stashes` of the schedule). The most is
held when the backward part of a micro-batch begins; buffers are what lives then besides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from meshweave.algorithms.block.roles import AxisRole
from meshweave.tune.step.layers import strategy_of
from meshweave.tune.step.problem import Parallelism, StepProblem

LOGIT_BYTES = 4
"""The loss is computed in fp32 (Korthikanti et al., section 4.3: 4 s b v); its gradient is as large."""
GATHERED_LAYERS = 2
"""Layers whose weights ZeRO-3 has whole at a time: the one in use, and the next."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each chip of one pipeline rank."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    fragmentation: int

    @property
    def total(self) -> int:
        """Return the sum."""
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.buffers
            + self.fragmentation
        )


@dataclass(frozen=True)
class Memory:
    """Bytes on each chip of every pipeline rank."""

    stages: tuple[StageMemory, ...]

    @property
    def peak_stage(self) -> int:
        """Return the number of the pipeline rank that takes the most."""
        return max(range(len(self.stages)), key=lambda rank: self.stages[rank].total)

    @property
    def peak(self) -> StageMemory:
        """Return the memory of that rank."""
        return self.stages[self.peak_stage]

    @property
    def total(self) -> int:
        """Return the bytes of that rank."""
        return self.peak.total


def layer_parameters(problem: StepProblem, parallelism: Parallelism) -> int:
    """Return the weights of a layer on one rank of its tensor-parallel group."""
    weights = sum(layer.in_features * layer.out_features for layer in problem.model.fc_layers())
    return -(-weights // parallelism.tensor_size)


def table_parameters(problem: StepProblem, parallelism: Parallelism) -> int:
    """Return the weights of an embedding table on one rank of its tensor-parallel group."""
    return -(-(problem.model.vocab_size or 0) * problem.model.hidden // parallelism.tensor_size)


def rank_parameters(problem: StepProblem, parallelism: Parallelism, layers: list[int]) -> list[int]:
    """Return the weights on a chip of each pipeline rank, with those of embedding and head at the ends."""
    counts = [count * layer_parameters(problem, parallelism) for count in layers]
    table = table_parameters(problem, parallelism)
    counts[0] += table
    if len(counts) > 1 or not problem.model.tied_embeddings:
        counts[-1] += table
    return counts


def _shares(problem: StepProblem, parallelism: Parallelism) -> Callable[[str], int]:
    """Return a function from a tensor of a role to the number of ranks that it is divided over."""
    roles: tuple[AxisRole, ...] = strategy_of(problem, parallelism).roles[-2:]

    def share(tensor: str) -> int:
        sizes = zip(roles, parallelism.tensor_mesh, strict=True)
        return math.prod(size for role, size in sizes if getattr(role, tensor)) * parallelism.context

    return share


def layer_activations(problem: StepProblem, parallelism: Parallelism, recompute: str) -> int:
    """Return the bytes that one micro-batch keeps of a layer on each rank."""
    model, e = problem.model, problem.item_bytes
    tokens = parallelism.micro_batch * problem.seq
    share = _shares(problem, parallelism)
    h, f = model.hidden, model.ffn_hidden
    if recompute == "full":
        return -(-e * tokens * h // share("residual"))
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    keeps = any(role.keeps_gathered for role in strategy_of(problem, parallelism).roles[-2:])
    masks = 2 if problem.has_dropout else 0
    total = -(-tokens * h * (2 * e + masks) // share("residual"))
    total += -(-tokens * h * 2 * e // share("operand_in" if keeps else "residual"))
    total += -(-tokens * e * (2 * queries + 2 * keys) // share("attention"))
    total += -(-tokens * e * f * (4 if model.gated_ffn else 2) // share("feed_forward"))
    if problem.attention == "flash":
        return total - (-4 * tokens * model.num_heads // share("attention"))
    if recompute == "none":
        scores = 2 * e + (1 if problem.has_dropout else 0) if problem.has_dropout else e
        total += -(-tokens * model.num_heads * problem.seq * scores // share("attention"))
    return total


def boundary_bytes(problem: StepProblem, parallelism: Parallelism) -> int:
    """Return the bytes of the residual of a micro-batch on one rank: what goes on to the next stage."""
    elements = parallelism.micro_batch * problem.seq * problem.model.hidden
    return -(-problem.item_bytes * elements // _shares(problem, parallelism)("residual"))


def residual_is_whole(problem: StepProblem, parallelism: Parallelism) -> bool:
    """Return whether every tensor-parallel rank has the residual of all tokens that the group works on."""
    return _shares(problem, parallelism)("residual") == parallelism.context


def logit_elements(problem: StepProblem, parallelism: Parallelism) -> int:
    """Return the logits of a micro-batch on one rank."""
    tokens = parallelism.micro_batch * problem.seq
    return -(-tokens * (problem.model.vocab_size or 0) // (parallelism.tensor_size * parallelism.context))


def pipeline_memory(
    problem: StepProblem, parallelism: Parallelism, layers: list[int], stashes: tuple[int, ...]
) -> Memory:
    """Return the bytes on a chip of each pipeline rank; `memory_of` finds out the layers and stashes.

    Args:
        layers: the layers of each pipeline rank.
        stashes: for each rank the most micro-batches, over its stages, whose activations it keeps.
    """
    counts = rank_parameters(problem, parallelism, layers)
    ranks = zip(counts, layers, stashes, strict=True)
    return Memory(tuple(_on_rank(problem, parallelism, rank, *each) for rank, each in enumerate(ranks)))


def _on_rank(
    problem: StepProblem, parallelism: Parallelism, rank: int, parameters: int, layers: int, stashes: int
) -> StageMemory:
    zero, shards = parallelism.zero, parallelism.shards

    def states(num_bytes: int, from_stage: int) -> int:
        return -(-parameters * num_bytes // (shards if zero >= from_stage else 1))

    activations = _activations(problem, parallelism, rank, layers, stashes)
    buffers = _buffers(problem, parallelism, rank)
    return StageMemory(
        states(problem.item_bytes, 3),
        states(problem.gradient_bytes, 2),
        states(problem.optimizer_bytes, 1),
        activations,
        buffers,
        round(problem.stack.fragmentation * (activations + buffers)),
    )


def _activations(problem: StepProblem, parallelism: Parallelism, rank: int, layers: int, stashes: int) -> int:
    recompute = parallelism.recompute
    layer = layer_activations(problem, parallelism, recompute)
    total = -(-stashes * layers * layer // parallelism.virtual_stages)
    if recompute == "full":  # the layer that is being computed again
        total += layer_activations(problem, parallelism, "none")
    elif recompute == "selective":
        total += layer_activations(problem, parallelism, "none") - layer
    residual = boundary_bytes(problem, parallelism)
    if rank == 0 and problem.has_dropout:
        total += stashes * residual // (problem.item_bytes * parallelism.virtual_stages)
    if rank == parallelism.pipeline - 1 and problem.model.vocab_size:
        in_flight = stashes // parallelism.virtual_stages if parallelism.schedule == "gpipe" else 1
        total += in_flight * (2 * residual + LOGIT_BYTES * logit_elements(problem, parallelism))
    return total


def _buffers(problem: StepProblem, parallelism: Parallelism, rank: int) -> int:
    model, e, tokens = problem.model, problem.item_bytes, parallelism.micro_batch * problem.seq
    share = _shares(problem, parallelism)
    inner = model.ffn_hidden * (3 if model.gated_ffn else 2)  # gradients of both sides of the activation
    working = -(-tokens * e * inner // share("feed_forward"))
    if share("operand_in") < share("residual"):
        working += -(-tokens * e * model.hidden // share("operand_in"))
    if rank == parallelism.pipeline - 1:
        working = max(working, LOGIT_BYTES * logit_elements(problem, parallelism))
    total = working
    if parallelism.pipeline > 1:
        total += 2 * boundary_bytes(problem, parallelism)
    if parallelism.shards > 1 and parallelism.zero >= 2:
        whole = layer_parameters(problem, parallelism)
        total += whole * problem.gradient_bytes
        total += GATHERED_LAYERS * whole * e if parallelism.zero == 3 else 0
    return total
