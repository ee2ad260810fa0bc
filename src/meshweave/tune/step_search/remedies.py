"""What would make a step fit that does not: more chips, shorter sequences, more memory, each with numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from meshweave.algorithms.step import Parallelism, StepProblem, least_memory, memory_of
from meshweave.algorithms.step.space import MIN_CONTEXT_TOKENS, SpaceOptions
from meshweave.base.errors import MeshweaveError
from meshweave.base.units import format_bytes
from meshweave.tune.step_search.search import StepRanking

_MOST_TIMES = 64
"""The most chips that are tried, over those that there are."""


def remedies_text(ranking: StepRanking) -> str:
    """Return in words the bytes of states of a ranking's smallest configuration, and what would make it fit.

    States are weights, gradients and those of the optimizer. What would make it fit is more chips or shorter
    sequences, where one that was tried fits, or more memory a chip. Only powers of two times the chips, and
    sequences halved again and again, are tried, so that less may do. "" where `ranking.smallest` is None.
    """
    if ranking.smallest is None:
        return ""
    choice, size = ranking.smallest
    problem = ranking.space.problem
    peak = memory_of(problem, choice).peak
    states = peak.weights + peak.gradients + peak.optimizer
    parts = f"of which {format_bytes(states)} are weights, gradients and optimizer states"
    fitting = [
        f"{chips} chips ({format_bytes(num_bytes)} each)"
        for chips, num_bytes in (_with_more_chips(ranking, choice),)
        if chips
    ]
    fitting += [
        f"sequences of {sequence} tokens ({format_bytes(num_bytes)})"
        for sequence, num_bytes in (_with_shorter_sequences(ranking, choice),)
        if sequence
    ]
    whole = size / (1 - problem.reserve) if problem.reserve < 1 else size + problem.reserve
    fitting.append(f"{format_bytes(1.005 * whole)} a chip")  # not less, once rounded to three digits
    return f"{parts}; what would fit: {', or '.join(fitting)}"


def _bytes(problem: StepProblem, choice: Parallelism, limit: int) -> int | None:
    """Return the bytes of the fullest chip, or more than the limit; None for what cannot be laid out."""
    try:
        least = least_memory(problem, choice).total
        return least if least > limit else memory_of(problem, choice).total
    except MeshweaveError:
        return None


def _with_more_chips(ranking: StepRanking, choice: Parallelism) -> tuple[int, int]:
    """Return the least chips tried with which a configuration fits, and its bytes; 0 where none does."""
    problem, times = ranking.space.problem, 2
    while times <= _MOST_TIMES:
        chips = times * problem.cluster.num_chips
        try:
            larger = replace(problem, cluster=problem.cluster.with_chips(chips))
        except MeshweaveError:
            break
        sizes = (
            _bytes(larger, each, ranking.memory_bytes)
            for each in _spread(choice, times, ranking.space.options)
        )
        least = min((size for size in sizes if size is not None), default=None)
        if least is not None and least <= ranking.memory_bytes:
            return chips, least
        times *= 2
    return 0, 0


def _spread(choice: Parallelism, times: int, options: SpaceOptions) -> Iterator[Parallelism]:
    """Yield the configuration on so many times its chips, a power of two, over degrees that are not fixed."""
    powers = [2**power for power in range(times.bit_length())]
    for data, pipeline in product(powers, powers):
        tensor = times // (data * pipeline)
        if not tensor or (tensor > 1 and not isinstance(choice.tensor, int)):
            continue
        grown = {}
        for name, factor in (("data", data), ("pipeline", pipeline), ("tensor", tensor)):
            if factor > 1:
                grown[name] = factor * getattr(choice, name)
        if all(size in (getattr(options, name) or (size,)) for name, size in grown.items()):
            for zero in {choice.zero, max(options.zero)}:
                yield replace(choice, **grown, zero=zero)


def _with_shorter_sequences(ranking: StepRanking, choice: Parallelism) -> tuple[int, int]:
    """Return the longest of sequences halved again and again that fits, and its bytes; 0 where none does."""
    problem = ranking.space.problem
    sequence = problem.sequence // 2
    while sequence >= MIN_CONTEXT_TOKENS * choice.context:
        size = _bytes(replace(problem, sequence=sequence), choice, ranking.memory_bytes)
        if size is not None and size <= ranking.memory_bytes:
            return sequence, size
        sequence //= 2
    return 0, 0
