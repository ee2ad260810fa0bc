"""Loops of folded steps, slots of buffers, and transfers between actions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_problems import chains
from schedule_reader import read_schedule

from meshweave.algorithms.pipeline import (
    ENTRIES,
    Action,
    ActionKind,
    OneForwardOneBackward,
    PipelineConfig,
    PipelineProblem,
    Schedule,
    pipeline_program,
)
from meshweave.algorithms.pipeline.communication import communicating_steps
from meshweave.algorithms.pipeline.examples import chain_of_ranks
from meshweave.algorithms.pipeline.folding import Folded, StepLoop, fold
from meshweave.algorithms.pipeline.slots import slots_needed
from meshweave.algorithms.pipeline.timing import times_on
from meshweave.algorithms.table import algorithm
from meshweave.base.errors import LayoutError, ProgramError
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import load_cluster
from meshweave.ir.analysis.validate import validate
from meshweave.simulate import simulate
from sampling import examples

F, B, I, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD  # noqa: E741

# --- folding ---------------------------------------------------------------------------------------------------


def unfold(folded: Folded, advance: int = 0) -> list[tuple[int, int]]:
    """Return the steps of `fold`, `advance` added to each micro-batch."""
    steps: list[tuple[int, int]] = []
    for item in folded:
        if isinstance(item, StepLoop):
            for turn in range(item.count):
                steps += unfold(item.body, advance + turn * item.increment)
        else:
            template, micro_batch = item
            steps.append((template, micro_batch if micro_batch < 0 else micro_batch + advance))
    return steps


@examples(200)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(0, 2), st.integers(-1, 6)).map(lambda step: [step]),
            st.builds(
                lambda body, count, by: [(t, m + turn * by) for turn in range(count) for t, m in body],
                st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), min_size=1, max_size=4),
                st.integers(1, 5),
                st.integers(0, 3),
            ),
        ),
        max_size=6,
    )
)
def test_folded_steps_unfold(runs: list[list[tuple[int, int]]]) -> None:
    steps = [step for run in runs for step in run]
    assert unfold(fold(np.array(steps, np.int64).reshape(-1, 2))) == steps


def test_steady_states_become_loops() -> None:
    problem = chain_of_ranks(range(8), 200)
    schedule = OneForwardOneBackward().schedule(problem, PipelineConfig())
    for order in communicating_steps(schedule).of_rank:
        folded = fold(order)
        assert len(folded) < 40 and any(isinstance(item, StepLoop) and item.count > 150 for item in folded)


def test_the_program_grows_with_stages_not_with_micro_batches() -> None:
    sizes = [
        sum(
            1
            for _ in OneForwardOneBackward().program(chain_of_ranks(range(4), count), PipelineConfig()).ops()
        )
        for count in (64, 256)
    ]
    assert sizes[0] == sizes[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "eager-1f1b-delayed", "interleaved-1f1b"])
def test_64_stages_and_1024_micro_batches_are_written_proved_and_simulated(name: str) -> None:
    ranks = [stage % 32 for stage in range(64)] if name == "interleaved-1f1b" else range(64)
    problem = chain_of_ranks(ranks, 1024)
    program = algorithm(name).program(problem, PipelineConfig(delay=1))
    assert validate(program).skipped == ()
    machine = Machine.of(load_cluster("dgx-h100:64"), program)
    least_s = 3 * 1024 * times_on(problem, load_cluster("dgx-h100:64")).forward[0] / 1e12
    assert least_s < simulate(program, machine).duration_s < 2.2 * least_s


@examples(100)
@given(st.lists(st.tuples(st.integers(-1, 20), st.integers(0, 8)), min_size=1, max_size=12))
def test_slots_are_those_of_values_alive_together(spans: list[tuple[int, int]]) -> None:
    """No two values that are alive together share a slot, and the last two that need k slots do with k - 1."""
    first = np.array([begin for begin, _ in spans])
    last = first + np.array([length for _, length in spans])
    alive = [
        (a, b)
        for a in range(len(spans))
        for b in range(a, len(spans))
        if min(first[a], first[b]) >= 0 and first[a] <= last[b] and first[b] <= last[a]
    ]
    assert slots_needed(first, last) == max((b - a + 1 for a, b in alive), default=0)


# --- communication ---------------------------------------------------------------------------------------------


@examples(30)
@given(chains())
def test_every_transfer_is_sent_and_received_once(problem: PipelineProblem) -> None:
    entry = ENTRIES[1]
    schedule = entry.schedule(problem, PipelineConfig())
    pairs = [(edge.source, edge.target) for edge in problem.edges]
    full = communicating_steps(schedule, pairs).schedule(schedule)
    listed = [action for order in full.actions for action in order if action.kind.communicates]
    remote = sum(not problem.is_local(edge) for edge in problem.edges)
    assert len(set(listed)) == len(listed) == 4 * remote * problem.micro_batches
    without = tuple(tuple(a for a in order if not a.kind.communicates) for order in full.actions)
    assert replace(full, actions=without) == schedule
    program = pipeline_program(problem, full, "blocking")
    assert read_schedule(program, communication=True) == full


def test_a_schedule_that_cannot_go_on_is_refused() -> None:
    problem = chain_of_ranks((0, 1), 2)
    orders = ((Action(B, 0, 0), Action(F, 0, 0)), (Action(F, 1, 0), Action(B, 1, 0)))
    with pytest.raises(LayoutError, match="pipeline rank 0 waits at 0B0 for the forward of stage 0"):
        pipeline_program(problem, Schedule((0, 1), 2, orders))


def test_sends_that_face_each_other_deadlock_where_both_directions_share_a_lane() -> None:
    """Rank 0 sends its second activation while rank 1 sends its first gradient: each waits for the other."""
    problem = chain_of_ranks((0, 1), 2)

    def actions(text: str) -> tuple[Action, ...]:
        kinds = {"SF": ActionKind.SEND_FORWARD, "RF": ActionKind.RECV_FORWARD}
        kinds |= {"SB": ActionKind.SEND_BACKWARD, "RB": ActionKind.RECV_BACKWARD, "F": F, "B": B}
        return tuple(Action(kinds[name[1:-1]], int(name[0]), int(name[-1])) for name in text.split())

    orders = (
        actions("0F0 0SF0 0F1 0SF1 0RB0 0B0 0RB1 0B1"),
        actions("1RF0 1F0 1B0 1SB0 1RF1 1F1 1B1 1SB1"),
    )
    schedule = Schedule((0, 1), 2, orders)
    validate(pipeline_program(problem, schedule))
    for transfers in ("paired", "blocking"):
        with pytest.raises(ProgramError, match="deadlock"):
            validate(pipeline_program(problem, schedule, transfers))  # type: ignore[arg-type]
