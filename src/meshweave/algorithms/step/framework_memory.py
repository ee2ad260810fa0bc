"""Count by closed forms what frameworks hold of activations and buffers on a chip, as published runs show it.

What a layer keeps for its backward part follows equation 1 and table 2 of Korthikanti et al. (MLSys '23), with
each tensor divided by the mesh axes along which the roles of the strategy split it (`algorithms.block.roles`). Per
token, of e bytes an element, h hidden, q and g features of queries and of keys, f inner features, a heads and s
tokens:

    inputs of two norms              2 e h            as the residual lies (8 h more where kept in fp32)
    operands of QKV and first FFN    2 e h            as the residual lies, or as they are multiplied if kept so
    masks of dropout                 2 h              as the residual lies, where there is dropout
    Q, K, V, result of attention     e (2 q + 2 g)    as attention lies
    scores and their dropout         a s (2 e + 1)    as attention lies; flash keeps 4 a of sums instead
    inner features                   2 e f, gated 4 e f (compiled 3 e f)

A pipeline rank keeps as many of these as micro-batches are in flight (`peak_stashes` of a schedule). Besides, it
holds what one of three moments needs, the largest: the loss and its gradient; the backward part of a layer, where
it is computed again; the gradient of the embedding, once the micro-batch is freed. Buffers are the tensors besides
activations that live then.

Where ZeRO shards gradients or weights, units are gathered and reduced one after the other: each layer, and each
table of embeddings or logits. PyTorch's FSDP (Zhao et al., VLDB '23) has one unit of all that is in no layer: it
stays gathered from the begin of the step to its end, and its gradients stay with it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from meshweave.algorithms.step.memory import (
    GATHERED_LAYERS,
    Memory,
    RankMemory,
    ShardedParameters,
    boundary_bytes,
    communicator_bytes,
    layer_parameters,
    num_parts_of,
    rank_kinds,
    rank_of_head,
    rank_parameters,
    state_bytes,
    table_parameters,
    tables_parameters,
)
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.algorithms.step.routing import expert_load
from meshweave.algorithms.step.strategies import strategy_of
from meshweave.describe.model.nodes import KeptKind

LOGIT_BYTES = {"fused": (4, 0, 0), "eager": (4, 8, 2), "sharded": (4, 6, 0)}
"""Bytes of a logit that are kept, that the loss and its gradient take besides, and that nothing fits into then.
Fused: in fp32 (Korthikanti et al., section 4.3: 4 s b v), overwritten by the gradient. Eager: log-softmax in fp32,
its gradient and that of its input; the place of the 16-bit product is free and too small for these. Sharded:
softmax, which becomes its own gradient; at the end of the forward part its input in fp32, and in 16 bits."""
ActivationRule = Literal["none", "selective", "full", "operators", "compiled-operators"]
"""What the forward part keeps: as `Parallelism.recompute` says, or the results of some operators. "operators" is
selective activation checkpointing of torchtitan (`selective_ac_option = "op"`): the input of a layer, the result
of attention, and every second product of Q, K, V, output, gate, up and down. A compiler drops the last of these,
which nothing needs."""


def layer_activations(problem: StepProblem, parallelism: Parallelism, recompute: ActivationRule) -> int:
    """Return the bytes of activations that a rank keeps of a layer (the first kind) and micro-batch for backward.

    `recompute` says what the forward part keeps and what is computed again.
    """
    kept = problem.once("kept", recompute, lambda: _kept(problem, recompute))
    tokens, num_parts = parallelism.micro_batch * problem.sequence, num_parts_of(parallelism)
    roles = strategy_of(parallelism).roles[-2:]
    keeps = problem.stack.keeps_gathered or any(role.keeps_gathered for role in roles)
    places = {"operand": "operand_in" if keeps else "residual"}
    total = 0
    for (place, part), each in kept.items():
        if place == "experts":
            total += _of_experts(problem, parallelism, tokens * each, not part) // num_parts("residual")
        else:
            total += -(-tokens * each // num_parts(places.get(place, place)))
    return total


def _of_experts(problem: StepProblem, parallelism: Parallelism, amount: int, is_whole: bool) -> int:
    """Return what the most loaded rank has of copies of tokens; `is_whole`: each rank of an expert has all."""
    load = expert_load(problem, parallelism)
    return math.ceil(amount * load * (parallelism.expert_tensor if is_whole else 1))


def _kept(problem: StepProblem, recompute: ActivationRule) -> Counter[tuple[str, str]]:
    """Return the bytes a token that a layer keeps, by place and by what ranks round up one by one."""
    layer, e = problem.model.layer, problem.item_bytes
    kept: Counter[tuple[str, str]] = Counter()
    kinds: set[KeptKind] = set()
    if recompute == "full":
        kept[layer.places[layer.input], ""] = e * layer.features[layer.input].size
    elif recompute in ("operators", "compiled-operators"):
        for edge, size, is_read in layer.selective_edges:
            if is_read or recompute == "operators":
                kept[layer.places[edge], ""] += e * size
        kinds = {"sums", "experts"}
    else:
        for edge in layer.kept_edges:
            kept[layer.places[edge], ""] += math.ceil(_edge_bytes(problem, edge) * layer.features[edge].size)
        kinds = _kept_kinds(problem, recompute)
    for row in layer.kept(kinds):
        joins = row.kind in ("mask", "gate", "copy") or recompute.endswith("operators")
        part = "" if joins else "scores" if row.by_keys else row.kind
        kept[layer.places[row.edge], part] += row.num_bytes(e, problem.sequence)
    return kept


def _edge_bytes(problem: StepProblem, edge: str) -> float:
    """Return the bytes of an element of an edge that is kept: by columns for a product's gradient of its weight.

    An edge whose other gradients need it, such as that of attention, is kept in 16 bits besides.
    """
    e, recipe = problem.item_bytes, problem.recipe
    if recipe is None or "wgrad" not in recipe.parts or "forward" not in recipe.parts:
        return e
    readers = [node for node in problem.model.layer.nodes if edge in node.reads_back]
    of_products = recipe.item_bytes if any(node.is_product for node in readers) else 0.0
    return of_products + (0 if all(node.is_product for node in readers) else e)


def _kept_kinds(problem: StepProblem, recompute: ActivationRule) -> set[KeptKind]:
    """Return what a layer keeps besides edges."""
    stack, is_narrow = problem.stack, problem.item_bytes < 4
    kinds: dict[KeptKind, bool] = {
        "mask": problem.has_dropout,
        "gate": not stack.recomputes_gate,
        "copy": stack.copies_norm_inputs and is_narrow,
        "joint": stack.keeps_joint_qkv,
        "sums": problem.attention_kind == "flash",
        "experts": True,
    }
    if problem.attention_kind != "flash" and recompute == "none":
        kinds |= {"scores": True, "dropped scores": problem.has_dropout, "score mask": problem.has_dropout}
    return {kind for kind, is_kept in kinds.items() if is_kept}


def logit_elements(problem: StepProblem, parallelism: Parallelism) -> int:
    """Return the number of logits (tokens x vocabulary) of a micro-batch on one rank, rounded up."""
    tokens = parallelism.micro_batch * problem.sequence
    return -(-tokens * (problem.model.vocab_size or 0) // (parallelism.tensor_size * parallelism.context))


def framework_memory(
    problem: StepProblem,
    parallelism: Parallelism,
    layers: Sequence[int],
    stashes: tuple[int, ...],
    ranks: Sequence[int] | None = None,
    recompute: ActivationRule | None = None,
) -> Memory:
    """Return the bytes on a chip of each pipeline rank, or of those in `ranks`, by closed forms, in order.

    Args:
        layers: the number of layers of each pipeline rank.
        stashes: for each pipeline rank the most (stage, micro-batch) pairs whose activations it keeps at once.
        ranks: the pipeline ranks to count; None for all.
        recompute: what the forward part keeps; None for what the parallelism says.
    """
    counts = rank_parameters(problem, parallelism, layers)
    rule, kinds = recompute or parallelism.recompute, rank_kinds(problem, parallelism)
    sizes = _micro_batch_bytes(problem, parallelism, rule) if not kinds else None
    counted = range(len(layers)) if ranks is None else ranks
    return Memory(
        tuple(
            _on_rank(
                problem,
                parallelism,
                sizes or _bytes_of_kinds(problem, parallelism, rule, kinds[rank]),
                rank,
                counts[rank],
                layers[rank],
                stashes[rank],
            )
            for rank in counted
        )
    )


_SURELY_KEPT = 0.93
"""The share of what closed forms keep of a layer that every program keeps: where a ring of attention takes turns,
or attention alone is computed again, the last ones keep some per cent less."""


def least_held(
    problem: StepProblem,
    parallelism: Parallelism,
    layers: Sequence[int],
    stashes: tuple[int, ...],
    ranks: Sequence[int],
) -> Memory:
    """Return a lower bound of the bytes that a step's program holds on a chip of each pipeline rank in `ranks`.

    It counts weights, their states, and what layers keep, but no scores, masks or second tensor of the gate.
    A backward part begins while the most micro-batches are kept; it adds the gradient of the residual, what one
    layer computes again, and under ZeRO-3 the weights of that layer.

    Args:
        layers: the number of layers of each pipeline rank of the step.
        stashes: for each of them the most (stage, micro-batch) pairs whose activations it keeps at once.
    """

    def without_copies() -> StepProblem:
        stack = replace(problem.stack, recomputes_gate=True, keeps_joint_qkv=False, copies_norm_inputs=False)
        return replace(problem, stack=stack, attention="flash", dropout=False)

    bare, p = problem.once("bare", "", without_copies), parallelism
    counts, kinds = rank_parameters(problem, p, layers), rank_kinds(problem, p)
    sizes = _micro_batch_bytes(bare, p, p.recompute)
    outside = problem.cluster.chip.driver.context_bytes, communicator_bytes(problem, p)
    rows = []
    for rank in ranks:
        layer = (_bytes_of_kinds(bare, p, p.recompute, kinds[rank]) if kinds else sizes).layer
        share = _SURELY_KEPT if p.context > 1 or p.recompute == "selective" else 1.0
        begins = 0 if kinds or not layers[rank] else sizes.residual
        if begins and p.recompute == "full":
            begins += max(sizes.again - sizes.layer, 0)
        if begins and p.zero == 3:
            whole = problem.item_bytes * layer_parameters(problem, p).total
            begins += whole - whole // p.shards
        kept = math.floor(share * (stashes[rank] * layers[rank] * layer / p.virtual_stages + begins))
        fragments = round(problem.stack.fragmentation * kept)
        rows.append(RankMemory(*state_bytes(problem, p, counts[rank]), kept, 0, fragments, *outside))
    return Memory(tuple(rows))


@dataclass(frozen=True)
class _MicroBatchBytes:
    """Bytes of one micro-batch on a rank.

    Attributes:
        layer: kept of a layer.
        again: kept besides while a layer is computed again.
        residual: of the residual.
        logits: of the logits that are kept.
        logit_gradients: of the loss and its gradient besides.
        logit_holes: that the allocator cannot use then.
        working: of gradients and gathered operands inside the backward part of a layer.
    """

    layer: int
    again: int
    residual: int
    logits: int
    logit_gradients: int
    logit_holes: int
    working: int


def _micro_batch_bytes(
    problem: StepProblem, parallelism: Parallelism, recompute: ActivationRule
) -> _MicroBatchBytes:
    p = parallelism

    def counted() -> _MicroBatchBytes:
        layer = layer_activations(problem, p, recompute)
        whole = layer_activations(problem, p, "none")
        again = 0 if recompute == "none" else whole if recompute == "full" else max(whole - layer, 0)
        kept, gradients, holes = (of * logit_elements(problem, p) for of in LOGIT_BYTES[problem.loss_kind])
        residual, working = boundary_bytes(problem, p), _working_bytes(problem, p)
        return _MicroBatchBytes(layer, again, residual, kept, gradients, holes, working)

    key = p.strategy, p.tensor_mesh, p.context, p.micro_batch, recompute, p.expert, p.expert_tensor
    return problem.once("bytes", key, counted)


def _bytes_of_kinds(
    problem: StepProblem, parallelism: Parallelism, recompute: ActivationRule, counts: tuple[float, ...]
) -> _MicroBatchBytes:
    """Return the bytes of a rank with so many layers of each kind: the mean of a layer, the most that works."""
    rows = [
        (count, _micro_batch_bytes(kind, parallelism, recompute))
        for count, (_, kind) in zip(counts, problem.kinds, strict=True)
        if count
    ]
    if not rows:
        return _micro_batch_bytes(problem, parallelism, recompute)
    mean = math.ceil(sum(count * each.layer for count, each in rows) / sum(counts))
    again, working = (max(getattr(each, name) for _, each in rows) for name in ("again", "working"))
    return replace(rows[0][1], layer=mean, again=again, working=working)


def _working_bytes(problem: StepProblem, parallelism: Parallelism) -> int:
    """Return the bytes of gradients of both sides of the activation, and of an operand that is gathered."""
    layer, e, tokens = problem.model.layer, problem.item_bytes, parallelism.micro_batch * problem.sequence
    num_parts = num_parts_of(parallelism)
    inner = sum(layer.features[edge].size for edge, place in layer.places.items() if place == "feed_forward")
    working = -(-tokens * e * inner // num_parts("feed_forward"))
    if layer.num_experts > 1:  # gradients of copies, before and after, and inside of experts
        inside = sum(row.elements for row in layer.kept({"experts"}))
        both = sum(layer.features[edge].size for edge, place in layer.places.items() if place == "experts")
        moved = tokens * e * (inside + both * parallelism.expert_tensor) * expert_load(problem, parallelism)
        working += math.ceil(moved / num_parts("residual"))
    if num_parts("operand_in") < num_parts("residual"):
        working += -(-tokens * e * problem.model.hidden // num_parts("operand_in"))
    return working


def _on_rank(
    problem: StepProblem,
    parallelism: Parallelism,
    sizes: _MicroBatchBytes,
    rank: int,
    parameters: ShardedParameters,
    layers: int,
    stashes: int,
) -> RankMemory:
    p = parallelism
    has_head = rank == rank_of_head(p) and bool(problem.model.vocab_size)
    micro_batch = -(-layers * sizes.layer // p.virtual_stages)
    kept = -(-stashes * layers * sizes.layer // p.virtual_stages)
    if rank == 0 and problem.has_dropout:
        kept += stashes * sizes.residual // (problem.item_bytes * p.virtual_stages)
    units = _unit_bytes(problem, p, rank)
    at_end = units.at_end
    if problem.stack.adds_gradients_late:
        at_end = max(at_end, parameters.total * problem.item_bytes)
    moments = [(kept - micro_batch, at_end, 0)] if at_end else []
    if has_head:
        in_flight = stashes // p.virtual_stages if p.schedule_entry.forwards_first else 1
        kept += in_flight * 2 * sizes.residual + (in_flight - 1) * sizes.logits
        moments.append((kept + sizes.logits, sizes.logit_gradients + units.at_loss, sizes.logit_holes))
    moments.append((kept + sizes.again, sizes.working + units.at_layer, 0))
    activations, buffers, holes = max(moments, key=sum)
    buffers += 2 * sizes.residual if p.pipeline > 1 else 0
    weights, gradients, optimizer = state_bytes(problem, p, parameters)
    weights += _cast_bytes(problem, p, parameters.total - tables_parameters(problem, p, rank))
    fragments = holes + round(problem.stack.fragmentation * (activations + buffers))
    outside = problem.cluster.chip.driver.context_bytes, communicator_bytes(problem, p)
    return RankMemory(weights, gradients, optimizer, activations, buffers, fragments, *outside)


def _cast_bytes(problem: StepProblem, parallelism: Parallelism, parameters: int) -> int:
    """Return the bytes that so many weights of layers take in low precision beyond those in `dtype`.

    Under ZeRO-3 only what is gathered is cast.
    """
    if problem.recipe is None or parallelism.zero == 3:
        return 0
    more = max(problem.recipe.weight_bytes - problem.item_bytes, 0.0)
    return round(more * parameters)


@dataclass(frozen=True)
class _UnitBytes:
    """Bytes of weights and gradients that are whole while ZeRO-2 or 3 gathers and reduces them unit by unit.

    Attributes:
        at_loss: when the gradient of the logits is computed.
        at_layer: in the backward part of a layer.
        at_end: when the gradient of the embedding is reduced.
    """

    at_loss: int = 0
    at_layer: int = 0
    at_end: int = 0


_NO_UNITS = _UnitBytes()


def _unit_bytes(problem: StepProblem, parallelism: Parallelism, rank: int) -> _UnitBytes:
    """Return what is whole of sharded units on a pipeline rank at each moment."""
    p = parallelism
    if p.zero < 2 or p.shards == 1:
        return _NO_UNITS
    head = rank_of_head(p)

    def counted() -> _UnitBytes:
        layer, table = layer_parameters(problem, p).total, table_parameters(problem, p)
        tables = table * (rank == 0), table * (rank == head)
        is_shared = all(tables) and problem.model.tied_embeddings
        return _units(problem, p.zero == 3, layer, *tables, table if is_shared else sum(tables))

    key = p.tensor_size, p.zero, rank == 0, rank == head, p.expert, p.expert_tensor
    return problem.once("units", key, counted)


def _units(
    problem: StepProblem, gathers: bool, layer: int, embedding: int, head: int, tables: int
) -> _UnitBytes:
    """Return what is whole at each moment, by the parameters of a layer, of each table on the rank, of both."""
    e, g, sharding = problem.item_bytes, problem.gradient_bytes, problem.stack.sharding
    weights = GATHERED_LAYERS * layer * e if gathers else 0
    if sharding == "zero":
        of_table = g + (e if gathers else 0)
        return _UnitBytes(
            weights + head * of_table, weights + layer * g, weights + embedding * of_table if embedding else 0
        )
    if gathers:
        weights += tables * e
        weights += max(tables, GATHERED_LAYERS * layer) * e if sharding == "fsdp2" else 0
    copies = layer * (g + (e if e < g else 0))
    at_end = weights + tables * (g + (e if e < g else 0)) if tables else 0
    return _UnitBytes(weights + head * e, weights + head * e + copies, at_end)
