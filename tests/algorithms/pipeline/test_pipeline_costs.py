"""Stashes and times of schedules, as predicted and as simulated."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mixed_problem import mixed_meshes
from pipeline_problems import check

from meshweave.algorithms.pipeline import (
    ENTRIES,
    ActionKind,
    OneForwardOneBackward,
    PipelineAlgorithm,
    PipelineConfig,
    PipelineProblem,
    pipeline_program,
)
from meshweave.algorithms.pipeline.action_times import ActionTimes
from meshweave.algorithms.pipeline.delayed import DelayedWeights, delayed, least_delay
from meshweave.algorithms.pipeline.eager import num_eager
from meshweave.algorithms.pipeline.examples import chain_of_ranks
from meshweave.algorithms.pipeline.timing import step_ticks, times_on
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import load_cluster
from meshweave.ir.analysis.lifetimes import peak_bytes, peak_stash_bytes
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program.ops import Send
from meshweave.simulate import simulate
from sampling import examples

F, B, I, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD  # noqa: E741

# --- memory ----------------------------------------------------------------------------------------------------


def test_stashes_of_1f1b_eager_and_gpipe_are_as_many_as_published() -> None:
    problem = chain_of_ranks(range(4), 12)
    by_name = {entry.name: entry for entry in ENTRIES}
    for rank in range(4):
        stashes = {
            name: peak_stash_bytes(by_name[name].program(problem, PipelineConfig()), rank) // 8
            for name in ("gpipe", "1f1b", "eager-1f1b")
        }
        assert stashes == {"gpipe": 12, "1f1b": 4 - rank, "eager-1f1b": num_eager(problem, rank)}


def test_parts_of_a_stash_are_freed_by_their_gradients() -> None:
    """Each input gradient turns 4 + 4 bytes into 4 + 4, of which the delayed weight gradient frees all."""
    problem = chain_of_ranks((0, 1), 6)
    stage = problem.stages[0]
    counted = {}
    for until_input, until_weight, from_input in [(4, 4, 4), (100, 4, 4), (4, 4, 100), (100, 0, 0)]:
        stash = replace(
            stage.stash,
            until_input_grad=until_input,
            until_weight_grad=until_weight,
            from_input_grad=from_input,
        )
        changed = replace(problem, stages=tuple(replace(each, stash=stash) for each in problem.stages))
        program = pipeline_program(changed, delayed(changed, 2))
        counted[until_input, until_weight, from_input] = peak_stash_bytes(program, 1)
    # the last stage: F0 I0 F1 I1 F2 I2 W0 ..., so at F2 two stashes are halfway, and at I2 three
    assert counted == {
        (4, 4, 4): 24,
        (100, 4, 4): 104 + 2 * 8,
        (4, 4, 100): 3 * 104,
        (100, 0, 0): 100,
    }


def test_a_recomputed_stash_is_there_for_one_micro_batch() -> None:
    kept, whole = (
        peak_stash_bytes(ENTRIES[1].program(chain_of_ranks((0, 1), 6, recomputes=again), PipelineConfig()), 0)
        for again in ((0,), ())
    )
    assert (kept, whole) == (6 * 4 + 4, 6 * 8)


def test_peak_bytes_counts_buffers_and_stashes() -> None:
    problem = chain_of_ranks((0, 1), 4)
    program = OneForwardOneBackward().program(problem, PipelineConfig())
    parameters, batch, slot = 2 * 4 * 4, 4 * 4, 2 * 4
    at_last_forward = slot + 2 * 8  # what it has sent is not needed any more
    assert peak_bytes(program, 0) == parameters + batch + at_last_forward


# --- time ------------------------------------------------------------------------------------------------------


def heavy(problem: PipelineProblem, width: int) -> PipelineProblem:
    """Return the problem with wide edges."""
    return replace(problem, edges=tuple(replace(edge, shape=(width,)) for edge in problem.edges))


def test_signals_keep_dependencies_and_cost_nothing() -> None:
    problem = heavy(chain_of_ranks(range(4), 8, work=(50_000,)), 4_000_000)
    cluster = load_cluster("dgx-h100:8")
    seconds = {}
    for transfers in ("overlapped", "blocking", "signals"):
        program = OneForwardOneBackward().program(problem, PipelineConfig(transfers))  # type: ignore[arg-type]
        validate(program)
        seconds[transfers] = simulate(program, Machine.of(cluster, program)).duration_s
        messages = [op for op in program.ops() if isinstance(op, Send)]
        if transfers == "signals":
            sizes = {
                program.view_bytes(bound.op.src) for bound in program.ops_on_rank(1) if bound.op in messages
            }
            assert sizes <= {1}
    assert seconds["signals"] < seconds["overlapped"] < seconds["blocking"]


def test_eager_forwards_and_delayed_weights_hide_more() -> None:
    problem = heavy(chain_of_ranks(range(4), 16, work=(50_000,)), 4_000_000)
    cluster = load_cluster("dgx-h100:8")
    seconds = []
    for name in ("1f1b", "eager-1f1b", "eager-1f1b-delayed"):
        entry = next(entry for entry in ENTRIES if entry.name == name)
        program = entry.program(problem, next(entry.candidates(problem, cluster)))
        seconds.append(simulate(program, Machine.of(cluster, program)).duration_s)
    assert seconds[0] > seconds[1] >= seconds[2]


@examples(20)
@given(st.integers(2, 5), st.integers(1, 12), st.integers(0, 3000))
def test_the_least_delay_is_the_first_that_covers(stages: int, count: int, transfer: int) -> None:
    problem = chain_of_ranks(range(stages), count)
    times = ActionTimes.uniform(stages, 1000, 1000, 1000, transfer)
    chosen = least_delay(problem, times)
    taken = [step_ticks(problem, delayed(problem, delay), times) for delay in range(stages + 1)]
    assert taken[chosen] <= min(taken) * 1.01
    free = ActionTimes.uniform(stages, 1000, 1000, 1000)
    bound = step_ticks(problem, delayed(problem, 0), free)
    assert all(one > 1.001 * bound for one in taken[:chosen]) or taken[chosen] == min(taken)


@pytest.mark.parametrize("width", [1_000_000, 100_000_000])
@pytest.mark.parametrize(
    "entry",
    [entry for entry in ENTRIES if entry.refusal(chain_of_ranks(range(4), 8)) is None],
    ids=lambda entry: entry.name,
)
def test_the_model_of_time_is_near_the_simulation(entry: PipelineAlgorithm, width: int) -> None:
    """Links are not shared here; the simulator also counts the filling of a transfer and latencies."""
    problem = heavy(chain_of_ranks(range(4), 8, work=(500_000,)), width)
    cluster = load_cluster("dgx-h100:8")
    program = entry.program(problem, PipelineConfig())
    simulated = simulate(program, Machine.of(cluster, program)).duration_s
    modelled = step_ticks(problem, entry.schedule(problem, PipelineConfig()), times_on(problem, cluster))
    assert modelled / 1e12 == pytest.approx(simulated, rel=0.02)


def test_reshards_are_planned_for_the_hosts_of_a_cluster() -> None:
    """Ranks 0 to 3 of one host send to ranks of the same host and of the next."""
    problem = mixed_meshes()
    cluster = load_cluster("p3.8xlarge").with_chips(12)
    for entry in (OneForwardOneBackward(), DelayedWeights()):
        config = next(entry.candidates(problem, cluster))
        assert config.network is not None
        assert config.network.host_of[:10] == (0, 0, 0, 0, 1, 1, 1, 1, 2, 2)
        check(entry, problem, config)
    assert next(ENTRIES[0].candidates(chain_of_ranks((0, 1), 2), cluster)).network is None


def test_candidates_of_delayed_weights_are_the_least_delay_and_its_neighbours() -> None:
    problem = heavy(chain_of_ranks(range(4), 16, work=(50_000,)), 4_000_000)
    cluster = load_cluster("dgx-h100:8")
    least = least_delay(problem, times_on(problem, cluster))
    delays = [config.delay for config in DelayedWeights().candidates(problem, cluster)]
    assert delays[0] == least and {least, least + 1} <= set(delays)
