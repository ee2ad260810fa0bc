"""Count the bytes that training takes on a chip: states for the whole step, activations while in flight.

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

A pipeline rank keeps as many of these as micro-batches are in flight (`peak_stashes` of a schedule). Memory peaks
when the backward part of a micro-batch begins; buffers are the tensors besides activations that live then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshweave.algorithms.block.roles import AxisRole
from meshweave.tune.step.pipeline import ranks_of_stages
from meshweave.tune.step.problem import Parallelism, StepProblem
from meshweave.tune.step.strategies import strategy_of

LOGIT_BYTES = {"fused": (4, 0), "eager": (10, 6)}
"""Bytes of a logit that are kept, and that its gradient takes besides. Fused: in fp32 (Korthikanti et al., section
4.3: 4 s b v), overwritten by the gradient. Eager: 2 of the product, 4 of its copy in fp32 and 4 of log-softmax; a
gradient in fp32, and its copy in 16 bits."""
GATHERED_LAYERS = 2
"""Layers whose weights ZeRO-3 has whole at a time: the one in use, and the next."""


@dataclass(frozen=True)
class RankMemory:
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

    ranks: tuple[RankMemory, ...]

    @property
    def peak_rank(self) -> int:
        """Return the pipeline rank whose chips hold the most bytes."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].total)

    @property
    def peak(self) -> RankMemory:
        """Return the memory of that rank."""
        return self.ranks[self.peak_rank]

    @property
    def total(self) -> int:
        """Return the bytes on a chip of that rank."""
        return self.peak.total


