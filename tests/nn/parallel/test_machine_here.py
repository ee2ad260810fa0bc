"""The machine at hand as a cluster: what is measured comes out again, and a choice plans with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from meshweave.algorithms.step import Parallelism, StepProblem, step_of
from meshweave.describe.model.transformer import Transformer
from meshweave.execute.ranks.launch import launch
from meshweave.nn.parallel.machine_here import (
    SUMMED_BYTES,
    MeasuredStep,
    TimedMove,
    measured_problem,
    step_here_s,
)
from sampling import examples

HERE = {"PYTHONPATH": str(Path(__file__).parent)}
MODEL = Transformer(
    name="a small model", num_layers=3, hidden=128, num_heads=4, num_kv_heads=2, head_dim=32, ffn_hidden=336,
    vocab_size=512, gated_ffn=True, source="a test",
)  # fmt: skip
SMALL, LARGE = SUMMED_BYTES


def _alone_s(problem: StepProblem, rows: int) -> float:
    cluster = problem.cluster
    alone = replace(cluster, network=replace(cluster.network, size=1))  # type: ignore[type-var]
    step = step_of(replace(problem, cluster=alone, batch=rows), Parallelism(micro_batch=rows))
    return step.time_s - step.optimizer_s


@examples(40, phases=[Phase.explicit, Phase.generate])
@given(
    rows=st.sampled_from([1, 2, 8]),
    first_s=st.floats(1e-3, 1.0),
    more=st.floats(1.05, 1.95),
    num_ranks=st.sampled_from([1, 2, 4]),
    ring_s=st.floats(1e-4, 1e-2),
    few=st.floats(0.2, 1.2),
    gradients_s=st.floats(1e-4, 1e-1),
    few_bytes=st.integers(0, 1 << 19).map(lambda half: 2 * half),
)
def test_estimates_are_what_was_measured(
    rows: int,
    first_s: float,
    more: float,
    num_ranks: int,
    ring_s: float,
    few: float,
    gradients_s: float,
    few_bytes: int,
) -> None:
    compute_s = {rows: first_s, 2 * rows: more * first_s}
    moved = 2 * (num_ranks - 1) * (LARGE - SMALL) / num_ranks
    byte_s = 2.5 * ring_s / (moved or 1)
    few_s = {min(num_ranks, 2): few * ring_s} | {num_ranks: ring_s}
    sums = {
        ranks: TimedMove(few_bytes, seconds + 2 * (ranks - 1) / ranks * few_bytes * byte_s)
        for ranks, seconds in few_s.items()
    }
    parts_s, part_bytes = few * ring_s, few_bytes / 2
    part_s = parts_s + (num_ranks - 1) / num_ranks * part_bytes * byte_s
    rings, gather = {SMALL: ring_s / 2, LARGE: 3 * ring_s}, TimedMove(int(part_bytes), part_s)
    measured = MeasuredStep(
        compute_s,
        first_s / 10,
        sums,
        rings,
        more * first_s + gradients_s,
        0.0,
        800_000,
        num_ranks,
        1.0,
        gather,
    )
    batch = 2 * rows * num_ranks
    problem = measured_problem(measured, MODEL, batch, 64, 4 << 30)
    assert problem.cluster.num_chips == num_ranks
    assert _alone_s(problem, 2 * rows) == pytest.approx(more * first_s, rel=0.02)
    if problem.cluster.chip.effective_flops_per_s < 1e15:  # else half the rows take less than they may
        assert _alone_s(problem, rows) == pytest.approx(first_s, rel=0.02)
    if num_ranks > 1:
        link = problem.cluster.network.axis(0)
        sums, gathers = link.comm("all_reduce"), link.comm("all_gather")
        taken = {ranks: sums.launch_s + (2 * ranks - 2) * sums.sync_s for ranks in (2, num_ranks)}
        assert taken[num_ranks] == pytest.approx(ring_s) and sums.sync_s > 0
        assert gathers.sync_s == 0
        assert gathers.launch_s == pytest.approx(max(parts_s, ring_s / 2))
        assert link.comm("send_recv").sync_s == pytest.approx(few_s[2] / 2)
        assert gathers.bytes_per_s == sums.bytes_per_s == link.link_bytes_per_s
        assert moved / link.link_bytes_per_s == pytest.approx(2.5 * ring_s)
        if sums.launch_s:
            assert taken[2] == pytest.approx(few * ring_s)
        else:
            assert num_ranks == 2 or not 0.34 < few < 0.99
        replicas = Parallelism(data=num_ranks, micro_batch=2 * rows)
        step, taken_s = step_of(problem, replicas), more * first_s + measured.optimizer_s + gradients_s
        assert step_here_s(problem, replicas, measured) == pytest.approx(taken_s)
        assert step_here_s(problem, replace(replicas, strategy="megatron"), measured) == pytest.approx(
            taken_s
        )
        sharded = replace(replicas, zero=1)
        assert step_here_s(problem, sharded, measured) == step_of(problem, sharded).time_s
        if problem.stack.overlap < 0.99:  # else sums are hidden as far as they can be
            assert step.time_s <= 1.01 * taken_s
        if problem.stack.overlap > 0.01:
            assert step.time_s >= 0.99 * taken_s


@pytest.mark.parametrize("micro_batch", [1, 2, 8])
def test_waits_cost_less_where_a_rank_gives_its_cores_to_others(micro_batch: int) -> None:
    measured = MeasuredStep(
        {4: 0.02, 8: 0.035}, 0.005, {2: TimedMove(1, 1e-3)}, {SMALL: 1e-3, LARGE: 4e-3}, 2e-3, 0.0, 800_000, 2
    )
    problem = measured_problem(measured, MODEL, 8, 64, 4 << 30)
    stages = Parallelism(pipeline=2, micro_batch=micro_batch)
    step = step_of(problem, stages)
    assert step.parts.bubble > 0
    times = [step_here_s(problem, stages, replace(measured, sharing=each)) for each in (1.0, 1.3, 2.0, 50.0)]
    assert times[0] == step.time_s
    assert times == sorted(times, reverse=True)
    assert times[1] < times[0]
    assert times[-1] == pytest.approx(step.time_s - step.parts.bubble)
    replicas = Parallelism(data=2, micro_batch=4)
    assert step_here_s(problem, replicas, replace(measured, sharing=2.0)) == step_of(problem, replicas).time_s


def test_what_ranks_compare_is_a_sum_of_its_own_where_they_share_layers() -> None:
    measured = MeasuredStep(
        {4: 0.02, 8: 0.035},
        0.005,
        {2: TimedMove(1, 1e-3)},
        {SMALL: 1e-3, LARGE: 4e-3},
        2e-3,
        3e-4,
        800_000,
        2,
    )
    problem = measured_problem(measured, MODEL, 8, 64, 4 << 30)
    for each in (Parallelism(tensor=2, micro_batch=4), Parallelism(data=2, micro_batch=4, zero=3)):
        seconds = step_here_s(problem, each, measured)
        assert seconds == pytest.approx(step_of(problem, each).time_s + 6e-4)
    replicas = Parallelism(data=2, micro_batch=4)
    assert step_here_s(problem, replicas, measured) == step_of(problem, replicas).time_s


def test_more_rows_that_take_no_longer_are_no_faster_than_their_launches() -> None:
    measured = MeasuredStep({4: 0.02}, 0.01, {}, {}, 1e-3, 0.0, 800_000, 1)
    assert measured_problem(measured, MODEL, 4, 64, 4 << 30).cluster.chip.launch_s == 0
    assert _alone_s(measured_problem(measured, MODEL, 4, 64, 4 << 30), 4) == pytest.approx(0.02, rel=0.03)
    steep = replace(measured, compute_s={2: 0.01, 4: 0.03})
    assert measured_problem(steep, MODEL, 4, 64, 4 << 30).cluster.chip.launch_s == 0


@pytest.mark.gloo
def test_four_ranks_measure_groups_of_two_sizes_and_leave_the_generator() -> None:
    for answer in launch("trial_rank_functions:measured_alone", 4, {}, timeout_s=100, env=HERE):
        measured, drawn, expected = answer
        assert list(measured["sums"]) == ["2", "4"] and list(measured["ring_s"]) == list(
            map(str, SUMMED_BYTES)
        )
        assert [num_bytes for num_bytes, _ in measured["sums"].values()] == [2 * 8 * 32 * 4, 4 * 8 * 32 * 4]
        moved = (*measured["sums"].values(), measured["gather"])
        assert all(seconds > 0 for seconds in (*measured["ring_s"].values(), *(each[1] for each in moved)))
        assert drawn == expected


@pytest.mark.gloo
def test_a_choice_plans_with_what_it_measures() -> None:
    for answer in launch("trial_rank_functions:choose_unaided", 2, {}, timeout_s=200, env=HERE):
        words, kinds, predicted, measured = zip(*answer["rows"], strict=True)
        assert words[:2] == ("data_parallel", "zero3")
        assert kinds[2:] and set(kinds[2:]) == {"tensor"}
        assert all(seconds > 0 for seconds in (*predicted, *measured))
        assert answer["others"] == [["data_parallel", None], ["zero3", None]]
        assert any("fp32" in line for line in answer["log"])


@pytest.mark.gloo
def test_a_model_that_one_rank_refuses_is_planned_by_none() -> None:
    assert launch("trial_rank_functions:plan_unlike", 2, {}, timeout_s=50, env=HERE) == [[0, 0], [0, 0]]
