"""What a layer takes: attention in a ring as without one, kept operands, and collectives of replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshweave.algorithms.step import Parallelism, StepProblem, simulate_step, step_of
from meshweave.algorithms.step.block_time import layer_block
from meshweave.algorithms.step.compose import update_times_s
from meshweave.algorithms.step.data_parallel import data_parallel_time
from meshweave.algorithms.step.framework_memory import layer_activations
from meshweave.algorithms.step.layers import layer_time
from meshweave.algorithms.step.stacks import load_stack
from meshweave.algorithms.step.stages import stages_of
from meshweave.algorithms.step.timeline import step_timeline
from meshweave.base.errors import UnsupportedError
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.model import load_model


def problem_of(num_chips: int, sequence: int = 32768) -> StepProblem:
    """Return steps of a catalog model on a catalog cluster."""
    cluster = load_cluster("dgx-h100").with_chips(num_chips)
    return StepProblem(load_model("llama-3-8b"), cluster, num_chips, sequence, overlap="layers")


@pytest.mark.parametrize("context", [2, 4])
def test_attention_in_a_ring_takes_its_share_of_attention_without_one(context: int) -> None:
    # its sums so far are in fp32, which once made it attention of fp32 tensors
    problem = problem_of(4)
    alone = layer_time(problem, Parallelism(data=4))
    ring = layer_time(problem, Parallelism(data=4 // context, context=context))
    for part in ("forward", "backward"):
        whole_s, share_s = getattr(alone, part).compute_s, getattr(ring, part).compute_s
        assert whole_s / context <= share_s * 1.01 and share_s <= 1.25 * whole_s / context, part


def test_sliced_weights_take_an_operation_for_each_tensor_and_replica() -> None:
    problem = problem_of(16, 4096)
    nanotron = replace(load_stack("nanotron"), sliced_weights=0, launch_s=1e-5)
    whole = replace(problem, stack=nanotron)
    sliced = replace(problem, stack=replace(nanotron, sliced_weights=6))
    for shards in (8, 16):
        p = Parallelism(data=shards, tensor=16 // shards, zero=1)
        added = (
            data_parallel_time(sliced, p).gather_s - data_parallel_time(whole, p).gather_s,
            data_parallel_time(sliced, p).table_gather_s - data_parallel_time(whole, p).table_gather_s,
        )
        assert added == pytest.approx((6 * shards * nanotron.launch_s, shards * nanotron.launch_s))
        assert data_parallel_time(sliced, p).reduce_s == data_parallel_time(whole, p).reduce_s
    for none in (Parallelism(data=16), Parallelism(data=1, tensor=16, zero=1)):
        assert data_parallel_time(sliced, none) == data_parallel_time(whole, none)


def with_stack(problem: StepProblem, **changes: object) -> StepProblem:
    """Return a problem with the stack of nanotron, changed."""
    return replace(problem, stack=replace(load_stack("nanotron"), **changes))  # type: ignore[arg-type]


def test_gradients_that_are_summed_after_the_backward_part_are_hidden_by_nothing() -> None:
    problem = problem_of(16, 4096)
    after, beside = (with_stack(problem, sums_after=each, sliced_weights=0) for each in (True, False))
    p = Parallelism(data=16, zero=1)
    without = replace(p, zero=0)
    summed = data_parallel_time(after, p)
    assert summed.reduce_s == data_parallel_time(after, without).reduce_s
    assert summed.reduce_s > data_parallel_time(beside, p).reduce_s
    num_layers = problem.model.num_layers
    added_s = stages_of(after, p).reductions_s(0, [1.0])
    assert added_s == pytest.approx(num_layers * summed.reduce_s + 2 * summed.table_s)
    assert stages_of(beside, p).reductions_s(0, [1.0]) < added_s
    of_both = (stages_of(problem, without).reductions_s(0, [1.0]) for problem in (after, beside))
    assert len(set(of_both)) == 1
    # norm, clipping and zeros of what 15 others update: 16 bytes a parameter, beside Adam's 50 of the shard
    longer = update_times_s(after, p)[0] / update_times_s(beside, p)[0]
    assert longer == pytest.approx(1 + 15 * 16 / 50, rel=0.02)
    copied = update_times_s(with_stack(problem), p)[0] / update_times_s(beside, p)[0]
    assert copied == pytest.approx(1 + 15 * (16 + 12) / 50, rel=0.02)
    spans = [span for lane in step_timeline(step_of(after, p)).lanes for span in lane.spans]
    assert {span.kind for span in spans if span.name.startswith("reduce")} == {"exposed"}


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_operands_that_are_kept_as_gathered_are_not_gathered_again(tensor: int) -> None:
    problem = problem_of(8, 4096)
    kept, again = (with_stack(problem, keeps_gathered=each) for each in (True, False))
    p = Parallelism(data=8 // tensor, tensor=tensor)
    blocks = [layer_block(each, p).whole for each in (kept, again)]
    assert [block.collectives for block in blocks] == [8, 10]
    assert blocks[0].part.tensor_s == pytest.approx(
        0.8 * blocks[1].part.tensor_s, rel=0.01
    )  # all are waited for
    assert blocks[0].part.compute_s == blocks[1].part.compute_s
    whole = 2 * 4096 * problem.model.hidden  # of 16 bits
    more = layer_activations(kept, p, "none") - layer_activations(again, p, "none")
    assert more == 2 * (whole - whole // tensor)


def test_an_update_takes_as_long_whatever_was_timed_before() -> None:
    first, second = (Parallelism(data=16, zero=zero) for zero in (1, 2))
    alone = update_times_s(with_stack(problem_of(16, 4096)), second)
    shared = with_stack(problem_of(16, 4096))
    assert update_times_s(shared, first)[0] > 2 * alone[0]
    assert update_times_s(shared, second) == alone


def test_no_program_sums_gradients_after_the_backward_part() -> None:
    with pytest.raises(UnsupportedError, match="not after them, as this stack does under ZeRO-1"):
        simulate_step(step_of(with_stack(problem_of(16, 4096)), Parallelism(data=16, zero=1)))
