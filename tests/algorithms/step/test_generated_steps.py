"""Generated steps: the program has the collectives that the closed form prices, and takes about as long."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshweave as mw
from meshweave.algorithms.step import SoftwareStack, Step, simulate_step, step_program
from meshweave.algorithms.step.block_program import write_step
from meshweave.base.errors import LayoutError
from meshweave.ir.program.expressions import evaluate
from meshweave.ir.program.ops import AllGather, AllReduce, ReduceScatter
from sampling import examples

GPT = mw.Transformer("gpt", 8, 2048, 16, 16, 128, 8192, 51200, False, "made up", tied_embeddings=False)
LLAMA = mw.Transformer("llama", 16, 4096, 32, 8, 128, 14336, 128256, True, "made up", tied_embeddings=False)
MIXED = replace(LLAMA, num_layers=12, architecture=replace(LLAMA.architecture, window=512, windowed_layers=8))
SCHEDULES = [("1f1b", 1), ("1f1b", 2), ("gpipe", 1), ("zb-h1", 1), ("zbv", 2), ("dualpipev", 2)]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Draw a step on 16 chips of hosts."""
    schedule, stages = draw(st.sampled_from(SCHEDULES))
    tensor, pipeline, context = (draw(st.sampled_from(sizes)) for sizes in ((1, 2, 4), (1, 2), (1, 1, 2)))
    data = 16 // (tensor * pipeline * context)
    options: dict[str, Any] = {
        "tp": tensor,
        "pp": pipeline,
        "cp": context,
        "vp": stages if pipeline > 1 else 1,
        "schedule": schedule if pipeline > 1 else "1f1b",
        "zero": draw(st.integers(0, 3)),
        "strategy": draw(st.sampled_from(["megatron", "megatron_sp"])),
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "stack": SoftwareStack(
            overlap=draw(st.sampled_from([0, 1])), regathers=draw(st.booleans()), launch_s=2e-6
        ),
    }
    try:
        model = draw(st.sampled_from([GPT, LLAMA, MIXED]))
        batch = data * draw(st.sampled_from([4, 8]))
        return mw.step(model, "dgx-a100:16", batch=batch, sequence=2048, **options)
    except LayoutError:
        return mw.step(GPT, "dgx-a100:16", batch=16, sequence=2048, zero=options["zero"], stack="ideal")


@pytest.mark.slow
@examples(10)
@given(steps())
def test_the_simulation_of_any_step_is_near_to_its_estimate(step: Step) -> None:
    assert step.time_s == pytest.approx(simulate_step(step).time_s, rel=TOLERANCE)


TOLERANCE = 0.08
"""Traffic of several kinds shares links in a simulation; the mean is held below."""


def test_the_mean_error_of_sharded_and_split_steps_is_small() -> None:
    errors = []
    for options in (
        {"tp": 4, "zero": 2},
        {"zero": 3},
        {"tp": 2, "pp": 2, "zero": 3},
        {"tp": 4, "pp": 2, "schedule": "zb-h1"},
        {"tp": 2, "pp": 2, "vp": 2, "schedule": "zbv", "recompute": "full"},
        {"tp": 2, "pp": 2, "vp": 2, "schedule": "dualpipev"},
    ):
        step = mw.step(GPT, "dgx-a100:16", batch=32, sequence=2048, **options, stack="ideal")
        errors.append(abs(step.time_s / simulate_step(step).time_s - 1))
    assert sum(errors) / len(errors) < 0.02


@pytest.mark.parametrize(
    ("schedule", "pipeline", "stages"),
    [("1f1b", 4, 1), ("1f1b", 2, 2), ("1f1b", 4, 4), ("gpipe", 4, 1), ("zbv", 4, 2)],
)
def test_stages_that_wait_for_their_sends_wait_for_no_receiver(
    schedule: str, pipeline: int, stages: int
) -> None:
    options: Any = {"pp": pipeline, "vp": stages, "schedule": schedule}
    stack = SoftwareStack(blocks_transfers=True)
    step = mw.step(LLAMA, f"dgx-a100:{pipeline}", batch=16, sequence=2048, **options, stack=stack)
    assert step.time_s == pytest.approx(simulate_step(step).time_s, rel=0.005)
    blind = mw.step(LLAMA, f"dgx-a100:{pipeline}", batch=16, sequence=2048, **options, stack="ideal")
    assert simulate_step(step).time_s > simulate_step(blind).time_s


@pytest.mark.parametrize(
    ("cluster", "words", "schedule", "zero"),
    [
        ("dgx-a100:8", None, "dualpipev", 2),  # an overlap passes on what its first part makes
        ("dgx-a100:8", 51200, "dualpipev", 3),  # head and embedding hide a layer's collectives
        ("dgx-a100:8", 51200, "1f1b", 3),
        ("tpu-v4-pod:16", 51200, "zb-h1", 2),  # gradients of weights alone hide reductions
        ("tpu-v4-pod:16", None, "zb-h1", 2),
    ],
)
def test_collectives_are_hidden_by_what_runs_beside_them(
    cluster: str, words: int | None, schedule: str, zero: int
) -> None:
    stages = 2 if schedule == "dualpipev" else 1
    options: Any = {"pp": 4, "vp": stages, "schedule": schedule, "zero": zero, "micro_batch": 1}
    model = replace(GPT, vocab_size=words)
    step = mw.step(model, cluster, batch=64, sequence=2048, **options, stack="ideal")
    assert step.time_s == pytest.approx(simulate_step(step).time_s, rel=0.01)


