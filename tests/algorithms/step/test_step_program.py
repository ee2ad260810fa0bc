"""A step as one program: its simulation with contention is near to its estimate."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshweave as mw
from sampling import examples

GPT = mw.Transformer("gpt", 8, 2048, 16, 16, 128, 8192, 51200, False, "made up", tied_embeddings=False)
LLAMA = mw.Transformer("llama", 16, 4096, 32, 8, 128, 14336, 128256, True, "made up", tied_embeddings=False)
CLUSTERS = [mw.load_cluster(name) for name in ("dgx-a100:32", "dgx-h100:32", "dgx-a100:16", "tpu-v4-pod:16")]


@st.composite
def steps(draw: st.DrawFn) -> mw.algorithms.Step:
    """Draw a step of a kind that a program is written for."""
    cluster, model = draw(st.sampled_from(CLUSTERS)), draw(st.sampled_from([GPT, LLAMA]))
    degrees = st.tuples(*[st.sampled_from([1, 2, 4, 8])] * 2, st.sampled_from([1, 1, 2]))
    tp, pp, cp = draw(degrees.filter(lambda three: cluster.num_chips % (three[0] * three[1] * three[2]) == 0))
    zero, dp = draw(st.sampled_from([0, 0, 1])), cluster.num_chips // (tp * pp * cp)
    return mw.step(
        model,
        cluster,
        batch=dp * draw(st.sampled_from([4, 8, 16])),
        sequence=2048,
        tp=tp,
        pp=pp,
        cp=cp,
        vp=draw(st.sampled_from([1, 1, 2])) if 1 < pp < 8 else 1,
        zero=zero,
        schedule=draw(st.sampled_from(["1f1b", "1f1b", "gpipe"])),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        strategy=draw(st.sampled_from(["megatron", "megatron_sp"])),
        stack=mw.SoftwareStack(overlap=draw(st.sampled_from([0, 1]))),
    )


@examples(8)
@given(steps())
def test_the_simulation_is_near_to_the_estimate(step: mw.algorithms.Step) -> None:
    simulated = mw.simulation.simulate_step(step)
    assert step.time_s == pytest.approx(simulated.time_s, rel=0.1)


@examples(4)
@given(steps())
def test_a_fold_takes_as_long(step: mw.algorithms.Step) -> None:
    """Replicas in hosts of their own, to the picosecond."""
    folded, whole = (mw.simulation.simulate_step(step, folds=folds) for folds in (True, False))
    assert folded.simulation.duration_s == whole.simulation.duration_s
    assert len(folded.simulation.ranks) * folded.fold == len(whole.simulation.ranks)


@pytest.mark.parametrize(
    ("options", "fold"),
    [
        ({"tp": 8, "pp": 2}, 2),
        ({"tp": 8, "zero": 1}, 4),
        ({"tp": 4, "pp": 2, "zero": 1}, 2),  # two replicas share a host, and stay
        ({"tp": 4, "cp": 2}, 4),
        ({"tp": 8, "order": ("tensor", "data", "context", "pipeline")}, 4),
        ({"tp": 2, "pp": 4}, 1),  # all replicas are in one host
        ({"tp": 4, "cp": 2, "order": ("tensor", "data", "context", "pipeline")}, 1),
        ({"tp": 8, "zero": 1, "zero_group": 2}, 1),
    ],
)
def test_replicas_in_hosts_of_their_own_are_folded(options: dict[str, object], fold: int) -> None:
    step = mw.step(replace(GPT, num_layers=2), CLUSTERS[0], batch=16, sequence=256, **options, stack="ideal")
    folded, whole = mw.simulation.simulate_step(step), mw.simulation.simulate_step(step, folds=False)
    assert folded.fold == fold
    assert folded.simulation.duration_s == whole.simulation.duration_s


def test_the_mean_error_is_small() -> None:
    """Of configurations that use each degree."""
    errors = []
    for options in (
        {"tp": 2, "pp": 4},
        {"tp": 8, "pp": 2, "zero": 1},
        {"tp": 4, "cp": 2, "recompute": "full"},
        {"tp": 2, "pp": 4, "vp": 2},
        {"tp": 1, "pp": 2, "strategy": "megatron"},
    ):
        step = mw.step(GPT, CLUSTERS[0], batch=32, sequence=2048, **options, stack="ideal")
        simulated = mw.simulation.simulate_step(step)
        errors.append(abs(step.time_s / simulated.time_s - 1))
    assert statistics.mean(errors) < 0.02


def test_a_program_has_every_chip_and_is_valid() -> None:
    tiny = mw.Transformer("tiny", 4, 16, 4, 4, 4, 64, 32, False, "made up", tied_embeddings=False)
    step = mw.step(tiny, CLUSTERS[2], batch=16, sequence=4, tp=4, pp=2, stack="ideal")
    program = mw.algorithms.step_program(step)
    assert len(program.ranks) == 16
    text = mw.ir.to_text(program)
    assert all(f"{op}(" in text for op in ("include", "call", "all_reduce", "send", "recv"))
    assert mw.parse(text) == program


def test_a_program_does_not_grow_with_layers() -> None:
    sizes = []
    for layers in (8, 16):
        model = replace(GPT, num_layers=layers)
        step = mw.step(model, CLUSTERS[2], batch=16, sequence=512, tp=4, pp=2, stack="ideal")
        sizes.append(len(list(mw.algorithms.step_program(step).expanded.ops())))
    assert sizes[0] == sizes[1]


def test_2d_products_are_included_beside_data_parallelism() -> None:
    model = mw.Transformer("small", 2, 64, 8, 8, 8, 256, 128, False, "made up", tied_embeddings=False)
    cluster = mw.load_cluster("dgx-a100:8")
    step = mw.step(
        model, cluster, 8, 32, dp=2, tp=(2, 2), strategy="meshslice_block", micro_batch=2, stack="ideal"
    )
    assert mw.simulation.simulate_step(step).time_s > 0
