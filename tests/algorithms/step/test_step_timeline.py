"""When the parts of a step run: they end with the step, and lanes do one thing at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshweave as mw
from meshweave.algorithms.step import (
    StepTimeline,
    layer_timeline,
    load_stack,
    stack_names,
    step_timeline,
)
from meshweave.algorithms.step.block_time import layer_block
from meshweave.algorithms.step.stack_runs import StackRuns
from meshweave.algorithms.step.stacks import IDEAL
from meshweave.algorithms.step.timeline import MAX_SPANS
from meshweave.tune.step_search.curves import step_curves
from sampling import examples

MODEL = mw.Transformer("made up", 16, 2048, 16, 16, 128, 8192, 51200, False, "made up")
CLUSTERS = [mw.load_cluster(name) for name in ("dgx-h100:16", "tpu-v4-pod:16")]


@st.composite
def steps(draw: st.DrawFn) -> mw.algorithms.Step:
    """Draw a step on 16 chips with any ZeRO level, schedule and recomputation."""
    tensor, pp = draw(st.sampled_from([1, 2, (2, 2)])), draw(st.sampled_from([1, 2, 4]))
    schedule, virtual = draw(
        st.sampled_from([("1f1b", 1), ("1f1b", 2), ("zb-h1", 1), ("zbv", 2), ("gpipe", 1)])
    )
    return mw.step(
        MODEL,
        draw(st.sampled_from(CLUSTERS)),
        batch=16 * draw(st.sampled_from([4, 8])),
        sequence=1024,
        tp=tensor,
        pp=pp,
        strategy="megatron_sp" if isinstance(tensor, int) else "meshslice_block",
        zero=draw(st.integers(0, 3)),
        schedule=schedule,
        vp=virtual if pp > 1 else 1,
        recompute=draw(st.sampled_from(["none", "full"])),
        stack=replace(load_stack(draw(st.sampled_from([IDEAL, *stack_names()]))), runs=StackRuns()),
    )


def check_lanes(timeline: StepTimeline) -> None:
    """Spans are inside of the timeline, and those that compute do not overlap."""
    for lane in timeline.lanes:
        free_s = 0.0
        for span in lane.spans:
            assert 0 <= span.begin_s <= span.end_s <= timeline.duration_s * (1 + 1e-9), span
            if lane.name == "computing":
                assert span.begin_s >= free_s - 1e-9, span
                free_s = span.end_s


@examples(30)
@given(steps())
def test_a_timeline_ends_with_its_step(step: mw.algorithms.Step) -> None:
    timeline = step_timeline(step)
    assert timeline.duration_s == pytest.approx(step.time_s, rel=2e-3)
    assert max(span.end_s for lane in timeline.lanes for span in lane.spans) == pytest.approx(
        timeline.duration_s
    )
    check_lanes(timeline)
    forward = [span for lane in timeline.lanes for span in lane.spans if span.kind == "forward"]
    assert len(forward) == step.num_micro_batches * step.parallelism.num_stages


@examples(10)
@given(steps())
def test_the_tasks_of_a_layer_take_as_long_as_it(step: mw.algorithms.Step) -> None:
    timeline = layer_timeline(step)
    assert timeline is not None
    assert timeline.duration_s == pytest.approx(
        layer_block(step.problem, step.parallelism).whole.part.total_s
    )
    check_lanes(timeline)
    busy_s = sum(span.end_s - span.begin_s for span in timeline.lanes[0].spans)
    assert busy_s <= timeline.duration_s * (1 + 1e-9)


def test_a_long_pipeline_shows_some_ranks_and_micro_batches_and_says_so() -> None:
    model = mw.Transformer("deep", 32, 512, 8, 8, 64, 2048, 1000, False, "made up")
    step = mw.step(model, "dgx-h100:32", batch=4096, sequence=128, pp=32, stack="ideal")
    timeline = step_timeline(step)
    assert sum(len(lane.spans) for lane in timeline.lanes) <= MAX_SPANS
    assert "micro-batches on" in timeline.remark and "of 32 pipeline ranks" in timeline.remark
    assert timeline.lanes[0].group == "pipeline rank 0"


def test_curves_pass_through_the_plan() -> None:
    step = mw.step(MODEL, "dgx-h100:16", batch=32, sequence=1024, tp=2, pp=2, stack="ideal")
    seen: list[tuple[int, int]] = []
    curves = step_curves(
        step.problem, [step.parallelism], 10**9, lambda done, total: seen.append((done, total))
    )
    assert [curve.name for curve in curves] == ["chips", "batch", "links"]
    assert seen[-1][0] == seen[-1][1] == len(seen)
    for curve in curves:
        (line,) = curve.lines
        (here,) = [point for point in line if point.x == curve.here]
        assert here.step_s == step.time_s and not here.fits
        assert [point.x for point in line] == sorted({point.x for point in line}) and len(line) > 3
    chips, batch, links = (curve.lines[0] for curve in curves)
    for line, grows in ((chips, False), (batch, True), (links, False)):
        times = [point.step_s for point in line]
        assert times == sorted(times, reverse=not grows)
