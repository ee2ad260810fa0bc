"""The memory of a configuration without its time: closed forms of how many micro-batches a pipeline keeps.

The most micro-batches, over the stages of rank r of p with v stages each, that m micro-batches leave in flight:

    GPipe               m v
    1F1B                min(m, p - r)                              (Narayanan et al., SC '21, section 2.2.1)
    interleaved 1F1B    min(m v, 2 (p - r - 1) + (v - 1) p + 1)    (its warm-up, in Megatron-LM's schedules.py)
    ZB-H1               min(m, p)                                  (Qi et al., Zero Bubble, section 2.3)
    ZB-V                2 p, for m of at least 2 p                 (ibid., section 6)

Other schedules are made, and counted. Ranks that have as many layers, keep as much and are no end are alike, so that
the first of them stands for all.
"""

from __future__ import annotations

from functools import lru_cache

from meshweave.algorithms.pipeline.action_times import ActionTimes, peak_stashes
from meshweave.algorithms.pipeline.by_name import ScheduleRequest, schedule_by_name
from meshweave.tune.step.compose import stage_layers
from meshweave.tune.step.memory import rank_memory, rank_parameters
from meshweave.tune.step.problem import Parallelism, StepProblem


def peak_bytes_of(problem: StepProblem, choice: Parallelism) -> int:
    """Return the bytes of the fullest chip: `step_of(problem, choice).memory.total`, without its time.

    Raises:
        LayoutError: the strategy does not fit, or the schedule does not take so many micro-batches.
    """
    count = problem.batch // (choice.data * choice.micro_batch)
    layers = rank_layers(choice.schedule, choice.pipeline, choice.virtual_stages, problem.model.num_layers)
    stashes = rank_stashes(choice.schedule, choice.pipeline, choice.virtual_stages, count)
    parameters = rank_parameters(problem, choice, list(layers))
    seen: set[tuple[int, int]] = set()
    peak, last = 0, choice.pipeline - 1
    for rank, (weights, of_rank, kept) in enumerate(zip(parameters, layers, stashes, strict=True)):
        if rank not in (0, last):
            if any(of_rank <= other and kept <= stash for other, stash in seen):
                continue
            seen.add((of_rank, kept))
        peak = max(peak, rank_memory(problem, choice, rank, weights, of_rank, kept).total)
    return peak


@lru_cache(maxsize=1024)
def rank_layers(schedule: str, pipeline: int, virtual: int, num_layers: int) -> tuple[int, ...]:
    """Return the layers of each pipeline rank: of stages in rounds, or there and back (ZB-V)."""
    stages = stage_layers(num_layers, pipeline * virtual)
    if schedule in ("zbv", "dualpipev"):
        return tuple(stages[rank] + stages[-1 - rank] for rank in range(pipeline))
    return tuple(sum(stages[rank::pipeline]) for rank in range(pipeline))


@lru_cache(maxsize=4096)
def rank_stashes(schedule: str, pipeline: int, virtual: int, micro_batches: int) -> tuple[int, ...]:
    """Return for each pipeline rank the most micro-batches, over its stages, that it keeps at once."""
    p, v, m = pipeline, virtual, micro_batches
    if p == 1:
        return (1,)
    if schedule == "gpipe":
        return (m * v,) * p
    if schedule == "1f1b" and v == 1:
        return tuple(min(m, p - rank) for rank in range(p))
    if schedule == "1f1b" and m % p == 0:
        return tuple(min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1) for rank in range(p))
    if schedule == "zb-h1":
        return (min(m, p),) * p
    if schedule == "zbv" and m >= 2 * p:
        return (2 * p,) * p
    name = "interleaved-1f1b" if schedule == "1f1b" else schedule
    return peak_stashes(schedule_by_name(name, ScheduleRequest(p * v, m, v), ActionTimes.uniform(p * v)))
