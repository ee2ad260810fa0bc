"""Proofs that schedules end: against a dry run of every runtime, and on lists that hang on real machines."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_schedules import KIND, lazily, named_schedules, sound_schedules, times_of

from meshweave.algorithms.pipeline.action_graph import TransferRuntime
from meshweave.algorithms.pipeline.action_times import ActionTimes, time_schedule
from meshweave.algorithms.pipeline.actions import Action, Schedule
from meshweave.algorithms.pipeline.by_name import ScheduleRequest, schedule_by_name
from meshweave.algorithms.pipeline.progress import ScheduleDeadlock, prove_progress
from meshweave.algorithms.pipeline.torch_csv import schedule_from_csv
from meshweave.algorithms.pipeline.transfer_order import list_transfers
from meshweave.base.errors import LayoutError
from sampling import examples


def dry_run_ends(schedule: Schedule, runtime: TransferRuntime) -> bool:
    """Run one action after another, by the words of the rules, until nothing goes on. Quadratic."""
    orders, ranks = schedule.actions, schedule.stage_ranks
    done: set[tuple[int, int]] = set()
    place = {
        (leaf.kind, leaf.stage, leaf.micro_batch): (rank, index)
        for rank, order in enumerate(orders)
        for index, action in enumerate(order)
        for leaf in action.leaves
    }

    def other_end(action: Action) -> tuple[int, int]:
        kind, stage = {
            KIND.SEND_FORWARD: (KIND.RECV_FORWARD, action.stage + 1),
            KIND.RECV_FORWARD: (KIND.SEND_FORWARD, action.stage - 1),
            KIND.SEND_BACKWARD: (KIND.RECV_BACKWARD, action.stage - 1),
            KIND.RECV_BACKWARD: (KIND.SEND_BACKWARD, action.stage + 1),
        }[action.kind]
        return place[kind, stage, action.micro_batch]

    def is_issued(rank: int, index: int) -> bool:
        """Whether the runtime has come so far, and the queue of the pair of ranks too."""
        if any((rank, i) not in done for i, a in enumerate(orders[rank][:index]) if not a.kind.communicates):
            return False
        if runtime is TransferRuntime.BUFFERED:
            return True
        peer, first = other_end(orders[rank][index])[0], index
        if runtime is TransferRuntime.BATCHED:
            while first and is_with(rank, first - 1, peer):
                first -= 1
        return all((rank, i) in done for i in range(first) if is_with(rank, i, peer))

    def is_with(rank: int, index: int, peer: int) -> bool:
        action = orders[rank][index]
        return action.kind.communicates and other_end(action)[0] == peer

    def inputs(leaf: Action) -> list[tuple[int, int]]:
        stage, m = leaf.stage, leaf.micro_batch
        if leaf.kind is KIND.FORWARD and stage:
            near = ranks[stage - 1] == ranks[stage]
            return [place[(KIND.FORWARD, stage - 1, m) if near else (KIND.RECV_FORWARD, stage, m)]]
        if leaf.kind in (KIND.INPUT_GRAD, KIND.BACKWARD) and stage + 1 < schedule.num_stages:
            if ranks[stage + 1] != ranks[stage]:
                return [place[KIND.RECV_BACKWARD, stage, m]]
            whole = (KIND.BACKWARD, stage + 1, m)
            return [place[whole if whole in place else (KIND.INPUT_GRAD, stage + 1, m)]]
        return []

    def can_end(rank: int, index: int) -> bool:
        action = orders[rank][index]
        if not action.kind.communicates:
            earlier = all((rank, i) in done for i in range(index) if not orders[rank][i].kind.communicates)
            return earlier and all(at in done for leaf in action.leaves for at in inputs(leaf))
        if not is_issued(rank, index):
            return False
        sends = action.kind in (KIND.SEND_FORWARD, KIND.SEND_BACKWARD)
        if runtime is TransferRuntime.BUFFERED:
            return sends or other_end(action) in done
        return other_end(action) in done or is_issued(*other_end(action))

    places = [(rank, index) for rank, order in enumerate(orders) for index in range(len(order))]
    while True:
        fresh = [at for at in places if at not in done and can_end(*at)]
        if not fresh:
            return len(done) == len(places)
        done.update(fresh)


@examples(120)
@given(
    sound_schedules(),
    st.sampled_from(list(TransferRuntime)),
    st.integers(0, 12),
    st.randoms(use_true_random=False),
)
def test_the_proof_agrees_with_a_dry_run(
    schedule: Schedule, runtime: TransferRuntime, swaps: int, draw: random.Random
) -> None:
    """Neighbours swapped in an order that ends: it may still end, hang, or break a rule that a rank sees alone."""
    listed = list_transfers(schedule) if draw.random() < 0.5 else lazily(schedule)
    orders = [list(order) for order in listed.actions]
    for _ in range(swaps):
        order = draw.choice(orders)
        if len(order) > 1:
            at = draw.randrange(len(order) - 1)
            order[at], order[at + 1] = order[at + 1], order[at]
    mixed = replace(listed, actions=tuple(map(tuple, orders)))
    try:
        prove_progress(mixed, runtime)
    except ScheduleDeadlock as error:
        assert not dry_run_ends(mixed, runtime)
        assert len(set(error.cycle)) == len(error.cycle) and all(
            str(item) in str(error) for item in error.cycle
        )
    except LayoutError:
        pass
    else:
        assert dry_run_ends(mixed, runtime)


def test_swaps_give_each_outcome() -> None:
    """The property above sees schedules that end and schedules that hang."""
    interleaved = schedule_by_name("interleaved-1f1b", ScheduleRequest(4, 4, 2), ActionTimes.uniform(4))
    for runtime, ends in ((TransferRuntime.STRICT, False), (TransferRuntime.BUFFERED, True)):
        assert dry_run_ends(lazily(interleaved), runtime) is ends


@examples(60)
@given(sound_schedules(), st.data())
def test_listed_transfers_end_everywhere_and_keep_the_order(schedule: Schedule, data: st.DataObject) -> None:
    times = data.draw(times_of(schedule.num_stages))
    listed = list_transfers(schedule, times)
    computes = tuple(tuple(a for a in order if not a.kind.communicates) for order in listed.actions)
    assert computes == schedule.actions
    for runtime in TransferRuntime:
        prove_progress(listed, runtime)
    assert dry_run_ends(listed, TransferRuntime.STRICT)
    free = time_schedule(schedule, times).duration
    assert time_schedule(listed, times, TransferRuntime.BUFFERED).duration >= free


@pytest.mark.parametrize("name", ["1f1b", "eager-1f1b"])
@pytest.mark.parametrize("transfer", [1, 5, 10, 20])
def test_strict_queues_cost_nothing_where_receives_are_posted_in_time(name: str, transfer: int) -> None:
    """Times of transfers decide: without them receives are posted late (the second assertion)."""
    times = ActionTimes.uniform(4, 20, 21, 19, transfer)
    schedule = schedule_by_name(name, ScheduleRequest(4, 16), times)
    free = time_schedule(schedule, times).duration
    assert time_schedule(list_transfers(schedule, times), times).duration == free
    late = list_transfers(schedule, ActionTimes.uniform(4, 20, 21, 19, 0))
    assert time_schedule(late, times).duration >= free


def test_every_named_schedule_ends() -> None:
    for name, schedule in named_schedules((5,)):
        prove_progress(schedule)
        for runtime in TransferRuntime:
            prove_progress(list_transfers(schedule), runtime), name


def two_ranks_interleaved(*, receive_first_on_odd_ranks: bool) -> Schedule:
    schedule = schedule_by_name("interleaved-1f1b", ScheduleRequest(4, 4, 2), ActionTimes.uniform(4))
    return lazily(schedule, receive_first_on_odd_ranks=receive_first_on_odd_ranks)


def has_run(order: tuple[Action, ...], text: str) -> bool:
    """Whether actions stand next to each other in an order."""
    return f",{text}," in f",{','.join(map(str, order))},"


def test_first_hang_of_pytorch_172668() -> None:
    """Two ranks, four stages: both send first, and neither receives."""
    schedule = two_ranks_interleaved(receive_first_on_odd_ranks=False)
    assert has_run(schedule.actions[0], "0SEND_F1,2RECV_F0,2F0")
    assert has_run(schedule.actions[1], "1SEND_F0,1RECV_F1,1F1")
    with pytest.raises(ScheduleDeadlock, match="never ends") as caught:
        prove_progress(schedule)
    assert {item.text for item in caught.value.cycle} == {"0SEND_F1", "1RECV_F1", "1SEND_F0", "2RECV_F0"}
    words = str(caught.value)
    assert "0SEND_F1 (rank 0, action 4)" in words and "1SEND_F0 (rank 1, action 3), listed before it" in words
    prove_progress(schedule, TransferRuntime.BUFFERED)


def test_second_hang_of_pytorch_172668() -> None:
    """The same, with sends and receives swapped on the odd rank."""
    schedule = two_ranks_interleaved(receive_first_on_odd_ranks=True)
    assert has_run(schedule.actions[0], "2SEND_F1,0F2,0SEND_F2,2RECV_B0,2B0")
    assert has_run(schedule.actions[1], "3RECV_F1,3SEND_B0,3F1,3B1,1RECV_F2,3SEND_B1,1F2")
    with pytest.raises(ScheduleDeadlock, match="never ends") as caught:
        prove_progress(schedule)
    assert {"0SEND_F2", "1RECV_F2", "3SEND_B0", "2RECV_B0"} <= {item.text for item in caught.value.cycle}
    assert not dry_run_ends(schedule, TransferRuntime.STRICT)


WRONG = {
    "0F0,0B0\n1F0": "stage 1 has no input gradient (I or B) of micro-batch 0",
    "0F0,0B0,0B1\n1F0,1B0": "stage 0 has no forward (F) of micro-batch 1",
    "0F0,0F0,0B0\n1F0,1B0": "0F0 (rank 0, action 2) is listed twice, first as 0F0 (rank 0, action 1)",
    "0B0,0F0\n1F0,1B0": "0B0 (rank 0, action 1) does not come after 0F0 (rank 0, action 2)",
    "0F0,0W0,0I0\n1F0,1B0": "0W0 (rank 0, action 2) does not come after 0I0",
    "0F0,0I0\n1F0,1B0": "stage 0 has no weight gradient (W or B) of micro-batch 0",
    "0F0,0B0,0I0\n1F0,1B0": "a micro-batch has one backward on a stage",
    "0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0": "1RECV_F0 (rank 1, action 2) does not come before 1F0",
    "0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0": "0SEND_F0 (rank 0, action 1) does not come after 0F0",
    "0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0": "rank 0 lists no 0RECV_B0, and other transfers are listed",
    "0F0,0SEND_F0,0SEND_B0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0": "between stages -1 and 0, which pass nothing",
    "0F0,0SEND_F0,1F0,1B0,0B0": "between stages 0 and 1, which are both on rank 0; leave it out",
    "0F0,0REDUCE_GRAD,0B0": "0REDUCE_GRAD (rank 0, action 2) comes before 0B0",
    "0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD": "0REDUCE_GRAD (rank 0, action 4) is listed twice",
    "0F0,0UNSHARD,0B0": "0F0 (rank 0, action 1) computes with parameters that are not gathered; 0UNSHARD belongs",
    "0UNSHARD,0UNSHARD,0F0,0B0": "0UNSHARD (rank 0, action 2) is for parameters that are gathered already",
    "0UNSHARD,0F0,0B0,0RESHARD,0RESHARD": "0RESHARD (rank 0, action 5) is for parameters that are not gathered",
    "0UNSHARD,0F0,0RESHARD,0B0": "0B0 (rank 0, action 4) computes with parameters that are not gathered",
    "0F0,1B0": "stage 1 has no forward (F) of micro-batch 0",
    "0F0,0F1,0SEND_F1,0SEND_F0,0RECV_B0,0B0,0RECV_B1,0B1\n"
    "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1": "0SEND_F1 (rank 0, action 3) to rank 1 as message 1",
}


@pytest.mark.parametrize(("text", "words"), WRONG.items(), ids=WRONG)
def test_what_one_rank_gets_wrong_is_named(text: str, words: str) -> None:
    with pytest.raises(LayoutError) as caught:
        prove_progress(schedule_from_csv(text))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_orders_that_only_together_are_wrong_name_the_cycle() -> None:
    """Compute actions alone: rank 0 wants a backward that rank 1 puts after a forward that rank 0 has not run."""
    with pytest.raises(ScheduleDeadlock) as caught:
        prove_progress(schedule_from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"))
    assert {item.text for item in caught.value.cycle} == {"0B0", "0F1", "1F1", "1B0"}


def test_a_schedule_of_inference_needs_no_backward() -> None:
    prove_progress(schedule_from_csv("0F0,0F1\n1F0,1F1"))


def test_skip_connections_have_transfers_of_their_own() -> None:
    edges = ((0, 1), (1, 2), (0, 2))
    schedule = schedule_from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n2F0,2B0,2F1,2B1")
    listed = list_transfers(schedule, edges=edges)
    assert any(action.peer == 2 for action in listed.actions[0])
    for runtime in TransferRuntime:
        prove_progress(listed, runtime, edges)
    with pytest.raises(LayoutError, match="pass nothing on"):
        prove_progress(listed)


def test_a_micro_batch_with_a_huge_number_is_refused_at_once() -> None:
    with pytest.raises(LayoutError, match="stage 0 has no forward"):
        prove_progress(schedule_from_csv("0F999999999,0B999999999"))


@pytest.mark.slow
def test_a_large_schedule_is_proved() -> None:
    times = ActionTimes.uniform(64)
    schedule = schedule_by_name("1f1b", ScheduleRequest(64, 1024), times)
    prove_progress(list_transfers(schedule))
