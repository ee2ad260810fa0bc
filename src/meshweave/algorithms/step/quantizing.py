"""What stands between the products of a layer and is no node of it: casts to low precision, and biases of experts.

Both are passes through memory. Each operand X of a product with weights, and each gradient of its result, is cast
once: read in 16 bits, written by rows and by columns as far as products read them (`precision`), and read before
where its greatest element is sought. Products are priced without the cast that is in their measured times
(`prepare_s`), which so counts once. Where ranks have parts of the residual's tokens, they cast before they gather.
A step casts the weights besides.

Experts add biases in passes of their own where a stack does not fuse them (`SoftwareStack.biased_experts`). Their
kernels are not counted: the host's seconds a kernel, fitted on runs with experts, stand for all that such a layer
issues.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from meshweave.algorithms.step.memory import ShardedParameters
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.algorithms.step.routing import expert_load
from meshweave.algorithms.step.strategies import strategy_of
from meshweave.describe.model.experts import Experts


class AddedPasses(NamedTuple):
    """Bytes that one rank reads and writes in memory per layer and micro-batch, and how many kernels move them."""

    num_bytes: float = 0.0
    kernels: int = 0


def added_passes(problem: StepProblem, parallelism: Parallelism, part: str) -> AddedPasses:
    """Return the passes that casts and biases of experts add to a layer's `part`, "forward" or "backward".

    The kernels are those of casts alone.
    """
    casts = quantizing(problem, parallelism, part)
    return casts._replace(num_bytes=casts.num_bytes + _bias_bytes(problem, parallelism, part))


def quantizing(problem: StepProblem, parallelism: Parallelism, part: str) -> AddedPasses:
    """Return the bytes and kernels that casts to low precision add to a layer's `part`, "forward" or "backward".

    They are those of one micro-batch on one rank; both are 0 without a recipe.
    """
    recipe = problem.recipe
    if recipe is None:
        return AddedPasses()
    is_forward, columns = part == "forward", int("wgrad" in recipe.parts)
    sizes = list(_sizes(problem, parallelism))
    casts: list[tuple[float, int]] = []  # elements a token, and how many times they are written
    if ("forward" in recipe.parts) == is_forward:
        rows = int(is_forward)
        casts += [(operand, rows + columns) for operand, _ in sizes]
    if not is_forward:
        casts += [(result, int("dgrad" in recipe.parts) + columns) for _, result in sizes]
    casts = [(elements, written) for elements, written in casts if written]
    reads = problem.item_bytes * (2 if recipe.finds_maximum else 1)
    tokens = parallelism.micro_batch * problem.sequence
    moved = sum(elements * (reads + written * recipe.item_bytes) for elements, written in casts)
    return AddedPasses(tokens * moved, len(casts) * (2 if recipe.finds_maximum else 1))


def _sizes(problem: StepProblem, parallelism: Parallelism) -> Iterator[tuple[float, float]]:
    """Yield the features of operand and result of each product with weights, as a rank casts them."""
    residual = inner = parallelism.context
    roles = strategy_of(parallelism).roles[-2:]
    for role, size in zip(roles, parallelism.tensor_mesh, strict=True):
        residual *= size if role.residual else 1
        inner *= size
    for node in problem.model.layer.linears:
        operand, result = node.operand.size, node.result.size
        yield (
            (operand / residual, result / inner)
            if node.reads_residual
            else (operand / inner, result / residual)
        )
    if not problem.stack.grouped_experts:
        yield from _expert_sizes(problem, parallelism)


def _expert_sizes(problem: StepProblem, parallelism: Parallelism) -> Iterator[tuple[float, float]]:
    """Yield the same of both products of the experts of a token; those of grouped kernels include their casts."""
    for node, hidden, inner in _expert_elements(problem, parallelism):
        yield hidden, node.columns * inner
        yield inner, hidden


def _expert_elements(
    problem: StepProblem, parallelism: Parallelism
) -> Iterator[tuple[Experts, float, float]]:
    """Yield (the node, hidden and inner features of all copies of a token on a rank) of each part of experts."""
    p = parallelism
    copies = expert_load(problem, p) / (p.context * p.tensor_size)
    for node in problem.model.layer.nodes:
        if isinstance(node, Experts):
            rows = node.chosen * copies
            yield node, rows * p.expert_tensor * node.hidden, rows * node.inner


def _bias_bytes(problem: StepProblem, parallelism: Parallelism, part: str) -> float:
    """Return the bytes that passes for biases of experts move, in one micro-batch on one rank."""
    passes = problem.stack.biased_experts[0 if part == "forward" else 1]
    elements = _expert_elements(problem, parallelism)
    moved = sum(
        passes.residual * hidden + passes.ffn * inner for node, hidden, inner in elements if node.biases
    )
    return parallelism.micro_batch * problem.sequence * moved


def cast_weight_bytes(problem: StepProblem, parallelism: Parallelism, parameters: ShardedParameters) -> int:
    """Return the bytes that a chip reads and writes to cast its weights once per step; 0 without a recipe.

    Weights that ZeRO gathers in low precision are cast as shards, others whole. `parameters` are the numbers of
    weights on a chip before ZeRO, without the tables of embedding and head, which are not cast.
    """
    recipe = problem.recipe
    if recipe is None:
        return 0
    is_sharded = recipe.gathered_bytes < problem.item_bytes
    own = parameters.kept(parallelism, 1) if is_sharded else parameters.total
    return round(own * (problem.item_bytes + 2 * recipe.item_bytes))
