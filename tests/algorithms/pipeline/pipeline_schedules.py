"""Schedules to test with: drawn at random, and transfers listed naively."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from meshweave.algorithms.pipeline.action_times import ActionTimes
from meshweave.algorithms.pipeline.actions import Action, ActionKind, Schedule, folded, looped
from meshweave.algorithms.pipeline.by_name import ScheduleRequest, schedule_by_name
from meshweave.algorithms.table import SCHEDULES
from meshweave.base.errors import LayoutError

KIND = ActionKind
LOOPED = ((1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (1, 3))
PLACEMENTS = (*(looped(*sizes) for sizes in LOOPED), folded(2), folded(3))
WHOLE = (KIND.FORWARD, KIND.BACKWARD)
SPLIT = (KIND.FORWARD, KIND.INPUT_GRAD, KIND.WEIGHT_GRAD)


@st.composite
def times_of(draw: st.DrawFn, num_stages: int, least: int = 0) -> ActionTimes:
    """Times of actions, most of them uneven, some transfers free."""

    def several(count: int, low: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(low, 9), min_size=count, max_size=count)))

    each = [several(num_stages, least) for _ in range(3)]
    return ActionTimes(*each, several(num_stages - 1, 0))


@st.composite
def sound_schedules(draw: st.DrawFn) -> Schedule:
    """Compute actions that end, of any order: a random walk through what can run next."""
    ranks = draw(st.sampled_from(PLACEMENTS))
    count, stages = draw(st.integers(1, 4)), len(ranks)
    splits = [[draw(st.booleans()) for _ in range(count)] for _ in range(stages)]
    orders: list[list[Action]] = [[] for _ in range(max(ranks) + 1)]
    done: set[tuple[KIND, int, int]] = set()
    waiting = [
        (kind, stage, m)
        for stage in range(stages)
        for m in range(count)
        for kind in (SPLIT if splits[stage][m] else WHOLE)
    ]

    def ready(kind: KIND, stage: int, m: int) -> bool:
        if kind is KIND.FORWARD:
            return stage == 0 or (kind, stage - 1, m) in done
        if kind is KIND.WEIGHT_GRAD:
            return (KIND.INPUT_GRAD, stage, m) in done
        after = {(KIND.INPUT_GRAD, stage + 1, m), (KIND.BACKWARD, stage + 1, m)}
        return (KIND.FORWARD, stage, m) in done and (stage + 1 == stages or bool(after & done))

    while waiting:
        choices = [item for item in waiting if ready(*item)]
        item = draw(st.sampled_from(choices))
        waiting.remove(item)
        done.add(item)
        orders[ranks[item[1]]].append(Action(*item))
    return Schedule(ranks, count, tuple(map(tuple, orders)))


def named_schedules(counts: tuple[int, ...] = (3, 8)) -> list[tuple[str, Schedule]]:
    """Every schedule by name, over several numbers of stages and micro-batches."""
    schedules = []
    for name in SCHEDULES:
        for stages in (1, 2, 4, 6):
            for count in counts:
                times = ActionTimes.uniform(stages, 3, 4, 2, 1)
                try:
                    schedule = schedule_by_name(name, ScheduleRequest(stages, count), times)
                except LayoutError:
                    continue
                schedules.append((f"{name}-{stages}-{count}", schedule))
    return schedules


def lazily(schedule: Schedule, *, receive_first_on_odd_ranks: bool = False) -> Schedule:
    """Transfers as one would list them: a send after what makes its value, a receive before what uses it.

    With `receive_first_on_odd_ranks` odd ranks swap a send with the receive that follows it.
    """
    ranks, last = schedule.stage_ranks, schedule.num_stages - 1
    orders = []
    for rank, order in enumerate(schedule.actions):
        listed: list[Action] = []
        for action in order:
            stage, m = action.stage, action.micro_batch
            forward = action.kind is KIND.FORWARD
            backward = action.kind in (KIND.BACKWARD, KIND.INPUT_GRAD)
            before, after = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
            if (forward or backward) and 0 <= before <= last and ranks[before] != rank:
                recv = Action(KIND.RECV_FORWARD if forward else KIND.RECV_BACKWARD, stage, m)
                swaps = receive_first_on_odd_ranks and rank % 2 and listed and listed[-1].kind.communicates
                listed.insert(len(listed) - bool(swaps), recv)
            listed.append(action)
            if (forward or backward) and 0 <= after <= last and ranks[after] != rank:
                listed.append(Action(KIND.SEND_FORWARD if forward else KIND.SEND_BACKWARD, stage, m))
        orders.append(tuple(listed))
    return replace(schedule, actions=tuple(orders))
