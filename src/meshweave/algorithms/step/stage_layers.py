"""How many layers each stage of a pipeline has, and of which kinds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from meshweave.algorithms.step.pipeline import ranks_of_stages
from meshweave.algorithms.step.problem import StepProblem
from meshweave.algorithms.step.software_stack import SoftwareStack
from meshweave.describe.model import Transformer


@lru_cache(maxsize=4096)
def stage_layers(num_layers: int, num_stages: int, costs: tuple[int, int] | None = None) -> tuple[int, ...]:
    """Return the number of layers of each stage: equal, with one more on stages in the middle for a remainder.

    So embedding and loss lie on stages with fewer layers (Qi et al., Zero Bubble): 10 layers on 4 stages are
    (2, 3, 3, 2).

    Args:
        costs: (of a layer, of the head) to divide stages by instead: stage s of S ends with the layer at which
            the costs so far exceed (s + 1) / S of all, as in nanotron (`build_model`); None for evenly.
    """
    if costs is not None:
        return _layers_by_cost(num_layers, num_stages, *costs)
    each, more = divmod(num_layers, num_stages)
    begin = (num_stages - more) // 2
    return tuple(each + (begin <= stage < begin + more) for stage in range(num_stages))


def _layers_by_cost(num_layers: int, num_stages: int, layer: int, head: int) -> tuple[int, ...]:
    counts, stage, total = [0] * num_stages, 0, num_layers * layer + head
    for number in range(1, num_layers + 1):
        counts[stage] += 1
        stage += number * layer * num_stages > total * (stage + 1)
    return tuple(counts)


def stage_kinds(problem: StepProblem, layers: Sequence[int]) -> tuple[tuple[float, ...], ...]:
    """Return for each stage how many of its layers are of each of `problem.kinds`; () for a stage without layers.

    `layers` has the number of layers of each stage. The result is () where all layers of the model are of one
    kind, or their order is not known.
    """
    if len(problem.kinds) == 1 or not problem.model.layers:
        return ()
    key = tuple(layers)
    return problem.once(
        "kinds of stages", key, lambda: _kinds_of(order_of_kinds(problem), len(problem.kinds), key)
    )


def order_of_kinds(problem: StepProblem) -> tuple[int, ...]:
    """Return for each layer of the model, in order, its kind: an index into `problem.kinds`.

    () where the order is not known. It is cached, since graphs of layers are large to compare.
    """

    def order() -> tuple[int, ...]:
        kinds = [kind.model.layer for _, kind in problem.kinds]
        runs = [(count, kinds.index(graph)) for count, graph in problem.model.layers]
        return tuple(number for count, number in runs for _ in range(count))

    return problem.once("order of kinds", "", order)


def _kinds_of(order: tuple[int, ...], kinds: int, layers: tuple[int, ...]) -> tuple[tuple[float, ...], ...]:
    out: list[tuple[float, ...]] = []
    begin = 0
    for count in layers:
        own = order[begin : begin + count]
        out.append(tuple(float(own.count(number)) for number in range(kinds)) if own else ())
        begin += count
    return tuple(out)


def layer_costs(problem: StepProblem) -> tuple[int, int] | None:
    """Return the multiplications per token of (a layer, the head), by which layers are divided; None: evenly."""
    return model_costs(problem.model, problem.stack)


def model_costs(model: Transformer, stack: SoftwareStack) -> tuple[int, int] | None:
    """Return the multiplications per token of (a layer, the head), by which a stack divides layers among stages.

    None where the stack divides them evenly.
    """
    if not stack.layers_by_cost:
        return None
    counts = model.layer.counts
    products = 4 * counts["heads"] + (3 if model.gated_ffn else 2) * counts["ffn"]
    return products * model.hidden, (model.vocab_size or 0) * model.hidden


@lru_cache(maxsize=4096)
def rank_layers(
    num_layers: int,
    schedule: str,
    num_ranks: int,
    virtual_stages: int,
    costs: tuple[int, int] | None = None,
) -> tuple[int, ...]:
    """Return the number of layers of each pipeline rank of a schedule, over all its stages.

    Args:
        schedule: the schedule's name.
        num_ranks: the number of pipeline ranks.
        virtual_stages: stages per pipeline rank.
        costs: multiplications per token of (a layer, the head), by which stages are balanced; None: evenly.
    """
    counts = [0] * num_ranks
    layers = stage_layers(num_layers, num_ranks * virtual_stages, costs)
    for rank, count in zip(ranks_of_stages(schedule, num_ranks, virtual_stages), layers, strict=True):
        counts[rank] += count
    return tuple(counts)