@pytest.mark.parametrize(
    ("schedule", "pipeline", "stages", "inside", "across"),
    [("1f1b", 16, 1, 14, 1), ("interleaved-1f1b", 8, 2, 12, 3), ("zbv", 8, 2, 12, 2)],
)
def test_messages_take_the_links_between_their_stages(
    schedule: str, pipeline: int, stages: int, inside: int, across: int
) -> None:
    """Of the messages along pipelines on two hosts few leave a host, and those to the own rank take no time."""
    options: Any = {"pp": pipeline, "vp": stages, "schedule": schedule, "micro_batch": 1}
    step = mw.step(LLAMA, "dgx-a100:16", batch=32, sequence=2048, **options, stack="ideal")
    sent = step.stages.transfers_s
    assert (sent.count(min(filter(None, sent))), sent.count(max(sent))) == (inside, across)
    assert sent.count(0.0) == 15 - inside - across
    assert step.time_s == pytest.approx(simulate_step(step).time_s, rel=0.01)


ACROSS_HOSTS = ("tensor", "context", "pipeline", "data")


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("stages", [2, 4])
def test_collectives_of_all_stages_of_a_rank_run_one_after_the_other(stages: int, zero: int) -> None:
    options: Any = {"pp": 2, "vp": stages, "order": ACROSS_HOSTS, "zero": zero}
    model, stack = replace(LLAMA, vocab_size=None), SoftwareStack()
    step = mw.step(model, "dgx-a100:16", batch=32, sequence=2048, micro_batch=1, **options, stack=stack)
    assert step.time_s == pytest.approx(simulate_step(step).time_s, rel=0.02)
    of, (first, last) = step.stages, step.stages.stages_of(0)[:: stages - 1]
    ends_s = [-1e6 for _ in of.times]
    ends_s[first] = 0.0
    alone_s, ends_s[last] = of.reductions_s(0, ends_s), 0.0
    queued_s = of.layers[last] * of.times[last].data_parallel.reduce_s
    assert of.reductions_s(0, ends_s) == pytest.approx(alone_s + queued_s)


@pytest.mark.parametrize("zero", [2, 3])
def test_gathers_that_a_stack_waits_for_are_hidden_by_nothing(zero: int) -> None:
    stack = SoftwareStack(waits_for_gathers=True, regathers=True)
    step = mw.step(GPT, "dgx-a100:16", batch=32, sequence=2048, zero=zero, micro_batch=1, stack=stack)
    assert step.time_s == pytest.approx(simulate_step(step).time_s, rel=0.03)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-1p"])
def test_one_rank_splits_no_backward_part(schedule: str) -> None:
    """It has no bubble to fill, and reductions run beside whole backward parts."""
    options: Any = {"zero": 2, "micro_batch": 1, "stack": SoftwareStack(overlap=1)}
    model = replace(GPT, num_layers=4)
    split, whole = (
        mw.step(model, "dgx-a100:16", batch=64, sequence=1024, **options, schedule=name)
        for name in (schedule, "1f1b")
    )
    assert split.time_s == whole.time_s
    assert simulate_step(split).time_s == simulate_step(whole).time_s


@pytest.mark.parametrize("zero", [2, 3])
def test_replicas_of_sharded_steps_are_folded(zero: int) -> None:
    step = mw.step(
        replace(GPT, num_layers=3), "dgx-a100:32", batch=16, sequence=256, tp=8, zero=zero, stack="ideal"
    )
    folded, every = simulate_step(step), simulate_step(step, folds=False)
    assert folded.fold == 4
    assert folded.simulation.duration_s == every.simulation.duration_s


def moved_elements(step: Step) -> Counter[tuple[str, str]]:
    """Return the elements of whole buckets in collectives of replicas of rank 0, by kind and axis."""
    program, total = step_program(step).expanded, Counter[tuple[str, str]]()
    for op, env in program.unbound_ops_on_rank(0):
        if not isinstance(op, (AllGather, ReduceScatter, AllReduce)) or ".replica" not in str(op.over):
            continue
        (run,) = (op.out if isinstance(op, AllGather) else op.src).selectors
        size = evaluate(run.stop, env) - evaluate(run.start, env)
        total[op.kind, str(op.over).rpartition(".")[2]] += size
    return total


@pytest.mark.parametrize("overlap", [0, 0.5, 1])
@pytest.mark.parametrize(
    ("zero", "regathers", "gathers", "reductions"),
    [(0, False, 0, 1), (1, False, 1, 1), (2, False, 1, 4), (2, True, 4, 4), (3, False, 8, 4)],
)
def test_buckets_are_moved_as_often_as_zero_says(
    overlap: float, zero: int, regathers: bool, gathers: int, reductions: int
) -> None:
    """Of 4 micro-batches; a table is gathered once for each."""
    stack = SoftwareStack(overlap=overlap, regathers=regathers)
    step = mw.step(
        replace(GPT, num_layers=4), "dgx-a100:8", batch=16, sequence=64, tp=2, zero=zero, stack=stack
    )
    units = write_step(step.stages).units
    tables = units["embedding"].elements + units["head"].elements
    layers = 4 * units["layer"].elements
    moved = moved_elements(step)
    scattered = "reduce_scatter" if zero else "all_reduce"
    assert moved[scattered, "replica0"] == reductions * (layers + tables)
    of_tables = gathers // 2 if zero == 3 else gathers
    assert moved["all_gather", "replica0"] == gathers * layers + of_tables * tables
