"""The memory of a step: what its program holds, or what the closed forms say of a stack that does not run it.

There is one definition for a stack that runs programs, as the library's own runtime does: the bytes of the program
(`program_memory`), and besides optimizer states, what the allocator cannot use, context and communicators. For the
stack of another framework, and where no program is written, it is `framework_memory`.

A search of many configurations asks first for `least_memory`, which is cheap: states, and what layers keep for
their backward part. It is no more than `memory_of`, by which configurations are checked before they are shown.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import lru_cache

from meshweave.algorithms.step.checks import check_step
from meshweave.algorithms.step.framework_memory import ActivationRule, framework_memory, least_held
from meshweave.algorithms.step.memory import Memory, RankMemory, rank_kinds, rank_of_head
from meshweave.algorithms.step.pipeline import num_stashes
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.algorithms.step.program_memory import HeldBytes, held_bytes
from meshweave.algorithms.step.stage_layers import layer_costs, rank_layers
from meshweave.algorithms.step.stages import Stages, stages_of
from meshweave.base.errors import UnsupportedError


def memory_of(
    problem: StepProblem, parallelism: Parallelism, recompute: ActivationRule | None = None
) -> Memory:
    """Return the bytes on a chip of each pipeline rank at its peak in a training step.

    Args:
        recompute: what the forward part keeps and what is computed again; None for the rule of `parallelism`. With
            a rule given, memory is counted in closed form, even where the stack runs programs.

    Raises:
        LayoutError: the degrees do not fit the chips, the batch, the model or the schedule.
        UnsupportedError: a strategy or schedule is unknown.
    """
    check_step(problem, parallelism)
    if problem.stack.runs_programs and recompute is None:
        return memory_of_stages(stages_of(problem, parallelism))
    return framework_memory(problem, parallelism, *_on_ranks(problem, parallelism), recompute=recompute)


def memory_of_stages(stages: Stages) -> Memory:
    """Return the bytes on a chip of each pipeline rank at its peak, as `memory_of`; the problem caches them."""
    problem, p = stages.problem, stages.parallelism
    return problem.once("memory", p, lambda: _memory_of(stages))


def _memory_of(stages: Stages) -> Memory:
    problem, p = stages.problem, stages.parallelism
    by_forms = framework_memory(problem, p, *_on_ranks(problem, p))
    if not problem.stack.runs_programs:
        return by_forms
    written = _as_written(problem)
    try:
        held = held_bytes(stages if problem.recipe is None else stages_of(written, p))
    except UnsupportedError:
        return by_forms
    of_written = framework_memory(written, p, *_on_ranks(written, p)).ranks
    rows = zip(by_forms.ranks, of_written, held, strict=True)
    return Memory(tuple(_holding(form, plain, of, problem.stack.fragmentation) for form, plain, of in rows))


def _as_written(problem: StepProblem) -> StepProblem:
    """Return the problem with what programs have: products in its dtype, flash attention, and a fused loss."""

    def written() -> StepProblem:
        plain = replace(problem, attention="flash", dropout=False, loss="fused", precision=None)
        return problem if plain == replace(problem, dropout=problem.has_dropout) else plain

    return problem.once("as written", "", written)


def _holding(form: RankMemory, plain: RankMemory, held: HeldBytes, fragmentation: float) -> RankMemory:
    """Return the memory of a rank with states and what is outside of the program by closed forms.

    What was asked for and no program has (scores, masks, losses in steps, low precision) is what two forms differ
    by: `form`, and `plain` without it.
    """
    moving = max(held.total - plain.weights - plain.gradients, 0)
    between = min(max(held.between, 0), moving)
    kept = max(between + form.activations - plain.activations, 0)
    buffers = max(moving - between + form.buffers - plain.buffers, 0)
    holes = round(fragmentation * (kept + buffers))
    return replace(form, activations=kept, buffers=buffers, fragmentation=holes)


def least_memory(problem: StepProblem, parallelism: Parallelism) -> RankMemory:
    """Return a lower bound of the bytes on a chip of the fullest pipeline rank, much cheaper than `memory_of`.

    For a stack that does not run programs it is the peak of `memory_of` itself.

    Raises:
        LayoutError: the degrees do not fit the chips, the batch, the model or the schedule.
        UnsupportedError: a strategy or schedule is unknown.
    """
    check_step(problem, parallelism)
    layers, stashes = _on_ranks(problem, parallelism)
    alike = tuple(rank_kinds(problem, parallelism)) or layers
    ranks = sorted({0, rank_of_head(parallelism), *_fullest_ranks(alike, stashes)})
    count = least_held if problem.stack.runs_programs else framework_memory
    return count(problem, parallelism, layers, stashes, ranks).peak


@lru_cache(maxsize=4096)
def _fullest_ranks(layers: tuple[Hashable, ...], stashes: tuple[int, ...]) -> tuple[int, ...]:
    """Return of the ranks with as many layers of each kind one that keeps the most: nothing else differs there.

    The ends of the model count apart. `layers` says how many layers each rank has, or how many of each kind.
    """
    kept = {(count, stash): rank for rank, (count, stash) in enumerate(zip(layers, stashes, strict=True))}
    most: dict[Hashable, int] = {}
    for count, stash in kept:
        most[count] = max(most.get(count, 0), stash)
    return tuple(kept[pair] for pair in most.items())


def _on_ranks(problem: StepProblem, parallelism: Parallelism) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return for each pipeline rank its layers, and the most micro-batches whose activations it keeps."""
    p = parallelism
    count = problem.batch // (p.data * p.micro_batch)
    numbers = p.schedule, p.pipeline, p.virtual_stages
    layers = rank_layers(problem.model.num_layers, *numbers, layer_costs(problem))
    return layers, num_stashes(p.schedule, p.pipeline, p.virtual_stages, count)
