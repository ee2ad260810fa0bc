"""Pipelines of any shape, through the contract: sound, exact, and with the memory that is predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.algorithms.pipeline import (
    ENTRIES,
    Action,
    ActionKind,
    Edge,
    OneForwardOneBackward,
    PipelineAlgorithm,
    PipelineConfig,
    PipelineProblem,
    Schedule,
    pipeline_program,
    read_schedule,
)
from meshweave.algorithms.pipeline.communication import communicating_steps
from meshweave.algorithms.pipeline.delayed import DelayedWeights, delayed, least_delay
from meshweave.algorithms.pipeline.eager import num_eager
from meshweave.algorithms.pipeline.examples import chain_of_ranks, mixed_meshes, small_stage
from meshweave.algorithms.pipeline.folding import StepLoop, fold, unfold
from meshweave.algorithms.pipeline.functions import reference, stage_functions
from meshweave.algorithms.pipeline.slots import most_alive
from meshweave.algorithms.pipeline.timing import StepTimes, step_s
from meshweave.algorithms.table import algorithm
from meshweave.base.errors import LayoutError, ProgramError
from meshweave.cost.fabric import HostTopology
from meshweave.cost.machine import Machine
from meshweave.describe.layout import Replicate, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import load_cluster
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.lifetimes import lifetimes, peak_bytes, peak_stash_bytes
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Call, Send
from meshweave.ir.program.parse import parse
from meshweave.ir.program.text import to_text
from meshweave.simulate import simulate
from sampling import examples

F, B, I, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD  # noqa: E741


@st.composite
def chains(draw: st.DrawFn) -> PipelineProblem:
    """Return stages of one chip each: any number, any micro-batches, skips, uneven work, some recomputing."""
    count = draw(st.integers(1, 6))
    ranks = draw(st.sampled_from([tuple(range(count)), *_shared(count)]))
    pairs = [(a, b) for a in range(count) for b in range(a + 2, count)]
    return chain_of_ranks(
        ranks,
        draw(st.integers(1, 9)),
        draw(st.integers(1, 2)),
        work=draw(st.lists(st.integers(1, 4), min_size=1, max_size=count)),
        skips=draw(st.lists(st.sampled_from(pairs), unique=True, max_size=3)) if pairs else (),
        recomputes=draw(st.lists(st.integers(0, count - 1), unique=True)),
    )


def _shared(count: int) -> Iterator[tuple[int, ...]]:
    """Yield pipeline ranks of stages that share some: dealt out in turn, and down and back up."""
    if count % 2 == 0 and count > 2:
        yield tuple(number % (count // 2) for number in range(count))
        yield (*range(count // 2), *reversed(range(count // 2)))


FOLDED = ("zbv", "dualpipev")
"""Schedules of two stages a rank, down the ranks and back up."""


@st.composite
def folded_chains(draw: st.DrawFn) -> PipelineProblem:
    """Return stages down the ranks and back up, and micro-batches enough for each of these schedules."""
    ranks = draw(st.sampled_from([(0, 0), (0, 1, 1, 0), (0, 1, 2, 2, 1, 0)]))
    work = draw(st.lists(st.integers(1, 4), min_size=1, max_size=len(ranks)))
    return chain_of_ranks(ranks, draw(st.integers(len(ranks), 9)), draw(st.integers(1, 2)), work=work)


@st.composite
def meshes(draw: st.DrawFn) -> PipelineProblem:
    """Return stages with data and tensor degrees of their own, and a layout on either side of each edge."""
    count, rows, first = draw(st.integers(2, 3)), 4, 0
    stages = []
    for number in range(count):
        shape = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)]))
        mesh = Mesh.of(f"p{number}", shape, ("dp", "tp"), first)
        first += mesh.num_ranks
        sharded = shape[0] > 1 and draw(st.booleans())
        stages.append(small_stage(mesh, rows, data_axes=("dp",), is_sharded=sharded))
    sides = st.sampled_from([(), (Shard(0), Replicate()), (Shard(0), Shard(1)), (Shard(0), Shard(2))])
    edges = [
        Edge(source, target, (4, 2), draw(sides), draw(sides))
        for source, target in [
            *pairwise(range(count)),
            *([(0, 2)] if count == 3 and draw(st.booleans()) else []),
        ]
    ]
    return PipelineProblem(tuple(stages), tuple(edges), draw(st.integers(1, 4)), rows, (3,), (2,))


def check(entry: PipelineAlgorithm, problem: PipelineProblem, config: PipelineConfig) -> Program:
    """Prove a program, run it in two orders, and read its schedule back."""
    program, schedule = entry.program(problem, config), entry.schedule(problem, config)
    validation = validate(program)
    assert validation.skipped == ()
    assert all(agreement.is_certain for agreement in validation.replicas), validation.replicas_text
    assert read_schedule(program) == schedule
    inputs, functions = entry.random_inputs(problem), entry.functions(problem)
    for seed in (None, 1):
        result = run_numpy(program, inputs, seed=seed, calls=functions)
        expected = reference(problem, inputs)
        assert result.outputs.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(result.outputs[name], value, name)
        for rank in program.ranks:
            assert result.peak_stash_bytes[rank] == peak_stash_bytes(program, rank)
    return program


CONFIGS = [
    PipelineConfig(),
    PipelineConfig("blocking"),
    PipelineConfig("paired"),
    PipelineConfig(chunks=3),
    PipelineConfig(delay=2),
]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
@examples(20)
@given(data=st.data())
def test_any_chain_is_sound_exact_and_as_large_as_predicted(
    entry: PipelineAlgorithm, data: st.DataObject
) -> None:
    drawn = chains() if entry.name not in FOLDED else folded_chains()
    problem = data.draw(drawn.filter(lambda problem: entry.refusal(problem) is None))
    check(entry, problem, data.draw(st.sampled_from(CONFIGS)))


@examples(20)
@given(problem=meshes(), data=st.data())
def test_boundaries_between_any_meshes_and_layouts(problem: PipelineProblem, data: st.DataObject) -> None:
    entry = data.draw(st.sampled_from([entry for entry in ENTRIES if entry.refusal(problem) is None]))
    strategy = data.draw(st.sampled_from(["broadcast", "send_recv", "local_all_gather"]))
    config = replace(data.draw(st.sampled_from(CONFIGS)), strategy=strategy)
    program = check(entry, problem, config)
    assert parse(to_text(program)) == program


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_entries_refuse_in_words(entry: PipelineAlgorithm) -> None:
    problem = chain_of_ranks((0, 1, 1, 0), 2)
    refusal = entry.refusal(problem)
    if refusal is not None:
        with pytest.raises(LayoutError, match=entry.name):
            entry.program(problem, PipelineConfig())


# --- folding ---------------------------------------------------------------------------------------------------


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
    least_s = 3 * 1024 * StepTimes.of(problem, load_cluster("dgx-h100:64")).forward[0]
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
    assert most_alive(first, last) == max((b - a + 1 for a, b in alive), default=0)


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


# --- what is computed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["skipped", "doubled"])
def test_a_micro_batch_skipped_or_doubled_is_refused(change: str) -> None:
    problem = chain_of_ranks((0, 1), 3)
    schedule = OneForwardOneBackward().schedule(problem, PipelineConfig())
    extra = 0 if change == "skipped" else 2
    orders = tuple(
        tuple(action for action in order for _ in range(extra if action.micro_batch == 1 else 1))
        for order in schedule.actions
    )
    with pytest.raises(ProgramError, match=r"Y1|DW|stash"):
        validate(pipeline_program(problem, replace(schedule, actions=orders)))


@pytest.mark.parametrize("recomputes", [(), (0, 1)])
def test_full_and_divided_backwards_of_one_stage(recomputes: tuple[int, ...]) -> None:
    """What is divided once has two calls everywhere; the schedule comes back as it was, repetitions included."""
    problem = chain_of_ranks((0, 1), 4, recomputes=recomputes)
    whole, divided = (
        entry.schedule(problem, PipelineConfig(delay=1))
        for entry in (OneForwardOneBackward(), DelayedWeights())
    )
    for orders in [(divided.actions[0], whole.actions[1]), (whole.actions[0], divided.actions[1])]:
        schedule = replace(whole, actions=orders)
        program = pipeline_program(problem, schedule)
        assert validate(program).skipped == ()
        assert read_schedule(program) == schedule
    last = list(whole.actions[1])
    last[-1:] = [Action(I, 1, 3), Action(W, 1, 3)]
    mixed = replace(whole, actions=(whole.actions[0], tuple(last)))
    program = pipeline_program(problem, mixed)
    assert validate(program).skipped == ()
    assert read_schedule(program) == mixed
    twice = replace(whole, actions=tuple((*order, order[-1]) for order in whole.actions))
    assert read_schedule(pipeline_program(problem, twice)) == twice


def test_a_weight_gradient_left_out_is_refused() -> None:
    problem = chain_of_ranks((0, 1), 3)
    schedule = delayed(problem, 1)
    orders = tuple(
        tuple(action for action in order if action != Action(W, 0, 2)) for order in schedule.actions
    )
    with pytest.raises(ProgramError, match="DW0"):
        validate(pipeline_program(problem, replace(schedule, actions=orders)))


def test_a_weight_gradient_before_its_input_gradient_is_refused() -> None:
    problem = chain_of_ranks((0,), 1)
    orders = ((Action(F, 0, 0), Action(W, 0, 0), Action(I, 0, 0)),)
    with pytest.raises(LayoutError, match="waits at 0W0 for the backward of stage 0"):
        pipeline_program(problem, Schedule((0,), 1, orders))


# --- parameters ------------------------------------------------------------------------------------------------


def gathered_late(problem: PipelineProblem) -> Schedule:
    """Return 1F1B whose first stage gathers its parameters for each pass, and reduces its gradients at the end."""
    schedule = ENTRIES[1].schedule(problem, PipelineConfig())
    count = problem.micro_batches
    unshard, reshard = Action(ActionKind.UNSHARD, 0), Action(ActionKind.RESHARD, 0)
    first = schedule.actions[0]
    order = (
        unshard,
        *first[:count],
        reshard,
        unshard,
        *first[count:],
        reshard,
        Action(ActionKind.REDUCE_GRAD, 0),
    )
    return replace(schedule, actions=(order, *schedule.actions[1:]))


def test_parameters_are_gathered_freed_and_gradients_reduced_where_the_schedule_says() -> None:
    problem = mixed_meshes()
    schedule = gathered_late(problem)
    program = pipeline_program(problem, schedule)
    assert validate(program).skipped == ()
    assert read_schedule(program) == schedule
    inputs = ENTRIES[0].random_inputs(problem)
    outputs = run_numpy(program, inputs, calls=stage_functions(problem)).outputs
    for name, value in reference(problem, inputs).items():
        np.testing.assert_array_equal(outputs[name], value)
    assert len(lifetimes(program, 0)["w0_whole", 0]) == 2
    kinds = [bound.op.kind for bound in program.ops_on_rank(0)]
    assert kinds.count("all_gather") >= 2 and kinds[-1] == "reduce_scatter"


@pytest.mark.parametrize("missing", [ActionKind.UNSHARD, ActionKind.REDUCE_GRAD])
def test_parameters_that_are_freed_and_gradients_that_come_late_are_refused(missing: ActionKind) -> None:
    problem = mixed_meshes()
    schedule = gathered_late(problem)
    order = list(schedule.actions[0])
    if missing is ActionKind.UNSHARD:
        order.reverse()
        order.remove(Action(missing, 0))
        order.reverse()
        error, words = LayoutError, "0B0 .* freed"
    else:
        order.remove(Action(missing, 0))
        order.insert(-2, Action(missing, 0))
        error, words = ProgramError, "DW0"
    with pytest.raises(error, match=words):
        validate(pipeline_program(problem, replace(schedule, actions=(tuple(order), *schedule.actions[1:]))))


def test_actions_on_parameters_that_lie_whole_do_nothing() -> None:
    problem = chain_of_ranks((0, 1), 2)
    schedule = gathered_late(problem)
    program = pipeline_program(problem, schedule)
    validate(program)
    assert read_schedule(program) == schedule
    machine = Machine.of(load_cluster("dgx-h100:8"), program)
    plain = pipeline_program(problem, ENTRIES[1].schedule(problem, PipelineConfig()))
    assert simulate(program, machine).duration_s == simulate(plain, machine).duration_s


def test_an_overlap_is_its_parts_in_order() -> None:
    problem = chain_of_ranks((0, 1), 4)
    schedule = OneForwardOneBackward().schedule(problem, PipelineConfig())
    first, last = (list(order) for order in schedule.actions)
    at = first.index(Action(F, 0, 2))
    first[at - 1 : at + 1] = [Action(ActionKind.OVERLAP, -1, parts=(first[at], first[at - 1]))]
    first[at : at + 2] = [Action(ActionKind.OVERLAP, -1, parts=(first[at + 1], first[at]))]
    changed = replace(schedule, actions=(tuple(first), tuple(last)))
    assert "(0F2;0B0)OVERLAP_F_B" in map(str, first) and "(0F3;0B1)OVERLAP_F_B" in map(str, first)
    program = pipeline_program(problem, changed)
    validate(program)
    assert read_schedule(program) == changed


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
    parameters, batch, slots = 2 * 4 * 4, 4 * 4, 2 * 4
    at_last_forward = 3 * slots + 2 * 8  # the first slot of what it sends is not needed any more
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
@given(st.integers(2, 5), st.integers(1, 12), st.floats(0, 3))
def test_the_least_delay_is_the_first_that_covers(stages: int, count: int, transfer_s: float) -> None:
    problem = chain_of_ranks(range(stages), count)
    edges = tuple(((edge.source, edge.target), transfer_s) for edge in problem.edges)
    times = StepTimes((1.0,) * stages, (1.0,) * stages, (1.0,) * stages, edges)
    chosen = least_delay(problem, times)
    taken = [step_s(problem, delayed(problem, delay), times) for delay in range(stages + 1)]
    assert taken[chosen] <= min(taken) * 1.01
    bound = step_s(problem, delayed(problem, 0), times.without_transfers())
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
    modelled = step_s(problem, entry.schedule(problem, PipelineConfig()), StepTimes.of(problem, cluster))
    assert modelled == pytest.approx(simulated, rel=0.02)


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
    least = least_delay(problem, StepTimes.of(problem, cluster))
    delays = [config.delay for config in DelayedWeights().candidates(problem, cluster)]
    assert delays[0] == least and {least, least + 1} <= set(delays)


# --- problems --------------------------------------------------------------------------------------------------


def test_problems_that_do_not_fit_are_refused() -> None:
    problem = mixed_meshes()
    edge = problem.edges[0]
    for changes, words in [
        ({"micro_batches": 0}, "at least one micro-batch"),
        ({"rows": 3}, "do not divide 3 rows"),
        ({"edges": (replace(edge, source=1, target=0),)}, "leads to a later stage"),
        ({"edges": (edge, edge)}, "two edges join the same stages"),
        ({"edges": (replace(edge, source_placements=(Replicate(), Replicate())),)}, "splits the rows"),
        ({"edges": (replace(edge, shape=(3,)),)}, "do not divide dim 1"),
        ({"stages": (replace(problem.stages[0], parameters=3), *problem.stages[1:])}, "sharded evenly"),
        ({"stages": ()}, "at least one stage"),
    ]:
        with pytest.raises(LayoutError, match=words):
            replace(problem, **changes)


# --- on ranks --------------------------------------------------------------------------------------------------


MAIN_CASES = [
    ("chain", "1f1b", "overlapped"),
    ("chain", "eager-1f1b", "signals"),
    ("u-shaped", "eager-1f1b-delayed", "overlapped"),
]
MORE_CASES = [
    ("chain", "gpipe", "blocking"),
    ("u-shaped", "eager-1f1b", "overlapped"),
    ("u-shaped", "1f1b", "paired"),
    ("interleaved", "interleaved-1f1b", "overlapped"),
    ("interleaved", "gpipe", "overlapped"),
]
MESH_CASES = [("mixed meshes", entry.name, "overlapped") for entry in ENTRIES if entry.name not in FOLDED]


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        (4, MAIN_CASES),
        pytest.param(4, MORE_CASES, marks=pytest.mark.slow),
        pytest.param(10, MESH_CASES, marks=pytest.mark.slow),
    ],
)
def test_pipelines_on_ranks_are_exact_and_as_large_as_predicted(
    num_ranks: int, cases: list[tuple[str, str, str]]
) -> None:
    pytest.importorskip("torch")
    from pipeline_ranks import PROBLEMS

    from meshweave.execute.ranks.launch import launch

    env = {"PYTHONPATH": str(Path(__file__).parent)}
    by_rank = launch("pipeline_ranks:run", num_ranks, {"cases": cases}, timeout_s=300.0, env=env)
    for number, (case, name, transfers) in enumerate(cases):
        program = algorithm(name).program(PROBLEMS[case](), PipelineConfig(transfers))  # type: ignore[arg-type]
        for rank in range(num_ranks):
            wrong, peak = by_rank[rank][number]
            assert wrong == [], (case, name, rank)
            assert peak == peak_stash_bytes(program, rank), (case, name, rank)


def test_calls_name_their_parts() -> None:
    program = DelayedWeights().program(chain_of_ranks((0, 1), 3, recomputes=(0,)), PipelineConfig(delay=1))
    parts = {op.part for op in program.ops() if isinstance(op, Call)}
    assert parts == {"forward", "recompute", "input_grad", "weight_grad"}


def test_what_ranks_hold_in_common_crosses_between_hosts_once() -> None:
    """Stages of two data-parallel and two operator-parallel chips on hosts with one NIC each."""
    cluster = load_cluster("p3.8xlarge")
    meshes = [Mesh.of(f"host{n}", (2, 2), ("data", "operator"), 4 * n) for n in range(2)]
    stages = tuple(small_stage(mesh, 4, data_axes=("data",)) for mesh in meshes)
    problem = PipelineProblem(stages, (Edge(0, 1, (32,)),), 2, 4)
    carried = {}
    for network in (None, HostTopology.of(cluster)):
        program = OneForwardOneBackward().program(problem, PipelineConfig(network=network))
        validate(program)
        links = simulate(program, Machine.of(cluster, program)).links
        carried[network is None] = sum(use.carried_bytes for use in links if use.link[0] == "nic-out")
    once = 2 * problem.micro_batches * problem.edge_bytes(problem.edges[0])
    assert carried[True] == 2 * once
    assert once <= carried[False] <= 1.02 * once  # and tokens that keep messages in order