def layer_parameters(problem: StepProblem, parallelism: Parallelism) -> int:
    """Return the weights of a layer on one rank of its tensor-parallel group."""
    known = problem.cache("weights")
    if not known:
        layers = problem.model.fc_layers()
        known[""] = sum(layer.in_features * layer.out_features for layer in layers)
    return -(-int(known[""]) // parallelism.tensor_size)


def table_parameters(problem: StepProblem, parallelism: Parallelism) -> int:
    """Return the weights of an embedding table on one rank of its tensor-parallel group."""
    return -(-(problem.model.vocab_size or 0) * problem.model.hidden // parallelism.tensor_size)


def rank_of_head(parallelism: Parallelism) -> int:
    """Return the pipeline rank that has the last stage."""
    p = parallelism
    return ranks_of_stages(p.schedule, p.pipeline, p.virtual_stages)[-1]


def rank_parameters(problem: StepProblem, parallelism: Parallelism, layers: Sequence[int]) -> list[int]:
    """Return the weights on a chip of each pipeline rank, with those of embedding and head at the ends."""
    of_layer = layer_parameters(problem, parallelism)
    counts = [count * of_layer for count in layers]
    table = table_parameters(problem, parallelism)
    counts[0] += table
    head = rank_of_head(parallelism)
    if head or not problem.model.tied_embeddings:
        counts[head] += table
    return counts


def _num_parts(problem: StepProblem, parallelism: Parallelism) -> Callable[[str], int]:
    """Return a function from a tensor's name in `AxisRole` to the number of ranks that it is divided over."""
    roles: tuple[AxisRole, ...] = strategy_of(problem, parallelism).roles[-2:]

    def num_parts(tensor: str) -> int:
        sizes = zip(roles, parallelism.tensor_mesh, strict=True)
        return math.prod(size for role, size in sizes if getattr(role, tensor)) * parallelism.context

    return num_parts


def layer_activations(problem: StepProblem, parallelism: Parallelism, recompute: str) -> int:
    """Return the bytes that one micro-batch keeps of a layer on each rank."""
    model, e = problem.model, problem.item_bytes
    tokens = parallelism.micro_batch * problem.seq
    num_parts = _num_parts(problem, parallelism)
    h, f = model.hidden, model.ffn_hidden
    if recompute == "full":
        return -(-e * tokens * h // num_parts("residual"))
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    keeps = any(role.keeps_gathered for role in strategy_of(problem, parallelism).roles[-2:])
    masks = 2 if problem.has_dropout else 0
    total = -(-tokens * h * (2 * e + masks) // num_parts("residual"))
    total += -(-tokens * h * 2 * e // num_parts("operand_in" if keeps else "residual"))
    total += -(-tokens * e * (2 * queries + 2 * keys) // num_parts("attention"))
    total += -(-tokens * e * f * (4 if model.gated_ffn else 2) // num_parts("feed_forward"))
    if problem.attention == "flash":
        return total - (-4 * tokens * model.num_heads // num_parts("attention"))
    if recompute == "none":
        scores = 2 * e + (1 if problem.has_dropout else 0) if problem.has_dropout else e
        total += -(-tokens * model.num_heads * problem.seq * scores // num_parts("attention"))
    return total


def boundary_bytes(problem: StepProblem, parallelism: Parallelism) -> int:
    """Return the bytes of the residual of a micro-batch on one rank: what goes on to the next stage."""
    elements = parallelism.micro_batch * problem.seq * problem.model.hidden
    return -(-problem.item_bytes * elements // _num_parts(problem, parallelism)("residual"))


def residual_is_whole(problem: StepProblem, parallelism: Parallelism) -> bool:
    """Return whether every tensor-parallel rank has the residual of all tokens that the group works on."""
    return _num_parts(problem, parallelism)("residual") == parallelism.context


def logit_elements(problem: StepProblem, parallelism: Parallelism) -> int:
    """Return the logits of a micro-batch on one rank."""
    tokens = parallelism.micro_batch * problem.seq
    return -(-tokens * (problem.model.vocab_size or 0) // (parallelism.tensor_size * parallelism.context))


def pipeline_memory(
    problem: StepProblem,
    parallelism: Parallelism,
    layers: Sequence[int],
    stashes: tuple[int, ...],
    ranks: Sequence[int] | None = None,
) -> Memory:
    """Return the bytes on a chip of each pipeline rank; `memory_of` computes the layers and stashes.

    Args:
        layers: the layers of each pipeline rank.
        stashes: for each rank the most micro-batches, over its stages, whose activations it keeps.
        ranks: the ranks to count; None for all.
    """
    counts = rank_parameters(problem, parallelism, layers)
    sizes = _micro_batch_bytes(problem, parallelism)
    counted = range(len(layers)) if ranks is None else ranks
    return Memory(
        tuple(
            _on_rank(problem, parallelism, sizes, rank, counts[rank], layers[rank], stashes[rank])
            for rank in counted
        )
    )


@dataclass(frozen=True)
class _MicroBatchBytes:
    """Bytes of one micro-batch on a rank.

    Attributes:
        layer: kept of a layer.
        again: kept besides while a layer is computed again.
        residual: of the residual.
        logits: of the logits that are kept.
        logit_gradients: of their gradient.
        working: of gradients and gathered operands inside the backward part of a layer.
    """

    layer: int
    again: int
    residual: int
    logits: int
    logit_gradients: int
    working: int


def _micro_batch_bytes(problem: StepProblem, parallelism: Parallelism) -> _MicroBatchBytes:
    known = problem.cache("bytes")
    p = parallelism
    key = p.strategy, p.tensor_mesh, p.context, p.micro_batch, p.recompute
    if key not in known:
        layer = layer_activations(problem, p, p.recompute)
        whole = layer_activations(problem, p, "none")
        again = {"none": 0, "selective": whole - layer, "full": whole}[p.recompute]
        logits, gradients = (each * logit_elements(problem, p) for each in LOGIT_BYTES[problem.loss])
        known[key] = _MicroBatchBytes(
            layer, again, boundary_bytes(problem, p), logits, gradients, _working_bytes(problem, p)
        )
    sizes: _MicroBatchBytes = known[key]
    return sizes


def _working_bytes(problem: StepProblem, parallelism: Parallelism) -> int:
    """Return the bytes of gradients of both sides of the activation, and of an operand that is gathered."""
    model, e, tokens = problem.model, problem.item_bytes, parallelism.micro_batch * problem.seq
    num_parts = _num_parts(problem, parallelism)
    inner = model.ffn_hidden * (3 if model.gated_ffn else 2)
    working = -(-tokens * e * inner // num_parts("feed_forward"))
    if num_parts("operand_in") < num_parts("residual"):
        working += -(-tokens * e * model.hidden // num_parts("operand_in"))
    return working


def _on_rank(
    problem: StepProblem,
    parallelism: Parallelism,
    sizes: _MicroBatchBytes,
    rank: int,
    parameters: int,
    layers: int,
    stashes: int,
) -> RankMemory:
    p, zero, shards = parallelism, parallelism.zero, parallelism.shards

    def states(num_bytes: int, from_level: int) -> int:
        return -(-parameters * num_bytes // (shards if zero >= from_level else 1))

    activations = -(-stashes * layers * sizes.layer // p.virtual_stages) + sizes.again
    buffers = sizes.working
    if rank == 0 and problem.has_dropout:
        activations += stashes * sizes.residual // (problem.item_bytes * p.virtual_stages)
    if rank == rank_of_head(p) and problem.model.vocab_size:
        in_flight = stashes // p.virtual_stages if p.schedule == "gpipe" else 1
        activations += in_flight * (2 * sizes.residual + sizes.logits)
        buffers = max(buffers, sizes.logit_gradients)
    if p.pipeline > 1:
        buffers += 2 * sizes.residual
    if shards > 1 and zero >= 2:
        whole = layer_parameters(problem, p)
        buffers += whole * problem.gradient_bytes
        buffers += GATHERED_LAYERS * whole * problem.item_bytes if zero == 3 else 0
    return RankMemory(
        states(problem.item_bytes, 3),
        states(problem.gradient_bytes, 2),
        states(problem.optimizer_bytes, 1),
        activations,
        buffers,
        round(problem.stack.fragmentation * (activations + buffers)),
    )
