"""Pipelines of any shape, through the contract: sound, exact, and with the memory that is predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mixed_problem import mixed_meshes
from pipeline_problems import CONFIGS, FOLDED, chains, check, folded_chains, meshes
from schedule_reader import read_schedule

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
)
from meshweave.algorithms.pipeline.delayed import DelayedWeights, delayed
from meshweave.algorithms.pipeline.examples import chain_of_ranks, small_stage
from meshweave.algorithms.pipeline.functions import reference, stage_functions
from meshweave.algorithms.table import algorithm
from meshweave.base.errors import LayoutError, ProgramError
from meshweave.cost.fabric import HostTopology
from meshweave.cost.machine import Machine
from meshweave.describe.layout import Replicate, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import load_cluster
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.lifetimes import lifetimes, peak_stash_bytes
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program.ops import Call
from meshweave.ir.program.parse import parse
from meshweave.ir.program.text import to_text
from meshweave.simulate import simulate
from sampling import examples

F, B, I, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD  # noqa: E741


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


def test_parameters_that_are_gathered_at_the_begin_and_freed_are_refused() -> None:
    problem = mixed_meshes()
    schedule = gathered_late(problem)
    order = tuple(action for action in schedule.actions[0] if action.kind is not ActionKind.UNSHARD)
    with pytest.raises(LayoutError, match=r"0B0 .* freed"):
        pipeline_program(problem, replace(schedule, actions=(order, *schedule.actions[1:])))


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
    first, second = (Mesh.of(f"p{rank}", (2, 2), ("a", "b"), 4 * rank) for rank in range(2))
    with pytest.raises(
        LayoutError, match=r"on mesh p0, with rows over data axes \('a',\) and \(\); give both"
    ):
        PipelineProblem.chain((small_stage(first, 2, data_axes=("a",)), small_stage(first, 2)), 1, 2)
    stages = small_stage(first, 2), small_stage(second, 2)
    with pytest.raises(LayoutError, match="axis b: 4 ranks do not divide dim 1"):
        PipelineProblem(stages, (Edge(0, 1, (2,), (Shard(1), Shard(1))),), 1, 2)


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
