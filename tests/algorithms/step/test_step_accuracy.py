"""The closed forms of a step against its program, for drawn models, clusters and candidates."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import meshweave as mw
from meshweave.algorithms.contract import is_accurate
from meshweave.algorithms.step import SoftwareStack, Step, StepProblem, least_memory, memory_of, step_of
from meshweave.algorithms.step.algorithm import TRAINING_STEP
from meshweave.algorithms.step.program_memory import program_memory
from meshweave.algorithms.table import SCHEDULES
from meshweave.base.errors import UnsupportedError
from meshweave.describe.machine.cluster import load_cluster
from meshweave.ir.analysis.dataflow import analyse, untimed_order
from meshweave.ir.analysis.lifetimes import lifetimes, peak_bytes
from meshweave.ir.program import Program
from meshweave.ir.program.ops import WRITE, Call
from plain_simulator.reference import simulate
from sampling import examples


@st.composite
def problems(draw: st.DrawFn) -> StepProblem:
    """Draw a model of a few layers, and four or eight chips of a torus or of hosts."""
    heads, width = draw(st.sampled_from([4, 8])), draw(st.sampled_from([64, 128, 256]))
    model = mw.Transformer(
        "drawn",
        draw(st.sampled_from([2, 4, 6])),
        heads * width,
        heads,
        draw(st.sampled_from([heads, heads // 2])),
        width,
        draw(st.sampled_from([2, 4])) * heads * width,
        draw(st.sampled_from([2048, 32000, 128256])),
        draw(st.booleans()),
        "made up",
        tied_embeddings=False,
    )
    cluster = load_cluster(
        f"{draw(st.sampled_from(['tpu-v4-pod', 'dgx-a100', 'dgx-h100']))}:{draw(st.sampled_from([4, 8]))}"
    )
    stack = SoftwareStack(overlap=draw(st.sampled_from([0, 1])), regathers=draw(st.booleans()))
    batch, sequence = draw(st.sampled_from([8, 16, 32])), draw(st.sampled_from([512, 2048]))
    return StepProblem(model, cluster, batch, sequence, stack=stack)


@st.composite
def drawn_steps(draw: st.DrawFn) -> Step:
    """Draw any candidate of a problem that has a program."""
    problem = draw(problems())
    candidates = list(TRAINING_STEP.candidates(problem))
    assume(candidates)
    step = step_of(problem, candidates[draw(st.integers(0, 10**6)) % len(candidates)])
    try:
        program_memory(step.stages)
    except UnsupportedError:
        assume(False)
    return step


@examples(8)
@given(drawn_steps())
def test_the_memory_of_a_step_is_within_its_accuracy_on_all_pipeline_ranks(step: Step) -> None:
    p, program = step.parallelism, TRAINING_STEP.program(step.problem, step.parallelism)
    for stage, claimed in enumerate(program_memory(step.stages)):
        rank = stage * p.stride("pipeline")
        assert TRAINING_STEP.memory_accuracy is not None
        assert is_accurate(TRAINING_STEP.memory_accuracy, claimed, peak_bytes(program, rank))
        assert TRAINING_STEP.peak_bytes(step.problem, p, rank) == claimed


@examples(15)
@given(drawn_steps())
def test_plans_choose_by_what_the_program_holds(step: Step) -> None:
    """Memory is that of the program and what is outside of it; what a search prunes by is no more."""
    for inside, memory in zip(program_memory(step.stages), step.memory.ranks, strict=True):
        outside = memory.optimizer + memory.fragmentation + memory.context + memory.communication
        of_program = memory.total - outside
        assert min(vars(memory).values()) >= 0
        assert of_program == inside or step.problem.has_dropout  # masks are added, which no program has
    assert step.memory == memory_of(step.problem, step.parallelism)
    assert least_memory(step.problem, step.parallelism).total <= step.memory.total


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_memory_of_each_schedule_is_counted(schedule: str) -> None:
    """Of the whole table: also of one that splits some backward parts of a stage and not others."""
    model = mw.Transformer("tiny", 8, 64, 4, 4, 16, 128, 4096, False, "made up", tied_embeddings=False)
    virtual = next(vp for vp in (1, 2) if SCHEDULES[schedule].takes(2, vp, 8))
    step = mw.step(model, "dgx-a100:2", 8, 64, stack="ideal", pp=2, vp=virtual, schedule=schedule)
    program = TRAINING_STEP.program(step.problem, step.parallelism)
    assert TRAINING_STEP.memory_accuracy is not None
    for stage, claimed in enumerate(program_memory(step.stages)):
        assert is_accurate(TRAINING_STEP.memory_accuracy, claimed, peak_bytes(program, stage))


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("options", [{"cp": 2, "tp": 2}, {"dp": 4}, {"dp": 2, "cp": 2}], ids=str)
def test_buckets_that_are_written_in_runs_are_counted(share: float, options: dict[str, int]) -> None:
    """Where a share of collectives runs beside the layers, buckets are gathered and reduced in two runs."""
    model = mw.Transformer("tiny", 6, 64, 4, 4, 16, 128, 4096, False, "made up", tied_embeddings=False)
    stack = SoftwareStack(overlap=share, regathers=True)
    step = mw.step(model, "dgx-a100:4", 8, 64, stack=stack, zero=3, **options)  # type: ignore[arg-type]
    program = TRAINING_STEP.program(step.problem, step.parallelism)
    (claimed,) = program_memory(step.stages)
    assert 0.95 <= claimed / peak_bytes(program, 0) <= 1.05


@examples(8)
@given(drawn_steps())
def test_the_time_of_a_step_is_within_its_accuracy(step: Step) -> None:
    problem, p = step.problem, step.parallelism
    program, machine = TRAINING_STEP.program(problem, p), TRAINING_STEP.machine(problem, p, problem.cluster)
    simulated = simulate(program, machine, contention=False).duration_s + TRAINING_STEP.outside_s(problem, p)
    assert is_accurate(TRAINING_STEP.estimate_accuracy, step.time_s, simulated), (step.time_s, simulated)


def test_buckets_of_layers_are_gone_when_a_large_table_is_reduced() -> None:
    """With one micro-batch nothing takes turns in them again."""
    model = mw.Transformer("wide", 6, 64, 4, 4, 16, 256, 16384, False, "made up", tied_embeddings=False)
    step = mw.step(model, "dgx-a100:4", 4, 64, stack=SoftwareStack(), zero=3, dp=2, pp=2, micro_batch=2)
    program = TRAINING_STEP.program(step.problem, step.parallelism)
    assert 0.95 <= program_memory(step.stages)[0] / peak_bytes(program, 0) <= 1.05


def require_views_hold(program: Program, seed: int | None) -> int:
    """Raise unless what calls write in place is read only while it is there; return how often it is.

    Matrices are read while the bucket that they lie in has the weights of their layer.
    """
    flow, reads = analyse(program), 0
    content: dict[tuple[int, str, int], dict[tuple[int, int], object]] = {}
    lies_in: dict[tuple[int, str, int], tuple[tuple[int, str, int], tuple[int, int], object]] = {}
    for node in (node for event in untimed_order(flow, seed) for node in event):
        op, rank = flow.bound_op(node).op, node[0]
        for mode, view in op.accesses():
            key = rank, view.buffer, view.slot
            if mode != WRITE and key in lies_in:
                bucket, run, wanted = lies_in[key]
                assert content[bucket].get(run) == wanted, f"{op}: another layer is in {bucket}"
                reads += 1
        if isinstance(op, Call) and op.part == "in_place" and op.fn.startswith("unpack"):
            (bucket_view,) = op.ins
            bucket = rank, bucket_view.buffer, bucket_view.slot
            (run,) = bucket_view.selectors
            place = run.start, run.stop
            for out in op.outs:
                lies_in[rank, out.buffer, out.slot] = bucket, place, content.setdefault(bucket, {}).get(place)
            continue
        for mode, view in op.accesses():
            if mode == WRITE and len(view.selectors) == 1:
                held, (run,) = content.setdefault((rank, view.buffer, view.slot), {}), view.selectors
                for start, stop in [each for each in held if each[0] < run.stop and run.start < each[1]]:
                    del held[start, stop]
                sources = [str(read) for kind, read in op.accesses() if kind != WRITE]
                held[run.start, run.stop] = op.kind, *sources
    return reads


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize(
    "options", [{"zero": 3}, {"zero": 2}, {"zero": 3, "tp": 2, "recompute": "full"}], ids=str
)
def test_matrices_are_read_while_their_bucket_has_their_layer(
    options: dict[str, object], seed: int | None
) -> None:
    """In any legal order: a lane that gathers ahead waits for the layer whose weights it replaces."""
    model = mw.Transformer("tiny", 6, 8, 4, 4, 2, 16, 12, False, "made up", tied_embeddings=False)
    step = mw.step(model, "dgx-a100:4", 8, 4, stack=SoftwareStack(regathers=True), **options)  # type: ignore[arg-type]
    assert require_views_hold(TRAINING_STEP.program(step.problem, step.parallelism), seed) > 100


def test_an_op_that_writes_all_of_a_slot_begins_another_life() -> None:
    """Of a step on one chip: the gradient of the logits is there once a micro-batch, and no longer."""
    model = mw.Transformer("tiny", 2, 8, 4, 4, 2, 16, 12, False, "made up", tied_embeddings=False)
    step = mw.step(model, "dgx-a100:1", 4, 4)
    program = TRAINING_STEP.program(step.problem, step.parallelism)
    lives = lifetimes(program, 0)["s0_head_logits", 0]
    assert len(lives) == 4 and all(first < last for first, last in lives)
    assert all(before[1] < after[0] for before, after in pairwise(lives))
