"""Zero-bubble schedules: the bubbles that the papers give in closed form, and memory never over the limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_schedules import KIND, times_of

from meshweave.algorithms.pipeline import PipelineConfig, Stash
from meshweave.algorithms.pipeline.action_times import ActionTimes, peak_stashes, time_schedule
from meshweave.algorithms.pipeline.actions import Schedule
from meshweave.algorithms.pipeline.by_name import ScheduleRequest, schedule_by_name
from meshweave.algorithms.pipeline.dualpipe import dualpipe_v
from meshweave.algorithms.pipeline.examples import chain_of_ranks
from meshweave.algorithms.pipeline.progress import prove_progress
from meshweave.algorithms.pipeline.zb_auto import StashLimit, zb_auto
from meshweave.algorithms.pipeline.zb_h1 import zb_h1
from meshweave.algorithms.pipeline.zbv import zbv
from meshweave.algorithms.pipeline.zero_bubble import ZeroBubble1p, ZeroBubble2p
from meshweave.base.errors import LayoutError
from sampling import examples


def zb_1p(num_micro_batches: int, times: ActionTimes) -> Schedule:
    """Return the automatic schedule in the memory of 1F1B: as many whole stashes as ranks."""
    return zb_auto(num_micro_batches, times, StashLimit(len(times.forward)))


def zb_2p(num_micro_batches: int, times: ActionTimes) -> Schedule:
    """Return the automatic schedule in twice the memory of 1F1B, which can be without bubble."""
    return zb_auto(num_micro_batches, times, StashLimit(2 * len(times.forward)))


def largest_idle_span(schedule: object, times: ActionTimes) -> int:
    return time_schedule(schedule, times).largest_idle_span


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_bubbles_where_all_take_the_same_time(ranks: int) -> None:
    """Table 2 of Zero Bubble, F = B = W: 1F1B 3 (p - 1), ZB-H1 p - 1, ZB-2p and ZB-V none; memory p, p, 2 p."""
    count, times = 3 * ranks, ActionTimes.uniform(ranks)
    plain = schedule_by_name("1f1b", ScheduleRequest(ranks, count), times)
    assert largest_idle_span(plain, times) == 3 * (ranks - 1)
    assert largest_idle_span(zb_h1(ranks, count), times) == ranks - 1
    assert largest_idle_span(zb_1p(count, times), times) <= ranks - 1
    assert largest_idle_span(zb_2p(count, times), times) == 0
    assert largest_idle_span(zbv(ranks, count), ActionTimes.uniform(2 * ranks)) == 0
    assert max(peak_stashes(plain)) == max(peak_stashes(zb_h1(ranks, count))) == ranks
    assert max(peak_stashes(zb_1p(count, times))) <= ranks
    assert max(peak_stashes(zb_2p(count, times))) <= 2 * ranks
    assert max(peak_stashes(zbv(ranks, count))) == 2 * ranks, "of stages half as large: the memory of 1F1B"


@examples(60)
@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 9), st.data())
def test_zb_h1_has_the_bubble_of_its_formula(
    ranks: int, forward: int, input_grad: int, data: st.DataObject
) -> None:
    """(p - 1) (F + B - W), where a weight gradient takes no longer than the others."""
    weight_grad = data.draw(st.integers(1, min(forward, input_grad)))
    times = ActionTimes.uniform(ranks, forward, input_grad, weight_grad)
    expected = (ranks - 1) * (forward + input_grad - weight_grad)
    assert largest_idle_span(zb_h1(ranks, 3 * ranks), times) == expected


@examples(60)
@given(st.integers(1, 5), st.integers(1, 12), st.data())
def test_automatic_schedules_keep_the_limit_and_are_no_worse_than_zb_h1(
    ranks: int, count: int, data: st.DataObject
) -> None:
    times = data.draw(times_of(ranks, 1))
    whole = data.draw(st.integers(1, 6))
    rest = data.draw(st.integers(0, 8))
    stashes = StashLimit(data.draw(st.integers(max(whole, rest), 2 * ranks * whole + rest)), whole, rest)
    schedule = zb_auto(count, times, stashes)
    prove_progress(schedule)
    assert max(map(stashes.peak, schedule.actions)) <= stashes.limit
    classic = zb_h1(ranks, count)
    if max(map(stashes.peak, classic.actions)) <= stashes.limit:
        assert largest_idle_span(schedule, times) <= largest_idle_span(classic, times)


@examples(40)
@given(st.integers(1, 4), st.integers(1, 9), st.tuples(*[st.integers(0, 40)] * 3), st.integers(1, 2))
def test_entries_keep_the_bytes_of_their_stashes(
    ranks: int, count: int, sizes: tuple[int, int, int], factor: int
) -> None:
    problem, stash = chain_of_ranks(range(ranks), count, work=(1, 3, 2)), Stash(*sizes)
    problem = replace(problem, stages=tuple(replace(stage, stash=stash) for stage in problem.stages))
    whole, rest = stash.from_forward, stash.until_weight_grad + stash.from_input_grad
    limit = max(factor * ranks * whole, rest)
    schedule = (ZeroBubble1p, ZeroBubble2p)[factor - 1]().schedule(problem, PipelineConfig())
    prove_progress(schedule)
    if stash != Stash():
        peaks = map(StashLimit(max(limit, 1), whole, rest).peak, schedule.actions)
        assert max(peaks) <= limit


def test_stashes_that_input_gradients_free_hold_up_no_weight_gradient() -> None:
    problem = chain_of_ranks(range(4), 12)
    stash = Stash(until_input_grad=10)
    problem = replace(problem, stages=tuple(replace(stage, stash=stash) for stage in problem.stages))
    schedule = ZeroBubble1p().schedule(problem, PipelineConfig())
    assert min(peak_stashes(schedule)) > 4


def test_twice_the_memory_hides_what_once_cannot() -> None:
    """Where a weight gradient takes two thirds of a forward, little is left of the bubble with 2 p stashes."""
    count, work = 24, 24 * (29_718 + 29_444 + 19_927)
    times = ActionTimes.uniform(8, 29_718, 29_444, 19_927, 527)
    rates = []
    for factor in (1, 2):
        stashes = StashLimit(factor * 8 * 74, 74, 32)
        idle = largest_idle_span(zb_auto(count, times, stashes), times)
        rates.append(idle / (work + idle))
    assert rates[1] < 0.005 < 0.1 < rates[0] < 0.14


def test_many_micro_batches_take_the_best_choice_of_few() -> None:
    """Beyond what is compared, choices are made on fewer micro-batches: the limit and the order still hold."""
    times = ActionTimes.uniform(4, 5, 6, 4, 1)
    schedule = zb_2p(64, times)
    prove_progress(schedule)
    assert max(peak_stashes(schedule)) <= 8
    assert largest_idle_span(schedule, times) <= largest_idle_span(zb_2p(12, times), times)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (3, 2), (4, 3), (4, 9), (5, 4)], ids=str)
def test_few_micro_batches(sizes: tuple[int, int]) -> None:
    """Fewer micro-batches than ranks: complete, sound, and within memory."""
    ranks, count = sizes
    times = ActionTimes.uniform(ranks, 2, 3, 1, 1)
    for schedule in (zb_h1(ranks, count), zbv(ranks, count), zb_1p(count, times), zb_2p(count, times)):
        prove_progress(schedule)
        assert schedule.num_micro_batches == count


@pytest.mark.parametrize("sizes", [(1, 2), (2, 4), (3, 6), (4, 8), (4, 13)], ids=str)
def test_dualpipe_v_overlaps_and_ends(sizes: tuple[int, int]) -> None:
    ranks, count = sizes
    schedule = dualpipe_v(ranks, count)
    prove_progress(schedule)
    overlaps = sum(action.kind is KIND.OVERLAP for order in schedule.actions for action in order)
    assert overlaps >= ranks * (count - ranks)
    assert max(peak_stashes(schedule)) <= 2 * ranks + 1, "DualPipeV: memory of 2 p + 1 half stages"


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LayoutError, match="8 or more for 4 ranks, not 7"):
        dualpipe_v(4, 7)
    for stages, per_rank, words in (
        (0, 0, "at least one stage"),
        (4, -1, "4 stages are not a multiple of -1"),
    ):
        with pytest.raises(LayoutError, match=words):
            schedule_by_name("1f1b", ScheduleRequest(stages, 4, per_rank), ActionTimes.uniform(stages))
    with pytest.raises(LayoutError, match="holds not even one stash"):
        StashLimit(3, 4)
    for wrong in (lambda: zb_h1(0, 1), lambda: zbv(1, 0), lambda: zb_1p(0, ActionTimes.uniform(2))):
        with pytest.raises(LayoutError, match="one rank and one micro-batch or more"):
            wrong()
    with pytest.raises(LayoutError, match="3 stages have 2 edges, not 0"):
        zb_auto(1, ActionTimes((1,) * 3, (1,) * 3, (1,) * 3, ()), StashLimit(3))
    with pytest.raises(LayoutError, match="times of actions must not be negative"):
        ActionTimes.uniform(2, -1)


def test_parts_of_a_step_add_up() -> None:
    """Compute, exposed transfers and bubble of each rank are the step; transfers that are exposed are named."""
    times = ActionTimes.uniform(4, 10, 10, 10, 4)
    plain = schedule_by_name("1f1b", ScheduleRequest(4, 8), times)
    timed = time_schedule(plain, times)
    for rank in range(4):
        assert timed.busy(rank) + timed.exposed_on(rank) + timed.bubble(rank) == timed.duration
        assert timed.busy(rank) == 8 * 30
    first = timed.exposed[0]
    assert next(item for item in timed.exposed if item.rank == 1).transfer == "0SEND_F0"
    assert first.ticks == 4 and first.rank == 0
    eager = time_schedule(schedule_by_name("eager-1f1b", ScheduleRequest(4, 8), times), times)
    assert eager.duration < timed.duration
    assert sum(map(eager.exposed_on, range(4))) < sum(map(timed.exposed_on, range(4)))
