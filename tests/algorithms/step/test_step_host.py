"""A step with a slow host: at least what it issues, at least what the chip computes, and never their sum."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshweave as mw
from meshweave.algorithms.step import layer_time, load_stack, simulate_step, step_timeline
from meshweave.algorithms.step.host import IssueCounts, IssuedTask, paced_ps
from meshweave.describe.machine.host import HostRates
from meshweave.tune.step_search.reasons import advice
from sampling import examples

GPT = mw.Transformer("gpt", 4, 1024, 16, 16, 64, 4096, 51200, False, "made up", tied_embeddings=False)
CLUSTER = mw.load_cluster("dgx-a100:8")
SLOW = HostRates(2e-4, 1e-4, 1e-4, 1e-3)


def step(host: HostRates | None, **options: object) -> mw.algorithms.Step:
    graphs = bool(options.pop("graphs", False))
    stack = mw.SoftwareStack(host=host, graphs=graphs)
    return mw.step(GPT, CLUSTER, 16, 512, stack=stack, **options)  # type: ignore[arg-type]


def test_a_host_that_takes_no_time_changes_nothing() -> None:
    assert step(HostRates()).time_s == step(None).time_s
    assert step(HostRates(), tp=4, pp=2).time_s == step(None, tp=4, pp=2).time_s


def test_the_figures_of_the_cluster_hold_where_the_stack_has_none() -> None:
    cluster = replace(CLUSTER, host=SLOW)
    assert mw.step(GPT, cluster, 16, 512, stack="ideal").time_s == step(SLOW).time_s
    own = mw.SoftwareStack(host=HostRates())
    assert mw.step(GPT, cluster, 16, 512, stack=own).time_s == step(None).time_s


@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"pp": 2}, {"recompute": "full"}, {"zero": 3}])
def test_less_work_takes_no_less_where_the_host_is_slow(options: dict[str, object]) -> None:
    """A micro-batch takes what its host issues, whatever the work; and the greater of both, not their sum."""
    bound, free = step(SLOW, **options), step(None, **options)
    layer = layer_time(bound.problem, bound.parallelism)
    stages = bound.parallelism.pipeline
    each_s = sum(layer.issued_s) * GPT.num_layers / stages
    issued_s = each_s * bound.num_micro_batches
    assert bound.time_s >= issued_s
    assert bound.time_s < free.time_s + issued_s + (stages - 1) * each_s + 0.01
    assert bound.host_bound > 0.5
    parts = bound.parts
    assert parts.host > 0
    assert parts.total == pytest.approx(bound.time_s, rel=1e-9)
    assert f"host-bound: {100 * bound.host_bound:.0f} % of the step" in str(bound)
    assert "host-bound" not in str(free)


def test_graphs_are_issued_at_once() -> None:
    assert step(SLOW, graphs=True).time_s < 0.5 * step(SLOW).time_s


def test_a_host_ahead_in_one_part_is_ahead_in_the_next() -> None:
    """Issuing the forward part takes longer than computing it, and both parts less: nothing is waited for."""
    free = step(None)
    layer, kernels = free.stages.layer, 10
    forward_s, both_s = layer.forward.total_s, layer.forward.total_s + layer.backward.total_s
    host = HostRates(layer_s=(forward_s + both_s) / 2)
    assert kernels and step(host).time_s == pytest.approx(free.time_s, rel=1e-9)


def test_a_host_that_waits_for_collectives_is_never_ahead() -> None:
    host = HostRates(2e-5, 0.0, 0.0, 2e-4)
    waiting, going = (step(replace(host, waits=waits), tp=4) for waits in (True, False))
    assert waiting.time_s > going.time_s
    assert step(replace(host, waits=True)).time_s == step(host).time_s  # without collectives


def test_paced_by_hand() -> None:
    """A kernel of 10, a collective of 4 that is waited for, a kernel of 10; 3 to issue each kernel."""
    tasks = [IssuedTask("kernel", 10, ()), IssuedTask("collective", 4, (0,)), IssuedTask("kernel", 10, (1,))]
    host = HostRates(kernel_s=3e-12, waits=True)
    # the last kernel begins 3 after the collective has ended; the first of the next layer is issued beside it
    assert paced_ps(tasks, IssueCounts(2), host, 0) == 10 + 4 + 3 + 10
    assert paced_ps(tasks, IssueCounts(2), host, 6) == 13 + 4 + 3 + 13


def test_a_timeline_has_a_lane_of_the_host() -> None:
    lanes = {lane.name: lane for lane in step_timeline(step(SLOW)).lanes}
    assert {span.kind for span in lanes["host"].spans} == {"issuing"}
    assert "host" not in {lane.name for lane in step_timeline(step(None)).lanes}


def test_a_plan_that_waits_for_hosts_advises_graphs() -> None:
    stack = mw.SoftwareStack(host=replace(SLOW, layer_s=0.05))
    fixed = {"tp": 1, "pp": 1, "micro_batch": 1, "zero": 0}
    plan = mw.plan(GPT, CLUSTER, batch=16, sequence=512, stack=stack, **fixed)  # type: ignore[arg-type]
    assert plan.step is not None
    assert "CUDA graphs" in advice(plan.step)
    assert "waiting for the host" in advice(plan.step)


@examples(6)
@given(
    st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (1, 2)]),
    st.sampled_from([2e-6, 5e-5, 3e-4]),
    st.booleans(),
    st.sampled_from(["none", "full"]),
)
def test_the_simulation_is_near_to_the_estimate(
    degrees: tuple[int, int], kernel_s: float, waits: bool, recompute: str
) -> None:
    tp, pp = degrees
    host = HostRates(kernel_s, kernel_s, kernel_s, 10 * kernel_s, waits)
    of = step(host, tp=tp, pp=pp, recompute=recompute)
    assert mw.simulation.simulate_step(of).time_s == pytest.approx(of.time_s, rel=0.1)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_replicas_communicate_while_the_host_issues_layers(zero: int) -> None:
    """Where the host sets the pace, more tokens leave nothing more to wait for, and never less."""
    deep, stack = replace(GPT, num_layers=16, vocab_size=1000), mw.SoftwareStack(host=HostRates(5e-5, 1e-5))
    steps = [
        mw.step(deep, "dgx-a100:32", 64, sequence, zero=zero, stack=stack) for sequence in (128, 512, 1024)
    ]
    assert all(each.host_bound > 0.5 for each in steps)
    few, more, many = (each.time_s for each in steps)
    assert few == pytest.approx(more, rel=0.01) and more <= many * (1 + 1e-9)
    for each in steps:
        assert simulate_step(each).time_s == pytest.approx(each.time_s, rel=0.02)


def test_stacks_have_hosts() -> None:
    assert load_stack("megatron-deepspeed").host is not None
