"""Times of pipelines by kept graphs, slots and closed forms: those of the actions themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.algorithms.pipeline.action_times import ActionTimes, peak_stashes, time_schedule
from meshweave.algorithms.pipeline.by_name import ScheduleRequest, schedule_by_name
from meshweave.algorithms.pipeline.one_f_one_b import ends_of_1f1b
from meshweave.algorithms.step.pipeline import (
    least_makespan_ps,
    num_stashes,
    ranks_of_stages,
    schedule_of,
    time_pipeline,
)
from meshweave.base.units import to_s
from sampling import examples

SCHEDULES = [
    ("1f1b", 1), ("gpipe", 1), ("gpipe", 2), ("interleaved-1f1b", 2), ("interleaved-1f1b", 3), ("zb-h1", 1),
    ("zbv", 2), ("zb-1p", 1), ("dualpipev", 2),
]  # fmt: skip


def draw_times(data: st.DataObject, stages: int, most: int = 60) -> ActionTimes:
    """Return times of stages and transfers."""
    lists = [st.lists(st.integers(0, most), min_size=stages, max_size=stages)] * 3
    forward, inputs, weights = (tuple(data.draw(each)) for each in lists)
    edges = st.lists(st.integers(0, 20), min_size=stages - 1, max_size=stages - 1)
    earliest = data.draw(st.sampled_from([(), (7,) * stages, tuple(range(0, 13 * stages, 13))]))
    return ActionTimes(forward, inputs, weights, tuple(data.draw(edges)), earliest=earliest)


@pytest.mark.parametrize(("name", "per_rank"), SCHEDULES)
@examples(20)
@given(data=st.data())
def test_the_time_is_that_of_the_actions(name: str, per_rank: int, data: st.DataObject) -> None:
    ranks, count = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 3))
    micro_batches = 2 * ranks * count if name == "dualpipev" else ranks * count
    times = draw_times(data, ranks * per_rank)
    timed = time_schedule(schedule_of(name, ranks, per_rank, micro_batches, times), times)
    ours = time_pipeline(name, ranks, per_rank, micro_batches, times)
    assert ours.makespan_ps == timed.duration
    assert ours.rank_ends_s == tuple(to_s(max(ends)) for ends in timed.ends)
    for stage, end in enumerate(ours.stage_ends_ps):
        rank = timed.schedule.stage_ranks[stage]
        own = (place for place, each in enumerate(timed.schedule.actions[rank]) if each.stage == stage)
        assert end == timed.ends[rank][max(own)]
    assert least_makespan_ps(name, ranks, per_rank, micro_batches, times) <= timed.duration


@examples(60)
@given(st.integers(1, 6), st.integers(1, 18), st.data())
def test_slots_are_1f1b(ranks: int, micro_batches: int, data: st.DataObject) -> None:
    times = draw_times(data, ranks)
    schedule = schedule_by_name("1f1b", ScheduleRequest(ranks, micro_batches, 1), times)
    timed = time_schedule(schedule, times)
    assert ends_of_1f1b(micro_batches, times) == tuple(max(ends) for ends in timed.ends)
    assert least_makespan_ps("1f1b", ranks, 1, micro_batches, times) <= timed.duration


@examples(20)
@given(st.integers(2, 4), st.integers(1, 3), st.integers(10, 14), st.data())
def test_rounds_that_are_counted_take_what_they_would_if_timed(
    ranks: int, per_rank: int, rounds: int, data: st.DataObject
) -> None:
    """Stages are equal but for the ends, as embedding and loss make them."""
    stages = ranks * per_rank
    forward, backward, more = (data.draw(st.integers(1000, 2000)) for _ in range(3))
    forwards = [forward + (stage == stages - 1) * more // 4 for stage in range(stages)]
    times = ActionTimes(
        tuple(forwards),
        (backward,) * stages,
        (backward,) * stages,
        (data.draw(st.integers(0, 300)),) * (stages - 1),
    )
    name, micro_batches = "1f1b" if per_rank == 1 else "interleaved-1f1b", ranks * rounds
    schedule = schedule_by_name(name, ScheduleRequest(stages, micro_batches, per_rank), times)
    exact = time_schedule(schedule, times).duration
    assert time_pipeline(name, ranks, per_rank, micro_batches, times).makespan_ps == pytest.approx(
        exact, rel=2e-3
    )


@examples(20)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 14), st.sampled_from(["1f1b", "gpipe", "zb-h1"]))
def test_stashes_are_those_of_the_schedule(ranks: int, per_rank: int, micro_batches: int, name: str) -> None:
    if name == "zb-h1":
        per_rank = 1
    full = "interleaved-1f1b" if name == "1f1b" and per_rank > 1 else name
    request = ScheduleRequest(ranks * per_rank, micro_batches, per_rank)
    schedule = schedule_by_name(full, request, ActionTimes.uniform(ranks * per_rank))
    assert num_stashes(name, ranks, per_rank, micro_batches) == peak_stashes(schedule)


@pytest.mark.parametrize(("name", "per_rank"), SCHEDULES)
def test_stages_are_where_the_schedule_has_them(name: str, per_rank: int) -> None:
    times = ActionTimes.uniform(3 * per_rank)
    schedule = schedule_by_name(name, ScheduleRequest(3 * per_rank, 12, per_rank), times)
    assert ranks_of_stages(name, 3, per_rank) == schedule.stage_ranks


def test_a_long_pipeline_is_in_proportion() -> None:
    """Of equal stages without transfers: M + P - 1 turns of forward and backward."""
    times = ActionTimes.uniform(64, 10, 9, 11)
    assert time_pipeline("1f1b", 64, 1, 2048, times).makespan_ps == (2048 + 63) * 30
    assert least_makespan_ps("1f1b", 64, 1, 2048, times) == (2048 + 63) * 30
